//! The front door as a client sees it, with a scripted decode worker behind it.

use crate::support::{Cluster, Script, decode, engine, engine_of, fixture, pool, prefill};
use serde_json::{Value, json};
use tidemill_coordinator::settings::classes::ClassFlags;
use tidemill_gateway::text::TextModel;
use tidemill_proto::{
    block::LayoutFingerprint,
    message::{EngineInfo, Finish, Provenance, RoleInfo, ToWorker, WorkerEvent},
};

/// The ids of a text in the fixture's vocabulary.
fn ids(text: &str) -> Vec<u32> {
    TextModel::load(&fixture("llama3")).unwrap().tokenizer.encode(text, false).unwrap()
}

fn user(text: &str) -> Value {
    json!([{"role": "user", "content": text}])
}

const EOT: u32 = 1;

/// The `data:` lines of a stream.
async fn stream(cluster: &Cluster, path: &str, body: Value) -> Vec<String> {
    let text = cluster.post(path, body).await.text().await.unwrap();
    text.lines().filter_map(|line| line.strip_prefix("data: ")).map(str::to_owned).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chat_streamed_is_the_chat_at_once() {
    let cluster = Cluster::start(|_| ()).await;
    let reply = [ids("潮が満ちると水車が回る。 🌊 Done."), vec![EOT]].concat();
    let mut worker = cluster.join("decode-0", decode(), Script::reply(&reply)).await;
    let body = json!({"model": "tiny", "messages": user("Hello"), "seed": 5, "temperature": 0.5, "return_token_ids": true});
    let (status, whole) = cluster.ask("/v1/chat/completions", body.clone()).await;
    assert_eq!(status, 200, "{whole}");
    let choice = &whole["choices"][0];
    assert_eq!(choice["message"]["content"], "潮が満ちると水車が回る。 🌊 Done.");
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &Value::Null));
    assert_eq!(choice["token_ids"], json!(reply));
    assert_eq!(whole["usage"]["completion_tokens"], reply.len());
    assert_eq!(whole["usage"]["prompt_tokens_details"]["cached_tokens"], 16);
    assert_eq!(whole["usage"]["tidemill"]["decode_worker"], "decode-0");
    assert_eq!(whole["usage"]["tidemill"]["tail_ms"], 3.0);
    let job = worker.decode_job().await;
    assert_eq!((job.sampling.seed, job.sampling.temperature, job.sampling.top_p), (5, 0.5, 0.95), "top_p is the model author's");
    assert_eq!((job.expected_blocks, job.home), (0, None));
    assert_eq!(json!(job.tokens), whole["prompt_token_ids"]);

    let mut streamed = body;
    streamed["stream"] = json!(true);
    streamed["stream_options"] = json!({"include_usage": true});
    let mut events = stream(&cluster, "/v1/chat/completions", streamed).await;
    assert_eq!(events.pop().as_deref(), Some("[DONE]"));
    let chunks: Vec<Value> = events.iter().map(|event| serde_json::from_str(event).unwrap()).collect();
    assert_eq!(chunks[0]["choices"][0]["delta"], json!({"role": "assistant", "content": ""}));
    let text: String = chunks.iter().filter_map(|chunk| chunk["choices"][0]["delta"]["content"].as_str()).collect();
    assert_eq!(text, choice["message"]["content"].as_str().unwrap());
    let [.., last, usage] = &chunks[..] else { panic!() };
    assert_eq!((&last["choices"][0]["finish_reason"], &last["usage"]), (&json!("stop"), &Value::Null));
    assert_eq!((&usage["choices"], &usage["usage"]["prompt_tokens"]), (&json!([]), &whole["usage"]["prompt_tokens"]));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn choices_share_one_prefill_job_and_differ_in_seed() {
    let cluster = Cluster::start(|_| ()).await;
    let _pool = cluster.join("kvpool-0", pool(), Script::reply(&[])).await;
    let mut prefill = cluster.join("prefill-0", prefill(), Script::reply(&[])).await;
    let mut decode = cluster.join("decode-0", decode(), Script::reply(&ids("yes"))).await;
    let prompt: Vec<u32> = (0..40).collect();
    let body = json!({"prompt": prompt, "n": 3, "seed": 10, "max_tokens": 2});
    let (status, answer) = cluster.ask("/v1/completions", body).await;
    assert_eq!((status, answer["choices"].as_array().unwrap().len()), (200, 3), "{answer}");
    assert_eq!(answer["usage"]["tidemill"]["prefill_worker"], "prefill-0");
    let mut seeds = Vec::new();
    for _ in 0..3 {
        let job = decode.decode_job().await;
        assert_eq!(job.expected_blocks, 2);
        seeds.push(job.sampling.seed);
    }
    assert_eq!(seeds, [10, 11, 12]);
    let job = prefill.expect(|message| if let ToWorker::Prefill(job) = message { Some(job) } else { None }).await;
    assert_eq!((job.blocks, job.tokens.to_vec()), (2, prompt[..32].to_vec()));
    // The sequences may end before the prefill worker reports that it is done: then its job is cancelled.
    let more = std::iter::from_fn(|| prefill.messages.try_recv().ok()).filter(|message| matches!(message, ToWorker::Prefill(_)));
    assert_eq!(more.count(), 0, "one job serves all choices");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_string_ends_the_choice_and_frees_the_worker() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker =
        cluster.join("decode-0", decode(), Script { stall_after: 12, ..Script::reply(&ids(&"one two END three ".repeat(9))) }).await;
    let body = json!({"messages": user("x"), "stop": ["END", "\n"], "max_tokens": 200});
    let (status, answer) = cluster.ask("/v1/chat/completions", body.clone()).await;
    assert_eq!(status, 200, "{answer}");
    let choice = &answer["choices"][0];
    assert_eq!(choice["message"]["content"], "one two ");
    assert_eq!((&choice["finish_reason"], &choice["stop_reason"]), (&json!("stop"), &json!("END")));
    assert_eq!(
        answer["usage"]["tidemill"]["tokens"]["local"], answer["usage"]["prompt_tokens"],
        "planned where the worker had no last word"
    );
    let job = worker.decode_job().await;
    let cancelled = worker.expect(|message| if let ToWorker::CancelSequence { sequence } = message { Some(sequence) } else { None }).await;
    assert_eq!(cancelled, job.sequence);
    let mut body = body;
    body["include_stop_str_in_output"] = json!(true);
    let (_, answer) = cluster.ask("/v1/chat/completions", body).await;
    assert_eq!(answer["choices"][0]["message"]["content"], "one two END");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn scoring_as_evaluation_harnesses_do_it() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker = cluster.join("decode-0", decode(), Script::reply(&[40, 41])).await;
    for max_tokens in [0, 1] {
        let body = json!({"prompt": [[50, 51, 52], [60, 61]], "echo": true, "max_tokens": max_tokens, "logprobs": 1, "temperature": 0.0});
        let (status, answer) = cluster.ask("/v1/completions", body).await;
        assert_eq!(status, 200, "{answer}");
        assert_eq!(answer["usage"]["completion_tokens"], 2 * max_tokens);
        for (choice, prompt_tokens) in answer["choices"].as_array().unwrap().iter().zip([3, 2]) {
            let logprobs = &choice["logprobs"];
            for list in ["tokens", "token_logprobs", "top_logprobs", "text_offset"] {
                assert_eq!(logprobs[list].as_array().unwrap().len(), prompt_tokens + max_tokens, "{list}: {logprobs}");
            }
            assert_eq!((&logprobs["token_logprobs"][0], &logprobs["top_logprobs"][0]), (&Value::Null, &Value::Null));
            assert_eq!(logprobs["token_logprobs"][1], -0.5);
            assert_eq!(logprobs["top_logprobs"][1][logprobs["tokens"][1].as_str().unwrap()], -0.5);
            let text = choice["text"].as_str().unwrap();
            let last = logprobs["text_offset"].as_array().unwrap().last().unwrap().as_u64().unwrap() as usize;
            assert!(text.chars().skip(last).count() == 1, "{text:?} {last}");
            assert_eq!(choice["finish_reason"], "length");
        }
    }
    assert_eq!(worker.decode_job().await.prompt_logprobs, Some(1));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn chat_logprobs_say_bytes() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&ids("né"))).await;
    let body = json!({"messages": user("x"), "logprobs": true, "top_logprobs": 2});
    let (status, answer) = cluster.ask("/v1/chat/completions", body).await;
    assert_eq!(status, 200, "{answer}");
    let content = answer["choices"][0]["logprobs"]["content"].as_array().unwrap().clone();
    let bytes: Vec<u8> =
        content.iter().flat_map(|token| token["bytes"].as_array().unwrap().clone()).map(|b| b.as_u64().unwrap() as u8).collect();
    assert_eq!(String::from_utf8(bytes).unwrap(), "né");
    assert!(content.iter().all(|token| token["top_logprobs"].as_array().unwrap().len() == 2 && token["logprob"] == -0.5));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_answer_has_a_character_that_ends_a_line_elsewhere() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&ids("a\u{2028}b\u{85}c\u{2029}"))).await;
    let messages = user("x");
    for (path, mut body) in [
        ("/v1/chat/completions", json!({"messages": messages})),
        ("/v1/completions", json!({"prompt": "x"})),
        ("/v1/responses", json!({"input": "x"})),
        ("/v1/messages", json!({"messages": messages, "max_tokens": 9})),
    ] {
        for stream in [false, true] {
            body["stream"] = json!(stream);
            let text = cluster.post(path, body.clone()).await.text().await.unwrap();
            assert!(text.contains("\\u2028") && !text.contains(['\u{85}', '\u{2028}', '\u{2029}']), "{path}: {text}");
        }
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn max_tokens_is_an_upper_bound() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    let (chat, hi) = ("/v1/chat/completions", user("x"));
    for (path, body) in [
        (chat, json!({"messages": hi, "max_tokens": 65_535})),
        (chat, json!({"messages": hi, "max_completion_tokens": 2048})),
        ("/v1/completions", json!({"prompt": "x", "max_tokens": 2048})),
        ("/v1/completions", json!({"prompt": ["x", "a longer prompt"], "max_tokens": u32::MAX})),
        ("/v1/responses", json!({"input": "x", "max_output_tokens": 65_535})),
        ("/v1/messages", json!({"model": "tiny", "messages": hi, "max_tokens": 65_535})),
    ] {
        for stream in [false, true] {
            let mut body = body.clone();
            body["stream"] = json!(stream);
            let response = cluster.post(path, body.clone()).await;
            assert_eq!(response.status(), 200, "{path} {body}");
            let answer = response.text().await.unwrap();
            for _ in 0..body["prompt"].as_array().map_or(1, Vec::len) {
                let job = worker.decode_job().await;
                assert_eq!(job.prompt_tokens + job.stop.max_tokens, 2048, "{path} {body}: all that fits");
            }
            assert!(["length", "max_tokens", "max_output_tokens"].iter().any(|reason| answer.contains(reason)), "{path}: {answer}");
        }
    }
    for (max_tokens, max_completion_tokens) in [(9, 7), (7, 9)] {
        let body = json!({"messages": hi, "max_tokens": max_tokens, "max_completion_tokens": max_completion_tokens});
        assert_eq!(cluster.ask(chat, body).await.0, 200);
        assert_eq!(worker.decode_job().await.stop.max_tokens, 7, "both are upper bounds");
    }
    let (status, answer) = cluster.ask(chat, json!({"messages": hi, "max_tokens": 5000, "min_tokens": 5000})).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("min_tokens")), "{answer}");
    cluster.stop().await;

    let cluster = Cluster::start(|flags| flags.max_tokens_must_fit = Some(true)).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    for (path, body) in [
        (chat, json!({"messages": hi, "max_tokens": 5000})),
        (chat, json!({"messages": hi, "max_completion_tokens": 5000})),
        ("/v1/completions", json!({"prompt": [40, 41], "max_tokens": 2047})),
        ("/v1/responses", json!({"input": "x", "max_output_tokens": 5000})),
    ] {
        let (status, answer) = cluster.ask(path, body.clone()).await;
        let error = &answer["error"];
        assert_eq!((status, &error["param"], &error["code"]), (400, &json!("max_tokens"), &json!("context_length_exceeded")), "{path}");
        assert!(error["message"].as_str().unwrap().contains("may have at most"), "{error}");
    }
    let (status, _) = cluster.ask("/v1/completions", json!({"prompt": [40, 41], "max_tokens": 2046})).await;
    assert_eq!(status, 200, "it just fits");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn every_failure_is_openais_error_object() {
    let cluster = Cluster::start(|flags| flags.body_bytes_max = Some("64KiB".into())).await;
    let (chat, completions) = ("/v1/chat/completions", "/v1/completions");
    let response = cluster.post(chat, json!({"messages": user("x")})).await;
    assert_eq!((response.status().as_u16(), response.headers()["retry-after"].to_str().unwrap()), (503, "1"), "no worker yet");
    assert_eq!(cluster.get("/ready").await.status(), 503);
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    assert_eq!(cluster.get("/ready").await.status(), 200);

    let hi = user("x");
    let long: Vec<u32> = vec![9; 2048];
    for (path, body, status, param, code) in [
        (chat, json!({"model": "gpt-4o", "messages": hi}), 404, json!("model"), json!("model_not_found")),
        (chat, json!({"messages": hi, "temperature": "hot"}), 400, json!("temperature"), Value::Null),
        (chat, json!({"messages": hi, "temperature": 3}), 400, json!("temperature"), Value::Null),
        (chat, json!({"messages": hi, "top_p": 0}), 400, json!("top_p"), Value::Null),
        (chat, json!({"messages": hi, "n": 0}), 400, json!("n"), Value::Null),
        (chat, json!({"messages": hi, "logit_bias": {"99999": 1}}), 400, json!("logit_bias"), Value::Null),
        (chat, json!({"messages": hi, "top_logprobs": 21, "logprobs": true}), 400, json!("top_logprobs"), Value::Null),
        (
            chat,
            json!({"messages": hi, "guided_json": {"items": {"$dynamicRef": "#x"}}}),
            400,
            json!("guided_json.items.$dynamicRef"),
            Value::Null,
        ),
        (chat, json!({"messages": hi, "tools": [{"type": "function"}]}), 400, json!("tools[0].function"), Value::Null),
        (chat, json!({"messages": hi, "tool_choice": "required"}), 400, json!("tool_choice"), Value::Null),
        (chat, json!({"messages": []}), 400, json!("messages"), Value::Null),
        (chat, json!({}), 400, json!("messages"), Value::Null),
        (chat, json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}), 400, json!("messages[0].content"), Value::Null),
        (chat, json!([1]), 400, Value::Null, Value::Null),
        (completions, json!({"prompt": long}), 400, json!("prompt"), json!("context_length_exceeded")),
        (completions, json!({"prompt": [1, 100_000]}), 400, json!("prompt"), Value::Null),
        (completions, json!({"prompt": []}), 400, json!("prompt"), Value::Null),
        (completions, json!({"prompt": "x", "suffix": "y"}), 400, json!("suffix"), Value::Null),
        (completions, json!({"prompt": "x", "best_of": 3}), 400, json!("best_of"), json!("unsupported_parameter")),
        (completions, json!({"prompt": "x", "use_beam_search": true}), 400, json!("use_beam_search"), json!("unsupported_parameter")),
        (chat, json!({"messages": hi, "bad_words": ["x"]}), 400, json!("bad_words"), json!("unsupported_parameter")),
        (chat, json!({"messages": hi, "regex": "a", "format": "json"}), 400, json!("format"), Value::Null),
        ("/v1/responses", json!({"input": "x", "background": true}), 400, json!("background"), json!("unsupported_parameter")),
        ("/v2/rerank", json!({"query": "x"}), 400, json!("model"), Value::Null),
        (completions, json!({"prompt": "x".repeat(100_000)}), 413, Value::Null, Value::Null),
        ("/v1/embeddings", json!({}), 400, json!("input"), Value::Null),
        ("/v1/audio/speech", json!({}), 404, Value::Null, Value::Null),
    ] {
        let (got, answer) = cluster.ask(path, body.clone()).await;
        let error = &answer["error"];
        assert_eq!((got, &error["param"], &error["code"]), (status, &param, &code), "{path} {body}: {answer}");
        assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{answer}");
        assert_eq!(error["type"], "invalid_request_error");
    }
    let response = cluster.get(chat).await;
    assert_eq!((response.status().as_u16(), response.headers()["allow"].to_str().unwrap()), (405, "POST"));
    assert!(response.json::<Value>().await.unwrap()["error"]["message"].is_string());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_without_an_embedding_is_refused() {
    let model = tempfile::tempdir().unwrap();
    for file in ["generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture("llama3").join(file), model.path().join(file)).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&std::fs::read(fixture("llama3").join("config.json")).unwrap()).unwrap();
    config["vocab_size"] = json!(ids("y")[0]);
    std::fs::write(model.path().join("config.json"), config.to_string()).unwrap();
    let cluster = Cluster::start(|flags| flags.model = vec![model.path().into()]).await;
    let _worker = cluster.join("decode-0", RoleInfo::Decode(engine_of(model.path())), Script::reply(&[1])).await;
    for (path, mut body, param) in [
        ("/v1/chat/completions", json!({"messages": user("y")}), "messages"),
        ("/v1/completions", json!({"prompt": "y"}), "prompt"),
        ("/v1/completions", json!({"prompt": ids("y")}), "prompt"),
    ] {
        body["max_tokens"] = json!(1);
        let (status, answer) = cluster.ask(path, body).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{answer}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_service_tier_chooses_the_class_and_is_echoed() {
    let cluster = Cluster::start(|_| {}).await;
    let _worker = cluster.join("decode-0", RoleInfo::Decode(engine()), Script::reply(&ids("y"))).await;
    for path in ["/v1/chat/completions", "/v1/completions"] {
        let body = |tier: Value| json!({"messages": user("y"), "prompt": "y", "max_tokens": 1, "service_tier": tier});
        for (asked, got) in [("priority", "priority"), ("flex", "flex"), ("auto", "default"), ("default", "default")] {
            let (status, answer) = cluster.ask(path, body(json!(asked))).await;
            assert_eq!((status, &answer["service_tier"]), (200, &json!(got)), "{answer}");
        }
        let (_, answer) = cluster.ask(path, body(Value::Null)).await;
        assert_eq!(answer.get("service_tier"), None, "{answer}");
        let (status, answer) = cluster.ask(path, body(json!("gold"))).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!("service_tier")), "{answer}");
        let mut streamed = body(json!("flex"));
        streamed["stream"] = json!(true);
        let stream = cluster.post(path, streamed).await.text().await.unwrap();
        assert!(
            stream.lines().filter(|line| line.starts_with("data: {")).all(|line| line.contains(r#""service_tier":"flex""#)),
            "{stream}"
        );
    }
    let metrics = cluster.get("/metrics").await.text().await.unwrap();
    for class in ["standard", "interactive", "batch"] {
        assert!(metrics.contains(&format!("tidemill_goodput_ratio{{class=\"{class}\"}}")), "{metrics}");
        assert!(metrics.contains(&format!("tidemill_class_choices_total{{class=\"{class}\",outcome=\"attained\"}}")), "{metrics}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_waits_hears_its_place() {
    let cluster = Cluster::start(|flags| flags.decode_sequences_max = Some(1)).await;
    let script = Script { stall_after: 1, ..Script::reply(&ids("yyy")) };
    let mut worker = cluster.join("decode-0", RoleInfo::Decode(engine()), script).await;
    let body = |stream| json!({"prompt": "y", "max_tokens": 2, "stream": stream});
    let client = reqwest::Client::new();
    let first = client.post(format!("{}/v1/completions", cluster.url)).json(&body(true)).send();
    let first = tokio::spawn(first);
    let running = worker.decode_job().await.sequence;
    let second = tokio::spawn(client.post(format!("{}/v1/completions", cluster.url)).json(&body(true)).send());
    // After five seconds a stream starts without its first token, and reports in comments that it waits.
    let mut second = second.await.unwrap().unwrap();
    assert_eq!(second.headers()["x-queue-position"], "1");
    let mut text = String::new();
    while !text.contains("waiting: place 1 in the queue") {
        text += std::str::from_utf8(&second.chunk().await.unwrap().expect("the stream goes on")).unwrap();
    }
    worker.say.send(WorkerEvent::Finished { sequence: running, reason: Finish::Length, provenance: Provenance::default() }).unwrap();
    let next = worker.decode_job().await.sequence;
    worker.say.send(WorkerEvent::Finished { sequence: next, reason: Finish::Length, provenance: Provenance::default() }).unwrap();
    let rest = second.text().await.unwrap();
    assert!(rest.contains("[DONE]"), "{text}{rest}");
    assert!(!first.await.unwrap().unwrap().headers().contains_key("x-queue-position"), "it did not wait");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_class_that_is_not_served_late_is_refused_with_the_time_to_come_back() {
    let strict = ClassFlags {
        name: "strict".into(),
        service_tier: Some("default".into()),
        ttft_ms: Some(1.0),
        tpot_ms: None,
        priority: None,
        weight: None,
        on_miss: Some("reject".into()),
    };
    let cluster = Cluster::start(|flags| flags.class = vec![strict]).await;
    let _worker = cluster.join("decode-0", RoleInfo::Decode(engine()), Script::reply(&ids("y"))).await;
    let response = cluster.post("/v1/completions", json!({"prompt": "y", "max_tokens": 1})).await;
    let header = |name| response.headers()[name].to_str().unwrap().parse::<u64>().unwrap();
    assert_eq!((response.status().as_u16(), header("retry-after")), (429, 1));
    assert!(header("retry-after-ms") >= 250);
    let body: Value = response.json().await.unwrap();
    assert!(body["error"]["message"].as_str().unwrap().contains("service class"), "{body}");
    let metrics = cluster.get("/metrics").await.text().await.unwrap();
    assert!(metrics.contains(r#"tidemill_class_choices_total{class="strict",outcome="rejected"} 1"#), "{metrics}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn more_choices_than_the_queue_takes_are_an_error_for_good() {
    let cluster = Cluster::start(|flags| flags.queue_max = Some(4)).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    for (path, mut body) in [("/v1/chat/completions", json!({"messages": user("x")})), ("/v1/completions", json!({"prompt": "x"}))] {
        for (n, expected) in [(4, 200), (5, 400)] {
            body["n"] = json!(n);
            let (status, answer) = cluster.ask(path, body.clone()).await;
            assert_eq!(status, expected, "{answer}");
            assert!(status == 200 || answer["error"]["message"].as_str().unwrap().contains("queue_max"), "{answer}");
        }
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn failures_in_the_cluster_reach_the_client() {
    let cluster = Cluster::start(|flags| flags.request_timeout_s = Some(1)).await;
    let _worker = cluster.join("decode-0", decode(), Script { stall_after: 1, ..Script::reply(&[40, 41]) }).await;
    let (status, answer) = cluster.ask("/v1/completions", json!({"prompt": "x"})).await;
    assert_eq!((status, &answer["error"]["type"]), (504, &json!("server_error")), "{answer}");
    let events = stream(&cluster, "/v1/completions", json!({"prompt": "x", "stream": true})).await;
    let [.., error, done] = &events[..] else { panic!("{events:?}") };
    assert_eq!((serde_json::from_str::<Value>(error).unwrap()["error"]["type"].clone(), done.as_str()), (json!("server_error"), "[DONE]"));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_frees_its_sequences() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker = cluster.join("decode-0", decode(), Script { stall_after: 2, ..Script::reply(&[40; 100]) }).await;
    for stream in [true, false] {
        let mut request = Box::pin(cluster.post("/v1/completions", json!({"prompt": "x", "stream": stream, "max_tokens": 50})));
        let job = if stream {
            let mut response = request.await;
            assert!(response.chunk().await.unwrap().is_some());
            worker.decode_job().await
        } else {
            let job = tokio::select! {
                job = worker.decode_job() => job,
                _ = &mut request => panic!("it has no answer yet"),
            };
            drop(request);
            job
        };
        let cancelled =
            worker.expect(|message| if let ToWorker::CancelSequence { sequence } = message { Some(sequence) } else { None }).await;
        assert_eq!(cancelled, job.sequence);
    }
    let view: Value = cluster.get("/cluster").await.json().await.unwrap();
    assert_eq!((&view["requests"], &view["sequences_running"]), (&json!(0), &json!(0)));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_see_members_and_metrics() {
    let cluster = Cluster::start(|_| ()).await;
    let _decode = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    let _pool = cluster.join("kvpool-0", pool(), Script::reply(&[])).await;
    assert_eq!(cluster.ask("/v1/completions", json!({"prompt": "x"})).await.0, 200);
    let view: Value = cluster.get("/cluster").await.json().await.unwrap();
    let names: Vec<_> =
        view["members"].as_array().unwrap().iter().map(|m| (m["name"].as_str().unwrap(), m["role"].as_str().unwrap())).collect();
    assert_eq!(names, [("decode-0", "decode"), ("kvpool-0", "kvpool")]);
    let metrics = cluster.get("/metrics").await.text().await.unwrap();
    for wanted in [
        "tidemill_ttft_seconds_bucket",
        "tidemill_ttft_predicted_seconds_bucket",
        "tidemill_requests_total{outcome=\"ok\"}",
        "tidemill_requests_running 0",
        "tidemill_kv_blocks{worker=\"decode-0\",role=\"decode\",tier=\"hbm\",state=\"free\"} 0",
        "tidemill_prefix_tokens_total{",
    ] {
        assert!(metrics.contains(wanted), "{wanted} in\n{metrics}");
    }
    let models: Value = cluster.get("/v1/models").await.json().await.unwrap();
    assert_eq!((&models["data"][0]["id"], &models["data"][0]["max_model_len"]), (&json!("tiny"), &json!(2048)));
    assert_eq!(cluster.get("/v1/models/tiny").await.status(), 200);
    assert_eq!(cluster.get("/v1/models/other").await.status(), 404);
    let unreadable: Value = cluster.get("/v1/models/%ff").await.json().await.unwrap();
    assert_eq!(unreadable["error"]["type"], json!("invalid_request_error"), "{unreadable}");
    let chat = json!({"messages": user("x"), "chat_template_kwargs": 5});
    let (status, answer) = cluster.ask("/v1/chat/completions", chat).await;
    assert_eq!((status, &answer["error"]["param"]), (400, &json!("chat_template_kwargs")), "{answer}");
    assert_eq!(cluster.get("/health").await.status(), 200);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn operators_may_have_a_port_of_their_own() {
    let cluster = Cluster::start(|flags| flags.admin = Some(([127, 0, 0, 1], 0).into())).await;
    let _decode = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    assert_eq!(cluster.ask("/v1/completions", json!({"prompt": "x"})).await.0, 200);
    let admin = cluster.admin.clone().unwrap();
    let status = async |url: &str, path: &str| reqwest::get(format!("{url}{path}")).await.unwrap().status().as_u16();
    for (path, at_the_front_door, at_the_admin_port) in [
        ("/metrics", 404, 200),
        ("/cluster", 404, 200),
        ("/cluster/events", 404, 200),
        ("/console", 200, 200),
        ("/health", 200, 200),
        ("/ready", 200, 200),
        ("/v1/models", 200, 404),
    ] {
        assert_eq!((status(&cluster.url, path).await, status(&admin, path).await), (at_the_front_door, at_the_admin_port), "{path}");
    }
    let view: Value = reqwest::get(format!("{admin}/cluster")).await.unwrap().json().await.unwrap();
    assert_eq!(view["members"][0]["name"], "decode-0");
    assert!(reqwest::get(format!("{admin}/metrics")).await.unwrap().text().await.unwrap().contains("tidemill_worker_up"));
    cluster.stop().await;
    assert!(reqwest::get(format!("{admin}/health")).await.is_err(), "both ports close");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_with_another_model_is_refused() {
    let cluster = Cluster::start(|_| ()).await;
    let _first = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    for other in [EngineInfo { layout: LayoutFingerprint([8; 16]), ..engine() }, engine_of(&fixture("qwen2"))] {
        let refused = cluster.join("decode-1", RoleInfo::Decode(other), Script::reply(&[]));
        assert!(tokio::time::timeout(std::time::Duration::from_secs(1), refused).await.is_err(), "it never comes up");
    }
    let view: Value = cluster.get("/cluster").await.json().await.unwrap();
    assert_eq!(view["members"].as_array().unwrap().len(), 1);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn running_requests_finish_before_the_end() {
    let cluster = Cluster::start(|flags| flags.drain_s = Some(5)).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40; 300])).await;
    let mut response = cluster.post("/v1/completions", json!({"prompt": "x", "stream": true, "max_tokens": 300})).await;
    let mut text = String::from_utf8(response.chunk().await.unwrap().unwrap().to_vec()).unwrap();
    let (url, stopped) = (cluster.url.clone(), tokio::spawn(cluster.stop()));
    while reqwest::get(format!("{url}/health")).await.is_ok() {}
    text += &response.text().await.unwrap();
    assert!(text.contains("\"finish_reason\":\"length\"") && text.ends_with("data: [DONE]\n\n"), "the answer is whole");
    stopped.await.unwrap();
}
