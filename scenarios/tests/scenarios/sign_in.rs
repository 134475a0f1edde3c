//! Operators sign in with a browser while a stranger sends made-up codes.

use crate::support::Cluster;
use reqwest::{Client, redirect::Policy};
use serde_json::json;
use std::{net::Ipv4Addr, time::Duration};
use tidemill_coordinator::settings::Flags;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::{TcpListener, TcpStream},
    task::JoinSet,
    time::sleep,
};

/// The time that the provider takes for a code that it does not know.
const THOUGHT: Duration = Duration::from_secs(20);

/// A provider that refuses every code: the one that it knows at once, and made-up ones when it has looked for them. Returns its URL.
async fn provider() -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let issuer = url.clone();
    tokio::spawn(async move {
        loop {
            let (stream, _) = listener.accept().await.unwrap();
            tokio::spawn(answer(stream, issuer.clone()));
        }
    });
    url
}

async fn answer(mut stream: TcpStream, url: String) {
    let mut asked = Vec::new();
    while !String::from_utf8_lossy(&asked).contains("\r\n\r\n") || asked.starts_with(b"POST") && !asked.windows(5).any(|at| at == b"code=")
    {
        if !matches!(stream.read_buf(&mut asked).await, Ok(1..)) {
            return;
        }
    }
    let asked = String::from_utf8(asked).unwrap();
    let (status, body) = match asked.split(' ').nth(1) {
        Some("/keys") => (200, json!({"keys": [{"kty": "OKP", "crv": "Ed25519", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"}]})),
        Some("/token") => {
            if !asked.contains("code=known") {
                sleep(THOUGHT).await;
            }
            (400, json!({"error": "invalid_grant"}))
        }
        _ => {
            let at = |path: &str| format!("{url}{path}");
            (
                200,
                json!({"issuer": url, "jwks_uri": at("/keys"), "authorization_endpoint": at("/authorize"), "token_endpoint": at("/token")}),
            )
        }
    };
    let body = body.to_string();
    let head =
        format!("HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", body.len());
    let _ = stream.write_all(format!("{head}{body}").as_bytes()).await;
}

/// A browser at an address of its own, which comes back from the provider with a code. Returns the answer.
async fn sign_in(admin: String, from: Ipv4Addr, code: &'static str) -> (u16, String) {
    let browser = Client::builder().redirect(Policy::none()).local_address(Some(from.into())).build().unwrap();
    let begun = browser.get(format!("{admin}/console/sign-in")).send().await.unwrap();
    let header = |name: &str| begun.headers()[name].to_str().unwrap().to_owned();
    let (location, cookie) = (header("location"), header("set-cookie"));
    let state = location.split(['?', '&']).find_map(|part| part.strip_prefix("state=")).unwrap();
    let back = browser.get(format!("{admin}/console/callback?code={code}&state={state}"));
    let answer = back.header("cookie", cookie.split(';').next().unwrap()).send().await.unwrap();
    (answer.status().as_u16(), answer.text().await.unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn made_up_codes_keep_no_operator_out() {
    let (data, issuer) = (tempfile::tempdir().unwrap(), provider().await);
    let sections = format!(
        "[operators]\nissuer = \"{issuer}\"\nclient_id = \"console\"\nalgorithms = [\"EdDSA\"]\nadminister = [\"admins\"]\n\
         url = \"http://127.0.0.1:9100\"\n[audit]\ndays = 1"
    );
    let cluster = Cluster::start(|flags| {
        flags.admin = Some(([127, 0, 0, 1], 0).into());
        flags.data = Some(data.path().to_owned());
        let Flags { operators, audit, .. } = toml::from_str(&sections).unwrap();
        (flags.operators, flags.audit) = (operators, audit);
    })
    .await;
    let admin = cluster.admin.clone().unwrap();
    let mut made_up = JoinSet::new();
    for _ in 0..12 {
        made_up.spawn(sign_in(admin.clone(), Ipv4Addr::new(127, 0, 0, 2), "made-up"));
    }
    // Those that get no place are told so after some seconds, while the others have theirs.
    let (status, said) = made_up.join_next().await.unwrap().unwrap();
    assert!(status == 503 && said.contains("Too many operators sign in"), "{status} {said}");
    for _ in 0..8 {
        let (status, said) = sign_in(admin.clone(), Ipv4Addr::LOCALHOST, "known").await;
        assert!(status == 401 && said.contains("invalid_grant"), "the provider was asked: {status} {said}");
    }
    made_up.abort_all();
    cluster.kill().await;
}
