//! Habits of clients and intermediaries: pages of other origins, pasted base URLs, bodies as JavaScript writes them, load balancers that
//! notice late.

use crate::support::{Cluster, Script, decode};
use reqwest::{Client, Method, Response};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

async fn send(cluster: &Cluster, method: Method, path: &str, headers: &[(&str, &str)], body: impl Into<Vec<u8>>) -> Response {
    let request = Client::new().request(method, format!("{}{path}", cluster.url)).body(body.into());
    headers.iter().fold(request, |request, (name, value)| request.header(*name, *value)).send().await.unwrap()
}

fn header<'a>(response: &'a Response, name: &str) -> Option<&'a str> {
    response.headers().get(name).map(|value| value.to_str().unwrap())
}

const PAGE: &str = "https://chat.example";
const JSON: (&str, &str) = ("content-type", "application/json");

#[tokio::test(flavor = "multi_thread")]
async fn pages_of_named_origins_use_the_front_door_and_others_do_not() {
    let cluster = Cluster::start(|flags| flags.cors_origins = Some(vec![PAGE.into()])).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40, 41])).await;
    let asks = [("origin", PAGE), ("access-control-request-method", "POST"), ("access-control-request-headers", "authorization,x-a")];
    for path in ["/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/models", "/v1/conversations/conv_1", "/no/such/route"] {
        let preflight = send(&cluster, Method::OPTIONS, path, &asks, "").await;
        assert!(preflight.status().is_success(), "{path}: {}", preflight.status());
        assert_eq!(header(&preflight, "access-control-allow-origin"), Some(PAGE), "{path}");
        assert!(header(&preflight, "access-control-allow-methods").unwrap().contains("POST"));
        assert!(header(&preflight, "access-control-allow-headers").unwrap().contains("x-a"));
    }
    let hi = |stream: bool| json!({"messages": [{"role": "user", "content": "hi"}], "stream": stream}).to_string();
    for (body, status) in [(hi(false), 200), (hi(true), 200), ("{}".to_owned(), 400), ("not JSON".to_owned(), 400)] {
        let answer = send(&cluster, Method::POST, "/v1/chat/completions", &[JSON, ("origin", PAGE)], body.clone()).await;
        assert_eq!((answer.status().as_u16(), header(&answer, "access-control-allow-origin")), (status, Some(PAGE)), "{body}");
        let shown = header(&answer, "access-control-expose-headers").unwrap();
        assert!(shown.contains("x-request-id") && shown.contains("retry-after") && header(&answer, "x-request-id").is_some(), "{shown}");
    }
    for other in ["https://evil.example", "https://chat.example.evil.example", "null"] {
        let answer = send(&cluster, Method::POST, "/v1/chat/completions", &[JSON, ("origin", other)], hi(false)).await;
        assert_eq!((answer.status().as_u16(), header(&answer, "access-control-allow-origin")), (403, None), "{other}");
    }
    cluster.stop().await;
    // No origin is configured.
    let cluster = Cluster::start(|_| ()).await;
    let preflight = send(&cluster, Method::OPTIONS, "/v1/chat/completions", &asks, "").await;
    assert_eq!(header(&preflight, "access-control-allow-origin"), None);
    cluster.stop().await;
    let cluster = Cluster::start(|flags| flags.cors_origins = Some(vec!["*".into()])).await;
    let answer = send(&cluster, Method::GET, "/v1/models", &[("origin", PAGE)], "").await;
    assert_eq!((answer.status().as_u16(), header(&answer, "access-control-allow-origin")), (200, Some("*")));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn paths_that_users_paste_answer_as_meant_or_say_what_to_use() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    for path in ["/v1/models", "/v1/models/", "//v1/models", "/v1//models", "/openai/v1/models", "/v1/v1/models", "/v1/models/tiny/"] {
        for method in [Method::GET, Method::HEAD] {
            assert_eq!(send(&cluster, method.clone(), path, &[], "").await.status(), 200, "{method} {path}");
        }
    }
    let hi = json!({"messages": [{"role": "user", "content": "hi"}]}).to_string();
    for path in ["/v1/chat/completions/", "/openai/v1/chat/completions", "/v1/v1/chat/completions", "//v1//chat/completions"] {
        assert_eq!(send(&cluster, Method::POST, path, &[JSON], hi.clone()).await.status(), 200, "{path}");
    }
    for path in ["/chat/completions", "/v1/chat/completions/chat/completions", "/api/v1/chat/completions", "/v1"] {
        let answer = send(&cluster, Method::POST, path, &[JSON], hi.clone()).await;
        assert_eq!(answer.status(), 404, "{path}");
        let error: Value = answer.json().await.unwrap();
        let message = error["error"]["message"].as_str().unwrap();
        assert!(message.contains("Did you mean /v1/chat/completions?"), "{path}: {message}");
    }
    for method in [Method::GET, Method::HEAD] {
        assert_eq!(send(&cluster, method, "/", &[], "").await.status(), 200, "some clients look whether the host is there");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_are_read_as_clients_write_them() {
    let cluster = Cluster::start(|_| ()).await;
    let mut worker = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let hi = r#""messages": [{"role": "user", "content": "hi"}]"#;
    for (path, around) in [
        ("/v1/chat/completions", [r#"{"messages": [{"role": "user", "content": "#, "}]}"]),
        ("/v1/messages", [r#"{"max_tokens": 2, "messages": [{"role": "user", "content": "#, "}]}"]),
        ("/v1/responses", [r#"{"input": "#, "}"]),
        ("/v1/completions", [r#"{"prompt": "#, "}"]),
    ] {
        for text in [r#""hi""#, r#""cut: \ud83d""#, r#""\ude00 and \ud83d\ude00""#] {
            for mark in ["", "\u{feff}"] {
                let body = format!("{mark}{}{text}{}", around[0], around[1]);
                let answer = send(&cluster, Method::POST, path, &[JSON], body.clone()).await;
                assert_eq!(answer.status(), 200, "{path} {body}");
            }
        }
    }
    let of_message = |depth| format!(r#"{{"messages": [{{"role": "user", "content": "hi", "extra": {}}}]}}"#, nested(depth));
    for (depth, status) in [(100, 200), (190, 200), (250, 400), (100_000, 400)] {
        let answer = send(&cluster, Method::POST, "/v1/chat/completions", &[JSON], of_message(depth)).await;
        assert_eq!(answer.status().as_u16(), status, "{depth}");
    }
    while worker.messages.try_recv().is_ok() {}
    for (seed, bits) in [("18446744073709551615", u64::MAX), ("-1", u64::MAX), ("9223372036854775808", 1 << 63), ("7", 7)] {
        let body = format!(r#"{{{hi}, "seed": {seed}}}"#);
        assert_eq!(send(&cluster, Method::POST, "/v1/chat/completions", &[JSON], body).await.status(), 200, "{seed}");
        assert_eq!(worker.decode_job().await.sampling.seed, bits);
    }
    for wrong in ["1.5", "\"7\"", "18446744073709551616"] {
        let body = format!(r#"{{{hi}, "seed": {wrong}}}"#);
        assert_eq!(send(&cluster, Method::POST, "/v1/chat/completions", &[JSON], body).await.status(), 400, "{wrong}");
    }
    // 20 MiB of one text are too long for this model, and of short values too many; neither is too large.
    let long = json!({"messages": [{"role": "user", "content": "a".repeat(20 << 20)}]}).to_string();
    let answer: Value = send(&cluster, Method::POST, "/v1/chat/completions", &[JSON], long).await.json().await.unwrap();
    assert_eq!(answer["error"]["code"], "context_length_exceeded", "{answer}");
    let many = format!(r#"{{"prompt": [{}1]}}"#, "1,".repeat(3 << 20));
    assert_eq!(send(&cluster, Method::POST, "/v1/completions", &[JSON], many).await.status(), 413);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_coordinator_that_leaves_says_so_and_still_answers() {
    let cluster = Cluster::start(|flags| flags.drain_announce_s = Some(2)).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    let url = cluster.url.clone();
    assert_eq!(cluster.get("/ready").await.status(), 200);
    let stopping = tokio::spawn(cluster.stop());
    let began = Instant::now();
    let ready = || async {
        reqwest::get(format!("{url}/ready")).await.map(|answer| (answer.status().as_u16(), answer.headers().contains_key("retry-after")))
    };
    while ready().await.unwrap() != (503, true) {
        assert!(began.elapsed() < Duration::from_secs(2), "it says so before it goes");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let body = json!({"prompt": "x", "max_tokens": 1});
    let answer = Client::new().post(format!("{url}/v1/completions")).json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200, "a balancer that has not noticed yet");
    stopping.await.unwrap();
    assert!(ready().await.is_err(), "and then it is gone");
}
