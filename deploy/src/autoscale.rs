//! `tidemill autoscale`: runs an operator's command whenever the coordinators want a different number of workers.

use crate::{
    operators::TokenArgs,
    processes::say,
    wanted::{self, Fleet, Wanted},
};
use anyhow::{Context, bail};
use nix::{
    sys::signal::{Signal, killpg},
    unistd::Pid,
};
use std::{collections::BTreeMap, process::Stdio, time::Duration};
use tidemill_net::process;
use tokio::{process::Command, time::timeout};

/// Run a command for each number of workers that the coordinators want.
///
/// It gets the role (prefill or decode), the model and the number as its last arguments, and as TIDEMILL_ROLE, TIDEMILL_MODEL and
/// TIDEMILL_WORKERS. It is run once for each role and model at the start, then whenever a number is another one; what fails is run again.
#[derive(Clone, Debug, clap::Args)]
pub struct AutoscaleArgs {
    /// URL of a coordinator, or of its operators' port; once for each coordinator
    #[arg(long, default_value = "http://127.0.0.1:8000")]
    url: Vec<String>,
    /// Seconds between two looks
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u64).range(1..=3600))]
    every_s: u64,
    /// Most seconds that the command may take; then it is killed, with what it has started
    #[arg(long, default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    deadline_s: u64,
    #[command(flatten)]
    token: TokenArgs,
    /// The command and its first arguments
    #[arg(last = true, required = true, value_name = "COMMAND")]
    command: Vec<String>,
}

/// Runs until Ctrl-C or SIGTERM.
pub async fn autoscale(args: AutoscaleArgs) -> anyhow::Result<()> {
    let urls = args.url.iter().map(|url| cluster_url(url)).collect::<anyhow::Result<Vec<_>>>()?;
    let hook = Hook { command: args.command, deadline: Duration::from_secs(args.deadline_s) };
    let mut wanted = wanted::watch(wanted::client(args.token.client()?)?, urls, Duration::from_secs(args.every_s), say);
    let mut done = BTreeMap::new();
    let acting = async {
        // Every poll notifies, even without a change, so that a failed command is tried again.
        while wanted.changed().await.is_ok() {
            let now = wanted.borrow_and_update().clone();
            act(&hook, &now, &mut done).await;
        }
    };
    tokio::select! {
        () = acting => bail!("nothing looks at the coordinators any more: please report this as a bug"),
        () = process::terminated() => Ok(()),
    }
}

/// Runs the command for each number that is not done yet.
async fn act(hook: &Hook, wanted: &Wanted, done: &mut BTreeMap<Fleet, usize>) {
    for (fleet, workers) in wanted.iter().filter(|(fleet, workers)| done.get(fleet) != Some(workers)).collect::<Vec<_>>() {
        let Fleet { model, role } = fleet;
        match hook.run(fleet, workers).await {
            Ok(()) => {
                say(&format!("{workers} {role} workers of {model} are wanted: done"));
                done.insert(fleet.clone(), workers);
            }
            Err(error) => {
                // The command may have done a part of its work, so the present number is unknown.
                done.remove(fleet);
                say(&format!("{workers} {role} workers of {model} are wanted, and {error:#}; it will be tried again"));
            }
        }
    }
}

struct Hook {
    command: Vec<String>,
    deadline: Duration,
}

impl Hook {
    async fn run(&self, Fleet { model, role }: &Fleet, workers: usize) -> anyhow::Result<()> {
        let [program, arguments @ ..] = &self.command[..] else { bail!("there is no command") };
        let workers = workers.to_string();
        let mut child = Command::new(program)
            .args(arguments)
            .args([role, model.as_str(), &workers])
            .env("TIDEMILL_ROLE", role)
            .env("TIDEMILL_MODEL", model)
            .env("TIDEMILL_WORKERS", &workers)
            .stdin(Stdio::null())
            .process_group(0)
            .spawn()
            .with_context(|| format!("`{program}` cannot be run"))?;
        let group = Group(child.id());
        let ended = timeout(self.deadline, child.wait()).await;
        match ended.with_context(|| format!("`{program}` takes longer than {:?}: it is killed", self.deadline))?? {
            status if status.success() => {
                // Background processes that the command leaves running may be its purpose.
                std::mem::forget(group);
                Ok(())
            }
            status => bail!("`{program}` ended with {status}"),
        }
    }
}

/// A command's process group, killed when this is dropped.
struct Group(Option<u32>);

impl Drop for Group {
    fn drop(&mut self) {
        if let Some(pid) = self.0.and_then(|pid| i32::try_from(pid).ok()) {
            // The group may have ended already.
            let _ = killpg(Pid::from_raw(pid), Signal::SIGKILL);
        }
    }
}

fn cluster_url(url: &str) -> anyhow::Result<String> {
    let base = url.trim_end_matches('/').trim_end_matches("/v1");
    if !base.starts_with("http://") || reqwest::Url::parse(base).is_err() {
        bail!("`{url}` is not an http:// URL such as http://127.0.0.1:8000");
    }
    Ok(format!("{base}/cluster"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wanted::tests::{coordinator, shown};
    use std::{fs, time::Instant};
    use tokio::sync::watch;

    fn hook(script: &str) -> Hook {
        Hook { command: ["sh", "-c", script, "hook"].map(String::from).into(), deadline: Duration::from_millis(500) }
    }

    fn decode() -> Fleet {
        Fleet { model: "m".into(), role: "decode" }
    }

    #[tokio::test]
    async fn each_number_is_acted_on_once_and_what_fails_again() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join("log");
        let hook = hook(&format!("echo \"$@ $TIDEMILL_ROLE $TIDEMILL_MODEL $TIDEMILL_WORKERS\" >> {0}; test $3 != 9", log.display()));
        let (shows, shown_now) = watch::channel(shown(0, 2));
        let (client, urls) = (wanted::client(reqwest::Client::builder().no_proxy()).unwrap(), [coordinator(shown_now).await]);
        let mut done = BTreeMap::new();
        for (prefill, number) in [(0, 2), (0, 2), (0, 9), (0, 9), (1, 2)] {
            shows.send_replace(shown(prefill, number));
            let wanted = Wanted::ask(&client, &urls).await.unwrap();
            act(&hook, &wanted, &mut done).await;
        }
        let lines = fs::read_to_string(&log).unwrap();
        let expected = [
            "decode m 2 decode m 2",
            "prefill m 0 prefill m 0",
            "decode m 9 decode m 9",
            "decode m 9 decode m 9",
            "decode m 2 decode m 2",
            "prefill m 1 prefill m 1",
        ];
        assert_eq!(lines.lines().collect::<Vec<_>>(), expected);
    }

    #[tokio::test]
    async fn a_command_that_does_not_end_is_killed_with_what_it_started() {
        let dir = tempfile::tempdir().unwrap();
        let began = Instant::now();
        let script = format!("sleep 60 & echo $! > {}/pid; sleep 60", dir.path().display());
        let error = hook(&script).run(&decode(), 1).await.unwrap_err();
        assert!(error.to_string().contains("takes longer than 500ms") && began.elapsed() < Duration::from_secs(10), "{error}");
        let pid = fs::read_to_string(dir.path().join("pid")).unwrap();
        // A process that has ended may wait for its new parent.
        let runs = || fs::read_to_string(format!("/proc/{}/stat", pid.trim())).is_ok_and(|stat| !stat.contains(") Z "));
        while runs() {
            assert!(began.elapsed() < Duration::from_secs(10), "what it started still runs");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let error = hook("exit 3").run(&decode(), 1).await.unwrap_err();
        assert!(error.to_string().contains("exit status: 3"), "{error}");
        let none = Hook { command: vec!["/no/such/program".into()], deadline: Duration::from_secs(1) };
        assert!(none.run(&decode(), 1).await.unwrap_err().to_string().contains("/no/such/program"));
    }

    #[test]
    fn urls_are_of_coordinators() {
        assert_eq!(cluster_url("http://a:8000/v1/").unwrap(), "http://a:8000/cluster");
        assert!(cluster_url("a:8000").is_err());
    }
}
