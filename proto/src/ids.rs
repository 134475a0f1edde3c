//! Identifiers. All are opaque numbers; none is ever reused.

use serde::{Deserialize, Serialize};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug, Serialize, Deserialize)]
        pub struct $name(pub u64);

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{:x}", self.0)
            }
        }
    };
}

id! {
    /// One prompt of one client. The coordinator process draws the high 32 bits, so two coordinators never collide.
    RequestId
}
id! {
    /// One choice of a request (`n = 3` makes three sequences).
    SequenceId
}
/// A worker's link to one coordinator, from registration to its end. The next link to the same coordinator has another id, so that no
/// message for the old link goes over the new one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LinkId {
    /// Place in the worker's list of coordinators.
    pub coordinator: usize,
    /// Counts the links to this coordinator.
    pub session: u64,
}

id! {
    /// One run of one worker process, which draws it at its start. All coordinators know a worker by it, whichever of them it reached
    /// first.
    Instance
}
id! {
    /// The number that the coordinators agreed on for one run of one worker. A message with an old epoch is refused: a restarted worker is
    /// a new worker.
    Epoch
}
