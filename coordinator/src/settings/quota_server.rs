//! The server on which coordinators share quotas.

use serde::{Deserialize, Serialize};
use std::{path::PathBuf, time::Duration};
use tidemill_net::config::{ConfigError, invalid};
use tidemill_tenancy::shared::{
    Settings, WAIT_MAX,
    server::{Address, ServerError, ServerKind},
};

const PREFIX: &str = "tidemill";

/// A Redis or Valkey server on which all coordinators share quotas. While it fails, `quota_share` applies.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct QuotaServerFlags {
    /// Addresses, such as `["rediss://USER:PASSWORD@quota.example:6379/0"]`, or `["redis+unix:///run/redis.sock"]`; of one server, of
    /// sentinels, or of some nodes of a cluster. User and password are the server's, also where the addresses are sentinels'
    pub urls: Vec<String>,
    /// Kind of the addresses: single, sentinel or cluster [default: single]
    pub kind: Option<String>,
    /// Name by which sentinels know the server [default: mymaster]
    pub master: Option<String>,
    /// PEM file with the authorities that the server's certificate may come from [default: this machine's]
    pub ca: Option<PathBuf>,
    /// Lets connections to other machines be unencrypted: `redis://` instead of `rediss://` [default: false]
    pub plain: Option<bool>,
    /// Beginning of all keys on the server: clusters that share a server need different ones [default: tidemill]
    pub prefix: Option<String>,
    /// Longest time that a request waits for the server, from 1 to 1000 [default: 3.5]
    pub wait_ms: Option<f64>,
}

impl QuotaServerFlags {
    pub(super) fn check(self) -> Result<Settings, ConfigError> {
        let is_sentinel = self.kind.as_deref() == Some("sentinel");
        if let Some(master) = self.master.as_ref().filter(|_| !is_sentinel) {
            return Err(invalid("quota_server.master", master, "it is for sentinels: say kind = \"sentinel\""));
        }
        let kind = match self.kind.as_deref() {
            None | Some("single") => ServerKind::Single,
            Some("sentinel") => ServerKind::Sentinel { master: self.master.unwrap_or_else(|| "mymaster".into()) },
            Some("cluster") => ServerKind::Cluster,
            Some(other) => return Err(invalid("quota_server.kind", other, "must be single, sentinel or cluster")),
        };
        let prefix = self.prefix.unwrap_or_else(|| PREFIX.into());
        if prefix.is_empty() || prefix.contains(['{', '}']) {
            return Err(invalid("quota_server.prefix", &prefix, "must not be empty, and must not contain braces"));
        }
        let wait = match self.wait_ms {
            None => WAIT_MAX,
            Some(wait) if (1.0..=1000.0).contains(&wait) => Duration::from_secs_f64(wait / 1e3),
            Some(wait) => return Err(invalid("quota_server.wait_ms", wait, "must be from 1 to 1000")),
        };
        let address = Address { urls: self.urls, kind, ca: self.ca, plain: self.plain.unwrap_or(false) };
        // The addresses may contain a password.
        let server = address.check().map_err(|error| match error {
            ServerError::UnusedCa | ServerError::Ca { .. } => invalid("quota_server.ca", "(the file)", error.to_string()),
            _ => invalid("quota_server.urls", "(the addresses)", error.to_string()),
        })?;
        Ok(Settings { wait, ..Settings::new(server, prefix) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(file: &str) -> Result<String, String> {
        let flags: QuotaServerFlags = toml::from_str(file).map_err(|error| error.to_string())?;
        flags.check().map(|settings| format!("{settings:?}")).map_err(|error| error.to_string())
    }

    #[test]
    fn a_section_names_servers_and_not_their_passwords() {
        for good in [
            "urls = ['redis://:secret@127.0.0.1']",
            "urls = ['rediss://u:secret@a.example', 'rediss://u:secret@b.example']\nkind = 'cluster'",
            "urls = ['redis://u:secret@10.0.0.1:26379']\nkind = 'sentinel'\nmaster = 'quota'\nplain = true",
        ] {
            assert!(!check(good).unwrap().contains("secret"), "{good}");
        }
        for (file, words) in [
            ("", "urls"),
            ("urls = []", "quota_server.urls"),
            ("urls = ['redis://u:secret@a.example']", "plain"),
            ("urls = ['secret']", "quota_server.urls"),
            ("urls = ['redis://localhost']\nkind = 'pair'", "quota_server.kind"),
            ("urls = ['redis://localhost']\nmaster = 'quota'", "quota_server.master"),
            ("urls = ['redis://localhost']\nprefix = '{a}'", "quota_server.prefix"),
            ("urls = ['redis://localhost']\nwait_ms = 0.5", "quota_server.wait_ms"),
            ("urls = ['redis://localhost']\nwait_ms = 5000.0", "quota_server.wait_ms"),
            ("urls = ['redis://localhost']\nwait_ms = nan", "quota_server.wait_ms"),
            ("urls = ['rediss://localhost']\nca = '/not/there'", "quota_server.ca"),
            ("url = 'redis://localhost'", "url"),
        ] {
            let error = check(file).unwrap_err();
            assert!(error.contains(words) && (file.contains("['secret']") || !error.contains("secret")), "{file}: {error}");
        }
    }
}
