//! Semantic cache queries: whether the answer to a similar question is acceptable, and the question to look up, as a vector of the encoder.
//! The encoder is asked like the moderator, bypassing everything meant for clients, and at no tenant's charge.

use super::Gateway;
use crate::{
    cache::semantic::{Inquiry, patience::Reading, question::Question, vector::Vector},
    dialog::Dialog,
    metrics,
    requests::options::Options,
    serving::{
        backend::{Backend, Submission},
        embedded,
        encoder::Encoder,
    },
};
use std::{sync::Arc, time::Instant};
use tidemill_cluster::{NewRequest, class::ClassId};
use tidemill_proto::{message::Embeds, tokens::Tokens};
use tokio::time::timeout;

/// A placeholder for the question in the parts that must be equal.
const PLACE: &str = "question";

impl Gateway {
    /// The cache query for a dialog, if its tenant has opted in and the dialog is a single question.
    pub(crate) fn question(&self, dialog: &Dialog, options: &Options) -> Option<Inquiry> {
        if !options.similar_will_do || self.shared.similar.is_none() || self.is_shadow() || !dialog.tools.is_empty() || dialog.continues {
            return None;
        }
        self.tenants().tenant(self.tenant()?).filter(|tenant| tenant.semantic_cache)?;
        let mut rest = dialog.clone();
        let (last, before) = rest.messages.split_last_mut()?;
        if last.role != "user" || before.iter().any(|message| !matches!(message.role.as_str(), "system" | "developer")) {
            return None;
        }
        let text = last.content.replace(PLACE.to_owned())?;
        let question = Question::read(&text)?;
        let rest = self.render("messages", &rest).ok()?;
        let mut hasher = blake3::Hasher::new();
        hasher.update(&(self.model.name.len() as u64).to_le_bytes()).update(self.model.name.as_bytes()).update(rest.prompt.text.as_bytes());
        let setting = hasher.finalize().into();
        Some(Inquiry { question, text, setting, is_open: options.max_tokens.is_none(), response: String::new() })
    }

    /// Completes the cache query with the id of the coming response and the question's vector. Without a vector there is no query: the
    /// answer is computed, and not kept.
    pub async fn complete_question(&self, options: &mut Options, response: &str) {
        let (Some(mut inquiry), Some(encoder)) = (options.inquiry.take(), &self.shared.encoder) else { return };
        match self.vector(encoder, &inquiry.text, options.class).await {
            Ok(vector) => {
                inquiry.question = inquiry.question.with_vector(vector);
                response.clone_into(&mut inquiry.response);
                options.inquiry = Some(inquiry);
            }
            Err(reason) => metrics::count_unread_question(reason),
        }
    }

    /// Has a question read by the encoder, as far as requests [wait](crate::cache::semantic::patience) for it. Errors are labels of the metric.
    async fn vector(&self, encoder: &Arc<Encoder>, text: &str, class: ClassId) -> Result<Vector, &'static str> {
        let (backend, request) = self.reading(encoder, text, class)?;
        let turn = encoder.turn().ok_or("busy")?;
        let reading = encoder.ask();
        let run = {
            let encoder = Arc::clone(encoder);
            async move {
                let _turn = turn;
                let began = Instant::now();
                let vector = timeout(encoder.wait, read(backend, request)).await.unwrap_or(Err("overdue"));
                metrics::observe_question_read(began.elapsed());
                encoder.settle(reading, vector.is_ok());
                vector
            }
        };
        match reading {
            Reading::Awaited => run.await,
            Reading::Trial => {
                tokio::spawn(run);
                Err("paused")
            }
            Reading::Skipped => Err("paused"),
        }
    }

    /// The encoder's work on a question.
    fn reading(&self, encoder: &Encoder, text: &str, class: ClassId) -> Result<(Arc<dyn Backend>, NewRequest), &'static str> {
        let served = self.served(&encoder.model).ok_or("no_model")?;
        let tokens_max = served.backend.context_tokens().ok_or("no_worker")?;
        let prompt = Tokens::from(served.text.tokenizer.encode(text, true).map_err(|_| "failed")?);
        if prompt.len() > tokens_max as usize {
            return Err("too_long");
        }
        let embeds = Embeds { second_text: prompt.len() as u32 };
        Ok((Arc::clone(&served.backend), NewRequest::embedding(prompt, embeds, self.salt(&[]), class, encoder.wait)))
    }
}

async fn read(backend: Arc<dyn Backend>, request: NewRequest) -> Result<Vector, &'static str> {
    let submission = Submission::new(backend, vec![request]).map_err(|_| "rejected")?;
    let rows = embedded::collect(submission, 1).await.map_err(|_| "failed")?;
    rows.first().and_then(|row| Vector::new(row)).ok_or("failed")
}
