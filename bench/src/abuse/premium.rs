//! The premium tenant: short chats at a steady rate, each streamed. Its times to the first token count from the time at which a chat was
//! due.

use crate::load::percentiles::Percentiles;
use futures_util::{FutureExt, StreamExt, stream::FuturesUnordered};
use serde_json::json;
use std::{
    collections::BTreeMap,
    pin::pin,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};
use tidemill_deploy::client::{Client, ClientError};
use tokio::time::{Instant, MissedTickBehavior, interval, sleep, timeout};

/// The time within which a chat must be answered, or fails.
const PATIENCE: Duration = Duration::from_secs(30);
const ANSWER_TOKENS: u32 = 8;

pub struct Premium {
    client: Client,
    model: String,
    every: Duration,
    /// The number of chats so far: each asks a different question.
    asked: AtomicU64,
}

/// The outcome of some chats.
#[derive(Debug, Default)]
pub struct Chats {
    /// The times to the first token.
    pub answered: Vec<Duration>,
    /// The failed chats by kind, with the last one's text.
    pub failed: BTreeMap<String, (u64, String)>,
}

impl Chats {
    pub fn percentiles(&self) -> Option<Percentiles> {
        Percentiles::of(self.answered.iter().copied())
    }

    pub fn add_all(&mut self, more: Chats) {
        self.answered.extend(more.answered);
        for (kind, (count, text)) in more.failed {
            let failed = self.failed.entry(kind).or_default();
            *failed = (failed.0 + count, text);
        }
    }

    fn add(&mut self, result: Result<Duration, (String, String)>) {
        match result {
            Ok(ttft) => self.answered.push(ttft),
            Err((kind, text)) => {
                let failed = self.failed.entry(kind).or_default();
                *failed = (failed.0 + 1, text);
            }
        }
    }
}

impl Premium {
    pub fn new(url: &str, model: &str, key: &str, rate: f64) -> anyhow::Result<Self> {
        let client = Client::new(&format!("{url}/v1"))?.with_key(Some(key))?;
        Ok(Self { client, model: model.to_owned(), every: Duration::from_secs_f64(1.0 / rate), asked: AtomicU64::new(0) })
    }

    pub async fn chat_for(&self, time: Duration) -> anyhow::Result<Chats> {
        Ok(self.chat_while(sleep(time)).await?.0)
    }

    /// Chats until `other` ends, and waits for the answers.
    pub async fn chat_while<T>(&self, other: impl Future<Output = T>) -> anyhow::Result<(Chats, T)> {
        let (mut chats, mut running) = (Chats::default(), FuturesUnordered::new());
        let mut due = interval(self.every);
        due.set_missed_tick_behavior(MissedTickBehavior::Burst);
        let mut other = pin!(other.fuse());
        let ended = loop {
            tokio::select! {
                biased;
                ended = &mut other => break ended,
                Some(result) = running.next() => chats.add(result),
                at = due.tick() => running.push(self.chat(at)),
            }
        };
        while let Some(result) = running.next().await {
            chats.add(result);
        }
        anyhow::ensure!(!chats.answered.is_empty() || !chats.failed.is_empty(), "no chat was due: raise --rate or --seconds");
        Ok((chats, ended))
    }

    async fn chat(&self, due: Instant) -> Result<Duration, (String, String)> {
        let n = self.asked.fetch_add(1, Ordering::Relaxed);
        let body = json!({
            "model": self.model, "stream": true, "max_tokens": ANSWER_TOKENS, "ignore_eos": true, "service_tier": "priority",
            "messages": [{"role": "user", "content": format!("{n}: what does wheel {} of the mill turn?", n * 7 % 101)}],
        });
        let answer = async {
            let mut chunks = Box::pin(self.client.stream("/chat/completions", &body).await?);
            let mut first = None;
            while let Some(chunk) = chunks.next().await {
                if chunk?.is_token {
                    first.get_or_insert_with(|| due.elapsed());
                }
            }
            first.ok_or_else(|| ClientError::Broken("no token came".into()))
        };
        match timeout(PATIENCE, answer).await {
            Ok(answered) => answered.map_err(|error| (error.kind(), error.to_string())),
            Err(_) => Err(("hung".into(), format!("not answered within {PATIENCE:?}"))),
        }
    }
}
