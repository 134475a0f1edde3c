//! The model's own tokenizer (`tokenizer.json`, through Hugging Face's library).

use crate::text::{error::ModelError, sewn::Sewn};
use std::{borrow::Cow, path::Path};
use tidemill_grammar::{TokenBytes, read_tokenizer};
use tidemill_proto::block::Token;
use tokenizers::{
    AddedToken, DecoderWrapper, Encoding, NormalizedString, Normalizer, NormalizerWrapper, PostProcessor, TruncationDirection,
};

/// The factor by which a normalizer can shrink text at most (canonical composition of three two-byte code points into one).
const NORMALIZER_SHRINK_MAX: usize = 4;

#[derive(Debug)]
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    bytes: TokenBytes,
    /// The decoded bytes of each id, if the decoder only concatenates tokens' bytes.
    decoded: Option<DecodedBytes>,
    /// The length of the longest token in bytes.
    token_bytes_max: usize,
    /// Whether added tokens are looked for in normalized text.
    normalizes_marks: bool,
}

/// The bytes into which a byte-level decoder turns every token, one after the other.
#[derive(Debug)]
pub struct DecodedBytes {
    bytes: Vec<u8>,
    /// The end of each id's bytes, and whether it is special.
    ends: Vec<(u32, bool)>,
}

impl DecodedBytes {
    fn new(tokenizer: &tokenizers::Tokenizer, token_bytes: &TokenBytes) -> Self {
        let ids = ids(tokenizer);
        let (mut bytes, mut ends) = (Vec::new(), Vec::new());
        for id in 0..ids {
            let piece = tokenizer.id_to_token(id);
            let is_special = piece.as_ref().is_some_and(|piece| tokenizer.get_added_vocabulary().is_special_token(piece));
            bytes.extend(piece.map_or_else(Vec::new, |piece| token_bytes.spelt(piece)));
            ends.push((bytes.len() as u32, is_special));
        }
        Self { bytes, ends }
    }

    /// The bytes of a token; none for ids without a token.
    pub fn of(&self, id: Token, skip_special: bool) -> &[u8] {
        let id = id as usize;
        match self.ends.get(id) {
            Some(&(end, is_special)) if !(skip_special && is_special) => {
                let start = id.checked_sub(1).map_or(0, |before| self.ends[before].0);
                &self.bytes[start as usize..end as usize]
            }
            _ => &[],
        }
    }
}

/// The error of a text that cannot be tokenized.
#[derive(Debug, thiserror::Error)]
#[error("the tokenizer refuses this text: {0}")]
pub struct EncodeError(String);

impl Tokenizer {
    /// Parses the contents of the file at `path`.
    pub fn parse(path: &Path, bytes: &[u8]) -> Result<Self, ModelError> {
        let inner = read_tokenizer(bytes).map_err(|reason| ModelError::Invalid { path: path.to_owned(), reason })?;
        Ok(Self::new(inner))
    }

    pub fn new(mut inner: tokenizers::Tokenizer) -> Self {
        // Files often carry the truncation and padding of a training run.
        inner.with_padding(None);
        inner.with_truncation(None).expect("turning truncation off is always valid");
        let bytes = TokenBytes::new(&inner);
        let is_bytewise = matches!(inner.get_decoder(), Some(DecoderWrapper::ByteLevel(_)));
        let decoded = is_bytewise.then(|| DecodedBytes::new(&inner, &bytes));
        let token_bytes_max = inner.get_vocab(true).keys().map(String::len).max().unwrap_or(1);
        let changes = inner.get_normalizer().is_some_and(changes_marks);
        let normalizes_marks = changes && inner.get_added_vocabulary().get_added_tokens_decoder().values().any(|added| added.normalized);
        Self { inner, bytes, decoded, token_bytes_max, normalizes_marks }
    }

    /// The library's tokenizer.
    pub fn inner(&self) -> &tokenizers::Tokenizer {
        &self.inner
    }

    /// Tokenizes a text. `special` adds the tokens that the model expects around every text (BOS). A rendered chat already has them.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<Token>, EncodeError> {
        let encoding = self.inner.encode_fast(text, special).map_err(|e| EncodeError(e.to_string()))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Tokenizes a text with the tokens around it, cut at its end to `most` tokens.
    pub fn encode_cut(&self, text: &str, most: Option<usize>) -> Result<Vec<Token>, EncodeError> {
        let Some(most) = most else { return self.encode(text, true) };
        let refused = |e: tokenizers::Error| EncodeError(e.to_string());
        let mut encoding = self.inner.encode_fast(text, false).map_err(refused)?;
        let added = self.inner.get_post_processor().map_or(0, |processor| processor.added_tokens(false));
        encoding.truncate(most.saturating_sub(added), 0, TruncationDirection::Right);
        Ok(self.inner.post_process(encoding, None, true).map_err(refused)?.get_ids().to_vec())
    }

    /// Returns a tokenizer by which no text becomes a special token: an encoder's texts have no marks of their own.
    pub fn with_plain_texts(mut self) -> Self {
        self.inner.set_encode_special_tokens(true);
        self
    }

    /// Encodes the first text of pairs, which is compared with each of several.
    pub fn encode_first(&self, text: &str) -> Result<Encoding, EncodeError> {
        self.inner.encode_fast(text, false).map_err(|e| EncodeError(e.to_string()))
    }

    /// Encodes two texts as an encoder compares them, and returns the position of the second. The second is cut at its end to
    /// `second_most` tokens, and to the rest of `most`.
    pub fn encode_pair(&self, first: &Encoding, second: &str, most: usize, second_most: usize) -> Result<(Vec<Token>, usize), EncodeError> {
        let mut second = self.encode_first(second)?;
        let added = self.inner.get_post_processor().map_or(0, |processor| processor.added_tokens(true));
        second.truncate(most.saturating_sub(first.len() + added).min(second_most), 0, TruncationDirection::Right);
        let pair = self.inner.post_process(first.clone(), Some(second), true).map_err(|e| EncodeError(e.to_string()))?;
        let begin = pair.get_sequence_ids().iter().position(|of| *of == Some(1)).unwrap_or(pair.len());
        Ok((pair.get_ids().to_vec(), begin))
    }

    /// Tokenizes a rendered chat, in which only the template's own marks become special tokens.
    pub fn encode_sewn(&self, Sewn { text, cuts }: &Sewn) -> Result<Vec<Token>, EncodeError> {
        let starts = [0].into_iter().chain(cuts.iter().copied());
        let ends = cuts.iter().copied().chain([text.len()]);
        let mut tokens = Vec::new();
        for (start, end) in starts.zip(ends) {
            tokens.extend(self.encode(&text[start..end], false)?);
        }
        Ok(tokens)
    }

    /// Tokens that are found in text before all others: special ones, and some that are not.
    pub fn added(&self) -> impl Iterator<Item = &AddedToken> {
        self.inner.get_added_vocabulary().get_added_tokens_decoder().values()
    }

    /// Whether added tokens are looked for in normalized text.
    pub fn normalizes_marks(&self) -> bool {
        self.normalizes_marks
    }

    /// The form of a text in which added tokens are looked for.
    pub fn normalized<'a>(&self, text: &'a str) -> Cow<'a, str> {
        match self.inner.get_normalizer().filter(|_| self.normalizes_marks) {
            Some(normalizer) => {
                let mut normalized = NormalizedString::from(text);
                // A text that cannot be normalized cannot be tokenized either, and the tokenizer reports it.
                let done = normalizer.normalize(&mut normalized);
                if done.is_ok() { Cow::Owned(normalized.get().to_owned()) } else { Cow::Borrowed(text) }
            }
            None => Cow::Borrowed(text),
        }
    }

    /// Counts the tokens of a text; 0 if the tokenizer refuses it.
    pub fn count(&self, text: &str) -> u64 {
        self.inner.encode_fast(text, false).map_or(0, |encoding| encoding.len() as u64)
    }

    /// Returns the beginning of a text, of at most `tokens` tokens.
    pub fn cut(&self, text: &str, tokens: u64) -> String {
        let mut text = text;
        // A beginning may have more tokens by itself than within the whole.
        for keep in (0..=tokens as usize).rev() {
            let Ok(encoding) = self.inner.encode(text, false) else { break };
            if encoding.len() as u64 <= tokens {
                return text.to_owned();
            }
            let end = encoding.get_offsets()[keep].0;
            text = &text[..text.floor_char_boundary(end.min(text.len()))];
        }
        String::new()
    }

    /// The length above which a text certainly has more than `tokens` tokens, so that it need not be tokenized to be refused.
    pub fn text_bytes_max(&self, tokens: usize) -> usize {
        tokens.saturating_mul(self.token_bytes_max).saturating_mul(NORMALIZER_SHRINK_MAX)
    }

    /// Decodes ids. Those without a token in the vocabulary have no text.
    pub fn decode(&self, ids: &[Token], skip_special: bool) -> String {
        // A decoder does not fail on its own vocabulary.
        self.inner.decode(ids, skip_special).unwrap_or_default()
    }

    /// Each token's part of [`decode`](Self::decode), if that does not depend on other tokens.
    pub fn decoded(&self) -> Option<&DecodedBytes> {
        self.decoded.as_ref()
    }

    /// The number after the last id.
    pub fn ids(&self) -> Token {
        ids(&self.inner)
    }

    pub fn id_of(&self, token: &str) -> Option<Token> {
        self.inner.token_to_id(token)
    }

    /// The id of a token, if it is special and thus left out of text with other special tokens.
    pub fn special_id_of(&self, token: &str) -> Option<Token> {
        self.inner.get_added_vocabulary().is_special_token(token).then(|| self.id_of(token)).flatten()
    }

    /// The id of a token that a grammar must reference, since it has no text there: a special one, or one of the form `<…>` that was added
    /// to the vocabulary.
    pub fn unspoken_id_of(&self, token: &str) -> Option<Token> {
        let id = self.id_of(token)?;
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder().get(&id)?;
        (added.special || token.starts_with('<') && token.ends_with('>')).then_some(id)
    }

    /// A text in which no part becomes a special token, such as the end of a turn: a space breaks each.
    pub fn without_marks(&self, text: &str) -> String {
        let added = self.inner.get_added_vocabulary().get_added_tokens_decoder();
        let marks = added.values().filter(|token| token.special || token.content.starts_with('<')).map(|token| token.content.as_str());
        marks.fold(text.to_owned(), |text, mark| match text.contains(mark) {
            true => {
                let (first, rest) = mark.split_at(mark.chars().next().map_or(0, char::len_utf8));
                text.replace(mark, &format!("{first} {rest}"))
            }
            false => text,
        })
    }

    /// A token as its vocabulary spells it.
    pub fn piece(&self, id: Token) -> String {
        self.inner.id_to_token(id).unwrap_or_default()
    }

    /// The bytes of a single token, as far as they do not depend on others: a part of a character in a byte-level vocabulary; with its
    /// leading space in a SentencePiece one.
    pub fn token_bytes(&self, id: Token) -> Vec<u8> {
        self.bytes.of(&self.inner, id)
    }
}

fn ids(tokenizer: &tokenizers::Tokenizer) -> Token {
    tokenizer.get_vocab(true).into_values().max().map_or(0, |last| last + 1)
}

/// Whether a normalizer can turn ordinary text into a mark: one that only marks spaces cannot.
fn changes_marks(normalizer: &NormalizerWrapper) -> bool {
    match normalizer {
        NormalizerWrapper::Prepend(_) | NormalizerWrapper::Replace(_) => false,
        NormalizerWrapper::Sequence(all) => all.as_ref().iter().any(changes_marks),
        _ => true,
    }
}

/// A token in OpenAI's notation: its text, or `bytes:\xe6\xbd` if it is not whole characters.
pub fn printable(bytes: &[u8]) -> String {
    match std::str::from_utf8(bytes) {
        Ok(text) => text.to_owned(),
        Err(_) => bytes.iter().fold("bytes:".to_owned(), |text, byte| text + &format!("\\x{byte:02x}")),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A SentencePiece-style tokenizer like Llama 2's: `▁` for spaces, byte fallback, a stripped leading space.
    pub(crate) fn sentencepiece() -> Tokenizer {
        sentencepiece_with(&[])
    }

    /// The same with further special tokens.
    pub(crate) fn sentencepiece_with(specials: &[&str]) -> Tokenizer {
        let mut vocab = vec![("<unk>".to_owned(), 0.0), ("<s>".to_owned(), 0.0)];
        vocab.extend((0..256).map(|byte| (format!("<0x{byte:02X}>"), 0.0)));
        vocab.extend(["▁Hello", "▁world", "▁", "!"].map(|piece| (piece.to_owned(), -1.0)));
        let special = |(id, content): (usize, &str)| {
            serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false, "normalized": false,
                "special": true})
        };
        let added: Vec<_> = [(1, "<s>")].into_iter().chain((vocab.len()..).zip(specials.iter().copied())).map(special).collect();
        let json = serde_json::json!({
            "version": "1.0",
            "added_tokens": added,
            "normalizer": {"type": "Sequence", "normalizers": [
                {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]},
            "pre_tokenizer": null, "post_processor": null,
            "decoder": {"type": "Sequence", "decoders": [
                {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
            "model": {"type": "Unigram", "unk_id": 0, "vocab": vocab, "byte_fallback": true},
        });
        Tokenizer::new(json.to_string().parse().unwrap())
    }

    #[test]
    fn tokens_of_a_sentencepiece_vocabulary_keep_their_space_and_bytes() {
        let tokenizer = sentencepiece();
        let hello = tokenizer.id_of("▁Hello").unwrap();
        assert_eq!(tokenizer.token_bytes(hello), b" Hello");
        assert_eq!(tokenizer.token_bytes(tokenizer.id_of("<0xE6>").unwrap()), [0xE6]);
        assert_eq!(tokenizer.token_bytes(1), b"<s>");
        assert_eq!(tokenizer.token_bytes(1_000_000), b"");
    }

    #[test]
    fn half_a_character_is_printed_as_bytes() {
        assert_eq!(printable("é".as_bytes()), "é");
        assert_eq!(printable(&[0xE6, 0xBD]), r"bytes:\xe6\xbd");
    }
}
