//! Turns one answer's events into latencies. All times count from the time at which the request was *due*, not from when it was sent: a
//! user would also have waited for a slow server or a busy client (Tene's "coordinated omission").

use std::time::Duration;

/// Arrival times within an unfinished answer.
#[derive(Clone, Debug, Default)]
pub struct Timeline {
    first: Option<Duration>,
    last: Duration,
    chunks: u64,
    gaps: Vec<Duration>,
}

/// A complete answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Answer {
    /// The time to the first token.
    pub ttft: Duration,
    /// The time to the last token.
    pub e2e: Duration,
    /// The times between chunks. A server that sends several tokens in a chunk has fewer and longer gaps.
    pub gaps: Vec<Duration>,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub output_tokens: u64,
}

impl Timeline {
    /// Notes that a chunk with at least one token arrived, `at` after the request was due.
    pub fn token(&mut self, at: Duration) {
        match self.first {
            None => self.first = Some(at),
            Some(_) => self.gaps.push(at.saturating_sub(self.last)),
        }
        self.last = at;
        self.chunks += 1;
    }

    /// Completes the answer. `usage` has the server's token counts, if it reports them: (prompt, cached, output). Returns `None` if there
    /// was no token at all.
    pub fn finish(self, usage: Option<(u64, u64, u64)>) -> Option<Answer> {
        let (prompt_tokens, cached_tokens, output_tokens) = usage.unwrap_or((0, 0, self.chunks));
        let Timeline { last: e2e, gaps, .. } = self;
        Some(Answer { ttft: self.first?, e2e, gaps, prompt_tokens, cached_tokens, output_tokens })
    }
}

impl Answer {
    /// The time per output token after the first; `None` if there is no second.
    pub fn tpot(&self) -> Option<Duration> {
        let steps = u32::try_from(self.output_tokens).ok()?.checked_sub(1)?;
        (self.e2e - self.ttft).checked_div(steps)
    }

    /// Mooncake's time between tokens: the mean of the longest tenth of the gaps, at least one; `None` without a gap.
    pub fn tbt(&self) -> Option<Duration> {
        let mut gaps = self.gaps.clone();
        gaps.sort_unstable_by(|a, b| b.cmp(a));
        let longest = &gaps[..gaps.len().div_ceil(10)];
        longest.iter().sum::<Duration>().checked_div(longest.len() as u32)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn latencies_are_the_definitions() {
        let mut timeline = Timeline::default();
        for at in [100, 120, 150, 160] {
            timeline.token(ms(at));
        }
        let answer = timeline.clone().finish(None).unwrap();
        assert_eq!((answer.ttft, answer.e2e, answer.output_tokens), (ms(100), ms(160), 4));
        assert_eq!(answer.gaps, [ms(20), ms(30), ms(10)]);
        assert_eq!(answer.tpot(), Some(ms(20)));
        // There are seven tokens in four chunks: the server's count is right.
        let answer = timeline.finish(Some((33, 32, 7))).unwrap();
        assert_eq!((answer.output_tokens, answer.tpot(), answer.cached_tokens), (7, Some(ms(10)), 32));
    }

    #[test]
    fn a_stutter_shows_in_the_longest_tenth_of_the_gaps() {
        let answer = |gaps: Vec<Duration>| Answer { ttft: ms(1), e2e: ms(9), gaps, prompt_tokens: 0, cached_tokens: 0, output_tokens: 1 };
        let mut gaps = vec![ms(10); 18];
        gaps.extend([ms(100), ms(300)]);
        assert_eq!(answer(gaps).tbt(), Some(ms(200)));
        assert_eq!((answer(vec![ms(7)]).tbt(), answer(vec![]).tbt()), (Some(ms(7)), None));
    }

    #[test]
    fn one_token_has_no_tpot_and_none_is_no_answer() {
        let mut timeline = Timeline::default();
        assert_eq!(timeline.clone().finish(Some((5, 0, 0))), None);
        timeline.token(ms(7));
        assert_eq!(timeline.finish(None).unwrap().tpot(), None);
    }
}
