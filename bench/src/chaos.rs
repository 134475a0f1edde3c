//! `tidemill-bench chaos`: processes of a live cluster are killed and paused at random while clients stream, and every answer is
//! compared with the one from before the faults.
//!
//! - [`fault`]: the faults and their victims
//! - [`tally`]: the results as seen by clients
//!
//! ```text
//!   tidemill up ──► coordinators, workers ◄── SIGKILL, SIGSTOP … SIGCONT, by a seed
//!        ▲                 ▲
//!        └ starts again    └── streams: answer after answer, each token's text compared
//! ```
//!
//! Halfway, SIGHUP restarts everything in an orderly way, process by process.
//!
//! Two errors are allowed. A client whose coordinator dies sees its stream end, and asks another one. A client that asks a coordinator
//! while it restarts is refused, and asks another one; no stream breaks then.

pub mod fault;
pub mod tally;

use crate::record;
use anyhow::{Context, ensure};
use fault::{Fault, Faults, Kind};
use futures_util::StreamExt;
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::Serialize;
use serde_json::{Value, json};
use std::{
    collections::BTreeSet,
    path::PathBuf,
    process::Stdio,
    sync::{Arc, Mutex},
    time::Duration,
};
use tally::{Seen, Tally};
use tidemill_deploy::client::{Client, ClientError};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
    sync::mpsc,
    time::{Instant, sleep, timeout},
};

/// Kill and pause processes of a cluster at random while it answers, and compare every answer.
///
/// Starts a cluster of its own (`tidemill up`, beside this binary) and ends it. The exit status says whether every answer was right, every
/// error allowed, and nothing was left behind.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct ChaosArgs {
    /// Directory of the model [default: the built-in one]
    #[arg(long)]
    pub model: Option<PathBuf>,
    #[arg(long, default_value_t = 1.0, value_parser = positive)]
    pub minutes: f64,
    /// Clients that stream answer after answer
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub streams: u32,
    /// Mean time between two faults, in seconds
    #[arg(long, default_value_t = 2.0, value_parser = positive)]
    pub every_s: f64,
    #[arg(long, default_value_t = 2)]
    pub coordinators: usize,
    #[arg(long, default_value_t = 2)]
    pub prefill: usize,
    #[arg(long, default_value_t = 3)]
    pub decode: usize,
    #[arg(long, default_value_t = 2)]
    pub kvpool: usize,
    /// Seed of the faults and requests
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the result to this file, too.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|number: &f64| *number > 0.0 && number.is_finite()).ok_or_else(|| "must be above 0".into())
}

pub async fn run(args: ChaosArgs) -> anyhow::Result<()> {
    let mut up = Up::start(&args).await?;
    let prompts = up.reference().await.context("before the faults")?;
    let mut faults = Faults::new(args.seed, up.pid);
    let tally = Arc::new(Mutex::new(Tally::default()));
    let began = Instant::now();
    let until = began + Duration::from_secs_f64(args.minutes * 60.0);
    let clients: Vec<_> = (0..args.streams)
        .map(|n| {
            let client = Streams {
                front_doors: up.front_doors.clone(),
                prompts: prompts.clone(),
                tally: Arc::clone(&tally),
                model: up.model.clone(),
            };
            tokio::spawn(client.run(StdRng::seed_from_u64(args.seed ^ u64::from(n + 1) << 32), until, began))
        })
        .collect();

    let mut random = StdRng::seed_from_u64(args.seed);
    let mut suffered: Vec<Suffered> = Vec::new();
    let mut restarted = None;
    while Instant::now() < until {
        sleep(Duration::from_secs_f64(args.every_s * (0.5 + random.random::<f64>())).min(until - Instant::now())).await;
        if Instant::now() >= until {
            break;
        }
        if restarted.is_none() && Instant::now() > began + (until - began) / 2 {
            let (fault, at) = (faults.restart(), began.elapsed());
            eprintln!("{:6.1} s  {fault}", at.as_secs_f64());
            fault.inflict(|pid| up.is_member(pid)).await;
            restarted = Some(at);
            suffered.push((fault, at, None));
        }
        let members = up.members().await;
        if let Some(fault) = faults.next(&members) {
            eprintln!("{:6.1} s  {fault}", began.elapsed().as_secs_f64());
            let at = began.elapsed();
            let gone = fault.inflict(|pid| up.is_member(pid)).await;
            suffered.push((fault, at, gone));
        }
    }
    for client in clients {
        client.await.context("a client broke")?;
    }
    let restart_s = match restarted {
        None => None,
        Some(at) => Some((up.restarted().await.context("the rolling restart did not end")? - began).saturating_sub(at).as_secs_f64()),
    };
    let rest = up.at_rest().await;
    let left = up.stop(&faults).await;
    let tally = Arc::try_unwrap(tally).map_err(|_| anyhow::anyhow!("a client still runs"))?.into_inner().expect("nobody panics with it");
    let result = Outcome {
        settings: &args,
        faults: tally::recoveries(&suffered, &tally),
        answers: tally.counts(&suffered),
        restart_s,
        left_running: rest,
        left_behind: left,
    };
    println!("{result}");
    record::write(args.json.as_ref(), "chaos", &result)?;
    ensure!(result.is_good(), "the cluster did not keep its promises");
    Ok(())
}

/// The result of the run.
#[derive(Debug, Serialize)]
struct Outcome<'a> {
    settings: &'a ChaosArgs,
    answers: tally::Counts,
    faults: Vec<tally::Recovery>,
    /// The duration of the rolling restart.
    restart_s: Option<f64>,
    /// The reason why the cluster was not at rest in the end.
    left_running: Option<String>,
    /// Processes that outlived the cluster.
    left_behind: Vec<u32>,
}

impl Outcome<'_> {
    fn is_good(&self) -> bool {
        let tally::Counts { right, wrong, hung, not_allowed, .. } = &self.answers;
        *right > 0 && *wrong == 0 && *hung == 0 && not_allowed.is_empty() && self.left_running.is_none() && self.left_behind.is_empty()
    }
}

impl std::fmt::Display for Outcome<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}", self.answers)?;
        writeln!(f, "{:10} {:22} {:>6} {:>22} {:>28}", "fault", "role", "times", "gone ms, p50 and max", "longest pause ms, p50 and max")?;
        self.faults.iter().try_for_each(|recovery| writeln!(f, "{recovery}"))?;
        self.restart_s.iter().try_for_each(|s| writeln!(f, "everything was restarted, process by process, in {s:.1} s"))?;
        match &self.left_running {
            Some(what) => writeln!(f, "not at rest in the end: {what}")?,
            None => writeln!(f, "at rest in the end: no request, no block in use")?,
        }
        write!(f, "processes left behind: {}", self.left_behind.len())
    }
}

/// A prompt and its answer, from before the faults.
#[derive(Clone, Debug)]
struct Known {
    prompt: Vec<u32>,
    max_tokens: u32,
    text: String,
}

/// The running cluster.
struct Up {
    child: Child,
    pid: u32,
    front_doors: Vec<String>,
    model: String,
    /// Receives the time at which each rolling restart ended.
    restarted: mpsc::UnboundedReceiver<Instant>,
}

/// The time for answers, and for the cluster to recover.
const PATIENCE: Duration = Duration::from_secs(60);
const READY: Duration = Duration::from_secs(120);
/// The number of different prompts.
const PROMPTS: u32 = 24;

impl Up {
    async fn start(args: &ChaosArgs) -> anyhow::Result<Self> {
        let binary = std::env::current_exe()?.with_file_name("tidemill");
        ensure!(binary.is_file(), "{} is missing: build the whole workspace (`cargo build --release`)", binary.display());
        let mut command = Command::new(binary);
        // Every crash is intended, so restarts are not limited.
        command.args(["up", "--http", "127.0.0.1:0", "--device", "cpu", "--threads", "1", "--log", "error", "--restarts", "1000000"]);
        command.args(["--pool-memory", "64MiB", "--kv-memory", "128MiB"]);
        for (flag, number) in
            [("--coordinator", args.coordinators), ("--prefill", args.prefill), ("--decode", args.decode), ("--kvpool", args.kvpool)]
        {
            command.args([flag, &number.to_string()]);
        }
        if let Some(model) = &args.model {
            command.arg("--model").arg(model);
        }
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn()?;
        let pid = child.id().context("`tidemill up` ended at once")?;
        let mut lines = BufReader::new(child.stdout.take().context("stdout is piped")?).lines();
        let mut front_doors = Vec::new();
        while front_doors.len() < args.coordinators {
            let line = timeout(READY, lines.next_line()).await.context("`tidemill up` is not ready")??;
            let line = line.context("`tidemill up` ended before it was ready")?;
            front_doors.extend(line.strip_prefix("ready ").map(str::to_owned));
        }
        let (told, restarted) = mpsc::unbounded_channel();
        let mut said = BufReader::new(child.stderr.take().context("stderr is piped")?).lines();
        tokio::spawn(async move {
            while let Ok(Some(line)) = said.next_line().await {
                if line == "tidemill: every process was restarted" {
                    let _ = told.send(Instant::now());
                }
            }
        });
        let first = front_doors.first().context("at least one coordinator is needed")?;
        let model = Client::new(first)?.models().await?.into_iter().next().context("the cluster serves no model")?;
        Ok(Self { child, pid, front_doors, model, restarted })
    }

    /// Every prompt's answer without faults.
    async fn reference(&self) -> anyhow::Result<Arc<Vec<Known>>> {
        let client = Client::new(&self.front_doors[0])?;
        let mut known = Vec::new();
        for n in 0..PROMPTS {
            // Some prompts share a prefix, some are long.
            let tokens = 20 + 37 * n % 400;
            let prompt = (0..tokens).map(|i| 3 + (i * 7 + if i < 64 { n % 4 } else { n } * 13 + i / 5) % 200).collect();
            let mut ask = Known { prompt, max_tokens: 40 + 11 * n % 200, text: String::new() };
            ask.text = answer(&client, &self.model, &ask, |_| {}).await?;
            known.push(ask);
        }
        Ok(Arc::new(known))
    }

    /// The members that a coordinator reports; none if no coordinator answers.
    async fn members(&self) -> Vec<fault::Member> {
        for url in &self.front_doors {
            let Ok(client) = Client::new(url) else { continue };
            if let Ok(Ok(view)) = timeout(Duration::from_secs(1), client.cluster::<fault::View>()).await {
                return view.members;
            }
        }
        Vec::new()
    }

    async fn is_member(&self, pid: u32) -> bool {
        self.members().await.iter().any(|member| member.pid == pid)
    }

    /// The time at which the rolling restart ended.
    async fn restarted(&mut self) -> Option<Instant> {
        timeout(READY, self.restarted.recv()).await.ok()?
    }

    /// Waits until nothing runs and nothing is held, at any coordinator or worker. Returns the rest, if any.
    async fn at_rest(&self) -> Option<String> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            let mut busy = None;
            for url in &self.front_doors {
                let view: Result<Value, ClientError> = match Client::new(url) {
                    Ok(client) => client.cluster().await,
                    Err(error) => Err(error),
                };
                busy = busy.or(match view {
                    Ok(view) => tally::busy(&view),
                    Err(error) => Some(error.to_string()),
                });
            }
            if busy.is_none() || Instant::now() > deadline {
                return busy;
            }
            sleep(Duration::from_millis(200)).await;
        }
    }

    /// Ends the cluster as an operator does. Returns its processes that still exist afterwards.
    async fn stop(mut self, faults: &Faults) -> Vec<u32> {
        let mut pids: BTreeSet<u32> = fault::children(self.pid).into_iter().map(|(pid, _)| pid).collect();
        pids.extend(faults.paused());
        fault::signal(self.pid, nix::sys::signal::Signal::SIGTERM);
        let _ = timeout(PATIENCE, self.child.wait()).await;
        pids.into_iter().filter(|pid| fault::lives(*pid)).collect()
    }
}

/// One client.
struct Streams {
    front_doors: Vec<String>,
    prompts: Arc<Vec<Known>>,
    tally: Arc<Mutex<Tally>>,
    model: String,
}

impl Streams {
    async fn run(self, mut random: StdRng, until: Instant, began: Instant) {
        let clients: Vec<_> = self.front_doors.iter().filter_map(|url| Client::new(url).ok()).collect();
        while Instant::now() < until {
            let known = &self.prompts[random.random_range(0..self.prompts.len())];
            let client = &clients[random.random_range(0..clients.len())];
            let asked = began.elapsed();
            let mut last = asked;
            let mut pauses = Vec::new();
            let got = timeout(
                PATIENCE,
                answer(client, &self.model, known, |now| {
                    let now = now - began;
                    pauses.push((last, now));
                    last = now;
                }),
            )
            .await;
            let seen = match got {
                Err(_) => Seen::Hung,
                Ok(Ok(text)) if text == known.text => Seen::Right,
                Ok(Ok(_)) => Seen::Wrong,
                Ok(Err(error)) => Seen::Failed(error.kind(), error.to_string()),
            };
            let failed = matches!(seen, Seen::Failed(..));
            self.tally.lock().expect("nobody panics with it").add(seen, asked, began.elapsed(), pauses);
            if failed {
                sleep(Duration::from_millis(100)).await;
            }
        }
    }
}

/// Streams an answer, and returns its text. `token` is called for each event with a token.
async fn answer(client: &Client, model: &str, known: &Known, mut token: impl FnMut(Instant)) -> Result<String, ClientError> {
    let body = json!({
        "model": model,
        "prompt": known.prompt,
        "max_tokens": known.max_tokens,
        "temperature": 0,
        "ignore_eos": true,
        "stream": true,
    });
    let mut stream = Box::pin(client.stream("/completions", &body).await?);
    let mut text = String::new();
    while let Some(chunk) = stream.next().await {
        let chunk = chunk?;
        if chunk.is_token {
            token(Instant::now());
        }
        text += &chunk.text;
    }
    Ok(text)
}

/// A fault with its time, and the time until its process was not a member any more.
pub type Suffered = (Fault, Duration, Option<Duration>);

/// Whether an error is allowed: the crash of a coordinator ends its clients' streams, and it refuses requests until it is back, as it does
/// during an orderly restart. Nothing else may fail.
fn is_allowed(kind: &str, asked: Duration, ended: Duration, suffered: &[Suffered]) -> bool {
    suffered.iter().any(|(fault, at, _)| match fault.kind {
        Kind::Kill => fault.role == "coordinator" && *at <= ended && asked < *at + fault::BACK,
        Kind::Restart => ["unreachable", "http_503"].contains(&kind) && *at <= ended && asked < *at + RESTART_MAX,
        Kind::Hiccup | Kind::Pause => false,
    })
}

/// The longest duration of a rolling restart.
const RESTART_MAX: Duration = Duration::from_secs(120);
