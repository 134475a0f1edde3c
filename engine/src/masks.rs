//! Grammars of constrained sequences: compiled when a job comes, then one mask per token, computed beside the forward pass.
//!
//! ```text
//!   engine ── job ──► [ compiler ] ── first mask, matcher ──► inbox
//!     │                                                          │
//!     ├── token drawn ──► [ maskers ] ── next mask ──► Cell ◄────┘
//!     └── next step: forward pass … sampler waits at the Cell
//! ```
//!
//! If a step verifies drafted tokens, each row has a cell of its own. A later row's mask is begun when the token before it is drawn, so a
//! matcher sees the tokens of the sequence alone, one at a time: nothing is ever rolled back, and a grammar's work is the same with drafts
//! as without.
//!
//! **A mask delays its own sequence, and others by a tenth of their time at most.** The forward pass hides almost all masks. But one may
//! take a second, as the compiler's limits count items and not their cost, so:
//!
//! - The rows of a step share its [`Patience`]. A row whose mask is still missing yields no token, and is computed again with the same bits.
//!   States of recurrent layers cannot be computed again in place: a model that has them waits before the step.
//! - A sequence whose mask was late, or whose last masks were slow, sits out until its mask is there, which wakes the engine.
//! - A slow sequence has no drafts, whose masks would be computed in the step, and its masks have threads of their own ([`maskers`]).
//!
//! A matcher has at most one token in flight, so the queues hold no more than there are sequences. Compiling may take long, and so may
//! applying the tokens of a sequence that comes from another worker: both have a thread of their own, and delay no masks. In all queues,
//! groups of requests take [turns](crate::turns), so that a group with many grammars waits for its own.
//!
//! - [`cell`]: a mask in progress; [`maskers`]: the threads that compute masks
//! - [`narrowed`]: a mask of which another rule allows only a part

mod cell;
mod maskers;
pub(crate) mod narrowed;

use crate::{engine::Event, job::JobId, role::MaskState, turns::Turns};
use cell::{Cell, Patience};
use maskers::{Follower, Maskers};
use std::{
    collections::HashMap,
    fmt, mem,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{Arc, OnceLock},
    thread,
    time::Duration,
};
use tidemill_grammar::{Compiler, Matcher, Vocabulary};
use tidemill_proto::{
    block::Token,
    grammar::Constraint,
    step::{Allowed, DRAFT_TOKENS_MAX, Mask, Withheld},
};

/// The most time for which masks may delay a step. Almost all masks take microseconds, and have the forward pass to be computed in.
const PATIENCE: Duration = Duration::from_millis(5);

/// The engine's side.
pub(crate) struct Masks {
    starts: Arc<Turns<Start>>,
    maskers: Arc<Maskers>,
    sequences: HashMap<JobId, Followed>,
    patience: Arc<Patience>,
    /// Whether a row can be computed again.
    rows_repeat: bool,
}

/// A sequence whose grammar is compiled.
#[derive(Debug)]
pub struct Constrained {
    follower: Arc<Follower>,
    /// The tokens that may be drawn next.
    next: Arc<Cell>,
}

/// A sequence whose tokens are drawn under its grammar.
struct Followed {
    constrained: Constrained,
    /// The masks of tokens after the next one in the same step, as far as the step has come.
    later: [OnceLock<Arc<Cell>>; DRAFT_TOKENS_MAX],
    maskers: Arc<Maskers>,
    patience: Arc<Patience>,
}

struct Start {
    job: JobId,
    group: u64,
    constraint: Constraint,
    generated: Vec<Token>,
}

/// The engine's inbox, which gets the answers.
pub(crate) type Inbox = tokio::sync::mpsc::Sender<Event>;

impl Masks {
    /// Starts the threads for the model in `dir`, whose rows of logits have `width` entries, and can be computed again if `rows_repeat`.
    /// Its tokenizer is read at once, in the background.
    pub(crate) fn start(dir: PathBuf, width: usize, rows_repeat: bool, threads: usize, inbox: Inbox) -> std::io::Result<Self> {
        let starts = Arc::new(Turns::new());
        let (taken, maskers) = (Arc::clone(&starts), Maskers::start(threads, &inbox)?);
        thread::Builder::new().name("grammars".into()).spawn(move || compile(&dir, width, &taken, &inbox))?;
        let patience = Arc::new(Patience::new(PATIENCE));
        Ok(Self { starts, maskers, sequences: HashMap::new(), patience, rows_repeat })
    }

    /// Compiles a job's grammar, at its group's turn. Answered by [`Event::Constrained`].
    pub(crate) fn compile(&self, group: u64, job: JobId, constraint: Constraint, generated: Vec<Token>) {
        self.starts.put(group, Start { job, group, constraint, generated });
    }

    /// From now on, draws the job's tokens under its grammar.
    pub(crate) fn insert(&mut self, job: JobId, constrained: Constrained) {
        let (maskers, patience) = (Arc::clone(&self.maskers), Arc::clone(&self.patience));
        self.sequences.insert(job, Followed { constrained, later: Default::default(), maskers, patience });
    }

    /// The states of all masks for the plan of a new step. An awaited mask is followed by [`Event::Masked`].
    pub(crate) fn states(&self) -> impl Iterator<Item = (JobId, MaskState)> {
        self.patience.renew();
        self.sequences.iter().map(|(&job, followed)| (job, followed.state(self.rows_repeat)))
    }

    /// The tokens that the job may draw next; `None` if it has no grammar.
    pub(crate) fn next(&self, job: JobId) -> Option<&dyn Allowed> {
        self.sequences.get(&job).map(|followed| followed as &dyn Allowed)
    }

    /// Notes the last of the tokens that a step has drawn, and their number: the next mask is computed from here on.
    pub(crate) fn advance(&mut self, job: JobId, token: Token, drawn: usize) {
        if let Some(followed) = self.sequences.get_mut(&job) {
            // If the step went on to the next row, whose mask was late, that mask is on its way.
            let later = mem::take(&mut followed.later).into_iter().nth(drawn - 1).and_then(OnceLock::into_inner);
            followed.constrained.next = later.unwrap_or_else(|| followed.begin(token));
        }
    }

    /// Forgets the jobs that ended.
    pub(crate) fn retain(&mut self, lives: impl Fn(JobId) -> bool) {
        self.sequences.retain(|&job, _| lives(job));
    }
}

impl Drop for Masks {
    /// Closes the queues; the threads end when they are empty.
    fn drop(&mut self) {
        self.starts.close();
        self.maskers.close();
    }
}

impl Followed {
    fn state(&self, rows_repeat: bool) -> MaskState {
        let Constrained { follower, next } = &self.constrained;
        let is_slow = follower.is_slow();
        if !is_slow && !rows_repeat {
            let _ = next.wait(&self.patience);
        }
        match next.is_due(!is_slow && rows_repeat) {
            false => MaskState::Awaited,
            true if is_slow => MaskState::Known,
            true => MaskState::InTime,
        }
    }

    fn begin(&self, token: Token) -> Arc<Cell> {
        self.maskers.begin(&self.constrained.follower, token)
    }
}

impl Allowed for Followed {
    fn wait(&self) -> Result<&Mask, Withheld<'_>> {
        self.constrained.next.wait(&self.patience)
    }

    fn wait_after(&self, drawn: &[Token]) -> Result<&Mask, Withheld<'_>> {
        let Some((&token, before)) = drawn.split_last() else { return self.wait() };
        let later = self.later.get(before.len());
        let later = later.ok_or(Withheld::Failed("more tokens were drawn in a step than may be drafted"))?;
        later.get_or_init(|| self.begin(token)).wait(&self.patience)
    }
}

impl fmt::Debug for Followed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Followed").field("constrained", &self.constrained).field("later", &self.later).finish_non_exhaustive()
    }
}

/// The loop of the compiler's thread.
fn compile(dir: &std::path::Path, width: usize, starts: &Turns<Start>, inbox: &Inbox) {
    let path = dir.join("tokenizer.json");
    let compiler = Vocabulary::load(&path, width).map(|vocabulary| Compiler::new(&vocabulary));
    if let Err(error) = &compiler {
        tracing::warn!(%error, "this worker fails every request with a grammar: it needs the model's tokenizer.json");
    }
    while let Some(Start { job, group, constraint, generated }) = starts.take() {
        let outcome = match &compiler {
            Ok(compiler) => unwinding(|| begin(compiler, group, &constraint, &generated)),
            Err(error) => Err(format!("this worker cannot follow a grammar without the model's tokenizer.json ({error})")),
        };
        // A closed inbox means that the engine has ended.
        let _ = inbox.blocking_send(Event::Constrained { job, generated: generated.len(), outcome });
    }
}

fn begin(compiler: &Compiler, group: u64, constraint: &Constraint, generated: &[Token]) -> Result<Constrained, String> {
    let compiled = compiler.compile(&constraint.grammar).map_err(|error| format!("its grammar does not compile: {error}"))?;
    let matcher = Matcher::new(&compiled, constraint, generated).map_err(|error| error.to_string())?;
    let (follower, next) = (Arc::new(Follower::new(group, matcher)), Arc::<Cell>::default());
    let _ = next.set(follower.mask(None));
    Ok(Constrained { follower, next })
}

/// Turns a panic in a grammar into an error, which ends its sequence only.
fn unwinding<T>(work: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|_| Err("its grammar broke the matcher: please report this as a bug".into()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_proto::grammar::Grammar;
    use tokio::sync::mpsc::channel;

    const JOB: JobId = JobId(3);
    const OTHER: JobId = JobId(4);

    type Events = tokio::sync::mpsc::Receiver<Event>;

    fn masks(dir: &str) -> (Masks, Events) {
        masks_of(dir, true)
    }

    fn masks_of(dir: &str, rows_repeat: bool) -> (Masks, Events) {
        let (inbox, events) = channel(8);
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(dir);
        (Masks::start(dir, 512, rows_repeat, 2, inbox).unwrap(), events)
    }

    /// Masks for which a step has time, however busy the machine is.
    fn patient_masks(dir: &str) -> (Masks, Events) {
        let (mut masks, events) = masks(dir);
        masks.patience = Arc::new(Patience::new(Duration::from_secs(60)));
        (masks, events)
    }

    fn constraint(expression: &str) -> Constraint {
        Constraint { grammar: Grammar::Regex(expression.into()), end_tokens: vec![1], ends_late: false }
    }

    fn outcome(events: &mut Events) -> Result<Constrained, String> {
        match events.blocking_recv() {
            Some(Event::Constrained { outcome, .. }) => outcome,
            other => panic!("{other:?}"),
        }
    }

    fn follow(masks: &mut Masks, events: &mut Events, job: JobId, expression: &str) -> Arc<Follower> {
        masks.compile(job.0, job, constraint(expression), Vec::new());
        let constrained = outcome(events).unwrap();
        let follower = Arc::clone(&constrained.follower);
        masks.insert(job, constrained);
        follower
    }

    fn state(masks: &Masks, of: JobId) -> MaskState {
        masks.states().find(|(job, _)| *job == of).unwrap().1
    }

    /// Draws the first allowed token; `None` if the mask is late.
    fn draw(masks: &mut Masks, job: JobId) -> Option<Token> {
        let token = match masks.next(job).unwrap().wait() {
            Ok(mask) => mask.tokens().next().unwrap(),
            Err(Withheld::Late) => return None,
            Err(failed) => panic!("{failed:?}"),
        };
        masks.advance(job, token, 1);
        Some(token)
    }

    #[test]
    fn each_token_brings_the_next_mask() {
        let (mut masks, mut events) = patient_masks("llama3");
        follow(&mut masks, &mut events, JOB, "a{3}");
        assert!(masks.next(OTHER).is_none());
        for _ in 0..3 {
            let mask = masks.next(JOB).unwrap().wait().unwrap().clone();
            assert!(!mask.allows(1));
            let token = mask.tokens().next().unwrap();
            masks.advance(JOB, token, 1);
            if masks.next(JOB).unwrap().wait().unwrap().allows(1) {
                break;
            }
        }
        assert_eq!(masks.next(JOB).unwrap().wait().unwrap().tokens().collect::<Vec<_>>(), [1], "the grammar is complete");
        masks.retain(|_| false);
        assert!(masks.next(JOB).is_none());
    }

    #[test]
    fn the_masks_of_a_step_with_drafts_are_those_of_steps_of_one_token() {
        let expression = "(ab|ac){40}";
        let (mut one, mut events) = patient_masks("llama3");
        follow(&mut one, &mut events, JOB, expression);
        let (mut tokens, mut expected) = (Vec::new(), Vec::new());
        for _ in 0..12 {
            let mask = one.next(JOB).unwrap().wait().unwrap().clone();
            // Different tokens have different masks after them, as far as the expression allows.
            let token = mask.tokens().nth(tokens.len() % 2).or(mask.tokens().next()).unwrap();
            expected.push(mask);
            tokens.push(token);
            one.advance(JOB, token, 1);
        }
        assert!(expected.windows(2).any(|pair| pair[0] != pair[1]));
        for drafted in [1, 2, 5, 11] {
            let (mut several, mut events) = patient_masks("llama3");
            follow(&mut several, &mut events, JOB, expression);
            for (step, drawn) in tokens.chunks(drafted + 1).enumerate() {
                for row in 0..drawn.len() {
                    let mask = several.next(JOB).unwrap().wait_after(&drawn[..row]).unwrap();
                    assert_eq!(*mask, expected[step * (drafted + 1) + row], "row {row} of step {step}, {drafted} drafted");
                }
                several.advance(JOB, *drawn.last().unwrap(), drawn.len());
            }
        }
        assert!(one.next(JOB).unwrap().wait_after(&[0; DRAFT_TOKENS_MAX + 1]).is_err());
    }

    #[test]
    fn a_sequence_whose_mask_does_not_come_sits_out_and_the_others_go_on() {
        let (mut masks, mut events) = masks("llama3");
        let delayed = follow(&mut masks, &mut events, JOB, "[a-z]*");
        follow(&mut masks, &mut events, OTHER, "[a-z]*");
        let delay = delayed.delay();
        assert!(draw(&mut masks, JOB).is_some(), "its first mask is known");
        assert_eq!(state(&masks, JOB), MaskState::InTime, "it has never been late");
        assert_eq!(masks.next(JOB).unwrap().wait(), Err(Withheld::Late));
        let mut drawn = 0;
        while drawn < 20 {
            let states: HashMap<_, _> = masks.states().collect();
            assert_eq!(states[&JOB], MaskState::Awaited);
            if states[&OTHER] == MaskState::Awaited {
                // The machine is so busy that this mask was late as well.
                assert!(matches!(events.blocking_recv(), Some(Event::Masked)));
                continue;
            }
            drawn += usize::from(draw(&mut masks, OTHER).is_some());
        }
        masks.retain(|job| job == JOB);
        while events.try_recv().is_ok() {}
        drop(delay);
        assert!(matches!(events.blocking_recv(), Some(Event::Masked)), "the engine is woken");
        assert_eq!(state(&masks, JOB), MaskState::InTime);
        assert!(draw(&mut masks, JOB).is_some());
    }

    #[test]
    fn a_mask_that_was_late_stays_so_for_the_rest_of_its_step() {
        let (mut masks, mut events) = masks("llama3");
        let delayed = follow(&mut masks, &mut events, JOB, "[a-z]*");
        let delay = delayed.delay();
        draw(&mut masks, JOB).unwrap();
        assert_eq!(masks.next(JOB).unwrap().wait(), Err(Withheld::Late));
        drop(delay);
        while !masks.sequences[&JOB].constrained.next.is_known() {
            thread::yield_now();
        }
        assert_eq!(masks.next(JOB).unwrap().wait(), Err(Withheld::Late), "its row has been sampled without the mask");
        assert_eq!(state(&masks, JOB), MaskState::InTime);
        assert!(masks.next(JOB).unwrap().wait().is_ok());
    }

    #[test]
    fn a_late_mask_after_a_drafted_token_is_that_of_the_next_step() {
        let (mut masks, mut events) = masks("llama3");
        let delayed = follow(&mut masks, &mut events, JOB, "(ab|ac){40}");
        let delay = delayed.delay();
        let token = masks.next(JOB).unwrap().wait().unwrap().tokens().next().unwrap();
        assert_eq!(masks.next(JOB).unwrap().wait_after(&[token]), Err(Withheld::Late));
        masks.advance(JOB, token, 1);
        assert_eq!(state(&masks, JOB), MaskState::Awaited);
        drop(delay);
        assert!(matches!(events.blocking_recv(), Some(Event::Masked)));
        assert_eq!(state(&masks, JOB), MaskState::InTime);
        let late = masks.next(JOB).unwrap().wait().unwrap().clone();
        let (mut others, mut events) = patient_masks("llama3");
        follow(&mut others, &mut events, JOB, "(ab|ac){40}");
        others.advance(JOB, token, 1);
        assert_eq!(late, *others.next(JOB).unwrap().wait().unwrap(), "the token was applied once");
    }

    #[test]
    fn the_masks_of_a_slow_sequence_are_known_before_it_has_a_step() {
        let (mut masks, mut events) = masks("llama3");
        let follower = follow(&mut masks, &mut events, JOB, "[a-z]*");
        follower.note(Duration::from_secs(1));
        for _ in 0..5 {
            if state(&masks, JOB) == MaskState::Awaited {
                assert!(matches!(events.blocking_recv(), Some(Event::Masked)));
            }
            assert_eq!(state(&masks, JOB), MaskState::Known);
            draw(&mut masks, JOB).unwrap();
        }
    }

    #[test]
    fn slow_masks_of_others_never_take_all_threads() {
        let (mut masks, mut events) = patient_masks("llama3");
        let slow: Vec<_> = (10..20).map(|job| follow(&mut masks, &mut events, JobId(job), "[a-z]*")).collect();
        slow.iter().for_each(|follower| follower.note(Duration::from_secs(1)));
        follow(&mut masks, &mut events, JOB, "[a-z]*");
        let delays: Vec<_> = slow.iter().map(|follower| follower.delay()).collect();
        (10..20).for_each(|job| assert!(draw(&mut masks, JobId(job)).is_some()));
        for _ in 0..20 {
            assert!(draw(&mut masks, JOB).is_some());
        }
        drop(delays);
    }

    #[test]
    fn a_model_whose_rows_cannot_be_computed_again_waits_before_the_step() {
        let (mut masks, mut events) = masks_of("llama3", false);
        let delayed = follow(&mut masks, &mut events, JOB, "[a-z]*");
        let delay = delayed.delay();
        assert_eq!(state(&masks, JOB), MaskState::InTime);
        draw(&mut masks, JOB).unwrap();
        assert_eq!(state(&masks, JOB), MaskState::Awaited);
        drop(delay);
        assert!(matches!(events.blocking_recv(), Some(Event::Masked)));
        assert_eq!(state(&masks, JOB), MaskState::InTime);
        assert!(draw(&mut masks, JOB).is_some());
    }

    #[test]
    fn what_goes_wrong_is_said() {
        let (mut masks, mut events) = patient_masks("llama3");
        masks.compile(0, JOB, constraint("("), Vec::new());
        assert!(outcome(&mut events).unwrap_err().contains("does not compile"));
        masks.compile(0, JOB, constraint("a*"), vec![5]);
        assert!(outcome(&mut events).unwrap_err().contains("does not follow the grammar"));
        follow(&mut masks, &mut events, JOB, "a*");
        masks.advance(JOB, 5, 1);
        let failed = masks.next(JOB).unwrap().wait().unwrap_err();
        assert!(matches!(failed, Withheld::Failed(reason) if reason.contains("does not follow the grammar")), "{failed:?}");
        let (masks, mut events) = self::masks("no-such-model");
        masks.compile(0, JOB, constraint("a"), Vec::new());
        assert!(outcome(&mut events).unwrap_err().contains("tokenizer.json"));
    }
}
