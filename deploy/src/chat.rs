//! `tidemill chat`: a conversation in the terminal or through pipes. Questions come from stdin, one per line; answers go to stdout as
//! they arrive, everything else to stderr.

mod input;
mod stats;

use crate::client::{Chunk, Client, ClientError, Usage};
use anyhow::{Context, bail};
use futures_util::StreamExt;
use input::Input;
use serde_json::{Value, json};
use stats::Stats;
use std::{
    fs,
    io::{self, IsTerminal, Write},
    path::PathBuf,
    time::{Duration, Instant},
};
use tokio::{
    signal::unix::{Signal, SignalKind, signal},
    time::timeout,
};

/// Talk with the model of a running cluster.
#[derive(Clone, Debug, clap::Args)]
pub struct ChatArgs {
    /// The server's URL, up to and including /v1.
    #[arg(long, default_value = "http://127.0.0.1:8000/v1")]
    pub url: String,
    /// Model, if the server has several [default: the first]
    #[arg(long)]
    pub model: Option<String>,
    /// Most tokens of one answer.
    #[arg(long, default_value_t = 512)]
    pub max_tokens: u32,
    /// Temperature; 0 always takes the likeliest token [default: the model's own]
    #[arg(long)]
    pub temperature: Option<f32>,
    /// System message before the conversation.
    #[arg(long)]
    pub system: Option<String>,
    /// File with an API key, if the server wants one
    #[arg(long, value_name = "FILE")]
    pub key_file: Option<PathBuf>,
}

/// Runs until `/quit`, the end of stdin, or Ctrl-C at the prompt. With piped input, it ends at the first error.
pub async fn chat(args: ChatArgs) -> anyhow::Result<()> {
    let key = args.key_file.as_ref().map(|path| fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display())));
    let client = Client::new(&args.url)?.with_key(key.transpose()?.as_deref())?;
    let models = client.models().await.map_err(|error| match error {
        ClientError::Unreachable { .. } => anyhow::anyhow!("{error}\nIs a cluster running? Start one with `make up`."),
        other => other.into(),
    })?;
    let model = match &args.model {
        Some(model) => model.clone(),
        None => models.first().context("the server lists no model")?.clone(),
    };
    let interactive = io::stdin().is_terminal();
    let mut input = if interactive { Input::terminal()? } else { Input::pipe()? };
    let mut interrupts = signal(SignalKind::interrupt())?;
    let (mut conversation, mut stats) = (Conversation::new(&args), Stats::default());
    if interactive {
        eprintln!("{model} at {}. {HELP}", client.base());
    }
    while let Some((question, next)) = input.question().await? {
        input = next;
        match question.trim() {
            "" => {}
            "/quit" => break,
            "/help" => eprintln!("{HELP}"),
            "/reset" => conversation = Conversation::new(&args),
            "/stats" => eprintln!("{}", dim(&stats.to_string())),
            question => {
                conversation.push("user", question);
                let request = conversation.request(&model, &args);
                match answer(&client, &request, &mut interrupts).await {
                    Ok(answer) => {
                        eprintln!("{}", dim(&answer.summary()));
                        stats.add(&answer);
                        conversation.push("assistant", &answer.text);
                    }
                    Err(error) if interactive => {
                        eprintln!("\n{error:#}");
                        conversation.0.pop();
                    }
                    Err(error) => bail!(error),
                }
            }
        }
    }
    if interactive {
        eprintln!();
    }
    Ok(())
}

/// The messages so far, in OpenAI's form.
struct Conversation(Vec<Value>);

impl Conversation {
    fn new(args: &ChatArgs) -> Conversation {
        let mut conversation = Conversation(Vec::new());
        if let Some(system) = &args.system {
            conversation.push("system", system);
        }
        conversation
    }

    fn push(&mut self, role: &str, content: &str) {
        self.0.push(json!({"role": role, "content": content}));
    }

    fn request(&self, model: &str, args: &ChatArgs) -> Value {
        let mut request = json!({
            "model": model,
            "messages": self.0,
            "max_tokens": args.max_tokens,
            "stream": true,
            "stream_options": {"include_usage": true},
        });
        if let Some(temperature) = args.temperature {
            request["temperature"] = json!(temperature);
        }
        request
    }
}

/// One answer, complete or stopped, and its timings.
#[derive(Default)]
struct Answer {
    text: String,
    /// The number of tokens counted in the stream; `usage`, if present, is exact.
    tokens: u64,
    ttft: Duration,
    elapsed: Duration,
    finish_reason: Option<String>,
    usage: Option<Usage>,
}

/// Sends the request and prints the answer while it arrives. Ctrl-C drops the stream and keeps the text so far.
async fn answer(client: &Client, request: &Value, interrupts: &mut Signal) -> anyhow::Result<Answer> {
    let asked = Instant::now();
    let mut answer = Answer::default();
    let receive = async |answer: &mut Answer| -> anyhow::Result<()> {
        let stalled = || format!("nothing came from the server for {} s", STALL.as_secs());
        let mut stream = Box::pin(timeout(STALL, client.stream("/chat/completions", request)).await.with_context(stalled)??);
        while let Some(chunk) = timeout(STALL, stream.next()).await.with_context(stalled)? {
            answer.add(chunk?, asked.elapsed())?;
        }
        Ok(())
    };
    tokio::select! {
        received = receive(&mut answer) => received?,
        _ = interrupts.recv() => answer.finish_reason = Some("stopped".into()),
    }
    println!();
    Ok(answer)
}

impl Answer {
    fn add(&mut self, chunk: Chunk, elapsed: Duration) -> io::Result<()> {
        if chunk.is_token {
            if self.tokens == 0 {
                self.ttft = elapsed;
            }
            self.tokens += 1;
            self.elapsed = elapsed;
        }
        if !chunk.text.is_empty() {
            let mut stdout = io::stdout();
            stdout.write_all(chunk.text.as_bytes())?;
            stdout.flush()?;
            self.text.push_str(&chunk.text);
        }
        self.finish_reason = chunk.finish_reason.or(self.finish_reason.take());
        self.usage = chunk.usage.or(self.usage.take());
        Ok(())
    }

    fn tokens(&self) -> u64 {
        self.usage.as_ref().map_or(self.tokens, |usage| usage.completion_tokens)
    }

    /// The time from the first token to the last.
    fn decoding(&self) -> Duration {
        self.elapsed.saturating_sub(self.ttft)
    }

    /// `24 tokens · first after 31 ms · 52.1 tokens/s · 32 of 57 prompt tokens cached · dram 32, computed 25`
    fn summary(&self) -> String {
        let tokens = self.tokens();
        let mut parts = vec![format!("{tokens} tokens")];
        if self.tokens > 0 {
            parts.push(format!("first after {:.0} ms", self.ttft.as_secs_f64() * 1e3));
        }
        let decoding = self.decoding();
        if tokens > 1 && !decoding.is_zero() {
            parts.push(format!("{:.1} tokens/s", (tokens - 1) as f64 / decoding.as_secs_f64()));
        }
        if let Some(usage) = &self.usage {
            parts.push(format!("{} of {} prompt tokens cached", usage.cached_tokens(), usage.prompt_tokens));
            let sources = usage.tidemill.iter().flat_map(|provenance| &provenance.tokens).filter(|(_, tokens)| **tokens > 0);
            let sources: Vec<String> = sources.map(|(source, tokens)| format!("{source} {tokens}")).collect();
            if !sources.is_empty() {
                parts.push(sources.join(", "));
            }
        }
        if let Some(reason) = self.finish_reason.as_deref().filter(|reason| *reason != "stop") {
            parts.push(format!("ended by {reason}"));
        }
        parts.join(" · ")
    }
}

fn dim(text: &str) -> String {
    if io::stderr().is_terminal() { format!("\x1b[2m{text}\x1b[0m") } else { text.to_owned() }
}

const HELP: &str = "/reset starts over, /stats sums up, /quit ends, Ctrl-C stops an answer; a line that ends in \\ goes on.";

/// The longest pause that a server may make within an answer.
const STALL: Duration = Duration::from_secs(300);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::client::{PromptTokensDetails, Provenance};

    fn token(text: &str) -> Chunk {
        Chunk { text: text.into(), is_token: true, ..Chunk::default() }
    }

    #[test]
    fn the_summary_says_what_an_answer_took() {
        let mut answer = Answer::default();
        answer.add(token(""), Duration::from_millis(40)).unwrap();
        answer.add(token(""), Duration::from_millis(140)).unwrap();
        assert_eq!(answer.summary(), "2 tokens · first after 40 ms · 10.0 tokens/s");
        let usage = Usage {
            prompt_tokens: 57,
            completion_tokens: 3,
            prompt_tokens_details: Some(PromptTokensDetails { cached_tokens: Some(32) }),
            tidemill: Some(Provenance { tokens: [("dram".into(), 32), ("computed".into(), 25), ("nvme".into(), 0)].into() }),
        };
        answer.add(Chunk { usage: Some(usage), finish_reason: Some("length".into()), ..Chunk::default() }, Duration::from_secs(1)).unwrap();
        assert_eq!(
            answer.summary(),
            "3 tokens · first after 40 ms · 20.0 tokens/s · 32 of 57 prompt tokens cached · computed 25, dram 32 · ended by length"
        );
    }
}
