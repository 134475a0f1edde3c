//! The most important assumptions, and the savings of each measure.

use super::{
    assumptions::{Assumptions, TABLE},
    fleet::Fleet,
};
use serde::Serialize;

/// The month's cost if one assumption is a fifth less or a quarter more.
#[derive(Clone, Debug, Serialize)]
pub struct Sensitivity {
    pub key: &'static str,
    pub name: &'static str,
    pub less: f64,
    pub more: f64,
}

/// A way of saving, and the remaining cost per month.
#[derive(Clone, Debug, Serialize)]
pub struct Lever {
    pub name: &'static str,
    pub changes: Vec<(&'static str, f64)>,
    pub note: &'static str,
    pub dollars_per_month: f64,
    /// The saved share of the cost without it.
    pub saved: f64,
}

pub const LESS: f64 = 0.8;
pub const MORE: f64 = 1.25;

/// The assumptions with one scaled by `factor`; shares stay at most 1.
pub fn scaled(assumptions: &Assumptions, key: &str, factor: f64) -> Assumptions {
    let row = TABLE.iter().find(|row| row.key == key).expect("rows of the table have keys");
    let value = assumptions.get(key) * factor;
    assumptions.clone().with(&[(key, if row.unit == "share" { value.min(1.0) } else { value })])
}

/// The sensitivities to the assumptions that change the cost at all, the most important first.
pub fn sensitivities(assumptions: &Assumptions) -> Vec<Sensitivity> {
    let dollars = |assumptions: &Assumptions| Fleet::plan(assumptions).dollars_per_month;
    let base = dollars(assumptions);
    let of = |(row, _): (&'static super::assumptions::Assumption, f64)| Sensitivity {
        key: row.key,
        name: row.name,
        less: dollars(&scaled(assumptions, row.key, LESS)),
        more: dollars(&scaled(assumptions, row.key, MORE)),
    };
    let spread = |s: &Sensitivity| (s.less - base).abs().max((s.more - base).abs());
    let mut all: Vec<Sensitivity> = assumptions.rows().map(of).filter(|s| spread(s) > base * 1e-6).collect();
    all.sort_by(|a, b| spread(b).total_cmp(&spread(a)));
    all
}

/// A name, its changes, and a note.
type Way = (&'static str, &'static [(&'static str, f64)], &'static str);

const WAYS: [Way; 8] = [
    ("K and V in 8 bits", &[("kv_bits", 8.0)], "twice the sequences in the same memory; no faster arithmetic is assumed"),
    ("weights in 8 bits, too", &[("kv_bits", 8.0), ("weight_bits", 8.0)], "steps read half the weights; fewer GPUs hold the model"),
    ("a small model for 40 % of the traffic", &[("small_share", 0.4)], "what it costs is `small_cost`"),
    ("70 % of the prompts' tokens cached", &[("prefix_hit", 0.7)], "larger pool, sticky sessions, shared system prompts"),
    ("80 ms per token", &[("tpot_ms", 80.0)], "a looser limit lets more sequences share a step"),
    ("a fleet that follows the load", &[("autoscaled", 1.0)], "the swing is `swing`"),
    ("half of the fleet on spot machines", &[("spot_share", 0.5)], "at 60 % off"),
    (
        "8 bits, 70 % cached, autoscaled, half on spot",
        &[("kv_bits", 8.0), ("weight_bits", 8.0), ("prefix_hit", 0.7), ("autoscaled", 1.0), ("spot_share", 0.5)],
        "together",
    ),
];

pub fn levers(assumptions: &Assumptions) -> Vec<Lever> {
    let base = Fleet::plan(assumptions).dollars_per_month;
    let lever = |(name, changes, note): Way| {
        let dollars_per_month = Fleet::plan(&assumptions.clone().with(changes)).dollars_per_month;
        let saved = if base > 0.0 && base.is_finite() { 1.0 - dollars_per_month / base } else { 0.0 };
        Lever { name, changes: changes.to_vec(), note, dollars_per_month, saved }
    };
    WAYS.map(lever).into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_matters_most_comes_first_and_what_does_not_is_left_out() {
        let all = sensitivities(&Assumptions::default());
        let place = |key: &str| all.iter().position(|s| s.key == key);
        assert!(place("users") < place("kv_heads"), "{all:?}");
        assert_eq!(place("nvme_hours"), None);
        assert!(all.iter().all(|s| s.less.is_finite() && s.more.is_finite()));
    }

    #[test]
    fn all_levers_together_save_the_most() {
        let all = levers(&Assumptions::default());
        assert!(all.iter().all(|lever| lever.saved <= all[7].saved + 1e-12 && lever.saved >= 0.0), "{all:?}");
        assert!((all[6].saved - 0.3).abs() < 1e-9, "half at 60 % off");
    }
}
