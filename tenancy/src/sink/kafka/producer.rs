//! The producer: librdkafka, polled by the thread that follows the log.

use super::{Encryption, Login, Settings};
use crate::sink::{Collector, Message};
use parking_lot::Mutex;
use rdkafka::{
    ClientConfig, ClientContext,
    config::RDKafkaLogLevel,
    error::{KafkaError, RDKafkaErrorCode},
    message::{Header, OwnedHeaders},
    producer::{BaseProducer, BaseRecord, DeliveryResult, Producer, ProducerContext},
};
use std::{
    fs,
    time::{Duration, Instant},
};

/// The longest time that a message is tried, retries included.
const ARRIVES_WITHIN: Duration = Duration::from_secs(20);
/// The time after which a group is given up whose messages librdkafka should have given up itself.
const GIVEN_UP_AFTER: Duration = Duration::from_secs(30);
/// The longest time that one poll for reports takes.
const POLL: Duration = Duration::from_millis(100);
/// The time after which a topic that brokers do not know is reported, rather than waited for.
const TOPIC_KNOWN_WITHIN: Duration = Duration::from_secs(5);

pub struct Kafka {
    settings: Settings,
    topic: String,
    /// `None` at the start and after a failure: what the last producer still had is given up with it, and does not arrive out of turn.
    producer: Option<BaseProducer<Reports>>,
    arrives_within: Duration,
}

/// The reports on the messages of a group.
#[derive(Default)]
struct Reports(Mutex<Reported>);

#[derive(Default)]
struct Reported {
    arrived: usize,
    failed: usize,
    /// The failure of the first message that failed, and the last problem with a broker.
    failure: Option<String>,
    problem: Option<String>,
}

impl ClientContext for Reports {
    fn log(&self, _: RDKafkaLogLevel, facility: &str, line: &str) {
        tracing::debug!(facility, line, "kafka");
    }

    fn error(&self, _: KafkaError, reason: &str) {
        // That all brokers are down follows a problem that says why.
        if self.0.lock().problem.is_none() || !reason.contains("brokers are down") {
            self.0.lock().problem = Some(reason.to_owned());
        }
    }
}

impl ProducerContext for Reports {
    type DeliveryOpaque = ();

    fn delivery(&self, result: &DeliveryResult<'_>, (): ()) {
        let mut reported = self.0.lock();
        match result {
            Ok(_) => reported.arrived += 1,
            Err((error, _)) => {
                reported.failed += 1;
                reported.failure.get_or_insert_with(|| said(error));
            }
        }
    }
}

/// The words of a broker, or of librdkafka, without the names of the library's types.
fn said(error: &KafkaError) -> String {
    error.rdkafka_error_code().map_or_else(|| error.to_string(), |code| code.to_string())
}

impl Kafka {
    pub fn new(settings: Settings, topic: String) -> Self {
        Self { settings, topic, producer: None, arrives_within: ARRIVES_WITHIN }
    }

    fn producer(&self) -> Result<BaseProducer<Reports>, String> {
        let mut config = ClientConfig::new();
        let ms = |time: Duration| time.as_millis().to_string();
        config
            .set("bootstrap.servers", self.settings.brokers.join(","))
            .set("client.id", format!("tidemill-{}", self.settings.source))
            .set("enable.idempotence", "true")
            .set("acks", "all")
            .set("compression.type", "lz4")
            // As Java's clients choose it.
            .set("partitioner", "murmur2_random")
            .set("linger.ms", "5")
            .set("message.timeout.ms", ms(self.arrives_within))
            .set("request.timeout.ms", ms(self.arrives_within / 2))
            .set("socket.timeout.ms", ms(self.arrives_within / 2))
            .set("topic.metadata.propagation.max.ms", ms(TOPIC_KNOWN_WITHIN.min(self.arrives_within / 2)))
            .set("reconnect.backoff.max.ms", "2000")
            .set_log_level(RDKafkaLogLevel::Warning);
        let is_tls = match &self.settings.encryption {
            Encryption::Plain => false,
            Encryption::Tls { ca, client } => {
                for file in ca.iter().chain(client.iter().flat_map(|(cert, key)| [cert, key])) {
                    // OpenSSL does not say which file it cannot read.
                    fs::read(file).map_err(|error| format!("{} cannot be read: {error}", file.display()))?;
                }
                if let Some(ca) = ca {
                    config.set("ssl.ca.location", ca.to_string_lossy());
                }
                if let Some((cert, key)) = client {
                    config.set("ssl.certificate.location", cert.to_string_lossy()).set("ssl.key.location", key.to_string_lossy());
                }
                true
            }
        };
        if let Some(Login { mechanism, user, password }) = &self.settings.login {
            let read =
                fs::read_to_string(password).map_err(|error| format!("the password in {} cannot be read: {error}", password.display()));
            config.set("sasl.mechanism", mechanism.name()).set("sasl.username", user).set("sasl.password", read?.trim_end());
        }
        let protocol = match (is_tls, self.settings.login.is_some()) {
            (false, false) => "plaintext",
            (false, true) => "sasl_plaintext",
            (true, false) => "ssl",
            (true, true) => "sasl_ssl",
        };
        config.set("security.protocol", protocol);
        // Its causes name a file or a setting.
        config.create_with_context(Reports::default()).map_err(|error| format!("no producer could be made: {error}"))
    }

    /// Sends a group by a producer that has nothing left of an earlier one.
    fn send_by(&self, producer: &BaseProducer<Reports>, messages: &[Message]) -> Result<(), String> {
        *producer.context().0.lock() = Reported::default();
        let give_up = Instant::now() + GIVEN_UP_AFTER;
        for message in messages {
            self.queue(producer, message, give_up)?;
        }
        loop {
            {
                let reported = producer.context().0.lock();
                if reported.arrived == messages.len() {
                    return Ok(());
                }
                // The first failure is enough: the rest is sent again.
                if reported.failed > 0 || Instant::now() > give_up {
                    return Err(self.problem(&reported, messages.len()));
                }
            }
            producer.poll(POLL);
        }
    }

    fn queue(&self, producer: &BaseProducer<Reports>, message: &Message, give_up: Instant) -> Result<(), String> {
        let header = |key, value| Header { key, value: Some(value) };
        let headers = OwnedHeaders::new().insert(header("id", &message.id)).insert(header("source", &self.settings.source));
        let mut record = BaseRecord::<str, str>::to(&self.topic).payload(&message.json).headers(headers);
        if !message.tenant.is_empty() {
            record = record.key(&message.tenant);
        }
        loop {
            match producer.send(record) {
                Ok(()) => return Ok(()),
                Err((KafkaError::MessageProduction(RDKafkaErrorCode::QueueFull), again)) if Instant::now() < give_up => {
                    producer.poll(POLL);
                    record = again;
                }
                Err((error, _)) => return Err(format!("event {} is not taken for topic `{}`: {}", message.id, self.topic, said(&error))),
            }
        }
    }

    fn problem(&self, reported: &Reported, all: usize) -> String {
        let failure = reported.failure.as_deref().unwrap_or("no answer");
        let problem = reported.problem.as_ref().map_or(String::new(), |problem| format!(" ({problem})"));
        format!("{} of {all} events did not arrive in topic `{}`: {failure}{problem}", all - reported.arrived, self.topic)
    }
}

impl Collector for Kafka {
    fn send(&mut self, messages: &[Message]) -> Result<(), String> {
        let producer = self.producer.take().map_or_else(|| self.producer(), Ok)?;
        self.send_by(&producer, messages)?;
        self.producer = Some(producer);
        Ok(())
    }

    fn target(&self) -> String {
        format!("{} at {}", self.topic, self.settings.brokers.join(","))
    }
}

#[cfg(test)]
mod tests;
