//! The console's page, and its event stream.

use crate::support::{Cluster, Script, decode};
use reqwest::header;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tidemill_gateway::serving::gateway::VIEWERS_MAX;

struct Events {
    response: reqwest::Response,
    read: String,
}

impl Events {
    async fn open(cluster: &Cluster) -> Self {
        let response = cluster.get("/cluster/events").await;
        assert_eq!(response.status(), 200);
        assert_eq!(response.headers()[header::CONTENT_TYPE], "text/event-stream");
        Self { response, read: String::new() }
    }

    /// The next event's name and data, or `None` at the end of the stream.
    async fn next(&mut self) -> Option<(String, Value)> {
        loop {
            if let Some((event, rest)) = self.read.split_once("\n\n") {
                let (name, data) = event.strip_prefix("event: ").and_then(|event| event.split_once("\ndata: ")).unwrap();
                let found = (name.to_owned(), serde_json::from_str(data).unwrap());
                self.read = rest.to_owned();
                return Some(found);
            }
            let chunk = tokio::time::timeout(Duration::from_secs(10), self.response.chunk()).await.expect("events keep coming");
            self.read += std::str::from_utf8(&chunk.unwrap()?).unwrap();
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_page_runs_only_what_is_its_own() {
    let cluster = Cluster::start(|_| ()).await;
    for (path, kind) in [
        ("/console", "text/html; charset=utf-8"),
        ("/console/", "text/html; charset=utf-8"),
        ("/console/app.js", "text/javascript; charset=utf-8"),
        ("/console/style.css", "text/css; charset=utf-8"),
        ("/console/icon.svg", "image/svg+xml"),
    ] {
        let response = cluster.get(path).await;
        assert_eq!(response.status(), 200, "{path}");
        let headers = response.headers();
        assert_eq!(headers[header::CONTENT_TYPE], kind, "{path}");
        assert_eq!(
            (&headers[header::X_CONTENT_TYPE_OPTIONS], &headers[header::CACHE_CONTROL]),
            (&"nosniff".parse().unwrap(), &"no-cache".parse().unwrap())
        );
        let policy = headers[header::CONTENT_SECURITY_POLICY].to_str().unwrap();
        assert!(policy.starts_with("default-src 'none'; script-src 'self';") && !policy.contains("unsafe"), "{policy}");
    }
    // The page asks who is signed in wherever it is served.
    let who: Value = cluster.get("/console/who").await.json().await.unwrap();
    assert_eq!(who, json!({"operator": null, "sign_in": false}));
    for path in ["/console/tsconfig.json", "/console/..%2fconsole%2fapp.js", "/console/a/b"] {
        assert_eq!(cluster.get(path).await.status(), 404, "{path}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn viewers_see_the_cluster_and_each_request_that_ends() {
    let cluster = Cluster::start(|flags| flags.drain_s = Some(60)).await;
    let _decode = cluster.join("decode-0", decode(), Script::reply(&[40, 41])).await;
    let ask = async || cluster.ask("/v1/completions", json!({"prompt": "x", "max_tokens": 2})).await;
    assert_eq!(ask().await.0, 200);

    let mut events = Events::open(&cluster).await;
    let (name, recent) = events.next().await.unwrap();
    assert_eq!((name.as_str(), recent.as_array().unwrap().len()), ("recent", 1), "{recent}");
    let (name, snapshot) = events.next().await.unwrap();
    assert_eq!((name.as_str(), &snapshot["cluster"]["members"][0]["name"]), ("snapshot", &json!("decode-0")));
    assert_eq!(snapshot["goodput"], 1.0);
    let transfer = &snapshot["cluster"]["members"][0]["report"]["counters"]["transfer"];
    assert!(transfer["shm_put"]["bytes"].is_u64() && transfer["quic_get"]["bytes"].is_u64(), "by name: {transfer}");

    assert_eq!(ask().await.0, 200);
    let request = loop {
        let (name, data) = events.next().await.unwrap();
        if name == "request" {
            break data;
        }
    };
    assert_eq!((&request["completion_tokens"], &request["path"]["decode_worker"]), (&json!(2), &json!("decode-0")), "{request}");
    assert!(request["age_ms"].as_u64().unwrap() < 10_000 && request["ttft_ms"].as_f64().unwrap() > 0.0, "{request}");

    // A viewer does not delay the shutdown.
    tokio::join!(async { while events.next().await.is_some() {} }, cluster.stop());
}

#[tokio::test(flavor = "multi_thread")]
async fn viewers_are_limited() {
    let cluster = Cluster::start(|_| ()).await;
    let mut viewers = Vec::new();
    for _ in 0..VIEWERS_MAX {
        viewers.push(Events::open(&cluster).await);
    }
    let refused = cluster.get("/cluster/events").await;
    assert_eq!((refused.status().as_u16(), refused.headers()[header::RETRY_AFTER].to_str().unwrap()), (503, "30"));
    // Viewers that leave make room, at the latest when the next event cannot be sent to them.
    viewers.clear();
    let deadline = Instant::now() + Duration::from_secs(5);
    while cluster.get("/cluster/events").await.status() != 200 {
        assert!(Instant::now() < deadline, "there is room again");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    cluster.stop().await;
}
