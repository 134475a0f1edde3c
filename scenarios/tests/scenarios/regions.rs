//! Two regions: each is a coordinator with a scripted decode worker, and knows the other's front door.

use crate::support::{Cluster, Script, Worker, decode, fixture};
use reqwest::Method;
use serde_json::{Value, json};
use std::{
    collections::BTreeMap,
    fs,
    path::Path,
    time::{Duration, Instant},
};
use tidemill_coordinator::settings::{
    Flags,
    regions::{OtherRegionFlags, RegionsFlags},
};
use tidemill_proto::message::ToWorker;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpListener,
};

const GENERATING: [&str; 4] = ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"];

fn flags(name: &str, others: &[(&str, &Cluster)]) -> RegionsFlags {
    let others =
        others.iter().map(|(name, cluster)| OtherRegionFlags { name: (*name).into(), url: cluster.url.clone(), ca: None, secret: None });
    RegionsFlags { name: name.into(), wait_ms: None, pins: BTreeMap::new(), others: others.collect() }
}

/// Regions that share a secret. `url` is where the other one is.
fn trusting(flags: RegionsFlags, other: &str, url: &str, secret: &Path) -> RegionsFlags {
    let mut others = flags.others;
    others.retain(|known| known.name != other);
    others.push(OtherRegionFlags { name: other.into(), url: url.into(), ca: None, secret: Some(secret.to_owned()) });
    RegionsFlags { others, ..flags }
}

async fn region(flags: RegionsFlags, change: impl FnOnce(&mut Flags)) -> Cluster {
    Cluster::start(|all| {
        all.regions = Some(flags);
        change(all);
    })
    .await
}

/// A request of the endpoint that needs nothing stored.
fn body(path: &str) -> Value {
    let said = json!([{"role": "user", "content": "Hello"}]);
    match path {
        "/v1/completions" => json!({"model": "tiny", "prompt": "Hello", "max_tokens": 2}),
        "/v1/responses" => json!({"model": "tiny", "input": "Hello", "max_output_tokens": 2, "store": false}),
        _ => json!({"model": "tiny", "messages": said, "max_tokens": 2}),
    }
}

/// Posts with a key and headers. Returns the status, the region that answered, and the answer.
async fn ask(cluster: &Cluster, path: &str, headers: &[(&str, &str)], body: &Value) -> (u16, String, String) {
    let mut request = reqwest::Client::new().post(format!("{}{path}", cluster.url)).json(body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.send().await.unwrap();
    let region = response.headers().get("x-tidemill-region").map_or("", |name| name.to_str().unwrap()).to_owned();
    (response.status().as_u16(), region, response.text().await.unwrap())
}

fn stream(path: &str) -> Value {
    let mut body = body(path);
    body["stream"] = json!(true);
    body
}

#[tokio::test(flavor = "multi_thread")]
async fn what_cannot_be_answered_here_is_answered_in_another_region() {
    let us = region(flags("us", &[]), |_| ()).await;
    let _worker = us.join("decode-us", decode(), Script::reply(&[8, 9])).await;
    let eu = region(flags("eu", &[("us", &us)]), |_| ()).await;
    for path in GENERATING {
        let (status, name, answer) = ask(&eu, path, &[], &body(path)).await;
        assert_eq!((status, &*name), (200, "us"), "{path}: {answer}");
        let (status, name, events) = ask(&eu, path, &[], &stream(path)).await;
        assert_eq!((status, &*name), (200, "us"), "{path}: {events}");
        let direct = ask(&us, path, &[], &stream(path)).await.2;
        assert_eq!(events.matches("data:").count(), direct.matches("data:").count(), "{path}: the whole stream arrives");
    }
    // Stored data is in the region that was asked, and so is an answer that is to be stored.
    for (path, field, value) in [
        ("/v1/responses", "store", json!(true)),
        ("/v1/responses", "previous_response_id", json!("resp_1")),
        ("/v1/responses", "store", Value::Null),
        ("/v1/chat/completions", "conversation", json!("conv_1")),
        ("/v1/chat/completions", "memory", json!(true)),
    ] {
        let mut body = body(path);
        body[field] = value;
        let (status, name, answer) = ask(&eu, path, &[], &body).await;
        assert!(status != 200 && name == "eu", "{path} {field}: {status} {name} {answer}");
    }
    // A body that is wrong is refused here; and what may be asked for again is answered here, where that is known.
    assert_eq!(ask(&eu, "/v1/completions", &[], &json!({"model": "tiny", "prompt": 7})).await.1, "eu");
    assert_eq!(ask(&eu, "/v1/completions", &[("idempotency-key", "once")], &body("/v1/completions")).await.1, "eu");

    let metrics = eu.get("/metrics").await.text().await.unwrap();
    assert!(metrics.contains("tidemill_relayed_total{region=\"us\",outcome=\"answered\"}"), "{metrics}");
    let _worker = eu.join("decode-eu", decode(), Script::reply(&[10, 11])).await;
    assert_eq!(ask(&eu, "/v1/completions", &[], &body("/v1/completions")).await.1, "eu", "there is a worker, which has time");
    eu.stop().await;
    us.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_region_without_time_takes_no_requests_of_others_and_one_that_is_gone_is_not_waited_for() {
    let impatient = |flags: RegionsFlags| RegionsFlags { wait_ms: Some(1e-9), ..flags };
    let us = region(impatient(flags("us", &[])), |_| ()).await;
    let _us = us.join("decode-us", decode(), Script::reply(&[8, 9])).await;
    let asia = region(flags("asia", &[]), |_| ()).await;
    let _asia = asia.join("decode-asia", decode(), Script::reply(&[12, 13])).await;
    let eu = region(impatient(flags("eu", &[("us", &us), ("asia", &asia)])), |_| ()).await;
    let _eu = eu.join("decode-eu", decode(), Script::reply(&[10, 11])).await;
    let at = async |cluster: &Cluster, headers: &[(&str, &str)]| {
        let (status, name, answer) = ask(cluster, "/v1/completions", headers, &body("/v1/completions")).await;
        assert!(status == 200 || answer.contains("region_busy"), "{answer}");
        (status, name)
    };
    assert_eq!(at(&us, &[]).await, (200, "us".into()), "it knows no other region");
    assert_eq!(at(&us, &[("x-tidemill-relayed-from", "eu")]).await, (503, "us".into()), "it is as slow for others");
    assert_eq!(at(&eu, &[]).await, (200, "asia".into()), "the next region is asked");
    assert_eq!(at(&asia, &[("x-tidemill-relayed-from", "eu")]).await, (200, "asia".into()));
    asia.kill().await;
    for _ in 0..5 {
        assert_eq!(at(&eu, &[]).await, (200, "eu".into()), "a slow answer is better than none");
    }
    eu.stop().await;
    us.stop().await;
}

/// A region that takes every request and answers it with these bytes.
async fn impostor(answer: &'static [u8]) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        let mut open = Vec::new();
        while let Ok((mut stream, _)) = listener.accept().await {
            let _ = stream.read(&mut [0; 4096]).await;
            let _ = stream.write_all(answer).await;
            open.push(stream);
        }
    });
    url
}

#[tokio::test(flavor = "multi_thread")]
async fn a_region_that_is_silent_or_speaks_something_else_ends_a_request_and_is_left_alone() {
    for (answer, longest) in [(&b""[..], 19), (b"HTTP/1.1 200 OK\r\ncontent-type: text/html\r\ncontent-length: 3\r\n\r\n<b>", 5)] {
        let others = vec![OtherRegionFlags { name: "us".into(), url: impostor(answer).await, ca: None, secret: None }];
        let eu = region(RegionsFlags { name: "eu".into(), wait_ms: None, pins: BTreeMap::new(), others }, |_| ()).await;
        let began = Instant::now();
        let (status, name, said) = ask(&eu, "/v1/completions", &[], &body("/v1/completions")).await;
        assert!((status, &*name) == (502, "eu") && said.contains("region_failed"), "{status} {name} {said}");
        assert!(began.elapsed() < Duration::from_secs(longest), "{:?}", began.elapsed());
        eu.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn another_region_stops_when_the_client_leaves() {
    let us = region(flags("us", &[]), |_| ()).await;
    let mut worker = us.join("decode-us", decode(), Script { stall_after: 1, ..Script::reply(&[8, 9]) }).await;
    let eu = region(flags("eu", &[("us", &us)]), |_| ()).await;
    let request = reqwest::Client::new().post(format!("{}/v1/completions", eu.url)).json(&stream("/v1/completions"));
    let mut answer = request.send().await.unwrap();
    assert!(answer.chunk().await.unwrap().is_some(), "a stream is passed on as it comes");
    drop(answer);
    worker.expect(|message| matches!(message, ToWorker::CancelSequence { .. }).then_some(())).await;
    eu.stop().await;
    us.stop().await;
}

/// Makes a key of the tenant, for all clusters with this file of tenants.
async fn key(tenants: &Path, tenant: &str) -> String {
    let any = Some(([127, 0, 0, 1], 0).into());
    let operators = Cluster::start(|flags| (flags.admin, flags.tenants) = (any, Some(tenants.to_owned()))).await;
    let request = reqwest::Client::new().post(format!("{}/admin/keys", operators.admin.as_ref().unwrap()));
    let made: Value = request.json(&json!({"tenant": tenant, "tier": "premium"})).send().await.unwrap().json().await.unwrap();
    operators.stop().await;
    made["key"].as_str().unwrap_or_else(|| panic!("{made}")).to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_that_is_pinned_to_a_region_never_leaves_it() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = dir.path().join("tenants.sqlite");
    let (bank, shop) = (key(&tenants, "bank").await, key(&tenants, "shop").await);
    let pinned = |flags: RegionsFlags| RegionsFlags { pins: BTreeMap::from([("bank".into(), vec!["eu".into()])]), ..flags };
    let set = |flags: &mut Flags| flags.tenants = Some(tenants.clone());
    let secret = dir.path().join("eu-us.secret");
    fs::write(&secret, "0123456789abcdef0123456789abcdef").unwrap();
    let us = region(trusting(pinned(flags("us", &[])), "eu", "http://127.0.0.1:9", &secret), set).await;
    let mut worker: Worker = us.join("decode-us", decode(), Script::reply(&[8, 9])).await;
    let eu = region(trusting(pinned(flags("eu", &[])), "us", &us.url, &secret), set).await;
    let bearer = |key: &str| format!("Bearer {key}");
    let (bank, shop) = (bearer(&bank), bearer(&shop));

    for path in GENERATING {
        let body = body(path);
        let (status, name, answer) = ask(&eu, path, &[("authorization", &shop)], &body).await;
        assert_eq!((status, &*name), (200, "us"), "{path}: the other region believes this one: {answer}");
        let (status, name, answer) = ask(&eu, path, &[("authorization", &bank)], &body).await;
        assert_eq!((status, &*name), (503, "eu"), "{path}: no worker here is no reason: {answer}");
        let (status, name, answer) =
            ask(&eu, path, &[("authorization", &bank), ("x-region", "us"), ("idempotency-key", path)], &body).await;
        assert_eq!((status, &*name), (503, "eu"), "{path}: {answer}");
    }
    // A client that goes elsewhere by itself, or says that it was sent, is refused at every route.
    for (method, path) in [
        (Method::POST, "/v1/chat/completions"),
        (Method::POST, "/v1/messages"),
        (Method::POST, "/v1/embeddings"),
        (Method::POST, "/v1/conversations"),
        (Method::POST, "/v1/memories"),
        (Method::POST, "/v1/files"),
        (Method::POST, "/v1/batches"),
        (Method::POST, "/tokenize"),
        (Method::GET, "/v1/conversations"),
        (Method::GET, "/v1/models"),
    ] {
        for header in ["x-other", "x-tidemill-relayed-from"] {
            let request = reqwest::Client::new().request(method.clone(), format!("{}{path}", us.url)).header("authorization", &bank);
            let answer = request.header(header, "eu").json(&body("/v1/chat/completions")).send().await.unwrap();
            assert_eq!(answer.status(), 403, "{method} {path}");
            let answer = answer.text().await.unwrap();
            assert!(answer.contains("`eu` only"), "{method} {path}: {answer}");
        }
    }
    // The other region has computed for the shop alone.
    let mut jobs = 0;
    while let Ok(Some(message)) = tokio::time::timeout(Duration::from_millis(200), worker.messages.recv()).await {
        jobs += usize::from(matches!(message, ToWorker::Decode(_)));
    }
    assert_eq!(jobs, GENERATING.len());
    eu.stop().await;
    us.stop().await;
}

/// An endpoint that answers with the head of the request that it got.
async fn mirror() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let mut head = vec![0; 8192];
            let read = stream.read(&mut head).await.unwrap_or(0);
            let told = serde_json::to_string(&String::from_utf8_lossy(&head[..read])).unwrap();
            let answer = format!("HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{told}", told.len());
            let _ = stream.write_all(answer.as_bytes()).await;
        }
    });
    url
}

#[tokio::test(flavor = "multi_thread")]
async fn a_clients_key_stays_in_its_region_and_an_assertion_is_good_for_one_region_and_what_may_be_relayed() {
    let dir = tempfile::tempdir().unwrap();
    let tenants = dir.path().join("tenants.sqlite");
    let shop = key(&tenants, "shop").await;
    let secret = dir.path().join("secret");
    fs::write(&secret, "0123456789abcdef0123456789abcdef").unwrap();
    let set = |flags: &mut Flags| flags.tenants = Some(tenants.clone());
    let eu = region(trusting(flags("eu", &[]), "us", &mirror().await, &secret), set).await;
    let bearer = format!("Bearer {shop}");
    let path = "/v1/completions";
    let (status, name, head) = ask(&eu, path, &[("authorization", &bearer)], &body(path)).await;
    assert_eq!((status, &*name), (200, "us"), "{head}");
    assert!(!head.contains(&shop) && !head.contains("authorization"), "{head}");
    let head: String = serde_json::from_str(&head).unwrap();
    let assertion = head.lines().find_map(|line| line.strip_prefix("x-tidemill-relayed-as: ")).unwrap().to_owned();

    // No region without a secret gets a request that needs a key.
    let careful = region(flags("careful", &[("us", &eu)]), set).await;
    assert_eq!(ask(&careful, path, &[("authorization", &bearer)], &body(path)).await.1, "careful");

    // The region that it is for believes it; all others, and all other routes, do not.
    let no_way = "http://127.0.0.1:9";
    let us = region(trusting(flags("us", &[]), "eu", no_way, &secret), set).await;
    let _worker = us.join("decode-us", decode(), Script::reply(&[8, 9])).await;
    let asia = region(trusting(flags("asia", &[]), "eu", no_way, &secret), set).await;
    let _asia = asia.join("decode-asia", decode(), Script::reply(&[8, 9])).await;
    let from = ("x-tidemill-relayed-from", "eu");
    let relayed = [from, ("x-tidemill-relayed-as", &*assertion)];
    assert_eq!(ask(&us, path, &relayed, &body(path)).await.0, 200);
    assert_eq!(ask(&us, "/v1/conversations", &relayed, &json!({})).await.0, 401, "it is no key");
    assert_eq!(ask(&asia, path, &relayed, &body(path)).await.0, 401, "it is for another region");
    assert_eq!(ask(&us, path, &[("x-tidemill-relayed-from", "asia"), relayed[1]], &body(path)).await.0, 401);
    assert_eq!(ask(&us, path, &[relayed[1]], &body(path)).await.0, 401);
    assert_eq!(ask(&us, path, &[from], &body(path)).await.0, 401);
    assert_eq!(ask(&us, path, &[("authorization", &format!("Bearer {assertion}"))], &body(path)).await.0, 401);
    for cluster in [eu, careful, us, asia] {
        cluster.stop().await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_region_answers_with_its_own_model_or_leaves_it() {
    let us = Cluster::start(|all| {
        all.regions = Some(flags("us", &[]));
        all.model = vec![fixture("qwen2").into()];
        all.served_model_name = vec!["other".into()];
    })
    .await;
    let eu = region(flags("eu", &[("us", &us)]), |_| ()).await;
    let (status, name, answer) = ask(&eu, "/v1/completions", &[], &body("/v1/completions")).await;
    assert_eq!((status, &*name), (503, "eu"), "another region's error is not this one's: {answer}");
    eu.stop().await;
    us.stop().await;
}
