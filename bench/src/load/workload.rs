//! The requests: random prompts of given lengths. The same seed gives the same prompts; after a shared prefix they differ from each
//! other.

use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::{Serialize, Serializer};
use std::{fmt, ops::RangeInclusive, str::FromStr};

/// A number of tokens, fixed (`512`) or drawn evenly from a range (`128-1024`).
#[derive(Clone, Debug, PartialEq)]
pub struct Length(pub RangeInclusive<u32>);

/// How prompts are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum PromptKind {
    /// Token ids: lengths are exact. Needs a server that takes them.
    Tokens,
    /// Common words: about one token each, depending on the server's tokenizer.
    Text,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Prompt {
    Tokens(Vec<u32>),
    Text(String),
}

/// One request's prompt, and the answer's length.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    pub prompt: Prompt,
    pub output_tokens: u32,
}

/// How to draw [`Ask`]s.
#[derive(Clone, Debug)]
pub struct Workload {
    pub kind: PromptKind,
    pub input: Length,
    pub output: Length,
    /// Leading tokens that all prompts have in common; no prompt is shorter.
    pub prefix: u32,
    /// Token ids are drawn below this.
    pub vocab: u32,
    pub seed: u64,
}

impl Workload {
    pub fn draw(&self, requests: usize) -> Vec<Ask> {
        let mut rng = StdRng::seed_from_u64(self.seed);
        let prefix: Vec<u32> = (0..self.prefix).map(|_| self.token(&mut rng)).collect();
        let asks = (0..requests).map(|_| {
            let length = rng.random_range(self.input.0.clone()).max(self.prefix);
            let own: Vec<u32> = (self.prefix..length).map(|_| self.token(&mut rng)).collect();
            Ask { prompt: self.prompt([&prefix[..], &own].concat()), output_tokens: rng.random_range(self.output.0.clone()) }
        });
        asks.collect()
    }

    /// The lowest ids are left out, since models keep their special tokens there.
    fn token(&self, rng: &mut StdRng) -> u32 {
        rng.random_range(SPECIAL.min(self.vocab - 1)..self.vocab)
    }

    fn prompt(&self, tokens: Vec<u32>) -> Prompt {
        match self.kind {
            PromptKind::Tokens => Prompt::Tokens(tokens),
            PromptKind::Text => {
                let words: Vec<&str> = tokens.iter().map(|token| WORDS[*token as usize % WORDS.len()]).collect();
                Prompt::Text(words.join(" "))
            }
        }
    }
}

impl FromStr for Length {
    type Err = String;

    fn from_str(text: &str) -> Result<Length, String> {
        let (least, most) = text.split_once('-').unwrap_or((text, text));
        match (least.parse(), most.parse()) {
            (Ok(least), Ok(most)) if 1 <= least && least <= most => Ok(Length(least..=most)),
            _ => Err("a length is a number of tokens, such as 512, or a range, such as 128-1024".into()),
        }
    }
}

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (least, most) = (self.0.start(), self.0.end());
        if least == most { write!(f, "{least}") } else { write!(f, "{least}-{most}") }
    }
}

impl Serialize for Length {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        (self.0.start(), self.0.end()).serialize(serializer)
    }
}

const SPECIAL: u32 = 8;

/// The most frequent English words: one token each in most tokenizers.
const WORDS: [&str; 64] = [
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with", "his", "they", "at", "be",
    "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what", "all", "were", "we", "when", "your", "can", "said",
    "there", "use", "an", "each", "which", "she", "do", "how", "their", "if", "will", "up", "other", "about", "out", "many", "then",
    "them", "these", "so", "some", "her", "would", "make", "like", "him",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn workload(kind: PromptKind) -> Workload {
        Workload { kind, input: Length(20..=40), output: Length(5..=5), prefix: 16, vocab: 256, seed: 3 }
    }

    fn tokens(ask: &Ask) -> &[u32] {
        match &ask.prompt {
            Prompt::Tokens(tokens) => tokens,
            Prompt::Text(text) => panic!("text: {text}"),
        }
    }

    #[test]
    fn prompts_share_their_prefix_and_nothing_more() {
        let asks = workload(PromptKind::Tokens).draw(200);
        assert_eq!(asks, workload(PromptKind::Tokens).draw(200));
        let mut lengths: Vec<usize> = asks.iter().map(|ask| tokens(ask).len()).collect();
        lengths.sort();
        lengths.dedup();
        assert_eq!(lengths, Vec::from_iter(20..=40), "every length of the range comes up");
        for pair in asks.windows(2) {
            let (a, b) = (tokens(&pair[0]), tokens(&pair[1]));
            assert_eq!(a[..16], b[..16]);
            assert_ne!(a[16..20], b[16..20]);
            assert!(a.iter().all(|token| (SPECIAL..256).contains(token)));
        }
    }

    #[test]
    fn no_prompt_is_shorter_than_the_prefix() {
        let short = Workload { input: Length(1..=1), ..workload(PromptKind::Tokens) };
        assert!(short.draw(3).iter().all(|ask| tokens(ask).len() == 16));
    }

    #[test]
    fn text_has_a_word_for_each_token() {
        for ask in workload(PromptKind::Text).draw(20) {
            let Prompt::Text(text) = ask.prompt else { panic!("tokens") };
            assert!((20..=40).contains(&text.split(' ').count()));
        }
    }

    #[test]
    fn lengths_are_checked() {
        assert_eq!("512".parse(), Ok(Length(512..=512)));
        assert_eq!("1-9".parse(), Ok(Length(1..=9)));
        for wrong in ["", "0", "9-1", "a", "1-2-3", "-5"] {
            assert!(wrong.parse::<Length>().is_err(), "{wrong}");
        }
    }
}
