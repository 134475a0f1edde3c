//! Rules that choose the model, with a scripted decode worker for each model.

use crate::support::{Cluster, Script, decode, engine_of, fixture};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tidemill_coordinator::settings::routing::{AutoFlags, RouteFlags, RouterFlags};
use tidemill_proto::{
    block::LayoutFingerprint,
    message::{EngineInfo, RoleInfo},
};

pub(crate) fn qwen() -> RoleInfo {
    RoleInfo::Decode(EngineInfo { layout: LayoutFingerprint([8; 16]), ..engine_of(&fixture("qwen2")) })
}

fn texts(all: &[&str]) -> Vec<String> {
    all.iter().map(|text| (*text).to_owned()).collect()
}

async fn start(route: Vec<RouteFlags>, router: RouterFlags) -> Cluster {
    Cluster::start(|flags| {
        flags.model = vec![fixture("llama3").into(), fixture("qwen2").into()];
        flags.served_model_name = texts(&["small", "large"]);
        flags.route = route;
        flags.router = Some(router);
    })
    .await
}

fn to(model: &str) -> RouteFlags {
    RouteFlags { model: Some(model.into()), ..RouteFlags::default() }
}

async fn ask(cluster: &Cluster, path: &str, headers: &[(&str, &str)], body: &Value) -> (u16, Value, String, String) {
    let mut request = reqwest::Client::new().post(format!("{}{path}", cluster.url)).json(body);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let response = request.send().await.unwrap();
    let header = |name: &str| response.headers().get(name).map_or("", |value| value.to_str().unwrap()).to_owned();
    let (model, why) = (header("x-tidemill-model"), header("x-tidemill-route"));
    (response.status().as_u16(), response.json().await.unwrap(), model, why)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_protocol_takes_the_same_routes_and_says_which_and_why() {
    let route = vec![
        RouteFlags { region: texts(&["eu"]), name: Some("europe".into()), ..to("small") },
        RouteFlags { asked: texts(&["chat"]), tools: Some(true), name: Some("agents".into()), ..to("large") },
        RouteFlags { asked: texts(&["chat"]), ..to("auto") },
    ];
    let auto = AutoFlags { small: "small".into(), large: "large".into(), ..AutoFlags::default() };
    let router = RouterFlags {
        region_header: Some("X-Region".into()),
        region_metadata: Some("region".into()),
        auto: Some(auto),
        ..RouterFlags::default()
    };
    let cluster = start(route, router).await;
    let _small = cluster.join("decode-0", decode(), Script::reply(&[8, 9])).await;
    let _large = cluster.join("decode-1", qwen(), Script::reply(&[10, 11])).await;

    let said = |text: &str| json!([{"role": "user", "content": text}]);
    let hard = "Prove this theorem with an integral:\n```\nlet x = 1;\n```";
    for (asked, text, model, words) in [
        ("auto", "Hello", "small", "auto: 0.00 < 0.35"),
        ("auto", hard, "large", ">= 0.35"),
        ("chat", hard, "large", "rule 3, auto"),
        ("small", hard, "small", "asked"),
    ] {
        for (path, body) in [
            ("/v1/chat/completions", json!({"model": asked, "messages": said(text), "max_tokens": 2})),
            ("/v1/completions", json!({"model": asked, "prompt": text, "max_tokens": 2})),
            ("/v1/responses", json!({"model": asked, "input": text, "max_output_tokens": 2, "store": false})),
            ("/v1/messages", json!({"model": asked, "messages": said(text), "max_tokens": 2})),
        ] {
            let (status, answer, told, why) = ask(&cluster, path, &[], &body).await;
            assert_eq!((status, &answer["model"], told.as_str()), (200, &json!(model), model), "{path} {asked}: {answer}");
            assert!(why.contains(words), "{path} {asked}: {why}");
            let route = &answer["usage"]["tidemill"]["route"];
            assert_eq!(route, &json!({"asked": asked, "model": model, "why": why}), "{path}");
        }
    }
    let hello = json!({"model": "large", "messages": said("Hello"), "max_tokens": 2});
    let (_, answer, model, why) = ask(&cluster, "/v1/chat/completions", &[("x-region", "eu")], &hello).await;
    assert_eq!((&answer["model"], model.as_str(), why.as_str()), (&json!("small"), "small", "rule europe"));
    let mut from_eu = hello.clone();
    from_eu["metadata"] = json!({"region": "eu"});
    assert_eq!(ask(&cluster, "/v1/chat/completions", &[], &from_eu).await.2, "small");
    let tools =
        json!({"model": "chat", "messages": said("Hi"), "max_tokens": 2, "tools": [{"type": "function", "function": {"name": "f"}}]});
    assert_eq!(ask(&cluster, "/v1/chat/completions", &[], &tools).await.3, "rule agents");
    // A stream reports it as well, and an unknown model is an error as usual.
    let stream = json!({"model": "auto", "messages": said("Hello"), "max_tokens": 2, "stream": true});
    let response = cluster.post("/v1/chat/completions", stream).await;
    assert_eq!(response.headers()["x-tidemill-model"], "small");
    assert!(response.text().await.unwrap().contains("\"model\":\"small\""));
    let unknown = json!({"model": "gpt", "messages": said("Hello"), "max_tokens": 2});
    assert_eq!(ask(&cluster, "/v1/chat/completions", &[], &unknown).await.0, 404);

    let models: Value = cluster.get("/v1/models").await.json().await.unwrap();
    let listed: Vec<_> = models["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(listed, ["small", "large", "auto", "chat"]);
    assert_eq!(cluster.get("/v1/models/auto").await.status(), 200);
    let metrics = cluster.get("/metrics").await.text().await.unwrap();
    assert!(metrics.contains("tidemill_routed_total{model=\"small\",by=\"rule\"}"), "{metrics}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn users_stay_where_a_split_puts_them() {
    let split = BTreeMap::from([("small".into(), 50.0), ("large".into(), 50.0)]);
    let route = vec![RouteFlags { asked: texts(&["chat"]), split, ..RouteFlags::default() }];
    let cluster = start(route, RouterFlags::default()).await;
    let _small = cluster.join("decode-0", decode(), Script::reply(&[8, 9])).await;
    let _large = cluster.join("decode-1", qwen(), Script::reply(&[10, 11])).await;
    let ask = async |user: &str| {
        let body = json!({"model": "chat", "prompt": "Hello", "max_tokens": 2, "user": user});
        let (status, answer, model, _) = ask(&cluster, "/v1/completions", &[], &body).await;
        assert_eq!(status, 200, "{answer}");
        model
    };
    let mut models = BTreeMap::<_, usize>::new();
    for user in 0..40 {
        let user = format!("user-{user}");
        let first = ask(&user).await;
        assert_eq!(ask(&user).await, first, "{user}");
        *models.entry(first).or_default() += 1;
    }
    assert!(models.len() == 2 && models.values().all(|users| *users >= 8), "{models:?}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_overflows_to_a_model_that_has_time() {
    let route = vec![
        RouteFlags { asked: texts(&["chat"]), overflow: Some("large".into()), overflow_ttft_ms: Some(10_000.0), ..to("small") },
        RouteFlags { asked: texts(&["strict"]), overflow: Some("large".into()), overflow_ttft_ms: Some(1e-9), ..to("small") },
    ];
    let cluster = start(route, RouterFlags::default()).await;
    let _large = cluster.join("decode-1", qwen(), Script::reply(&[10, 11])).await;
    let complete = |model: &str| json!({"model": model, "prompt": "Hello", "max_tokens": 2});
    let (status, answer, model, why) = ask(&cluster, "/v1/completions", &[], &complete("chat")).await;
    assert_eq!((status, model.as_str()), (200, "large"), "{answer}");
    assert!(why.contains("overflow: small cannot serve now"), "{why}");
    let (status, ..) = ask(&cluster, "/v1/completions", &[], &complete("small")).await;
    assert_eq!(status, 503, "who names a model gets that one");

    let _small = cluster.join("decode-0", decode(), Script::reply(&[8, 9])).await;
    let (_, _, model, why) = ask(&cluster, "/v1/completions", &[], &complete("chat")).await;
    assert_eq!((model.as_str(), why.as_str()), ("small", "rule 1"));
    // If no model meets the limit, requests go to the faster one.
    let (status, _, model, why) = ask(&cluster, "/v1/completions", &[], &complete("strict")).await;
    assert_eq!(status, 200);
    assert_eq!(model == "large", why.contains("overflow: small would take"), "{model} {why}");
    cluster.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn without_rules_answers_say_nothing_of_them() {
    let cluster = Cluster::start(|flags| {
        flags.model = vec![fixture("llama3").into()];
        flags.served_model_name = texts(&["small"]);
    })
    .await;
    let _small = cluster.join("decode-0", decode(), Script::reply(&[8, 9])).await;
    let (status, answer, model, _) = ask(&cluster, "/v1/completions", &[], &json!({"prompt": "Hello", "max_tokens": 2})).await;
    assert_eq!((status, model.as_str()), (200, ""));
    assert_eq!(answer["usage"]["tidemill"].get("route"), None);
    cluster.stop().await;
}
