//! The settings by which a client's tokens are drawn. The gateway resolves them (defaults, ranges), and they reach the decode worker
//! unchanged, so that a rescued sequence draws exactly as it would have without the failure.

use crate::block::Token;
use serde::{Deserialize, Serialize};

/// Everything that, besides the logits, decides the next token.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sampling {
    /// Softmax temperature; 0 is greedy.
    pub temperature: f32,
    /// Nucleus sampling: the smallest set of tokens with at least this probability; 1 turns it off.
    pub top_p: f32,
    /// The number of likeliest tokens to sample from; 0 turns it off.
    pub top_k: u32,
    /// Least probability, as a fraction of the likeliest token's; 0 turns it off.
    pub min_p: f32,
    /// Draw number `i` of a sequence depends only on (seed, i). The gateway picks a seed if the client gives none.
    pub seed: u64,
    pub presence_penalty: f32,
    pub frequency_penalty: f32,
    /// Values above 1 discourage tokens that occurred before; 1 turns it off.
    pub repetition_penalty: f32,
    /// Values added to the logits of these tokens.
    pub logit_bias: Vec<(Token, f32)>,
    /// `Some(n)`: report the log-probability of the drawn token and of the `n` likeliest ones.
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
    /// Describes the fault in a peer's settings, if they would leave no token to draw.
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

/// The condition that ends a sequence, by token ids. The gateway handles stop strings, since only it sees text.
#[derive(Clone, Debug, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct StopRule {
    /// The maximum number of tokens to generate.
    pub max_tokens: u32,
    /// The number of tokens before which none of `stop_tokens` may be drawn.
    pub min_tokens: u32,
    /// Tokens that end the sequence when drawn: the model's end-of-sequence ids (unless ignored) and the client's own.
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
