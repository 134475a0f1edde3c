//! `tidemill eval`: asks a running cluster golden cases, keeps the results in SQLite, and compares models with a judge.
//!
//! - `server`: requests to the cluster; `run`: evaluates one model; `compare`: compares the answers of several, in pairs
//! - `results`: the file of results

mod compare;
mod results;
mod run;
mod server;

use anyhow::{Context, bail};
use results::Results;
use server::Server;
use std::{
    fs,
    io::{self, IsTerminal, Write},
    path::PathBuf,
    time::Duration,
};
use tidemill_eval::{
    case::{self, Ready},
    gate::Gate,
    golden::CASES,
};

#[derive(Debug, clap::Subcommand)]
pub enum EvalCommand {
    /// Ask a model all cases, check its answers, and store the results; ends with status 1 if the score is too low
    Run(RunArgs),
    /// Let a model judge the answers of two or more others, in pairs, each in both orders; prints ratings
    Compare(CompareArgs),
    /// Show the runs that were kept, the newest first
    List {
        #[command(flatten)]
        kept: Kept,
        /// Only of this model
        #[arg(long)]
        model: Option<String>,
        #[arg(long, default_value_t = 20)]
        limit: usize,
    },
    /// Print the built-in golden set, to start your own from
    Cases,
}

#[derive(Debug, clap::Args)]
pub struct Asks {
    /// The front door
    #[arg(long, default_value = "http://127.0.0.1:8000/v1")]
    url: String,
    /// File with an API key, if the server wants one
    #[arg(long, value_name = "FILE")]
    key_file: Option<PathBuf>,
    /// Files of cases, one a line [default: the golden set that comes with Tidemill]
    #[arg(long, value_name = "FILE")]
    cases: Vec<PathBuf>,
    /// Only cases with this tag
    #[arg(long)]
    tag: Option<String>,
    /// Only the first cases, this many
    #[arg(long)]
    limit: Option<usize>,
    /// Requests at a time
    #[arg(long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u16).range(1..=256))]
    concurrency: u16,
    /// Seconds for one answer; an answer that does not come has failed
    #[arg(long, value_name = "S", default_value_t = 60, value_parser = clap::value_parser!(u64).range(1..=3600))]
    deadline_s: u64,
    /// Tokens of an answer where its case does not say
    #[arg(long, value_name = "N", default_value_t = 512)]
    max_tokens: u32,
    /// The `service_tier` of all requests, such as flex
    #[arg(long, value_name = "TIER")]
    service_tier: Option<String>,
}

#[derive(Debug, clap::Args)]
pub struct Kept {
    /// File of results, made if it is not there
    #[arg(long, value_name = "FILE", default_value = "eval.sqlite")]
    results: PathBuf,
}

#[derive(Debug, clap::Args)]
pub struct RunArgs {
    /// [default: the only one that is served]
    #[arg(long)]
    model: Option<String>,
    /// The model that judges, where cases want that [default: such checks are left out]
    #[arg(long)]
    judge: Option<String>,
    #[command(flatten)]
    asks: Asks,
    #[command(flatten)]
    kept: Kept,
    /// Baseline of the comparison: a run's number, a model (its last run), or none [default: this model's last run, or else the last
    /// run of another one]
    #[arg(long, value_name = "RUN|MODEL")]
    baseline: Option<String>,
    /// Least score that passes
    #[arg(long, value_name = "SCORE", default_value_t = Gate::default().score)]
    gate_score: f64,
    /// Most by which the score may be below the baseline's, on the cases of both
    #[arg(long, value_name = "SCORE", default_value_t = Gate::default().drop)]
    gate_drop: f64,
    /// Label of the run in the results, such as a commit or a checkpoint's name
    #[arg(long, default_value = "")]
    commit: String,
    /// Show every check that failed, with the answer
    #[arg(long)]
    verbose: bool,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
pub struct CompareArgs {
    /// Two models or more
    #[arg(required = true, num_args = 2..)]
    models: Vec<String>,
    /// The model that judges
    #[arg(long)]
    judge: String,
    #[command(flatten)]
    asks: Asks,
    #[command(flatten)]
    kept: Kept,
    /// Print the results as JSON
    #[arg(long)]
    json: bool,
}

pub async fn eval(command: EvalCommand) -> anyhow::Result<()> {
    match command {
        EvalCommand::Run(args) => run::run(args).await,
        EvalCommand::Compare(args) => compare::compare(args).await,
        EvalCommand::List { kept, model, limit } => {
            print!("{}", results::table(&Results::open(&kept.results)?.list(model.as_deref(), limit)?));
            Ok(())
        }
        EvalCommand::Cases => {
            io::stdout().write_all(CASES.as_bytes())?;
            Ok(())
        }
    }
}

impl Asks {
    fn cases(&self) -> anyhow::Result<Vec<Ready>> {
        let mut text = String::new();
        if self.cases.is_empty() {
            text += CASES;
        }
        for path in &self.cases {
            let file = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            case::read(&file).with_context(|| path.display().to_string())?;
            text += file.trim_end();
            text.push('\n');
        }
        let mut cases = case::read(&text).context("all files together")?;
        cases.retain(|ready| self.tag.as_ref().is_none_or(|tag| ready.case.tags.contains(tag)));
        cases.truncate(self.limit.unwrap_or(usize::MAX));
        if cases.is_empty() {
            bail!("there is no such case");
        }
        Ok(cases)
    }

    fn server(&self) -> anyhow::Result<Server> {
        let key = self.key_file.as_ref().map(|path| fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display())));
        Server::new(&self.url, key.transpose()?.as_deref(), Duration::from_secs(self.deadline_s), self.service_tier.clone())
    }
}

/// The progress of a long computation, printed for a person at the terminal.
struct Progress {
    what: &'static str,
    all: usize,
    done: usize,
}

impl Progress {
    fn new(what: &'static str, all: usize) -> Self {
        Self { what, all, done: 0 }
    }

    fn step(&mut self) {
        self.done += 1;
        let (Self { what, all, done }, terminal) = (&*self, io::stderr().is_terminal());
        if terminal {
            eprint!("\r{done} of {all} {what}{}", if done == all { "\n" } else { "" });
        } else if done.is_multiple_of(100) || done == all {
            eprintln!("{done} of {all} {what}");
        }
    }
}
