//! Errors of a kernel, a copy or a product that hardware may tolerate.

use std::fmt;

/// A broken rule. Every later call of the process fails, as with a device's sticky errors.
#[derive(Clone, Debug)]
pub(crate) struct Fault {
    pub(crate) kind: Kind,
    pub(crate) what: String,
    /// The place: kernel, source line, block and threads; extended while the fault is passed up.
    pub(crate) place: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Memory that does not exist, or no longer exists.
    Address,
    Alignment,
    Uninitialized,
    /// Unordered accesses.
    Race,
    /// Threads that should have met, but did not.
    Divergence,
    /// Use before completion.
    InFlight,
    /// An operation that the stand-in does not support.
    Unsupported,
    /// A failure requested by an option.
    Injected,
}

impl Fault {
    pub(crate) fn new(kind: Kind, what: impl Into<String>) -> Self {
        Self { kind, what: what.into(), place: Vec::new() }
    }

    #[must_use]
    pub(crate) fn at(mut self, place: impl Into<String>) -> Self {
        self.place.push(place.into());
        self
    }

    /// The driver's code for this fault.
    pub(crate) fn code(&self) -> u32 {
        match self.kind {
            Kind::Address | Kind::Uninitialized => 700,
            Kind::Alignment => 716,
            Kind::Unsupported => 801,
            Kind::Race | Kind::Divergence | Kind::InFlight | Kind::Injected => 719,
        }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let kind = match self.kind {
            Kind::Address => "address",
            Kind::Alignment => "alignment",
            Kind::Uninitialized => "uninitialized",
            Kind::Race => "race",
            Kind::Divergence => "divergence",
            Kind::InFlight => "in flight",
            Kind::Unsupported => "unsupported",
            Kind::Injected => "injected",
        };
        write!(f, "[{kind}] {}", self.what)?;
        self.place.iter().try_for_each(|place| write!(f, "\n    {place}"))
    }
}
