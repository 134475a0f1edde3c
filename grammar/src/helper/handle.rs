//! The coordinator's end of the helper: starts it, starts it again where it has ended, and opens sessions. All of it blocks.

use super::{
    ARGUMENT, Asked, CPU_MAX, Model, Question,
    process::{READY, Reply},
    wire,
};
use crate::compiler::GrammarError;
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use parking_lot::Mutex;
use std::{
    fmt,
    io::{self, IoSlice, Read},
    os::{
        fd::{AsRawFd, OwnedFd},
        unix::net::UnixStream,
    },
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::{Duration, Instant},
};

/// An answer takes no longer, even of a helper that is still reading its vocabularies, on a machine with more to do than it can.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// Between starts of a helper that ends at once.
const START_EVERY: Duration = Duration::from_secs(1);
/// The helper's allocator is the coordinator's, which takes a GiB of address space at a time. A child's limit would then count as used what
/// is not, or as free what was there before.
const ALLOCATOR: (&str, &str) = ("MIMALLOC_ARENA_RESERVE", "0");

/// A helper, as long as this lives.
pub struct Handle {
    program: PathBuf,
    models: Vec<Model>,
    running: Mutex<Running>,
}

struct Running {
    control: UnixStream,
    process: Child,
    since: Instant,
}

/// A question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error(transparent)]
    Refused(#[from] GrammarError),
    /// It says nothing about the grammar: it may be asked again.
    #[error("the grammar helper does not answer: {0}")]
    Unavailable(#[from] io::Error),
}

impl Handle {
    /// `program`, with [`ARGUMENT`] as its first argument, must [be the helper](super::run).
    pub fn start(program: PathBuf, models: Vec<Model>) -> io::Result<Self> {
        let running = Running::start(&program, &models)?;
        Ok(Self { program, models, running: Mutex::new(running) })
    }

    /// A child of the helper's, for the questions of one request.
    pub fn session(&self) -> io::Result<Session> {
        self.session_within(CPU_MAX)
    }

    /// The same, of a request of whose CPU time so much is left.
    pub fn session_within(&self, cpu_left: Duration) -> io::Result<Session> {
        let (ours, theirs) = UnixStream::pair()?;
        ours.set_read_timeout(Some(ANSWER_MAX))?;
        ours.set_write_timeout(Some(ANSWER_MAX))?;
        let mut running = self.running.lock();
        if running.hand_over(&theirs).is_err() {
            if running.since.elapsed() < START_EVERY {
                return Err(io::Error::other("it has just been started, and has ended again"));
            }
            *running = Running::start(&self.program, &self.models)?;
            running.hand_over(&theirs)?;
        }
        Ok(Session { stream: ours, is_ready: false, cpu_max: cpu_left.min(CPU_MAX), cpu: Duration::ZERO })
    }

    /// The helper's process, as tests want to see it.
    pub fn id(&self) -> u32 {
        self.running.lock().process.id()
    }
}

impl fmt::Debug for Handle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Handle").field("program", &self.program).field("models", &self.models).finish_non_exhaustive()
    }
}

impl Running {
    fn start(program: &PathBuf, models: &[Model]) -> io::Result<Self> {
        let (control, theirs) = UnixStream::pair()?;
        control.set_write_timeout(Some(ANSWER_MAX))?;
        let mut command = Command::new(program);
        command.arg(ARGUMENT).env(ALLOCATOR.0, ALLOCATOR.1).stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
        let process = command.spawn()?;
        let running = Self { control, process, since: Instant::now() };
        wire::write(&running.control, &models)?;
        Ok(running)
    }

    fn hand_over(&self, socket: &UnixStream) -> io::Result<()> {
        let sockets = [socket.as_raw_fd()];
        let parts = [IoSlice::new(&[0])];
        sendmsg::<()>(self.control.as_raw_fd(), &parts, &[ControlMessage::ScmRights(&sockets)], MsgFlags::MSG_NOSIGNAL, None)?;
        Ok(())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It holds nothing that it would have to put in order.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A child of the helper's.
#[derive(Debug)]
pub struct Session {
    stream: UnixStream,
    is_ready: bool,
    /// Of all its questions.
    cpu_max: Duration,
    cpu: Duration,
}

impl Session {
    /// After an error that is not about the question, the session is over.
    pub fn ask(&mut self, question: &Question) -> Result<String, AskError> {
        question.check_size()?;
        let cpu_left = self.cpu_max.saturating_sub(self.cpu);
        if cpu_left.is_zero() {
            return Err(GrammarError::TooMuchWork.into());
        }
        if !self.is_ready {
            // Where the helper could make no child, this is the end of it.
            let mut byte = [0];
            (&self.stream).read_exact(&mut byte)?;
            debug_assert_eq!(byte, [READY]);
            self.is_ready = true;
        }
        let asked = Instant::now();
        let reply = wire::write(&self.stream, &Asked { question, cpu_left }).and_then(|()| wire::read::<Reply>(&self.stream));
        match reply {
            Ok(Some(Reply { answer, cpu })) => {
                self.cpu = cpu;
                Ok(answer?)
            }
            // The child has ended, by a limit of its own. The last of them says little: there was too much else to do.
            _ if asked.elapsed() < DEADLINE => Err(GrammarError::TooMuchWork.into()),
            Ok(None) => Err(io::Error::new(io::ErrorKind::TimedOut, "there was no time for it").into()),
            Err(error) => Err(error.into()),
        }
    }

    /// CPU time of the answers so far.
    pub fn cpu(&self) -> Duration {
        self.cpu
    }
}

/// A child that was ended before this has used up its CPU time, or its memory.
const DEADLINE: Duration = Duration::from_secs(super::process::DEADLINE_S as u64);
