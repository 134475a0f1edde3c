//! Thinking budgets on their way from a client to a worker, in every protocol.

use crate::tools;
use serde_json::{Value, json};
use tidemill_proto::message::ToWorker;

const CHAT: &str = "/v1/chat/completions";
const RESPONSES: &str = "/v1/responses";
const MESSAGES: &str = "/v1/messages";

fn asked(path: &str, more: Value) -> Value {
    let hello = json!([{"role": "user", "content": "Hello"}]);
    let mut body = match path {
        RESPONSES => json!({"input": hello}),
        _ => json!({"messages": hello, "max_tokens": 3000}),
    };
    body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_reaches_the_worker_from_every_protocol() {
    let model = tools::model(tools::TEMPLATE);
    let (cluster, mut worker) = tools::cluster(model.path(), tools::REPLY).await;
    for (path, more, expected) in [
        (CHAT, json!({}), None),
        (CHAT, json!({"thinking_token_budget": 7}), Some(7)),
        (CHAT, json!({"thinking_token_budget": 7, "reasoning_effort": "high"}), Some(7)),
        (CHAT, json!({"reasoning_effort": "low"}), Some(1024)),
        (CHAT, json!({"reasoning_effort": "max"}), None),
        (CHAT, json!({"reasoning_effort": "none"}), Some(0)),
        (CHAT, json!({"chat_template_kwargs": {"enable_thinking": false}}), Some(0)),
        (RESPONSES, json!({}), None),
        (RESPONSES, json!({"thinking_token_budget": 0}), Some(0)),
        (RESPONSES, json!({"reasoning": {"effort": "medium"}}), Some(8192)),
        (MESSAGES, json!({}), Some(0)),
        (MESSAGES, json!({"thinking": {"type": "disabled"}}), Some(0)),
        (MESSAGES, json!({"thinking": {"type": "enabled", "budget_tokens": 2000}}), Some(2000)),
        (MESSAGES, json!({"thinking": {"type": "adaptive"}, "output_config": {"effort": "low"}}), Some(1024)),
    ] {
        let (status, answer) = cluster.ask(path, asked(path, more.clone())).await;
        assert_eq!(status, 200, "{path} {more}: {answer}");
        let limit = worker.expect(|message| match message {
            ToWorker::DecodeLimited { limit, .. } => Some(Some(limit.tokens_max)),
            ToWorker::Decode(_) => Some(None),
            _ => None,
        });
        assert_eq!(limit.await, expected, "{path} {more}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_budget_that_breaks_a_rule_is_refused_by_name() {
    let model = tools::model(tools::TEMPLATE);
    let (cluster, _worker) = tools::cluster(model.path(), tools::REPLY).await;
    for (path, more, param) in [
        (CHAT, json!({"thinking_token_budget": -1}), "thinking_token_budget"),
        (CHAT, json!({"thinking_token_budget": "many"}), "thinking_token_budget"),
        (CHAT, json!({"reasoning_effort": "much"}), "reasoning_effort"),
        (RESPONSES, json!({"reasoning": {"effort": "much"}}), "reasoning.effort"),
        (RESPONSES, json!({"thinking_token_budget": -1}), "thinking_token_budget"),
        (MESSAGES, json!({"thinking": {"type": "enabled"}}), "thinking.budget_tokens"),
        (MESSAGES, json!({"thinking": {"type": "enabled", "budget_tokens": 100}}), "thinking.budget_tokens"),
        (MESSAGES, json!({"thinking": {"type": "enabled", "budget_tokens": 3000}}), "thinking.budget_tokens"),
        (MESSAGES, json!({"thinking": {"type": "on"}}), "thinking.type"),
        (MESSAGES, json!({"output_config": {"effort": "much"}}), "output_config.effort"),
        ("/v1/completions", json!({"prompt": "Hello", "thinking_token_budget": 5}), "thinking_token_budget"),
    ] {
        let (status, answer) = cluster.ask(path, asked(path, more.clone())).await;
        assert!(
            status == 400 && answer["error"]["message"].as_str().unwrap().starts_with(&format!("`{param}`")),
            "{path} {more}: {answer}"
        );
    }
    cluster.stop().await;
}
