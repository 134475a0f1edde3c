//! The tokens of each sequence that the next step verifies, and the draft model's rounds before it.

use super::{LIVE, Outcome, Scheduler};
use crate::speculation::{
    draft_model::{Target, Wish},
    rows,
};
use std::time::Duration;
use tidemill_engine::{
    job::{JobId, ScheduledChunk},
    residency::JobKv,
};
use tidemill_proto::block::BLOCK_TOKENS;

impl Scheduler {
    /// The next step of the draft model; empty if its round is over, and its guesses are ready for the next step.
    pub(super) fn next_guesses(&mut self, now: Duration) -> Vec<ScheduledChunk> {
        let Some(model) = &self.draft_model else { return Vec::new() };
        if !model.is_at_work() {
            self.begin_guessing();
        }
        let Some(model) = &mut self.draft_model else { return Vec::new() };
        let chunks = model.next(now);
        if chunks.is_empty() {
            for (job, guesses) in model.end() {
                self.sequences.get_mut(&job).expect("a sequence lives as long as its guesses are made").take_guesses(guesses);
            }
        }
        chunks
    }

    /// Begins a round for the sequences whose next tokens the draft model is likelier to guess right than their proposers.
    fn begin_guessing(&mut self) {
        let Some(speculation) = self.speculation else { return };
        let (most, longest) = (speculation.draft_tokens_max, self.limits.longest(self.residency.device_blocks()));
        let decoding = self.decoding();
        let rows = speculation.rows_max.min(self.limits.step_tokens).saturating_sub(decoding.len());
        let least = speculation.draft_tokens_min;
        // Without room for guesses, prompts are not caught up either.
        if rows == 0 || !self.may_guess(decoding.len()) {
            self.draft_model.iter_mut().for_each(|model| model.begin(&[], Target::default()));
            return;
        }
        let limit_ms = self.step_limit_ms();
        let mut plain = self.propose(&decoding);
        let Self { sequences, draft_model: Some(model), row_cost, .. } = self else { return };
        let wish = |(id, chances): (&JobId, &mut Vec<f64>)| {
            let wish = sequences[id].wish(most, longest)?;
            chances.clear();
            Some(wish)
        };
        let wishes: Vec<Wish<'_>> = decoding.iter().zip(&mut plain).filter_map(wish).collect();
        let given = rows::give_out(&plain, rows::Room { drafts: rows, ms: limit_ms, least }, row_cost);
        let rows = rows - given.drafts.iter().sum::<usize>();
        let (cost, sequences, tokens, ms) = (*row_cost, decoding.len(), given.tokens, given.ms);
        model.begin(&wishes, Target { cost, sequences, tokens, ms, limit_ms, rows, least });
    }

    /// The time that the draft model took before the planned step.
    pub(super) fn guessing_ms(&self) -> f64 {
        self.draft_model.as_ref().map_or(0.0, |model| model.round_ms())
    }

    /// Whether the next step may have guesses, if this many sequences decode. Beside prompts it has none unless it must: prompts leave no
    /// arithmetic to spare, and each moment spent on guesses keeps the sequences from joining those that decode.
    fn may_guess(&self, sequences: usize) -> bool {
        let has_prompts = self.admitted.iter().map(|id| &self.sequences[id]).any(|state| state.is_ready() && !state.is_decoding());
        !has_prompts && self.trials.may_guess(sequences) || self.speculation.is_some_and(|speculation| speculation.draft_tokens_min > 0)
    }

    /// Notes the yield of a step of this many decoding sequences, including the draft model's time before it.
    pub(super) fn note_yield(&mut self, sequences: usize, outcome: &Outcome, took: Duration) {
        let guessing_ms = self.guessing_ms();
        let tokens: usize = outcome.tokens.values().map(Vec::len).sum();
        self.trials.note(sequences, outcome.has_guesses || guessing_ms > 0.0, tokens, guessing_ms + took.as_secs_f64() * 1e3);
    }

    pub(super) fn leave_draft_model(&mut self, id: JobId) {
        self.draft_model.iter_mut().for_each(|model| model.leave(id));
    }

    fn decoding(&self) -> Vec<JobId> {
        self.admitted.iter().copied().filter(|id| self.sequences[id].is_decoding()).collect()
    }

    /// Proposes tokens for these sequences; returns the probability that each is drawn if those before it are.
    fn propose(&mut self, decoding: &[JobId]) -> Vec<Vec<f64>> {
        let most = self.speculation.map_or(0, |speculation| speculation.draft_tokens_max);
        let longest = self.limits.longest(self.residency.device_blocks());
        decoding.iter().map(|id| self.sequences.get_mut(id).expect(LIVE).propose(most, longest)).collect()
    }

    /// Decides how many guessed tokens of the decoding sequences the next step verifies.
    pub(super) fn draft(&mut self, limit_ms: f64) {
        let Some(speculation) = self.speculation else { return };
        let decoding = self.decoding();
        let chances = self.propose(&decoding);
        let rows_max = if self.may_guess(decoding.len()) { speculation.rows_max.min(self.limits.step_tokens) } else { 0 };
        let drafts = rows_max.saturating_sub(decoding.len());
        let room = rows::Room { drafts, ms: limit_ms, least: speculation.draft_tokens_min };
        for (id, len) in decoding.iter().zip(rows::give_out(&chances, room, &self.row_cost).drafts) {
            let len = self.room_for_drafts(*id, len);
            self.sequences.get_mut(id).expect(LIVE).draft(len);
        }
    }

    /// The number of `len` drafted tokens for which a sequence has blocks, including more blocks if no other sequence needs them soon.
    fn room_for_drafts(&mut self, id: JobId, len: usize) -> usize {
        let headroom = self.admitted.len();
        let kv = &mut self.sequences.get_mut(&id).expect(LIVE).kv;
        let has = |kv: &JobKv| kv.table().len() * BLOCK_TOKENS - kv.computed();
        while has(kv) < 1 + len && self.residency.free_blocks() > headroom && self.residency.grow(kv) {}
        len.min(has(kv).saturating_sub(1))
    }
}
