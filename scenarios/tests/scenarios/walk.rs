//! A walk over all routes of the clients' port, by clients that do not pay for what they ask, or never come to an end: each gets its
//! refusal, its connection ends, nothing piles up, and who pays is served.

use crate::support::{Cluster, Script, Worker, decode};
use reqwest::{Client, Method, redirect::Policy};
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, time::Duration};
use tidemill_coordinator::settings::{Flags, feedback::FeedbackFlags};
use tidemill_gateway::http::prices::{Price, Row, TABLE};
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    task::JoinSet,
    time::{sleep, timeout},
};

/// The time that a client has for a body.
const BODY_S: u64 = 2;
/// The time by which every client is told something, or cut off: a head may take ten seconds, and the machine may be busy.
const ENDED: Duration = Duration::from_secs(30);
/// The most that is taken from a client without end, including what lies in sockets: a body, or a file.
const TAKEN_MAX: usize = 48 << 20;
const MEMORY_MIB_MAX: u64 = 512;
/// A silence between two bytes.
const PAUSE: Duration = Duration::from_millis(100);

const JSON: &str = "content-type: application/json\r\n";
const FORM: &str = "content-type: multipart/form-data; boundary=b\r\n";
const FILE: &[u8] = b"--b\r\ncontent-disposition: form-data; name=\"file\"; filename=\"a\"\r\n\r\n";
/// A body without end: as long as its head says, or in chunks.
const LENGTHS: [&str; 2] = ["content-length: 1099511627776\r\n", "transfer-encoding: chunked\r\n"];
const PIECE: usize = 64 << 10;

async fn start(data: &tempfile::TempDir) -> (Cluster, Worker, Client, String) {
    let cluster = Cluster::start(|flags| {
        flags.admin = Some(([127, 0, 0, 1], 0).into());
        flags.data = Some(data.path().to_owned());
        flags.body_timeout_s = Some(BODY_S);
        let unlimited = "[tier.free]\nrequests_per_minute = \"none\"\ntokens_per_minute = \"none\"";
        flags.tier = toml::from_str::<Flags>(unlimited).unwrap().tier;
        (flags.body_bytes_max, flags.bodies_bytes_max) = (Some("8MiB".into()), Some("64MiB".into()));
        flags.batch_file_bytes_max = Some("32MiB".into());
        flags.feedback = Some(FeedbackFlags::default());
        flags.memory = Some(Default::default());
    })
    .await;
    let worker = cluster.join("decode-0", decode(), Script::reply(&[40, 41])).await;
    let premium = key(&cluster, json!({"tenant": "acme", "tier": "premium"})).await;
    // A redirect is an answer.
    let client = Client::builder().redirect(Policy::none()).timeout(ENDED).build().unwrap();
    (cluster, worker, client, premium)
}

async fn key(cluster: &Cluster, wanted: Value) -> String {
    let made = Client::new().post(format!("{}/admin/keys", cluster.admin.as_ref().unwrap())).json(&wanted).send().await.unwrap();
    made.json::<Value>().await.unwrap()["key"].as_str().unwrap().to_owned()
}

/// A key of the lowest tier, which has no limits here.
async fn free_key(cluster: &Cluster) -> String {
    key(cluster, json!({"tenant": "free", "tier": "free"})).await
}

/// A key that may send one request in a minute.
async fn key_for_one(cluster: &Cluster, tenant: &str) -> String {
    key(cluster, json!({"tenant": tenant, "tier": "free", "limits": {"requests_per_minute": 1}})).await
}

/// A key that has no request left.
async fn spent_key(cluster: &Cluster, client: &Client) -> String {
    let spent = key_for_one(cluster, "spent").await;
    assert_eq!(ask(client, "GET", format!("{}/v1/files", cluster.url), Some(&spent), None).await.0, 200);
    spent
}

/// An address that this route takes.
fn address(row: &Row) -> String {
    row.path.replace("{asset}", "app.js").replace("{*id}", "x").replace("{id}", "x").replace("{item}", "y")
}

/// Whether the route takes a file rather than JSON.
fn takes_a_file(row: &Row) -> bool {
    (row.method, row.path) == ("POST", "/v1/files")
}

/// Whether it takes quota.
fn counts(row: &Row) -> bool {
    matches!(row.price, Price::Request | Price::Tokens)
}

async fn ask(client: &Client, method: &str, url: String, key: Option<&str>, body: Option<(&str, Vec<u8>)>) -> (u16, String) {
    let mut request = client.request(Method::from_bytes(method.as_bytes()).unwrap(), &url);
    if let Some(key) = key {
        request = request.bearer_auth(key);
    }
    if let Some((kind, body)) = body {
        request = request.header("content-type", kind).body(body);
    }
    let answer = request.send().await.unwrap_or_else(|error| panic!("{method} {url}: {error}"));
    (answer.status().as_u16(), answer.text().await.unwrap())
}

/// A client that goes on sending until it is told something, or cut off.
struct Endless {
    row: &'static Row,
    key: Option<String>,
    /// Lines of the head after those of every request, with its end if it has one.
    head: String,
    first: &'static [u8],
    piece: Vec<u8>,
    pause: Duration,
}

impl Endless {
    /// Returns the answer's status, if one came before the end, and the bytes that were sent.
    async fn send(self, url: &str) -> (Option<u16>, usize) {
        let Self { row, key, head, first, piece, pause } = self;
        let (method, path, host) = (row.method, address(row), url.strip_prefix("http://").unwrap());
        let key = key.map_or_else(String::new, |key| format!("authorization: Bearer {key}\r\n"));
        let (mut reads, mut writes) = TcpStream::connect(host).await.unwrap().into_split();
        let (mut sent, mut answer) = (0, Vec::new());
        let talk = async {
            let begun = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\n{key}{head}");
            let mut next = writes.write_all(&[begun.as_bytes(), first].concat()).await;
            while next.is_ok() {
                sleep(pause).await;
                next = writes.write_all(&piece).await;
                sent += piece.len();
            }
            std::future::pending().await
        };
        let hear = async {
            // A connection may be reset with what has not been read.
            let _ = (&mut reads).take(1 << 20).read_to_end(&mut answer).await;
        };
        let ended = timeout(ENDED, async {
            tokio::select! {
                () = hear => {}
                () = talk => {}
            }
        });
        assert!(ended.await.is_ok(), "{method} {path}: the connection does not end, after {sent} bytes");
        assert!(sent < TAKEN_MAX, "{method} {path}: {sent} bytes were taken");
        let status = std::str::from_utf8(&answer).ok().and_then(|answer| answer.strip_prefix("HTTP/1.1 ")?.get(..3)?.parse().ok());
        (status, sent)
    }
}

/// Bodies without end for a route, in each way.
fn endless(row: &'static Row, key: Option<&str>, more: &str) -> Vec<Endless> {
    let kind = if takes_a_file(row) { FORM } else { JSON };
    let of = |length: &str, first: &'static [u8]| {
        let chunked = length.starts_with("transfer-encoding");
        let letters = vec![b'a'; PIECE];
        let piece = if chunked { [format!("{PIECE:x}\r\n").as_bytes(), &letters, b"\r\n"].concat() } else { letters };
        let first = if chunked { b"" } else { first };
        Endless { row, key: key.map(str::to_owned), head: format!("{kind}{more}{length}\r\n"), first, piece, pause: Duration::ZERO }
    };
    let mut ways: Vec<_> = LENGTHS.iter().map(|length| of(length, b"")).collect();
    if takes_a_file(row) {
        ways.push(of(LENGTHS[0], FILE));
    }
    ways
}

/// Whether an answer of this status was paid for, or is a refusal. A request that should have no end has no success.
fn is_due(row: &Row, status: u16, success: bool) -> bool {
    // Some features need a model that is not here.
    let is_refused = (400..500).contains(&status) && ![401, 403, 429].contains(&status) || status == 501;
    is_refused || success && (200..400).contains(&status)
        // It has no worker for a moment.
        || row.path == "/ready" && status == 503
}

/// The memory of this process, in MiB.
fn memory_mib(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).unwrap();
    line.trim_start_matches(':').trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10
}

/// Ends a walk: a tenant that pays is served, and this process, which is coordinator and clients together, took no more than it may.
async fn end(cluster: Cluster, client: &Client, premium: &str, mib_before: u64) {
    let chat = json!({"messages": [{"role": "user", "content": "hi"}], "max_tokens": 2}).to_string().into_bytes();
    let (status, said) =
        ask(client, "POST", format!("{}/v1/chat/completions", cluster.url), Some(premium), Some(("application/json", chat))).await;
    assert_eq!(status, 200, "{said}");
    let more = memory_mib("VmHWM").saturating_sub(mib_before);
    assert!(more <= MEMORY_MIB_MAX, "{more} MiB more");
    cluster.stop().await;
}

fn begin() -> u64 {
    fs::write("/proc/self/clear_refs", "5").unwrap();
    memory_mib("VmRSS")
}

#[test]
fn what_takes_no_quota_says_why() {
    for row in TABLE {
        assert_eq!(row.why.is_empty(), counts(row), "{row:?}");
        assert!(row.price != Price::Nothing || row.method == "GET", "{row:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_key_and_without_quota_there_is_nothing_but_what_says_why() {
    let (data, mib) = (tempfile::tempdir().unwrap(), begin());
    let (cluster, _worker, client, premium) = start(&data).await;
    let spent = spent_key(&cluster, &client).await;
    let chat = br#"{"messages": [{"role": "user", "content": "hi"}], "prompt": "hi", "input": "hi", "max_tokens": 2}"#;
    for row in TABLE {
        let body = (row.method == "POST").then(|| ("application/json", chat.to_vec()));
        for key in [None, Some("tm_wrong"), Some(&*spent)] {
            let (status, said) = ask(&client, row.method, format!("{}{}", cluster.url, address(row)), key, body.clone()).await;
            let due = match (row.price, key == Some(&*spent)) {
                (Price::Nothing, _) => is_due(row, status, true),
                (_, false) => status == 401,
                (Price::Key, true) => [200, 404].contains(&status),
                (Price::Request | Price::Tokens, true) => status == 429,
            };
            assert!(due, "{} {} with {key:?}: {status} {said}", row.method, row.path);
        }
    }
    end(cluster, &client, &premium, mib).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_that_is_nothing_counts_as_a_request_at_every_route_that_takes_quota() {
    let (data, mib) = (tempfile::tempdir().unwrap(), begin());
    let (cluster, _worker, client, premium) = start(&data).await;
    let bodies: [(&str, &[u8]); 5] = [
        ("application/json", b"\xff\0garbage"),
        ("application/json", b"[1, 2]"),
        ("text/plain", b"{\"a\": "),
        ("multipart/form-data", b"--b\r\n"),
        ("application/x-www-form-urlencoded", b"a=1"),
    ];
    for (place, row) in TABLE.iter().enumerate() {
        for (number, (kind, body)) in bodies.into_iter().enumerate() {
            let once = key_for_one(&cluster, &format!("once-{place}-{number}")).await;
            let url = format!("{}{}", cluster.url, address(row));
            let ask = || ask(&client, row.method, url.clone(), Some(&once), Some((kind, body.to_vec())));
            let (status, said) = ask().await;
            assert!(is_due(row, status, row.method != "POST"), "{} {} {kind}: {status} {said}", row.method, row.path);
            let (again, said) = ask().await;
            assert_eq!(again == 429, counts(row), "{} {} {kind}, again: {again} {said}", row.method, row.path);
        }
    }
    end(cluster, &client, &premium, mib).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_body_under_a_kept_idempotency_key_counts_as_a_request() {
    let (data, mib) = (tempfile::tempdir().unwrap(), begin());
    let (cluster, _worker, client, premium) = start(&data).await;
    let twice = key(&cluster, json!({"tenant": "twice", "tier": "free", "limits": {"requests_per_minute": 2}})).await;
    let mut statuses = Vec::new();
    for said in ["one", "another", "a third"] {
        let chat = json!({"messages": [{"role": "user", "content": said}], "max_tokens": 2});
        let asked = client.post(format!("{}/v1/chat/completions", cluster.url)).bearer_auth(&twice).header("idempotency-key", "kept");
        statuses.push(asked.json(&chat).send().await.unwrap().status().as_u16());
    }
    // Without quota, a kept key may still bring its answer again; but not one that has come with another body.
    assert_eq!(statuses, [200, 422, 429]);
    end(cluster, &client, &premium, mib).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_body_without_end_ends_at_every_route() {
    let (data, mib) = (tempfile::tempdir().unwrap(), begin());
    let (cluster, _worker, client, premium) = start(&data).await;
    let (spent, free) = (spent_key(&cluster, &client).await, free_key(&cluster).await);
    for row in TABLE {
        for key in [None, Some(&*spent), Some(&*free)] {
            // A client that repeats a request must not get more for nothing than one that does not.
            for more in ["", "idempotency-key: again\r\n"] {
                for way in endless(row, key, more) {
                    let (status, sent) = way.send(&cluster.url).await;
                    let due = match (row.price, key) {
                        (Price::Nothing, _) => status.is_none_or(|status| is_due(row, status, true)),
                        (_, None) => status.is_none_or(|status| status == 401),
                        (_, Some(key)) if key == spent && counts(row) => status.is_none_or(|status| status == 429),
                        _ => status.is_none_or(|status| is_due(row, status, row.method != "POST")),
                    };
                    assert!(due, "{} {} with {key:?} {more}: {status:?} after {sent} bytes", row.method, row.path);
                }
            }
        }
    }
    end(cluster, &client, &premium, mib).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn heads_and_bodies_that_come_byte_by_byte_end_at_every_route() {
    let (data, mib) = (tempfile::tempdir().unwrap(), begin());
    let (cluster, _worker, client, premium) = start(&data).await;
    let (spent, free) = (spent_key(&cluster, &client).await, free_key(&cluster).await);
    let slow =
        |row, key: Option<&str>, head, first| Endless { row, key: key.map(str::to_owned), head, first, piece: b" ".to_vec(), pause: PAUSE };
    let mut clients = JoinSet::new();
    let mut begin = |row, key: Option<&str>, has_body: bool, client: Endless| {
        let (url, key) = (cluster.url.clone(), key.map(str::to_owned));
        clients.spawn(async move { (row, key, has_body, client.send(&url).await.0) });
    };
    for row in TABLE {
        let (kind, first): (_, &[u8]) = if takes_a_file(row) { (FORM, FILE) } else { (JSON, b"{") };
        for key in [None, Some(&*spent), Some(&*free)] {
            begin(row, key, true, slow(row, key, format!("{kind}content-length: 100000\r\n\r\n"), first));
        }
        begin(row, None, false, slow(row, None, "x-slow:".into(), b""));
    }
    let mut told = BTreeMap::<_, Vec<_>>::new();
    while let Some(ended) = clients.join_next().await {
        let (row, key, has_body, status): (&Row, Option<String>, bool, Option<u16>) = ended.unwrap();
        let due = match (row.price, &key) {
            _ if !has_body => status.is_none(),
            (Price::Nothing, _) => status.is_some_and(|status| is_due(row, status, true)),
            (_, None) => status == Some(401),
            (_, Some(key)) if *key == spent && counts(row) => status == Some(429),
            _ => status.is_some_and(|status| is_due(row, status, row.method != "POST")),
        };
        assert!(due, "{} {} with {key:?}: {status:?}", row.method, row.path);
        if row.method == "POST" && counts(row) && key.as_ref() == Some(&free) {
            told.entry(status).or_default().push(row.path);
        }
    }
    let too_slow = told.get(&Some(408)).map_or(0, Vec::len);
    assert!(too_slow > told.values().map(Vec::len).sum::<usize>() / 2, "{told:?}");
    end(cluster, &client, &premium, mib).await;
}
