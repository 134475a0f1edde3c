//! Child processes of `tidemill up`: started from this binary's directory, ended by pid, never left behind.

use anyhow::{Context, bail};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use std::{os::unix::process::ExitStatusExt, path::PathBuf, process::Stdio, time::Duration};
use tokio::{
    io::{AsyncBufReadExt, BufReader, Lines},
    process::{Child, ChildStdout, Command},
    time::timeout,
};

/// One running role process.
#[derive(Debug)]
pub struct Process {
    pub name: String,
    child: Child,
    stdout: Lines<BufReader<ChildStdout>>,
}

impl Process {
    /// Starts `program` from this binary's directory. Its own process group keeps Ctrl-C away from it, so that we decide the order of
    /// draining. Its stdin is a pipe that closes when we end, however that happens.
    pub fn start(program: &str, name: &str, args: &[String]) -> anyhow::Result<Self> {
        let path = beside_this_binary(program)?;
        let mut command = Command::new(&path);
        command.args(args).args(["--name", name, "--exit-with-parent", "true"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).process_group(0).kill_on_drop(true);
        let mut child = command.spawn().with_context(|| format!("cannot start {}", path.display()))?;
        let stdout = child.stdout.take().expect("stdout is piped");
        Ok(Self { name: name.to_owned(), child, stdout: BufReader::new(stdout).lines() })
    }

    /// The next line that the process prints on stdout.
    pub async fn line(&mut self, within: Duration) -> anyhow::Result<String> {
        let line = timeout(within, self.stdout.next_line()).await;
        match line.with_context(|| format!("{} printed nothing within {within:?}", self.name))?? {
            Some(line) => Ok(line),
            None => bail!("{} ended before it was ready", self.name),
        }
    }

    /// `None` once the process has ended and was reaped.
    pub fn id(&self) -> Option<u32> {
        self.child.id()
    }

    /// How the process ended, if it has.
    pub fn ended(&mut self) -> Option<String> {
        self.child.try_wait().ok().flatten().map(|status| status.to_string())
    }

    /// Asks the process to drain and end.
    pub fn terminate(&self) {
        if let Some(pid) = self.child.id() {
            let _ = kill(Pid::from_raw(pid as i32), Signal::SIGTERM);
        }
    }

    /// Waits for the process to end, and kills it after `within`. Returns whether it ended well.
    pub async fn wait(mut self, within: Duration) -> bool {
        match timeout(within, self.child.wait()).await {
            // SIGTERM may arrive before the process handles it. It then ends at once, which is fine.
            Ok(status) => status.is_ok_and(|s| s.success() || s.signal() == Some(Signal::SIGTERM as i32)),
            Err(_) => {
                eprintln!("tidemill: {} did not end within {within:?}: killed", self.name);
                let _ = self.child.kill().await;
                false
            }
        }
    }
}

fn beside_this_binary(program: &str) -> anyhow::Result<PathBuf> {
    let me = std::env::current_exe().context("cannot tell where this binary is")?;
    let path = me.with_file_name(program);
    if !path.is_file() {
        bail!("{} is missing: build the whole workspace (`cargo build --release`)", path.display());
    }
    Ok(path)
}
