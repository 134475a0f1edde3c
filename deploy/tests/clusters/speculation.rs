//! Speculation changes no byte of an answer (docs/ARCHITECTURE.md, §5): tokens, text, log-probabilities, finish reason and usage are those
//! of a cluster without speculation. Counters prove that drafts were accepted and rejected.

use crate::support::{Cluster, DISAGGREGATED, Numbers, crash};
use futures_util::StreamExt;
use serde_json::{Value, json};

const FAMILIES: &[&str] = &["llama3", "gemma3", "prose"];
const OTHER_FAMILIES: &[&str] = &["qwen3", "mixtral", "deepseek-v3"];
const ALONE: &[&str] = &["--prefill", "0", "--kvpool", "0"];
const NGRAM: &[&str] = &["--speculation", "ngram"];
/// Flags that draft and verify tokens whether it pays or not: these models are as small as their draft models.
const DRAFT: &[&str] = &["--speculation", "draft", "--draft-tokens-min", "3", "--draft-tokens-max", "6"];

/// Requests of every kind for each model. The prompts have lengths around block borders, and repeat themselves as code does.
fn asks(models: &[&str], max_tokens: u32) -> Vec<Value> {
    let kinds = [
        json!({}),
        json!({"logprobs": 2}),
        json!({"n": 3, "seed": 5, "temperature": 0.7}),
        json!({"seed": 6, "temperature": 0.4, "top_p": 0.9, "min_p": 0.02, "logprobs": 1}),
        json!({"seed": 7, "temperature": 0.8, "frequency_penalty": 0.3, "presence_penalty": 0.2, "repetition_penalty": 1.1}),
        json!({"seed": 8, "temperature": 0.3, "logit_bias": {"70": 3.0, "71": 2.0}, "top_k": 40}),
        json!({"stop": ["e", "th"], "min_tokens": 3, "n": 2}),
        json!({"min_tokens": 30, "ignore_eos": false, "logit_bias": {"1": 8.0}}),
        json!({"guided_regex": "([a-f]{1,9} ){30,}"}),
        json!({"guided_grammar": "root ::= line{5,40}\nline ::= [0-9a-z]+ \" = \" ([1-9] [0-9]* | \"nothing\") \"\\n\"", "logprobs": 3, "seed": 9, "temperature": 0.5}),
        json!({"response_format": {"type": "json_object"}, "min_tokens": 40}),
        json!({"logprobs": 1, "echo": true}),
    ];
    let mut numbers = Numbers(46);
    let lengths = [1, 15, 16, 17, 33, 47, 64, 100, 130, 200, 255, 300];
    let of_model = |model: &str| {
        kinds.iter().zip(lengths).map(|(kind, length)| {
            let period = 5 + numbers.next() % 20;
            let prompt: Vec<u64> = (0..length).map(|i| 5 + (i % period * 37 + i / 60) % 240).collect();
            let mut body = json!({
                "model": model, "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": true, "ignore_eos": true, "temperature": 0.0,
            });
            body.as_object_mut().expect("an object").extend(kind.as_object().expect("an object").clone());
            body
        }).collect::<Vec<_>>()
    };
    models.iter().copied().flat_map(of_model).collect()
}

/// The part of an answer that must not change.
fn answer(body: &Value) -> Value {
    let choices = body["choices"].as_array().expect("choices").iter();
    let choice =
        |choice: &Value| json!([choice["token_ids"], choice["text"], choice["finish_reason"], choice["stop_reason"], choice["logprobs"]]);
    json!([choices.map(choice).collect::<Vec<_>>(), body["usage"]["prompt_tokens"], body["usage"]["completion_tokens"]])
}

async fn all(cluster: &Cluster, asks: &[Value], at_once: usize) -> Vec<(Value, Value)> {
    let one = |body: &Value| {
        let body = body.clone();
        async move {
            let (status, answered) = cluster.post("/completions", &body).await;
            assert_eq!(status, 200, "{body}: {answered}");
            (answer(&answered), answered["usage"]["tidemill"].clone())
        }
    };
    futures_util::stream::iter(asks.iter().map(one)).buffered(at_once).collect().await
}

fn assert_same(reference: &[(Value, Value)], answers: &[(Value, Value)], asks: &[Value], how: &str) {
    for (((expected, _), (got, usage)), ask) in reference.iter().zip(answers).zip(asks) {
        assert_eq!(expected, got, "{how}: {ask}, {usage}");
    }
}

fn sum(answers: &[(Value, Value)], key: &str) -> u64 {
    answers.iter().map(|(_, usage)| usage[key].as_u64().expect("a number")).sum()
}

fn dirs(models: &[&str]) -> Vec<(String, String)> {
    let dir = |name: &&str| ((*name).to_owned(), format!("{}/../model/tests/fixtures/{name}", env!("CARGO_MANIFEST_DIR")));
    models.iter().map(dir).collect()
}

fn start(models: &[(String, String)], flags: &[&[&str]]) -> Cluster {
    let models: Vec<(&str, &str)> = models.iter().map(|(name, dir)| (name.as_str(), dir.as_str())).collect();
    Cluster::start_with(&models, &flags.concat())
}

/// Flags that give each model its draft model.
fn draft_models(drafts: &[&str]) -> Vec<String> {
    dirs(drafts).into_iter().flat_map(|(_, dir)| ["--draft-model".to_owned(), dir]).collect()
}

/// Each model is its own draft model, whose drafts are always right.
#[tokio::test(flavor = "multi_thread")]
async fn answers_are_those_without_a_draft_model_that_is_right() {
    as_without_a_draft_model(FAMILIES, FAMILIES).await;
}

/// Draft models of the same vocabulary, which hardly ever are right.
#[tokio::test(flavor = "multi_thread")]
async fn answers_are_those_without_a_draft_model_that_is_wrong() {
    as_without_a_draft_model(OTHER_FAMILIES, &["mixtral", "gemma3", "qwen3"]).await;
}

async fn as_without_a_draft_model(models: &[&str], drafts: &[&str]) {
    let (asks, dirs, drafts) = (asks(models, 60), dirs(models), draft_models(drafts));
    let drafts: Vec<&str> = drafts.iter().map(String::as_str).collect();
    let plain = start(&dirs, &[ALONE, &["--speculation", "off"]]);
    let reference = all(&plain, &asks, 4).await;
    plain.stop();

    let cluster = start(&dirs, &[ALONE, DRAFT, &drafts]);
    let answers = all(&cluster, &asks, 1).await;
    assert_same(&reference, &answers, &asks, "one at a time");
    // The first request of each model is greedy, and its draft model may be the model itself.
    let firsts: Vec<_> = answers.iter().step_by(asks.len() / models.len()).cloned().collect();
    let (drafted, accepted) = (sum(&firsts, "tokens_drafted"), sum(&firsts, "tokens_accepted"));
    assert!(drafted > 60, "{drafted} tokens were guessed");
    if drafts.iter().any(|dir| dir.ends_with("prose")) {
        assert!(accepted * 10 > drafted * 8, "{accepted} of {drafted} guessed tokens were right");
    }
    assert_same(&reference, &all(&cluster, &asks, 8).await, &asks, "eight at a time");
    cluster.stop();

    // Little memory, also for the draft model's blocks, and blocks from the pool; the draft model's weights are in 8 bits.
    let short: &[&str] = &["--kv-memory", "1MiB", "--draft-kv-memory", "300KiB", "--draft-quantize", "int8"];
    let cluster = start(&dirs, &[DISAGGREGATED, DRAFT, &drafts, short]);
    for how in ["cold", "cached"] {
        assert_same(&reference, &all(&cluster, &asks, 4).await, &asks, how);
    }
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_those_without_speculation() {
    as_without_speculation(FAMILIES).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_of_other_families_are_those_without_speculation() {
    as_without_speculation(OTHER_FAMILIES).await;
}

async fn as_without_speculation(models: &[&str]) {
    let (asks, dirs) = (asks(models, 120), dirs(models));
    let plain = start(&dirs, &[ALONE, &["--speculation", "off"]]);
    let reference = all(&plain, &asks, 1).await;
    assert_eq!(sum(&reference, "tokens_drafted"), 0, "it is off");
    plain.stop();

    let cluster = start(&dirs, &[ALONE, NGRAM]);
    for at_once in [1, 8] {
        let answers = all(&cluster, &asks, at_once).await;
        assert_same(&reference, &answers, &asks, &format!("{at_once} at a time"));
        let (drafted, accepted) = (sum(&answers, "tokens_drafted"), sum(&answers, "tokens_accepted"));
        assert!(accepted <= drafted, "{accepted} of {drafted} guessed tokens were right");
    }
    let metrics = ["tidemill_tokens_drafted_total", "tidemill_tokens_accepted_total"];
    let drafted = cluster.settled_metric(metrics[0], &[]).await;
    let accepted = cluster.metric(metrics[1], &[]).await;
    // The number of drafted tokens depends on the current costs of rows and steps: a busy machine drafts few, none of which may be right.
    assert!(drafted >= accepted && (accepted > 0.0 || drafted < 100.0), "metrics show {accepted} of {drafted}");
    cluster.stop();

    // Blocks that were filled during speculation serve later requests, from the pool.
    let cluster = start(&dirs, &[DISAGGREGATED, NGRAM, &["--kv-memory", "1MiB", "--draft-tokens-max", "5"]]);
    for how in ["cold", "cached"] {
        assert_same(&reference, &all(&cluster, &asks, 4).await, &asks, how);
    }
    cluster.stop();
}

/// Requests that together need more device memory than there is.
fn growing() -> Vec<Value> {
    let mut asks = asks(&["llama3"], 400);
    asks.retain(|ask| ask.get("n").is_none() && ask.get("stop").is_none());
    asks
}

#[tokio::test(flavor = "multi_thread")]
async fn preempted_answers_are_those_without_speculation() {
    preempted(NGRAM).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn preempted_answers_are_those_without_a_draft_model() {
    let drafts = draft_models(&["fp8-channel"]);
    let drafts: Vec<&str> = drafts.iter().map(String::as_str).collect();
    preempted(&[DRAFT, &drafts].concat()).await;
}

async fn preempted(speculation: &[&str]) {
    let (asks, dirs) = (growing(), dirs(&["llama3"]));
    let plain = start(&dirs, &[ALONE, &["--speculation", "off"]]);
    let reference = all(&plain, &asks, 1).await;
    plain.stop();
    let cluster = start(&dirs, &[DISAGGREGATED, speculation, &["--kv-memory", "420KiB"]]);
    let answers = all(&cluster, &asks, 16).await;
    assert_same(&reference, &answers, &asks, "short of memory");
    assert!(sum(&answers, "preemptions") > 0, "the device was meant to be too small");
    assert!(sum(&answers, "tokens_accepted") > 0);
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn rescued_answers_are_those_without_speculation() {
    rescued(NGRAM).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn rescued_answers_are_those_without_a_draft_model() {
    let drafts = draft_models(&["llama3"]);
    let drafts: Vec<&str> = drafts.iter().map(String::as_str).collect();
    rescued(&[DRAFT, &drafts].concat()).await;
}

async fn rescued(speculation: &[&str]) {
    let (mut asks, dirs) = (growing(), dirs(&["llama3"]));
    asks.truncate(4);
    asks.iter_mut().for_each(|ask| ask["max_tokens"] = json!(1500));
    let plain = start(&dirs, &[ALONE, &["--speculation", "off"]]);
    let reference = all(&plain, &asks, 4).await;
    plain.stop();
    let cluster = start(&dirs, &[DISAGGREGATED, speculation, &["--decode", "3", "--threads", "1"]]);
    // Answers are quick. If all end before the crash, try again.
    for _ in 0..10 {
        let (answers, ()) = tokio::join!(all(&cluster, &asks, 4), crash_one_at_work(&cluster));
        assert_same(&reference, &answers, &asks, "a decode worker crashed");
        if sum(&answers, "rescues") > 0 {
            return;
        }
    }
    panic!("no crash met an answer on its way");
}

/// Kills a decode worker that has been busy for a moment, and so has generated tokens. Gives up if there is none.
async fn crash_one_at_work(cluster: &Cluster) {
    let mut before = Vec::new();
    for _ in 0..100 {
        let at_work = at_work(cluster).await;
        if let Some(pid) = at_work.iter().find(|pid| before.contains(*pid)) {
            crash(*pid);
            return cluster.gone(*pid).await;
        }
        before = at_work;
        tokio::time::sleep(std::time::Duration::from_millis(10)).await;
    }
}

/// Process ids of decode workers with sequences.
async fn at_work(cluster: &Cluster) -> Vec<u32> {
    let now = cluster.cluster().await;
    let members = now["members"].as_array().expect("members").iter();
    let at_work = members.filter(|member| member["role"] == "decode" && member["assigned"] != 0);
    at_work.map(|member| member["pid"].as_u64().expect("a pid") as u32).collect()
}
