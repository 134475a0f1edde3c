//! The coordinators of one cluster.

use std::{collections::BTreeMap, net::SocketAddr};
use tidemill_net::config::{ConfigError, invalid};
use tidemill_registry::command::NAME_BYTES_MAX;

/// The maximum number of coordinators in one cluster: a majority must agree on every change.
const COORDINATORS_MAX: usize = 5;

/// Parses `a=1.2.3.4:5,…` as a map.
pub(super) fn parse_peers(text: &str) -> Result<BTreeMap<String, SocketAddr>, String> {
    let pair = |pair: &str| {
        let (name, addr) = pair.split_once('=').ok_or_else(|| format!("`{pair}` is not NAME=ADDR"))?;
        let addr = addr.trim().parse().map_err(|error| format!("`{addr}`: {error}"))?;
        Ok((name.trim().to_owned(), addr))
    };
    text.split(',').map(pair).collect()
}

/// Returns the coordinators other than `name`. `stored` tells whether this one has a data directory.
pub(super) fn check_peers(
    mut peers: BTreeMap<String, SocketAddr>,
    name: &str,
    stored: bool,
) -> Result<BTreeMap<String, SocketAddr>, ConfigError> {
    peers.remove(name);
    if peers.len() >= COORDINATORS_MAX {
        return Err(invalid("peers", peers.len() + 1, format!("a cluster has at most {COORDINATORS_MAX} coordinators, best 1, 3 or 5")));
    }
    if let Some(name) = peers.keys().chain([&name.to_owned()]).find(|name| !(1..=NAME_BYTES_MAX).contains(&name.len())) {
        return Err(invalid("peers", name, format!("a name has 1 to {NAME_BYTES_MAX} bytes")));
    }
    if !peers.is_empty() && !stored {
        return Err(invalid("peers", peers.len(), "a coordinator among several must keep the registry: say where with --data"));
    }
    Ok(peers)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Flags, tests::flags};

    #[test]
    fn peers_are_the_others_and_need_a_disk() {
        let peers = || parse_peers("coordinator-0=10.0.0.1:4000, b=10.0.0.2:4000").ok();
        let settings = Flags { peers: peers(), data: Some("/data".into()), ..flags() }.check().unwrap();
        assert_eq!(settings.peers.into_iter().collect::<Vec<_>>(), [("b".to_owned(), "10.0.0.2:4000".parse().unwrap())]);
        assert!(Flags { peers: peers(), ..flags() }.check().unwrap_err().to_string().contains("--data"));
        let many = (0..7).map(|n| (n.to_string(), "10.0.0.2:4000".parse().unwrap())).collect();
        assert!(Flags { peers: Some(many), data: Some("/data".into()), ..flags() }.check().is_err());
        assert!(parse_peers("b").unwrap_err().contains("NAME=ADDR"));
        assert!(parse_peers("b=host").unwrap_err().contains("`host`"));
    }
}
