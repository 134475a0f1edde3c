//! The prompt tokens of one step: the jobs that get them, and the number that fits into the step's time.

use crate::{
    job::{JobId, ScheduledChunk},
    order::{Owed, Rank},
    pace::{Pace, StepWork},
};
use tidemill_proto::block::BLOCK_TOKENS;

/// Prompt tokens of a step until their time is known.
const FIRST_TOKENS: usize = 128;

/// A prompt that has tokens to compute.
#[derive(Clone, Copy, Debug)]
pub struct Candidate {
    pub job: JobId,
    pub rank: Rank,
    /// The job's number in order of arrival.
    pub number: u64,
    /// Position of the next token.
    pub start: usize,
    pub remaining: usize,
    /// Whether the whole prompt must be computed in one step.
    pub is_whole: bool,
}

/// Room for prompt tokens in a step.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    pub tokens: usize,
    pub ms: f64,
}

/// Distributes a step's room: first the tokens that the oldest prompt is owed, then by rank. A prompt that ends with this step does not
/// wait for tokens of those that continue. At least one block's tokens are computed, or one prompt that cannot be cut, if `room` has the
/// tokens, even if the step is out of time.
pub fn give_out(mut room: Room, mut candidates: Vec<Candidate>, pace: &Pace, owed: &mut Owed) -> Vec<ScheduledChunk> {
    let Some(oldest) = candidates.iter().min_by_key(|candidate| candidate.number).copied() else { return Vec::new() };
    let mut chunks: Vec<ScheduledChunk> = Vec::new();
    let all_tokens = room.tokens;
    if pace.token_ms(0).is_none() {
        room.tokens = room.tokens.min(FIRST_TOKENS);
    }
    let mut one_ends = false;
    let due = owed.tokens(oldest.job).min(oldest.remaining);
    candidates.sort_unstable_by_key(|candidate| candidate.rank);
    for (candidate, most) in [(oldest, due)].into_iter().chain(candidates.iter().map(|candidate| (*candidate, candidate.remaining))) {
        let Candidate { job, start, is_whole, .. } = candidate;
        let at = chunks.iter().position(|chunk| chunk.job == job);
        let before = at.map_or(0, |at| chunks[at].len);
        let len = match (is_whole, most) {
            (_, 0) => 0,
            (false, _) => fitting(&room, start + before, most - before.min(most), chunks.is_empty(), pace),
            (true, _) if chunks.is_empty() => Some(candidate.remaining).filter(|tokens| *tokens <= all_tokens).unwrap_or(0),
            (true, _) => whole(&room, candidate.remaining - before, pace),
        };
        let ends = before + len == candidate.remaining;
        if len == 0 || one_ends && !ends {
            continue;
        }
        one_ends |= ends;
        room.tokens = room.tokens.saturating_sub(len);
        room.ms -= pace.prompt(start + before, len).as_secs_f64() * 1e3;
        match at {
            Some(at) => chunks[at].len += len,
            None => chunks.push(ScheduledChunk { job, start, len }),
        }
    }
    let own = chunks.iter().filter(|chunk| chunk.job == oldest.job).map(|chunk| chunk.len).sum();
    let all: usize = chunks.iter().map(|chunk| chunk.len).sum();
    owed.note(oldest.job, own, all - own);
    chunks
}

/// The number of tokens of a prompt that cannot be cut, if there is room for all of them; else 0.
fn whole(room: &Room, tokens: usize, pace: &Pace) -> usize {
    let fits = tokens <= room.tokens && pace.prompt(0, tokens).as_secs_f64() * 1e3 <= room.ms;
    if fits { tokens } else { 0 }
}

/// The number of tokens from position `start` on, at most `most`, for which there is room. If time cuts them, they end at the nearest block
/// boundary.
fn fitting(room: &Room, start: usize, most: usize, is_first: bool, pace: &Pace) -> usize {
    let most = most.min(room.tokens);
    // If tokens cost nothing, all of them fit.
    let in_time = pace.token_ms(start).map_or(f64::INFINITY, |ms| room.ms.max(0.0) / ms.max(1e-9)) as usize;
    if in_time >= most {
        return most;
    }
    let to_boundary = (start + in_time + BLOCK_TOKENS / 2) / BLOCK_TOKENS * BLOCK_TOKENS;
    match to_boundary.saturating_sub(start) {
        0 if is_first => most.min(BLOCK_TOKENS - start % BLOCK_TOKENS),
        len => len.min(most),
    }
}

/// The work of a step with these prompt chunks and `rows` sequences that decode.
pub fn work(rows: usize, prompts: &[ScheduledChunk]) -> StepWork {
    let mut work = StepWork { rows, ..StepWork::default() };
    prompts.iter().for_each(|chunk| work.add(chunk));
    work
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::order::Standing;
    use std::time::Duration;
    use tidemill_proto::urgency::Urgency;

    /// Prompts `due in ms : start + remaining`, in the order of arrival, and the room `tokens, ms`, with one millisecond per token; `!`
    /// marks a prompt that cannot be cut. Expected are chunks `prompt: start + length`.
    fn check(owed: &mut Owed, prompts: &str, tokens: usize, ms: f64, expected: &str) {
        let mut pace = Pace::default();
        pace.observe(&work(0, &[ScheduledChunk { job: JobId(0), start: 0, len: 100 }]), Duration::from_millis(100));
        let candidate = |(number, cell): (u64, &str)| {
            let (due, rest) = cell.split_once(':').unwrap();
            let (start, rest) = rest.split_once('+').unwrap();
            let remaining = rest.trim_end_matches('!');
            let urgency = Urgency { due_ms: Some(due.parse().unwrap()), ..Urgency::default() };
            let standing = Standing { arrived: Duration::ZERO, work: Duration::ZERO, left: Duration::ZERO, over_share: false };
            let rank = Rank::new(&urgency, standing, number, Duration::ZERO);
            Candidate {
                job: JobId(number),
                rank,
                number,
                start: start.parse().unwrap(),
                remaining: remaining.parse().unwrap(),
                is_whole: rest.ends_with('!'),
            }
        };
        let candidates = (0..).zip(prompts.split_whitespace()).map(candidate).collect();
        let chunks = give_out(Room { tokens, ms }, candidates, &pace, owed);
        let text: Vec<String> = chunks.iter().map(|chunk| format!("{}: {}+{}", chunk.job.0, chunk.start, chunk.len)).collect();
        assert_eq!(text.join(", "), expected, "{prompts} in {tokens} tokens and {ms} ms");
    }

    #[test]
    fn urgent_prompts_first_as_far_as_there_is_time_and_none_that_ends_waits_for_others() {
        for (prompts, tokens, ms, expected) in [
            ("9000:0+1000 300:0+500", 256, 100.0, "1: 0+96"),
            ("9000:0+1000 300:0+50", 256, 100.0, "1: 0+50"),
            ("9000:0+30 300:0+50 9000:0+40", 256, 100.0, "1: 0+50, 0: 0+30"),
            ("9000:0+1000 300:0+50", 30, 100.0, "1: 0+30"),
            ("9000:0+1000", 256, 100.0, "0: 0+96"),
            ("9000:5+1000", 256, 100.0, "0: 5+107"),
            ("9000:0+1000", 256, 3.0, "0: 0+16"),
            ("9000:7+1000", 256, -5.0, "0: 7+9"),
            ("9000:0+3 300:0+2", 256, 0.0, "1: 0+2"),
            ("9000:0+3 300:0+2", 0, 10.0, ""),
            ("", 256, 100.0, ""),
        ] {
            check(&mut Owed::default(), prompts, tokens, ms, expected);
        }
    }

    #[test]
    fn the_oldest_gets_what_it_is_owed_and_no_more() {
        let mut owed = Owed::default();
        owed.note(JobId(0), 0, 256);
        check(&mut owed, "9000:0+1000 300:0+500", 200, 100.0, "0: 0+32, 1: 0+64");
        check(&mut owed, "9000:32+968 300:64+436", 200, 100.0, "1: 64+96");
    }

    #[test]
    fn a_prompt_that_cannot_be_cut_is_computed_as_a_whole_or_waits() {
        for (prompts, tokens, ms, expected) in [
            ("9000:0+200!", 256, 100.0, "0: 0+200"),
            ("9000:0+300!", 256, 1000.0, ""),
            ("300:0+60! 9000:0+60!", 256, 100.0, "0: 0+60"),
            ("300:0+40! 9000:0+40!", 256, 100.0, "0: 0+40, 1: 0+40"),
            ("9000:0+200! 300:0+100!", 256, 1000.0, "1: 0+100"),
            ("9000:0+200! 300:0+40!", 256, 1000.0, "1: 0+40, 0: 0+200"),
        ] {
            check(&mut Owed::default(), prompts, tokens, ms, expected);
        }
        let mut owed = Owed::default();
        owed.note(JobId(0), 0, 256);
        check(&mut owed, "9000:0+200! 300:0+100!", 256, 1000.0, "0: 0+200");
    }

    #[test]
    fn before_anything_is_known_a_step_is_small() {
        let candidate = Candidate {
            job: JobId(1),
            rank: Rank::new(
                &Urgency::default(),
                Standing { arrived: Duration::ZERO, work: Duration::ZERO, left: Duration::ZERO, over_share: false },
                1,
                Duration::ZERO,
            ),
            number: 1,
            start: 0,
            remaining: 10_000,
            is_whole: false,
        };
        let chunks = give_out(Room { tokens: 8192, ms: 100.0 }, vec![candidate], &Pace::default(), &mut Owed::default());
        assert_eq!(chunks[0].len, FIRST_TOKENS);
        let whole = Candidate { remaining: 300, is_whole: true, ..candidate };
        let chunks = give_out(Room { tokens: 8192, ms: 100.0 }, vec![whole], &Pace::default(), &mut Owed::default());
        assert_eq!(chunks[0].len, 300);
    }
}
