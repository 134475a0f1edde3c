//! One client's flood, and all other clients: connections, bodies, files, requests that need no answer, and ports that web pages may not
//! use. Most requests here are attacks from an audit that once succeeded.

use crate::support::{Cluster, Script, Worker, decode};
use reqwest::{Client, Method, Response};
use serde_json::{Value, json};
use std::{path::Path, time::Duration};
use tidemill_coordinator::settings::Flags;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::timeout,
};

/// Starts a cluster with an operators' address, a data directory and a worker. It is open until there is a key.
async fn start(data: &Path, change: impl FnOnce(&mut Flags)) -> (Cluster, Worker) {
    let cluster = Cluster::start(|flags| {
        flags.admin = Some(([127, 0, 0, 1], 0).into());
        flags.data = Some(data.to_owned());
        change(flags);
    })
    .await;
    let worker = cluster.join("decode-0", decode(), Script::reply(&[40, 41])).await;
    (cluster, worker)
}

/// Makes a key of a free tenant and one of a premium tenant.
async fn keys(cluster: &Cluster) -> [String; 2] {
    let mut secrets = Vec::new();
    for (tenant, tier) in [("mallory", "free"), ("acme", "premium")] {
        let made = Client::new().post(format!("{}/admin/keys", cluster.admin.as_ref().unwrap()));
        let made: Value = made.json(&json!({"tenant": tenant, "tier": tier})).send().await.unwrap().json().await.unwrap();
        secrets.push(made["key"].as_str().unwrap_or_else(|| panic!("{made}")).to_owned());
    }
    secrets.try_into().unwrap()
}

async fn post_as(cluster: &Cluster, key: &str, path: &str, body: Value) -> Response {
    Client::new().post(format!("{}{path}", cluster.url)).bearer_auth(key).json(&body).send().await.unwrap()
}

async fn get_as(cluster: &Cluster, key: &str, path: &str) -> Response {
    Client::new().get(format!("{}{path}", cluster.url)).bearer_auth(key).send().await.unwrap()
}

fn addr(cluster: &Cluster) -> &str {
    cluster.url.strip_prefix("http://").unwrap()
}

fn chat() -> Value {
    json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2})
}

async fn metrics(cluster: &Cluster) -> String {
    let at = cluster.admin.as_ref().unwrap_or(&cluster.url);
    reqwest::get(format!("{at}/metrics")).await.unwrap().text().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_web_page_uses_the_operators_port() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    let admin = cluster.admin.clone().unwrap();
    let rollout = json!({"from": "m1", "to": "m2", "no_gate": true, "steps": [1.0]}).to_string();
    let posts = ["/rollouts", "/rollouts/votes", "/rollouts/abort", "/admin/keys", "/admin/appeals/x", "/nowhere"];
    for (headers, status) in [
        (vec![("origin", "http://evil.example"), ("content-type", "text/plain")], 403),
        (vec![("origin", "http://evil.example"), ("content-type", "application/json")], 403),
        (vec![("origin", "null"), ("content-type", "application/json")], 403),
        (vec![("host", "evil.example"), ("content-type", "application/json")], 403),
        (vec![("content-type", "text/plain")], 415),
        (vec![], 415),
    ] {
        for path in posts {
            let mut request = Client::new().post(format!("{admin}{path}")).body(rollout.clone());
            for (name, value) in &headers {
                request = request.header(*name, *value);
            }
            let got = request.send().await.unwrap();
            assert_eq!(got.status().as_u16(), status, "{path} with {headers:?}: {}", got.text().await.unwrap());
        }
    }
    for path in ["/cluster", "/cluster/events", "/metrics", "/console", "/console/", "/health", "/admin/tenants", "/registry", "/rollouts"]
    {
        let got = Client::new().get(format!("{admin}{path}")).header("host", "evil.example").send().await.unwrap();
        assert_eq!(got.status().as_u16(), 403, "{path}");
    }
    // A picture or a link of another site, which has no origin.
    for path in ["/admin/backup", "/admin/export?tenant=acme", "/admin/keys", "/metrics"] {
        let got = Client::new().get(format!("{admin}{path}")).header("sec-fetch-site", "cross-site").send().await.unwrap();
        assert_eq!(got.status().as_u16(), 403, "{path}");
    }
    let rollouts: Value = reqwest::get(format!("{admin}/rollouts")).await.unwrap().json().await.unwrap();
    assert_eq!(rollouts, json!({"rollouts": []}), "none was started");
    assert!(metrics(&cluster).await.contains("tidemill_door_refusals_total{what=\"origin\"}"));
    let own = Client::new().get(format!("{admin}/cluster")).header("origin", &admin).send().await.unwrap();
    assert_eq!(own.status(), 200, "the console's own page");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_web_page_uses_an_open_front_door_and_keys_end_the_need_for_that() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |flags| flags.hosts = Some(vec!["tidemill.test".into()])).await;
    let send = |method: Method, path: &str, headers: &[(&str, &str)], body: Option<Value>| {
        let mut request = Client::new().request(method, format!("{}{path}", cluster.url));
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.body(body.map_or(String::new(), |body| body.to_string())).send()
    };
    for path in ["/v1/conversations", "/v1/models", "/health", "/console"] {
        let got = send(Method::GET, path, &[("host", "evil.example")], None).await.unwrap();
        assert_eq!(got.status(), 403, "{path}");
        assert_eq!(send(Method::GET, path, &[("host", "tidemill.test:8000")], None).await.unwrap().status(), 200, "{path}");
    }
    let input = json!({"input": "hi", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "prompt": "hi"});
    let paths =
        ["/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages", "/v1/conversations", "/v1/embeddings", "/tokenize"];
    for path in paths {
        for (headers, status) in [
            (vec![("content-type", "text/plain")], 415),
            (vec![], 415),
            (vec![("content-type", "application/json"), ("origin", "http://evil.example")], 403),
        ] {
            let got = send(Method::POST, path, &headers, Some(input.clone())).await.unwrap();
            assert_eq!(got.status().as_u16(), status, "{path} with {headers:?}");
        }
    }
    let json_type = ("content-type", "application/json");
    assert_eq!(send(Method::POST, "/v1/conversations", &[json_type], Some(json!({}))).await.unwrap().status(), 200);
    assert_eq!(
        send(Method::POST, "/v1/conversations", &[], None).await.unwrap().status(),
        200,
        "no body, and nothing that a page could say"
    );
    let [free, _] = keys(&cluster).await;
    let named = Client::new().get(format!("{}/v1/models", cluster.url)).bearer_auth(&free).header("host", "api.example.com");
    assert_eq!(named.send().await.unwrap().status(), 200, "a page has no key");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn half_heads_keep_nobody_out_and_end_before_a_connection_that_rests() {
    let cluster = Cluster::start(|flags| flags.connections_max = Some(40)).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    let mut resting = TcpStream::connect(addr(&cluster)).await.unwrap();
    let request = format!("GET /health HTTP/1.1\r\nhost: {}\r\n\r\n", addr(&cluster));
    resting.write_all(request.as_bytes()).await.unwrap();
    let mut answer = [0; 1024];
    assert!(resting.read(&mut answer).await.unwrap() > 0);
    let mut half = Vec::new();
    for _ in 0..100 {
        let mut stream = TcpStream::connect(addr(&cluster)).await.unwrap();
        stream.write_all(b"GET /health HTTP/1.1\r\n").await.unwrap();
        half.push(stream);
    }
    for _ in 0..5 {
        assert_eq!(cluster.ask("/v1/completions", json!({"prompt": "x"})).await.0, 200, "every place has a half head");
    }
    let mut last = half.pop().unwrap();
    let end = timeout(Duration::from_secs(40), last.read(&mut answer)).await.expect("a head must be whole in time");
    assert!(matches!(end, Ok(0) | Err(_)), "{end:?}");
    resting.write_all(request.as_bytes()).await.unwrap();
    let more = timeout(Duration::from_secs(10), resting.read(&mut answer)).await.unwrap().unwrap();
    assert!(answer[..more].starts_with(b"HTTP/1.1 200"), "it rests for longer than a head may take");
    let metrics = metrics(&cluster).await;
    for reason in ["displaced", "head"] {
        assert!(metrics.contains(&format!("tidemill_connections_closed_total{{reason=\"{reason}\"}}")), "{metrics}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_with_all_its_connections_busy_is_told_so() {
    let cluster = Cluster::start(|flags| {
        (flags.connections_max, flags.connections_per_address_max) = (Some(100), Some(10));
    })
    .await;
    let _worker = cluster.join("decode-0", decode(), Script { stall_after: 0, ..Script::reply(&[40]) }).await;
    let mut busy = Vec::new();
    for _ in 0..10 {
        let mut stream = TcpStream::connect(addr(&cluster)).await.unwrap();
        let head = format!("POST /v1/completions HTTP/1.1\r\nhost: {}\r\ncontent-type: application/json\r\n", addr(&cluster));
        stream.write_all(format!("{head}expect: 100-continue\r\ncontent-length: 30\r\n\r\n").as_bytes()).await.unwrap();
        let mut answer = [0; 64];
        let read = stream.read(&mut answer).await.unwrap();
        assert!(answer[..read].starts_with(b"HTTP/1.1 100"), "its body is waited for");
        busy.push(stream);
    }
    let told = timeout(Duration::from_secs(20), async {
        loop {
            let mut stream = TcpStream::connect(addr(&cluster)).await.unwrap();
            let mut answer = Vec::new();
            let _ = timeout(Duration::from_secs(2), stream.read_to_end(&mut answer)).await;
            if answer.starts_with(b"HTTP/1.1 429") {
                return String::from_utf8(answer).unwrap();
            }
        }
    });
    let told = told.await.expect("it is told");
    assert!(told.contains("too_many_connections"), "{told}");
    drop(busy);
    let served = timeout(Duration::from_secs(20), async {
        while !Client::new().get(format!("{}/health", cluster.url)).send().await.is_ok_and(|got| got.status() == 200) {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    served.await.expect("and served when they have ended");
    cluster.stop().await;
}

/// Sends a request whose body stops before its end.
async fn stalled(cluster: &Cluster, key: &str, bytes: usize) -> TcpStream {
    let mut stream = TcpStream::connect(addr(cluster)).await.unwrap();
    let head =
        format!("POST /v1/chat/completions HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\n");
    stream.write_all(format!("{head}content-length: {bytes}\r\n\r\n").as_bytes()).await.unwrap();
    stream.write_all(b"{\"messages\":").await.unwrap();
    stream
}

/// The start of an answer.
async fn head(stream: &mut TcpStream) -> String {
    let mut answer = vec![0; 4096];
    let read = stream.read(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer[..read]).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn bodies_on_their_way_are_shared_from_their_heads_on() {
    let data = tempfile::tempdir().unwrap();
    let change = |flags: &mut Flags| (flags.body_bytes_max, flags.bodies_bytes_max) = (Some("8MiB".into()), Some("32MiB".into()));
    let (cluster, _worker) = start(data.path(), change).await;
    let [free, premium] = keys(&cluster).await;
    // Either head may be read first.
    let (mut one, mut other) = (stalled(&cluster, &free, 7 << 20).await, stalled(&cluster, &free, 7 << 20).await);
    let answered = timeout(Duration::from_secs(20), async {
        tokio::select! {
            answer = head(&mut one) => answer,
            answer = head(&mut other) => answer,
        }
    });
    let refused = answered.await.expect("one of two is answered before its body is whole");
    assert!(refused.starts_with("HTTP/1.1 429") && refused.contains("too_much_at_once"), "{refused}");
    let answer = post_as(&cluster, &premium, "/v1/chat/completions", chat()).await;
    assert_eq!(answer.status(), 200, "another tenant's bytes are its own");
    let metrics = metrics(&cluster).await;
    assert!(metrics.contains("tidemill_share_refusals_total{resource=\"bodies\",share=\"own\"}"), "{metrics}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn text_that_no_context_holds_is_refused_wherever_it_would_be_tokenized() {
    let cluster = Cluster::start(|_| ()).await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40])).await;
    let long = "a".repeat(6 << 20);
    let message = json!([{"role": "user", "content": long}]);
    let item = json!([{"type": "message", "role": "user", "content": long}]);
    for (path, body) in [
        ("/tokenize", json!({"prompt": long})),
        ("/tokenize", json!({"messages": message})),
        ("/v1/messages/count_tokens", json!({"model": "tiny", "messages": message})),
        ("/v1/conversations", json!({"items": item})),
        ("/v1/conversations", json!({"instructions": long})),
        ("/detokenize", json!({"tokens": vec![5; 100_000]})),
        ("/v1/embeddings", json!({"input": long})),
    ] {
        let (status, answer) = cluster.ask(path, body).await;
        assert_eq!(status, 400, "{path}: {answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains("maximum context length"), "{path}: {answer}");
    }
    assert_eq!(cluster.ask("/tokenize", json!({"prompt": "hello"})).await.0, 200);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_need_no_answer_count_as_requests() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    let [free, premium] = keys(&cluster).await;
    let mut statuses = Vec::new();
    for number in 0..30 {
        let got = match number % 5 {
            0 => get_as(&cluster, &free, "/v1/conversations").await,
            1 => post_as(&cluster, &free, "/tokenize", json!({"prompt": "x"})).await,
            2 => post_as(&cluster, &free, "/v1/conversations", json!({})).await,
            3 => get_as(&cluster, &free, "/v1/files").await,
            _ => post_as(&cluster, &free, "/detokenize", json!({"tokens": [5]})).await,
        };
        statuses.push(got.status().as_u16());
    }
    assert_eq!(statuses, [vec![200; 20], vec![429; 10]].concat(), "20 a minute");
    let over = post_as(&cluster, &free, "/v1/chat/completions", chat()).await;
    assert_eq!(over.status(), 429, "of all kinds together");
    assert_eq!(over.headers()["x-ratelimit-remaining-requests"], "0");
    for path in ["/v1/batches", "/v1/responses/resp_x", "/v1/responses/resp_x/input_items", "/v1/completions/cmpl-x"] {
        assert_eq!(get_as(&cluster, &free, path).await.status(), 429, "{path}");
    }
    assert_eq!(get_as(&cluster, &free, "/v1/models").await.status(), 200, "it may ask what there is");
    for path in ["/v1/responses/resp_x/cancel", "/v1/batches/batch_x/cancel"] {
        assert_eq!(post_as(&cluster, &free, path, json!({})).await.status(), 404, "{path}: and end what it has begun");
    }
    for path in ["/v1/conversations", "/v1/files", "/v1/models"] {
        assert_eq!(get_as(&cluster, &premium, path).await.status(), 200, "{path}");
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_that_fail_count_as_requests() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    let [free, _] = keys(&cluster).await;
    let mut statuses = Vec::new();
    for number in 0..30 {
        let (path, body) = match number % 4 {
            0 => ("/v1/chat/completions", json!({"messages": [{"role": "user", "content": "hi"}], "conversation": "conv_none"})),
            1 => ("/v1/completions", json!({"prompt": "x", "max_tokens": "many"})),
            2 => ("/v1/messages", json!({"messages": []})),
            _ => ("/v1/responses", json!({"input": "x", "model": "nowhere"})),
        };
        statuses.push(post_as(&cluster, &free, path, body).await.status().as_u16());
    }
    assert!(statuses[..20].iter().all(|status| [400, 404].contains(status)), "{statuses:?}");
    assert_eq!(statuses[20..], [429; 10], "20 a minute");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_form_without_parts_ends_early_and_one_has_one_file() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    let [free, _] = keys(&cluster).await;
    let send = async |body: Vec<u8>| {
        let request = Client::new().post(format!("{}/v1/files", cluster.url)).bearer_auth(&free).body(body);
        let answer = request.header("content-type", "multipart/form-data; boundary=b").send().await.unwrap();
        (answer.status().as_u16(), answer.text().await.unwrap())
    };
    let file = "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n{}\r\n";
    for beginning in ["", "--b\r\ncontent-disposition: ", &format!("{file}--b\r\n")] {
        let (status, said) = send([beginning.as_bytes(), &vec![b'a'; 1 << 20]].concat()).await;
        assert!(status == 400 && said.contains("more than 16 KiB"), "{beginning}: {status} {said}");
    }
    let (status, said) = send(format!("{file}{file}--b--\r\n").into_bytes()).await;
    assert!(status == 400 && said.contains("a second `file`"), "{status} {said}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_without_its_host_is_refused_at_both_ports() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    for port in [&cluster.url, cluster.admin.as_ref().unwrap()] {
        for (request, status) in [("GET /health HTTP/1.1\r\n\r\n", "400"), ("GET /health HTTP/1.0\r\n\r\n", "200")] {
            let mut stream = TcpStream::connect(port.strip_prefix("http://").unwrap()).await.unwrap();
            stream.write_all(request.as_bytes()).await.unwrap();
            let mut answer = [0; 1024];
            let read = timeout(Duration::from_secs(20), stream.read(&mut answer)).await.unwrap().unwrap();
            let answer = String::from_utf8_lossy(&answer[..read]).into_owned();
            assert_eq!(answer.split(' ').nth(1), Some(status), "{answer}");
        }
    }
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn files_that_one_tenant_does_not_finish_leave_places_to_others() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    let [free, premium] = keys(&cluster).await;
    let mut uploads = tokio::task::JoinSet::new();
    for _ in 0..16 {
        let mut stream = TcpStream::connect(addr(&cluster)).await.unwrap();
        let head = format!("POST /v1/files HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {free}\r\ncontent-length: 1000\r\n");
        let form = "--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n{";
        let sent = format!("{head}content-type: multipart/form-data; boundary=b\r\n\r\n{form}");
        stream.write_all(sent.as_bytes()).await.unwrap();
        uploads.spawn(async move {
            let mut answer = vec![0; 4096];
            let read = timeout(Duration::from_secs(5), stream.read(&mut answer)).await;
            answer.truncate(read.map_or(0, |read| read.unwrap()));
            (stream, answer)
        });
    }
    let (open, refused): (Vec<_>, Vec<_>) = uploads.join_all().await.into_iter().partition(|(_, answer)| answer.is_empty());
    assert_eq!((open.len(), refused.len()), (4, 12), "a quarter of sixteen");
    assert!(refused.iter().all(|(_, answer)| answer.starts_with(b"HTTP/1.1 429")));
    let part = |head: &str, text: &str| format!("--b\r\ncontent-disposition: form-data; {head}\r\n\r\n{text}\r\n");
    let form = [part("name=\"purpose\"", "batch"), part("name=\"file\"; filename=\"a\"", "{}"), "--b--\r\n".into()].concat();
    let sent = Client::new().post(format!("{}/v1/files", cluster.url)).bearer_auth(&premium).body(form);
    let sent = sent.header("content-type", "multipart/form-data; boundary=b").send().await.unwrap();
    assert_eq!(sent.status(), 200, "{}", sent.text().await.unwrap());
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_in_a_full_queue_gives_way_and_is_told() {
    let data = tempfile::tempdir().unwrap();
    let cluster = Cluster::start(|flags| {
        flags.admin = Some(([127, 0, 0, 1], 0).into());
        flags.data = Some(data.path().to_owned());
        flags.queue_max = Some(8);
    })
    .await;
    // The worker's memory holds only a few sequences, and they do not end.
    let engine = tidemill_proto::message::EngineInfo { device_blocks: 4, ..crate::support::engine() };
    let script = Script { stall_after: 0, ..Script::reply(&[40]) };
    let _worker = cluster.join("decode-0", tidemill_proto::message::RoleInfo::Decode(engine), script).await;
    let [free, premium] = keys(&cluster).await;
    let asked = |key: &str, prompts: usize| {
        let body = json!({"prompt": vec![vec![5]; prompts], "max_tokens": 30});
        Client::new().post(format!("{}/v1/completions", cluster.url)).bearer_auth(key).json(&body)
    };
    let mut floods = Vec::new();
    let full = timeout(Duration::from_secs(30), async {
        loop {
            let flood = tokio::spawn(asked(&free, 2).send());
            tokio::time::sleep(Duration::from_millis(50)).await;
            if flood.is_finished() {
                return flood.await.unwrap().unwrap();
            }
            floods.push(flood);
        }
    });
    let full = full.await.expect("the queue fills");
    assert_eq!(full.status(), 429, "a flood does not displace itself");
    let quiet = tokio::spawn(asked(&premium, 1).send());
    let displaced = timeout(Duration::from_secs(20), async {
        loop {
            if let Some(at) = floods.iter().position(tokio::task::JoinHandle::is_finished) {
                return floods.remove(at).await.unwrap().unwrap();
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    });
    let displaced = displaced.await.expect("one of the flood gives way");
    assert_eq!(displaced.status(), 429);
    assert!(displaced.headers().contains_key("retry-after"));
    assert!(displaced.text().await.unwrap().contains("gave way"));
    assert!(!quiet.is_finished(), "it waits for its turn");
    let metrics = metrics(&cluster).await;
    assert!(metrics.contains("tidemill_share_refusals_total{resource=\"queue\",share=\"own\"}"), "{metrics}");
    quiet.abort();
    floods.iter().for_each(|flood| flood.abort());
    cluster.kill().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn large_conversations_are_read_back_as_they_were_sent_and_the_loops_go_on() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    let part = json!({"type": "input_text", "text": "a"});
    let item = json!({"type": "message", "role": "user", "content": vec![part; 20_000]});
    let made: Value = cluster.post("/v1/conversations", json!({"items": [item]})).await.json().await.unwrap();
    let id = made["id"].as_str().unwrap_or_else(|| panic!("{made}"));
    let read = || async {
        let page: Value = cluster.get(&format!("/v1/conversations/{id}/items?limit=100")).await.json().await.unwrap();
        page["data"][0]["content"].as_array().map(Vec::len)
    };
    assert_eq!(tokio::join!(read(), read(), read()), (Some(20_000), Some(20_000), Some(20_000)));
    let export = cluster.get(&format!("/v1/conversations/{id}/export")).await.text().await.unwrap();
    let line: Value = serde_json::from_str(export.trim_end()).unwrap();
    assert_eq!((&line["id"], line["items"][0]["content"].as_array().unwrap().len()), (&json!(id), 20_000));
    let metrics = metrics(&cluster).await;
    for event_loop in ["front_door", "links"] {
        assert!(metrics.contains(&format!("tidemill_event_loop_delay_seconds_count{{loop=\"{event_loop}\"}}")), "{event_loop}");
    }
    cluster.stop().await;
}
