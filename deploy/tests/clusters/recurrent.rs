//! Models whose layers keep states, over real processes: an answer has the same tokens on whichever path its state travelled, and counters
//! prove that it took that path.

use crate::support::{self, Answer, Case, Cluster, DISAGGREGATED, Numbers, assert_same, complete, complete_all, crash, reusable};

/// A model, the size of its blocks in bf16, the number of blocks of a state, and sizes of memory in blocks.
struct Kind {
    model: &'static str,
    block_bytes: u64,
    state_blocks: u64,
    /// A memory that holds any of [`growing_cases`], but not five of them.
    few: u64,
    /// A memory that holds little of a chat beyond the blocks in use.
    chat: u64,
    /// A memory that holds the longest of [`cases`] and little more.
    one: u64,
    /// A pool that holds the blocks and states of the longest of [`cases`] and little more.
    pool: u64,
}

/// A model with short convolutions: a block has 1 KiB, and a state takes two blocks.
const SHORT_CONV: Kind = Kind {
    model: concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/lfm2"),
    block_bytes: 1024,
    state_blocks: 2,
    few: 128,
    chat: 48,
    one: 80,
    pool: 192,
};

/// A model with the delta rule: a state takes eleven blocks.
const DELTA_RULE: Kind = Kind {
    model: concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/qwen3-next"),
    block_bytes: 1536,
    state_blocks: 11,
    few: 240,
    chat: 64,
    one: 110,
    pool: 288,
};

impl Kind {
    fn start(&self, flags: &[&[&str]]) -> Cluster {
        Cluster::start_with(&[(support::MODEL_NAME, self.model)], &[&["--threads", "1"], flags.concat().as_slice()].concat())
    }

    async fn alone(&self, cases: &[Case]) -> Vec<Answer> {
        let cluster = self.start(&[&["--prefill", "0", "--kvpool", "0"]]);
        let answers = complete_all(&cluster, cases, 1).await;
        cluster.stop();
        answers
    }

    /// The memory of this many blocks, as a setting.
    fn memory(&self, blocks: u64) -> String {
        format!("{}KiB", (blocks * self.block_bytes).div_ceil(1024))
    }
}

fn case(numbers: &mut Numbers, prompt: usize, max_tokens: u32) -> Case {
    let seeded = numbers.next() % 2 == 1;
    Case {
        prompt: (0..prompt).map(|_| 3 + (numbers.next() % 500) as u32).collect(),
        seed: seeded.then(|| numbers.next() >> 12),
        max_tokens,
    }
}

/// Cases with prompt lengths around the borders of blocks and chunks.
fn cases() -> Vec<Case> {
    let mut numbers = Numbers(1);
    let lengths = [1, 5, 15, 16, 17, 32, 33, 48, 64, 65, 100, 128, 129, 256, 257, 300, 511, 513, 800, 1000];
    lengths.into_iter().map(|length| case(&mut numbers, length, 40)).collect()
}

/// Cases that together need four times the memory of a device that holds any one of them.
fn growing_cases() -> Vec<Case> {
    let mut numbers = Numbers(2);
    (0..16).map(|i| case(&mut numbers, 20 + i, 400)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_do_not_depend_on_the_way_of_a_convolution() {
    outputs_do_not_depend_on_the_way(&SHORT_CONV).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_do_not_depend_on_the_way_of_a_delta_rule() {
    outputs_do_not_depend_on_the_way(&DELTA_RULE).await;
}

async fn outputs_do_not_depend_on_the_way(kind: &Kind) {
    let (cases, growing) = (cases(), growing_cases());
    let (reference, growing_reference) = (kind.alone(&cases).await, kind.alone(&growing).await);
    let few = kind.memory(kind.few);
    for (transport, every) in [("auto", "32"), ("quic", "3")] {
        let cluster = kind.start(&[DISAGGREGATED, &["--transport", transport, "--state-every", every, "--kv-memory", &few]]);
        let cold = complete_all(&cluster, &cases, 1).await;
        assert_same(&reference, &cold, &cases, &format!("{transport}, cold"));
        for (answer, case) in cold.iter().zip(&cases) {
            assert_eq!(answer.source("prefill"), reusable(case), "a prefill worker computed all full blocks: {}", answer.usage);
        }
        let warm = complete_all(&cluster, &cases, 1).await;
        assert_same(&reference, &warm, &cases, &format!("{transport}, cached"));
        for (answer, case) in warm.iter().zip(&cases) {
            assert_eq!(answer.cached(), reusable(case), "nothing is computed twice: {}", answer.usage);
        }
        assert_same(&reference, &complete_all(&cluster, &cases, 16).await, &cases, &format!("{transport}, 16 at a time"));
        assert_same(&growing_reference, &complete_all(&cluster, &growing, 16).await, &growing, "preempted");
        let preemptions = cluster.settled_metric("tidemill_preemptions_total", &[]).await;
        assert!(preemptions > 0.0, "the device was meant to be too small");
        cluster.stop();
    }
    // Chunks do not end with blocks, and there is a state at the end of every block.
    let cluster = kind.start(&[&["--step-tokens", "64", "--sequences-max", "16", "--state-every", "1", "--prefill", "2", "--decode", "2"]]);
    for how in ["16 at a time, two workers of each role", "the same, cached"] {
        assert_same(&reference, &complete_all(&cluster, &cases, 16).await, &cases, how);
    }
    cluster.stop();
}

/// A hand-over moves only a prompt's blocks and the state at the end of the last one.
#[tokio::test(flavor = "multi_thread")]
async fn a_hand_over_moves_the_blocks_and_one_state_of_convolutions() {
    a_hand_over_moves_one_state(&SHORT_CONV).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hand_over_moves_the_blocks_and_one_state_of_delta_rules() {
    a_hand_over_moves_one_state(&DELTA_RULE).await;
}

async fn a_hand_over_moves_one_state(kind: &Kind) {
    let cluster = kind.start(&[DISAGGREGATED]);
    let case = case(&mut Numbers(3), 200, 1);
    complete(&cluster, &case).await;
    let (name, put) = ("tidemill_kv_transfer_bytes_total", ["role=\"prefill\"".to_owned(), "direction=\"put\"".to_owned()]);
    let put = cluster.settled_metric(name, &put).await as u64;
    assert_eq!(put, (reusable(&case) / 16 + kind.state_blocks) * kind.block_bytes);
    let got = cluster.metric(name, &["role=\"decode\"".to_owned(), "direction=\"get\"".to_owned()]).await as u64;
    assert_eq!(got, put, "decode waits for the state as for the blocks");
    cluster.stop();
}

/// Each turn resumes from the end of the previous answer, on any decode worker.
#[tokio::test(flavor = "multi_thread")]
async fn a_chat_with_convolutions_computes_only_its_new_tokens() {
    chats(&SHORT_CONV).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_with_delta_rules_computes_only_its_new_tokens() {
    chats(&DELTA_RULE).await;
}

async fn chats(kind: &Kind) {
    let memory = kind.memory(kind.chat);
    // Two decode workers hold nearly nothing, so the states are in the pool.
    let small = ["--kv-memory", &memory, "--decode", "2", "--sequences-max", "4"];
    for flags in [&["--prefill", "0"][..], DISAGGREGATED, &small] {
        chat(kind, flags, 4).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_long_chat_computes_only_its_new_tokens() {
    chat(&SHORT_CONV, DISAGGREGATED, 20).await;
}

async fn chat(kind: &Kind, flags: &[&str], turns: usize) {
    let cluster = kind.start(&[flags]);
    let expected = kind.start(&[&["--prefill", "0", "--kvpool", "0"]]);
    let mut numbers = Numbers(4);
    let mut dialog: Vec<u32> = Vec::new();
    let mut known = 0;
    for turn in 0..turns {
        dialog.extend((0..37 + 5 * (turn % 4)).map(|_| 3 + (numbers.next() % 500) as u32));
        let case = Case { prompt: dialog.clone(), seed: None, max_tokens: 30 };
        let answer = complete(&cluster, &case).await;
        assert_eq!(answer.tokens, complete(&expected, &case).await.tokens, "turn {turn} with {flags:?}");
        assert_eq!(answer.cached(), known, "turn {turn} with {flags:?}: {}", answer.usage);
        dialog.extend(&answer.tokens);
        // The last sampled token has not been computed.
        known = (dialog.len() as u64 - 1) / 16 * 16;
        // The next turn finds blocks that are published at best effort.
        cluster.published().await;
    }
    cluster.stop();
    expected.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_states_of_convolutions_are_computed_again() {
    lost_states_are_made_again(&SHORT_CONV).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn lost_states_of_delta_rules_are_computed_again() {
    lost_states_are_made_again(&DELTA_RULE).await;
}

async fn lost_states_are_made_again(kind: &Kind) {
    let cases = cases();
    let reference = kind.alone(&cases).await;
    let [memory, pool] = [kind.one, kind.pool].map(|blocks| kind.memory(blocks));
    // Memory for the longest prompt and little more: most blocks and states that a prompt could reuse have been evicted.
    let small = ["--kv-memory", &memory, "--pool-memory", &pool, "--sequences-max", "4", "--state-every", "4"];
    let cluster = kind.start(&[DISAGGREGATED, &small]);
    for how in ["a small pool", "a small pool, again"] {
        assert_same(&reference, &complete_all(&cluster, &cases, 2).await, &cases, how);
    }
    cluster.stop();

    let mut numbers = Numbers(5);
    let long: Vec<Case> = (0..3).map(|_| case(&mut numbers, 300, 1500)).collect();
    let expected = kind.alone(&long).await;
    for (role, (case, expected)) in ["decode", "kvpool", "prefill"].into_iter().zip(long.iter().zip(&expected)) {
        let cluster = kind.start(&[DISAGGREGATED, &["--prefill", "2", "--decode", "2", "--kvpool", "2"]]);
        let crashing = async {
            cluster.until("a running sequence", |now| now["sequences_running"].as_u64() > Some(0)).await;
            let now = cluster.cluster().await;
            let members = now["members"].as_array().expect("members").iter().filter(|member| member["role"] == role);
            let pid = members.max_by_key(|member| member["assigned"].as_u64()).expect("a member")["pid"].as_u64().expect("a pid");
            crash(pid as u32);
        };
        let (answer, ()) = tokio::join!(complete(&cluster, case), crashing);
        assert_eq!(answer.tokens, expected.tokens, "{role} crashed");
        assert_eq!(complete(&cluster, case).await.tokens, expected.tokens, "after the crash of {role}");
        cluster.stop();
    }
}
