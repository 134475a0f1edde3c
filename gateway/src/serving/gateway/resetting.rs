//! The end of what is cached for a model, at an operator's wish: the coordinators agree on a number, and with it a new era begins at each.

use super::Gateway;
use crate::{
    base::{
        registry::{CACHE_RESET, ChangeError},
        stamp::unix_ms,
    },
    requests::error::ApiError,
};
use serde_json::json;
use std::time::{Duration, Instant};

/// The attempts beside operators who reset the same cache at the same moment.
const ATTEMPTS_MAX: usize = 5;
/// The time within which what was agreed on has an effect here.
const HEARD_MAX: Duration = Duration::from_secs(5);
const LOOK_EVERY: Duration = Duration::from_millis(10);

impl Gateway {
    /// Makes all cached blocks and answers of this model unfindable, at all coordinators. Here, they are when it returns.
    pub async fn reset_cache(&self) -> Result<(), ApiError> {
        let name = self.model_name();
        let era = || self.model.backend.origin().map(|origin| origin.era);
        let before = era();
        let mut attempts = 0;
        loop {
            let earlier = self.registry().records(Some(CACHE_RESET), Some(name)).pop();
            let (number, revision) = earlier.map_or((0, 0), |record| (record.value.as_u64().unwrap_or(0), record.revision));
            // Clocks of coordinators differ, and no reset may repeat an earlier one.
            let number = unix_ms().max(number.saturating_add(1));
            attempts += 1;
            match self.registry().put(CACHE_RESET.to_owned(), name.to_owned(), json!(number), Some(revision)).await {
                Ok(_) => break,
                Err(ChangeError::Conflict(_)) if attempts < ATTEMPTS_MAX => {}
                Err(error) => return Err(ApiError::not_now(format!("the cache of `{name}` was not reset: {error}; try again"))),
            }
        }
        let asked = Instant::now();
        // Without engines there is no era, and the next one begins with them.
        while before.is_some() && era() == before {
            if asked.elapsed() > HEARD_MAX {
                let message = format!("the cache of `{name}` is reset, but this coordinator has not heard of it yet; try again");
                return Err(ApiError::not_now(message));
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        tracing::info!(model = name, "the cache was reset: no earlier block or answer is found");
        Ok(())
    }
}
