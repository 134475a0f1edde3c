//! The scripts against the machine that they are written after, and the server found in each way that there is.

use super::{
    server::ServerKind,
    testing::{RedisServer, free_port, settings},
    *,
};
use crate::{
    limits::{Budget, Budgets},
    quota::{Quota, Reservation},
};
use proptest::{
    prelude::*,
    test_runner::{Config, TestRunner},
};

fn tenant(name: &str, limits: Limits) -> (Scope, Limits) {
    (Scope::Tenant(name.into()), limits)
}

const LASTS: Duration = Duration::from_secs(600);

fn request<'a>(scopes: &'a [(Scope, Limits)], tokens: u64) -> Request<'a> {
    Request { tenant: "a", scopes, most: Use { tokens, cost_micros: 0 }, lasts: LASTS }
}

/// Waits until the server decides.
async fn used(shared: &SharedQuota) -> bool {
    let deadline = Instant::now() + Duration::from_secs(30);
    while !shared.is_used() && Instant::now() < deadline {
        sleep(Duration::from_millis(5)).await;
    }
    shared.is_used()
}

#[derive(Clone, Debug)]
enum Step {
    Reserve { key: u8, tokens: u64, cost: u64 },
    Settle { nth: usize, percent: u64 },
    Cancel { nth: usize },
    Time { ms: u64 },
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..2_u8, 0..110_u64, prop_oneof![Just(0), 0..80_u64]).prop_map(|(key, tokens, cost)| Step::Reserve { key, tokens, cost }),
        3 => (0..6_usize, 0..=120_u64).prop_map(|(nth, percent)| Step::Settle { nth, percent }),
        1 => (0..6_usize).prop_map(|nth| Step::Cancel { nth }),
        3 => prop_oneof![0..3000_u64, 0..30_000_u64, Just(61_000), Just(3_600_000), Just(90_000_000), Just(1_300_000_000)].prop_map(|ms| Step::Time { ms }),
    ];
    prop::collection::vec(step, 1..60)
}

/// The scripts as they are, by a clock that the test sets.
fn by_clock(own: &str) -> Script {
    let window = include_str!("window.lua");
    let clocked = window.replace("redis.call('TIME')", "{ redis.call('GET', 'clock'), 0 }").replace("* 1000 + math", "+ math");
    assert_ne!(window, clocked);
    Script::new(&[&clocked, own].concat())
}

#[test]
fn the_scripts_decide_as_the_machine_does() {
    let server = RedisServer::start_with(&["--appendonly", "no"]);
    let mut connection = server.connection();
    let scripts = [include_str!("reserve.lua"), include_str!("settle.lua")].map(by_clock);
    let mut runner = TestRunner::new(Config { cases: 60, ..Config::default() });
    let budget = |hard| Budget { soft: Some(hard / 2), hard: Some(hard) };
    let limits = |requests, tokens, day, concurrent, month| Limits {
        requests_per_minute: Some(requests),
        tokens_per_minute: Some(tokens),
        tokens_per_day: Some(day),
        concurrent: Some(concurrent),
        budgets: Budgets { day: budget(70), month: budget(month) },
    };
    let connection = std::cell::RefCell::new(&mut connection);
    runner
        .run(&steps(), |steps| {
            let connection = &mut **connection.borrow_mut();
            redis::cmd("FLUSHALL").query::<()>(connection).unwrap();
            let (mut quota, mut clock) = (Quota::default(), 1_800_000_000_000_u64);
            let mut running: Vec<(Reservation, Placed, Use)> = Vec::new();
            for (number, step) in steps.into_iter().enumerate() {
                redis::cmd("SET").arg("clock").arg(clock).query::<()>(connection).unwrap();
                let now = Duration::from_millis(clock);
                match step {
                    Step::Reserve { key, tokens, cost } => {
                        let most = Use { tokens, cost_micros: cost };
                        let own = (Scope::Key(key.to_string().into()), limits(4, 120, 500, 3, 150));
                        let scopes = [tenant("a", limits(6, 200, 900, 4, 180)), own];
                        let keys = [format!("r{number}"), "w".into(), "c".into(), format!("w{key}"), format!("c{key}")];
                        let placed = Placed { number: number as u64, id: number.to_string(), keys: keys.into(), deadline: Instant::now() };
                        let mut reserve = call(&scripts[0], &placed);
                        numbers(&mut reserve, most).arg(10_000_000_000_u64).arg(100_000_000_000_u64);
                        for (_, limits) in &scopes {
                            for kind in KINDS {
                                reserve.arg(limits.of(kind).unwrap());
                            }
                        }
                        let answer: Vec<i64> = reserve.invoke(connection).unwrap();
                        let there = decided(&answer, &scopes).expect("it is an answer");
                        let here = quota.reserve(now, &scopes, most, now + Duration::from_secs(100_000_000));
                        let standing = quota.standing(now, &scopes);
                        match here {
                            Ok(reservation) => {
                                prop_assert_eq!(there, Ok(standing));
                                running.push((reservation, placed, most));
                            }
                            Err(refusal) => prop_assert_eq!(there, Err((refusal, standing))),
                        }
                    }
                    Step::Settle { nth, percent } if nth < running.len() => {
                        let (reservation, placed, most) = running.swap_remove(nth);
                        let used = Use { tokens: most.tokens * percent / 100, cost_micros: most.cost_micros * percent / 100 };
                        quota.settle(reservation, used);
                        for first in [1, 0] {
                            let settled: i64 = numbers(&mut call(&scripts[1], &placed), used).arg(0).arg(1000).invoke(connection).unwrap();
                            prop_assert_eq!(settled, first);
                        }
                    }
                    Step::Cancel { nth } if nth < running.len() => {
                        let (reservation, placed, _) = running.swap_remove(nth);
                        quota.cancel(reservation);
                        let settled: i64 =
                            numbers(&mut call(&scripts[1], &placed), Use::default()).arg(1).arg(1000).invoke(connection).unwrap();
                        prop_assert_eq!(settled, 1);
                    }
                    Step::Time { ms } => clock += ms,
                    _ => {}
                }
            }
            Ok(())
        })
        .unwrap();
}

#[tokio::test]
async fn a_reservation_that_comes_after_its_cancellation_is_refused() {
    let server = RedisServer::start();
    let shared = SharedQuota::start(server.settings(), 1);
    assert!(used(&shared).await);
    let scopes = [tenant("a", Limits { concurrent: Some(1), ..Limits::default() })];
    let placed = shared.inner.place(&request(&scopes, 5));
    shared.inner.tell(Arc::clone(&placed), What::Cancel);
    shared.flush(Duration::from_secs(10)).await;
    let mut late = call(&SCRIPTS.reserve, &placed);
    late.arg(5).arg(0).arg(15_000).arg(600_000).arg(-1).arg(-1).arg(-1).arg(1).arg(-1).arg(-1);
    assert_eq!(late.invoke::<Vec<i64>>(&mut server.connection()).unwrap(), [2]);
    let Some(Ok((lease, _))) = shared.reserve(request(&scopes, 5)).await else { panic!("the place is free") };
    shared.cancel(lease);
}

#[tokio::test]
async fn a_server_is_reached_as_safely_as_its_address_says() {
    let port = free_port();
    let (server, other) = (RedisServer::start_with_tls(port), RedisServer::start_with_tls(free_port()));
    let (named, by_number) = (format!("rediss://localhost:{port}"), format!("rediss://127.0.0.1:{port}"));
    let scopes = [tenant("a", Limits { requests_per_minute: Some(100), ..Limits::default() })];
    for (url, ca, is_reached) in [
        (&named, Some(server.authority()), true),
        (&named, Some(other.authority()), false),
        (&by_number, Some(server.authority()), false),
        (&named, None, false),
    ] {
        let settings = settings(&[url], ServerKind::Single, ca);
        let error = settings.server.connect().await.err().map(|error| error.to_string());
        assert_eq!(error.is_none(), is_reached, "{url}: {error:?}");
        assert!(error.is_none_or(|error| error.contains("certificate")), "{url}: the reason is said");
        if is_reached {
            let shared = SharedQuota::start(settings, 1);
            assert!(used(&shared).await);
            assert!(matches!(shared.reserve(request(&scopes, 5)).await, Some(Ok(_))));
        }
    }
}

#[tokio::test]
async fn sentinels_and_a_clusters_nodes_lead_to_the_server() {
    let [master, sentinel, node] = [free_port(), free_port(), free_port()].map(|port| (port, port.to_string()));
    let _master = RedisServer::start_with(&["--port", &master.1, "--appendonly", "no"]);
    let monitor = ["monitor", "quota", "127.0.0.1", &master.1, "1"].join(" ");
    let _sentinel = RedisServer::start_sentinel(&sentinel.1, &monitor);
    let clustered = RedisServer::start_with(&["--port", &node.1, "--cluster-enabled", "yes"]);
    redis::cmd("CLUSTER").arg("ADDSLOTSRANGE").arg(0).arg(16_383).query::<()>(&mut clustered.connection()).unwrap();
    let scopes = [
        tenant("a", Limits { requests_per_minute: Some(1), ..Limits::default() }),
        (Scope::Key("k".into()), Limits { requests_per_minute: Some(2), ..Limits::default() }),
    ];
    for (port, kind) in [(sentinel.0, ServerKind::Sentinel { master: "quota".into() }), (node.0, ServerKind::Cluster)] {
        let shared = SharedQuota::start(settings(&[&format!("redis://127.0.0.1:{port}")], kind.clone(), None), 1);
        assert!(used(&shared).await, "{kind:?}");
        let Some(Ok((lease, _))) = shared.reserve(request(&scopes, 5)).await else { panic!("{kind:?} decides") };
        assert!(matches!(shared.reserve(request(&scopes, 5)).await, Some(Err(_))), "{kind:?}");
        shared.cancel(lease);
        shared.flush(Duration::from_secs(10)).await;
        assert!(matches!(shared.reserve(request(&scopes, 5)).await, Some(Ok(_))), "{kind:?}: it was given back");
    }
}
