//! The urgency of a request, by which a worker orders its work. The coordinator derives it from the request's class and its own clock.

use serde::{Deserialize, Serialize};

/// The urgency of a request. Limits are soft: a worker orders and cuts its work by them, and still finishes late work.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Urgency {
    /// Time from the receipt of a job until its request's first token is due, if there is a limit.
    pub due_ms: Option<u64>,
    /// The longest time for each token after the first, if there is a limit.
    pub tpot_ms: Option<f32>,
    /// Requests of higher priority go first.
    pub priority: u8,
    /// The group that the request counts towards. Groups share a worker that is short of time.
    pub group: u64,
    /// The group's weight: its share is proportional to it.
    pub weight: f32,
}

impl Default for Urgency {
    fn default() -> Self {
        Self { due_ms: None, tpot_ms: None, priority: 0, group: 0, weight: 1.0 }
    }
}

impl Urgency {
    /// Describes the fault in a peer's settings, if they cannot be ordered.
    pub fn fault(&self) -> Option<String> {
        let positive = |name: &str, value: f32| {
            let sound = value.is_finite() && value > 0.0;
            (!sound).then(|| format!("`{name}` is {value}, not a number above 0"))
        };
        positive("weight", self.weight).or_else(|| self.tpot_ms.and_then(|limit| positive("tpot_ms", limit)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_make_no_order_are_named() {
        assert_eq!(Urgency::default().fault(), None);
        for (wrong, name) in [
            (Urgency { weight: 0.0, ..Default::default() }, "weight"),
            (Urgency { weight: f32::NAN, ..Default::default() }, "weight"),
            (Urgency { tpot_ms: Some(f32::INFINITY), ..Default::default() }, "tpot_ms"),
            (Urgency { tpot_ms: Some(-1.0), ..Default::default() }, "tpot_ms"),
        ] {
            assert!(wrong.fault().is_some_and(|fault| fault.contains(name)), "{wrong:?}");
        }
    }
}
