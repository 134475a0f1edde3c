//! `tidemill-bench load`: the thin shell. Schedule and prompts are fixed up front. Each task waits until its request is due, sends it,
//! and hands the answer's latencies to [`summary`].

pub mod arrivals;
pub mod kind;
pub mod summary;
pub mod timeline;
pub mod workload;

use anyhow::{Context, bail, ensure};
use arrivals::Rate;
use futures_util::{StreamExt, future::try_join_all};
use indicatif::{ProgressBar, ProgressStyle};
use kind::Kind;
use serde::Serialize;
use serde_json::{Value, json};
use std::{collections::BTreeMap, fs, path::PathBuf, sync::Arc, time::Duration};
use summary::{Failure, Slo, Summary};
use tidemill_deploy::client::Client;
use timeline::{Answer, Timeline};
use tokio::{
    sync::Semaphore,
    task::JoinSet,
    time::{Instant, sleep_until, timeout_at},
};
use workload::{Ask, Length, Prompt, PromptKind, Workload};

/// Send requests at a given rate and measure the answers' latencies.
///
/// Arrivals are a Poisson process that does not wait for the server (open loop), and every latency counts from when the
/// request was due. One short request before the measurement checks that the server accepts such requests at all.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct LoadArgs {
    /// The server's URL, up to and including /v1.
    #[arg(long, default_value = "http://127.0.0.1:8000/v1")]
    pub url: String,
    /// The model, if the server has several; the first by default.
    #[arg(long)]
    pub model: Option<String>,
    /// Requests per second; 0 or `inf` sends all at once.
    #[arg(long, required_unless_present = "kind")]
    pub rate: Option<Rate>,
    /// A mixed workload: one of its kinds as `name:rate:input-len:output-len`, with `:service-tier` if it has one. Give it once for each
    /// kind; each has its own arrivals and results.
    #[arg(long, conflicts_with_all = ["rate", "requests", "input_len", "output_len"])]
    pub kind: Vec<Kind>,
    /// How long requests of a mixed workload arrive.
    #[arg(long, default_value_t = 60, requires = "kind", value_parser = clap::value_parser!(u32).range(1..=86_400))]
    pub seconds: u32,
    /// OpenAI's `service_tier`: auto, default, flex or priority.
    #[arg(long)]
    pub service_tier: Option<String>,
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    pub requests: u32,
    /// At most this many requests at a time; the others wait, and their wait is measured.
    #[arg(long, value_parser = clap::value_parser!(u32).range(1..))]
    pub concurrency_max: Option<u32>,
    /// Prompt length in tokens: `512`, or drawn evenly from `128-1024`.
    #[arg(long, default_value = "512")]
    pub input_len: Length,
    /// Answer length in tokens: `128`, or drawn evenly from `32-256`.
    #[arg(long, default_value = "128")]
    pub output_len: Length,
    /// Leading tokens that all prompts have in common.
    #[arg(long, default_value_t = 0)]
    pub prefix_len: u32,
    /// Token ids, or words for servers that take only text.
    #[arg(long, value_enum, default_value_t = PromptKind::Tokens)]
    pub prompt: PromptKind,
    /// Token ids are drawn below this; the default fits every vocabulary.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(16..))]
    pub vocab: u32,
    /// Ask /v1/chat/completions (prompts are text) instead of /v1/completions.
    #[arg(long)]
    pub chat: bool,
    /// Let answers end where the model ends them: for servers that do not know `ignore_eos`.
    #[arg(long)]
    pub allow_eos: bool,
    /// JSON fields added to every request, such as '{"response_format": {"type": "json_object"}}'
    #[arg(long, value_parser = fields)]
    pub fields: Option<Value>,
    /// Repeats a run's prompts and arrivals. By default each run draws its own, since a server with a prefix cache has seen the last
    /// run's.
    #[arg(long)]
    pub seed: Option<u64>,
    /// A request fails this many seconds after it was due.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout_s: u64,
    /// Goodput counts requests whose first token came within this time (milliseconds)
    #[arg(long)]
    pub slo_ttft_ms: Option<u64>,
    /// and whose later tokens came, on average, within this time each (milliseconds).
    #[arg(long)]
    pub slo_tpot_ms: Option<u64>,
    /// Write settings and results here too.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// Measures, prints a table, writes the JSON file. An error if no request was answered at all.
pub async fn run(mut args: LoadArgs) -> anyhow::Result<()> {
    let client = Client::new(&args.url)?;
    if args.model.is_none() {
        let models = client.models().await.context("no model is given with --model, and the server does not list any")?;
        args.model = Some(models.first().context("the server lists no model: give --model")?.clone());
    }
    // Short enough to type again.
    let seed = *args.seed.get_or_insert_with(|| rand::random::<u32>().into());
    if args.chat {
        args.prompt = PromptKind::Text;
    }
    let targets: Vec<_> = args.of_each_kind().into_iter().map(|args| Arc::new(Target { client: client.clone(), args })).collect();
    for target in &targets {
        target.probe(seed).await?;
    }
    let progress = progress_bar(targets.iter().map(|target| target.args.requests).sum());
    let start = Instant::now() + LEAD;
    // Another seed each, or prompts of one kind would begin as another's do.
    let measured = (seed..).zip(&targets).map(|(seed, target)| measure(target, seed, start, &progress));
    let measured = try_join_all(measured).await?;
    progress.finish_and_clear();

    let millis = |ms: Option<u64>| ms.map(Duration::from_millis);
    let slo = Slo { ttft: millis(args.slo_ttft_ms), tpot: millis(args.slo_tpot_ms) };
    let summaries: Vec<_> = measured.iter().map(|(outcomes, lags, took)| Summary::new(outcomes, lags, *took, slo)).collect();
    println!("{} at {}, seed {seed}", args.model.as_deref().unwrap_or_default(), args.url);
    let results = if args.kind.is_empty() {
        println!("\n{}", summaries[0]);
        Results::One(&summaries[0])
    } else {
        args.kind.iter().zip(&summaries).for_each(|(kind, summary)| println!("\n{kind}\n\n{summary}"));
        Results::Kinds { kinds: args.kind.iter().map(|kind| kind.name.as_str()).zip(&summaries).collect() }
    };
    if let Some(path) = &args.json {
        let report = Report { settings: &args, results };
        fs::write(path, serde_json::to_string_pretty(&report)? + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    ensure!(summaries.iter().any(|summary| summary.completed > 0), "no request was answered");
    Ok(())
}

impl LoadArgs {
    /// The settings of each kind of request.
    fn of_each_kind(&self) -> Vec<LoadArgs> {
        if self.kind.is_empty() {
            return vec![self.clone()];
        }
        let of_kind = |kind: &Kind| LoadArgs {
            rate: Some(Rate::PerSecond(kind.rate)),
            requests: kind.requests(self.seconds),
            input_len: kind.input.clone(),
            output_len: kind.output.clone(),
            service_tier: kind.service_tier.clone().or_else(|| self.service_tier.clone()),
            ..self.clone()
        };
        self.kind.iter().map(of_kind).collect()
    }
}

/// The JSON file: results at the top level, with the settings beside them.
#[derive(Serialize)]
struct Report<'a> {
    settings: &'a LoadArgs,
    #[serde(flatten)]
    results: Results<'a>,
}

#[derive(Serialize)]
#[serde(untagged)]
enum Results<'a> {
    One(&'a Summary),
    /// By name.
    Kinds {
        kinds: BTreeMap<&'a str, &'a Summary>,
    },
}

/// One outcome and one lag per request, in no order, and the time from the start to the last outcome.
type Measured = (Vec<Result<Answer, Failure>>, Vec<Duration>, Duration);

fn fields(text: &str) -> Result<Value, String> {
    match serde_json::from_str(text) {
        Ok(fields @ Value::Object(_)) => Ok(fields),
        Ok(_) => Err("fields of a request are a JSON object".into()),
        Err(error) => Err(error.to_string()),
    }
}

struct Target {
    client: Client,
    args: LoadArgs,
}

impl Target {
    fn model(&self) -> &str {
        self.args.model.as_deref().unwrap_or_default()
    }

    fn workload(&self, seed: u64) -> Workload {
        let LoadArgs { prompt, input_len, output_len, prefix_len, vocab, .. } = self.args.clone();
        Workload { kind: prompt, input: input_len, output: output_len, prefix: prefix_len, vocab, seed }
    }

    /// Reports a refusal that would hit every request before the load starts.
    async fn probe(&self, seed: u64) -> anyhow::Result<()> {
        // Another seed, so that this request caches nothing of the measured prompts.
        let workload = Workload { output: Length(2..=2), ..self.workload(!seed) };
        for ask in workload.draw(1) {
            let due = Instant::now();
            if let Err(failure) = self.ask(&ask, due).await {
                bail!("the server does not take such requests ({}): {}", failure.kind, failure.message);
            }
        }
        Ok(())
    }

    /// Sends the request and waits for the end of the answer, at most until the deadline that follows from `due`.
    async fn ask(&self, ask: &Ask, due: Instant) -> Result<Answer, Failure> {
        let deadline = due + Duration::from_secs(self.args.timeout_s);
        let answered = timeout_at(deadline, self.stream(ask, due)).await;
        answered.unwrap_or_else(|_| {
            let message = format!("not answered within {} s", self.args.timeout_s);
            Err(Failure { kind: "timeout".into(), message })
        })
    }

    async fn stream(&self, ask: &Ask, due: Instant) -> Result<Answer, Failure> {
        let failure = |e: tidemill_deploy::client::ClientError| Failure { kind: e.kind(), message: e.to_string() };
        let path = if self.args.chat { "/chat/completions" } else { "/completions" };
        let mut stream = Box::pin(self.client.stream(path, &self.body(ask)).await.map_err(failure)?);
        let mut timeline = Timeline::default();
        let mut usage = None;
        while let Some(chunk) = stream.next().await {
            let chunk = chunk.map_err(failure)?;
            if chunk.is_token {
                timeline.token(due.elapsed());
            }
            usage = chunk.usage.or(usage);
        }
        let counts = usage.map(|usage| (usage.prompt_tokens, usage.cached_tokens(), usage.completion_tokens));
        let nothing = || Failure { kind: "empty".into(), message: "the answer has no token".into() };
        timeline.finish(counts).ok_or_else(nothing)
    }

    fn body(&self, ask: &Ask) -> Value {
        let mut body = json!({
            "model": self.model(),
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        match &ask.prompt {
            Prompt::Text(text) if self.args.chat => body["messages"] = json!([{"role": "user", "content": text}]),
            prompt => body["prompt"] = json!(prompt),
        }
        if let Some(tier) = &self.args.service_tier {
            body["service_tier"] = json!(tier);
        }
        if !self.args.allow_eos {
            body["ignore_eos"] = json!(true);
        }
        if let (Some(body), Some(Value::Object(fields))) = (body.as_object_mut(), &self.args.fields) {
            body.extend(fields.clone());
        }
        body
    }
}

async fn measure(target: &Arc<Target>, seed: u64, start: Instant, progress: &ProgressBar) -> anyhow::Result<Measured> {
    let args = &target.args;
    let requests = args.requests as usize;
    let permits = args.concurrency_max.map_or(Semaphore::MAX_PERMITS, |max| max as usize);
    let slots = Arc::new(Semaphore::new(permits.min(Semaphore::MAX_PERMITS)));
    let asks = target.workload(seed).draw(requests);
    let arrivals = arrivals::schedule(args.rate.unwrap_or(Rate::AllAtOnce), requests, seed);

    let mut tasks = JoinSet::new();
    for (ask, at) in asks.into_iter().zip(arrivals) {
        let (target, slots) = (target.clone(), slots.clone());
        let due = start.checked_add(at).context("the rate is so low that the last request is due in ages: fewer --requests?")?;
        tasks.spawn(async move {
            sleep_until(due).await;
            let lag = due.elapsed();
            let _slot = slots.acquire().await;
            (target.ask(&ask, due).await, lag)
        });
    }
    let mut outcomes = Vec::with_capacity(requests);
    let mut lags = Vec::with_capacity(requests);
    let mut failed = 0;
    while let Some(joined) = tasks.join_next().await {
        let (outcome, lag) = joined.context("a request's task broke")?;
        if outcome.is_err() {
            failed += 1;
            progress.set_message(format!("{failed} failed"));
        }
        progress.inc(1);
        outcomes.push(outcome);
        lags.push(lag);
    }
    Ok((outcomes, lags, start.elapsed()))
}

/// On stderr, and only where that is a terminal.
fn progress_bar(requests: u32) -> ProgressBar {
    let style = ProgressStyle::with_template("{elapsed} [{wide_bar}] {pos}/{len} answered {msg}").expect("the template is well-formed");
    ProgressBar::new(requests.into()).with_style(style)
}

/// Time to set all tasks up before the first request is due.
const LEAD: Duration = Duration::from_millis(50);
