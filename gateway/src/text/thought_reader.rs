//! A model's thoughts under a limit: the table by which a decode worker, which has no text, reads them from tokens.
//!
//! The table reads tokens as the splitters of [`reasoning`](super::reasoning) and [`harmony`](super::harmony) read their text, so that what
//! is limited is what clients see as reasoning.
//!
//! - `spelled`: the text of every token; `tagged`: thoughts between two marks; `channelled`: thoughts in a channel

mod channelled;
mod spelled;
mod tagged;

use super::{harmony::Channels, reasoning::Thought, template::ChatTemplate, tokenizer::Tokenizer};
use spelled::Spelled;
use std::sync::Arc;
use tidemill_proto::thought::{ThoughtLimit, ThoughtReader};

/// The table of one model, whose chat template has marks for thoughts.
#[derive(Debug)]
pub struct LimitedThoughts {
    reader: Arc<ThoughtReader>,
}

impl LimitedThoughts {
    /// Makes the table; `None` for a model without thoughts, and for one whose marks a limit could not make it draw. Takes about as long as
    /// reading a tokenizer.
    pub fn new(template: &ChatTemplate, tokenizer: &Tokenizer) -> Option<Self> {
        let reader = if Channels::of(template, &[]).is_some() {
            channelled::reader(tokenizer)?
        } else {
            let (begin, end) = Thought::marks_in(template)?;
            tagged::reader(begin, end, &tagged::closing(end, tokenizer)?, &Spelled::new(tokenizer, &[begin, end]))?
        };
        Some(Self { reader: Arc::new(reader) })
    }

    /// A limit of this many tokens. `open`: whether the prompt has begun the thought.
    pub fn limit(&self, tokens_max: u32, open: bool) -> ThoughtLimit {
        let start = if open { tagged::OPEN } else { tagged::BEFORE };
        ThoughtLimit { tokens_max, start, reader: Arc::clone(&self.reader) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::{
        config::ModelConfig,
        output::{OutputRules, Splitter},
        tokenizer::tests::{sentencepiece, sentencepiece_with},
    };
    use proptest::prelude::*;
    use tidemill_proto::block::Token;

    const TAGS: [&str; 2] = ["[THINK]", "[/THINK]"];
    const HARMONY: [&str; 6] = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"];

    fn template(marks: &[&str]) -> ChatTemplate {
        ChatTemplate::new(marks.concat(), &ModelConfig::default()).unwrap()
    }

    /// Writes text in tokens: marks that the vocabulary has, other characters byte by byte.
    fn tokens(tokenizer: &Tokenizer, text: &str, marks: &[&str]) -> Vec<Token> {
        let (mut tokens, mut rest) = (Vec::new(), text);
        while let Some(c) = rest.chars().next() {
            let mark = marks.iter().find_map(|mark| Some((mark.len(), tokenizer.id_of(mark).filter(|_| rest.starts_with(mark))?)));
            let len = mark.map_or(c.len_utf8(), |(len, _)| len);
            let bytes = rest[..len].bytes().map(|byte| tokenizer.id_of(&format!("<0x{byte:02X}>")).unwrap());
            match mark {
                Some((_, id)) => tokens.push(id),
                None => tokens.extend(bytes),
            }
            rest = &rest[len..];
        }
        tokens
    }

    /// Compares the reader with the splitter after each token of a text.
    fn compare(tokenizer: &Tokenizer, marks: &[&str], output: &OutputRules, open: bool, text: &str) {
        let thoughts = LimitedThoughts::new(&template(marks), tokenizer).unwrap();
        let (limit, spelled) = (thoughts.limit(u32::MAX, open), Spelled::new(tokenizer, marks));
        let mut splitter = Splitter::new(output);
        let (mut at, mut thought) = (limit.after(&[]), 0);
        for token in tokens(tokenizer, text, marks) {
            let before = splitter.thinks();
            splitter.push(spelled.of(token));
            at = limit.step(at, token);
            thought += u32::from(before && splitter.thinks());
            assert_eq!(at.tokens, thought, "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn the_reader_of_tags_is_the_splitter(
            open: bool,
            special: bool,
            parts in prop::collection::vec(prop::sample::select(vec!["[THINK]", "[/THINK]", "[", "[/", "TH", "INK]", " ", "\n", "x", "[/THI", "yz"]), 0..12),
        ) {
            let tokenizer = if special { sentencepiece_with(&TAGS) } else { sentencepiece() };
            let thought = Thought { open, ..Thought::after(&template(&TAGS), "").unwrap() };
            compare(&tokenizer, &TAGS, &OutputRules { thought: Some(thought), ..OutputRules::default() }, open, &parts.concat());
        }

        #[test]
        fn the_reader_of_channels_is_the_splitter(
            messages in prop::collection::vec((
                prop::sample::select(vec!["analysis", "final", "commentary", "analysisx", "anal", "analysis to=python"]),
                prop::sample::select(vec!["", "x", "a b", "analysis"]),
                prop::sample::select(vec!["<|end|><|start|>assistant", "<|start|>assistant", "", "<|call|><|start|>assistant", "<|return|>"]),
            ), 0..5),
        ) {
            let channels = Channels::of(&template(&HARMONY), &[]);
            let text: String = messages.iter().map(|(name, said, end)| format!("<|channel|>{name}<|message|>{said}{end}")).collect();
            let output = OutputRules { channels, ..OutputRules::default() };
            compare(&sentencepiece_with(&HARMONY), &HARMONY, &output, false, &text);
        }
    }

    #[test]
    fn a_vocabulary_without_marks_of_channels_limits_nothing() {
        assert!(LimitedThoughts::new(&template(&HARMONY), &sentencepiece()).is_none());
        assert!(LimitedThoughts::new(&template(&["<think>"]), &sentencepiece()).is_none());
    }
}
