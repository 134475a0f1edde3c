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
//! A matcher has at most one token in flight, so the queues hold no more than there are sequences. Compiling may take long, and so may
//! applying the tokens of a sequence that comes from another worker: both have a thread of their own, and delay no masks. There, groups of
//! requests take [turns](crate::turns), so that a group with many grammars waits for its own.

use crate::{engine::Event, job::JobId, turns::Turns};
use parking_lot::{Condvar, Mutex};
use std::{
    collections::HashMap,
    fmt,
    panic::{AssertUnwindSafe, catch_unwind},
    path::PathBuf,
    sync::{Arc, OnceLock, mpsc},
    thread,
    time::{Duration, Instant},
};
use tidemill_grammar::{Compiler, Matcher, Vocabulary};
use tidemill_proto::{
    block::Token,
    grammar::Constraint,
    step::{Allowed, DRAFT_TOKENS_MAX, Mask},
};

/// The time after which a sampler gives up. Masks take microseconds, and their work is bounded, so a sampler that waits this long would
/// wait forever.
const MASK_WAIT_MAX: Duration = Duration::from_secs(60);
/// The most threads that compute masks. More would not find enough sequences to share.
const MASKERS_MAX: usize = 4;

/// The engine's side.
pub(crate) struct Masks {
    starts: Arc<Turns<Start>>,
    maskers: mpsc::Sender<Advance>,
    sequences: HashMap<JobId, Followed>,
}

/// A sequence whose grammar is compiled.
#[derive(Debug)]
pub struct Constrained {
    matcher: Arc<Mutex<Matcher>>,
    /// The tokens that may be drawn next.
    next: Arc<Cell>,
}

/// A sequence whose tokens are drawn under its grammar.
#[derive(Debug)]
struct Followed {
    constrained: Constrained,
    /// The masks of tokens after the next one in the same step, as far as the step has come.
    later: [OnceLock<Arc<Cell>>; DRAFT_TOKENS_MAX],
    maskers: mpsc::Sender<Advance>,
}

struct Start {
    job: JobId,
    constraint: Constraint,
    generated: Vec<Token>,
}

struct Advance {
    matcher: Arc<Mutex<Matcher>>,
    token: Token,
    next: Arc<Cell>,
}

/// The engine's inbox, which gets the answers.
pub(crate) type Inbox = tokio::sync::mpsc::Sender<Event>;

impl Masks {
    /// Starts the threads for the model in `dir`, whose rows of logits have `width` entries. Its tokenizer is read at once, in the
    /// background.
    pub(crate) fn start(dir: PathBuf, width: usize, threads: usize, inbox: Inbox) -> std::io::Result<Self> {
        let starts = Arc::new(Turns::new());
        let taken = Arc::clone(&starts);
        thread::Builder::new().name("grammars".into()).spawn(move || compile(&dir, width, &taken, &inbox))?;
        let (maskers, tokens) = mpsc::channel();
        let tokens = Arc::new(Mutex::new(tokens));
        for i in 0..threads.clamp(1, MASKERS_MAX) {
            let tokens = Arc::clone(&tokens);
            thread::Builder::new().name(format!("masks-{i}")).spawn(move || advance(&tokens))?;
        }
        Ok(Self { starts, maskers, sequences: HashMap::new() })
    }

    /// Compiles a job's grammar, at its group's turn. Answered by [`Event::Constrained`].
    pub(crate) fn compile(&self, group: u64, job: JobId, constraint: Constraint, generated: Vec<Token>) {
        self.starts.put(group, Start { job, constraint, generated });
    }

    /// From now on, draws the job's tokens under its grammar.
    pub(crate) fn insert(&mut self, job: JobId, constrained: Constrained) {
        let followed = Followed { constrained, later: Default::default(), maskers: self.maskers.clone() };
        self.sequences.insert(job, followed);
    }

    /// The tokens that the job may draw next; `None` if it has no grammar.
    pub(crate) fn next(&self, job: JobId) -> Option<&dyn Allowed> {
        self.sequences.get(&job).map(|followed| followed as &dyn Allowed)
    }

    /// Notes that a step ended with this token: the next mask is computed from here on.
    pub(crate) fn advance(&mut self, job: JobId, token: Token) {
        if let Some(followed) = self.sequences.get_mut(&job) {
            followed.constrained.next = followed.begin(token);
            followed.later = Default::default();
        }
    }

    /// Forgets the jobs that ended.
    pub(crate) fn retain(&mut self, lives: impl Fn(JobId) -> bool) {
        self.sequences.retain(|&job, _| lives(job));
    }
}

impl Drop for Masks {
    /// Closes the queue; the compiler's thread ends when it is empty.
    fn drop(&mut self) {
        self.starts.close();
    }
}

impl Followed {
    /// Begins the mask that follows a token.
    fn begin(&self, token: Token) -> Arc<Cell> {
        let next = Arc::<Cell>::default();
        let _ = self.maskers.send(Advance { matcher: Arc::clone(&self.constrained.matcher), token, next: Arc::clone(&next) });
        next
    }
}

impl Allowed for Followed {
    fn wait(&self) -> Result<&Mask, &str> {
        self.constrained.next.wait()
    }

    fn wait_after(&self, drawn: &[Token]) -> Result<&Mask, &str> {
        let Some((&token, before)) = drawn.split_last() else { return self.wait() };
        let later = self.later.get(before.len()).ok_or("more tokens were drawn in a step than may be drafted")?;
        later.get_or_init(|| self.begin(token)).wait()
    }
}

/// A mask in progress.
#[derive(Default)]
struct Cell {
    mask: OnceLock<Result<Mask, String>>,
    lock: Mutex<()>,
    known: Condvar,
}

impl Cell {
    fn set(&self, mask: Result<Mask, String>) {
        let _lock = self.lock.lock();
        let _ = self.mask.set(mask);
        self.known.notify_all();
    }
}

impl Cell {
    fn wait(&self) -> Result<&Mask, &str> {
        let deadline = Instant::now() + MASK_WAIT_MAX;
        let mut lock = self.lock.lock();
        loop {
            if let Some(mask) = self.mask.get() {
                return mask.as_ref().map_err(String::as_str);
            }
            if self.known.wait_until(&mut lock, deadline).timed_out() && self.mask.get().is_none() {
                return Err("its mask did not come");
            }
        }
    }
}

impl fmt::Debug for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Cell").field("known", &self.mask.get().is_some()).finish()
    }
}

/// The loop of the compiler's thread.
fn compile(dir: &std::path::Path, width: usize, starts: &Turns<Start>, inbox: &Inbox) {
    let path = dir.join("tokenizer.json");
    let compiler = Vocabulary::load(&path, width).map(|vocabulary| Compiler::new(&vocabulary));
    if let Err(error) = &compiler {
        tracing::warn!(%error, "this worker fails every request with a grammar: it needs the model's tokenizer.json");
    }
    while let Some(Start { job, constraint, generated }) = starts.take() {
        let outcome = match &compiler {
            Ok(compiler) => unwinding(|| begin(compiler, &constraint, &generated)),
            Err(error) => Err(format!("this worker cannot follow a grammar without the model's tokenizer.json ({error})")),
        };
        // A closed inbox means that the engine has ended.
        let _ = inbox.blocking_send(Event::Constrained { job, generated: generated.len(), outcome });
    }
}

fn begin(compiler: &Compiler, constraint: &Constraint, generated: &[Token]) -> Result<Constrained, String> {
    let compiled = compiler.compile(&constraint.grammar).map_err(|error| format!("its grammar does not compile: {error}"))?;
    let mut matcher = Matcher::new(&compiled, constraint, generated).map_err(|error| error.to_string())?;
    let next = Cell::default();
    next.set(matcher.mask().map_err(|error| error.to_string()));
    Ok(Constrained { matcher: Arc::new(Mutex::new(matcher)), next: Arc::new(next) })
}

/// The loop of a masker's thread.
fn advance(tokens: &Mutex<mpsc::Receiver<Advance>>) {
    loop {
        let received = tokens.lock().recv();
        let Ok(Advance { matcher, token, next }) = received else { return };
        next.set(unwinding(|| {
            let mut matcher = matcher.lock();
            matcher.advance(token).and_then(|()| matcher.mask()).map_err(|error| error.to_string())
        }));
    }
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

    fn masks(dir: &str) -> (Masks, tokio::sync::mpsc::Receiver<Event>) {
        let (inbox, events) = channel(8);
        let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(dir);
        (Masks::start(dir, 512, 2, inbox).unwrap(), events)
    }

    fn constraint(expression: &str) -> Constraint {
        Constraint { grammar: Grammar::Regex(expression.into()), end_tokens: vec![1], ends_late: false }
    }

    fn outcome(events: &mut tokio::sync::mpsc::Receiver<Event>) -> Result<Constrained, String> {
        match events.blocking_recv() {
            Some(Event::Constrained { job: JOB, outcome, .. }) => outcome,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn each_token_brings_the_next_mask() {
        let (mut masks, mut events) = masks("llama3");
        masks.compile(0, JOB, constraint("a{3}"), Vec::new());
        masks.insert(JOB, outcome(&mut events).unwrap());
        assert!(masks.next(JobId(4)).is_none());
        for _ in 0..3 {
            let mask = masks.next(JOB).unwrap().wait().unwrap().clone();
            assert!(!mask.allows(1));
            let token = mask.tokens().next().unwrap();
            masks.advance(JOB, token);
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
        let expression = constraint("(ab|ac){40}");
        let (mut one, mut events) = masks("llama3");
        one.compile(0, JOB, expression.clone(), Vec::new());
        one.insert(JOB, outcome(&mut events).unwrap());
        let (mut tokens, mut expected) = (Vec::new(), Vec::new());
        for _ in 0..12 {
            let mask = one.next(JOB).unwrap().wait().unwrap().clone();
            // Different tokens have different masks after them, as far as the expression allows.
            let token = mask.tokens().nth(tokens.len() % 2).or(mask.tokens().next()).unwrap();
            expected.push(mask);
            tokens.push(token);
            one.advance(JOB, token);
        }
        assert!(expected.windows(2).any(|pair| pair[0] != pair[1]));
        for drafted in [1, 2, 5, 11] {
            let (mut several, mut events) = masks("llama3");
            several.compile(0, JOB, expression.clone(), Vec::new());
            several.insert(JOB, outcome(&mut events).unwrap());
            for (step, drawn) in tokens.chunks(drafted + 1).enumerate() {
                for row in 0..drawn.len() {
                    let mask = several.next(JOB).unwrap().wait_after(&drawn[..row]).unwrap();
                    assert_eq!(*mask, expected[step * (drafted + 1) + row], "row {row} of step {step}, {drafted} drafted");
                }
                several.advance(JOB, *drawn.last().unwrap());
            }
        }
        assert!(one.next(JOB).unwrap().wait_after(&[0; DRAFT_TOKENS_MAX + 1]).is_err());
    }

    #[test]
    fn what_goes_wrong_is_said() {
        let (mut masks, mut events) = self::masks("llama3");
        masks.compile(0, JOB, constraint("("), Vec::new());
        assert!(outcome(&mut events).unwrap_err().contains("does not compile"));
        masks.compile(0, JOB, constraint("a*"), vec![5]);
        assert!(outcome(&mut events).unwrap_err().contains("does not follow the grammar"));
        masks.compile(0, JOB, constraint("a*"), Vec::new());
        masks.insert(JOB, outcome(&mut events).unwrap());
        masks.advance(JOB, 5);
        assert!(masks.next(JOB).unwrap().wait().unwrap_err().contains("does not follow the grammar"));
        let (masks, mut events) = self::masks("no-such-model");
        masks.compile(0, JOB, constraint("a"), Vec::new());
        assert!(outcome(&mut events).unwrap_err().contains("tokenizer.json"));
    }
}
