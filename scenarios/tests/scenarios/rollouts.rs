//! Rollouts move users from one model to another in steps, and back if it is worse. Each model has a scripted decode worker.

use crate::{
    routes::qwen,
    support::{Cluster, Script, decode, fixture},
};
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use tidemill_coordinator::settings::feedback::FeedbackFlags;

async fn start() -> Cluster {
    Cluster::start(|flags| {
        flags.model = vec![fixture("llama3").into(), fixture("qwen2").into()];
        flags.served_model_name = vec!["old".into(), "new".into()];
        flags.admin = Some(([127, 0, 0, 1], 0).into());
    })
    .await
}

/// Posts to the operators' port.
async fn operate(cluster: &Cluster, path: &str, body: &Value) -> (u16, Value) {
    let url = format!("{}{path}", cluster.admin.as_ref().unwrap());
    let response = reqwest::Client::new().post(url).json(body).send().await.unwrap();
    (response.status().as_u16(), response.json().await.unwrap())
}

/// The first rollout, or `null` before the gateway knows of one.
async fn status(cluster: &Cluster) -> Value {
    let url = format!("{}/rollouts", cluster.admin.as_ref().unwrap());
    let mut listed: Value = reqwest::get(url).await.unwrap().json().await.unwrap();
    listed["rollouts"].get_mut(0).map(Value::take).unwrap_or_default()
}

/// The answering model of each user's request; `None` if it failed.
async fn ask(cluster: &Cluster, users: std::ops::Range<usize>) -> Vec<Option<String>> {
    let one = async |user: usize| {
        let body = json!({"model": "old", "prompt": "Hello", "max_tokens": 3, "user": format!("user-{user}"), "temperature": 0});
        let (status, answer) = cluster.ask("/v1/completions", body).await;
        (status == 200).then(|| answer["model"].as_str().unwrap().to_owned())
    };
    let mut models = Vec::new();
    for user in users {
        models.push(one(user).await);
    }
    models
}

fn wanted() -> Value {
    json!({
        "from": "old", "to": "new", "steps": [30, 60, 100], "step_s": 4, "no_gate": true,
        "limits": {"requests_min": 5, "latency_ratio": 1000, "goodput_under": 1, "overdue_s": 1, "window_s": 10},
    })
}

/// Sends requests of all users repeatedly until the rollout is in this state. Returns the share and the answering models of each round.
async fn until(cluster: &Cluster, state: &str) -> Vec<(f64, Vec<Option<String>>)> {
    let deadline = Instant::now() + Duration::from_secs(60);
    let mut rounds = Vec::new();
    loop {
        let before = status(cluster).await;
        if before["state"] == state {
            return rounds;
        }
        assert!(Instant::now() < deadline, "not {state}: {before:#}");
        let models = ask(cluster, 0..20).await;
        if status(cluster).await["step"] == before["step"] {
            rounds.push((before["share"].as_f64().unwrap(), models));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn users_move_step_by_step_and_none_moves_back() {
    let cluster = start().await;
    let _old = cluster.join("decode-0", decode(), Script::reply(&[8, 9, 8])).await;
    let _new = cluster.join("decode-1", qwen(), Script::reply(&[10, 11, 10])).await;
    let gate = json!({"from": "old", "to": "new"});
    let (code, refused) = operate(&cluster, "/rollouts", &gate).await;
    assert!(code == 400 && refused["error"]["message"].as_str().unwrap().contains("--no-gate"), "{refused}");
    let unknown = json!({"from": "old", "to": "newer", "no_gate": true});
    assert_eq!(operate(&cluster, "/rollouts", &unknown).await.0, 404);
    assert_eq!(cluster.ask("/rollouts", wanted()).await.0, 404, "clients do not change what they get");

    let (code, started) = operate(&cluster, "/rollouts", &wanted()).await;
    assert_eq!((code, &started["why"]), (200, &json!("started at 30 %")), "{started}");
    let back = json!({"from": "new", "to": "old", "no_gate": true});
    assert_eq!(operate(&cluster, "/rollouts", &back).await.0, 409, "a model is in one rollout at a time");
    let rounds = until(&cluster, "done").await;
    let shares: Vec<f64> = rounds.iter().map(|(share, _)| *share).collect();
    assert!(shares.is_sorted() && [0.3, 0.6, 1.0].iter().all(|share| shares.contains(share)), "{shares:?}");
    for pair in rounds.windows(2) {
        for (user, (before, after)) in pair[0].1.iter().zip(&pair[1].1).enumerate() {
            let stays = pair[0].0 == pair[1].0 || before.as_deref() == Some("new");
            assert!(before.is_some() && (!stays || before == after), "user {user} at {} and {}", pair[0].0, pair[1].0);
        }
    }
    let moved = |models: &[Option<String>]| models.iter().filter(|model| model.as_deref() == Some("new")).count();
    assert!(moved(&rounds[0].1) < 15 && moved(&ask(&cluster, 0..20).await) == 20);
    let seen = status(&cluster).await;
    assert!(seen["seen_to"]["requests"].as_u64().unwrap() >= 5 && seen["seen_to"]["error_rate"] == 0.0, "{seen:#}");

    // Requests that name the new model get it in any state.
    assert_eq!(operate(&cluster, "/rollouts/abort", &json!({"from": "old"})).await.0, 200);
    while status(&cluster).await["state"] != "aborted" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(moved(&ask(&cluster, 0..20).await), 0);
    let direct = json!({"model": "new", "prompt": "Hello", "max_tokens": 2});
    assert_eq!(cluster.ask("/v1/completions", direct).await.1["model"], "new");
    assert_eq!(operate(&cluster, "/rollouts/forget", &json!({"from": "old"})).await.0, 200);
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_candidate_that_hangs_or_is_gone_is_rolled_back_within_seconds() {
    let cluster = start().await;
    let _old = cluster.join("decode-0", decode(), Script::reply(&[8, 9, 8])).await;
    let new = cluster.join("decode-1", qwen(), Script { stall_after: 0, ..Script::reply(&[10, 11]) }).await;
    let long = |from: &str| {
        json!({"from": from, "to": if from == "old" { "new" } else { "old" }, "steps": [50, 100], "step_s": 600, "no_gate": true,
        "limits": {"requests_min": 5, "overdue_s": 1, "window_s": 10}})
    };
    assert_eq!(operate(&cluster, "/rollouts", &long("old")).await.0, 200);
    // The test does not wait for these answers to end: they never do.
    let asking: Vec<_> = (0..24)
        .map(|user| {
            let url = format!("{}/v1/completions", cluster.url);
            let body = json!({"model": "old", "prompt": "Hello", "max_tokens": 3, "user": format!("user-{user}")});
            tokio::spawn(async move { reqwest::Client::new().post(url).json(&body).send().await.map(|response| response.status()) })
        })
        .collect();
    let began = Instant::now();
    let rolled_back = async || {
        loop {
            let status = status(&cluster).await;
            if status["state"] == "rolled_back" {
                return status;
            }
            assert!(began.elapsed() < Duration::from_secs(30), "{status:#}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let status = rolled_back().await;
    assert!(status["why"].as_str().unwrap().contains("requests failed"), "{status:#}");
    assert!(ask(&cluster, 0..24).await.iter().all(|model| model.as_deref() == Some("old")));
    asking.iter().for_each(tokio::task::JoinHandle::abort);

    // Once more, and the new model's only worker dies.
    new.kill().await;
    assert_eq!(operate(&cluster, "/rollouts", &long("old")).await.0, 200);
    let mut failed = 0;
    let began = Instant::now();
    while self::status(&cluster).await["state"] != "rolled_back" {
        failed += ask_now(&cluster).await;
        assert!(began.elapsed() < Duration::from_secs(40), "{:#}", self::status(&cluster).await);
    }
    assert!(failed < 60, "{failed}");
    let metrics = reqwest::get(format!("{}/metrics", cluster.admin.as_ref().unwrap())).await.unwrap().text().await.unwrap();
    assert!(metrics.contains("tidemill_rollbacks_total{from=\"old\",to=\"new\"}"), "{metrics}");
    cluster.stop().await;
}

/// Sends requests of some users at once, which give up after a second. Returns the number of requests without an answer.
async fn ask_now(cluster: &Cluster) -> usize {
    let client = reqwest::Client::builder().timeout(Duration::from_secs(1)).build().unwrap();
    let asking: Vec<_> = (0..8)
        .map(|user| {
            let body = json!({"model": "old", "prompt": "Hello", "max_tokens": 3, "user": format!("user-{user}")});
            let request = client.post(format!("{}/v1/completions", cluster.url)).json(&body);
            tokio::spawn(async move { request.send().await.is_ok_and(|response| response.status() == 200) })
        })
        .collect();
    let mut failed = 0;
    for asked in asking {
        failed += usize::from(!asked.await.unwrap());
    }
    failed
}

#[tokio::test(flavor = "multi_thread")]
async fn scores_and_votes_roll_back_and_a_pause_is_a_pause() {
    let cluster = start().await;
    let _old = cluster.join("decode-0", decode(), Script::reply(&[8, 9, 8])).await;
    let _new = cluster.join("decode-1", qwen(), Script::reply(&[10, 11, 10])).await;
    let from = json!({"from": "old"});
    let mut wanted = wanted();
    wanted["golden"] = json!({"from": 0.91, "to": 0.88});
    let (code, refused) = operate(&cluster, "/rollouts", &wanted).await;
    assert!(code == 400 && refused["error"]["message"].as_str().unwrap().contains("down by 0.03"), "{refused}");
    wanted["golden"] = json!({"from": 0.91, "to": 0.90});
    assert_eq!(operate(&cluster, "/rollouts", &wanted).await.0, 200);
    assert_eq!(operate(&cluster, "/rollouts/pause", &from).await.0, 200);
    assert_eq!(operate(&cluster, "/rollouts/pause", &from).await.0, 409);
    ask(&cluster, 0..20).await;
    // Longer than a step, in which a rollout that is not paused would go on.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    let paused = status(&cluster).await;
    assert_eq!((&paused["state"], &paused["step"], &paused["share"]), (&json!("paused"), &json!(0), &json!(0.3)), "{paused:#}");
    assert_eq!(operate(&cluster, "/rollouts/resume", &from).await.0, 200);
    let mut worse = from.clone();
    worse["golden"] = json!({"from": 0.91, "to": 0.80});
    assert_eq!(operate(&cluster, "/rollouts/golden", &worse).await.0, 200);
    assert!(until(&cluster, "rolled_back").await.len() < 50);
    assert!(status(&cluster).await["why"].as_str().unwrap().contains("golden score 0.800"));

    wanted["step_s"] = json!(600);
    assert_eq!(operate(&cluster, "/rollouts", &wanted).await.0, 200, "one that has ended makes room");
    while status(&cluster).await["state"] != "running" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for (model, up, down) in [("old", 95, 5), ("new", 10, 30)] {
        assert_eq!(operate(&cluster, "/rollouts/votes", &json!({"model": model, "up": up, "down": down})).await.0, 200);
    }
    assert_eq!(operate(&cluster, "/rollouts/votes", &json!({"model": "other", "up": 1})).await.0, 404);
    until(&cluster, "rolled_back").await;
    assert!(status(&cluster).await["why"].as_str().unwrap().contains("thumbs down"));
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn shadows_are_compared_and_never_seen() {
    let cluster = start().await;
    let _old = cluster.join("decode-0", decode(), Script::reply(&[8, 9, 8])).await;
    let mut new = cluster.join("decode-1", qwen(), Script::reply(&[10, 11, 10])).await;
    let wanted = json!({"from": "old", "to": "new", "steps": [0, 100], "step_s": 600, "no_gate": true, "shadow": 1.0, "limits": {"requests_min": 10}});
    assert_eq!(operate(&cluster, "/rollouts", &wanted).await.0, 200);
    // The gateway learns of the agreed state a moment later.
    while !status(&cluster).await["shadows"].is_object() {
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    let stream = json!({"model": "old", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "stream": true});
    let said = cluster.post("/v1/chat/completions", stream).await.text().await.unwrap();
    assert!(said.contains("\"model\":\"old\"") && !said.contains("\"new\""), "{said}");
    let models = ask(&cluster, 0..12).await;
    assert!(models.iter().all(|model| model.as_deref() == Some("old")), "{models:?}");
    let deadline = Instant::now() + Duration::from_secs(20);
    let shadows = loop {
        let shadows = status(&cluster).await["shadows"].clone();
        let ran: u64 = ["differs", "same", "drawn", "failed"].iter().map(|kind| shadows[kind].as_u64().unwrap()).sum();
        if ran + shadows["dropped"].as_u64().unwrap() == 13 {
            break shadows;
        }
        assert!(Instant::now() < deadline, "{shadows}");
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert!(shadows["differs"].as_u64() >= Some(9) && shadows["drawn"] == 1 && shadows["failed"] == 0, "{shadows}");
    let job = new.decode_job().await;
    assert_eq!(job.urgency.priority, 0, "behind everybody else");
    assert_eq!(status(&cluster).await["seen_to"]["requests"], 0, "nobody was there");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn keys_that_cost_nothing_decide_no_rollout() {
    let cluster = Cluster::start(|flags| {
        flags.model = vec![fixture("llama3").into(), fixture("qwen2").into()];
        flags.served_model_name = vec!["old".into(), "new".into()];
        flags.admin = Some(([127, 0, 0, 1], 0).into());
        flags.feedback = Some(FeedbackFlags::default());
    })
    .await;
    let _old = cluster.join("decode-0", decode(), Script::reply(&[8, 9, 8])).await;
    let _new = cluster.join("decode-1", qwen(), Script::reply(&[10, 11, 10])).await;
    let mut wanted = wanted();
    wanted["step_s"] = json!(600);
    assert_eq!(operate(&cluster, "/rollouts", &wanted).await.0, 200);
    while status(&cluster).await["state"] != "running" {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Each asks the new model, and votes against its answer.
    let vote = async |tenant: &str, tier: &str, times: usize| {
        let (_, made) = operate(&cluster, "/admin/keys", &json!({"tenant": tenant, "tier": tier})).await;
        let post = async |path: &str, body: Value| -> Value {
            let request = reqwest::Client::new().post(format!("{}{path}", cluster.url)).bearer_auth(made["key"].as_str().unwrap());
            let response = request.json(&body).send().await.unwrap();
            assert_eq!(response.status(), 200, "{tenant} at {path}");
            response.json().await.unwrap()
        };
        for _ in 0..times {
            let answer = post("/v1/completions", json!({"model": "new", "prompt": "Hello", "max_tokens": 3})).await;
            post("/v1/feedback", json!({"response_id": answer["id"], "rating": "down"})).await;
        }
    };
    for tenant in ["mallory", "mallory-too"] {
        vote(tenant, "free", 10).await;
    }
    vote("acme", "paid", 1).await;
    let deadline = Instant::now() + Duration::from_secs(20);
    while status(&cluster).await["seen_to"]["votes"] == 0 {
        assert!(Instant::now() < deadline, "{:#}", status(&cluster).await);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let seen = status(&cluster).await;
    assert_eq!((&seen["state"], &seen["seen_to"]["votes"]), (&json!("running"), &json!(1)), "{seen:#}");
    cluster.stop().await;
}
