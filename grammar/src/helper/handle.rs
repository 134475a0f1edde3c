//! The coordinator's side of the helper: starts it, restarts it after it has ended, and opens sessions. All calls block.

use super::{
    ARGUMENT, Asked, CPU_MAX, Model, Question,
    process::{READY, Reply},
    wire,
};
use crate::{compiler::GrammarError, confinement};
use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use parking_lot::Mutex;
use std::{
    fmt,
    io::{self, IoSlice, Read},
    os::{fd::AsRawFd, unix::net::UnixStream},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

/// The longest wait for an answer, even of a helper that is still reading its vocabularies, on an overloaded machine.
const ANSWER_MAX: Duration = Duration::from_secs(30);
/// The least time between starts of a helper that ends at once.
const START_EVERY: Duration = Duration::from_secs(1);

/// A running helper, which ends when this is dropped.
pub struct Handle {
    program: PathBuf,
    models: Vec<Model>,
    running: Mutex<Running>,
}

struct Running {
    /// Its socket is the control.
    process: confinement::Process,
    since: Instant,
}

/// The reason why a question has no answer.
#[derive(Debug, thiserror::Error)]
pub enum AskError {
    #[error(transparent)]
    Refused(#[from] GrammarError),
    /// The helper failed, which says nothing about the grammar; the question may be asked again.
    #[error("the grammar helper does not answer: {0}")]
    Unavailable(#[from] io::Error),
}

impl Handle {
    /// Starts a helper. `program`, with [`ARGUMENT`] as its first argument, must [be the helper](super::run).
    pub fn start(program: PathBuf, models: Vec<Model>) -> io::Result<Self> {
        let running = Running::start(&program, &models)?;
        Ok(Self { program, models, running: Mutex::new(running) })
    }

    /// Opens a session, a child of the helper, for the questions of one request.
    pub fn session(&self) -> io::Result<Session> {
        self.session_within(CPU_MAX)
    }

    /// Opens a session for a request with this much CPU time left.
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

    /// The process id of the helper, for tests.
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
    fn start(program: &Path, models: &[Model]) -> io::Result<Self> {
        let running = Self { process: confinement::Process::start(program, ARGUMENT, ANSWER_MAX)?, since: Instant::now() };
        wire::write(&running.process.socket, &models)?;
        Ok(running)
    }

    fn hand_over(&self, socket: &UnixStream) -> io::Result<()> {
        let sockets = [socket.as_raw_fd()];
        let parts = [IoSlice::new(&[0])];
        sendmsg::<()>(self.process.socket.as_raw_fd(), &parts, &[ControlMessage::ScmRights(&sockets)], MsgFlags::MSG_NOSIGNAL, None)?;
        Ok(())
    }
}

/// A child of the helper.
#[derive(Debug)]
pub struct Session {
    stream: UnixStream,
    is_ready: bool,
    /// The CPU time for all its questions.
    cpu_max: Duration,
    cpu: Duration,
}

impl Session {
    /// Asks a question. After an error that is not about the question, the session is over.
    pub fn ask(&mut self, question: &Question) -> Result<String, AskError> {
        question.check_size()?;
        let cpu_left = self.cpu_max.saturating_sub(self.cpu);
        if cpu_left.is_zero() {
            return Err(GrammarError::TooMuchWork.into());
        }
        if !self.is_ready {
            // If the helper could not fork a child, the stream ends here.
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
            // The child was ended by a limit of its own. Reaching the last one, wall time, says little: the machine was overloaded.
            _ if asked.elapsed() < DEADLINE => Err(GrammarError::TooMuchWork.into()),
            Ok(None) => Err(io::Error::new(io::ErrorKind::TimedOut, "there was no time for it").into()),
            Err(error) => Err(error.into()),
        }
    }

    /// The CPU time of the answers so far.
    pub fn cpu(&self) -> Duration {
        self.cpu
    }
}

/// A child that ended before this time has used up its CPU time, or its memory.
const DEADLINE: Duration = Duration::from_secs(super::process::DEADLINE_S as u64);
