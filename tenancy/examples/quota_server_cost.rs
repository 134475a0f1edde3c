//! The time that a quota server adds to a request: near, slow, stopped and dead, beside this process's own memory.
//!
//! `cargo run --release -p tidemill-tenancy --example quota_server_cost [requests]` starts `redis-server` on sockets of its own.

use std::{
    hash::{BuildHasher, RandomState},
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    process::{Child, Command, Stdio},
    thread,
    time::{Duration, Instant},
};
use tidemill_tenancy::{
    limiter::{Limiter, Request},
    limits::{Limits, Share},
    quota::{Quota, Scope, Use},
    shared::{
        Settings, SharedQuota,
        server::{Address, ServerKind},
    },
};

/// The number of requests at a time, and of all together per second.
const IN_FLIGHT: usize = 8;
const RATE: f64 = 1000.0;
/// The delay of a slow server's answers: longer than a request waits.
const SLOW: Duration = Duration::from_millis(20);
/// The delay of the answers of a server in the next zone.
const ZONE: Duration = Duration::from_millis(1);
const LASTS: Duration = Duration::from_secs(600);

#[tokio::main]
async fn main() {
    let requests: usize = std::env::args().nth(1).map_or(5000, |count| count.parse().expect("a number of requests"));
    let dir = std::env::temp_dir().join(format!("quota-server-cost-{}", std::process::id()));
    std::fs::create_dir_all(&dir).expect("a directory can be made");
    let mut server = start(&dir);
    let socket = dir.join("r.sock");
    println!("{requests} requests of 100 tenants, {RATE} per second, two scopes each; us that the reservation takes");

    measure("memory", &Limiter::new(Share::WHOLE, Quota::default(), None), requests).await;
    let near = limiter(&format!("redis+unix://{}", socket.display())).await;
    measure("server, over a socket", &near, requests).await;
    let tcp = limiter(&format!("redis://{}", relay(socket.clone(), Duration::ZERO))).await;
    measure("server, through a relay", &tcp, requests).await;
    let far = limiter(&format!("redis://{}", relay(socket.clone(), ZONE))).await;
    measure("server, 1 ms away", &far, requests).await;
    let slow = limiter(&format!("redis://{}", relay(socket, SLOW))).await;
    measure("server, 20 ms away", &slow, requests).await;
    until_used(&near).await;
    signal(&server, "-STOP");
    measure("server stopped", &near, requests).await;
    signal(&server, "-CONT");
    until_used(&tcp).await;
    server.kill().expect("it runs");
    server.wait().expect("it has ended");
    measure("server dead", &tcp, requests).await;
    std::fs::remove_dir_all(dir).expect("the directory can be removed");
}

async fn limiter(url: &str) -> Limiter {
    let address = Address { urls: vec![url.to_owned()], kind: ServerKind::Single, ca: None, plain: false };
    let settings = Settings::new(address.check().expect("the address is ours"), "cost".into());
    // Each has reservations of its own.
    let instance = RandomState::new().hash_one(url);
    let limiter = Limiter::new(Share::WHOLE, Quota::default(), Some(SharedQuota::start(settings, instance)));
    until_used(&limiter).await;
    limiter
}

/// Waits until the server decides; not for ever, since a slow one never does.
async fn until_used(limiter: &Limiter) {
    for _ in 0..300 {
        if limiter.shared_counts().is_some_and(|counts| counts.is_used) {
            break;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

fn used(tokens: u64) -> Use {
    Use { tokens, cost_micros: 0 }
}

async fn measure(name: &str, limiter: &Limiter, requests: usize) {
    let limits = Limits {
        requests_per_minute: Some(1 << 40),
        tokens_per_minute: Some(1 << 50),
        tokens_per_day: Some(1 << 50),
        concurrent: Some(1 << 20),
        ..Limits::default()
    };
    let before = limiter.shared_counts();
    let began = Instant::now();
    let lane = async |lane: usize| {
        let mut waits = Vec::new();
        for n in (lane..requests).step_by(IN_FLIGHT) {
            tokio::time::sleep_until((began + Duration::from_secs_f64(n as f64 / RATE)).into()).await;
            let tenant = format!("tenant-{}", n % 100);
            let scopes = [(Scope::Tenant(tenant.as_str().into()), limits), (Scope::Key(format!("key-{}", n % 200).into()), limits)];
            let now = Duration::from_secs(1_000_000) + began.elapsed();
            let asked = Instant::now();
            let request = Request { tenant: &tenant, scopes: &scopes, most: used(700), now, lasts: LASTS };
            let held = limiter.reserve(request).await.0.expect("the limits are never reached");
            waits.push(asked.elapsed());
            limiter.settle(held, used(600));
        }
        waits
    };
    let mut waits: Vec<Duration> = futures_util::future::join_all((0..IN_FLIGHT).map(lane)).await.concat();
    waits.sort();
    let at = |part: f64| waits[((waits.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e6;
    let counts = before.zip(limiter.shared_counts()).map_or(String::new(), |(before, after)| {
        let (by_server, by_share) = (after.by_server - before.by_server, after.by_share - before.by_share);
        format!("; by the server {by_server}, by the share {by_share}; before {:?}, after {:?}", before.failures, after.failures)
    });
    println!("{name}: p50 {:.0}, p99 {:.0}, p99.9 {:.0}, most {:.0}{counts}", at(0.5), at(0.99), at(0.999), at(1.0));
}

fn start(dir: &Path) -> Child {
    let mut command = Command::new("redis-server");
    command.current_dir(dir).args(["--port", "0", "--unixsocket", "r.sock", "--save", "", "--appendonly", "no"]);
    let server = command.stdout(Stdio::null()).spawn().expect("redis-server is installed (make setup-test)");
    while UnixStream::connect(dir.join("r.sock")).is_err() {
        thread::sleep(Duration::from_millis(10));
    }
    server
}

fn signal(server: &Child, signal: &str) {
    assert!(Command::new("kill").args([signal, &server.id().to_string()]).status().expect("kill runs").success());
}

/// A relay to the server that holds each answer back for a while. Returns its address.
fn relay(socket: PathBuf, delay: Duration) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port is free");
    let address = listener.local_addr().expect("it is bound").to_string();
    thread::spawn(move || {
        for client in listener.incoming().flatten() {
            let Ok(server) = UnixStream::connect(&socket) else { continue };
            let _ = client.set_nodelay(true);
            let (from_client, to_server) = (client.try_clone().expect("a handle"), server.try_clone().expect("a handle"));
            thread::spawn(move || forward(from_client, to_server));
            thread::spawn(move || hold_back(server, client, delay));
        }
    });
    address
}

fn forward(mut from: TcpStream, mut to: UnixStream) {
    let mut buffer = [0; 65_536];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        if to.write_all(&buffer[..read]).is_err() {
            break;
        }
    }
    let _ = to.shutdown(std::net::Shutdown::Both);
}

/// Passes each piece on after the delay, however many are on their way.
fn hold_back(mut from: UnixStream, mut to: TcpStream, delay: Duration) {
    let (pieces, due) = std::sync::mpsc::channel::<(Instant, Vec<u8>)>();
    thread::spawn(move || {
        for (at, piece) in due {
            thread::sleep(at.saturating_duration_since(Instant::now()));
            if to.write_all(&piece).is_err() {
                break;
            }
        }
        let _ = to.shutdown(std::net::Shutdown::Both);
    });
    let mut buffer = [0; 65_536];
    while let Ok(read @ 1..) = from.read(&mut buffer) {
        if pieces.send((Instant::now() + delay, buffer[..read].to_vec())).is_err() {
            break;
        }
    }
}
