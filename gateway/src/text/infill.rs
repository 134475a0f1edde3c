//! Fill in the middle: a prompt of the text before a gap and the text after it, for models that were trained on the marks between them.

use super::tokenizer::{EncodeError, Tokenizer};
use tidemill_proto::block::Token;

/// A form of such prompts, by the names of its marks.
#[derive(Debug)]
struct Form {
    /// The marks before the two texts, in their order.
    marks: [&'static str; 2],
    /// Whether the text after the gap comes first.
    after_first: bool,
    /// The mark after both texts, if there is one.
    last: Option<&'static str>,
    /// Whether the text after the gap is tokenized as one that goes on: without the space that the tokenizer puts before a text.
    is_glued: bool,
}

const fn form(before: &'static str, after: &'static str, last: &'static str) -> Form {
    Form { marks: [before, after], after_first: false, last: Some(last), is_glued: false }
}

/// The forms of published models. The first whose marks are all tokens of a tokenizer is its form.
const FORMS: &[Form] = &[
    // Qwen2.5, CodeGemma, Granite 4.
    form("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    // StarCoder, Granite.
    form("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    // SantaCoder.
    form("<fim-prefix>", "<fim-suffix>", "<fim-middle>"),
    // DeepSeek Coder, V2 and V3.
    form("<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"),
    // GLM-4.
    form("<|code_prefix|>", "<|code_suffix|>", "<|code_middle|>"),
    // CodeLlama.
    Form { is_glued: true, ..form("▁<PRE>", "▁<SUF>", "▁<MID>") },
    // Seed-Coder.
    Form { after_first: true, ..form("<[fim-suffix]>", "<[fim-prefix]>", "<[fim-middle]>") },
    // Codestral.
    Form { marks: ["[SUFFIX]", "[PREFIX]"], after_first: true, last: None, is_glued: true },
];

/// Tokens with which such models end what they fill in, besides the end of a sequence.
const ENDS: [&str; 9] = [
    "<|endoftext|>",
    "<|fim_pad|>",
    "<fim_pad>",
    "<|file_sep|>",
    "<file_sep>",
    "<|file_separator|>",
    "<|repo_name|>",
    "<repo_name>",
    "▁<EOT>",
];

/// A character that joins no other one in a token, so that a text after it is tokenized as one that goes on.
const JOINT: &str = "\u{263A}";

/// The marks of a tokenizer around a gap.
#[derive(Debug)]
pub struct Infill {
    marks: [Token; 2],
    after_first: bool,
    last: Option<Token>,
    is_glued: bool,
    ends: Vec<Token>,
}

impl Infill {
    /// Finds the marks; `None` if the tokenizer has none.
    pub fn of(tokenizer: &Tokenizer) -> Option<Self> {
        FORMS.iter().find_map(|form| {
            let marks = [tokenizer.id_of(form.marks[0])?, tokenizer.id_of(form.marks[1])?];
            let last = match form.last {
                Some(last) => Some(tokenizer.id_of(last)?),
                None => None,
            };
            let named = ENDS.iter().filter_map(|end| tokenizer.id_of(end));
            let ends = named.chain(marks).chain(last).collect();
            Some(Self { marks, after_first: form.after_first, last, is_glued: form.is_glued, ends })
        })
    }

    /// Tokens at which what is filled in ends.
    pub fn ends(&self) -> &[Token] {
        &self.ends
    }

    /// Tokenizes the text after the gap. The one before it is tokenized like any text.
    pub fn encode_after(&self, tokenizer: &Tokenizer, text: &str) -> Result<Vec<Token>, EncodeError> {
        if self.is_glued {
            let joint = tokenizer.encode(JOINT, false)?;
            let glued = tokenizer.encode(&format!("{JOINT}{text}"), false)?;
            if let Some(rest) = glued.strip_prefix(&joint[..]) {
                return Ok(rest.to_vec());
            }
        }
        tokenizer.encode(text, false)
    }

    /// Puts the text before the gap and the text after it into a prompt, with the tokens that the model expects before every text.
    pub fn prompt(&self, tokenizer: &Tokenizer, before: &[Token], after: &[Token]) -> Result<Vec<Token>, EncodeError> {
        let texts = if self.after_first { [after, before] } else { [before, after] };
        let mut prompt = tokenizer.encode("", true)?;
        for (mark, text) in self.marks.iter().zip(texts) {
            prompt.push(*mark);
            prompt.extend(text);
        }
        prompt.extend(self.last);
        Ok(prompt)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::tokenizer::tests::{sentencepiece, sentencepiece_with};

    /// The prompt of `Hello` before the gap and ` world` after it, as its tokens are spelt.
    fn prompt(marks: &[&str]) -> Option<Vec<String>> {
        let tokenizer = sentencepiece_with(marks);
        let infill = Infill::of(&tokenizer)?;
        let (before, after) = (tokenizer.encode("Hello", false).unwrap(), infill.encode_after(&tokenizer, " world").unwrap());
        let prompt = infill.prompt(&tokenizer, &before, &after).unwrap();
        Some(prompt.into_iter().map(|token| tokenizer.piece(token)).collect())
    }

    #[test]
    fn each_form_has_its_marks_and_its_order() {
        assert!(Infill::of(&sentencepiece()).is_none());
        assert_eq!(prompt(&["<|fim_prefix|>", "<|fim_suffix|>"]), None, "one is missing");
        let qwen = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"];
        assert_eq!(prompt(&qwen).unwrap(), [qwen[0], "▁Hello", qwen[1], "▁", "▁world", qwen[2]]);
        let deepseek = prompt(&["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]).unwrap();
        assert_eq!([&*deepseek[0], &*deepseek[2], deepseek.last().unwrap()], ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"]);
        let codestral = prompt(&["[PREFIX]", "[SUFFIX]"]).unwrap();
        let place = |piece: &str| codestral.iter().position(|of| of == piece);
        assert_eq!((place("[SUFFIX]"), place("▁world"), place("[PREFIX]")), (Some(0), Some(1), Some(2)));
    }

    #[test]
    fn a_text_that_goes_on_has_no_space_before_it() {
        let tokenizer = sentencepiece_with(&["▁<PRE>", "▁<SUF>", "▁<MID>"]);
        let infill = Infill::of(&tokenizer).unwrap();
        let glued = infill.encode_after(&tokenizer, " world!").unwrap();
        assert_eq!(glued.iter().map(|token| tokenizer.piece(*token)).collect::<Vec<_>>(), ["▁world", "!"]);
    }

    #[test]
    fn a_gap_ends_at_the_marks_and_at_the_ends_that_the_tokenizer_has() {
        let tokenizer = sentencepiece_with(&["<fim_prefix>", "<fim_suffix>", "<fim_middle>", "<file_sep>"]);
        let ends: Vec<_> = Infill::of(&tokenizer).unwrap().ends().iter().map(|token| tokenizer.piece(*token)).collect();
        assert_eq!(ends, ["<file_sep>", "<fim_prefix>", "<fim_suffix>", "<fim_middle>"]);
    }
}
