//! Anthropic's API with a scripted decode worker behind it; `/tokenize`, `/detokenize`, names of models.

use crate::{
    support::{Cluster, Script, decode, fixture},
    tools,
};
use serde_json::{Value, json};
use tidemill_gateway::text::TextModel;

const EOT: u32 = 1;

fn text_model() -> TextModel {
    TextModel::load(&fixture("llama3")).unwrap()
}

fn saying(text: &str) -> Script {
    Script::reply(&[text_model().tokenizer.encode(text, false).unwrap(), vec![EOT]].concat())
}

async fn events(cluster: &Cluster, body: Value) -> Vec<Value> {
    let text = cluster.post("/v1/messages?beta=true", body).await.text().await.unwrap();
    let blocks = text.split("\n\n").filter(|block| block.starts_with("event: "));
    let event = |block: &str| {
        let (name, data) = block.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str());
        event
    };
    blocks.map(event).collect()
}

fn hello(more: Value) -> Value {
    let mut body = json!({"model": "tiny", "max_tokens": 50, "messages": [{"role": "user", "content": "Hello"}]});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn a_message_streamed_is_the_message_at_once() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), saying("The tide turns. 🌊")).await;
    let (status, whole) = cluster.ask("/v1/messages", hello(json!({"system": "Be brief."}))).await;
    assert_eq!(status, 200, "{whole}");
    assert_eq!((&whole["type"], &whole["role"], &whole["stop_reason"]), (&json!("message"), &json!("assistant"), &json!("end_turn")));
    assert_eq!(whole["content"], json!([{"type": "text", "text": "The tide turns. 🌊"}]));
    assert_eq!(whole["usage"]["cache_read_input_tokens"], 16);

    let events = events(&cluster, hello(json!({"system": "Be brief.", "stream": true}))).await;
    let names: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(names[..3], ["message_start", "ping", "content_block_start"]);
    assert_eq!(names[names.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    assert!(names[3..names.len() - 3].iter().all(|name| *name == "content_block_delta"));
    assert_eq!(events[0]["message"]["usage"]["cache_read_input_tokens"], 16, "known at the first token");
    let text: String = events.iter().filter_map(|event| event["delta"]["text"].as_str()).collect();
    assert_eq!(text, "The tide turns. 🌊");
    let last = &events[names.len() - 2];
    assert_eq!((&last["delta"]["stop_reason"], &last["usage"]["output_tokens"]), (&json!("end_turn"), &whole["usage"]["output_tokens"]));
    assert_eq!(last["usage"]["input_tokens"], whole["usage"]["input_tokens"]);

    let (_, counted) = cluster.ask("/v1/messages/count_tokens", hello(json!({"system": "Be brief."}))).await;
    let all = whole["usage"]["input_tokens"].as_u64().unwrap() + 16;
    assert_eq!(counted, json!({"input_tokens": all}));
    let (_, without) = cluster.ask("/v1/messages/count_tokens", hello(json!({}))).await;
    assert!(without["input_tokens"].as_u64().unwrap() < all, "the system prompt counts");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thought_a_text_and_calls_are_blocks() {
    let model = tools::model(tools::TEMPLATE);
    let (cluster, _worker) = tools::cluster(model.path(), tools::REPLY).await;
    let functions =
        json!([{"name": "get_weather", "input_schema": {"type": "object"}}, {"name": "get_time", "input_schema": {"type": "object"}}]);
    let body = hello(json!({"max_tokens": 2000, "tools": functions, "thinking": {"type": "enabled", "budget_tokens": 1024}, "seed": 3}));
    let (status, whole) = cluster.ask("/v1/messages", body.clone()).await;
    assert_eq!((status, &whole["stop_reason"]), (200, &json!("tool_use")), "{whole}");
    let content = whole["content"].as_array().unwrap();
    assert_eq!(content[0], json!({"type": "thinking", "thinking": "They ask about {京都}.", "signature": ""}));
    assert_eq!(content[1], json!({"type": "text", "text": "I look it up."}));
    assert_eq!((&content[2]["name"], &content[2]["input"]["days"], &content[3]["input"]), (&json!("get_weather"), &json!(2), &json!({})));

    let mut streamed = body.clone();
    streamed["stream"] = json!(true);
    let events = events(&cluster, streamed).await;
    for (index, block) in content.iter().enumerate() {
        let gains = |name: &str| {
            let of_block = events.iter().filter(|event| event["type"] == "content_block_delta" && event["index"] == index);
            of_block.filter_map(|event| event["delta"][name].as_str()).collect::<String>()
        };
        match block["type"].as_str().unwrap() {
            "thinking" => assert_eq!(block["thinking"], gains("thinking")),
            "text" => assert_eq!(block["text"], gains("text")),
            _ => assert_eq!(block["input"], serde_json::from_str::<Value>(&gains("partial_json")).unwrap()),
        }
    }
    assert_eq!(events[events.len() - 2]["delta"]["stop_reason"], "tool_use");

    let mut next = body;
    let results: Vec<_> =
        content[2..].iter().map(|call| json!({"type": "tool_result", "tool_use_id": call["id"], "content": "sun"})).collect();
    let turns = next["messages"].as_array_mut().unwrap();
    turns.extend([json!({"role": "assistant", "content": content}), json!({"role": "user", "content": results})]);
    assert_eq!(cluster.ask("/v1/messages", next).await.0, 200);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn it_says_why_it_ended() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), saying("one two END three")).await;
    for (more, reason, sequence) in [
        (json!({}), "end_turn", Value::Null),
        (json!({"max_tokens": 2}), "max_tokens", Value::Null),
        (json!({"stop_sequences": ["END"]}), "stop_sequence", json!("END")),
        (json!({"max_tokens": 1_000_000}), "end_turn", Value::Null),
    ] {
        let (status, message) = cluster.ask("/v1/messages", hello(more.clone())).await;
        assert_eq!((status, &message["stop_reason"], &message["stop_sequence"]), (200, &json!(reason), &sequence), "{more}: {message}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_differs_at_every_turn_is_not_in_the_prompt() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker = cluster.join("decode-0", decode(), saying("Yes.")).await;
    let turn = |header: &str, cache: Value| {
        json!({"system": [
            {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2; cch={header};")},
            {"type": "text", "text": "You help with code.", "cache_control": cache}]})
    };
    let mut prompts = Vec::new();
    for more in [turn("aaaa", json!({"type": "ephemeral"})), turn("bbbb", Value::Null)] {
        let (status, message) = cluster.ask("/v1/messages", hello(more)).await;
        assert_eq!(status, 200, "{message}");
        prompts.push(worker.decode_job().await.tokens.to_vec());
    }
    assert_eq!(prompts[0], prompts[1]);
    let text = text_model().tokenizer.decode(&prompts[0], false);
    assert!(text.contains("You help with code.") && !text.contains("billing"), "{text}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn errors_are_in_anthropics_words() {
    let cluster = Cluster::start(|_| ()).await;
    let (status, error) = cluster.ask("/v1/messages", hello(json!({}))).await;
    assert_eq!((status, &error["type"], &error["error"]["type"]), (503, &json!("error"), &json!("overloaded_error")), "{error}");
    let _worker = cluster.join("decode-0", decode(), saying("Yes.")).await;
    for (body, status, kind, word) in [
        (hello(json!({"model": "gpt"})), 404, "not_found_error", "gpt"),
        (hello(json!({"max_tokens": null})), 400, "invalid_request_error", "max_tokens"),
        (hello(json!({"max_tokens": 0})), 400, "invalid_request_error", "max_tokens"),
        (hello(json!({"messages": []})), 400, "invalid_request_error", "messages"),
        (
            hello(json!({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]})),
            400,
            "invalid_request_error",
            "image",
        ),
        (hello(json!({"tool_choice": {"type": "any"}})), 400, "invalid_request_error", "tool"),
        (json!([]), 400, "invalid_request_error", "object"),
    ] {
        let (got, error) = cluster.ask("/v1/messages", body.clone()).await;
        assert_eq!((got, &error["type"], &error["error"]["type"]), (status, &json!("error"), &json!(kind)), "{body}: {error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(word), "{error}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_of_a_text_and_back() {
    let cluster = Cluster::start(|_| ()).await;
    let text = "The tide turns the wheel. 🌊";
    let (status, tokenized) = cluster.ask("/tokenize", json!({"prompt": text, "return_token_strs": true})).await;
    assert_eq!(status, 200, "{tokenized}");
    let expected = text_model().tokenizer.encode(text, true).unwrap();
    assert_eq!((&tokenized["tokens"], &tokenized["count"]), (&json!(expected), &json!(expected.len())));
    assert_eq!(tokenized["token_strs"].as_array().unwrap().len(), expected.len());
    assert!(tokenized["max_model_len"].as_u64().unwrap() > 0);
    let (_, plain) = cluster.ask("/tokenize", json!({"prompt": text, "add_special_tokens": false})).await;
    assert_eq!(plain["token_strs"], Value::Null);
    let (_, back) = cluster.ask("/detokenize", json!({"tokens": plain["tokens"]})).await;
    assert_eq!(back, json!({"prompt": text}));
    let messages = json!([{"role": "user", "content": "Hello"}]);
    let (_, chat) = cluster.ask("/tokenize", json!({"messages": messages})).await;
    let (_, open) = cluster.ask("/tokenize", json!({"messages": messages, "add_generation_prompt": false})).await;
    assert!(chat["count"].as_u64().unwrap() > open["count"].as_u64().unwrap());
    for (path, body, status) in [
        ("/tokenize", json!({}), 400),
        ("/tokenize", json!({"prompt": "x", "model": "other"}), 404),
        ("/detokenize", json!({"tokens": [1_000_000]}), 400),
        ("/detokenize", json!({"tokens": "x"}), 400),
    ] {
        assert_eq!(cluster.ask(path, body.clone()).await.0, status, "{path} {body}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_are_embedded() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), saying("never said")).await;
    let (status, list) = cluster.ask("/v1/embeddings", json!({"model": "tiny", "input": [[5], [6, 7]]})).await;
    assert_eq!(status, 200, "{list}");
    let numbers = |value: &Value| value.as_array().unwrap().iter().map(|number| number.as_f64().unwrap()).collect::<Vec<_>>();
    let (one, two) = (numbers(&list["data"][0]["embedding"]), numbers(&list["data"][1]["embedding"]));
    assert_eq!((one.len(), two.len()), (2, 4), "in the order of the inputs");
    for embedding in [one, two] {
        assert!((embedding.iter().map(|number| number * number).sum::<f64>() - 1.0).abs() < 1e-6);
    }
    assert_eq!(list["usage"], json!({"prompt_tokens": 3, "total_tokens": 3}));
    let (_, bytes) = cluster.ask("/v1/embeddings", json!({"input": [5], "encoding_format": "base64"})).await;
    assert_eq!(bytes["data"][0]["embedding"], "mpkZP83MTD8=", "0.6 and 0.8, little-endian");
    let (_, first) = cluster.ask("/v1/embeddings", json!({"input": [6, 7], "dimensions": 3})).await;
    assert_eq!(numbers(&first["data"][0]["embedding"]).len(), 3);
    for (body, param) in [
        (json!({"input": "x", "dimensions": 0}), "dimensions"),
        (json!({"input": "x", "dimensions": 1_000_000}), "dimensions"),
        (json!({"input": "x", "encoding_format": "hex"}), "encoding_format"),
        (json!({"input": [[]]}), "input"),
        (json!({"input": [[1_000_000]]}), "input"),
        (json!({"model": "tiny"}), "input"),
    ] {
        let (status, error) = cluster.ask("/v1/embeddings", body.clone()).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!(param)), "{body}: {error}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_has_other_names() {
    let cluster = Cluster::start(|flags| flags.aliases = Some([("gpt-5".to_owned(), "tiny".to_owned())].into())).await;
    let _worker = cluster.join("decode-0", decode(), saying("Yes.")).await;
    let list: Value = cluster.get("/v1/models").await.json().await.unwrap();
    let names = |list: &Value, name: &str| list.as_array().unwrap().iter().map(|model| model[name].clone()).collect::<Vec<_>>();
    assert_eq!(names(&list["data"], "id"), [json!("tiny"), json!("gpt-5")]);
    assert_eq!(names(&list["models"], "slug"), [json!("tiny"), json!("gpt-5")]);
    assert_eq!((&list["has_more"], &list["first_id"], &list["last_id"]), (&json!(false), &json!("tiny"), &json!("gpt-5")));
    let page: Value = cluster.get("/v1/models?limit=1&after_id=tiny").await.json().await.unwrap();
    assert_eq!((&page["data"][0]["id"], &page["data"][0]["type"]), (&json!("gpt-5"), &json!("model")));
    assert_eq!(cluster.get("/v1/models/gpt-5").await.status(), 200);
    let (status, answer) = cluster.ask("/v1/messages", hello(json!({"model": "gpt-5"}))).await;
    assert_eq!((status, &answer["model"]), (200, &json!("tiny")));
    assert_eq!(cluster.ask("/v1/responses", json!({"model": "gpt-5", "input": "x"})).await.0, 200);
    cluster.stop().await;
}
