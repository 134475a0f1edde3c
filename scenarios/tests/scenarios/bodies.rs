//! The number of times a request's body is parsed, for any combination of features.

use crate::{
    listening::listen,
    support::{Cluster, Script, decode},
};
use serde_json::json;
use tidemill_coordinator::settings::{
    feedback::FeedbackFlags,
    routing::{RouteFlags, RouterFlags},
};

#[tokio::test(flavor = "multi_thread")]
async fn a_body_is_parsed_once_whoever_looks_at_it() {
    let parses = &listen().parses;
    let cluster = Cluster::start(|flags| {
        flags.feedback = Some(FeedbackFlags::default());
        // A rule that inspects the text.
        flags.router = Some(RouterFlags::default());
        flags.route = vec![RouteFlags { language: vec!["deu".into()], model: Some("tiny".into()), ..RouteFlags::default() }];
    })
    .await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[5, 6, 1])).await;
    let text = "The same words again. ".repeat(37);
    let message = json!([{"role": "user", "content": text}]);
    let asked = [
        ("/v1/chat/completions", json!({"messages": message})),
        ("/v1/chat/completions", json!({"messages": message, "conversation": "new"})),
        ("/v1/completions", json!({"prompt": text})),
        ("/v1/messages", json!({"max_tokens": 4, "messages": message})),
        ("/v1/messages/count_tokens", json!({"messages": message})),
        ("/v1/responses", json!({"input": text})),
        ("/tokenize", json!({"messages": message})),
    ];
    let mut counted = Vec::new();
    for (place, (path, mut body)) in asked.into_iter().enumerate() {
        // No two bodies have the same length.
        body["ignored"] = ".".repeat(1000 * place).into();
        let length = body.to_string().len();
        let (status, answer) = cluster.ask(path, body).await;
        assert_eq!(status, 200, "{path}: {answer}");
        counted.push((path, parses.of(length)));
    }
    assert!(counted.iter().all(|(_, parses)| *parses == 1), "{counted:?}");
    cluster.stop().await;
}
