//! Answers of another region, to which a request was relayed: at most its own kinds of answer reach the client, in full or broken off.

use super::answers::{Server, whole};
use crate::{
    dice::Dice,
    mutate::{bytes, text},
    target::{Subject, Target},
};
use axum::{
    body::{self, Bytes},
    http::{HeaderMap, HeaderValue},
};
use std::{sync::Arc, time::Duration};
use tidemill_gateway::{
    base::pins::Pins,
    serving::regions::{OtherRegion, RegionSettings, Regions, Relayed},
    tenants::Caller,
};
use tidemill_tenancy::web::Target as Door;

pub(crate) const REGIONS: Target = Target {
    name: "regions",
    about: "answers of another region, to a request that was relayed there",
    open,
    cpu_max: Duration::from_secs(10),
    bytes_max: 128 << 20,
    short: 150,
};

const PATH: &str = "/v1/completions";
/// The longest answer to a client.
const ANSWER_BYTES_MAX: usize = 64 << 20;
/// The longest line that is made up for its head.
const HEAD_BYTES_MAX: usize = 1 << 20;
/// The headers of another region's answer that its client may see.
const SEEN: [&str; 4] = ["content-type", "content-length", "cache-control", "retry-after"];
const OWN: [&str; 2] = ["x-tidemill-", "x-ratelimit-"];
const KINDS: [&str; 2] = ["application/json", "text/event-stream"];

const HEADS: &[&str] = &[
    "content-type: application/json",
    "content-type: text/event-stream; charset=utf-8",
    "content-type: text/html",
    "content-type: application/jsonp",
    "content-length: 5",
    "content-length: 18446744073709551615",
    "content-length: -1",
    "transfer-encoding: chunked",
    "transfer-encoding: gzip, chunked",
    "content-encoding: gzip",
    "connection: upgrade",
    "upgrade: h2c",
    "location: http://127.0.0.1:1/",
    "set-cookie: a=b",
    "x-tidemill-region: elsewhere",
    "x-ratelimit-remaining-requests: 5",
    "retry-after: 99999999999999999999",
    "cache-control: public",
    "access-control-allow-origin: *",
    "trailer: x-tidemill-route",
];
const STATUSES: [&str; 12] = ["200 OK", "200 ", "201", "204 No Content", "206", "302 Found", "400", "429", "500", "503", "999", "1000 x"];

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let server = Server::start(&runtime)?;
    Ok(Box::new(move |dice: &mut Dice| {
        let answer = answer(dice);
        dice.show("answer", &answer);
        let length = answer.len();
        server.set(PATH, answer);
        let settings = RegionSettings {
            pins: Arc::new(Pins::default()),
            wait_ms: None,
            region_header: None,
            others: vec![OtherRegion { name: "east".into(), door: Door { url: server.url.clone(), ca: None }, secret: None }],
        };
        // Another one each time: a region that failed is left alone for some seconds.
        let regions = Regions::new(settings, Duration::from_secs(60)).map_err(|error| error.to_string())?;
        let headers = HeaderMap::from_iter(
            [("content-type", "application/json"), ("authorization", "Bearer tm_x")]
                .map(|(name, value)| (name.parse().expect("a name"), HeaderValue::from_static(value))),
        );
        let caller = Caller::new(None);
        let request = Relayed { caller: &caller, path: PATH, headers: &headers, body: Bytes::from_static(b"{}"), streams: dice.one_in(2) };
        runtime.block_on(async {
            let Some(Ok(answer)) = regions.relay(request).await else { return Ok(()) };
            if !answer.status().is_success() {
                return Err(format!("a client gets {}", answer.status()));
            }
            let kind = answer.headers().get("content-type").and_then(|kind| kind.to_str().ok()).unwrap_or_default().to_owned();
            if !KINDS.contains(&kind.split(';').next().unwrap_or_default().trim()) {
                return Err(format!("a client gets `{kind}`"));
            }
            let may_pass = |name: &&str| SEEN.contains(name) || OWN.iter().any(|own| name.starts_with(own));
            if let Some(name) = answer.headers().keys().map(|name| name.as_str()).find(|name| !may_pass(name)) {
                return Err(format!("a client gets the header `{name}`"));
            }
            match body::to_bytes(answer.into_body(), ANSWER_BYTES_MAX).await {
                Ok(body) if body.len() > length => Err(format!("{} bytes of {length}", body.len())),
                _ => Ok(()),
            }
        })
    }))
}

fn answer(dice: &mut Dice) -> Vec<u8> {
    let events = "data: {\"choices\": []}\n\n".repeat(dice.few(200)) + "data: [DONE]\n\n";
    let mut answer = match dice.below(4) {
        0 => whole("200 OK", "application/json", b"{\"id\": \"cmpl-1\", \"choices\": []}"),
        1 => whole("200 OK", "text/event-stream", events.as_bytes()),
        _ => {
            let mut head = "HTTP/1.1 100 Continue\r\n\r\n".repeat(if dice.one_in(5) { dice.below(2000) } else { 0 });
            head += &format!("HTTP/1.1 {}\r\n", dice.pick(&STATUSES));
            let most = if dice.one_in(10) { 300 } else { 8 };
            for _ in 0..dice.few(most) {
                head += dice.pick::<&str>(HEADS);
                head += "\r\n";
            }
            if dice.one_in(20) {
                let text = dice.odd_text();
                head += &format!("x-tidemill-long: {}\r\n", text.repeat(dice.below(2000).min(HEAD_BYTES_MAX / text.len().max(1))));
            }
            head += "\r\n";
            for _ in 0..dice.below(6) {
                let size = dice.pick(&["5", "0", "fffffffffffffff", "5;x=y", "-1", "5 "]).to_owned();
                head += &format!("{size}\r\n{}\r\n", dice.pick(&["12345", "", "data: x\n\n", "{}"]));
            }
            head.into_bytes()
        }
    };
    if dice.one_in(2) {
        if dice.one_in(2) {
            answer = text::mutate(dice, &String::from_utf8_lossy(&answer), HEADS).into_bytes();
        } else {
            bytes::mutate(dice, &mut answer);
        }
    }
    answer
}
