//! Budgets in money at a real gateway: many requests at once, a soft budget, a restart.

use super::support::{self, Cluster, Script, Worker};
use reqwest::Method;
use serde_json::{Value, json};
use std::{
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_tenancy::{audit::Verifier, journal, usage::price::Price};

const REPLY: [u32; 6] = [10, 11, 12, 13, 14, 15];
/// A token costs 1.
const PRICE: Price = Price { prompt: 1e6, cached: 1e6, output: 1e6 };

async fn start(data: &Path) -> (Cluster, Worker) {
    let cluster = Cluster::start(|flags| {
        flags.admin = Some(([127, 0, 0, 1], 0).into());
        flags.data = Some(data.to_owned());
        flags.price.insert("tiny".into(), PRICE);
        flags.audit = Some("30".parse().unwrap());
    })
    .await;
    let worker = cluster.join("decode", support::decode(), Script::reply(&REPLY)).await;
    (cluster, worker)
}

async fn admin(cluster: &Cluster, method: Method, path: &str, body: Value) -> (u16, Value) {
    let request = reqwest::Client::new().request(method, format!("{}{path}", cluster.admin.as_ref().unwrap()));
    let request = if body.is_null() { request } else { request.json(&body) };
    let response = request.send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

async fn key(cluster: &Cluster, tenant: &str, limits: Value) -> String {
    let body = json!({"tenant": tenant, "tier": "premium", "limits": limits});
    let (status, made) = admin(cluster, Method::POST, "/admin/keys", body).await;
    assert_eq!(status, 200, "{made}");
    made["key"].as_str().unwrap().to_owned()
}

async fn set_budget(cluster: &Cluster, tenant: &str, limits: Value) {
    let (status, put) = admin(cluster, Method::PUT, &format!("/admin/tenants/{tenant}"), json!({"limits": limits})).await;
    assert_eq!(status, 200, "{put}");
}

/// A completion with a prompt of four tokens.
async fn ask(cluster: &Cluster, key: &str, max_tokens: u32) -> (u16, Option<String>, Value) {
    let body = json!({"model": "tiny", "prompt": [1, 2, 3, 4], "max_tokens": max_tokens, "temperature": 0, "ignore_eos": true});
    let response = reqwest::Client::new().post(format!("{}/v1/completions", cluster.url)).bearer_auth(key).json(&body).send();
    let response = response.await.unwrap();
    let header = |name: &str| response.headers().get(name).map(|value| value.to_str().unwrap().to_owned());
    let (status, warning, retry) = (response.status().as_u16(), header("x-tidemill-budget"), header("x-should-retry"));
    assert_eq!(retry.as_deref(), (status == 429).then_some("false"));
    (status, warning, response.json().await.unwrap())
}

/// The money that a tenant has spent today and this month.
async fn spent(cluster: &Cluster, tenant: &str) -> (String, String) {
    let (_, report) = admin(cluster, Method::GET, "/admin/spend", Value::Null).await;
    let row = report["tenants"].as_array().unwrap().iter().find(|row| row["tenant"] == tenant).unwrap().clone();
    let of = |period: &str| row[period]["spent"].as_str().unwrap().to_owned();
    (of("day"), of("month"))
}

#[tokio::test]
async fn many_at_once_spend_no_more_than_the_budget_and_a_restart_knows_it() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path()).await;
    let secret = key(&cluster, "acme", json!({})).await;
    // Money that is spent before there is a budget counts.
    assert_eq!(ask(&cluster, &secret, 6).await.0, 200);
    set_budget(&cluster, "acme", json!({"budget_day": "65", "budget_month": 1000})).await;
    let cluster = Arc::new(cluster);
    let asked: Vec<_> = (0..48)
        .map(|_| {
            let (cluster, secret) = (Arc::clone(&cluster), secret.clone());
            tokio::spawn(async move { ask(&cluster, &secret, 6).await })
        })
        .collect();
    let mut passed = 0;
    for asked in asked {
        let (status, _, answer) = asked.await.unwrap();
        if status == 200 {
            passed += 1;
            continue;
        }
        let error = &answer["error"];
        assert_eq!((status, &error["code"], &error["type"]), (429, &json!("insufficient_quota"), &json!("insufficient_quota")));
        let message = error["message"].as_str().unwrap();
        assert!(message.contains("the budget of `acme` for this day is 65") && message.contains("T00:00:00Z"), "{message}");
    }
    assert_eq!(passed, 5, "each costs 10, and 10 were spent before");
    let cluster = Arc::into_inner(cluster).unwrap();
    assert_eq!(spent(&cluster, "acme").await, ("60".to_owned(), "60".to_owned()));
    cluster.stop().await;

    let (cluster, _worker) = start(data.path()).await;
    assert_eq!(spent(&cluster, "acme").await, ("60".to_owned(), "60".to_owned()), "the log has it");
    assert_eq!(ask(&cluster, &secret, 2).await.0, 429);
    assert_eq!(ask(&cluster, &secret, 1).await.0, 200);
    assert_eq!(ask(&cluster, &secret, 1).await.0, 429);
    // A larger answer than the whole budget is no matter of time.
    let (status, _, answer) = ask(&cluster, &secret, 62).await;
    assert_eq!((status, &answer["error"]["code"]), (400, &json!("request_too_large")));
    set_budget(&cluster, "acme", json!({"budget_day": "none"})).await;
    assert_eq!(ask(&cluster, &secret, 6).await.0, 200);
    // Other tenants, with names that begin alike, have spent nothing.
    let other = key(&cluster, "acme2", json!({"budget_month": "10"})).await;
    assert_eq!([ask(&cluster, &other, 6).await.0, ask(&cluster, &other, 6).await.0], [200, 429]);
    cluster.stop().await;
}

/// The crossed budgets in the audit log: what was crossed, and the soft budget.
fn crossed(data: &Path) -> Vec<(String, String)> {
    let (mut verifier, mut found) = (Verifier::default(), Vec::new());
    let read = journal::read(&data.join("audit"), 0, |_, line| {
        let event = verifier.record(&line).unwrap().event;
        let text = |field: &str| event[field].as_str().unwrap_or_default().to_owned();
        found.extend((event["kind"] == "soft-budget").then(|| (format!("{} {}", text("scope"), text("period")), text("soft"))));
        true
    });
    read.unwrap();
    found
}

async fn wait_for_crossings(data: &Path, number: usize) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while crossed(data).len() < number {
        assert!(Instant::now() < deadline, "{:?}", crossed(data));
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn a_soft_budget_is_in_the_audit_log_once_also_after_a_restart() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path()).await;
    let secret = key(&cluster, "acme", json!({})).await;
    set_budget(&cluster, "acme", json!({"budget_day_soft": 5, "budget_day": 100})).await;
    for _ in 0..3 {
        assert_eq!(ask(&cluster, &secret, 6).await.0, 200);
    }
    wait_for_crossings(data.path(), 1).await;
    cluster.stop().await;

    let (cluster, _worker) = start(data.path()).await;
    assert_eq!(ask(&cluster, &secret, 6).await.0, 200);
    // A budget that is raised is another one to cross.
    set_budget(&cluster, "acme", json!({"budget_day_soft": 20, "budget_day": 100})).await;
    assert_eq!(ask(&cluster, &secret, 6).await.0, 200);
    wait_for_crossings(data.path(), 2).await;
    cluster.stop().await;
    let of = |soft: &str| ("tenant acme day".to_owned(), soft.to_owned());
    assert_eq!(crossed(data.path()), [of("5"), of("20")]);
}

#[tokio::test]
async fn a_soft_budget_warns_and_a_keys_budget_is_its_own() {
    let data = tempfile::tempdir().unwrap();
    let (cluster, _worker) = start(data.path()).await;
    let (one, two) = (key(&cluster, "acme", json!({"budget_day": 15})).await, key(&cluster, "acme", json!({})).await);
    set_budget(&cluster, "acme", json!({"budget_month_soft": "25", "budget_month": 40})).await;
    let (status, warning, _) = ask(&cluster, &one, 6).await;
    assert_eq!((status, warning), (200, None));
    let (status, _, answer) = ask(&cluster, &one, 6).await;
    assert!(status == 429 && answer["error"]["message"].as_str().unwrap().contains("this key of `acme`"), "{answer}");
    let (status, warning, _) = ask(&cluster, &two, 6).await;
    assert_eq!((status, warning), (200, None));
    let (status, warning, _) = ask(&cluster, &two, 6).await;
    assert_eq!((status, warning.as_deref()), (200, Some("tenant-month; soft=25; hard=40; spent=30")));
    let metrics = reqwest::get(format!("{}/metrics", cluster.admin.as_ref().unwrap())).await.unwrap().text().await.unwrap();
    assert!(metrics.contains("tidemill_budget_warnings_total{scope=\"tenant\",period=\"month\"} "), "it is counted");
    // An open answer may be as long as the whole budget pays for.
    let body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hi"}]});
    let response = reqwest::Client::new().post(format!("{}/v1/chat/completions", cluster.url)).bearer_auth(&two).json(&body).send();
    assert_eq!(response.await.unwrap().status().as_u16(), 429);
    for (limits, words) in [
        (json!({"budget_day": -1}), "sum of money"),
        (json!({"budget_day": "1.0000001"}), "6 decimals"),
        (json!({"budget_day": 1, "budget_day_soft": 2}), "must not be the larger"),
    ] {
        let body = json!({"tenant": "acme", "limits": limits});
        let (status, answer) = admin(&cluster, Method::POST, "/admin/keys", body).await;
        assert!(status == 400 && answer["error"]["message"].as_str().unwrap().contains(words), "{words}: {answer}");
    }
    cluster.stop().await;
}
