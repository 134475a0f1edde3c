//! A process of this program with limits, for work on what is not trusted: the pieces of which such helpers are made.
//!
//! A helper is this program, started once more with an argument that makes it the helper, and with one end of a socket as its standard input.
//! The kernel ends it at its limits; its parent sees the socket end.

use nix::{
    libc,
    sys::{
        resource::{Resource, setrlimit},
        signal::{SigEvent, SigHandler, SigevNotify, Signal, signal},
        timer::{Expiration, Timer, TimerSetTimeFlags},
    },
    time::ClockId,
    unistd::{dup2_stderr, dup2_stdin},
};
use std::{
    fs::{self, File},
    io::{self, Read, Write},
    os::{
        fd::{AsFd, OwnedFd},
        unix::{net::UnixStream, process::ExitStatusExt},
    },
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

/// Disables reservations by the allocator, which helpers share with the coordinator, and which reserves a GiB of address space at a
/// time. A limit of memory would otherwise count unused memory as used, or earlier reservations as free.
const ALLOCATOR: (&str, &str) = ("MIMALLOC_ARENA_RESERVE", "0");

/// A running helper, which ends when this is dropped.
#[derive(Debug)]
pub struct Process {
    /// The parent's end of the socket.
    pub socket: UnixStream,
    child: Child,
}

impl Process {
    /// Starts `program`, which is a helper if this is its first argument. `answer_max` bounds each wait at the socket.
    pub fn start(program: &Path, argument: &str, answer_max: Duration) -> io::Result<Self> {
        let (socket, theirs) = UnixStream::pair()?;
        socket.set_read_timeout(Some(answer_max))?;
        socket.set_write_timeout(Some(answer_max))?;
        let mut command = Command::new(program);
        command.arg(argument).env(ALLOCATOR.0, ALLOCATOR.1).stdin(Stdio::from(OwnedFd::from(theirs))).stdout(Stdio::null());
        Ok(Self { socket, child: command.spawn()? })
    }

    pub fn id(&self) -> u32 {
        self.child.id()
    }

    /// Waits for the end of a process whose socket has ended. Returns whether it was ended by a limit or a crash of its own, and not from
    /// outside, as by a kernel without memory.
    pub fn ended_by_itself(&mut self) -> bool {
        self.child.wait().is_ok_and(|status| status.signal() != Some(Signal::SIGKILL as i32))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // It has no state to save.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The helper's end of the socket.
pub fn socket() -> io::Result<UnixStream> {
    Ok(UnixStream::from(io::stdin().as_fd().try_clone_to_owned()?))
}

/// Ignores signals: stopping the process group stops the parent, which then closes the socket. Children that have ended need not be
/// waited for.
pub fn leave_signals_to_the_parent() {
    for ignored in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP, Signal::SIGCHLD] {
        // SAFETY: ignoring a signal installs no handler that could run at a bad moment. These four can be ignored, so it cannot fail.
        let _ = unsafe { signal(ignored, SigHandler::SigIgn) };
    }
}

/// Limits this process for the rest of its life to so many bytes of memory in addition to its present ones. Its standard input ends.
pub fn limit_memory(bytes: usize) -> io::Result<()> {
    // If memory runs out, Rust reports it on stderr; that concerns the client and not the operator.
    dup2_stderr(File::options().write(true).open("/dev/null")?)?;
    dup2_stdin(File::open("/dev/null")?)?;
    let memory: libc::rlim_t = address_space()? + bytes as u64;
    for (resource, most) in [(Resource::RLIMIT_CORE, 0), (Resource::RLIMIT_AS, memory)] {
        setrlimit(resource, most, most)?;
    }
    Ok(())
}

/// The bytes of this process's address space.
fn address_space() -> io::Result<u64> {
    let status = fs::read_to_string("/proc/self/status")?;
    let size = status.lines().find_map(|line| line.strip_prefix("VmSize:")?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok());
    size.map(|kib| kib << 10).ok_or_else(|| io::Error::other("/proc/self/status has no VmSize"))
}

/// A limit of this process's CPU time, whose signal ends it. `RLIMIT_CPU` counts whole seconds, and only ever from the process's start.
#[derive(Debug)]
pub struct CpuLimit(Timer);

impl CpuLimit {
    pub fn new() -> io::Result<Self> {
        let signal = SigevNotify::SigevSignal { signal: Signal::SIGPROF, si_value: 0 };
        Ok(Self(Timer::new(ClockId::CLOCK_PROCESS_CPUTIME_ID, SigEvent::new(signal))?))
    }

    /// Ends this process after so much CPU time from now on.
    pub fn end_after(&mut self, cpu: Duration) -> io::Result<()> {
        Ok(self.0.set(Expiration::OneShot(cpu.into()), TimerSetTimeFlags::empty())?)
    }
}

/// Writes a frame: four bytes of length, then its parts, in one write.
pub fn write_frame(mut to: impl Write, parts: &[&[u8]], bytes_max: usize) -> io::Result<()> {
    let bytes: usize = parts.iter().map(|part| part.len()).sum();
    if bytes > bytes_max {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the message is longer than a frame may be"));
    }
    let mut frame = Vec::with_capacity(4 + bytes);
    frame.extend((bytes as u32).to_le_bytes());
    parts.iter().for_each(|part| frame.extend_from_slice(part));
    to.write_all(&frame)
}

/// Reads a frame; `None` if the other side has ended between two frames.
pub fn read_frame(mut from: impl Read, bytes_max: usize) -> io::Result<Option<Vec<u8>>> {
    let mut length = [0; 4];
    match from.read(&mut length)? {
        0 => return Ok(None),
        some => from.read_exact(&mut length[some..])?,
    }
    let length = u32::from_le_bytes(length) as usize;
    if length > bytes_max {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "the frame is too long"));
    }
    let mut body = vec![0; length];
    from.read_exact(&mut body)?;
    Ok(Some(body))
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES_MAX: usize = 1 << 20;

    #[test]
    fn frames_come_as_they_went() {
        let mut bytes = Vec::new();
        let long = "x".repeat(100_000);
        for message in ["", "a \"b\" \n", &long] {
            let (left, right) = message.as_bytes().split_at(message.len() / 2);
            write_frame(&mut bytes, &[left, right], BYTES_MAX).unwrap();
        }
        let mut from = &bytes[..];
        for message in ["", "a \"b\" \n", &long] {
            assert_eq!(read_frame(&mut from, BYTES_MAX).unwrap().unwrap(), message.as_bytes());
        }
        assert_eq!(read_frame(&mut from, BYTES_MAX).unwrap(), None);
        assert!(read_frame(&bytes[..3], BYTES_MAX).is_err(), "a length that breaks off");
        assert!(read_frame(&bytes[4..][..6], BYTES_MAX).is_err(), "a frame that breaks off");
        assert!(read_frame(&[0xff; 9][..], BYTES_MAX).is_err(), "a length that is none");
        assert!(write_frame(&mut bytes, &[&[0; BYTES_MAX], b"x"], BYTES_MAX).is_err());
    }
}
