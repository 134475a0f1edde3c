//! Names of things that travel. All are opaque numbers; none is ever reused.

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
    /// One prompt of one client. Its high 32 bits are drawn by the coordinator process, so two coordinators never collide.
    RequestId
}
id! {
    /// One choice being generated for a request (`n = 3` makes three sequences of one request).
    SequenceId
}
/// A worker's link to one coordinator, from registration to its end. The next link to the same coordinator is another one, so
/// that nothing meant for this one is said on that one.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Debug)]
pub struct LinkId {
    /// Place in the worker's list of coordinators.
    pub coordinator: usize,
    /// Counts the links to this coordinator.
    pub session: u64,
}

id! {
    /// One registration of one worker with one coordinator. A message that carries an old epoch is refused:
    /// a restarted worker is another worker.
    Epoch
}
