//! Tools and reasoning as a client sees them, with a scripted decode worker whose answers are those of a model that calls tools.

use crate::support::{Cluster, Script, Worker, decode, fixture};
use serde_json::{Value, json};
use std::path::Path;
use tidemill_gateway::text::TextModel;

const EOT: u32 = 1;
const CHAT: &str = "/v1/chat/completions";

/// A template in the style of Hermes and Qwen, with reasoning.
pub(crate) const TEMPLATE: &str = r#"
{%- if tools %}{{ '<|start_header_id|>tools<|end_header_id|>' }}{% for tool in tools %}{{ tool | tojson }}{% endfor %}{{ '<|eot_id|>' }}{% endif %}
{%- for m in messages %}
    {{- '<|start_header_id|>' + m.role + '<|end_header_id|>' }}
    {%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}
    {{- m.content or '' }}
    {%- for call in m.tool_calls or [] %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson + '}\n</tool_call>' }}
    {%- endfor %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% else %}{{ '<think>\n' }}{% endif %}
{%- endif %}"#;

/// The fixture's weights and tokenizer with a different template.
pub(crate) fn model(template: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(fixture("llama3").join(file), dir.path().join(file)).unwrap();
    }
    std::fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    dir
}

fn text_model() -> TextModel {
    TextModel::load(&fixture("llama3")).unwrap()
}

pub(crate) async fn cluster(model: &Path, reply: &str) -> (Cluster, Worker) {
    let cluster = Cluster::start(|flags| flags.model = vec![model.into()]).await;
    let reply = [text_model().tokenizer.encode(reply, false).unwrap(), vec![EOT]].concat();
    let worker = cluster.join("decode-0", decode(), Script::reply(&reply)).await;
    (cluster, worker)
}

fn tools() -> Value {
    json!([
        {"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": {
            "type": "object", "properties": {"place": {"type": "string"}, "days": {"type": "integer"}}, "required": ["place"]}}},
        {"type": "function", "function": {"name": "get_time"}},
    ])
}

fn body(more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": "What is the weather in 京都?"}], "tools": tools(), "seed": 3});
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

pub(crate) const REPLY: &str = "They ask about {京都}.\n</think>\n\nI look it up.\n<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"place\": \"京都 \
                     </tool_call> \\\"\", \"days\": 2}}\n</tool_call>\n<tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>";

#[tokio::test(flavor = "multi_thread")]
async fn calls_and_thoughts_streamed_are_those_at_once() {
    let model = model(TEMPLATE);
    let (cluster, mut worker) = cluster(model.path(), REPLY).await;
    let (status, whole) = cluster.ask(CHAT, body(json!({}))).await;
    assert_eq!(status, 200, "{whole}");
    let (choice, message) = (&whole["choices"][0], &whole["choices"][0]["message"]);
    assert_eq!(message["content"], "I look it up.");
    assert_eq!(
        (&message["reasoning"], &message["reasoning_content"]),
        (&json!("They ask about {京都}."), &json!("They ask about {京都}."))
    );
    assert_eq!(choice["finish_reason"], "tool_calls");
    let calls = message["tool_calls"].as_array().unwrap();
    assert_eq!(calls[0]["function"], json!({"name": "get_weather", "arguments": "{\"place\": \"京都 </tool_call> \\\"\", \"days\": 2}"}));
    assert_eq!(calls[1]["function"], json!({"name": "get_time", "arguments": "{}"}));
    assert!(calls.iter().all(|call| call["type"] == "function" && call["id"].as_str().unwrap().starts_with("call_")), "{calls:?}");
    let thought = whole["usage"]["completion_tokens_details"]["reasoning_tokens"].as_u64().unwrap();
    assert!(0 < thought && thought < whole["usage"]["completion_tokens"].as_u64().unwrap(), "{}", whole["usage"]);
    let prompt = text_model().tokenizer.decode(&worker.decode_job().await.tokens, false);
    assert!(
        prompt.contains(r#"{"type": "function", "function": {"name": "get_weather", "description": "Now.", "parameters": "#),
        "{prompt}"
    );

    let response = cluster.post(CHAT, body(json!({"stream": true}))).await.text().await.unwrap();
    let chunks: Vec<Value> = response
        .lines()
        .filter_map(|line| line.strip_prefix("data: ").filter(|data| *data != "[DONE]"))
        .map(|data| serde_json::from_str(data).unwrap())
        .collect();
    let mut assembled = json!({"content": "", "reasoning": "", "reasoning_content": "", "tool_calls": []});
    let mut finish = Vec::new();
    for chunk in &chunks {
        let choice = &chunk["choices"][0];
        finish.extend(choice["finish_reason"].as_str());
        let delta = &choice["delta"];
        for field in ["content", "reasoning", "reasoning_content"] {
            let text = assembled[field].as_str().unwrap().to_owned() + delta[field].as_str().unwrap_or_default();
            assembled[field] = json!(text);
        }
        let parts = delta["tool_calls"].as_array().cloned().unwrap_or_default();
        assert!(parts.len() <= 1, "one part at a time: {delta}");
        for part in parts {
            let known = assembled["tool_calls"].as_array_mut().unwrap();
            let index = part["index"].as_u64().unwrap() as usize;
            if index == known.len() {
                assert_eq!((&part["type"], &part["function"]["arguments"]), (&json!("function"), &json!("")), "first its name: {part}");
                known.push(json!({"id": part["id"], "type": part["type"], "function": part["function"]}));
            } else {
                assert!(part.get("id").is_none() && part.get("type").is_none() && part["function"].get("name").is_none(), "{part}");
                let arguments = &mut known[index]["function"]["arguments"];
                *arguments = json!(arguments.as_str().unwrap().to_owned() + part["function"]["arguments"].as_str().unwrap());
            }
        }
    }
    for field in ["content", "reasoning", "reasoning_content", "tool_calls"] {
        assert_eq!(assembled[field], message[field], "{field}: the same seed and prompt give the same ids, too");
    }
    assert_eq!(finish, ["tool_calls"]);
    let argument_parts = chunks.iter().filter(|chunk| chunk["choices"][0]["delta"]["tool_calls"][0]["function"]["name"].is_null());
    assert!(argument_parts.count() > 4, "arguments come as they are written");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_next_turn_has_the_calls_as_the_model_wrote_them() {
    let model = model(TEMPLATE);
    let (cluster, mut worker) = cluster(model.path(), REPLY).await;
    let (_, whole) = cluster.ask(CHAT, body(json!({}))).await;
    let first = worker.decode_job().await.tokens.to_vec();
    let mut next = body(json!({}));
    let messages = next["messages"].as_array_mut().unwrap();
    messages.push(whole["choices"][0]["message"].clone());
    for call in whole["choices"][0]["message"]["tool_calls"].as_array().unwrap() {
        messages.push(json!({"role": "tool", "tool_call_id": call["id"], "content": [{"type": "text", "text": "18 °C"}]}));
    }
    let (status, answer) = cluster.ask(CHAT, next).await;
    assert_eq!(status, 200, "{answer}");
    let decoded = |tokens: &[u32]| text_model().tokenizer.decode(tokens, false);
    let (before, after) = (decoded(&first), decoded(&worker.decode_job().await.tokens));
    let said = "<think>\nThey ask about {京都}.\n</think>\n\nI look it up.<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"place\": \
                \"京都 </tool_call> \\\"\", \"days\": 2}}\n</tool_call><tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>\
                <|eot_id|><|start_header_id|>tool<|end_header_id|>18 °C<|eot_id|>";
    assert!(after.starts_with(before.trim_end_matches("<think>\n")) && after.contains(said), "{after}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tools_that_are_not_to_be_called_are_not() {
    let model = model(TEMPLATE);
    let (cluster, mut worker) = cluster(model.path(), REPLY).await;
    let (_, answer) = cluster.ask(CHAT, body(json!({"tool_choice": "none", "chat_template_kwargs": {"enable_thinking": false}}))).await;
    assert_eq!(answer["choices"][0]["message"]["content"], REPLY, "{answer}");
    assert_eq!((&answer["choices"][0]["finish_reason"], &answer["choices"][0]["message"].get("reasoning")), (&json!("stop"), &None));
    let prompt = text_model().tokenizer.decode(&worker.decode_job().await.tokens, false);
    assert!(!prompt.contains("get_time") && prompt.ends_with("<think>\n\n</think>\n\n"), "{prompt}");
    let (_, answer) = cluster.ask(CHAT, body(json!({"parallel_tool_calls": false, "reasoning_effort": "low"}))).await;
    assert_eq!(answer["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1, "{answer}");
    let (_, answer) = cluster.ask(CHAT, body(json!({"max_tokens": 60}))).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length", "{answer}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_meant_is_refused() {
    let model = model(TEMPLATE);
    let (cluster, _worker) = cluster(model.path(), "x").await;
    let hi = json!({"role": "user", "content": "x"});
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    for (more, param) in [
        (json!({"tools": [], "tool_choice": "required"}), "tool_choice"),
        (json!({"tools": null, "tool_choice": named("get_time")}), "tool_choice"),
        (json!({"tool_choice": named("other")}), "tool_choice"),
        (json!({"tool_choice": "sometimes"}), "tool_choice"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tools": [named("a b")]}), "tools"),
        (json!({"tools": [named("a"), named("a")]}), "tools"),
        (json!({"tools": [{"type": "function", "function": {"name": "f", "parameters": [1]}}]}), "tools"),
        (json!({"reasoning_effort": "enormous"}), "reasoning_effort"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_completion_tokens": 0}), "max_tokens"),
        (json!({"messages": [hi, {"role": "wizard", "content": "x"}]}), "messages[1].role"),
        (json!({"messages": [hi, {"role": "tool", "content": "x"}]}), "messages[1].tool_call_id"),
    ] {
        let (status, answer) = cluster.ask(CHAT, body(more.clone())).await;
        assert_eq!((status, &answer["error"]["param"]), (400, &json!(param)), "{more}: {answer}");
    }
    for image in [json!({"type": "image_url", "image_url": {"url": "data:,"}}), json!({"type": "input_image", "image_url": "data:,"})] {
        let content = json!([{"type": "text", "text": "What is it?"}, image]);
        let (status, answer) = cluster.ask(CHAT, body(json!({"messages": [{"role": "user", "content": content}]}))).await;
        assert_eq!((status, &answer["error"]["message"]), (400, &json!("image input is not supported by this model")), "{answer}");
    }
    let post = |content_type: &'static str, body: &'static [u8]| {
        reqwest::Client::new().post(format!("{}{CHAT}", cluster.url)).header("content-type", content_type).body(body).send()
    };
    let body = br#"{"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}"#;
    assert_eq!(post("application/json; charset=utf-8", body).await.unwrap().status(), 200);
    assert_eq!(post("text/plain", body).await.unwrap().status(), 415);
    let no_utf8 = b"{\"messages\": [{\"role\": \"user\", \"content\": \"x\"}], \"user\": \"\xff\"}";
    assert_eq!(post("application/json", no_utf8).await.unwrap().status(), 400);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_are_counted() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40, 41, 42])).await;
    let counted = async || {
        let metrics = cluster.get("/metrics").await.text().await.unwrap();
        ["tidemill_prompt_tokens_total ", "tidemill_generation_tokens_total "].map(|name| {
            let line = metrics.lines().find_map(|line| line.strip_prefix(name));
            line.map_or(0.0, |value| value.parse::<f64>().unwrap())
        })
    };
    let before = counted().await;
    let (status, _) = cluster.ask("/v1/completions", json!({"prompt": [50, 51, 52, 53], "max_tokens": 3})).await;
    assert_eq!(status, 200);
    // Other tests increase the counters in the same process.
    let after = counted().await;
    assert!(after[0] >= before[0] + 4.0 && after[1] >= before[1] + 3.0, "{before:?} {after:?}");
    cluster.stop().await;
}

/// A request in each protocol, and the text, reasoning and calls of its answer.
async fn in_every_protocol(cluster: &Cluster, max_tokens: u32, forced: bool) -> Vec<(&'static str, String, String, Vec<String>)> {
    let (question, parameters) = ("Weather?", json!({"type": "object", "properties": {"place": {"type": "string"}}}));
    let names = ["get_weather", "get_time"];
    let join = |items: &Value, kind: &str, field: &str| {
        let of_kind = items.as_array().unwrap().iter().filter(|item| item["type"] == kind);
        of_kind.map(|item| item[field].as_str().unwrap_or_default()).collect::<String>()
    };
    let called = |items: &Value, kind: &str| {
        let calls = items.as_array().into_iter().flatten().filter(|item| kind.is_empty() || item["type"] == kind);
        calls.map(|call| call["name"].as_str().or(call["function"]["name"].as_str()).unwrap().to_owned()).collect::<Vec<_>>()
    };
    let choice = if forced { "required" } else { "auto" };

    let functions = names.map(|name| json!({"type": "function", "function": {"name": name, "parameters": parameters}}));
    let body = json!({"messages": [{"role": "user", "content": question}], "tools": functions, "tool_choice": choice, "max_tokens": max_tokens,
        "chat_template_kwargs": {"enable_thinking": false}});
    let (status, chat) = cluster.ask(CHAT, body).await;
    assert_eq!(status, 200, "{chat}");
    let message = &chat["choices"][0]["message"];
    let text = |field: &str| message[field].as_str().unwrap_or_default().to_owned();
    let of_chat = ("chat", text("content"), text("reasoning"), called(&message["tool_calls"], ""));

    let functions = names.map(|name| json!({"type": "function", "name": name, "parameters": parameters}));
    let body = json!({"input": question, "tools": functions, "tool_choice": choice, "max_output_tokens": max_tokens, "reasoning": {"effort": "none"}});
    let (status, response) = cluster.ask("/v1/responses", body).await;
    assert_eq!(status, 200, "{response}");
    let output = &response["output"];
    let said: Vec<Value> =
        output.as_array().unwrap().iter().flat_map(|item| item["content"].as_array().cloned().unwrap_or_default()).collect();
    let said = Value::from(said);
    let (text, thought) = (join(&said, "output_text", "text"), join(&said, "reasoning_text", "text"));
    let of_responses = ("responses", text, thought, called(output, "function_call"));

    let functions = names.map(|name| json!({"name": name, "input_schema": parameters}));
    let choice = if forced { "any" } else { "auto" };
    let body = json!({"messages": [{"role": "user", "content": question}], "tools": functions, "tool_choice": {"type": choice}, "max_tokens": max_tokens});
    let (status, message) = cluster.ask("/v1/messages", body).await;
    assert_eq!(status, 200, "{message}");
    let content = &message["content"];
    let of_messages = ("messages", join(content, "text", "text"), join(content, "thinking", "thinking"), called(content, "tool_use"));
    vec![of_chat, of_responses, of_messages]
}

#[tokio::test(flavor = "multi_thread")]
async fn a_forced_call_that_was_cut_is_no_text_in_any_protocol() {
    let model = model(TEMPLATE);
    let whole = "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>";
    let begun = format!("{whole}\n<tool_call>\n{{\"name\": \"get_wea");
    let (cluster, _worker) = cluster(model.path(), &format!("{begun}ther\", \"arguments\": {{}}}}\n</tool_call>")).await;
    let most = text_model().tokenizer.encode(&begun, false).unwrap().len() as u32;
    let least = text_model().tokenizer.encode(&format!("{whole}\n"), false).unwrap().len() as u32;
    for max_tokens in [least, (least + most) / 2, most] {
        for (protocol, text, _, calls) in in_every_protocol(&cluster, max_tokens, true).await {
            assert_eq!((text.as_str(), &calls[..]), ("", &["get_time".to_owned()][..]), "{protocol}, {max_tokens} tokens");
        }
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_call_again_and_again_ends_the_turn() {
    let model = model(TEMPLATE);
    let call = "<tool_call>\n{\"name\": \"get_time\", \"arguments\": {}}\n</tool_call>\n";
    let (cluster, _worker) = cluster(model.path(), &call.repeat(3)).await;
    let tokens = 1 + text_model().tokenizer.encode(&call.repeat(3), false).unwrap().len() as u32;
    for (protocol, text, _, calls) in in_every_protocol(&cluster, tokens, true).await {
        assert_eq!((text.as_str(), calls.len()), ("", 1), "{protocol}");
    }
    for (protocol, _, _, calls) in in_every_protocol(&cluster, tokens, false).await {
        assert_eq!(calls.len(), 3, "{protocol}: what the model likes to call is its own affair");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_that_thinks_all_the_same_has_thought() {
    let model = model(TEMPLATE);
    let (cluster, mut worker) = cluster(model.path(), "<think>\nhm\n</think>\n\nYes.").await;
    for (protocol, text, thought, _) in in_every_protocol(&cluster, 60, false).await {
        assert_eq!((text.as_str(), thought.as_str()), ("Yes.", "hm"), "{protocol}");
        let prompt = text_model().tokenizer.decode(&worker.decode_job().await.tokens, false);
        assert!(prompt.ends_with("<think>\n\n</think>\n\n"), "{prompt}");
    }
    cluster.stop().await;
}

/// Functions and their calls in OpenAI's original fields.
#[tokio::test(flavor = "multi_thread")]
async fn the_older_fields_of_functions_are_answered_in_kind() {
    let model = model(TEMPLATE);
    let (cluster, mut worker) =
        cluster(model.path(), "</think><tool_call>\n{\"name\": \"get_time\", \"arguments\": {\"zone\": 9}}\n</tool_call>").await;
    let functions = json!([{"name": "get_time", "parameters": {"type": "object", "properties": {}}}]);
    let hi = json!({"role": "user", "content": ["Time?", {"type": "input_text", "text": "Please."}]});
    let (status, answer) = cluster.ask(CHAT, json!({"messages": [hi], "functions": functions, "function_call": "auto"})).await;
    let choice = &answer["choices"][0];
    let call = json!({"name": "get_time", "arguments": "{\"zone\": 9}"});
    assert_eq!((status, &choice["finish_reason"], &choice["message"]["function_call"]), (200, &json!("function_call"), &call), "{answer}");
    worker.decode_job().await;
    let history = [hi, choice["message"].clone(), json!({"role": "function", "name": "get_time", "content": "noon"})];
    let (status, answer) = cluster.ask(CHAT, json!({"messages": history, "functions": functions})).await;
    assert_eq!(status, 200, "{answer}");
    let prompt = text_model().tokenizer.decode(&worker.decode_job().await.tokens, false);
    assert!(
        prompt.contains("Time?\nPlease.")
            && prompt.contains("\"arguments\": {\"zone\": 9}}")
            && prompt.contains("tool<|end_header_id|>noon"),
        "{prompt}"
    );
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_custom_tool_is_called_with_text() {
    let model = model(TEMPLATE);
    let reply = "</think><tool_call>\n{\"name\": \"patch\", \"arguments\": {\"input\": \"a\\n\\\"b\\\"\"}}\n</tool_call>";
    let (cluster, mut worker) = cluster(model.path(), reply).await;
    let hi = json!([{"role": "user", "content": "x"}]);
    let tool = json!([{"type": "custom", "custom": {"name": "patch", "description": "Patches."}}]);
    let (status, answer) = cluster.ask(CHAT, json!({"messages": hi, "tools": tool, "tool_choice": "any"})).await;
    let call = &answer["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(
        (status, &call["type"], &call["custom"]),
        (200, &json!("custom"), &json!({"name": "patch", "input": "a\n\"b\""})),
        "{answer}"
    );
    worker.decode_job().await;
    let tool = json!([{"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"}}]);
    let (status, response) = cluster.ask("/v1/responses", json!({"input": "x", "tools": tool})).await;
    let item =
        &response["output"].as_array().unwrap().iter().find(|item| item["type"] == "custom_tool_call").unwrap_or(&Value::Null).clone();
    assert_eq!((status, &item["name"], &item["input"]), (200, &json!("patch"), &json!("a\n\"b\"")), "{response}");
    worker.decode_job().await;
    let input =
        json!([{"role": "user", "content": "x"}, item, {"type": "custom_tool_call_output", "call_id": item["call_id"], "output": "done"}]);
    let (status, response) = cluster.ask("/v1/responses", json!({"input": input, "tools": tool})).await;
    assert_eq!(status, 200, "{response}");
    let prompt = text_model().tokenizer.decode(&worker.decode_job().await.tokens, false);
    assert!(prompt.contains(r#""arguments": {"input": "a\n\"b\""}}"#) && prompt.contains("start: /.+/"), "{prompt}");
    cluster.stop().await;
}
