//! The tokens that two rules allow: a grammar, and a limit on a thought that ends.

use std::sync::OnceLock;
use tidemill_proto::{
    block::Token,
    step::{Allowed, Mask, Withheld},
};

/// Those of the tokens that a grammar allows next that are also required; all that it allows if none is. A grammar that has no place for the
/// end of a thought has none for a thought either.
#[derive(Debug)]
pub(crate) struct Narrowed<'a> {
    by_grammar: &'a dyn Allowed,
    required: &'a Mask,
    both: OnceLock<Mask>,
}

impl<'a> Narrowed<'a> {
    pub(crate) fn new(by_grammar: &'a dyn Allowed, required: &'a Mask) -> Self {
        Self { by_grammar, required, both: OnceLock::new() }
    }
}

impl Allowed for Narrowed<'_> {
    fn wait(&self) -> Result<&Mask, Withheld<'_>> {
        let by_grammar = self.by_grammar.wait()?;
        let both = self.both.get_or_init(|| by_grammar.both(self.required));
        Ok(if both.allows_any() { both } else { by_grammar })
    }

    /// Nothing is required after a drafted token: a draft ends where something would be.
    fn wait_after(&self, drawn: &[Token]) -> Result<&Mask, Withheld<'_>> {
        if drawn.is_empty() { self.wait() } else { self.by_grammar.wait_after(drawn) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mask(tokens: &[Token]) -> Mask {
        let mut mask = Mask::none(40);
        tokens.iter().for_each(|&token| mask.allow(token));
        mask
    }

    #[test]
    fn a_required_token_is_the_only_one_where_the_grammar_has_a_place_for_it() {
        let (grammar, end, other) = (mask(&[3, 5, 39]), mask(&[39]), mask(&[4]));
        let allowed = |required: &Mask| Narrowed::new(&grammar, required).wait().unwrap().tokens().collect::<Vec<_>>();
        assert_eq!(allowed(&end), [39]);
        assert_eq!(allowed(&other), [3, 5, 39]);
    }
}
