//! Sockets, heads and bodies that are not finished, and input that is not HTTP.

use super::super::attacker::Attacker;
use futures_util::future::join_all;
use std::time::Duration;
use tokio::{
    io::{AsyncReadExt, AsyncWriteExt},
    net::TcpStream,
    time::{sleep, timeout},
};

/// The most connections that the front door accepts from all clients together.
const CONNECTIONS: usize = 4096;
const MIB: usize = 1 << 20;
/// The time between two bytes of a slow client.
const BYTE_EVERY: Duration = Duration::from_millis(500);
/// The time within which an answer must come.
const SOON: Duration = Duration::from_secs(2);
const STALLED: usize = 150;

/// Opens this many connections concurrently from an address, sends `bytes` on each, and holds it until it is closed.
pub(super) async fn hold(attacker: &Attacker, address: u8, connections: usize, bytes: &[u8]) {
    let one = || async {
        while !attacker.is_over() {
            let Ok(mut stream) = attacker.connect_from(address).await else {
                attacker.count("not connected");
                sleep(BYTE_EVERY).await;
                continue;
            };
            if stream.write_all(bytes).await.is_ok() {
                until_closed(attacker, &mut stream).await;
            } else {
                attacker.count("closed");
            }
        }
    };
    join_all((0..connections).map(|_| one())).await;
}

/// Waits until the server closes a connection, or the attack is over, and counts the answers before that.
async fn until_closed(attacker: &Attacker, stream: &mut TcpStream) {
    let mut answer = [0; 512];
    tokio::select! {
        read = stream.read(&mut answer) => match read {
            Ok(1..) => attacker.count(std::str::from_utf8(&answer[..12]).ok().and_then(|head| head.get(9..)).unwrap_or("not HTTP")),
            _ => attacker.count("closed"),
        },
        () = attacker.linger() => attacker.count("held to the end"),
    }
}

pub async fn half_heads(attacker: Attacker) {
    hold(&attacker, 0, CONNECTIONS, b"GET /health HTTP/1.1\r\n").await;
}

pub async fn many_addresses(attacker: Attacker) {
    join_all((0..16).map(|address| hold(&attacker, address, CONNECTIONS / 16, b"GET /health HTTP/1.1\r\n"))).await;
}

pub async fn slow_heads(attacker: Attacker) {
    let slow = || async {
        while !attacker.is_over() {
            let Ok(mut stream) = attacker.connect().await else { continue };
            let head = attacker.head("GET", "/v1/models");
            for byte in head.as_bytes() {
                if attacker.is_over() || stream.write_all(&[*byte]).await.is_err() {
                    break;
                }
                sleep(BYTE_EVERY).await;
            }
            attacker.count("given up");
        }
    };
    join_all((0..500).map(|_| slow())).await;
}

pub async fn no_host(attacker: Attacker) {
    let key = &attacker.key;
    let requests = ["GET /v1/models", "POST /v1/completions"].map(|what| {
        format!("{what} HTTP/1.1\r\nauthorization: Bearer {key}\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{{}}")
    });
    attacker
        .each(64, async |n| {
            if let Some(mut stream) = attacker.say(requests[n as usize % requests.len()].as_bytes()).await {
                attacker.hear(&mut stream, SOON).await;
            }
        })
        .await;
}

pub async fn giant_heads(attacker: Attacker) {
    let long = format!("{}x-long: {}\r\n\r\n", attacker.head("GET", "/health"), "y".repeat(180_000));
    let many: String = (0..2000).map(|n| format!("x-{n}: y\r\n")).collect();
    let many = format!("{}{many}\r\n", attacker.head("GET", "/health"));
    attacker
        .each(64, async |n| {
            if let Some(mut stream) = attacker.say(if n % 2 == 0 { long.as_bytes() } else { many.as_bytes() }).await {
                attacker.hear(&mut stream, SOON).await;
            }
        })
        .await;
}

pub async fn idle(attacker: Attacker) {
    let request = format!("{}\r\n", attacker.head("GET", "/health"));
    let rest = || async {
        while !attacker.is_over() {
            if let Some(mut stream) = attacker.say(request.as_bytes()).await {
                attacker.hear(&mut stream, SOON).await;
                until_closed(&attacker, &mut stream).await;
            }
        }
    };
    join_all((0..CONNECTIONS).map(|_| rest())).await;
}

pub async fn churn(attacker: Attacker) {
    attacker
        .each(32, async |n| {
            let address = (n % 16) as u8;
            match attacker.connect_from(address).await {
                Ok(mut stream) if n % 4 == 0 => {
                    let _ = stream.write_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n").await;
                    attacker.count("asked and left");
                }
                Ok(_) => attacker.count("left"),
                // Recently used ports are not free yet.
                Err(_) => sleep(Duration::from_millis(50)).await,
            }
        })
        .await;
}

fn pipeline(attacker: &Attacker) -> Vec<u8> {
    format!("{}\r\n", attacker.head("GET", "/health")).repeat(1000).into_bytes()
}

pub async fn pipelined(attacker: Attacker) {
    let requests = pipeline(&attacker);
    attacker
        .each(16, async |_| {
            let Ok(mut stream) = attacker.connect().await else { return };
            let (mut reads, mut writes) = stream.split();
            let mut answers = vec![0; 64 << 10];
            let read = async { while matches!(timeout(SOON, reads.read(&mut answers)).await, Ok(Ok(1..))) {} };
            let (_, written) = tokio::join!(read, writes.write_all(&requests));
            attacker.count(if written.is_ok() { "1,000 asked" } else { "closed" });
        })
        .await;
}

pub async fn pipelined_unread(attacker: Attacker) {
    let requests = pipeline(&attacker).repeat(10);
    attacker
        .each(200, async |_| {
            let Ok(mut stream) = attacker.connect().await else { return };
            let written = timeout(SOON, stream.write_all(&requests)).await;
            attacker.count(if matches!(written, Ok(Ok(()))) { "10,000 asked" } else { "held up" });
            attacker.linger().await;
        })
        .await;
}

/// Sends a connection's preface and settings, and then streams that begin and are reset.
pub async fn rapid_reset(attacker: Attacker) {
    let mut frames = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    for stream in (1..20_000_u32).step_by(2) {
        // `:method: GET`, `:scheme: http`, `:path: /` from the static table; then the reset (CANCEL).
        frames.extend([0, 0, 3, 1, 5]);
        frames.extend(stream.to_be_bytes());
        frames.extend([0x82, 0x86, 0x84, 0, 0, 4, 3, 0]);
        frames.extend(stream.to_be_bytes());
        frames.extend([0, 0, 0, 8]);
    }
    attacker
        .each(32, async |_| {
            if let Some(mut stream) = attacker.say(&frames).await {
                attacker.hear(&mut stream, SOON).await;
            }
        })
        .await;
}

pub async fn not_http(attacker: Attacker) {
    let hello = [&b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03"[..], &[7; 500]].concat();
    let all: [Vec<u8>; 5] = [hello, vec![0; 100_000], vec![b'\n'; 100_000], vec![b'A'; MIB], b"GET\0/ HTTP/9.9\r\n\r\n".to_vec()];
    attacker
        .each(64, async |n| {
            if let Some(mut stream) = attacker.say(&all[n as usize % all.len()]).await {
                attacker.hear(&mut stream, SOON).await;
            }
        })
        .await;
}

pub async fn stalled_bodies(attacker: Attacker) {
    let (sent, whole) = (7_900 << 10, 8 << 20);
    let mut request = format!("{}content-length: {whole}\r\n\r\n{{\"prompt\":\"", attacker.head("POST", "/v1/completions")).into_bytes();
    request.resize(request.len() + sent, b'a');
    stall(&attacker, &request).await;
}

pub async fn promised_bodies(attacker: Attacker) {
    let request = format!("{}expect: 100-continue\r\ncontent-length: {}\r\n\r\n", attacker.head("POST", "/v1/completions"), 8 * MIB);
    stall(&attacker, request.as_bytes()).await;
}

async fn stall(attacker: &Attacker, request: &[u8]) {
    let one = || async {
        while !attacker.is_over() {
            if let Some(mut stream) = attacker.say(request).await {
                let status = attacker.hear(&mut stream, SOON).await;
                if matches!(status, None | Some(100)) {
                    until_closed(attacker, &mut stream).await;
                }
            }
        }
    };
    join_all((0..STALLED).map(|_| one())).await;
}

pub async fn chunked_bodies(attacker: Attacker) {
    let head = format!("{}transfer-encoding: chunked\r\n\r\n", attacker.head("POST", "/v1/completions"));
    let chunks = "1\r\n \r\n".repeat(200_000);
    attacker
        .each(16, async |_| {
            let request = [head.as_bytes(), chunks.as_bytes(), b"c\r\n{\"prompt\":5}\r\n0\r\n\r\n"].concat();
            if let Some(mut stream) = attacker.say(&request).await {
                attacker.hear(&mut stream, SOON).await;
            }
        })
        .await;
}
