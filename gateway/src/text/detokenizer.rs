//! Ids to text, one token at a time, never broken UTF-8.
//!
//! A token's text depends on the tokens before it: part of a character in byte-level vocabularies, a leading space that
//! decoders strip at the beginning of a text in SentencePiece ones. So, as in TGI and vLLM, a token is decoded together
//! with the few tokens before it; the longer decoding's additional text is the token's:
//!
//! ```text
//!   window:  [ context ……… | pending ……… ]     text(window)[sent..] goes out once it does not end inside a character
//! ```

use super::tokenizer::Tokenizer;
use std::sync::Arc;
use tidemill_proto::block::Token;

/// Tokens of the prompt that give the first generated token its context.
const CONTEXT_TOKENS: usize = 8;
/// A character has at most four bytes, so at most four tokens. Bytes that are still no character after this many are noise.
const PENDING_MAX: usize = 8;
/// Context without any text (special tokens) is kept in the hope of some, up to this many tokens.
const WINDOW_MAX: usize = 64;

#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    window: Vec<Token>,
    /// Leading tokens of the window whose text was returned.
    context: usize,
    /// Bytes of the window's text that were returned.
    sent: usize,
}

impl Detokenizer {
    /// For the tokens after `prompt`.
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[Token], skip_special: bool) -> Self {
        let window = prompt[prompt.len().saturating_sub(CONTEXT_TOKENS)..].to_vec();
        // The first tokens may complete a character that the prompt's last bytes begin.
        let sent = tokenizer.decode(&window, skip_special).trim_end_matches(char::REPLACEMENT_CHARACTER).len();
        Self { tokenizer, skip_special, context: window.len(), window, sent }
    }

    /// Adds a token; returns the text that is complete with it.
    pub fn push(&mut self, token: Token) -> String {
        self.window.push(token);
        let text = self.tokenizer.decode(&self.window, self.skip_special);
        let pending = self.window.len() - self.context;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && pending < PENDING_MAX {
            return String::new();
        }
        let complete = text.get(self.sent..).unwrap_or_default().to_owned();
        let context_text = self.tokenizer.decode(&self.window[self.context..], self.skip_special);
        if context_text.is_empty() && self.window.len() < WINDOW_MAX {
            self.sent = text.len();
        } else {
            self.window.drain(..self.context);
            self.sent = context_text.len();
        }
        self.context = self.window.len();
        complete
    }

    /// The rest, when no more tokens come: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = self.tokenizer.decode(&self.window, self.skip_special);
        let rest = text.get(self.sent..).unwrap_or_default().to_owned();
        self.sent = text.len();
        // A character that the prompt itself left open is not part of the answer.
        if self.window.len() == self.context { String::new() } else { rest }
    }

    /// Panics if an invariant is broken. Tests call it after every step.
    pub fn check_integrity(&self) {
        assert!(self.context <= self.window.len(), "context is a part of the window");
        assert!(self.window.len() <= WINDOW_MAX + PENDING_MAX, "the window is bounded");
        let text = self.tokenizer.decode(&self.window, self.skip_special);
        assert!(self.sent <= text.len(), "no more is sent than there is");
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tokenizer::tests::sentencepiece, *};

    fn stream(tokenizer: &Arc<Tokenizer>, prompt: &[Token], ids: &[Token]) -> Vec<String> {
        let mut detokenizer = Detokenizer::new(Arc::clone(tokenizer), prompt, true);
        let step = |&id| {
            let text = detokenizer.push(id);
            detokenizer.check_integrity();
            text
        };
        let mut parts: Vec<_> = ids.iter().map(step).collect();
        parts.push(detokenizer.finish());
        parts
    }

    #[test]
    fn a_leading_space_belongs_to_the_text_unless_the_text_begins_there() {
        let tokenizer = Arc::new(sentencepiece());
        let [hello, world] = ["▁Hello", "▁world"].map(|piece| tokenizer.id_of(piece).unwrap());
        assert_eq!(stream(&tokenizer, &[hello], &[world, hello]).concat(), " world Hello");
        assert_eq!(stream(&tokenizer, &[], &[hello, world]).concat(), "Hello world");
        assert_eq!(stream(&tokenizer, &[hello], &[1, world]).concat(), " world", "a special token says nothing");
    }

    #[test]
    fn a_character_appears_with_its_last_byte() {
        let tokenizer = Arc::new(sentencepiece());
        let bytes = |text: &str| text.bytes().map(|b| tokenizer.id_of(&format!("<0x{b:02X}>")).unwrap()).collect::<Vec<_>>();
        let hello = tokenizer.id_of("▁Hello").unwrap();
        assert_eq!(stream(&tokenizer, &[hello], &bytes("潮é")), ["", "", "潮", "", "é", ""]);
        let wave = bytes("🌊");
        assert_eq!(stream(&tokenizer, &[hello], &wave[..2]).concat(), "\u{FFFD}\u{FFFD}", "the end came inside a character");
    }

    #[test]
    fn noise_is_not_held_forever() {
        let tokenizer = Arc::new(sentencepiece());
        let noise = vec![tokenizer.id_of("<0xFF>").unwrap(); 100];
        let parts = stream(&tokenizer, &[], &noise);
        assert!(parts.iter().filter(|part| !part.is_empty()).count() >= 100 / PENDING_MAX);
        assert_eq!(parts.concat().chars().count(), 100);
    }
}
