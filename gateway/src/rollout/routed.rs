//! A request whose model was chosen for it: the model, and the outcome for a rollout.

use super::{running::Seat, seen::Ended, shadow::Mirror};
use crate::metrics::usage::RouteUsage;
use parking_lot::Mutex;

/// The outcome of routing a request.
#[derive(Debug)]
pub struct Routed {
    pub told: RouteUsage,
    /// The request's seat in a rollout.
    pub seat: Option<Seat>,
    mirror: Mutex<Option<Mirror>>,
}

impl Routed {
    pub fn new(told: RouteUsage, seat: Option<Seat>, mirror: Option<Mirror>) -> Self {
        Self { told, seat, mirror: Mutex::new(mirror) }
    }

    /// Takes the request's shadow, if it has one that was not taken before.
    pub(crate) fn take_mirror(&self) -> Option<Mirror> {
        self.mirror.lock().take()
    }

    /// Notes that the request got no answer.
    pub fn failed(&self) {
        if let Some(seat) = &self.seat {
            seat.ended(&Ended { failed: true, ..Ended::default() });
        }
    }
}
