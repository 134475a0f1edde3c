//! The bytes of a model's tokens, and the trie on which masks are computed.

use serde::Deserialize;
use serde_json::Value;
use std::{collections::HashMap, fmt, panic::catch_unwind, path::Path, sync::Arc};
use tidemill_proto::{
    block::Token,
    files::{TOKENIZER_BYTES_MAX, read_at_most},
};
use tokenizers::{AddedToken, Decoder, DecoderWrapper, Tokenizer};
use toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

/// The most bytes of a token that can be allowed, by the limits of the trie. Longer tokens are runs of spaces.
const TOKEN_BYTES_MAX: usize = 1000;

/// A bound on ids: four times the largest known vocabulary, Gemma's.
const IDS_MAX: TokenId = 1 << 20;

/// The most bytes of an added token: many times those that models have.
const ADDED_BYTES_MAX: usize = 4096;

/// The most steps of a tokenizer around its model: many times those that models have. Each may be an expression to compile.
const STEPS_MAX: usize = 64;

/// A tokenizer from the bytes of its file. The library panics on a malformed decoder, and on an unknown token of the post-processor when it
/// first encodes. Here, both are errors.
pub fn read_tokenizer(bytes: &[u8]) -> Result<Tokenizer, String> {
    check_outline(bytes)?;
    let read = catch_unwind(|| {
        let tokenizer = Tokenizer::from_bytes(bytes)?;
        // An error is ignored here: only a panic means that the file is invalid.
        let _ = tokenizer.encode_fast("", true);
        check_ids(&tokenizer)?;
        Ok::<_, tokenizers::Error>(tokenizer)
    });
    match read {
        Ok(read) => read.map_err(|error| error.to_string()),
        Err(_) => Err("its decoder or post-processor is malformed".into()),
    }
}

/// A tokenizer's file without its model.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Outline {
    added_tokens: Vec<Added>,
    normalizer: Value,
    pre_tokenizer: Value,
    post_processor: Value,
    decoder: Value,
}

#[derive(Deserialize)]
struct Added {
    #[serde(default)]
    content: String,
}

/// Refuses a file that asks for far more memory than its bytes, before the library compiles anything.
fn check_outline(bytes: &[u8]) -> Result<(), String> {
    let outline: Outline = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if let Some(Added { content }) = outline.added_tokens.iter().find(|added| added.content.len() > ADDED_BYTES_MAX) {
        let begins: String = content.chars().take(20).collect();
        return Err(format!("the added token that begins {begins:?} has {} bytes: {ADDED_BYTES_MAX} are the most", content.len()));
    }
    let steps: usize = [outline.normalizer, outline.pre_tokenizer, outline.post_processor, outline.decoder].iter().map(steps).sum();
    if steps > STEPS_MAX {
        return Err(format!("it has {steps} normalizers, pre-tokenizers, post-processors and decoders: {STEPS_MAX} are the most"));
    }
    Ok(())
}

/// The number of steps in a part, itself included.
fn steps(part: &Value) -> usize {
    match part {
        Value::Object(fields) => usize::from(fields.contains_key("type")) + fields.values().map(steps).sum::<usize>(),
        Value::Array(parts) => parts.iter().map(steps).sum(),
        _ => 0,
    }
}

/// Refuses ids larger than those of any model, because tables have an entry for every id up to the largest.
fn check_ids(tokenizer: &Tokenizer) -> Result<(), tokenizers::Error> {
    let last = tokenizer.get_vocab(true).into_iter().max_by_key(|&(_, id)| id);
    match last {
        Some((token, id)) if id >= IDS_MAX => Err(format!("token {token:?} has the id {id}: ids must be below {IDS_MAX}").into()),
        _ => Ok(()),
    }
}

/// The mapping from tokens to bytes.
#[derive(Debug)]
pub struct TokenBytes {
    /// Bytes of the alphabet's characters, for byte-level vocabularies.
    byte_of: Option<HashMap<char, u8>>,
}

impl TokenBytes {
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self { byte_of: tokenizer.get_decoder().is_some_and(is_byte_level).then(byte_level_alphabet) }
    }

    /// The bytes of one token on its own: in a byte-level vocabulary, possibly a part of a character; in a SentencePiece one, with its
    /// leading space. Empty for an id without a token.
    pub fn of(&self, tokenizer: &Tokenizer, id: Token) -> Vec<u8> {
        let Some(piece) = tokenizer.id_to_token(id) else { return Vec::new() };
        if tokenizer.get_added_vocabulary().get_added_tokens_decoder().contains_key(&id) {
            return piece.into_bytes();
        }
        self.spelt(piece)
    }

    /// The bytes of a token's spelling. In a byte-level vocabulary, a spelling with characters outside the alphabet is taken literally.
    pub fn spelt(&self, piece: String) -> Vec<u8> {
        match &self.byte_of {
            Some(byte_of) => piece.chars().map(|c| byte_of.get(&c).copied()).collect::<Option<_>>().unwrap_or_else(|| piece.into_bytes()),
            None => match byte_fallback(&piece) {
                Some(byte) => vec![byte],
                None => piece.replace('▁', " ").into_bytes(),
            },
        }
    }
}

/// The byte that a token such as `<0xE6>` stands for.
fn byte_fallback(piece: &str) -> Option<u8> {
    let hex = piece.strip_prefix("<0x")?.strip_suffix('>')?;
    (hex.len() == 2).then(|| u8::from_str_radix(hex, 16).ok()).flatten()
}

/// Whether a decoder is byte-level. Such decoders occur alone or in a sequence, so trying one is more reliable than inspecting it.
fn is_byte_level(decoder: &DecoderWrapper) -> bool {
    decoder.decode(vec!["Ġ".into()]).is_ok_and(|text| text == " ")
}

/// GPT-2's mapping of bytes to printable characters (`bytes_to_unicode` in its encoder.py), inverted.
fn byte_level_alphabet() -> HashMap<char, u8> {
    let printable = |byte: u8| matches!(byte, b'!'..=b'~' | 0xA1..=0xAC | 0xAE..=0xFF);
    let others = (0..=255u8).filter(|&byte| !printable(byte)).zip(256u32..);
    let others = others.map(|(byte, code)| (char::from_u32(code).expect("codes from 256 to 323 are characters"), byte));
    (0..=255u8).filter(|&byte| printable(byte)).map(|byte| (char::from(byte), byte)).chain(others).collect()
}

/// All tokens of a model, as its grammars see them.
#[derive(Clone)]
pub struct Vocabulary {
    pub(crate) env: TokEnv,
    pub(crate) width: usize,
}

/// An error about a `tokenizer.json` that cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{path}: {reason}")]
pub struct VocabularyError {
    path: String,
    reason: String,
}

impl Vocabulary {
    /// The vocabulary of a model whose rows of logits have `width` entries. Tokens beyond that cannot be sampled, and entries without a
    /// token are never allowed.
    ///
    /// Special tokens match no text: a grammar allows one only where it names it, as `<|name|>` or `<[id]>`. The same holds for an added
    /// token of the form `<…>` that is not marked as special, such as Qwen's `<tool_call>`.
    pub fn new(tokenizer: &Tokenizer, width: usize) -> Self {
        let bytes = TokenBytes::new(tokenizer);
        let added = tokenizer.get_added_vocabulary().get_added_tokens_decoder();
        let word = |id: TokenId| {
            let mut word = match added.get(&id) {
                Some(token) if is_special(token) => [&[TokTrie::SPECIAL_TOKEN_MARKER], token.content.as_bytes()].concat(),
                _ => bytes.of(tokenizer, id),
            };
            if word.len() > TOKEN_BYTES_MAX {
                word.clear();
            }
            word
        };
        // The last word belongs to no token. It stands for the end of the sequence: allowed where the grammar may end.
        let words: Vec<Vec<u8>> = (0..width as TokenId).map(word).chain([Vec::new()]).collect();
        let trie = TokTrie::from(&TokRxInfo::new(words.len() as u32, width as TokenId), &words);
        Self { env: Arc::new(Environment(trie)), width }
    }

    /// The vocabulary of the `tokenizer.json` at `path`.
    pub fn load(path: &Path, width: usize) -> Result<Self, VocabularyError> {
        let read = read_at_most(path, TOKENIZER_BYTES_MAX).map_err(|error| error.to_string()).and_then(|bytes| read_tokenizer(&bytes));
        let tokenizer = read.map_err(|reason| VocabularyError { path: path.display().to_string(), reason })?;
        Ok(Self::new(&tokenizer, width))
    }

    /// The number of entries in a row of logits.
    pub fn width(&self) -> usize {
        self.width
    }
}

impl fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Vocabulary").field("width", &self.width).finish_non_exhaustive()
    }
}

fn is_special(token: &AddedToken) -> bool {
    token.special || token.content.starts_with('<') && token.content.ends_with('>')
}

struct Environment(TokTrie);

impl TokenizerEnv for Environment {
    fn tok_trie(&self) -> &TokTrie {
        &self.0
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.0.greedy_tokenize(bytes)
    }

    /// Returns `false`: tokens are never forced, so the canonical tokenization of a text is not needed.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn malformed_parts_are_errors() {
        let parts = |decoder: &str, post_processor: &str| {
            format!(
                r#"{{"version": "1.0", "added_tokens": [], "post_processor": {post_processor}, "decoder": {decoder},
                    "model": {{"type": "BPE", "vocab": {{"a": 0}}, "merges": []}}}}"#
            )
        };
        let file = |decoder: &str| parts(decoder, "null");
        assert!(read_tokenizer(file(r#"{"type": "Fuse"}"#).as_bytes()).is_ok());
        for decoder in ["nul", "[]", "7", r#"{"type": "Fuse", "x": 1e999}"#, r#"{"type": "None"}"#] {
            assert!(read_tokenizer(file(decoder).as_bytes()).is_err(), "{decoder}");
        }
        let template = |known: &str| {
            let single = r#"[{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]"#;
            let tokens = format!(r#"{{"{known}": {{"id": "{known}", "ids": [0], "tokens": ["{known}"]}}}}"#);
            format!(r#"{{"type": "TemplateProcessing", "single": {single}, "pair": {single}, "special_tokens": {tokens}}}"#)
        };
        assert!(read_tokenizer(parts("null", &template("<s>")).as_bytes()).is_ok());
        assert!(read_tokenizer(parts("null", &template("<t>")).as_bytes()).is_err());
    }

    #[test]
    fn a_file_that_asks_for_far_more_memory_than_its_bytes_is_an_error() {
        let file = |content: &str, steps: usize| {
            let step = r#"{"type": "Replace", "pattern": {"Regex": "\\p{L}+"}, "content": "x"}"#;
            format!(
                r#"{{"added_tokens": [{{"id": 1, "content": "{content}", "single_word": false, "lstrip": false, "rstrip": false,
                     "normalized": false, "special": true}}], "normalizer": {{"type": "Sequence", "normalizers": [{}]}},
                     "model": {{"type": "BPE", "vocab": {{"a": 0}}, "merges": []}}}}"#,
                vec![step; steps].join(", ")
            )
        };
        let mark = |bytes: usize| "x".repeat(bytes);
        assert_eq!(read_tokenizer(file(&mark(ADDED_BYTES_MAX), STEPS_MAX - 1).as_bytes()).map(drop), Ok(()));
        let error = read_tokenizer(file(&mark(ADDED_BYTES_MAX + 1), 1).as_bytes()).unwrap_err();
        assert!(error.contains("begins \"xxxxxxxxxxxxxxxxxxxx\" has 4097 bytes"), "{error}");
        let error = read_tokenizer(file("x", STEPS_MAX).as_bytes()).unwrap_err();
        assert!(error.contains("it has 65 normalizers"), "{error}");
    }

    #[test]
    fn an_id_that_would_take_gigabytes_of_tables_is_an_error() {
        let file = |id: u64| format!(r#"{{"model": {{"type": "BPE", "vocab": {{"a": 0, "b": {id}}}, "merges": []}}}}"#);
        assert!(read_tokenizer(file(u64::from(IDS_MAX) - 1).as_bytes()).is_ok());
        for id in [u64::from(IDS_MAX), u64::from(u32::MAX)] {
            let error = read_tokenizer(file(id).as_bytes()).unwrap_err();
            assert!(error.contains(&format!("\"b\" has the id {id}")), "{error}");
        }
    }
}
