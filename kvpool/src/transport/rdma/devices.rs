//! The devices that a process uses, opened.

use super::verbs::{self, CompletionQueue, Context, Domain, Limits, Port, VerbsError};
use std::{fmt, str::FromStr, sync::Arc};
use tidemill_proto::pool::{RAILS_MAX, RailEnd};

/// The RDMA devices that a process may use.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub enum DeviceNames {
    /// All devices of the machine.
    #[default]
    All,
    /// The named devices only; none, if the list is empty.
    Only(Vec<String>),
}

impl FromStr for DeviceNames {
    type Err = &'static str;

    /// Parses `all`, `none`, or names separated by commas.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let names: Vec<String> = match text.trim() {
            "all" => return Ok(Self::All),
            "none" => vec![],
            list => list.split(',').map(|name| name.trim().to_owned()).collect(),
        };
        if names.iter().any(|name| name.is_empty() || name.len() > 64 || name.contains(['/', '\0'])) {
            return Err("is not all, none, or a list of devices such as mlx5_0,mlx5_1 (`ibv_devices` shows them)");
        }
        if names.len() > RAILS_MAX { Err("has more devices than a connection can have rails") } else { Ok(Self::Only(names)) }
    }
}

impl fmt::Display for DeviceNames {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Only(names) if names.is_empty() => f.write_str("none"),
            Self::Only(names) => f.write_str(&names.join(",")),
        }
    }
}

/// An open device, with a domain and a queue for completions.
#[derive(Debug)]
pub(super) struct Device {
    pub(super) queue: Arc<CompletionQueue>,
    pub(super) limits: Limits,
    pub(super) domain: Arc<Domain>,
}

impl Device {
    pub(super) fn open(name: &str, completions: u32) -> Result<Self, VerbsError> {
        let context = Arc::new(Context::open(name)?);
        let limits = context.limits()?;
        let queue = Arc::new(CompletionQueue::new(Arc::clone(&context), completions)?);
        Ok(Self { queue, limits, domain: Arc::new(Domain::new(context)?) })
    }

    pub(super) fn name(&self) -> &str {
        self.domain.context().name()
    }

    pub(super) fn port(&self) -> Result<Port, VerbsError> {
        self.domain.context().port()
    }

    /// This device's end of a rail.
    pub(super) fn end(&self, port: &Port, pair: u32, psn: u32) -> RailEnd {
        let Limits { reads_in, reads_out, .. } = self.limits;
        RailEnd { gid: port.gid, lid: port.lid, mtu: port.mtu, pair, psn, reads_in, reads_out }
    }
}

/// Opens devices with `open`. One that cannot be used is skipped with a warning.
pub(super) fn open_all<T>(names: &DeviceNames, open: impl Fn(&str) -> Result<T, VerbsError>) -> Vec<T> {
    let found = match names {
        DeviceNames::Only(names) => names.clone(),
        // RDMA was not requested explicitly, so its absence is not worth a warning.
        DeviceNames::All => verbs::devices().inspect_err(|error| tracing::debug!(%error, "no RDMA")).unwrap_or_default(),
    };
    let usable = |name: &String| match open(name) {
        Ok(device) => Some(device),
        Err(error) => {
            tracing::warn!(device = name, %error, "RDMA device not usable");
            None
        }
    };
    found.iter().take(RAILS_MAX).filter_map(usable).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_lists() {
        let only = |names: &[&str]| DeviceNames::Only(names.iter().map(|&name| name.to_owned()).collect());
        for (text, names) in [("all", DeviceNames::All), ("none", only(&[])), ("mlx5_0", only(&["mlx5_0"])), ("a, b", only(&["a", "b"]))] {
            assert_eq!(text.parse(), Ok(names.clone()));
            assert_eq!(names.to_string().parse(), Ok(names));
        }
        for text in ["", "a,", "../x", &"a,".repeat(RAILS_MAX)] {
            assert!(text.parse::<DeviceNames>().is_err(), "{text}");
        }
    }
}
