//! Semantic cache queries: whether the answer to a similar question is acceptable, and the question to look up, as a vector of the encoder.

use super::Gateway;
use crate::{
    cache::semantic::{Inquiry, question::Question},
    dialog::Dialog,
    metrics,
    requests::options::Options,
};

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
        match self.vector(encoder, &inquiry.text, false, options.class).await {
            Ok(vector) => {
                inquiry.question = inquiry.question.with_vector(vector);
                response.clone_into(&mut inquiry.response);
                options.inquiry = Some(inquiry);
            }
            Err(reason) => metrics::count_unread_question(reason),
        }
    }
}
