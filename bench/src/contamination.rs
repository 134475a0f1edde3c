//! `tidemill-bench contamination`: tests whether a server's caches ever give one conversation content of another.
//!
//! - [`asks`]: the requests
//! - [`tally`]: the comparison of their answers
//!
//! ```text
//!   reference            every request once, with nothing cached
//!   pass 1, 2, …         all of them, shuffled
//!   --restart COMMAND    an operator's command, such as one that kills a pool node; then another pass
//! ```
//!
//! With memory for only a few of the conversations, each pass reads most of them from the other tiers.

pub mod asks;
pub mod tally;

use crate::record;
use anyhow::{Context, bail, ensure};
use asks::Ask;
use futures_util::{StreamExt, stream};
use rand::{SeedableRng, rngs::StdRng};
use serde::Serialize;
use serde_json::Value;
use std::{fs, path::PathBuf, process::Stdio, time::Duration};
use tally::{Got, Pass};
use tidemill_deploy::client::{Client, ClientError};
use tokio::{
    process::Command,
    time::{Instant, sleep, timeout},
};

/// Ask a server about secret words of many conversations, again and again, and compare every answer with the one without a cache.
///
/// Works with any server that speaks OpenAI's API. Give it memory for a few of the conversations, and a disk for all. The exit status says
/// whether every answer came, was the reference's to the byte, and held no other conversation's secret word.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct ContaminationArgs {
    /// The server's URL, up to and including /v1.
    #[arg(long)]
    pub url: String,
    /// File with an API key, if the server wants one.
    #[arg(long)]
    pub key_file: Option<PathBuf>,
    /// The model, if the server has several; the first by default.
    #[arg(long)]
    pub model: Option<String>,
    /// Conversations, each with a secret word of its own.
    #[arg(long, default_value_t = 40, value_parser = clap::value_parser!(u32).range(2..=100_000))]
    pub conversations: u32,
    /// Tokens of a conversation, about.
    #[arg(long, default_value_t = 4000, value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    pub tokens: u32,
    /// Short requests between them, in each pass.
    #[arg(long, default_value_t = 200, value_parser = clap::value_parser!(u32).range(0..=1_000_000))]
    pub short: u32,
    /// Tokens of an answer at most.
    #[arg(long, default_value_t = 24, value_parser = clap::value_parser!(u32).range(1..=100_000))]
    pub output_len: u32,
    /// Passes before the first restart.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub passes: u32,
    /// A shell command that restarts the server or a part of it. May be given several times: a pass follows each.
    #[arg(long, value_name = "COMMAND")]
    pub restart: Vec<String>,
    /// Seconds after a restart before its pass begins.
    #[arg(long, default_value_t = 2.0, value_parser = seconds)]
    pub settle_s: f64,
    /// A second server with the same model and no cache, which gives the answers to compare with.
    #[arg(long, value_name = "URL")]
    pub reference: Option<String>,
    /// JSON fields that keep a request of the reference out of a cache; `{unique}` becomes a different text in each.
    #[arg(long, default_value = r#"{"cache_salt": "{unique}"}"#, value_parser = reference_fields)]
    pub reference_fields: String,
    /// JSON fields added to every request, such as '{"ignore_eos": true}'
    #[arg(long, default_value = "{}", value_parser = fields)]
    pub fields: Value,
    /// Requests at a time.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=1024))]
    pub at_once: u32,
    /// A request fails after this many seconds; so does a server that does not come back after a restart, and a restart's command.
    #[arg(long, default_value_t = 600, value_parser = clap::value_parser!(u64).range(1..=86_400))]
    pub timeout_s: u64,
    /// Chooses words and orders. Drawn by default.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Write the result here too.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

fn seconds(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|value| (0.0..=86_400.0).contains(value)).ok_or_else(|| "must be seconds, from 0 to 86400".into())
}

fn fields(text: &str) -> Result<Value, String> {
    match serde_json::from_str(text) {
        Ok(fields @ Value::Object(_)) => Ok(fields),
        Ok(_) => Err("fields of a request are a JSON object".into()),
        Err(error) => Err(error.to_string()),
    }
}

fn reference_fields(text: &str) -> Result<String, String> {
    fields(&unique(text, "0")).map(|_| text.to_owned())
}

fn unique(fields: &str, name: &str) -> String {
    fields.replace("{unique}", name)
}

/// The result.
#[derive(Debug, Serialize)]
pub struct Report {
    settings: ContaminationArgs,
    pub reference: Pass,
    pub passes: Vec<Pass>,
    /// The reasons why the run shows less than it seems to.
    pub doubts: Vec<String>,
}

pub async fn run(args: ContaminationArgs) -> anyhow::Result<()> {
    let json = args.json.clone();
    let report = measure(args).await?;
    record::write(json.as_ref(), "contamination", &report)?;
    let bad: Vec<&str> =
        report.passes.iter().chain([&report.reference]).filter(|pass| !pass.is_clean()).map(|pass| pass.name.as_str()).collect();
    ensure!(bad.is_empty(), "not every answer was right: see {}", bad.join(", "));
    Ok(())
}

/// Runs all passes, and prints each when it ends.
pub async fn measure(mut args: ContaminationArgs) -> anyhow::Result<Report> {
    let seed = *args.seed.get_or_insert_with(|| rand::random::<u32>().into());
    let server = Server::new(&args.url, &args).await?;
    let clean = match &args.reference {
        Some(url) => Server::new(url, &args).await?,
        None => server.clone(),
    };
    let filler_words = clean.filler_words(args.tokens, seed).await?;
    let asks = asks::all(seed, args.conversations as usize, filler_words, args.short as usize, args.output_len);
    println!("{} conversations of about {} tokens, {} short requests, seed {seed}", args.conversations, args.tokens, args.short);

    let began = Instant::now();
    let answers = clean.ask_all(&asks, 0, Some(&args.reference_fields)).await;
    let of_reference = Pass::new("reference".into(), &asks, None, &answers, began.elapsed());
    println!("{of_reference}");
    let reference = in_order(&asks, answers)?;
    let mut passes = Vec::new();
    for n in 1..=args.passes {
        passes.push(server.pass(format!("pass {n}"), n as usize, &asks, &reference).await);
    }
    for command in &args.restart {
        server.restart(command, args.settle_s).await.with_context(|| format!("--restart '{command}'"))?;
        let n = passes.len() + 1;
        passes.push(server.pass(format!("pass {n}, after `{command}`"), n, &asks, &reference).await);
    }
    let doubts = tally::doubts(&asks, &reference, &of_reference, &passes);
    doubts.iter().for_each(|doubt| println!("warning: {doubt}"));
    Ok(Report { settings: args, reference: of_reference, passes, doubts })
}

/// The reference's answers by number. Fails if any is missing.
fn in_order(asks: &[Ask], answers: Vec<(usize, Result<Got, String>)>) -> anyhow::Result<Vec<Got>> {
    let mut reference = vec![Got::default(); asks.len()];
    for (n, answer) in answers {
        match answer {
            Ok(got) => reference[n] = got,
            Err(error) => bail!("there is nothing to compare with: {}: {error}", asks[n].name),
        }
    }
    Ok(reference)
}

/// One server, and the form of requests to it.
#[derive(Clone, Debug)]
struct Server {
    client: Client,
    model: String,
    fields: Value,
    at_once: usize,
    patience: Duration,
    seed: u64,
}

/// The length in words of the longer of two conversations that measure the tokens per word.
const PROBE_WORDS: usize = 256;
/// A word of the same length as any secret.
const PROBE_SECRET: &str = "babibobuda";
const READY_EVERY: Duration = Duration::from_millis(200);

impl Server {
    /// Connects to a server, and asks it for its models if none is named.
    async fn new(url: &str, args: &ContaminationArgs) -> anyhow::Result<Self> {
        let read = |path: &PathBuf| fs::read_to_string(path).with_context(|| format!("--key-file: cannot read {}", path.display()));
        let key = args.key_file.as_ref().map(read).transpose()?;
        let client = Client::new(url)?.with_key(key.as_deref())?;
        let model = match &args.model {
            Some(model) => model.clone(),
            None => {
                let models = client.models().await.context("no model is given with --model, and the server does not list any")?;
                models.into_iter().next().context("the server lists no model: give --model")?
            }
        };
        let (at_once, patience) = (args.at_once as usize, Duration::from_secs(args.timeout_s));
        Ok(Self { client, model, fields: args.fields.clone(), at_once, patience, seed: args.seed.unwrap_or_default() })
    }

    /// The number of filler words that make a conversation about `tokens` tokens long.
    async fn filler_words(&self, tokens: u32, seed: u64) -> anyhow::Result<usize> {
        let mut lengths = [0; 2];
        for (length, words) in lengths.iter_mut().zip([0, PROBE_WORDS]) {
            let messages = asks::conversation(PROBE_SECRET, words, &mut StdRng::seed_from_u64(seed));
            let ask = Ask { name: format!("probe {words}"), messages, secret: None, output_tokens: 1 };
            let got =
                self.ask(&ask, &Value::Null).await.map_err(|error| anyhow::anyhow!("the server does not take such requests: {error}"))?;
            *length = got.prompt_tokens;
        }
        let [least, more] = lengths;
        ensure!(more > least, "the server does not say how long prompts are (`usage` with `stream_options.include_usage`)");
        let filler = u64::from(tokens).checked_sub(least).with_context(|| format!("--tokens: a conversation has at least {least}"))?;
        Ok(filler as usize * PROBE_WORDS / (more - least) as usize)
    }

    async fn pass(&self, name: String, number: usize, asks: &[Ask], reference: &[Got]) -> Pass {
        let began = Instant::now();
        let answers = self.ask_all(asks, number, None).await;
        let pass = Pass::new(name, asks, Some(reference), &answers, began.elapsed());
        println!("{pass}");
        pass
    }

    /// Sends all requests in the order of this pass. Answers come with the numbers of their requests.
    async fn ask_all(&self, asks: &[Ask], pass: usize, reference_fields: Option<&str>) -> Vec<(usize, Result<Got, String>)> {
        let order = asks::shuffled(self.seed, pass, asks.len());
        let answers = stream::iter(order).map(|n| async move {
            let more = reference_fields.map(|fields| unique(fields, &format!("{:x}-{n}", self.seed)));
            let answer = match more.map_or(Ok(Value::Null), |fields| serde_json::from_str(&fields)) {
                Ok(more) => self.ask(&asks[n], &more).await,
                Err(error) => Err(format!("--reference-fields: {error}")),
            };
            (n, answer)
        });
        answers.buffer_unordered(self.at_once).collect().await
    }

    /// Requests one answer, with the fields of `more` added.
    async fn ask(&self, ask: &Ask, more: &Value) -> Result<Got, String> {
        let body = self.body(ask, more);
        match timeout(self.patience, self.answer(&body)).await {
            Ok(answer) => answer.map_err(|error| error.to_string()),
            Err(_) => Err(format!("not answered within {} s", self.patience.as_secs())),
        }
    }

    fn body(&self, ask: &Ask, more: &Value) -> Value {
        let mut body = serde_json::json!({
            "model": self.model,
            "messages": ask.messages,
            "max_tokens": ask.output_tokens,
            "temperature": 0,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        for fields in [&self.fields, more] {
            if let (Some(body), Value::Object(fields)) = (body.as_object_mut(), fields) {
                body.extend(fields.clone());
            }
        }
        body
    }

    async fn answer(&self, body: &Value) -> Result<Got, ClientError> {
        let mut events = Box::pin(self.client.stream("/chat/completions", body).await?);
        let mut got = Got::default();
        while let Some(chunk) = events.next().await {
            let chunk = chunk?;
            got.text += &chunk.text;
            got.finish_reason = chunk.finish_reason.or(got.finish_reason);
            if let Some(usage) = chunk.usage {
                (got.prompt_tokens, got.cached_tokens) = (usage.prompt_tokens, usage.cached_tokens());
            }
        }
        Ok(got)
    }

    /// Runs the operator's command, and waits until the server answers.
    async fn restart(&self, command: &str, settle_s: f64) -> anyhow::Result<()> {
        let mut shell = Command::new("sh");
        shell.args(["-c", command]).stdin(Stdio::null()).kill_on_drop(true);
        let status = timeout(self.patience, shell.status()).await.context("it did not end in --timeout-s")??;
        ensure!(status.success(), "it ended with {status}");
        sleep(Duration::from_secs_f64(settle_s)).await;
        let deadline = Instant::now() + self.patience;
        while let Err(error) = self.client.models().await {
            ensure!(Instant::now() < deadline, "the server did not come back: {error}");
            sleep(READY_EVERY).await;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
