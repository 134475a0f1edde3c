//! The tokenizer in the metadata, as `tokenizer.json` and `tokenizer_config.json`.

use crate::{
    GgufError,
    file::{Gguf, List, Value},
    pieces,
};
use serde_json::{Map, Value as Json, json};
use std::collections::HashMap;

/// Kinds of tokens.
const UNKNOWN: u64 = 2;
const CONTROL: u64 = 3;
const USER_DEFINED: u64 = 4;
const BYTE: u64 = 6;

/// The splitting of words before merging, by `tokenizer.ggml.pre`: the expressions with which these tokenizers were published, as quoted by
/// llama.cpp (src/llama-vocab.cpp).
const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";

#[derive(Clone, Copy)]
enum Cut {
    /// GPT-2's own expression.
    Gpt2,
    /// GPT-2's expression, with each digit separate.
    Digits,
    By(&'static str),
}

struct Pre {
    names: &'static [&'static str],
    cut: Cut,
    /// Whether text is first converted to Unicode's normal form C.
    composed: bool,
    /// Whether a word that is a token is taken as a whole, instead of being merged from its parts.
    whole_words: bool,
}

const PRES: [Pre; 8] = [
    Pre { names: &["default", "gpt-2", "gpt2", "olmo", "exaone4"], cut: Cut::Gpt2, composed: false, whole_words: false },
    Pre { names: &["smollm", "starcoder", "refact", "command-r", "codeshell"], cut: Cut::Digits, composed: false, whole_words: false },
    Pre { names: &["llama-bpe", "llama3", "llama-v3", "glm4"], cut: Cut::By(LLAMA3), composed: false, whole_words: true },
    Pre { names: &["dbrx", "smaug-bpe", "chatglm-bpe"], cut: Cut::By(LLAMA3), composed: false, whole_words: false },
    Pre { names: &["gpt-4o", "llama4", "minimax-m2"], cut: Cut::By(GPT4O), composed: false, whole_words: false },
    Pre { names: &["seed-coder"], cut: Cut::By(SEED), composed: false, whole_words: false },
    Pre { names: &["qwen2", "stablelm2"], cut: Cut::By(QWEN2), composed: true, whole_words: false },
    Pre { names: &["tekken"], cut: Cut::By(TEKKEN), composed: false, whole_words: true },
];

/// The most tokens; published models have up to 262,144.
const TOKENS_MAX: usize = 1 << 21;
/// The most merges, of which a vocabulary has up to some per token.
const MERGES_MAX: usize = 1 << 21;

/// Tokens that end a turn, regardless of their kind in the metadata.
const ENDS: [&str; 13] = [
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end_of_text|>",
    "<end_of_turn>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "[|endofturn|]",
    "<seed:eos>",
    "<EOT>",
    "[EOT]",
];

pub(crate) struct Tokenizer<'a> {
    file: &'a Gguf,
    tokens: Vec<&'a str>,
    kinds: Vec<u64>,
    ids: HashMap<&'a str, u32>,
}

impl<'a> Tokenizer<'a> {
    /// Reads the tokenizer. `vocab`: the rows of the embedding.
    pub(crate) fn read(file: &'a Gguf, vocab: usize) -> Result<Self, GgufError> {
        let list = file.list("tokenizer.ggml.tokens")?.ok_or_else(|| {
            file.unsupported("it has no tokenizer (tokenizer.ggml.tokens): use a file that was made of a whole model".into())
        })?;
        if list.len() > vocab {
            return Err(file.malformed(format!("it has {} tokens for an embedding of {vocab} rows", list.len())));
        }
        if list.len() > TOKENS_MAX {
            return Err(file.malformed(format!("it has {} tokens, more than the {TOKENS_MAX} that are read", list.len())));
        }
        let texts = |list: List<'a>, key: &str| {
            let text = |value| if let Value::Text(text) = value { Some(text) } else { None };
            list.map(text).collect::<Option<Vec<_>>>().ok_or_else(|| file.malformed(format!("{key} is not a list of texts")))
        };
        let tokens = texts(list, "tokenizer.ggml.tokens")?;
        let kinds = match file.list("tokenizer.ggml.token_type")? {
            None => vec![1; tokens.len()],
            Some(kinds) if kinds.len() == tokens.len() => kinds
                .map(|kind| match kind {
                    Value::Signed(kind) => u64::try_from(kind).unwrap_or_default(),
                    Value::Unsigned(kind) => kind,
                    _ => 0,
                })
                .collect(),
            Some(kinds) => return Err(file.malformed(format!("it has {} kinds for {} tokens", kinds.len(), tokens.len()))),
        };
        let mut ids = HashMap::new();
        for (id, token) in (0..).zip(&tokens) {
            if let Some(first) = ids.insert(*token, id) {
                return Err(file.malformed(format!("tokens {first} and {id} are both {token:?}")));
            }
        }
        Ok(Self { file, tokens, kinds, ids })
    }

    /// `tokenizer.json`.
    pub(crate) fn json(&self) -> Result<Json, GgufError> {
        let (normalizer, pre_tokenizer, decoder, model) = match self.file.text("tokenizer.ggml.model")? {
            Some("gpt2") => self.byte_level()?,
            Some("llama") => self.sentence_piece()?,
            Some(other) => {
                return Err(self
                    .file
                    .unsupported(format!("a tokenizer of the kind {other:?} is not supported; supported are gpt2 and llama")));
            }
            None => return Err(self.file.malformed("tokenizer.ggml.model is missing".into())),
        };
        let added = |(id, (token, kind)): (usize, (&&str, &u64))| {
            let special = matches!(*kind, CONTROL | UNKNOWN);
            (special || *kind == USER_DEFINED).then(|| {
                json!({"id": id, "content": token, "single_word": false, "lstrip": false, "rstrip": false, "normalized": !special,
                       "special": special})
            })
        };
        let added: Vec<Json> = self.tokens.iter().zip(&self.kinds).enumerate().filter_map(added).collect();
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": normalizer,
            "pre_tokenizer": pre_tokenizer,
            "post_processor": self.begin()?,
            "decoder": decoder,
            "model": model,
        }))
    }

    fn byte_level(&self) -> Result<(Json, Json, Json, Json), GgufError> {
        let name = self.file.text("tokenizer.ggml.pre")?.unwrap_or("default");
        let pre = PRES.iter().find(|pre| pre.names.contains(&name)).ok_or_else(|| {
            let known: Vec<_> = PRES.iter().flat_map(|pre| pre.names).copied().collect();
            self.file.unsupported(format!("a tokenizer that cuts words as {name:?} is not supported; supported are {}", known.join(", ")))
        })?;
        let bytes = |use_regex: bool| json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": use_regex});
        let first = match pre.cut {
            Cut::Gpt2 => None,
            Cut::Digits => Some(json!({"type": "Digits", "individual_digits": true})),
            Cut::By(regex) => Some(json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false})),
        };
        let pre_tokenizer = match first {
            None => bytes(true),
            Some(first) => json!({"type": "Sequence", "pretokenizers": [first, bytes(matches!(pre.cut, Cut::Digits))]}),
        };
        let list =
            self.file.list("tokenizer.ggml.merges")?.ok_or_else(|| self.file.malformed("tokenizer.ggml.merges is missing".into()))?;
        if list.len() > MERGES_MAX {
            return Err(self.too_many_merges(list.len()));
        }
        let mut merges = Vec::with_capacity(list.len());
        for merge in list {
            let Value::Text(text) = merge else { return Err(self.file.malformed("tokenizer.ggml.merges is not a list of texts".into())) };
            let parts = text.split_once(' ').filter(|(a, b)| [*a, *b].iter().all(|part| self.ids.contains_key(part)));
            let (a, b) = parts.ok_or_else(|| self.file.malformed(format!("merge {text:?} is not of two tokens")))?;
            merges.push([a, b]);
        }
        let normalizer = if pre.composed { json!({"type": "NFC"}) } else { Json::Null };
        let model = self.bpe(json!(merges), json!({"ignore_merges": pre.whole_words}));
        Ok((normalizer, pre_tokenizer, bytes(true), model))
    }

    fn sentence_piece(&self) -> Result<(Json, Json, Json, Json), GgufError> {
        let scores =
            self.file.list("tokenizer.ggml.scores")?.ok_or_else(|| self.file.malformed("tokenizer.ggml.scores is missing".into()))?;
        let mut pieces = Vec::new();
        for ((token, kind), score) in self.tokens.iter().zip(&self.kinds).zip(scores) {
            let Value::Float(score) = score else {
                return Err(self.file.malformed("tokenizer.ggml.scores is not a list of numbers".into()));
            };
            if !matches!(*kind, CONTROL | UNKNOWN | BYTE) {
                pieces.push((*token, score as f32));
            }
        }
        let prefixed = self.file.flag("tokenizer.ggml.add_space_prefix")?.unwrap_or(true);
        let spaces = json!({"type": "Replace", "pattern": {"String": " "}, "content": "▁"});
        let normalizer = match prefixed {
            true => json!({"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}, spaces]}),
            false => spaces,
        };
        let mut decoders = vec![
            json!({"type": "Replace", "pattern": {"String": "▁"}, "content": " "}),
            json!({"type": "ByteFallback"}),
            json!({"type": "Fuse"}),
        ];
        if prefixed {
            decoders.push(json!({"type": "Strip", "content": " ", "start": 1, "stop": 0}));
        }
        let unknown = self.file.number("tokenizer.ggml.unknown_token_id")?.and_then(|id| self.tokens.get(id as usize));
        let merges = pieces::merges(&pieces, &self.ids, MERGES_MAX).ok_or_else(|| self.too_many_merges(MERGES_MAX + 1))?;
        let merges: Vec<_> = merges.into_iter().map(|(a, b)| [a, b]).collect();
        let model = self.bpe(json!(merges), json!({"byte_fallback": true, "fuse_unk": true, "unk_token": unknown}));
        Ok((normalizer, Json::Null, json!({"type": "Sequence", "decoders": decoders}), model))
    }

    fn too_many_merges(&self, count: usize) -> GgufError {
        self.file.malformed(format!("its tokens have {count} merges or more, where {MERGES_MAX} are read"))
    }

    /// Byte-pair encoding with these settings in addition to the usual ones.
    fn bpe(&self, merges: Json, settings: Json) -> Json {
        let vocab: Map<String, Json> = self.tokens.iter().zip(0..).map(|(token, id)| ((*token).to_owned(), json!(id))).collect();
        let mut model = json!({"type": "BPE", "dropout": null, "unk_token": null, "continuing_subword_prefix": null,
            "end_of_word_suffix": null, "fuse_unk": false, "byte_fallback": false, "ignore_merges": false});
        let fields = model.as_object_mut().expect("an object");
        fields.extend(settings.as_object().cloned().unwrap_or_default());
        fields.insert("vocab".into(), Json::Object(vocab));
        fields.insert("merges".into(), merges);
        model
    }

    /// The token that begins every text, if the model requires one.
    fn begin(&self) -> Result<Json, GgufError> {
        let default = self.file.text("tokenizer.ggml.model")? == Some("llama");
        let wanted = self.file.flag("tokenizer.ggml.add_bos_token")?.unwrap_or(default);
        let Some(token) = self.named("bos")?.filter(|_| wanted) else { return Ok(Json::Null) };
        let special = json!({"SpecialToken": {"id": token, "type_id": 0}});
        let of = |sequence: &str, type_id: u32| json!({"Sequence": {"id": sequence, "type_id": type_id}});
        Ok(json!({
            "type": "TemplateProcessing",
            "single": [special, of("A", 0)],
            "pair": [special, of("A", 0), special, of("B", 1)],
            "special_tokens": {token: {"id": token, "ids": [self.ids[token]], "tokens": [token]}},
        }))
    }

    /// The token that the metadata names for a part.
    fn named(&self, part: &str) -> Result<Option<&'a str>, GgufError> {
        let key = format!("tokenizer.ggml.{part}_token_id");
        let Some(id) = self.file.number(&key)? else { return Ok(None) };
        let token = usize::try_from(id).ok().and_then(|id| self.tokens.get(id));
        token.map(|token| Some(*token)).ok_or_else(|| self.file.malformed(format!("{key} is {id}, of {} tokens", self.tokens.len())))
    }

    /// `tokenizer_config.json`.
    pub(crate) fn config(&self, context_tokens: u64) -> Result<Json, GgufError> {
        Ok(json!({
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": context_tokens,
            "clean_up_tokenization_spaces": false,
            "bos_token": self.named("bos")?,
            "eos_token": self.named("eos")?,
            "unk_token": self.named("unknown")?,
            "pad_token": self.named("padding")?,
            "chat_template": self.file.text("tokenizer.chat_template")?,
        }))
    }

    /// The ids that end a sequence, ascending.
    pub(crate) fn ends(&self) -> Result<Vec<u32>, GgufError> {
        let named = ["eos", "eot", "eom"].map(|part| self.named(part)).into_iter().collect::<Result<Vec<_>, _>>()?;
        let is_control = |token: &&&str| self.ids.get(**token).is_some_and(|id| self.kinds[*id as usize] == CONTROL);
        let known = ENDS.iter().filter(is_control).copied();
        let mut ids: Vec<u32> = named.into_iter().flatten().chain(known).map(|token| self.ids[token]).collect();
        ids.sort_unstable();
        ids.dedup();
        Ok(ids)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper};

    fn words(regex: &str, text: &str) -> Vec<String> {
        let split = json!({"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": false});
        let split: PreTokenizerWrapper = serde_json::from_value(split).unwrap();
        let mut pieces = PreTokenizedString::from(text);
        split.pre_tokenize(&mut pieces).unwrap();
        pieces.get_splits(OffsetReferential::Original, OffsetType::Byte).into_iter().map(|(piece, ..)| piece.to_owned()).collect()
    }

    #[test]
    fn expressions_cut_as_they_are_meant_to() {
        let text = "IT's camelCase 12345 ok!\n\n x/y";
        for pre in PRES {
            if let Cut::By(regex) = pre.cut {
                assert_eq!(words(regex, text).concat(), text, "{:?}: nothing is lost", pre.names);
            }
        }
        assert_eq!(words(LLAMA3, text), ["IT", "'s", " camelCase", " ", "123", "45", " ok", "!\n\n", " x", "/y"]);
        assert_eq!(words(GPT4O, text), ["IT's", " camel", "Case", " ", "123", "45", " ok", "!\n\n", " x", "/y"]);
        assert_eq!(words(SEED, text), ["IT", "'s", " camelCase", " ", "1", "2", "3", "4", "5", " ok", "!", "\n\n", " x", "/y"]);
    }
}
