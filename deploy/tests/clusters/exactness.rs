//! The exactness contract (docs/ARCHITECTURE.md, §5), end to end over real processes: a request's tokens are the same on every path.
//! Counters prove that it took that path.

use crate::support::{
    Answer, Case, Cluster, DISAGGREGATED, Numbers, assert_same, complete, complete_all, reference, reference_with, reusable,
};

/// Cases with prompt lengths up to 1,500, around block and chunk borders; every second one is seeded instead of greedy.
fn cases() -> Vec<Case> {
    let lengths = [
        1, 2, 5, 15, 16, 17, 18, 31, 32, 33, 34, 47, 48, 49, 63, 64, 65, 80, 96, 100, 127, 128, 129, 150, 200, 255, 256, 257, 300, 320,
        400, 511, 512, 513, 600, 750, 1000, 1023, 1024, 1025, 1300, 1500,
    ];
    let mut numbers = Numbers(42);
    lengths
        .into_iter()
        .enumerate()
        .map(|(i, length)| Case {
            prompt: (0..length).map(|_| 3 + (numbers.next() % 500) as u32).collect(),
            seed: (i % 2 == 1).then(|| numbers.next() >> 12),
            max_tokens: 64,
        })
        .collect()
}

/// Short prompts with long answers: all fit into memory at the start, but not at the end.
fn growing_cases() -> Vec<Case> {
    let mut numbers = Numbers(43);
    let case = |i: usize| Case {
        prompt: (0..20 + i).map(|_| 3 + (numbers.next() % 500) as u32).collect(),
        seed: (i % 2 == 1).then_some(i as u64),
        max_tokens: 400,
    };
    (0..16).map(case).collect()
}

/// Checks (b), (c): prefill → pool → decode; and (d): again, from the pool, since the device is too small to keep much.
async fn through_the_pool(reference: &[Answer], cases: &[Case], transport: &str, cached_source: &str, transport_label: &str) {
    // 1 MiB holds one long sequence of this model (170 blocks of 6 KiB) and little else.
    let flags = [DISAGGREGATED, &["--transport", transport, "--kv-memory", "1MiB"]].concat();
    let cluster = Cluster::start(&flags);
    let cold = complete_all(&cluster, cases, 1).await;
    assert_same(reference, &cold, cases, &format!("{transport}, cold"));
    for (answer, case) in cold.iter().zip(cases) {
        assert_eq!(answer.source("prefill"), reusable(case), "a prefill worker computed all full blocks: {}", answer.usage);
        assert_eq!(answer.cached(), 0, "{}", answer.usage);
    }
    let expected_bytes: u64 = cases.iter().map(|c| reusable(c) / 16 * BLOCK_BYTES).sum();
    let by = |role: &'static str, direction: &'static str| {
        [format!("role=\"{role}\""), format!("transport=\"{transport_label}\""), format!("direction=\"{direction}\"")]
    };
    let got = cluster.settled_metric(TRANSFERRED, &by("decode", "get")).await;
    let put = cluster.metric(TRANSFERRED, &by("prefill", "put")).await;
    assert_eq!(got as u64, expected_bytes, "decode read every prefilled block from the pool");
    assert_eq!(put as u64, expected_bytes, "prefill wrote every block into the pool");
    let other = if transport_label == "shm" { "transport=\"quic\"" } else { "transport=\"shm\"" };
    assert_eq!(cluster.metric(TRANSFERRED, &[other.to_owned()]).await, 0.0, "nothing went by another transport");

    let warm = complete_all(&cluster, cases, 1).await;
    assert_same(reference, &warm, cases, &format!("{transport}, cached"));
    for (answer, case) in warm.iter().zip(cases) {
        assert_eq!(answer.cached(), reusable(case), "nothing is computed twice: {}", answer.usage);
        assert_eq!(answer.source("prefill"), 0, "{}", answer.usage);
    }
    let from_pool: u64 = warm.iter().map(|a| a.source(cached_source)).sum();
    let total: u64 = cases.iter().map(reusable).sum();
    assert!(from_pool * 10 >= total * 9, "the pool served {from_pool} of {total} tokens");
    let again = cluster.settled_metric(TRANSFERRED, &by("decode", "get")).await;
    assert_eq!((again - got) as u64, from_pool / 16 * BLOCK_BYTES, "every cached token's bytes came from the pool");
    cluster.stop();
}

/// Checks (h): again, from the pool's disk, since the node's memory holds only one or two prompts.
async fn from_disk(reference: &[Answer], cases: &[Case]) {
    let flags = ["--kv-memory", "1MiB", "--pool-memory", "1MiB", "--pool-nvme", "64MiB"];
    let cluster = Cluster::start(&[DISAGGREGATED, &flags].concat());
    assert_same(reference, &complete_all(&cluster, cases, 1).await, cases, "a small pool, cold");
    let warm = complete_all(&cluster, cases, 1).await;
    assert_same(reference, &warm, cases, "from disk");
    let (from_disk, total): (u64, u64) = (warm.iter().map(|a| a.source("nvme")).sum(), cases.iter().map(reusable).sum());
    assert!(from_disk * 2 >= total, "of {total} tokens {from_disk} came from disk");
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_do_not_depend_on_the_way_through_shared_memory() {
    let cases = cases();
    through_the_pool(&reference(&cases).await, &cases, "auto", "dram", "shm").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_do_not_depend_on_the_way_through_the_network() {
    let cases = cases();
    through_the_pool(&reference(&cases).await, &cases, "quic", "remote", "quic").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_do_not_depend_on_the_way_through_a_disk() {
    let cases = cases();
    from_disk(&reference(&cases).await, &cases).await;
}

/// Check (e): 16 at a time, over two workers of each kind.
async fn at_a_time(disaggregation: &[&str]) {
    let cases = cases();
    let reference = reference(&cases).await;
    let flags = [disaggregation, &["--prefill", "2", "--decode", "2", "--threads", "1"]].concat();
    let cluster = Cluster::start(&flags);
    assert_same(&reference, &complete_all(&cluster, &cases, 16).await, &cases, "16 at a time");
    assert_same(&reference, &complete_all(&cluster, &cases, 16).await, &cases, "16 at a time, cached");
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_do_not_depend_on_how_many_there_are_at_a_time() {
    at_a_time(&[]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_of_prefill_workers_do_not_depend_on_how_many_there_are_at_a_time() {
    at_a_time(DISAGGREGATED).await;
}

/// Check (f): device memory for little more than the longest sequence, 16 at a time: sequences are preempted. Together, the growing ones
/// need four times that memory.
#[tokio::test(flavor = "multi_thread")]
async fn outputs_do_not_depend_on_preemptions() {
    let (cases, growing) = (cases(), growing_cases());
    let (reference, growing_reference) = (reference(&cases).await, reference(&growing).await);
    let cluster = Cluster::start(&[DISAGGREGATED, &["--kv-memory", "660KiB"]].concat());
    assert_same(&reference, &complete_all(&cluster, &cases, 16).await, &cases, "short of memory");
    assert_same(&growing_reference, &complete_all(&cluster, &growing, 16).await, &growing, "preempted");
    let preemptions = cluster.settled_metric("tidemill_preemptions_total", &[]).await;
    assert!(preemptions > 0.0, "the device was meant to be too small");
    cluster.stop();
}

/// Check (g): chunks of another size.
async fn in_chunks_of(step_tokens: &str) {
    let cases = cases();
    let reference = reference(&cases).await;
    let flags = ["--step-tokens", step_tokens, "--sequences-max", "16"];
    let cluster = Cluster::start(&[DISAGGREGATED, &flags].concat());
    assert_same(&reference, &complete_all(&cluster, &cases, 4).await, &cases, &format!("chunks of {step_tokens}"));
    cluster.stop();
    let alone = Cluster::start(&[&flags[..], &["--prefill", "0", "--kvpool", "0"]].concat());
    assert_same(&reference, &complete_all(&alone, &cases, 4).await, &cases, &format!("alone, chunks of {step_tokens}"));
    alone.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_do_not_depend_on_small_chunks() {
    in_chunks_of("32").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn outputs_do_not_depend_on_large_chunks() {
    in_chunks_of("512").await;
}

/// Repeats the same prompts, whose blocks are then in the tier `source`.
async fn from_tier(flags: &[&str], source: &str) {
    let cases = cases();
    let reference = reference(&cases).await;
    let total: u64 = cases.iter().map(reusable).sum();
    let cluster = Cluster::start(&[DISAGGREGATED, flags].concat());
    assert_same(&reference, &complete_all(&cluster, &cases, 1).await, &cases, &format!("{source}, cold"));
    for at_once in [1, 8] {
        let answers = complete_all(&cluster, &cases, at_once).await;
        assert_same(&reference, &answers, &cases, &format!("{source}, {at_once} at a time"));
        let from_tier: u64 = answers.iter().map(|answer| answer.source(source)).sum();
        assert!(from_tier * 2 > total, "{from_tier} of {total} tokens came from {source}");
    }
    let kept = cluster.settled_metric("tidemill_kv_bytes", &[format!("tier=\"{source}\"")]).await;
    assert!(kept > 0.0, "{source} holds nothing");
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_device_memory_are_the_same() {
    from_tier(&[], "hbm").await;
}

/// The DRAM of the pool node is too small for them.
#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_a_disk_are_the_same() {
    from_tier(&["--kv-memory", "1MiB", "--pool-memory", "1MiB", "--pool-nvme", "64MiB"], "nvme").await;
}

/// With weights, activations, K and V in 8-bit integers, the tokens differ from those of bf16, but are the same on every path.
#[tokio::test(flavor = "multi_thread")]
async fn outputs_in_int8_do_not_depend_on_the_way() {
    const INT8: &[&str] = &["--quantize", "int8", "--kv-dtype", "int8"];
    let cases = cases();
    let reference = reference_with(INT8, &cases).await;
    for transport in ["auto", "quic"] {
        let cluster = Cluster::start(&[DISAGGREGATED, INT8, &["--transport", transport, "--kv-memory", "1MiB"]].concat());
        let cold = complete_all(&cluster, &cases, 1).await;
        assert_same(&reference, &cold, &cases, &format!("int8, {transport}, cold"));
        for (answer, case) in cold.iter().zip(&cases) {
            assert_eq!(answer.source("prefill"), reusable(case), "a prefill worker computed all full blocks: {}", answer.usage);
        }
        let put = cluster.settled_metric(TRANSFERRED, &["role=\"prefill\"".into(), "direction=\"put\"".into()]).await;
        let expected: u64 = cases.iter().map(|case| reusable(case) / 16 * INT8_BLOCK_BYTES).sum();
        assert_eq!(put as u64, expected, "blocks are of 8-bit integers and scales");
        let warm = complete_all(&cluster, &cases, 8).await;
        assert_same(&reference, &warm, &cases, &format!("int8, {transport}, from the pool, 8 at a time"));
        assert!(warm.iter().zip(&cases).all(|(answer, case)| answer.cached() == reusable(case)), "nothing is computed twice");
        cluster.stop();
    }
    let in_bf16 = reference_with(&[], &cases).await;
    assert!(in_bf16.iter().zip(&reference).any(|(bf16, int8)| bf16.tokens != int8.tokens), "int8 was used at all");
}

/// An echo's answers are a function of its blocks' bytes: losing or mixing some changes the answers.
#[tokio::test(flavor = "multi_thread")]
async fn outputs_of_an_echo_do_not_depend_on_the_way() {
    const ECHO: &[&str] = &["--engine", "echo", "--block-bytes", "6144"];
    let cases = cases();
    let reference = reference_with(ECHO, &cases).await;
    for transport in ["auto", "quic"] {
        let cluster = Cluster::start(&[DISAGGREGATED, ECHO, &["--transport", transport, "--kv-memory", "1MiB"]].concat());
        let cold = complete_all(&cluster, &cases, 1).await;
        assert_same(&reference, &cold, &cases, &format!("echo, {transport}, cold"));
        for (answer, case) in cold.iter().zip(&cases) {
            assert_eq!(answer.source("prefill"), reusable(case), "a prefill worker computed all full blocks: {}", answer.usage);
        }
        let warm = complete_all(&cluster, &cases, 16).await;
        assert_same(&reference, &warm, &cases, &format!("echo, {transport}, cached, 16 at a time"));
        cluster.stop();
    }
    let of_a_model = complete(&Cluster::start(&["--prefill", "0"]), &cases[20]).await;
    assert_ne!(of_a_model.tokens, reference[20].tokens, "it was an echo at all");
}

const TRANSFERRED: &str = "tidemill_kv_transfer_bytes_total";

/// The size of a block of the tests' model: 3 layers, K and V, 2 heads, 16 positions, 16 dimensions, bf16.
const BLOCK_BYTES: u64 = 3 * 2 * 2 * 16 * 16 * 2;
/// The size of a block in int8, with a scale of 4 bytes for each position.
const INT8_BLOCK_BYTES: u64 = 3 * 2 * 2 * 16 * (4 + 16);
