//! `/stats`: totals over all answers of a chat.

use super::Answer;
use std::{fmt, time::Duration};

#[derive(Default)]
pub(super) struct Stats {
    answers: u32,
    tokens: u64,
    prompt_tokens: u64,
    cached_tokens: u64,
    first_tokens: Duration,
    slowest_first_token: Duration,
    decoding: Duration,
}

impl Stats {
    pub(super) fn add(&mut self, answer: &Answer) {
        self.answers += 1;
        self.tokens += answer.tokens();
        self.first_tokens += answer.ttft;
        self.slowest_first_token = self.slowest_first_token.max(answer.ttft);
        self.decoding += answer.decoding();
        if let Some(usage) = &answer.usage {
            self.prompt_tokens += usage.prompt_tokens;
            self.cached_tokens += usage.cached_tokens();
        }
    }
}

impl fmt::Display for Stats {
    /// `3 answers · 210 tokens, 52.1 a second · first token after 31 ms on average, 64 at most · 96 of 171 prompt tokens cached`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { answers, tokens, prompt_tokens, cached_tokens, .. } = self;
        if *answers == 0 {
            return write!(f, "no answers yet");
        }
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        write!(f, "{answers} answers · {tokens} tokens")?;
        if !self.decoding.is_zero() {
            write!(f, ", {:.1} a second", tokens.saturating_sub(u64::from(*answers)) as f64 / self.decoding.as_secs_f64())?;
        }
        let mean = ms(self.first_tokens) / f64::from(*answers);
        write!(f, " · first token after {mean:.0} ms on average, {:.0} at most", ms(self.slowest_first_token))?;
        write!(f, " · {cached_tokens} of {prompt_tokens} prompt tokens cached")
    }
}
