//! Events as messages of a Kafka topic, keyed by their tenants.
//!
//! A message's value is the entry of the log; its headers are `id`, the same whenever the entry is sent again, and `source`, the
//! coordinator. The producer is idempotent and waits for all replicas (`acks=all`); after a failure another one begins at the last position
//! that is on disk, so that each event arrives at least once.
//!
//! - `producer`: librdkafka, with the feature `kafka`

#[cfg(feature = "kafka")]
mod producer;

#[cfg(feature = "kafka")]
pub use producer::Kafka;

use std::path::PathBuf;

/// Whether this program can send to Kafka.
pub const IS_BUILT: bool = cfg!(feature = "kafka");

/// A Kafka cluster, and how it is reached.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Addresses of some brokers, by which the others are found.
    pub brokers: Vec<String>,
    pub encryption: Encryption,
    pub login: Option<Login>,
    /// The name of the sender: several coordinators may send to one topic.
    pub source: String,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Encryption {
    Plain,
    Tls {
        /// A PEM file with the authorities that certificates may come from; `None` for this machine's.
        ca: Option<PathBuf>,
        /// PEM files with a certificate of this client, and its key.
        client: Option<(PathBuf, PathBuf)>,
    },
}

/// A user and its password (SASL).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Login {
    pub mechanism: Mechanism,
    pub user: String,
    /// The file of the password, read whenever a producer begins.
    pub password: PathBuf,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mechanism {
    Plain,
    ScramSha256,
    ScramSha512,
}

impl Mechanism {
    pub const ALL: [Self; 3] = [Self::Plain, Self::ScramSha256, Self::ScramSha512];

    pub fn name(self) -> &'static str {
        match self {
            Self::Plain => "PLAIN",
            Self::ScramSha256 => "SCRAM-SHA-256",
            Self::ScramSha512 => "SCRAM-SHA-512",
        }
    }
}

/// The reason why a broker's address, or a topic's name, is refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    #[error("must be HOST:PORT")]
    Broker,
    #[error("must be 1 to 249 letters, digits, `.`, `_` and `-`")]
    Topic,
}

/// Checks a broker's address.
pub fn check_broker(address: &str) -> Result<(), NameError> {
    let (host, port) = address.rsplit_once(':').ok_or(NameError::Broker)?;
    let is_name = !host.is_empty() && !host.contains(['/', ',', ' ', '@']);
    if is_name && port.parse::<u16>().is_ok() { Ok(()) } else { Err(NameError::Broker) }
}

/// Checks a topic's name, as brokers do.
pub fn check_topic(name: &str) -> Result<(), NameError> {
    let is_name = (1..=249).contains(&name.len()) && ![".", ".."].contains(&name);
    let is_known = |letter: char| letter.is_ascii_alphanumeric() || ['.', '_', '-'].contains(&letter);
    if is_name && name.chars().all(is_known) { Ok(()) } else { Err(NameError::Topic) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn brokers_have_a_host_and_a_port() {
        for (address, is_good) in [
            ("k1.example:9093", true),
            ("127.0.0.1:9092", true),
            ("[::1]:9092", true),
            ("k1.example", false),
            ("k1.example:kafka", false),
            ("http://k1.example:9092", false),
            ("k1:9092,k2:9092", false),
            (":9092", false),
        ] {
            assert_eq!(check_broker(address).is_ok(), is_good, "{address}");
        }
    }

    #[test]
    fn topics_are_named_as_brokers_name_them() {
        for (name, is_good) in [("tidemill.usage", true), ("a-b_C9", true), ("", false), ("..", false), ("a b", false), ("é", false)] {
            assert_eq!(check_topic(name).is_ok(), is_good, "{name}");
        }
        assert!(check_topic(&"x".repeat(249)).is_ok() && check_topic(&"x".repeat(250)).is_err());
    }
}
