//! How a client's tokens are drawn. The front door resolves the settings (defaults, ranges) and they reach the decode worker unchanged,
//! so that a rescued sequence draws exactly as it would have.

use crate::block::Token;
use serde::{Deserialize, Serialize};

/// Everything that, besides the logits, decides the next token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// 0 is greedy.
    pub temperature: f32,
    /// Nucleus: smallest set of tokens with at least this probability; 1 turns it off.
    pub top_p: f32,
    /// Most likely tokens to draw from; 0 turns it off.
    pub top_k: u32,
    /// Least probability, as a fraction of the likeliest token's; 0 turns it off.
    pub min_p: f32,
    /// Draw number `i` of a sequence depends on (seed, i) alone. The front door picks a seed if the client gives none.
    pub seed: u64,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// 1 turns it off.
    pub repetition_penalty: f32,
    /// Added to these tokens' logits.
    pub logit_bias: Vec<(Token, f32)>,
    /// `Some(n)`: report the drawn token's log-probability and those of the `n` likeliest.
    pub logprobs: Option<u32>,
}

impl Default for Sampling {
    fn default() -> Self {
        Self {
            temperature: 1.0,
            top_p: 1.0,
            top_k: 0,
            min_p: 0.0,
            seed: 0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            repetition_penalty: 1.0,
            logit_bias: Vec::new(),
            logprobs: None,
        }
    }
}

impl Sampling {
    /// The fault in a peer's settings, if any: one that would let no token be drawn.
    pub fn fault(&self) -> Option<String> {
        let outside = |name: &str, value: f32, low: f32, high: f32| {
            let inside = value >= low && value <= high;
            (!inside).then(|| format!("`{name}` is {value}, not from {low} to {high}"))
        };
        outside("temperature", self.temperature, 0.0, f32::MAX)
            .or_else(|| outside("top_p", self.top_p, f32::MIN_POSITIVE, 1.0))
            .or_else(|| outside("min_p", self.min_p, 0.0, 1.0))
            .or_else(|| outside("presence_penalty", self.presence_penalty, f32::MIN, f32::MAX))
            .or_else(|| outside("frequency_penalty", self.frequency_penalty, f32::MIN, f32::MAX))
            .or_else(|| outside("repetition_penalty", self.repetition_penalty, f32::MIN_POSITIVE, f32::MAX))
            .or_else(|| self.logit_bias.iter().find_map(|&(_, bias)| outside("logit_bias", bias, f32::MIN, f32::MAX)))
    }

    /// Whether a token's past occurrences change its logit.
    pub fn penalizes(&self) -> bool {
        self.presence_penalty != 0.0 || self.frequency_penalty != 0.0 || self.repetition_penalty != 1.0
    }
}

/// When a sequence ends, by token ids. The front door handles stop strings, since text never passes it.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StopRule {
    /// Most tokens to generate.
    pub max_tokens: u32,
    /// None of `stop_tokens` may be drawn before this many tokens.
    pub min_tokens: u32,
    /// Ends the sequence when drawn: the model's end-of-sequence ids (unless ignored) and the client's own.
    pub stop_tokens: Vec<Token>,
}

/// One token's log-probability (natural log of softmax over the raw logits, before temperature and penalties).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TokenLogprob {
    pub logprob: f32,
    /// The likeliest tokens, most likely first.
    pub top: Vec<(Token, f32)>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_that_draw_nothing_are_named() {
        assert_eq!(Sampling::default().fault(), None);
        for (wrong, name) in [
            (Sampling { temperature: f32::NAN, ..Default::default() }, "temperature"),
            (Sampling { top_p: 0.0, ..Default::default() }, "top_p"),
            (Sampling { min_p: 1.5, ..Default::default() }, "min_p"),
            (Sampling { repetition_penalty: 0.0, ..Default::default() }, "repetition_penalty"),
            (Sampling { logit_bias: vec![(1, f32::INFINITY)], ..Default::default() }, "logit_bias"),
        ] {
            assert!(wrong.fault().is_some_and(|fault| fault.contains(name)), "{wrong:?}");
        }
    }
}
