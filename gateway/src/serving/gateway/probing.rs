//! A token through every model, for probes that ask for more than links: one run at a time, whose result all of them share.

use super::{
    Gateway,
    probed::{Probed, ProbedModel},
};
use crate::{
    requests::error::ApiError,
    serving::{
        backend::{Backend, Submission},
        embedded,
    },
};
use futures_util::future::join_all;
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_cluster::{NewRequest, Outcome, RequestEvent, class::ClassId};
use tidemill_proto::{
    message::{Embeds, ModelKind},
    sampling::{Sampling, StopRule},
    tokens::Tokens,
};
use tokio::time::timeout;

/// The time that a model has for its token, in the queue too.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// The age to which a result is shared, so that any number of probes costs a token a second at most.
const SHARED_MAX: Duration = Duration::from_secs(1);
/// The text that models are given; it is less than a block, so it leaves nothing in any cache.
const TEXT: &str = "ready";

impl Gateway {
    /// Has every model compute a token, at no tenant's charge. A result of the last second is returned again.
    pub async fn probe_models(&self) -> Vec<ProbedModel> {
        let mut last = self.shared.probed.lock().await;
        if let Some(probed) = last.as_ref().filter(|probed| probed.ended.elapsed() < SHARED_MAX) {
            return probed.models.clone();
        }
        let models: Vec<Self> = self.models().collect();
        let models = join_all(models.iter().map(Self::probe)).await;
        *last = Some(Probed { ended: Instant::now(), models: models.clone() });
        models
    }

    async fn probe(&self) -> ProbedModel {
        let began = Instant::now();
        let answered = match timeout(ANSWER_MAX, self.one_token()).await {
            Ok(answered) => answered.map(|()| began.elapsed()).map_err(|error| error.message().to_owned()),
            Err(_) => Err(format!("it computed nothing within {} s", ANSWER_MAX.as_secs())),
        };
        ProbedModel { name: self.model_name().to_owned(), answered }
    }

    async fn one_token(&self) -> Result<(), ApiError> {
        self.context_tokens()?;
        let mut tokens = self.text().tokenizer.encode(TEXT, true).map_err(|error| ApiError::internal(error.to_string()))?;
        if tokens.is_empty() {
            tokens.push(0);
        }
        let tokens = Tokens::from(tokens);
        let backend: Arc<dyn Backend> = Arc::clone(&self.model.backend);
        let embeds = Embeds { second_text: tokens.len() as u32 };
        let read = NewRequest::embedding(tokens, embeds, Vec::new(), ClassId::default(), ANSWER_MAX);
        if self.text().config.identity.kind != ModelKind::Decoder {
            return embedded::collect(Submission::new(backend, vec![read])?, 1).await.map(drop);
        }
        let stop = StopRule { max_tokens: 1, ..StopRule::default() };
        let written = NewRequest { embeds: None, stop, sampling: Sampling { temperature: 0.0, ..Sampling::default() }, ..read };
        let mut submission = Submission::new(backend, vec![written])?;
        while let Some((_, event)) = submission.next().await {
            match event {
                RequestEvent::Finished { outcome: Outcome::Failed(failure), .. } => return Err(failure.into()),
                RequestEvent::Finished { .. } => return Ok(()),
                _ => {}
            }
        }
        Err(ApiError::internal("its events ended before its token came"))
    }
}
