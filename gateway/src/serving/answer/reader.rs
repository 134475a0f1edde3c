//! The pipelines of an answer: one per choice, with all inspections of its text.

use crate::{
    generation::{Pipeline, disclaimed::Disclaimed, guarded::Guarded, personal::Personal},
    requests::options::Options,
    text::TextModel,
};
use tidemill_proto::tokens::Tokens;

/// The way from tokens to the text that a client reads.
#[derive(Debug)]
pub struct Reader<'a> {
    pub model: &'a TextModel,
    /// The moderation of the answer, if there is any.
    pub guarded: Option<Guarded>,
    /// The treatment of personal data in the answer.
    pub personal: Personal,
    /// The disclaimers for the answer, if there are any.
    pub disclaimed: Option<Disclaimed>,
}

impl Reader<'_> {
    pub(super) fn pipeline(&self, prompt: &Tokens, options: &Options, choice: u32) -> Pipeline {
        let mut pipeline = Pipeline::new(self.model, prompt, &options.rules, options.sampling.seed.wrapping_add(choice.into()));
        if let Some(guarded) = &self.guarded {
            pipeline = pipeline.guarded_by(guarded.inspector());
        }
        if let Some(inspector) = self.personal.inspector() {
            pipeline = pipeline.inspected_by(Box::new(inspector));
        }
        // The last one: an operator's own text is not changed.
        if let Some(disclaimed) = &self.disclaimed {
            pipeline = pipeline.inspected_by(Box::new(disclaimed.inspector()));
        }
        pipeline
    }
}
