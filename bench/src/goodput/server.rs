//! Servers to compare: some are already running; others are started here, waited for, and stopped by their process id.

use crate::load::{Traffic, target::Target};
use anyhow::{Context, bail, ensure};
use nix::{
    sched::{CpuSet, sched_getaffinity, sched_setaffinity},
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde::{Deserialize, Serialize};
use std::{net::TcpListener, path::Path, process::Stdio, time::Duration};
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep, timeout},
};

/// The settings of a `[[server]]`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ServerSettings {
    pub name: String,
    /// The URL of a running server, up to and including `/v1`.
    pub url: Option<String>,
    /// The command that starts the server. `{addr}` becomes a free address such as `127.0.0.1:40123`, `{port}` its port. A program without
    /// a path is first searched for beside this one.
    pub command: Vec<String>,
    /// The name that must be given with --set; otherwise the server is left out.
    pub needs: Option<String>,
    /// The cores that it may use; all by default.
    pub cores: Vec<usize>,
    /// The seconds within which it must answer.
    pub ready_s: Option<u64>,
}

/// A server that answers.
pub struct Server {
    pub name: String,
    pub target: Target,
    pub settings: ServerSettings,
    process: Option<Child>,
}

const READY_S: u64 = 180;
const ASK_AGAIN: Duration = Duration::from_millis(200);
const STOP: Duration = Duration::from_secs(30);

impl ServerSettings {
    /// Starts the server and waits until it has answered a request like those of `traffic`, as some list their models before they can.
    pub async fn start(&self, traffic: &Traffic, seed: u64) -> anyhow::Result<Server> {
        ensure!(!self.name.is_empty(), "[[server]]: give it a `name`");
        ensure!(self.url.is_some() == self.command.is_empty(), "server `{}`: give it a `url` or a `command`", self.name);
        if let Some(url) = &self.url {
            let target = reach(url, traffic, seed).await.with_context(|| format!("server `{}`", self.name))?;
            return Ok(Server { name: self.name.clone(), target, settings: self.clone(), process: None });
        }
        // The address is free now, and is rarely taken before the server binds it.
        let address = TcpListener::bind("127.0.0.1:0")?.local_addr()?;
        let mut process = self.spawn(&address.to_string(), address.port()).with_context(|| format!("server `{}`", self.name))?;
        let url = format!("http://{address}/v1");
        let ready_s = self.ready_s.unwrap_or(READY_S);
        let deadline = Instant::now() + Duration::from_secs(ready_s);
        loop {
            if let Some(status) = process.try_wait()? {
                bail!("server `{}` ended before it was ready: {status}", self.name);
            }
            let failure = match reach(&url, traffic, seed).await {
                Ok(target) => return Ok(Server { name: self.name.clone(), target, settings: self.clone(), process: Some(process) }),
                Err(failure) => failure,
            };
            if Instant::now() >= deadline {
                stop(&mut process).await;
                return Err(failure.context(format!("server `{}` is not ready after {ready_s} s", self.name)));
            }
            sleep(ASK_AGAIN).await;
        }
    }

    fn spawn(&self, address: &str, port: u16) -> anyhow::Result<Child> {
        let fill = |word: &String| word.replace("{addr}", address).replace("{port}", &port.to_string());
        let words: Vec<String> = self.command.iter().map(fill).collect();
        let beside = std::env::current_exe()?.with_file_name(&words[0]);
        let program = if !words[0].contains('/') && beside.is_file() { beside.as_path() } else { Path::new(&words[0]) };
        let mut command = Command::new(program);
        command.args(&words[1..]).stdin(Stdio::null()).stdout(Stdio::null()).kill_on_drop(true);
        // A process inherits the cores of the thread that starts it.
        let own = (!self.cores.is_empty()).then(|| sched_getaffinity(THIS_THREAD)).transpose()?;
        if own.is_some() {
            let mut cores = CpuSet::new();
            self.cores.iter().try_for_each(|core| cores.set(*core)).context("`cores`: there is no such core")?;
            sched_setaffinity(THIS_THREAD, &cores).context("`cores`: this process may not use them")?;
        }
        let started = command.spawn().with_context(|| format!("cannot start {}", program.display()));
        if let Some(own) = own {
            sched_setaffinity(THIS_THREAD, &own)?;
        }
        started
    }
}

async fn reach(url: &str, traffic: &Traffic, seed: u64) -> anyhow::Result<Target> {
    let target = Target::new(url, &traffic.request).await?;
    target.probe(&traffic.workload, seed).await?;
    Ok(target)
}

const THIS_THREAD: Pid = Pid::from_raw(0);

impl Server {
    pub async fn stop(mut self) {
        if let Some(process) = &mut self.process {
            stop(process).await;
        }
    }
}

/// Asks a process to end, and kills it if it does not.
async fn stop(process: &mut Child) {
    if let Some(pid) = process.id() {
        // The process may have ended by itself.
        let _ = kill(Pid::from_raw(pid as i32), Signal::SIGTERM);
    }
    if timeout(STOP, process.wait()).await.is_err() {
        let _ = process.kill().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        traffic: Traffic,
    }

    async fn start(settings: ServerSettings) -> String {
        let Cli { traffic } = Cli::parse_from(["x"]);
        format!("{:#}", settings.start(&traffic, 1).await.err().expect("it cannot start"))
    }

    #[tokio::test]
    async fn what_cannot_start_says_why() {
        let named = |command: &[&str]| ServerSettings {
            name: "x".into(),
            command: command.iter().map(|word| (*word).to_owned()).collect(),
            ready_s: Some(1),
            ..ServerSettings::default()
        };
        assert!(start(ServerSettings::default()).await.contains("name"));
        assert!(start(named(&[])).await.contains("`url` or a `command`"));
        assert!(start(named(&["/no/such/program"])).await.contains("cannot start"));
        assert!(start(named(&["/bin/false"])).await.contains("ended before it was ready"));
        assert!(start(named(&["/bin/sleep", "60"])).await.contains("not ready after 1 s"));
        assert!(start(ServerSettings { cores: vec![1000], ..named(&["/bin/sleep", "60"]) }).await.contains("cores"));
    }
}
