//! Ids to text, one token at a time, never broken UTF-8.
//!
//! A token's text depends on the tokens before it: part of a character in byte-level vocabularies, a leading space that
//! decoders strip at the beginning of a text in SentencePiece ones. So, as in TGI and vLLM, a token is decoded together
//! with the few tokens before it; the longer decoding's additional text is the token's:
//!
//! Byte-level vocabularies need no window: their tokens' bytes are put together as they come.
//!
//! ```text
//!   window:  [ context ……… | pending ……… ]     text(window)[sent..] goes out once it does not end inside a character
//! ```

use super::tokenizer::Tokenizer;
use std::sync::Arc;
use tidemill_proto::block::Token;

/// The number of prompt tokens that give the first generated token its context.
const CONTEXT_TOKENS: usize = 8;
/// A character has at most four bytes, so at most four tokens. Bytes that are still not a character after this many tokens are noise.
const PENDING_MAX: usize = 8;
/// The maximum number of tokens for which a context without any text (special tokens) is kept.
const WINDOW_MAX: usize = 64;

#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Arc<Tokenizer>,
    skip_special: bool,
    text: Text,
}

#[derive(Debug)]
enum Text {
    /// Tokens stand for bytes, regardless of the tokens before them.
    Bytes(Bytes),
    Window(Window),
}

/// The beginning of a character: at most three bytes.
#[derive(Debug, Default)]
struct Bytes {
    pending: Vec<u8>,
    /// Whether some of them belong to a generated token, rather than the prompt.
    generated: bool,
}

#[derive(Debug)]
struct Window {
    tokens: Vec<Token>,
    /// The number of leading tokens of the window whose text was returned.
    context: usize,
    /// The number of bytes of the window's text that were returned.
    sent: usize,
}

impl Detokenizer {
    /// Creates a detokenizer for the tokens after `prompt`.
    pub fn new(tokenizer: Arc<Tokenizer>, prompt: &[Token], skip_special: bool) -> Self {
        let context = &prompt[prompt.len().saturating_sub(CONTEXT_TOKENS)..];
        // The first tokens may complete a character that the prompt's last bytes begin.
        let text = match tokenizer.decoded() {
            Some(bytes) => {
                let bytes: Vec<u8> = context.iter().flat_map(|&token| bytes.of(token, skip_special)).copied().collect();
                Text::Bytes(Bytes { pending: bytes[complete(&bytes)..].to_vec(), generated: false })
            }
            None => {
                let sent = tokenizer.decode(context, skip_special).trim_end_matches(char::REPLACEMENT_CHARACTER).len();
                Text::Window(Window { tokens: context.to_vec(), context: context.len(), sent })
            }
        };
        Self { tokenizer, skip_special, text }
    }

    /// Adds a token; returns the text that is complete with it.
    pub fn push(&mut self, token: Token) -> String {
        match &mut self.text {
            Text::Bytes(text) => text.push(self.tokenizer.decoded().map_or(&[], |bytes| bytes.of(token, self.skip_special))),
            Text::Window(text) => text.push(token, &self.tokenizer, self.skip_special),
        }
    }

    /// Returns the rest when no more tokens come: an unfinished character becomes U+FFFD.
    pub fn finish(&mut self) -> String {
        match &mut self.text {
            Text::Bytes(text) => text.finish(),
            Text::Window(text) => text.finish(&self.tokenizer, self.skip_special),
        }
    }

    /// Panics if an invariant is broken. Tests call it after every step.
    pub fn check_integrity(&self) {
        match &self.text {
            Text::Bytes(text) => assert_eq!(complete(&text.pending), 0, "only the beginning of a character is pending"),
            Text::Window(text) => text.check_integrity(&self.tokenizer, self.skip_special),
        }
    }
}

impl Bytes {
    fn push(&mut self, bytes: &[u8]) -> String {
        self.pending.extend(bytes);
        let complete = complete(&self.pending);
        let text = String::from_utf8_lossy(&self.pending[..complete]).into_owned();
        self.pending.drain(..complete);
        self.generated |= !bytes.is_empty();
        text
    }

    fn finish(&mut self) -> String {
        let Self { pending, generated } = std::mem::take(self);
        // A character that the prompt itself left open is not part of the answer.
        if generated { String::from_utf8_lossy(&pending).into_owned() } else { String::new() }
    }
}

/// The number of leading bytes that no further byte can change: all but the beginning of a character at the end.
fn complete(bytes: &[u8]) -> usize {
    let last = bytes.utf8_chunks().last().map_or(&[][..], |chunk| chunk.invalid());
    let is_open = std::str::from_utf8(last).is_err_and(|error| error.error_len().is_none());
    bytes.len() - if is_open { last.len() } else { 0 }
}

impl Window {
    fn push(&mut self, token: Token, tokenizer: &Tokenizer, skip_special: bool) -> String {
        self.tokens.push(token);
        let text = tokenizer.decode(&self.tokens, skip_special);
        let pending = self.tokens.len() - self.context;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && pending < PENDING_MAX {
            return String::new();
        }
        let complete = text.get(self.sent..).unwrap_or_default().to_owned();
        let context_text = tokenizer.decode(&self.tokens[self.context..], skip_special);
        if context_text.is_empty() && self.tokens.len() < WINDOW_MAX {
            self.sent = text.len();
        } else {
            self.tokens.drain(..self.context);
            self.sent = context_text.len();
        }
        self.context = self.tokens.len();
        complete
    }

    fn finish(&mut self, tokenizer: &Tokenizer, skip_special: bool) -> String {
        let text = tokenizer.decode(&self.tokens, skip_special);
        let rest = text.get(self.sent..).unwrap_or_default().to_owned();
        self.sent = text.len();
        // A character that the prompt itself left open is not part of the answer.
        if self.tokens.len() == self.context { String::new() } else { rest }
    }

    fn check_integrity(&self, tokenizer: &Tokenizer, skip_special: bool) {
        assert!(self.context <= self.tokens.len(), "context is a part of the window");
        assert!(self.tokens.len() <= WINDOW_MAX + PENDING_MAX, "the window is bounded");
        let text = tokenizer.decode(&self.tokens, skip_special);
        assert!(self.sent <= text.len(), "no more is sent than there is");
    }
}

#[cfg(test)]
mod tests {
    use super::{super::tokenizer::tests::sentencepiece, *};
    use proptest::prelude::*;

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

    /// A byte-level tokenizer like those of GPT-2 and most models since.
    fn byte_level() -> Tokenizer {
        let mut vocab: Vec<(String, usize)> =
            ["Hello", "Ġworld", "æ", "½", "®", "Ã", "©", "ÿ", "ĠĠ"].map(str::to_owned).into_iter().zip(0..).collect();
        vocab.push(("!".into(), vocab.len()));
        let json = serde_json::json!({
            "version": "1.0",
            "added_tokens": [{"id": 20, "content": "<s>", "single_word": false, "lstrip": false, "rstrip": false, "normalized": false, "special": true}],
            "normalizer": null, "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
            "post_processor": null, "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
            "model": {"type": "BPE", "vocab": vocab.into_iter().collect::<std::collections::HashMap<_, _>>(), "merges": []},
        });
        Tokenizer::new(json.to_string().parse().unwrap())
    }

    proptest! {
        /// Token by token, the text equals the library's decoding of all of them, and it is returned as soon as it is certain.
        #[test]
        fn bytes_put_together_are_the_decoders_text(ids in prop::collection::vec(0u32..22, 0..60), skip_special: bool) {
            let tokenizer = Arc::new(byte_level());
            let mut detokenizer = Detokenizer::new(Arc::clone(&tokenizer), &[], skip_special);
            assert!(matches!(detokenizer.text, Text::Bytes(_)));
            let mut text = String::new();
            for &id in &ids {
                text += &detokenizer.push(id);
                detokenizer.check_integrity();
            }
            text += &detokenizer.finish();
            prop_assert_eq!(text, tokenizer.decode(&ids, skip_special));
        }
    }

    #[test]
    fn a_character_that_the_prompt_began_ends_in_the_answer() {
        let tokenizer = Arc::new(byte_level());
        let ids = |pieces: &[&str]| pieces.iter().map(|piece| tokenizer.id_of(piece).unwrap()).collect::<Vec<_>>();
        assert_eq!(stream(&tokenizer, &ids(&["Hello", "æ", "½"]), &ids(&["®", "Ġworld"])), ["潮", " world", ""]);
        assert_eq!(stream(&tokenizer, &ids(&["æ"]), &[]).concat(), "", "what the prompt left open is not the answer's");
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
