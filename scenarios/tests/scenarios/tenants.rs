//! Tenants at a real gateway: keys, quotas, ownership, and usage records.

use super::{
    listening::listen,
    support::{self, Cluster, Script},
};
use reqwest::StatusCode;
use serde_json::{Value, json};
use std::{io::ErrorKind::NotFound, path::Path, sync::Arc, time::Duration};
use tidemill_coordinator::settings::Flags;
use tidemill_tenancy::{journal, usage::Event};

const REPLY: [u32; 6] = [10, 11, 12, 13, 14, 15];

/// A cluster with an operators' address and a data directory, and a decode worker.
async fn start(data: &Path, change: impl FnOnce(&mut Flags)) -> (Cluster, support::Worker) {
    let cluster = Cluster::start(|flags| {
        flags.admin = Some(([127, 0, 0, 1], 0).into());
        flags.data = Some(data.to_owned());
        change(flags);
    })
    .await;
    let worker = cluster.join("decode", support::decode(), Script::reply(&REPLY)).await;
    (cluster, worker)
}

async fn admin(cluster: &Cluster, method: reqwest::Method, path: &str, body: Option<Value>) -> (u16, Value) {
    let request = reqwest::Client::new().request(method, format!("{}{path}", cluster.admin.as_ref().unwrap()));
    let request = if let Some(body) = body { request.json(&body) } else { request };
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// A new key's secret.
async fn key(cluster: &Cluster, tenant: &str, tier: &str) -> String {
    key_with(cluster, json!({"tenant": tenant, "tier": tier})).await
}

async fn key_with(cluster: &Cluster, body: Value) -> String {
    let (status, made) = admin(cluster, reqwest::Method::POST, "/admin/keys", Some(body)).await;
    assert_eq!(status, 200, "{made}");
    made["key"].as_str().unwrap().to_owned()
}

async fn post_as(cluster: &Cluster, key: &str, path: &str, body: Value) -> reqwest::Response {
    reqwest::Client::new().post(format!("{}{path}", cluster.url)).bearer_auth(key).json(&body).send().await.unwrap()
}

fn completion(max_tokens: u32) -> Value {
    json!({"model": "tiny", "prompt": [1, 2, 3, 4], "max_tokens": max_tokens, "temperature": 0})
}

fn header(response: &reqwest::Response, name: &str) -> String {
    response.headers().get(name).unwrap_or_else(|| panic!("the answer has {name}")).to_str().unwrap().to_owned()
}

fn events(data: &Path) -> Vec<Event> {
    let mut events = Vec::new();
    journal::read(&data.join("usage"), 0, |_, event| {
        events.push(event);
        true
    })
    .unwrap();
    events
}

#[tokio::test]
async fn a_door_is_open_until_there_is_a_key_and_then_closed_for_good() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    assert_eq!(cluster.ask("/v1/completions", completion(2)).await.0, 200);
    let secret = key(&cluster, "acme", "premium").await;
    for (sent, code) in [(None, 401), (Some("tm_wrong"), 401), (Some(&*format!("tm_{}", "0".repeat(64))), 401), (Some(&*secret), 200)] {
        let request = reqwest::Client::new().get(format!("{}/v1/models", cluster.url));
        let request = if let Some(sent) = sent { request.bearer_auth(sent) } else { request };
        let response = request.send().await.unwrap();
        assert_eq!(response.status().as_u16(), code);
        if code == 401 {
            assert_eq!(header(&response, "www-authenticate"), "Bearer");
            assert_eq!(response.json::<Value>().await.unwrap()["error"]["code"], "invalid_api_key");
        }
    }
    // Anthropic's clients have their own header, and their own errors.
    let message = json!({"model": "tiny", "max_tokens": 2, "messages": [{"role": "user", "content": "hi"}]});
    let messages = |key: String| {
        let request = reqwest::Client::new().post(format!("{}/v1/messages", cluster.url)).header("x-api-key", key);
        request.json(&message).send()
    };
    assert_eq!(messages(secret.clone()).await.unwrap().status(), 200);
    let refused = messages("tm_wrong".into()).await.unwrap();
    assert_eq!(
        (refused.status().as_u16(), &refused.json::<Value>().await.unwrap()["error"]["type"]),
        (401, &json!("authentication_error"))
    );

    let id = &secret[..15];
    assert_eq!(admin(&cluster, reqwest::Method::DELETE, &format!("/admin/keys/{id}"), None).await.0, 200);
    assert_eq!(post_as(&cluster, &secret, "/v1/completions", completion(2)).await.status(), 401);
    assert_eq!(cluster.ask("/v1/completions", completion(2)).await.0, 401, "the last key is gone, and the door stays closed");
    assert_eq!(cluster.get("/health").await.status(), 200);
    cluster.stop().await;

    // Keys are still required after a restart. Without an operators' port, the cluster's state is not visible.
    let again = Cluster::start(|flags| flags.data = Some(data.path().to_owned())).await;
    assert_eq!(
        (again.get("/v1/models").await.status(), again.get("/cluster").await.status()),
        (StatusCode::UNAUTHORIZED, StatusCode::NOT_FOUND)
    );
    again.stop().await;
}

#[tokio::test]
async fn keys_are_managed_at_the_operators_address_only() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    let wanted = json!({"tenant": "acme", "tier": "free"});
    assert_eq!(cluster.ask("/admin/keys", wanted.clone()).await.0, 404);
    let at = format!("{}/admin/keys", cluster.admin.as_ref().unwrap());
    // The same request as a page in a browser could send it.
    let sent = reqwest::Client::new().post(&at).body(wanted.to_string()).header("content-type", "text/plain").send().await.unwrap();
    assert_eq!(sent.status(), 415);
    let rebound = reqwest::Client::new().get(&at).header("host", "evil.example").send().await.unwrap();
    assert_eq!(rebound.status(), 403);
    for (body, words) in [
        (json!({"tenant": "acme"}), "say its tier"),
        (json!({"tenant": "acme", "tier": "gold"}), "`free`, `paid`, `premium`"),
        (json!({"tenant": "a b", "tier": "free"}), "name of a tenant"),
        (json!({"tenant": "acme", "tier": "free", "limits": {"concurrent": 0}}), "from 1 on"),
        (json!({"tenant": "acme", "tier": "free", "colour": 1}), "colour"),
    ] {
        let (status, answer) = admin(&cluster, reqwest::Method::POST, "/admin/keys", Some(body)).await;
        assert!(status == 400 && answer["error"]["message"].as_str().unwrap().contains(words), "{words}: {answer}");
    }
    let secret = key(&cluster, "acme", "free").await;
    let (_, listed) = admin(&cluster, reqwest::Method::GET, "/admin/keys", None).await;
    assert_eq!(listed["keys"][0]["id"], secret[..15]);
    assert!(!listed.to_string().contains(&secret[15..]) && !listed.to_string().contains("digest"), "{listed}");
    let (status, answer) = admin(&cluster, reqwest::Method::POST, "/admin/keys", Some(json!({"tenant": "acme", "tier": "paid"}))).await;
    assert!(status == 400 && answer["error"]["message"].as_str().unwrap().contains("tidemill tenants set"), "{answer}");
    let (_, changed) = admin(&cluster, reqwest::Method::PUT, "/admin/tenants/acme", Some(json!({"tier": "paid"}))).await;
    assert_eq!(changed["tier"], "paid");
    cluster.stop().await;
}

#[tokio::test]
async fn of_many_at_once_exactly_the_allowed_number_passes() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    let secret = key(&cluster, "acme", "free").await;
    let cluster = Arc::new(cluster);
    let asked: Vec<_> = (0..64)
        .map(|n| {
            let (cluster, secret) = (Arc::clone(&cluster), secret.clone());
            tokio::spawn(async move {
                let mut body = completion(3);
                body["stream"] = json!(n % 2 == 0);
                let response = post_as(&cluster, &secret, "/v1/completions", body).await;
                let status = response.status().as_u16();
                if status == 429 {
                    let ms: u64 = header(&response, "retry-after-ms").parse().unwrap();
                    assert!((1..=61_000).contains(&ms), "{ms}");
                    assert_eq!(header(&response, "x-ratelimit-limit-requests"), "20");
                    assert_eq!(header(&response, "x-ratelimit-remaining-requests"), "0");
                    let message = response.json::<Value>().await.unwrap()["error"]["message"].as_str().unwrap().to_owned();
                    assert!(message.contains(&format!("try again in {}s", ms as f64 / 1e3)), "{message}");
                } else {
                    response.text().await.unwrap();
                }
                status
            })
        })
        .collect();
    let mut passed = 0;
    for status in asked {
        passed += match status.await.unwrap() {
            200 => 1,
            429 => 0,
            other => panic!("{other}"),
        };
    }
    assert_eq!(passed, 20);
    // A different tenant has a different budget, and other endpoints do not bypass it.
    let other = key(&cluster, "other", "free").await;
    assert_eq!(post_as(&cluster, &other, "/v1/completions", completion(3)).await.status(), 200);
    let message = json!([{"role": "user", "content": "hi"}]);
    for (path, body) in [
        ("/v1/chat/completions", json!({"model": "tiny", "messages": message})),
        ("/v1/responses", json!({"model": "tiny", "input": "hi"})),
        ("/v1/messages", json!({"model": "tiny", "max_tokens": 3, "messages": message})),
        ("/v1/embeddings", json!({"model": "tiny", "input": "hi"})),
    ] {
        assert_eq!(post_as(&cluster, &secret, path, body).await.status(), 429, "{path}");
    }
    Arc::into_inner(cluster).unwrap().stop().await;
    assert_eq!(events(data.path()).len(), 21);
}

#[tokio::test]
async fn tokens_are_reserved_for_all_choices_and_what_is_not_used_comes_back() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, mut worker) = start(data.path(), |_| ()).await;
    let secret = key_with(&cluster, json!({"tenant": "acme", "tier": "premium", "limits": {"tokens_per_minute": 100}})).await;
    let ask = |body: Value| post_as(&cluster, &secret, "/v1/completions", body);
    let with_n = |max_tokens: u32, n: u32| {
        let mut body = completion(max_tokens);
        body["n"] = n.into();
        body
    };
    let never = ask(with_n(40, 3)).await;
    assert_eq!(never.status(), 400);
    assert_eq!(never.json::<Value>().await.unwrap()["error"]["code"], "request_too_large");
    // 4 tokens of prompt and 90 of answer are reserved; the answer has 6.
    let answer = ask(with_n(90, 1)).await;
    assert_eq!((answer.status().as_u16(), &*header(&answer, "x-ratelimit-remaining-tokens")), (200, "6"));
    assert_eq!(answer.json::<Value>().await.unwrap()["usage"]["total_tokens"], 10);
    let answer = ask(with_n(20, 4)).await;
    assert_eq!((answer.status().as_u16(), &*header(&answer, "x-ratelimit-remaining-tokens")), (200, "6"));
    answer.text().await.unwrap();
    // 10 and 28 were used.
    let refused = ask(with_n(60, 1)).await;
    assert_eq!((refused.status().as_u16(), &*header(&refused, "x-ratelimit-remaining-tokens")), (429, "62"));
    // The unused reservation of a client that disconnects is returned.
    while worker.messages.try_recv().is_ok() {}
    let stream = json!({"model": "tiny", "prompt": [9], "max_tokens": 50, "stream": true, "ignore_eos": true});
    drop(ask(stream).await);
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    loop {
        let refused = ask(with_n(90, 1)).await;
        let left: u64 = header(&refused, "x-ratelimit-remaining-tokens").parse().unwrap();
        if (55..=61).contains(&left) {
            break;
        }
        assert!(tokio::time::Instant::now() < deadline, "{left}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    cluster.stop().await;
}

#[tokio::test]
async fn another_tenants_records_are_not_found() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    let (ours, theirs) = (key(&cluster, "ours", "premium").await, key(&cluster, "theirs", "premium").await);
    let colleague = key(&cluster, "ours", "premium").await;
    let response: Value = post_as(&cluster, &ours, "/v1/responses", json!({"model": "tiny", "input": "hi"})).await.json().await.unwrap();
    let conversation: Value = post_as(&cluster, &ours, "/v1/conversations", json!({})).await.json().await.unwrap();
    let (response, conversation) = (response["id"].as_str().unwrap(), conversation["id"].as_str().unwrap());
    let get = async |key: &str, path: &str| {
        reqwest::Client::new().get(format!("{}{path}", cluster.url)).bearer_auth(key).send().await.unwrap().status().as_u16()
    };
    for path in
        [format!("/v1/responses/{response}"), format!("/v1/responses/{response}/input_items"), format!("/v1/conversations/{conversation}")]
    {
        assert_eq!([get(&ours, &path).await, get(&colleague, &path).await, get(&theirs, &path).await], [200, 200, 404], "{path}");
    }
    for body in [
        json!({"model": "tiny", "input": "hi", "previous_response_id": response}),
        json!({"model": "tiny", "input": "hi", "conversation": conversation}),
    ] {
        assert_eq!(post_as(&cluster, &theirs, "/v1/responses", body).await.status(), 404);
    }
    assert_eq!(post_as(&cluster, &theirs, &format!("/v1/responses/{response}/cancel"), json!({})).await.status(), 404);
    // For a different tenant, the same Idempotency-Key is a different request.
    let repeat = async |key: &str| {
        let request = reqwest::Client::new().post(format!("{}/v1/completions", cluster.url)).bearer_auth(key);
        let answer = request.header("idempotency-key", "k").json(&completion(3)).send().await.unwrap();
        let status = header(&answer, "x-idempotency");
        (status, answer.json::<Value>().await.unwrap()["id"].as_str().unwrap().to_owned())
    };
    let first = repeat(&ours).await;
    assert_eq!(first.0, "started");
    assert_eq!(repeat(&colleague).await, ("replayed".into(), first.1));
    assert_eq!(repeat(&theirs).await.0, "started");
    cluster.stop().await;
    assert_eq!(events(data.path()).iter().filter(|event| event.output_tokens == 3).count(), 2, "a repeat is counted once");
}

#[tokio::test]
async fn no_salt_of_a_client_reaches_anothers_blocks() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, mut worker) = start(data.path(), |_| ()).await;
    let (one, two) = (key(&cluster, "one", "premium").await, key(&cluster, "two", "premium").await);
    let mut salt = async |key: &str, cache_salt: Option<&str>| {
        let mut body = completion(2);
        body["cache_salt"] = json!(cache_salt);
        assert_eq!(post_as(&cluster, key, "/v1/completions", body).await.status(), 200);
        worker.decode_job().await.salt
    };
    let plain = salt(&one, None).await;
    assert_eq!(salt(&one, None).await, plain);
    assert_ne!(salt(&one, Some("user")).await, plain, "a tenant may separate its own requests");
    // All salts that `two` could know, as text.
    for tried in [None, Some("one"), Some("user"), Some(&*String::from_utf8_lossy(&plain))] {
        let theirs = salt(&two, tried).await;
        assert!(theirs.len() >= 32 && theirs[..32] != plain[..32], "{tried:?}");
    }
    cluster.stop().await;
}

#[tokio::test]
async fn tiers_have_their_classes() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    for (tier, asked, gets) in
        [("free", Some("priority"), "flex"), ("paid", None, "default"), ("paid", Some("flex"), "flex"), ("premium", None, "priority")]
    {
        let secret = key(&cluster, tier, tier).await;
        let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 2, "service_tier": asked});
        let answer: Value = post_as(&cluster, &secret, "/v1/chat/completions", body).await.json().await.unwrap();
        assert_eq!(answer["service_tier"], gets, "{tier} {asked:?}: {answer}");
    }
    cluster.stop().await;
    let classes: Vec<_> = events(data.path()).into_iter().map(|event| (event.tenant, event.class)).collect();
    assert_eq!(classes[0], ("free".into(), "batch".into()));
}

#[tokio::test]
async fn what_was_used_is_written_down_once_and_limits_outlive_a_restart() {
    let data = tempfile::tempdir().unwrap();
    let prices = |flags: &mut Flags| {
        let file = "[price.tiny]\nprompt = 1.0\ncached = 0.5\noutput = 10.0\n[tier.free]\nrequests_per_minute = 2";
        let Flags { price, tier, .. } = toml::from_str(file).unwrap();
        (flags.price, flags.tier) = (price, tier);
    };
    let (cluster, worker) = start(data.path(), prices).await;
    let secret = key_with(&cluster, json!({"tenant": "acme", "tier": "free", "user": "ann"})).await;
    let mut stream = completion(4);
    stream["prompt"] = json!((1..=20).collect::<Vec<_>>());
    stream["stream"] = json!(true);
    let answer = post_as(&cluster, &secret, "/v1/completions", stream).await;
    let id = header(&answer, "x-request-id");
    answer.text().await.unwrap();
    // The event is there before the client has received the end: no waiting here.
    let event = events(data.path()).pop().unwrap();
    assert_eq!((event.id, &*event.tenant, event.user.as_deref(), event.key.as_deref()), (id, "acme", Some("ann"), Some(&secret[..15])));
    assert_eq!((&*event.model, event.prompt_tokens, event.cached_tokens, event.output_tokens, &*event.outcome), ("tiny", 20, 16, 4, "ok"));
    assert_eq!(event.cost_micros, 4 + 8 + 40);
    assert!(event.ttft_ms.is_some_and(|ttft| ttft <= event.total_ms));
    // Refused requests are not recorded.
    assert_eq!(post_as(&cluster, &secret, "/v1/completions", completion(4)).await.status(), 200);
    assert_eq!(post_as(&cluster, &secret, "/v1/completions", completion(4)).await.status(), 429);
    assert_eq!(events(data.path()).len(), 2);
    cluster.stop().await;
    worker.kill().await;

    let (again, _worker) = start(data.path(), prices).await;
    assert_eq!(post_as(&again, &secret, "/v1/completions", completion(4)).await.status(), 429);
    let key_of_another = key(&again, "other", "free").await;
    assert_eq!(post_as(&again, &key_of_another, "/v1/completions", completion(4)).await.status(), 200);
    again.stop().await;
}

#[tokio::test]
async fn a_secret_is_in_no_log_no_metric_and_no_error() {
    // The log of all threads: compute threads must not log a key either.
    let log = &listen().log;
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |_| ()).await;
    let secret = key(&cluster, "acme", "free").await;
    let mut shown = String::new();
    for body in [completion(2), completion(u32::MAX), json!({"prompt": 7})] {
        let response = post_as(&cluster, &secret, "/v1/completions", body).await;
        shown += &format!("{:?}", response.headers());
        shown += &response.text().await.unwrap();
    }
    let wrong = format!("{}{}", &secret[..60], "0000000");
    shown += &post_as(&cluster, &wrong, "/v1/completions", completion(2)).await.text().await.unwrap();
    shown += &reqwest::get(format!("{}/metrics", cluster.admin.as_ref().unwrap())).await.unwrap().text().await.unwrap();
    shown += &reqwest::get(format!("{}/cluster", cluster.admin.as_ref().unwrap())).await.unwrap().text().await.unwrap();
    cluster.stop().await;
    shown += &String::from_utf8_lossy(&log.take());
    assert!(shown.contains(&secret[..15]), "that a key was made is logged, by its id");
    assert!(!shown.contains(&secret[15..30]), "no more of it than its id is shown");
    let mut files = vec![data.path().to_owned()];
    while let Some(path) = files.pop() {
        if path.is_dir() {
            files.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        } else {
            // A database removes its journal when it is closed.
            let bytes = std::fs::read(&path).or_else(|error| if error.kind() == NotFound { Ok(Vec::new()) } else { Err(error) });
            assert!(!String::from_utf8_lossy(&bytes.unwrap()).contains(&secret[15..30]), "{}", path.display());
        }
    }
}

#[tokio::test]
async fn a_public_address_is_closed_unless_told_otherwise() {
    let pki = tempfile::tempdir().unwrap();
    tidemill_net::identity::create(pki.path()).unwrap();
    let bind = async |change: &dyn Fn(&mut Flags)| {
        let mut flags = Flags {
            http: Some(([0, 0, 0, 0], 0).into()),
            listen: Some(([127, 0, 0, 1], 0).into()),
            pki: Some(pki.path().to_owned()),
            model: vec![support::fixture("llama3").into()],
            ..Flags::default()
        };
        change(&mut flags);
        tidemill_coordinator::run::Coordinator::bind(crate::support::checked(flags).unwrap())
            .await
            .map(drop)
            .map_err(|error| error.to_string())
    };
    let refused = bind(&|_| ()).await.unwrap_err();
    assert!(refused.contains("--open") && refused.contains("tidemill keys create"), "{refused}");
    assert_eq!(bind(&|flags| flags.open = Some(true)).await, Ok(()));

    // With an operators' port, the first key can be made; until then no client gets in.
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path(), |flags| flags.http = Some(([0, 0, 0, 0], 0).into())).await;
    assert_eq!(cluster.ask("/v1/completions", completion(2)).await.0, 401);
    let secret = key(&cluster, "acme", "free").await;
    assert_eq!(post_as(&cluster, &secret, "/v1/completions", completion(2)).await.status(), 200);
    cluster.stop().await;
}

#[tokio::test]
async fn coordinators_of_one_host_share_their_keys() {
    let data = tempfile::tempdir().unwrap();
    let file = data.path().join("tenants.sqlite");
    let (first, _one) = start(&data.path().join("first"), |flags| flags.tenants = Some(file.clone())).await;
    let (second, _two) = start(&data.path().join("second"), |flags| flags.tenants = Some(file.clone())).await;
    let secret = key(&first, "acme", "premium").await;
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while second.ask("/v1/completions", completion(2)).await.0 != 401 {
        assert!(tokio::time::Instant::now() < deadline, "the second one hears of the key");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert_eq!(post_as(&second, &secret, "/v1/completions", completion(2)).await.status(), 200);
    first.stop().await;
    second.stop().await;
}
