use super::*;
use proptest::prelude::*;

const FAR: Duration = Duration::from_secs(1_000_000);

fn seconds(s: f64) -> Duration {
    Duration::from_secs_f64(s)
}

fn tenant(name: &str, limits: Limits) -> [(Scope, Limits); 1] {
    [(Scope::Tenant(name.into()), limits)]
}

fn per_minute(requests: u64, tokens: u64) -> Limits {
    Limits { requests_per_minute: Some(requests), tokens_per_minute: Some(tokens), ..Limits::default() }
}

#[test]
fn what_is_not_used_comes_back() {
    let mut quota = Quota::default();
    let scopes = tenant("a", per_minute(10, 100));
    let first = quota.reserve(seconds(0.5), &scopes, 90, FAR).unwrap();
    let refused = quota.reserve(seconds(0.6), &scopes, 20, FAR).unwrap_err();
    let retry = seconds(61.0) - seconds(0.6);
    assert_eq!(refused, Refusal::Wait { kind: Kind::Tokens, limit: 100, used: 90, needed: 20, retry });
    quota.settle(first, 30);
    let second = quota.reserve(seconds(0.7), &scopes, 70, FAR).unwrap();
    let level = Level { limit: 100, remaining: 0, reset: seconds(61.0) - seconds(0.8) };
    assert_eq!(quota.standing(seconds(0.8), &scopes).tokens, Some(level));
    quota.cancel(second);
    let standing = quota.standing(seconds(0.9), &scopes);
    assert_eq!((standing.requests.unwrap().remaining, standing.tokens.unwrap().remaining), (9, 70));
    quota.check_integrity();
}

#[test]
fn a_wait_is_as_long_as_it_says() {
    let mut quota = Quota::default();
    let scopes = tenant("a", per_minute(2, 1000));
    for at in [0.2, 30.0] {
        let reservation = quota.reserve(seconds(at), &scopes, 1, FAR).unwrap();
        quota.settle(reservation, 1);
    }
    let Err(Refusal::Wait { retry, .. }) = quota.reserve(seconds(31.5), &scopes, 1, FAR) else { panic!("there is no room") };
    assert!(quota.reserve(seconds(31.5) + retry - seconds(0.001), &scopes, 1, FAR).is_err());
    assert!(quota.reserve(seconds(31.5) + retry, &scopes, 1, FAR).is_ok());
}

#[test]
fn what_can_never_fit_is_told_so() {
    let mut quota = Quota::default();
    let scopes = tenant("a", per_minute(10, 100));
    let never = Refusal::Never { kind: Kind::Tokens, limit: 100, needed: 101 };
    assert_eq!(quota.reserve(FAR, &scopes, 101, FAR).unwrap_err(), never);
}

#[test]
fn all_scopes_are_charged_or_none() {
    let mut quota = Quota::default();
    let key = |name: &str| (Scope::Key(name.into()), per_minute(1, 1000));
    let both = |name: &str| [(Scope::Tenant("a".into()), per_minute(3, 1000)), key(name)];
    let now = seconds(1.0);
    quota.reserve(now, &both("k1"), 1, FAR).unwrap();
    assert_eq!(quota.reserve(now, &both("k1"), 1, FAR).unwrap_err().kind(), Kind::Requests);
    for name in ["k2", "k3"] {
        quota.reserve(now, &both(name), 1, FAR).unwrap();
    }
    assert!(quota.reserve(now, &both("k4"), 1, FAR).is_err(), "the tenant's three are used up");
    assert!(quota.peek(now, &[key("k4")]).is_ok(), "and the key was not charged");
    quota.check_integrity();
}

#[test]
fn only_so_many_run_at_a_time() {
    let mut quota = Quota::default();
    let scopes = tenant("a", Limits { concurrent: Some(2), ..Limits::default() });
    let first = quota.reserve(seconds(1.0), &scopes, 1, FAR).unwrap();
    quota.reserve(seconds(1.0), &scopes, 1, seconds(50.0)).unwrap();
    assert_eq!(quota.peek(seconds(1.0), &scopes).unwrap_err().kind(), Kind::Concurrent);
    quota.settle(first, 1);
    quota.reserve(seconds(2.0), &scopes, 1, FAR).unwrap();
    assert!(quota.peek(seconds(49.0), &scopes).is_err());
    quota.sweep(seconds(50.0));
    assert!(quota.peek(seconds(50.0), &scopes).is_ok(), "a lost request is taken back at its deadline");
    quota.check_integrity();
}

#[test]
fn a_day_is_remembered_over_a_restart() {
    let mut quota = Quota::default();
    let scopes = tenant("a", Limits { tokens_per_day: Some(100), ..Limits::default() });
    quota.restore(seconds(1000.0), &scopes, 60);
    quota.restore(seconds(900.0), &scopes, 30);
    assert_eq!(quota.reserve(seconds(5000.0), &scopes, 20, FAR).unwrap_err().kind(), Kind::TokensPerDay);
    quota.reserve(seconds(5000.0), &scopes, 10, FAR).unwrap();
    assert!(quota.peek(seconds(100_000.0), &scopes).is_ok());
}

#[test]
fn who_has_nothing_left_to_count_is_forgotten() {
    let mut quota = Quota::default();
    for name in 0..100 {
        let reservation = quota.reserve(seconds(1.0), &tenant(&name.to_string(), Limits::default()), 5, FAR).unwrap();
        quota.settle(reservation, 5);
    }
    quota.sweep(seconds(2.0));
    assert_eq!(quota.scopes.len(), 100);
    quota.sweep(seconds(90_000.0));
    assert_eq!((quota.scopes.len(), quota.running()), (0, 0));
}

/// A step of one of two tenants with two keys each.
#[derive(Clone, Debug)]
enum Step {
    Reserve {
        tenant: u8,
        key: u8,
        tokens: u64,
    },
    /// The `nth` running request uses this part of its tokens.
    Settle {
        nth: usize,
        percent: u64,
    },
    Cancel {
        nth: usize,
    },
    /// The holder is gone, without a settlement.
    Lose {
        nth: usize,
    },
    Time {
        ms: i64,
    },
    Sweep,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        6 => (0..2_u8, 0..2_u8, 1..60_u64).prop_map(|(tenant, key, tokens)| Step::Reserve { tenant, key, tokens }),
        3 => (0..8_usize, 0..=100_u64).prop_map(|(nth, percent)| Step::Settle { nth, percent }),
        1 => (0..8_usize).prop_map(|nth| Step::Cancel { nth }),
        1 => (0..8_usize).prop_map(|nth| Step::Lose { nth }),
        3 => (0..9000_i64).prop_map(|ms| Step::Time { ms }),
        1 => prop_oneof![Just(-90_000_i64), Just(3_600_000), Just(100_000_000), -5000..0_i64].prop_map(|ms| Step::Time { ms }),
        1 => Just(Step::Sweep),
    ];
    proptest::collection::vec(step, 1..120)
}

proptest! {
    /// The oracle keeps every passed request with its time, and adds up over exact windows.
    #[test]
    fn never_above_a_limit_and_never_leaking(steps in steps()) {
        let limits = Limits {
            requests_per_minute: Some(8), tokens_per_minute: Some(200), tokens_per_day: Some(1500), concurrent: Some(5),
        };
        let of_key = per_minute(5, 150);
        let life = seconds(120.0);
        let mut quota = Quota::default();
        let mut clock = 1_000_000_i64;
        let mut latest = Duration::ZERO;
        let mut running = Vec::new();
        let mut passed: Vec<(Vec<Scope>, Duration, u64)> = Vec::new();
        for step in steps {
            let now = Duration::from_millis(clock.max(0) as u64);
            // The quota cannot know a time that it was not given: the latest time counts only if a call has passed it.
            if let Step::Reserve { .. } | Step::Sweep = step {
                latest = latest.max(now);
            }
            match step {
                Step::Reserve { tenant, key, tokens } => {
                    let name: Arc<str> = tenant.to_string().into();
                    let scopes = [
                        (Scope::Tenant(Arc::clone(&name)), limits),
                        (Scope::Key(format!("{tenant}{key}").into()), of_key),
                    ];
                    if let Ok(reservation) = quota.reserve(now, &scopes, tokens, latest + life) {
                        running.push((Some(reservation), passed.len(), latest + life));
                        passed.push((scopes.map(|(scope, _)| scope).into(), latest, tokens));
                    }
                }
                Step::Settle { nth, percent } if nth < running.len() => {
                    if let (Some(reservation), place, deadline) = running.swap_remove(nth) {
                        let used = passed[place].2 * percent / 100;
                        quota.settle(reservation, used);
                        // Unless it was settled in full before.
                        if deadline > latest { passed[place].2 = used; }
                    }
                }
                Step::Cancel { nth } if nth < running.len() => {
                    if let (Some(reservation), place, deadline) = running.swap_remove(nth) {
                        quota.cancel(reservation);
                        if deadline > latest { passed[place].0.clear(); }
                    }
                }
                Step::Lose { nth } if nth < running.len() => running[nth].0 = None,
                Step::Time { ms } => clock += ms,
                Step::Sweep => quota.sweep(now),
                _ => {}
            }
            quota.check_integrity();
            for scope in ["0", "1"].map(|name| Scope::Tenant(name.into())) {
                let within = |window: Duration| {
                    let recent = passed.iter().filter(|(scopes, at, _)| scopes.contains(&scope) && latest - *at < window);
                    recent.fold((0, 0), |(requests, tokens), (_, _, used)| (requests + 1, tokens + used))
                };
                let ((requests, tokens), (_, day)) = (within(seconds(60.0)), within(seconds(86_400.0)));
                prop_assert!(requests <= 8 && tokens <= 200 && day <= 1500, "{requests} {tokens} {day}");
            }
        }
        // All lost reservations are settled, and no scope is left.
        quota.sweep(latest + seconds(200_000.0));
        prop_assert_eq!((quota.running(), quota.scopes.len()), (0, 0));
    }
}
