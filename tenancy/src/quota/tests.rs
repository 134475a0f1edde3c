use super::*;
use crate::limits::{Budget, Budgets};
use proptest::prelude::*;

const FAR: Duration = Duration::from_secs(1_000_000);

fn tokens(tokens: u64) -> Use {
    Use { tokens, cost_micros: 0 }
}

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
    let first = quota.reserve(seconds(0.5), &scopes, tokens(90), FAR).unwrap();
    let refused = quota.reserve(seconds(0.6), &scopes, tokens(20), FAR).unwrap_err();
    let retry = seconds(61.0) - seconds(0.6);
    assert_eq!(refused, Refusal::Wait { scope: ScopeKind::Tenant, kind: Kind::Tokens, limit: 100, used: 90, needed: 20, retry });
    quota.settle(first, tokens(30));
    let second = quota.reserve(seconds(0.7), &scopes, tokens(70), FAR).unwrap();
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
        let reservation = quota.reserve(seconds(at), &scopes, tokens(1), FAR).unwrap();
        quota.settle(reservation, tokens(1));
    }
    let Err(Refusal::Wait { retry, .. }) = quota.reserve(seconds(31.5), &scopes, tokens(1), FAR) else { panic!("there is no room") };
    assert!(quota.reserve(seconds(31.5) + retry - seconds(0.001), &scopes, tokens(1), FAR).is_err());
    assert!(quota.reserve(seconds(31.5) + retry, &scopes, tokens(1), FAR).is_ok());
}

#[test]
fn what_can_never_fit_is_told_so() {
    let mut quota = Quota::default();
    let scopes = tenant("a", per_minute(10, 100));
    let never = Refusal::Never { scope: ScopeKind::Tenant, kind: Kind::Tokens, limit: 100, needed: 101 };
    assert_eq!(quota.reserve(FAR, &scopes, tokens(101), FAR).unwrap_err(), never);
}

#[test]
fn all_scopes_are_charged_or_none() {
    let mut quota = Quota::default();
    let key = |name: &str| (Scope::Key(name.into()), per_minute(1, 1000));
    let both = |name: &str| [(Scope::Tenant("a".into()), per_minute(3, 1000)), key(name)];
    let now = seconds(1.0);
    quota.reserve(now, &both("k1"), tokens(1), FAR).unwrap();
    assert_eq!(quota.reserve(now, &both("k1"), tokens(1), FAR).unwrap_err().kind(), Kind::Requests);
    for name in ["k2", "k3"] {
        quota.reserve(now, &both(name), tokens(1), FAR).unwrap();
    }
    assert!(quota.reserve(now, &both("k4"), tokens(1), FAR).is_err(), "the tenant's three are used up");
    assert!(quota.peek(now, &[key("k4")]).is_ok(), "and the key was not charged");
    quota.check_integrity();
}

#[test]
fn only_so_many_run_at_a_time() {
    let mut quota = Quota::default();
    let scopes = tenant("a", Limits { concurrent: Some(2), ..Limits::default() });
    let first = quota.reserve(seconds(1.0), &scopes, tokens(1), FAR).unwrap();
    quota.reserve(seconds(1.0), &scopes, tokens(1), seconds(50.0)).unwrap();
    assert_eq!(quota.peek(seconds(1.0), &scopes).unwrap_err().kind(), Kind::Concurrent);
    quota.settle(first, tokens(1));
    quota.reserve(seconds(2.0), &scopes, tokens(1), FAR).unwrap();
    assert!(quota.peek(seconds(49.0), &scopes).is_err());
    quota.sweep(seconds(50.0));
    assert!(quota.peek(seconds(50.0), &scopes).is_ok(), "a lost request is taken back at its deadline");
    quota.check_integrity();
}

#[test]
fn a_day_is_remembered_over_a_restart() {
    let mut quota = Quota::default();
    let scopes = tenant("a", Limits { tokens_per_day: Some(100), ..Limits::default() });
    quota.restore(seconds(1000.0), &scopes, tokens(60));
    quota.restore(seconds(900.0), &scopes, tokens(30));
    assert_eq!(quota.reserve(seconds(5000.0), &scopes, tokens(20), FAR).unwrap_err().kind(), Kind::TokensPerDay);
    quota.reserve(seconds(5000.0), &scopes, tokens(10), FAR).unwrap();
    assert!(quota.peek(seconds(100_000.0), &scopes).is_ok());
}

#[test]
fn who_has_nothing_left_to_count_is_forgotten() {
    let mut quota = Quota::default();
    for name in 0..100 {
        let reservation = quota.reserve(seconds(1.0), &tenant(&name.to_string(), Limits::default()), tokens(5), FAR).unwrap();
        quota.settle(reservation, tokens(5));
    }
    quota.sweep(seconds(2.0));
    assert_eq!(quota.scopes.len(), 100);
    quota.sweep(seconds(90_000.0));
    assert_eq!((quota.scopes.len(), quota.running()), (0, 0));
}

/// Noon of a day, counted from the 1st of January 1970.
fn noon(day: u64) -> Duration {
    Duration::from_secs(day * 86_400 + 43_200)
}

fn costs(cost_micros: u64) -> Use {
    Use { tokens: 1, cost_micros }
}

fn budgets(day: u64, month: u64) -> Limits {
    let hard = |hard| Budget { soft: None, hard: Some(hard) };
    Limits { budgets: Budgets { day: hard(day), month: hard(month) }, ..Limits::default() }
}

#[test]
fn no_more_is_spent_than_the_budget_until_it_begins_anew() {
    let mut quota = Quota::default();
    let scopes = tenant("a", budgets(100, 150));
    let first = quota.reserve(noon(29), &scopes, costs(90), FAR * 10).unwrap();
    let refusal = Refusal::Wait {
        scope: ScopeKind::Tenant,
        kind: Kind::Spend(Period::Day),
        limit: 100,
        used: 90,
        needed: 20,
        retry: Duration::from_secs(43_200),
    };
    assert_eq!(quota.reserve(noon(29), &scopes, costs(20), FAR).unwrap_err(), refusal, "a running request may cost all that it reserved");
    quota.settle(first, costs(60));
    quota.reserve(noon(29), &scopes, costs(40), FAR * 10).unwrap();
    assert!(quota.reserve(noon(29), &scopes, costs(1), FAR).is_err());
    assert!(quota.reserve(noon(29), &scopes, costs(0), FAR).is_ok(), "what costs nothing passes");
    // On the 31st, 100 of the month's 150 are spent.
    let kind = |refused: Result<Reservation, Refusal>| refused.unwrap_err().kind();
    assert_eq!(kind(quota.reserve(noon(30), &scopes, costs(60), FAR)), Kind::Spend(Period::Month));
    quota.reserve(noon(30), &scopes, costs(50), FAR * 10).unwrap();
    assert!(quota.reserve(noon(31), &scopes, costs(100), FAR).is_ok(), "February has a budget of its own");
    let never = Refusal::Never { scope: ScopeKind::Tenant, kind: Kind::Spend(Period::Day), limit: 100, needed: 101 };
    assert_eq!(quota.reserve(noon(40), &scopes, costs(101), FAR).unwrap_err(), never);
    quota.check_integrity();
}

#[test]
fn a_price_counts_in_the_day_in_which_its_request_was_let_pass() {
    let mut quota = Quota::default();
    let scopes = tenant("a", budgets(100, 1000));
    let over_midnight = quota.reserve(noon(3), &scopes, costs(80), FAR * 10).unwrap();
    let today = quota.reserve(noon(4), &scopes, costs(70), FAR * 10).unwrap();
    quota.settle(over_midnight, costs(75));
    quota.settle(today, costs(30));
    let spent = Spent { day_micros: 30, month_micros: 105 };
    assert_eq!(quota.spent(noon(4)), [(scopes[0].0.clone(), spent)]);
}

#[test]
fn a_soft_budget_warns_and_a_month_is_remembered_over_a_restart() {
    let mut quota = Quota::default();
    let month = Budget { soft: Some(80), hard: Some(100) };
    let scopes = tenant("a", Limits { budgets: Budgets { day: Budget::default(), month }, ..Limits::default() });
    quota.restore_spend(noon(4), scopes[0].0.clone(), Spent { day_micros: 0, month_micros: 70 });
    assert_eq!(quota.standing(noon(4), &scopes).warnings, []);
    quota.reserve(noon(4), &scopes, costs(15), FAR).unwrap();
    let warning = Warning { scope: scopes[0].0.clone(), period: Period::Month, soft: 80, hard: Some(100), spent: 85 };
    assert_eq!(quota.standing(noon(4), &scopes).warnings, [warning]);
    assert!(quota.reserve(noon(4), &scopes, costs(16), FAR).is_err());
    quota.sweep(noon(5));
    assert!(quota.reserve(noon(20), &scopes, costs(16), FAR).is_err(), "the month's spend outlives the windows");
}

/// A step of one of two tenants with two keys each.
#[derive(Clone, Debug)]
enum Step {
    Reserve {
        tenant: u8,
        key: u8,
        tokens: u64,
        cost: u64,
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
        6 => (0..2_u8, 0..2_u8, 1..60_u64, 0..90_u64).prop_map(|(tenant, key, tokens, cost)| Step::Reserve { tenant, key, tokens, cost }),
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
            requests_per_minute: Some(8),
            tokens_per_minute: Some(200),
            tokens_per_day: Some(1500),
            concurrent: Some(5),
            budgets: Budgets { day: Budget { soft: Some(100), hard: Some(400) }, month: Budget { soft: None, hard: Some(700) } },
        };
        let of_key = per_minute(5, 150);
        let life = seconds(120.0);
        let mut quota = Quota::default();
        let mut clock = 1_000_000_i64;
        let mut latest = Duration::ZERO;
        let mut running = Vec::new();
        let mut passed: Vec<(Vec<Scope>, Duration, Use)> = Vec::new();
        for step in steps {
            let now = Duration::from_millis(clock.max(0) as u64);
            // The quota cannot know a time that it was not given: the latest time counts only if a call has passed it.
            if let Step::Reserve { .. } | Step::Sweep = step {
                latest = latest.max(now);
            }
            match step {
                Step::Reserve { tenant, key, tokens, cost } => {
                    let most = Use { tokens, cost_micros: cost };
                    let name: Arc<str> = tenant.to_string().into();
                    let scopes = [
                        (Scope::Tenant(Arc::clone(&name)), limits),
                        (Scope::Key(format!("{tenant}{key}").into()), of_key),
                    ];
                    if let Ok(reservation) = quota.reserve(now, &scopes, most, latest + life) {
                        running.push((Some(reservation), passed.len(), latest + life));
                        passed.push((scopes.map(|(scope, _)| scope).into(), latest, most));
                    }
                }
                Step::Settle { nth, percent } if nth < running.len() => {
                    if let (Some(reservation), place, deadline) = running.swap_remove(nth) {
                        let Use { tokens, cost_micros } = passed[place].2;
                        let used = Use { tokens: tokens * percent / 100, cost_micros: cost_micros * percent / 100 };
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
                    recent.fold((0, 0), |(requests, tokens), (_, _, used)| (requests + 1, tokens + used.tokens))
                };
                let spent = |period: Period| {
                    let same = |at: &Duration| period.number(*at) == period.number(latest);
                    let those = passed.iter().filter(|(scopes, at, _)| scopes.contains(&scope) && same(at));
                    those.map(|(_, _, used)| used.cost_micros).sum::<u64>()
                };
                let known = quota.spent(latest).into_iter().find(|(of, _)| *of == scope).map_or(Spent::default(), |(_, spent)| spent);
                // A settlement that comes between a deadline and the next sweep counts here, and not for the oracle.
                let most = (spent(Period::Day), spent(Period::Month));
                prop_assert!(known.day_micros <= most.0 && known.month_micros <= most.1, "{known:?} {most:?}");
                prop_assert!(known.day_micros <= 400 && known.month_micros <= 700, "{known:?}");
                let ((requests, tokens), (_, day)) = (within(seconds(60.0)), within(seconds(86_400.0)));
                prop_assert!(requests <= 8 && tokens <= 200 && day <= 1500, "{requests} {tokens} {day}");
            }
        }
        // All lost reservations are settled, and no scope is left.
        quota.sweep(latest + seconds(32.0 * 86_400.0));
        prop_assert_eq!((quota.running(), quota.scopes.len()), (0, 0));
    }
}
