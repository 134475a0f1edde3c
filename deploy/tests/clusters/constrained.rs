//! The exactness contract for constrained answers: the grammar's state is a function of the tokens so far, so the answers are the same on
//! every path. `tests/python/test_structured.py` checks that they follow their grammars.

use crate::support::{Cluster, DISAGGREGATED, MODEL_NAME, Numbers, crash};
use futures_util::StreamExt;
use serde_json::{Value, json};
use std::time::Duration;

/// A request's body, and the length of its prompt.
struct Ask {
    body: Value,
    prompt: usize,
}

fn schema() -> Value {
    json!({
        "type": "object", "required": ["name", "kind", "list"], "additionalProperties": false,
        "properties": {
            "name": {"type": "string", "minLength": 3, "maxLength": 40}, "kind": {"enum": ["rôle", "node", "block"]},
            "list": {"type": "array", "minItems": 2, "maxItems": 6, "items": {"type": "number"}},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
        },
    })
}

/// Every kind of grammar, with prompt lengths around block borders; every second request is seeded, with penalties, scores or bans.
fn asks(max_tokens: u32) -> Vec<Ask> {
    let constraints = [
        json!({"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": schema()}}}),
        json!({"response_format": {"type": "json_object"}, "min_tokens": 40}),
        json!({"guided_regex": "([a-f]{1,9} ){30,}", "ignore_eos": true}),
        json!({"guided_choice": ["a quick answer", "a slow answer", "none"], "logit_bias": {"70": 3.0}}),
        json!({"guided_grammar": "root ::= line{5,40}\nline ::= [0-9a-z]+ \" = \" ([1-9] [0-9]* | \"nothing\") \"\\n\"", "logprobs": 3}),
        json!({"structured_outputs": {"json": {"type": "array", "items": schema()}}, "ignore_eos": true}),
    ];
    let mut numbers = Numbers(44);
    let lengths = [3, 16, 17, 33, 100, 129, 200, 256, 300, 511, 600, 800];
    let ask = |(i, length): (usize, usize)| {
        let prompt: Vec<u64> = (0..length).map(|_| 5 + numbers.next() % 500).collect();
        let mut body = json!({
            "model": MODEL_NAME, "prompt": prompt, "max_tokens": max_tokens, "return_token_ids": true, "temperature": 0.0,
        });
        let fields = body.as_object_mut().expect("an object");
        fields.extend(constraints[i % constraints.len()].as_object().expect("an object").clone());
        if i % 2 == 1 {
            let sampling = json!({"seed": numbers.next() >> 12, "temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.3, "repetition_penalty": 1.1});
            fields.extend(sampling.as_object().expect("an object").clone());
        }
        Ask { body, prompt: length }
    };
    // An odd step, so that every constraint is used with greedy and with seeded sampling.
    lengths.into_iter().chain(lengths.into_iter().skip(1)).enumerate().map(ask).collect()
}

/// The part of an answer that must not depend on the path: tokens, text, finish reason, log-probabilities.
fn answer(body: &Value) -> Value {
    let choice = &body["choices"][0];
    json!([choice["token_ids"], choice["text"], choice["finish_reason"], choice["logprobs"]])
}

async fn all(cluster: &Cluster, asks: &[Ask], at_once: usize) -> Vec<(Value, Value)> {
    let one = |ask: &Ask| {
        let body = ask.body.clone();
        async move {
            let (status, answered) = cluster.post("/completions", &body).await;
            assert_eq!(status, 200, "{answered}");
            (answer(&answered), answered["usage"].clone())
        }
    };
    futures_util::stream::iter(asks.iter().map(one)).buffered(at_once).collect().await
}

fn assert_same(reference: &[(Value, Value)], answers: &[(Value, Value)], asks: &[Ask], how: &str) {
    for (((expected, _), (got, usage)), ask) in reference.iter().zip(answers).zip(asks) {
        assert_eq!(expected, got, "{how}: {}, {usage}", ask.body);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn constrained_answers_do_not_depend_on_the_way() {
    let asks = asks(160);
    let alone = Cluster::start(&["--prefill", "0", "--kvpool", "0"]);
    let reference = all(&alone, &asks, 1).await;
    alone.stop();
    let ended = |reason: &str| reference.iter().filter(|(answer, _)| answer[2] == reason).count();
    // Four choose between three answers, and four go on for as long as a grammar without an end lets them; the others are the model's choice.
    assert!(ended("stop") >= 4 && ended("length") >= 4, "{} end, {} are cut", ended("stop"), ended("length"));

    for transport in ["auto", "quic"] {
        let cluster = Cluster::start(&[DISAGGREGATED, &["--transport", transport, "--kv-memory", "1MiB"]].concat());
        let cold = all(&cluster, &asks, 1).await;
        assert_same(&reference, &cold, &asks, &format!("{transport}, cold"));
        let computed = |(_, usage): &(Value, Value)| usage["tidemill"]["tokens"]["prefill"].as_u64().expect("a number");
        assert!(cold.iter().zip(&asks).all(|(answer, ask)| computed(answer) == ((ask.prompt - 1) / 16 * 16) as u64), "by a prefill worker");
        let warm = all(&cluster, &asks, 1).await;
        assert_same(&reference, &warm, &asks, &format!("{transport}, cached"));
        assert!(warm.iter().all(|answer| computed(answer) == 0), "from the cache");
        cluster.stop();
    }
    let cluster = Cluster::start(&[DISAGGREGATED, &["--prefill", "2", "--decode", "2", "--threads", "1"]].concat());
    assert_same(&reference, &all(&cluster, &asks, 16).await, &asks, "16 at a time");
    cluster.stop();
    let cluster = Cluster::start(&[DISAGGREGATED, &["--kv-memory", "420KiB"]].concat());
    assert_same(&reference, &all(&cluster, &asks, 16).await, &asks, "short of memory");
    let preemptions = cluster.settled_metric("tidemill_preemptions_total", &[]).await;
    assert!(preemptions > 0.0, "the device was meant to be too small");
    cluster.stop();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_rescued_answer_goes_on_under_its_grammar() {
    let asks: Vec<Ask> = asks(1500).into_iter().filter(|ask| ask.body.get("ignore_eos").is_some()).take(4).collect();
    let alone = Cluster::start(&["--prefill", "0", "--kvpool", "0"]);
    let reference = all(&alone, &asks, 4).await;
    alone.stop();
    let cluster = Cluster::start(&[DISAGGREGATED, &["--decode", "3", "--threads", "1"]].concat());
    // Answers are quick. If all end before the crash, try again.
    for _ in 0..10 {
        let (answers, ()) = tokio::join!(all(&cluster, &asks, 4), crash_one_at_work(&cluster));
        assert_same(&reference, &answers, &asks, "a decode worker crashed");
        let rescues: u64 = answers.iter().map(|(_, usage)| usage["tidemill"]["rescues"].as_u64().expect("a number")).sum();
        if rescues > 0 {
            return;
        }
    }
    panic!("no crash met an answer on its way");
}

/// Kills a decode worker that has been busy for a moment, and so has generated tokens. Gives up if there is none.
async fn crash_one_at_work(cluster: &Cluster) {
    let mut before = Vec::new();
    for _ in 0..100 {
        let now = cluster.cluster().await;
        let members = now["members"].as_array().expect("members").iter();
        let at_work = members.filter(|member| member["role"] == "decode" && member["assigned"] != 0);
        let pids: Vec<u32> = at_work.map(|member| member["pid"].as_u64().expect("a pid") as u32).collect();
        if let Some(pid) = pids.iter().find(|pid| before.contains(*pid)) {
            crash(*pid);
            return cluster.gone(*pid).await;
        }
        before = pids;
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
