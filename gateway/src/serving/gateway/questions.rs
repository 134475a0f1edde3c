//! Semantic cache queries: whether the answer to a similar question is acceptable, and the question to look up. A model that measures
//! similarity is asked like the moderator, bypassing everything meant for clients, and at no tenant's charge.

use super::Gateway;
use crate::{
    cache::semantic::{Inquiry, similarity::Question},
    dialog::Dialog,
    metrics,
    requests::options::Options,
    serving::{backend::Submission, embedded},
};
use std::{sync::Arc, time::Duration};
use tidemill_cluster::NewRequest;
use tidemill_proto::{message::Embeds, tokens::Tokens};

/// The time limit for a model to read a question: longer would cost more than it saves.
const EMBEDDED_MAX: Duration = Duration::from_secs(2);

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

    /// Completes the cache query with the id of the coming response and, if a model measures similarity, with its embedding of the
    /// question.
    pub async fn complete_question(&self, options: &mut Options, response: &str) {
        let Some(mut inquiry) = options.inquiry.take() else { return };
        response.clone_into(&mut inquiry.response);
        if let Some(model) = self.shared.settings.requests.semantic_cache.as_ref().and_then(|settings| settings.model.as_ref()) {
            let embedded = tokio::time::timeout(EMBEDDED_MAX, self.embedded(model, &inquiry.text, options)).await;
            match embedded.unwrap_or(Err("overdue")) {
                Ok(embedding) => inquiry.question = inquiry.question.embedded(embedding),
                Err(reason) => {
                    metrics::count_semantic_cache_unread(reason);
                    return;
                }
            }
        }
        options.inquiry = Some(inquiry);
    }

    async fn embedded(&self, model: &str, text: &str, options: &Options) -> Result<Vec<f32>, &'static str> {
        let served = self.served(model).ok_or("no_model")?;
        let prompt = Tokens::from(served.text.tokenizer.encode(text, true).map_err(|_| "failed")?);
        let embeds = Embeds { second_text: prompt.len() as u32 };
        let request = NewRequest::embedding(prompt, embeds, self.salt(&[]), options.class, EMBEDDED_MAX);
        let submission = Submission::new(Arc::clone(&served.backend), vec![request]).map_err(|_| "rejected")?;
        let mut rows = embedded::collect(submission, 1).await.map_err(|_| "failed")?;
        rows.pop().map(embedded::unit).ok_or("failed")
    }
}
