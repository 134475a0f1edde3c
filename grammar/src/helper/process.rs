//! The helper and its children. The helper has the vocabularies, waits for sessions, and forks a child for each. It never processes a
//! client's input itself, so that it does not fail.

use super::{Asked, CPU_S, MEMORY_BYTES, Model, Question, wire};
use crate::{
    compiler::{Compiler, GrammarError},
    confinement::{self, CpuLimit, limit_memory},
    vocabulary::{Vocabulary, VocabularyError},
};
use nix::{
    errno::Errno,
    libc,
    sys::{
        resource::{Resource, UsageWho, getrusage, setrlimit},
        socket::{ControlMessageOwned, MsgFlags, recvmsg},
    },
    unistd::{ForkResult, alarm, close, fork},
};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, IoSliceMut, Write},
    os::{
        fd::{AsRawFd, FromRawFd, OwnedFd, RawFd},
        unix::net::UnixStream,
    },
    panic::{AssertUnwindSafe, catch_unwind},
    thread,
    time::Duration,
};

/// The stack of the compiler, which recurses. Deeper recursion ends the child, as does a larger heap.
const STACK_BYTES: usize = 64 << 20;
/// The wall time of one question, on an overloaded machine.
pub(super) const DEADLINE_S: u32 = 10;
/// The message that a session's child is ready: from then on, only the child's own end ends the session.
pub(super) const READY: u8 = 1;

/// The reason why the helper cannot work.
#[derive(Debug, thiserror::Error)]
pub enum HelperError {
    #[error("the grammar helper is started by a coordinator, with a socket as its standard input: {0}")]
    Control(io::Error),
    #[error("the grammar helper cannot read a vocabulary: {0}")]
    Vocabulary(#[from] VocabularyError),
}

/// An answer, and its cost.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Reply {
    pub(super) answer: Result<String, GrammarError>,
    /// The CPU time of the session so far.
    pub(super) cpu: Duration,
}

/// Runs the helper until the coordinator closes the socket that is this process's standard input.
pub fn run() -> Result<(), HelperError> {
    let control = confinement::socket().map_err(HelperError::Control)?;
    confinement::leave_signals_to_the_parent();
    let Some(models) = wire::read::<Vec<Model>>(&control).map_err(HelperError::Control)? else { return Ok(()) };
    let compilers = models.iter().map(|model| Vocabulary::load(&model.tokenizer, model.width).map(|words| Compiler::new(&words)));
    let compilers = compilers.collect::<Result<Vec<_>, _>>()?;
    // A child continues on the stack of the thread that forks.
    let thread = thread::Builder::new().name("helper".into()).stack_size(STACK_BYTES).spawn(move || serve(&control, &compilers));
    thread.and_then(|thread| thread.join().unwrap_or_else(|_| Err(io::Error::other("it has panicked")))).map_err(HelperError::Control)
}

/// Forks a child for each socket received.
fn serve(control: &UnixStream, compilers: &[Compiler]) -> io::Result<()> {
    while let Some(session) = receive(control)? {
        // SAFETY: the child continues with this thread alone. The only other one waits for it, and holds no lock: neither the allocator's
        // nor any of ours. The child leaves by `_exit`, so that it runs none of this process's exit code.
        if let Ok(ForkResult::Child) = unsafe { fork() } {
            let _ = catch_unwind(AssertUnwindSafe(|| answer(&session, control, compilers)));
            // SAFETY: it ends this process, and runs no code of it.
            unsafe { libc::_exit(0) }
        }
        // If the fork fails, the session ends without a message, and the coordinator reports that the helper is unavailable.
    }
    Ok(())
}

/// Receives the next session's socket; `None` if the coordinator has ended.
fn receive(control: &UnixStream) -> io::Result<Option<UnixStream>> {
    let mut byte = [0];
    let mut space = nix::cmsg_space!([RawFd; 1]);
    loop {
        let mut parts = [IoSliceMut::new(&mut byte)];
        let message = match recvmsg::<()>(control.as_raw_fd(), &mut parts, Some(&mut space), MsgFlags::MSG_CMSG_CLOEXEC) {
            Ok(message) => message,
            Err(Errno::EINTR) => continue,
            Err(error) => return Err(error.into()),
        };
        if message.bytes == 0 {
            return Ok(None);
        }
        for part in message.cmsgs()? {
            if let ControlMessageOwned::ScmRights(sockets) = part
                && let [socket] = sockets[..]
            {
                // SAFETY: the kernel has just created this descriptor for this process, and it has no other owner.
                return Ok(Some(UnixStream::from(unsafe { OwnedFd::from_raw_fd(socket) })));
            }
        }
        return Err(io::Error::new(io::ErrorKind::InvalidData, "a session came without its socket"));
    }
}

/// Answers one session's questions in the child, until the session or this process ends.
fn answer(session: &UnixStream, control: &UnixStream, compilers: &[Compiler]) -> io::Result<()> {
    limit_this_process()?;
    // The socket is closed so that the coordinator sees the helper's end at once, and not its last child's. It is not closed again, as this
    // process ends by `_exit`.
    close(control.as_raw_fd())?;
    { session }.write_all(&[READY])?;
    // A request may have used a part of its time elsewhere.
    let mut cpu_limit = CpuLimit::new()?;
    while let Some(Asked { question, cpu_left }) = wire::read::<Asked<Question>>(session)? {
        cpu_limit.end_after(cpu_left)?;
        alarm::set(DEADLINE_S);
        let answer = catch_unwind(AssertUnwindSafe(|| question.answer(compilers)));
        let answer = answer.unwrap_or_else(|_| Err(GrammarError::Invalid("it broke the compiler: please report this as a bug".into())));
        alarm::cancel();
        wire::write(session, &Reply { answer, cpu: cpu()? })?;
    }
    Ok(())
}

/// Limits this process for the rest of its life. Memory shared with the helper does not count, and the standard input was the child's end of
/// the socket by which sessions come.
fn limit_this_process() -> io::Result<()> {
    limit_memory(MEMORY_BYTES - STACK_BYTES)?;
    Ok(setrlimit(Resource::RLIMIT_CPU, CPU_S, CPU_S)?)
}

fn cpu() -> io::Result<Duration> {
    let usage = getrusage(UsageWho::RUSAGE_SELF)?;
    let time = |time: nix::sys::time::TimeVal| Duration::from_secs(time.tv_sec() as u64) + Duration::from_micros(time.tv_usec() as u64);
    Ok(time(usage.user_time()) + time(usage.system_time()))
}
