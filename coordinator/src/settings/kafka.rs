//! The settings of Kafka topics that events are sent to.

use serde::{Deserialize, Serialize};
use std::path::PathBuf;
use tidemill_net::config::{ConfigError, invalid};
use tidemill_tenancy::sink::kafka::{Encryption, IS_BUILT, Login, Mechanism, Settings, check_broker, check_topic};

/// Kafka topics that events are sent to, keyed by their tenants. A log without a topic is not sent.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KafkaFlags {
    /// Addresses of some brokers, such as `["k1.example:9093", "k2.example:9093"]`
    pub brokers: Vec<String>,
    /// Topic of usage events [default: none]
    pub usage_topic: Option<String>,
    /// Topic of the audit log's records [default: none]
    pub audit_topic: Option<String>,
    /// Topic of users' opinions [default: none]
    pub feedback_topic: Option<String>,
    /// Connections are unencrypted: for brokers on this machine, or on a network where others neither read nor write [default: false]
    pub plain: Option<bool>,
    /// PEM file with the authorities that brokers' certificates may come from [default: this machine's]
    pub ca: Option<PathBuf>,
    /// PEM file with a certificate that this client shows; needs `key` [default: none]
    pub cert: Option<PathBuf>,
    /// PEM file with the certificate's private key [default: none]
    pub key: Option<PathBuf>,
    /// SASL mechanism: SCRAM-SHA-512, SCRAM-SHA-256 or PLAIN [default: SCRAM-SHA-512]
    pub mechanism: Option<String>,
    /// User for SASL; needs `password` [default: none]
    pub user: Option<String>,
    /// File with the user's password; read again after failures [default: none]
    pub password: Option<PathBuf>,
}

/// A Kafka cluster, and the topics of logs.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KafkaSettings {
    pub cluster: Settings,
    pub usage: Option<String>,
    pub audit: Option<String>,
    pub feedback: Option<String>,
}

impl KafkaFlags {
    /// `source` is this coordinator's name.
    pub(super) fn check(self, source: &str, has_data: bool) -> Result<KafkaSettings, ConfigError> {
        if !IS_BUILT {
            let reason = "this program was built without Kafka: build it with the feature `tidemill-coordinator/kafka`";
            return Err(invalid("kafka", "(the section)", reason));
        }
        if !has_data {
            return Err(invalid("kafka", "(the section)", "events come from logs, which need a place: say where with --data"));
        }
        let topics = [&self.usage_topic, &self.audit_topic, &self.feedback_topic];
        if topics.iter().all(|topic| topic.is_none()) {
            return Err(invalid("kafka", "(the section)", "say what is sent: usage_topic, audit_topic or feedback_topic"));
        }
        for (key, topic) in ["kafka.usage_topic", "kafka.audit_topic", "kafka.feedback_topic"].into_iter().zip(topics) {
            if let Some(topic) = topic {
                check_topic(topic).map_err(|error| invalid(key, topic, error.to_string()))?;
            }
        }
        if self.brokers.is_empty() {
            return Err(invalid("kafka.brokers", "[]", "there must be at least one"));
        }
        let encryption = if self.plain == Some(true) {
            if let Some(file) = self.ca.as_ref().or(self.cert.as_ref()).or(self.key.as_ref()) {
                return Err(invalid(
                    "kafka.plain",
                    true,
                    format!("{} is for encrypted connections: leave one of them out", file.display()),
                ));
            }
            Encryption::Plain
        } else {
            let client = match (self.cert, self.key) {
                (None, None) => None,
                (Some(cert), Some(key)) => Some((cert, key)),
                (Some(cert), None) => return Err(invalid("kafka.cert", cert.display(), "needs key, the file with its private key")),
                (None, Some(key)) => return Err(invalid("kafka.key", key.display(), "needs cert, the file with its certificate")),
            };
            Encryption::Tls { ca: self.ca, client }
        };
        for broker in &self.brokers {
            check_broker(broker).map_err(|error| invalid("kafka.brokers", broker, error.to_string()))?;
        }
        let login = match (self.user, self.password) {
            (None, None) => {
                if let Some(mechanism) = self.mechanism {
                    return Err(invalid("kafka.mechanism", mechanism, "is for a user: say which, with its password"));
                }
                None
            }
            (Some(user), Some(password)) => Some(Login { mechanism: mechanism(self.mechanism)?, user, password }),
            (Some(user), None) => return Err(invalid("kafka.user", user, "needs password, the file with it")),
            (None, Some(password)) => return Err(invalid("kafka.password", password.display(), "needs user, whose it is")),
        };
        let cluster = Settings { brokers: self.brokers, encryption, login, source: source.to_owned() };
        Ok(KafkaSettings { cluster, usage: self.usage_topic, audit: self.audit_topic, feedback: self.feedback_topic })
    }
}

fn mechanism(name: Option<String>) -> Result<Mechanism, ConfigError> {
    let Some(name) = name else { return Ok(Mechanism::ScramSha512) };
    let known = Mechanism::ALL.into_iter().find(|mechanism| mechanism.name() == name);
    let names = Mechanism::ALL.map(Mechanism::name).join(", ");
    known.ok_or_else(|| invalid("kafka.mechanism", &name, format!("must be one of {names}")))
}

impl KafkaSettings {
    /// Checks that the logs whose events are to be sent are kept.
    pub(super) fn check_logs(&self, has_audit: bool, has_feedback: bool) -> Result<(), ConfigError> {
        for (key, topic, is_kept, flag) in [
            ("kafka.audit_topic", &self.audit, has_audit, "--audit DAYS"),
            ("kafka.feedback_topic", &self.feedback, has_feedback, "--feedback"),
        ] {
            if let (Some(topic), false) = (topic, is_kept) {
                return Err(invalid(key, topic, format!("there is no such log: it begins with {flag}")));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(file: &str) -> Result<KafkaSettings, String> {
        let flags: KafkaFlags = toml::from_str(file).map_err(|error| error.to_string())?;
        flags.check("c0", true).map_err(|error| error.to_string())
    }

    #[cfg(not(feature = "kafka"))]
    #[test]
    fn a_program_without_it_says_so() {
        let error = check("brokers = ['k1.example:9093']\nusage_topic = 'usage'").unwrap_err();
        assert!(error.contains("built without Kafka") && error.contains("tidemill-coordinator/kafka"), "{error}");
    }

    #[cfg(feature = "kafka")]
    #[test]
    fn a_section_names_brokers_topics_and_how_they_are_reached() {
        let with = |more: &str| check(&format!("brokers = ['k1.example:9093']\nusage_topic = 'tidemill.usage'\n{more}"));
        let settings = with("user = 'me'\npassword = '/etc/tidemill/kafka.password'").unwrap();
        assert_eq!(settings.cluster.encryption, Encryption::Tls { ca: None, client: None });
        assert_eq!(settings.cluster.login.unwrap().mechanism, Mechanism::ScramSha512);
        assert_eq!(with("plain = true").unwrap().cluster.encryption, Encryption::Plain);
        for (file, words) in [
            ("usage_topic = 'a'", "brokers"),
            ("brokers = []\nusage_topic = 'a'", "kafka.brokers"),
            ("brokers = ['k1']\nusage_topic = 'a'", "HOST:PORT"),
            ("brokers = ['k1:9092']", "usage_topic"),
            ("brokers = ['k1:9092']\nusage_topic = 'a b'", "kafka.usage_topic"),
            ("brokers = ['k1:9092']\ntopic = 'a'", "topic"),
        ] {
            let error = check(file).unwrap_err();
            assert!(error.contains(words), "{file}: {error}");
        }
        for (more, words) in [
            ("plain = true\nca = '/ca.pem'", "kafka.plain"),
            ("cert = '/c.pem'", "kafka.cert"),
            ("key = '/k.pem'", "kafka.key"),
            ("user = 'me'", "kafka.user"),
            ("password = '/p'", "kafka.password"),
            ("mechanism = 'PLAIN'", "kafka.mechanism"),
            ("user = 'me'\npassword = '/p'\nmechanism = 'GSSAPI'", "SCRAM-SHA-512"),
        ] {
            let error = with(more).unwrap_err();
            assert!(error.contains(words), "{more}: {error}");
        }
        let settings = check("brokers = ['k1:9092']\naudit_topic = 'a'\nfeedback_topic = 'f'").unwrap();
        let words = |audit, feedback| settings.check_logs(audit, feedback).map_err(|error| error.to_string());
        assert_eq!(words(true, true), Ok(()));
        assert!(words(false, true).unwrap_err().contains("--audit") && words(true, false).unwrap_err().contains("--feedback"));
    }
}
