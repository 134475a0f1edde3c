//! The senders of events to Kafka: one for each log that has a topic.

use crate::settings::kafka::KafkaSettings;
use std::{path::Path, sync::Arc};
use tidemill_gateway::features::feedback::{self, Feedback};
use tidemill_tenancy::sink::{CursorError, Sink};

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Cursor(#[from] CursorError),
    #[error(transparent)]
    Feedback(#[from] feedback::OpenError),
}

/// Starts a sender for each log that has a topic.
#[cfg(feature = "kafka")]
pub fn start(settings: KafkaSettings, data: &Path, feedback: Option<&Arc<Feedback>>) -> Result<Vec<Sink>, StartError> {
    use tidemill_gateway::features::feedback::sent::Opinions;
    use tidemill_tenancy::{
        audit::Line,
        sink::{Journaled, kafka::Kafka},
        usage::Event,
    };

    let KafkaSettings { cluster, usage, audit, feedback: opinions } = settings;
    let cursor = |log: &str| data.join(format!("{log}-kafka.json"));
    let to = |topic| Kafka::new(cluster.clone(), topic);
    let mut sinks = Vec::new();
    if let Some(topic) = usage {
        let log = Journaled::<Event>::new(&data.join("usage"), &cluster.source);
        sinks.push(Sink::start("usage", cursor("usage"), log, to(topic))?);
    }
    if let Some(topic) = audit {
        let log = Journaled::<Line>::new(&data.join("audit"), &cluster.source);
        sinks.push(Sink::start("audit", cursor("audit"), log, to(topic))?);
    }
    if let (Some(topic), Some(feedback)) = (opinions, feedback) {
        let log = Opinions::new(Arc::clone(feedback))?;
        sinks.push(Sink::start("feedback", cursor("feedback"), log, to(topic))?);
    }
    Ok(sinks)
}

/// Starts none: without the feature `kafka`, the settings refuse the section.
#[cfg(not(feature = "kafka"))]
pub fn start(_: KafkaSettings, _: &Path, _: Option<&Arc<Feedback>>) -> Result<Vec<Sink>, StartError> {
    Ok(Vec::new())
}
