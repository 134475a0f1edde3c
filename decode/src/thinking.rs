//! A sequence's thought under its limit, at the worker that draws its tokens.

use tidemill_proto::{
    block::Token,
    step::Mask,
    thought::{ThoughtLimit, ThoughtProgress},
};

/// A limited thought, and the tokens that it requires next.
#[derive(Debug)]
pub(crate) struct Thinking {
    limit: ThoughtLimit,
    progress: ThoughtProgress,
    required: Option<Mask>,
    vocab: usize,
}

impl Thinking {
    /// The place after tokens that were generated before, of a vocabulary of `vocab` tokens. The limit is sound.
    pub(crate) fn new(limit: ThoughtLimit, generated: &[Token], vocab: usize) -> Self {
        let progress = limit.after(generated);
        let mut thinking = Self { limit, progress, required: None, vocab };
        thinking.require();
        thinking
    }

    pub(crate) fn push(&mut self, token: Token) {
        self.progress = self.limit.step(self.progress, token);
        self.require();
    }

    /// The tokens of which one must be drawn next; `None` if any token may follow.
    pub(crate) fn required(&self) -> Option<&Mask> {
        self.required.as_ref()
    }

    /// The number of drafted tokens that a step may verify: it draws after each of them, and none of these draws may be restricted.
    pub(crate) fn verifiable(&self, drafted: &[Token]) -> usize {
        if self.required.is_some() {
            return 0;
        }
        let mut progress = self.progress;
        let is_free = |token: &&Token| {
            progress = self.limit.step(progress, **token);
            self.limit.required(progress).is_empty()
        };
        drafted.iter().take_while(is_free).count()
    }

    fn require(&mut self) {
        let tokens = self.limit.required(self.progress);
        self.required = (!tokens.is_empty()).then(|| {
            let mut mask = Mask::none(self.vocab);
            tokens.iter().for_each(|&token| mask.allow(token));
            mask
        });
        // A mask without tokens could not be drawn from.
        self.required.take_if(|mask| !mask.allows_any());
    }
}
