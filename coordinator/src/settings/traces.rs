//! The collector to which traces of requests are sent.

use serde::{Deserialize, Serialize};
use std::{convert::Infallible, path::PathBuf, str::FromStr};
use tidemill_gateway::traces::{Sampling, collector};
use tidemill_net::config::{ConfigError, invalid};
use tidemill_tenancy::web::Target;

/// The path of OTLP over HTTP, for a URL without a path.
const PATH: &str = "v1/traces";
const SHARE: f64 = 0.01;

/// A collector of traces: its address as a flag, or a section `[traces]`.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TracesFlags {
    /// Address of a collector that takes OTLP over HTTP, such as http://127.0.0.1:4318; without a path, `/v1/traces` is added
    pub url: String,
    /// Share of the traces that are kept though nothing went wrong, from 0 to 1 [default: 0.01]
    pub share: Option<f64>,
    /// Whether the traces of callers that trace (`traceparent` with the flag `sampled`) are kept, too: for callers that are trusted
    /// [default: false]
    pub callers: Option<bool>,
    /// File with a token that is sent as `Authorization: Bearer`; read before each request [default: none]
    pub token: Option<PathBuf>,
    /// PEM file with the authorities that the URL's certificate may come from [default: those that browsers trust]
    pub ca: Option<PathBuf>,
}

/// Traces of requests, checked.
#[derive(Clone, Debug)]
pub struct TracesSettings {
    pub collector: collector::Settings,
    pub sampling: Sampling,
}

impl FromStr for TracesFlags {
    type Err = Infallible;

    fn from_str(url: &str) -> Result<Self, Infallible> {
        Ok(Self { url: url.to_owned(), share: None, callers: None, token: None, ca: None })
    }
}

impl TracesFlags {
    /// `instance` is this coordinator's name.
    pub(super) fn check(self, instance: &str) -> Result<TracesSettings, ConfigError> {
        let share = self.share.unwrap_or(SHARE);
        if !(0.0..=1.0).contains(&share) {
            return Err(invalid("traces.share", share, "a share is from 0 to 1"));
        }
        let sampling = Sampling { share, callers: self.callers.unwrap_or(false) };
        let after_scheme = self.url.split_once("://").map_or(&*self.url, |(_, rest)| rest);
        let url = match after_scheme.trim_end_matches('/').contains('/') {
            true => self.url,
            false => format!("{}/{PATH}", self.url.trim_end_matches('/')),
        };
        let target = Target { url, ca: self.ca };
        target.check().map_err(|error| invalid("traces.url", &target.url, error.to_string()))?;
        Ok(TracesSettings { collector: collector::Settings { target, token: self.token, instance: instance.to_owned() }, sampling })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_collectors_path_is_added_where_there_is_none() {
        let url = |given: &str| given.parse::<TracesFlags>().unwrap().check("c").map(|settings| settings.collector.target.url);
        assert_eq!(url("http://127.0.0.1:4318").unwrap(), "http://127.0.0.1:4318/v1/traces");
        assert_eq!(url("https://collector.example/").unwrap(), "https://collector.example/v1/traces");
        assert_eq!(url("https://collector.example/otlp/v1/traces").unwrap(), "https://collector.example/otlp/v1/traces");
        for bad in ["collector.example:4318", "http://collector.example:4318", "grpc://127.0.0.1:4317", ""] {
            assert!(url(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn a_share_is_between_nothing_and_all() {
        let share = |share| TracesFlags { share: Some(share), ..TracesFlags::from_str("http://127.0.0.1:1").unwrap() }.check("c");
        assert!(share(0.0).is_ok() && share(1.0).is_ok());
        assert!(share(-0.1).is_err() && share(1.1).is_err() && share(f64::NAN).is_err());
    }
}
