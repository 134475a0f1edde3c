//! `/v1/responses` and `/v1/conversations` with a scripted decode worker behind them.

use crate::{
    support::{Cluster, Script, Worker, decode, fixture},
    tools,
};
use serde_json::{Value, json};
use tidemill_gateway::text::TextModel;

const EOT: u32 = 1;

fn text_model() -> TextModel {
    TextModel::load(&fixture("llama3")).unwrap()
}

/// A script that generates this text and the end of the turn.
fn saying(text: &str) -> Script {
    Script::reply(&[text_model().tokenizer.encode(text, false).unwrap(), vec![EOT]].concat())
}

/// The text of the next job's prompt.
async fn prompt(worker: &mut Worker) -> String {
    let job = worker.decode_job().await;
    text_model().tokenizer.decode(&job.tokens, true)
}

/// The events of a stream, each checked for its sequence number and the name on its line.
async fn events(cluster: &Cluster, body: Value) -> Vec<Value> {
    let text = cluster.post("/v1/responses", body).await.text().await.unwrap();
    let mut events: Vec<Value> = Vec::new();
    for block in text.split("\n\n").filter(|block| !block.trim().is_empty() && !block.starts_with(':')) {
        let (name, data) = block.split_once('\n').unwrap();
        let event: Value = serde_json::from_str(data.strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(name.strip_prefix("event: "), event["type"].as_str());
        assert_eq!(event["sequence_number"], events.len());
        events.push(event);
    }
    events
}

async fn get(cluster: &Cluster, path: &str) -> (u16, Value) {
    let response = cluster.get(path).await;
    (response.status().as_u16(), response.json().await.unwrap())
}

async fn delete(cluster: &Cluster, path: &str) -> (u16, Value) {
    let response = reqwest::Client::new().delete(format!("{}{path}", cluster.url)).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

fn id(response: &Value) -> &str {
    response["id"].as_str().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_response_streamed_is_the_response_at_once() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), saying("The tide turns the wheel. 🌊")).await;
    let mut body = json!({"model": "tiny", "input": "Hello", "instructions": "Be brief.", "metadata": {"who": "test"},
        "tools": [{"type": "web_search"}, {"type": "function", "name": "look", "parameters": {"type": "object", "properties": {}}}]});
    let (status, whole) = cluster.ask("/v1/responses", body.clone()).await;
    assert_eq!(status, 200, "{whole}");
    assert_eq!((&whole["object"], &whole["status"], &whole["error"]), (&json!("response"), &json!("completed"), &Value::Null));
    let [message] = &whole["output"].as_array().unwrap()[..] else { panic!("{whole}") };
    assert_eq!((&message["type"], &message["role"], &message["status"]), (&json!("message"), &json!("assistant"), &json!("completed")));
    assert_eq!(message["content"][0]["text"], "The tide turns the wheel. 🌊");
    assert_eq!((&whole["metadata"]["who"], &whole["instructions"]), (&json!("test"), &json!("Be brief.")));
    assert_eq!(whole["tools"].as_array().unwrap().len(), 1, "only functions are understood");
    assert_eq!(whole["usage"]["input_tokens_details"]["cached_tokens"], 16);
    assert_eq!(
        whole["usage"]["total_tokens"],
        whole["usage"]["input_tokens"].as_u64().unwrap() + whole["usage"]["output_tokens"].as_u64().unwrap()
    );

    body["stream"] = json!(true);
    let events = events(&cluster, body).await;
    let names: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    assert_eq!(names[..4], ["response.created", "response.in_progress", "response.output_item.added", "response.content_part.added"]);
    let tail = ["response.output_text.done", "response.content_part.done", "response.output_item.done", "response.completed"];
    assert_eq!(names[names.len() - 4..], tail);
    assert!(names[4..names.len() - 4].iter().all(|name| *name == "response.output_text.delta"));
    let text: String = events.iter().filter_map(|event| event["delta"].as_str()).collect();
    assert_eq!(text, "The tide turns the wheel. 🌊");
    let last = &events.last().unwrap()["response"];
    assert_eq!((id(last), &last["usage"]["output_tokens"]), (id(&events[0]["response"]), &whole["usage"]["output_tokens"]));
    assert_eq!(last["output"][0]["content"], whole["output"][0]["content"]);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stored_response_can_be_gone_on_from() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker = cluster.join("decode-0", decode(), saying("Kyoto is fine.")).await;
    let (_, first) = cluster.ask("/v1/responses", json!({"input": "My city is Kyoto", "instructions": "Whisper."})).await;
    assert!(prompt(&mut worker).await.contains("Whisper."));
    let (status, stored) = get(&cluster, &format!("/v1/responses/{}", id(&first))).await;
    assert_eq!((status, &stored), (200, &first));

    let (_, second) = cluster.ask("/v1/responses", json!({"input": "And now?", "previous_response_id": id(&first)})).await;
    assert_eq!(second["previous_response_id"], first["id"]);
    let seen = prompt(&mut worker).await;
    let places: Vec<_> = ["My city is Kyoto", "Kyoto is fine.", "And now?"].iter().map(|text| seen.find(text).expect(text)).collect();
    assert!(places.is_sorted(), "{seen}");
    assert!(!seen.contains("Whisper."), "instructions are not inherited");

    let (_, page) = get(&cluster, &format!("/v1/responses/{}/input_items?order=asc&limit=2", id(&second))).await;
    assert_eq!((page["data"].as_array().unwrap().len(), &page["has_more"]), (2, &json!(true)));
    assert_eq!(page["data"][0]["content"][0], json!({"type": "input_text", "text": "My city is Kyoto"}));
    assert_eq!(page["data"][1]["id"], first["output"][0]["id"]);
    let after = page["last_id"].as_str().unwrap();
    let (_, rest) = get(&cluster, &format!("/v1/responses/{}/input_items?order=asc&after={after}", id(&second))).await;
    assert_eq!((rest["data"].as_array().unwrap().len(), &rest["has_more"]), (1, &json!(false)));

    let (status, gone) = delete(&cluster, &format!("/v1/responses/{}", id(&first))).await;
    assert_eq!((status, &gone["deleted"]), (200, &json!(true)));
    assert_eq!(get(&cluster, &format!("/v1/responses/{}", id(&first))).await.0, 404);
    let (status, lost) = cluster.ask("/v1/responses", json!({"input": "x", "previous_response_id": id(&first)})).await;
    assert_eq!((status, &lost["error"]["param"]), (404, &json!("previous_response_id")), "{lost}");
    let (status, third) = cluster.ask("/v1/responses", json!({"input": "Still?", "previous_response_id": id(&second)})).await;
    assert_eq!(status, 200, "{third}");
    assert!(prompt(&mut worker).await.contains("My city is Kyoto"), "the second response keeps its own history");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_stored_is_not_there() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), saying("Yes.")).await;
    let (_, response) = cluster.ask("/v1/responses", json!({"input": "x", "store": false})).await;
    assert_eq!(response["store"], false);
    for path in [format!("/v1/responses/{}", id(&response)), "/v1/responses/resp_none/input_items".into(), "/v1/responses/conv_x".into()] {
        let (status, error) = get(&cluster, &path).await;
        assert_eq!((status, &error["error"]["param"]), (404, &json!("response_id")), "{path}");
    }
    let (status, _) = cluster.ask("/v1/responses", json!({"input": "x", "previous_response_id": id(&response)})).await;
    assert_eq!(status, 404);
    assert_eq!(cluster.ask("/v1/responses/resp_none/cancel", json!({})).await.0, 404);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn too_few_tokens_leave_it_incomplete() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), saying("one two three four five")).await;
    let (_, response) = cluster.ask("/v1/responses", json!({"input": "x", "max_output_tokens": 2})).await;
    assert_eq!((&response["status"], &response["incomplete_details"]), (&json!("incomplete"), &json!({"reason": "max_output_tokens"})));
    assert_eq!((&response["output"][0]["status"], &response["usage"]["output_tokens"]), (&json!("incomplete"), &json!(2)));
    let events = events(&cluster, json!({"input": "x", "max_output_tokens": 2, "stream": true})).await;
    assert_eq!(events.last().unwrap()["type"], "response.incomplete");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_streamed_response_can_be_cancelled() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker = cluster.join("decode-0", decode(), Script { stall_after: 3, ..saying("one two three four five six") }).await;
    let mut response = cluster.post("/v1/responses", json!({"input": "x", "stream": true})).await;
    let mut text = String::new();
    while !text.contains("output_text.delta") {
        text += std::str::from_utf8(&response.chunk().await.unwrap().unwrap()).unwrap();
    }
    let data = text.lines().find_map(|line| line.strip_prefix("data: ")).unwrap();
    let created: Value = serde_json::from_str(data).unwrap();
    let path = format!("/v1/responses/{}", id(&created["response"]));
    assert_eq!(get(&cluster, &path).await.1["status"], "in_progress");
    let (status, cancelled) = cluster.ask(&format!("{path}/cancel"), json!({})).await;
    assert_eq!((status, &cancelled["status"]), (200, &json!("cancelled")));
    let rest = response.text().await.unwrap();
    assert!(rest.contains("event: response.incomplete") && rest.contains(r#""status":"cancelled""#), "{rest}");
    worker.expect(|message| matches!(message, tidemill_proto::message::ToWorker::CancelSequence { .. }).then_some(())).await;
    assert_eq!(get(&cluster, &path).await.1["status"], "cancelled");
    let (status, _) = cluster.ask(&format!("{path}/cancel"), json!({})).await;
    assert_eq!(status, 200, "once is enough");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn calls_and_their_results_are_turns() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker = cluster.join("decode-0", decode(), saying("Sunny.")).await;
    let input = json!([
        {"role": "developer", "content": "Use tools."},
        {"role": "user", "content": [{"type": "input_text", "text": "Weather?"}]},
        {"type": "function_call", "call_id": "call_7", "name": "look", "arguments": "{\"city\":\"Kyoto\"}"},
        {"type": "function_call_output", "call_id": "call_7", "output": "sun all day"},
    ]);
    let (status, response) = cluster.ask("/v1/responses", json!({"input": input})).await;
    assert_eq!(status, 200, "{response}");
    let seen = prompt(&mut worker).await;
    for text in ["Use tools.", "Weather?", "sun all day"] {
        assert!(seen.contains(text), "{text} in {seen}");
    }
    let (_, page) = get(&cluster, &format!("/v1/responses/{}/input_items?order=asc", id(&response))).await;
    let output = &page["data"][3];
    assert_eq!(
        (&output["type"], &output["call_id"], &output["output"]),
        (&json!("function_call_output"), &json!("call_7"), &json!("sun all day"))
    );
    let reference =
        json!({"input": [{"type": "item_reference", "id": output["id"]}, {"role": "user", "content": "Sure?"}], "store": false});
    assert_eq!(cluster.ask("/v1/responses", reference).await.0, 200);
    assert!(prompt(&mut worker).await.contains("sun all day"));
    let (status, error) = cluster.ask("/v1/responses", json!({"input": [{"type": "item_reference", "id": "msg_none"}]})).await;
    assert_eq!(status, 404, "{error}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thought_a_text_and_calls_are_items() {
    let model = tools::model(tools::TEMPLATE);
    let (cluster, mut worker) = tools::cluster(model.path(), tools::REPLY).await;
    let functions =
        json!([{"type": "function", "name": "get_weather", "parameters": {"type": "object"}}, {"type": "function", "name": "get_time"}]);
    let body = json!({"input": "Weather?", "tools": functions, "seed": 3});
    let (status, first) = cluster.ask("/v1/responses", body.clone()).await;
    assert_eq!(status, 200, "{first}");
    let output = first["output"].as_array().unwrap();
    let kinds: Vec<_> = output.iter().map(|item| item["type"].as_str().unwrap()).collect();
    assert_eq!(kinds, ["reasoning", "message", "function_call", "function_call"]);
    assert_eq!(output[0]["content"][0], json!({"type": "reasoning_text", "text": "They ask about {京都}."}));
    assert_eq!(output[1]["content"][0]["text"], "I look it up.");
    assert_eq!((&output[2]["name"], &output[3]["arguments"], &first["status"]), (&json!("get_weather"), &json!("{}"), &json!("completed")));
    assert!(first["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64().unwrap() > 0);
    let begun = prompt(&mut worker).await;

    let results: Vec<_> =
        output[2..].iter().map(|call| json!({"type": "function_call_output", "call_id": call["call_id"], "output": "sun"})).collect();
    let next = json!({"input": results, "previous_response_id": first["id"], "tools": functions});
    assert_eq!(cluster.ask("/v1/responses", next).await.0, 200);
    let gone_on = prompt(&mut worker).await;
    // The model's earlier prompt and answer reappear unchanged, so that their KV is found.
    let written = begun + tools::REPLY;
    let squeezed = |text: &str| text.split_whitespace().collect::<String>();
    assert!(squeezed(&gone_on).starts_with(&squeezed(&written)), "{gone_on}\n\n{written}");

    let mut streamed = body;
    streamed["stream"] = json!(true);
    let events = events(&cluster, streamed).await;
    let last = &events.last().unwrap()["response"];
    let told = |name: &str| events.iter().filter(|event| event["type"] == name).cloned().collect::<Vec<_>>();
    assert_eq!((told("response.reasoning_text.done").len(), told("response.output_text.done").len()), (1, 1));
    for done in told("response.function_call_arguments.done") {
        let deltas: String = told("response.function_call_arguments.delta")
            .iter()
            .filter(|delta| delta["item_id"] == done["item_id"])
            .filter_map(|delta| delta["delta"].as_str().map(str::to_owned))
            .collect();
        assert_eq!(done["arguments"], deltas);
    }
    for (streamed, whole) in last["output"].as_array().unwrap().iter().zip(output) {
        assert_eq!(
            (&streamed["content"], &streamed["arguments"], &streamed["call_id"]),
            (&whole["content"], &whole["arguments"], &whole["call_id"])
        );
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_conversation_remembers() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker = cluster.join("decode-0", decode(), saying("Noted.")).await;
    let items = json!([{"role": "user", "content": "I am Ada."}, {"role": "assistant", "content": "Hello Ada."}]);
    let (status, conversation) = cluster.ask("/v1/conversations", json!({"metadata": {"topic": "names"}, "items": items})).await;
    assert_eq!((status, &conversation["object"]), (200, &json!("conversation")), "{conversation}");
    let path = format!("/v1/conversations/{}", id(&conversation));
    for stores in [true, false] {
        let body = json!({"input": "Remember this.", "conversation": conversation["id"], "store": stores});
        let (status, response) = cluster.ask("/v1/responses", body).await;
        assert_eq!((status, &response["conversation"]["id"]), (200, &conversation["id"]), "{response}");
        assert!(prompt(&mut worker).await.contains("I am Ada."));
    }
    let (_, page) = get(&cluster, &format!("{path}/items?order=asc")).await;
    let items = page["data"].as_array().unwrap();
    assert_eq!(items.len(), 6, "two at first, and two of each turn: {page}");
    assert_ne!(items[2]["id"], items[4]["id"], "the same words twice are two items");
    let (_, added) = cluster.ask(&format!("{path}/items"), json!({"items": [{"role": "user", "content": "Later."}]})).await;
    let later = id(&added["data"][0]).to_owned();
    assert_eq!(get(&cluster, &format!("{path}/items/{later}")).await.1["content"][0]["text"], "Later.");
    assert_eq!(delete(&cluster, &format!("{path}/items/{later}")).await.1["id"], conversation["id"]);
    assert_eq!(get(&cluster, &format!("{path}/items/{later}")).await.0, 404);
    let (_, changed) = cluster.ask(&path, json!({"metadata": {"topic": "none"}})).await;
    assert_eq!((&changed["metadata"]["topic"], get(&cluster, &path).await.1), (&json!("none"), changed.clone()));
    assert_eq!(delete(&cluster, &path).await.1["deleted"], true);
    let (status, error) = cluster.ask("/v1/responses", json!({"input": "x", "conversation": conversation["id"]})).await;
    assert_eq!((status, &error["error"]["param"]), (404, &json!("conversation")));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_data_directory_outlives_the_coordinator() {
    let data = tempfile::tempdir().unwrap();
    let dir = data.path().join("coordinator-0");
    let cluster = Cluster::start(|flags| flags.data = Some(dir.clone())).await;
    let worker = cluster.join("decode-0", decode(), saying("Kept.")).await;
    let (_, first) = cluster.ask("/v1/responses", json!({"input": "Keep this"})).await;
    worker.kill().await;
    cluster.stop().await;
    let cluster = Cluster::start(|flags| flags.data = Some(dir.clone())).await;
    let mut worker = cluster.join("decode-0", decode(), saying("Kept.")).await;
    assert_eq!(get(&cluster, &format!("/v1/responses/{}", id(&first))).await, (200, first.clone()));
    let (status, _) = cluster.ask("/v1/responses", json!({"input": "Go on", "previous_response_id": id(&first)})).await;
    assert_eq!(status, 200);
    assert!(prompt(&mut worker).await.contains("Keep this"));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_done_is_refused_by_name() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), saying("x")).await;
    for (body, param) in [
        (json!({"input": "x", "background": true}), "background"),
        (json!({"input": "x", "previous_response_id": "resp_1", "conversation": "conv_1"}), "previous_response_id"),
        (json!({}), "input"),
        (json!({"input": 3}), "input"),
        (json!({"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}), "input[0].content"),
        (json!({"input": "x", "tool_choice": "required"}), "tool_choice"),
        (json!({"input": "x", "metadata": {"a": "b".repeat(600)}}), "metadata"),
        (json!({"input": "x", "prompt": {"id": "pmpt_1"}}), "prompt"),
    ] {
        let (status, error) = cluster.ask("/v1/responses", body.clone()).await;
        assert_eq!((status, &error["error"]["param"]), (400, &json!(param)), "{body}: {error}");
    }
    let (status, error) = get(&cluster, "/v1/responses/resp_1/input_items?limit=1000").await;
    assert_eq!((status, &error["error"]["param"]), (400, &json!("limit")));
    cluster.stop().await;
}
