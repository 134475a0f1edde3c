//! The number of times a request's body is parsed, and its prompt rendered, for any combination of features.

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

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_is_rendered_once_even_if_its_length_must_be_known_before() {
    let renders = &listen().renders;
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[5, 6, 1])).await;
    let words = "No other test says these words. ";
    let (status, counted) = cluster.ask("/tokenize", json!({"prompt": words.repeat(10)})).await;
    assert_eq!(status, 200, "{counted}");
    // Together, the two turns take more than half of the window of 2048 tokens, and less than the part that a dialog may fill.
    let turn = words.repeat(6500 / counted["count"].as_u64().unwrap() as usize);
    for (place, context) in ["none", "slide", "steps"].into_iter().enumerate() {
        // No two prompts have about the same length.
        let answer = "Yes. ".repeat(1 + 20 * place);
        let length = 2 * turn.len() + answer.len();
        let said = [("user", &turn), ("assistant", &answer), ("user", &turn)].map(|(role, text)| json!({"role": role, "content": text}));
        let (status, answer) = cluster.ask("/v1/chat/completions", json!({"messages": said, "context": context})).await;
        assert_eq!(status, 200, "{context}: {answer}");
        let tokens = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        assert!((1100..1500).contains(&tokens), "{context}: {tokens}");
        // The template adds 222 bytes.
        assert_eq!(renders.within(length + 200..length + 240), 1, "{context}");
    }
    cluster.stop().await;
}
