//! The same contract for quotas in memory, split by shares, and on a server; then the server's faults.

use super::*;
use crate::{
    calendar::Period,
    limits::{Budget, Budgets},
    quota::Warning,
    shared::{Settings, testing::RedisServer},
};
use futures_util::future::join_all;
use std::{collections::BTreeMap, time::Instant};
use tokio::time::sleep;

const LASTS: Duration = Duration::from_secs(600);

/// Coordinators that limit together.
struct Group {
    coordinators: Vec<Limiter>,
    /// A limit in these tests is for one of this many: a share is smaller than the whole.
    parts: u64,
    began: Instant,
    _server: Option<RedisServer>,
}

fn of_memory() -> Group {
    let coordinators = vec![Limiter::new(Share::WHOLE, Quota::default(), None)];
    Group { coordinators, parts: 1, began: Instant::now(), _server: None }
}

fn of_shares() -> Group {
    let coordinators = [0, 1].map(|index| Limiter::new(Share { index, count: 2 }, Quota::default(), None));
    Group { coordinators: coordinators.into(), parts: 2, began: Instant::now(), _server: None }
}

async fn of_server() -> Group {
    let server = RedisServer::start();
    let coordinators = vec![coordinator(0, server.settings()).await, coordinator(1, server.settings()).await];
    Group { coordinators, parts: 1, began: Instant::now(), _server: Some(server) }
}

/// One of two coordinators, for which the server decides.
async fn coordinator(index: u64, settings: Settings) -> Limiter {
    let limiter = Limiter::new(Share { index, count: 2 }, Quota::default(), Some(SharedQuota::start(settings, index)));
    asks(&limiter, true).await;
    limiter
}

/// Waits until the server decides, or does not.
async fn asks(limiter: &Limiter, wanted: bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while limiter.asks() != wanted {
        assert!(Instant::now() < deadline, "{:?}", limiter.shared_counts());
        sleep(Duration::from_millis(2)).await;
    }
}

async fn told(limiter: &Limiter) {
    limiter.flush(Duration::from_secs(30)).await;
}

fn limits(requests: u64, tokens: u64, day: u64, concurrent: u64) -> Limits {
    let given = |limit: u64| (limit > 0).then_some(limit);
    Limits {
        requests_per_minute: given(requests),
        tokens_per_minute: given(tokens),
        tokens_per_day: given(day),
        concurrent: given(concurrent),
        ..Limits::default()
    }
}

fn tokens(tokens: u64) -> Use {
    Use { tokens, cost_micros: 0 }
}

fn tenant(limits: Limits) -> Vec<(Scope, Limits)> {
    vec![(Scope::Tenant("a".into()), limits)]
}

impl Group {
    fn first(&self) -> &Limiter {
        &self.coordinators[0]
    }

    /// The limits of a group in which each part is this.
    fn limits(&self, requests: u64, tokens: u64, day: u64, concurrent: u64) -> Limits {
        let [requests, tokens, day, concurrent] = [requests, tokens, day, concurrent].map(|limit| limit * self.parts);
        limits(requests, tokens, day, concurrent)
    }

    async fn reserve(&self, nth: usize, scopes: &[(Scope, Limits)], tokens: u64) -> Result<Held, Refusal> {
        reserve(&self.coordinators[nth % self.coordinators.len()], self.began, scopes, tokens).await
    }
}

async fn reserve(limiter: &Limiter, began: Instant, scopes: &[(Scope, Limits)], most: u64) -> Result<Held, Refusal> {
    let now = Duration::from_secs(1_000_000) + began.elapsed();
    let tenants = scopes.iter().find_map(|(scope, _)| match scope {
        Scope::Tenant(tenant) => Some(&**tenant),
        _ => None,
    });
    limiter.reserve(Request { tenant: tenants.unwrap_or("scopes"), scopes, most: tokens(most), now, lasts: LASTS }).await.0
}

/// The promises of each group.
async fn keeps_the_contract(group: Group) {
    what_is_not_used_comes_back(&group).await;
    a_cancelled_request_was_none(&group).await;
    what_can_never_fit_is_told_so(&group).await;
    all_scopes_are_charged_or_none(&group).await;
    only_so_many_run_at_a_time(&group).await;
    a_day_has_its_own_limit(&group).await;
    money_is_reserved_and_settled(&group).await;
    all_together_pass_no_more_than_the_limit(&group).await;
}

async fn what_is_not_used_comes_back(group: &Group) {
    let scopes = vec![(Scope::Tenant("back".into()), group.limits(10, 100, 0, 0))];
    let first = group.reserve(0, &scopes, 90).await.unwrap();
    let Err(Refusal::Wait { kind, limit, used, needed, retry, .. }) = group.reserve(0, &scopes, 20).await else { panic!("it is full") };
    assert_eq!((kind, limit, used, needed), (Kind::Tokens, 100, 90, 20));
    assert!(Duration::from_secs(30) < retry && retry <= Duration::from_secs(61), "{retry:?}");
    group.first().settle(first, tokens(30));
    told(group.first()).await;
    let second = group.reserve(0, &scopes, 70).await.unwrap();
    let now = Duration::from_secs(1_000_000) + group.began.elapsed();
    assert!(group.first().peek(now, &scopes).is_ok(), "there are requests left");
    group.first().settle(second, tokens(120));
    told(group.first()).await;
    let Err(Refusal::Wait { used: 150, .. }) = group.reserve(0, &scopes, 0).await else { panic!("more was used than reserved") };
}

async fn a_cancelled_request_was_none(group: &Group) {
    let scopes = vec![(Scope::Tenant("cancelled".into()), group.limits(1, 100, 0, 0))];
    for _ in 0..3 {
        let held = group.reserve(0, &scopes, 100).await.unwrap();
        assert_eq!(group.reserve(0, &scopes, 1).await.unwrap_err().kind(), Kind::Requests);
        group.first().cancel(held);
        told(group.first()).await;
    }
}

async fn what_can_never_fit_is_told_so(group: &Group) {
    let scopes = vec![(Scope::Tenant("large".into()), group.limits(10, 100, 0, 0))];
    let never = Refusal::Never { scope: ScopeKind::Tenant, kind: Kind::Tokens, limit: 100, needed: 101 };
    assert_eq!(group.reserve(0, &scopes, 101).await.unwrap_err(), never);
}

async fn all_scopes_are_charged_or_none(group: &Group) {
    let key = |name: &str| (Scope::Key(name.into()), group.limits(1, 1000, 0, 0));
    let both = |name: &str| [(Scope::Tenant("scopes".into()), group.limits(3, 1000, 0, 0)), key(name)];
    group.reserve(0, &both("k1"), 1).await.unwrap();
    assert_eq!(group.reserve(0, &both("k1"), 1).await.unwrap_err().kind(), Kind::Requests);
    for name in ["k2", "k3"] {
        group.reserve(0, &both(name), 1).await.unwrap();
    }
    assert!(group.reserve(0, &both("k4"), 1).await.is_err(), "the tenant's three are used up");
    assert!(group.reserve(0, &[key("k4")], 1).await.is_ok(), "and the key was not charged");
}

async fn only_so_many_run_at_a_time(group: &Group) {
    let scopes = vec![(Scope::Tenant("running".into()), group.limits(0, 0, 0, 2))];
    let first = group.reserve(0, &scopes, 1).await.unwrap();
    group.reserve(0, &scopes, 1).await.unwrap();
    assert_eq!(group.reserve(0, &scopes, 1).await.unwrap_err().kind(), Kind::Concurrent);
    group.first().settle(first, tokens(1));
    told(group.first()).await;
    group.reserve(0, &scopes, 1).await.unwrap();
}

async fn a_day_has_its_own_limit(group: &Group) {
    let scopes = vec![(Scope::Tenant("day".into()), group.limits(0, 0, 100, 0))];
    let held = group.reserve(0, &scopes, 90).await.unwrap();
    group.first().settle(held, tokens(80));
    told(group.first()).await;
    assert_eq!(group.reserve(0, &scopes, 21).await.unwrap_err().kind(), Kind::TokensPerDay);
    group.reserve(0, &scopes, 20).await.unwrap();
}

async fn money_is_reserved_and_settled(group: &Group) {
    let hard = |sum: u64| Budget { soft: Some(group.parts * 50), hard: Some(sum * group.parts) };
    let limits = Limits { budgets: Budgets { day: hard(100), month: hard(1000) }, ..Limits::default() };
    let scopes = vec![(Scope::Tenant("money".into()), limits), (Scope::Key("money".into()), Limits::default())];
    let reserve = async |micros: u64| {
        let now = Duration::from_secs(1_000_000) + group.began.elapsed();
        let most = Use { tokens: 1, cost_micros: micros };
        group.first().reserve(Request { tenant: "money", scopes: &scopes, most, now, lasts: LASTS }).await
    };
    let (first, standing) = reserve(90).await;
    let warning = &standing.warnings[..];
    assert!(matches!(warning, [Warning { period: Period::Day, spent: 90, .. }, Warning { period: Period::Month, .. }]), "{warning:?}");
    let Err(Refusal::Wait { scope, kind, limit, used, needed, retry }) = reserve(20).await.0 else { panic!("it is spent") };
    assert_eq!((scope, kind, limit, used, needed), (ScopeKind::Tenant, Kind::Spend(Period::Day), 100, 90, 20));
    assert!(retry <= Duration::from_secs(86_400), "{retry:?}");
    group.first().settle(first.unwrap(), Use { tokens: 1, cost_micros: 30 });
    told(group.first()).await;
    let second = reserve(70).await.0.unwrap();
    assert!(reserve(1).await.0.is_err());
    assert!(reserve(0).await.0.is_ok(), "what costs nothing passes");
    group.first().cancel(second);
    told(group.first()).await;
    assert!(matches!(reserve(101).await.0, Err(Refusal::Never { .. })));
    assert!(reserve(70).await.0.is_ok());
    let now = Duration::from_secs(1_000_000) + group.began.elapsed();
    let spent: Vec<_> = group.first().spent(now).into_iter().filter(|(scope, _)| *scope == Scope::Key("money".into())).collect();
    assert_eq!(spent, [(Scope::Key("money".into()), Spent { day_micros: 100, month_micros: 100 })], "also where there is no budget yet");
}

async fn all_together_pass_no_more_than_the_limit(group: &Group) {
    let scopes = vec![(Scope::Tenant("all".into()), limits(20, 1000, 0, 0))];
    let asked = join_all((0..60).map(|nth| group.reserve(nth, &scopes, 1))).await;
    assert_eq!(asked.iter().filter(|asked| asked.is_ok()).count(), 20);
}

#[tokio::test]
async fn memory_keeps_the_contract() {
    keeps_the_contract(of_memory()).await;
}

#[tokio::test]
async fn shares_keep_the_contract() {
    keeps_the_contract(of_shares()).await;
}

#[tokio::test]
async fn a_server_keeps_the_contract() {
    keeps_the_contract(of_server().await).await;
}

#[tokio::test]
async fn with_a_server_one_coordinator_may_use_all_of_a_limit_and_without_only_its_share() {
    let scopes = tenant(limits(20, 0, 0, 0));
    for (group, passes) in [(of_shares(), 10), (of_server().await, 20)] {
        let asked = join_all((0..60).map(|_| group.reserve(0, &scopes, 1))).await;
        assert_eq!(asked.iter().filter(|asked| asked.is_ok()).count(), passes);
        let there = group.reserve(1, &scopes, 1).await;
        assert_eq!(there.is_ok(), passes == 10, "the other one's is its own, or the same");
    }
}

#[tokio::test]
async fn a_server_that_stops_costs_one_wait_and_the_share_takes_over() {
    // The longest that a connection waits, so that a busy machine is not taken for a stopped server.
    let wait = shared::server::ANSWER_MAX;
    assert!(shared::WAIT_MAX + Duration::from_millis(1) <= Duration::from_millis(5), "the timer may be a millisecond late");
    let server = RedisServer::start();
    let settings = || Settings { wait, ..server.settings() };
    let (group, began) = (vec![coordinator(0, settings()).await, coordinator(1, settings()).await], Instant::now());
    let scopes = tenant(limits(1000, 0, 100_000, 0));
    let one = &group[0];
    for _ in 0..10 {
        let held = reserve(one, began, &scopes, 10).await.unwrap();
        one.settle(held, tokens(5));
    }
    told(one).await;
    let before = one.shared_counts().unwrap();
    assert_eq!((before.by_server, before.by_share), (10, 0));
    server.signal("STOP");
    let (mut waits, mut held) = (Vec::new(), Vec::new());
    for _ in 0..200 {
        let called = Instant::now();
        held.push(reserve(one, began, &scopes, 10).await.unwrap());
        waits.push(called.elapsed());
    }
    let after = one.shared_counts().unwrap();
    assert_eq!((after.by_server, after.by_share, after.is_used), (10, 200, false));
    assert_eq!(waits.iter().filter(|waited| **waited >= wait).count(), 1, "only the first waits: {after:?}");
    assert!(waits[1..].iter().sum::<Duration>() < wait, "{waits:?}");
    held.into_iter().for_each(|held| one.settle(held, tokens(7)));

    server.signal("CONT");
    for limiter in &group {
        asks(limiter, true).await;
        told(limiter).await;
    }
    // The second coordinator sees the requests that the first let pass meanwhile, and no place is held by the reservation that timed out.
    let now = Duration::from_secs(1_000_000) + began.elapsed();
    let (held, standing) = group[1].reserve(Request { tenant: "a", scopes: &scopes, most: tokens(10), now, lasts: LASTS }).await;
    assert!(held.is_ok());
    assert_eq!(standing.requests.unwrap().remaining, 1000 - 211);
    let sums = sums(&server);
    assert_eq!((sums["R"], sums["T"], sums["D"]), (211, 10 * 5 + 200 * 7 + 10, 10 * 5 + 200 * 7 + 10));
}

/// The sums of the tenant, as the server has them.
fn sums(server: &RedisServer) -> BTreeMap<String, i64> {
    let mut connection = server.connection();
    let keys: Vec<String> = redis::cmd("KEYS").arg("tide:*:w:t").query(&mut connection).unwrap();
    assert_eq!(keys.len(), 1, "{keys:?}");
    let [sums] = keys.as_slice() else { unreachable!() };
    ["R", "T", "D"].map(|name| (name.to_owned(), redis::cmd("HGET").arg(sums).arg(name).query(&mut connection).unwrap())).into()
}

#[tokio::test]
async fn a_server_that_dies_and_comes_back_knows_everything() {
    let mut server = RedisServer::start();
    let group = [coordinator(0, server.settings()).await, coordinator(1, server.settings()).await];
    let began = Instant::now();
    let scopes = tenant(limits(100, 0, 10_000, 0));
    let mut held = Vec::new();
    for _ in 0..20 {
        held.push(reserve(&group[0], began, &scopes, 10).await.unwrap());
    }
    server.kill();
    // Its share is 50, of which 20 are used.
    let asked = join_all((0..80).map(|_| reserve(&group[0], began, &scopes, 10))).await;
    let (passed, refused): (Vec<_>, Vec<_>) = asked.into_iter().partition(Result::is_ok);
    assert_eq!((passed.len(), refused.len()), (30, 50));
    let others = join_all((0..80).map(|_| reserve(&group[1], began, &scopes, 10))).await;
    let others: Vec<_> = others.into_iter().filter_map(Result::ok).collect();
    assert_eq!(others.len(), 50);
    held.extend(passed.into_iter().map(Result::unwrap));
    // Half of them end while it is away.
    let rest = held.split_off(25);
    held.into_iter().for_each(|held| group[0].settle(held, tokens(4)));
    assert!(!group[0].asks());
    server.go_on();
    for limiter in &group {
        asks(limiter, true).await;
    }
    rest.into_iter().for_each(|held| group[0].cancel(held));
    others.into_iter().for_each(|held| group[1].settle(held, tokens(6)));
    for limiter in &group {
        told(limiter).await;
    }
    let sums = sums(&server);
    assert_eq!((sums["R"], sums["T"], sums["D"]), (75, 25 * 4 + 50 * 6, 25 * 4 + 50 * 6));
    let asked = join_all((0..80).map(|nth| reserve(&group[nth % 2], began, &scopes, 10))).await;
    assert_eq!(asked.iter().filter(|asked| asked.is_ok()).count(), 25, "the limit is exact again");
    for counts in group.iter().map(|limiter| limiter.shared_counts().unwrap()) {
        assert_eq!((counts.lost, counts.behind), (0, 0));
    }
}

#[tokio::test]
async fn a_request_larger_than_the_share_waits_for_the_server() {
    let mut server = RedisServer::start();
    let one = coordinator(0, server.settings()).await;
    let (began, scopes) = (Instant::now(), tenant(limits(0, 100, 0, 0)));
    let held = reserve(&one, began, &scopes, 80).await.unwrap();
    one.cancel(held);
    told(&one).await;
    server.kill();
    let Err(Refusal::Wait { limit: 50, needed: 80, .. }) = reserve(&one, began, &scopes, 80).await else { panic!("it is not for ever") };
    assert!(matches!(reserve(&one, began, &scopes, 101).await, Err(Refusal::Never { .. })));
}

#[tokio::test]
async fn places_of_a_dead_coordinator_are_free_soon_and_those_of_a_living_one_are_kept() {
    let server = RedisServer::start();
    let settings = || Settings { lease: Duration::from_secs(2), ..server.settings() };
    let (dead, living) = (coordinator(0, settings()).await, coordinator(1, settings()).await);
    let (began, scopes) = (Instant::now(), tenant(limits(0, 0, 0, 3)));
    for _ in 0..2 {
        std::mem::forget(reserve(&dead, began, &scopes, 1).await.unwrap());
    }
    let (kept, since) = (reserve(&living, began, &scopes, 1).await.unwrap(), Instant::now());
    assert!(reserve(&living, began, &scopes, 1).await.is_err());
    drop(dead);
    let mut others = Vec::new();
    while others.len() < 2 {
        assert!(since.elapsed() < Duration::from_secs(30), "places of a dead coordinator are kept: {} are free", others.len());
        match reserve(&living, began, &scopes, 1).await {
            Ok(held) => others.push(held),
            Err(_) => sleep(Duration::from_millis(10)).await,
        }
    }
    // By then its own place would be free if it were not renewed.
    sleep((settings().lease + Duration::from_millis(500)).saturating_sub(since.elapsed())).await;
    assert_eq!(reserve(&living, began, &scopes, 1).await.unwrap_err().kind(), Kind::Concurrent, "its own is renewed");
    living.settle(kept, tokens(1));
    told(&living).await;
    assert!(reserve(&living, began, &scopes, 1).await.is_ok());
}

#[tokio::test]
async fn who_leaves_while_the_server_is_asked_has_used_nothing() {
    let server = RedisServer::start();
    let one = coordinator(0, server.settings()).await;
    let (began, scopes) = (Instant::now(), tenant(limits(10, 0, 0, 1)));
    server.signal("STOP");
    let left = tokio::time::timeout(Duration::from_millis(50), reserve(&one, began, &scopes, 5)).await;
    assert!(left.is_err());
    server.signal("CONT");
    asks(&one, true).await;
    told(&one).await;
    let sums = sums(&server);
    assert_eq!((sums["R"], sums["T"], sums["D"]), (0, 0, 0));
    assert!(reserve(&one, began, &scopes, 5).await.is_ok());
}

#[tokio::test]
async fn a_flood_of_one_tenant_is_refused_without_asking() {
    let group = of_server().await;
    let scopes = tenant(limits(5, 0, 0, 0));
    for _ in 0..5 {
        group.reserve(0, &scopes, 1).await.unwrap();
    }
    // The second coordinator has let none pass itself.
    let now = || Duration::from_secs(1_000_000) + group.began.elapsed();
    let second = &group.coordinators[1];
    assert!(second.peek(now(), &scopes).is_ok());
    assert!(group.reserve(1, &scopes, 1).await.is_err());
    let asked = second.shared_counts().unwrap().by_server;
    let noted = now();
    let (refusal, standing) = *second.peek(noted, &scopes).unwrap_err();
    assert!(matches!(refusal, Refusal::Wait { kind: Kind::Requests, limit: 5, .. }), "{refusal:?}");
    assert_eq!(standing.requests.map(|level| level.remaining), Some(0), "as the server counts, not this coordinator alone");
    assert!(second.peek(noted + REFUSAL_KEPT, &scopes).is_ok(), "for a moment only: others may give back");
    assert_eq!(second.shared_counts().unwrap().by_server, asked);
    assert!(group.first().peek(now() + REFUSAL_KEPT, &scopes).is_err(), "what it let pass itself it knows");
}
