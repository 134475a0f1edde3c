//! The settings of a model that reads texts for the coordinator itself.

use super::{bounds::within, models::ModelSettings};
use std::{collections::BTreeMap, time::Duration};
use tidemill_gateway::serving::encoder::EncoderSettings;
use tidemill_net::config::{ConfigError, invalid};

/// The default time in milliseconds that a request waits for the embedding of its question.
const WAIT_MS: u64 = 100;
const WAIT_MS_MAX: u64 = 60_000;

/// Checks the keys of an encoder. Returns `None` if no model is named.
pub(super) fn encoder(
    (model_key, model): (&'static str, Option<String>),
    (wait_key, wait_ms): (&'static str, Option<u64>),
    models: &[ModelSettings],
    aliases: &BTreeMap<String, String>,
) -> Result<Option<EncoderSettings>, ConfigError> {
    let served = |model: &&String| aliases.contains_key(*model) || models.iter().any(|served| served.name == **model);
    if let Some(model) = model.as_ref().filter(|model| !served(model)) {
        return Err(invalid(model_key, model, "must name a served model"));
    }
    let wait = Duration::from_millis(within(wait_key, wait_ms.unwrap_or(WAIT_MS), 1..=WAIT_MS_MAX)?);
    Ok(model.map(|model| EncoderSettings { model, wait }))
}
