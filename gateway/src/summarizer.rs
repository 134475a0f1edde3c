//! Makes running summaries of long conversations, in the background: nobody waits for one. Each is asked of a model as its conversation's
//! sender would ask, in the lowest class: it takes that tenant's quota, is in its usage, keeps to its salt, and goes through the same safety
//! stages as any text. What was made is kept with the conversation; what a crash or a full queue lost is wished for again by the next turn.

use crate::{
    batch::life::Sender,
    context::{
        summary::{self, PARTS_MAX, Summaries, Summary, TOKENS_MAX},
        summing::Summing,
    },
    dialog::{Dialog, Message, ReasoningWish},
    error::ApiError,
    gateway::Gateway,
    generation::FinishReason,
    items::{Said, recall},
    metrics,
    request::GenerateRequest,
    rounds::rounded::Rounded,
    stamp::unix_seconds,
    store::{self, Item, Owner, Part, StoreError},
};
use futures_util::FutureExt;
use std::{
    panic::AssertUnwindSafe,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};
use tokio::{sync::Notify, task::JoinSet, time};

/// Between attempts at what the cluster, or a quota, has no room for: twice as long each time.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// For an estimate of a template's marks, which need not be exact: what is too long is refused.
const SPARE: u64 = 16;
/// A window with less room for what was said is too small to summarize in.
const ROOM_MIN: u64 = 64;

#[derive(Clone, Debug)]
pub struct Settings {
    /// `None`: each conversation's own.
    pub model: Option<String>,
    /// One that takes longer has failed.
    pub deadline: Duration,
    /// Conversations that may wait. Of more, the next turn wishes again.
    pub waiting_max: usize,
    pub at_once: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self { model: None, deadline: Duration::from_secs(120), waiting_max: 256, at_once: 2 }
    }
}

#[derive(Debug)]
pub struct Summarizer {
    settings: Settings,
    began: Instant,
    summing: Mutex<Summing<Key, Wish>>,
    come: Notify,
}

/// A conversation.
type Key = (Owner, String);

#[derive(Debug)]
struct Wish {
    /// In whose name.
    sender: Sender,
    /// That the conversation is had with.
    model: String,
    /// So many of its first items.
    items: usize,
}

/// Why there is no summary.
#[derive(Debug)]
enum Unmade {
    /// Nobody needs it any more: the conversation was deleted, or changed.
    Gone,
    Failed(String),
}

impl Summarizer {
    pub fn new(settings: Settings) -> Self {
        let summing = Mutex::new(Summing::new(settings.waiting_max));
        Self { settings, began: Instant::now(), summing, come: Notify::new() }
    }

    /// Somebody's conversation is to be summarized, unless that has just failed. `gateway`: turned to its sender and model.
    pub fn wish(&self, gateway: &Gateway, conversation: &str, items: usize) {
        let key = (gateway.owner(), conversation.to_owned());
        let mut summing = self.summing();
        if summing.has_failed(self.began.elapsed(), &key, items) {
            return;
        }
        let wish = Wish { sender: gateway.sender(), model: gateway.model_name().to_owned(), items };
        if summing.push(key, wish) {
            self.come.notify_one();
        } else {
            metrics::count_summary("dropped");
        }
    }

    /// Whether summarizing so many items of a conversation of the gateway's owner has failed, a short while ago.
    pub fn has_failed(&self, gateway: &Gateway, conversation: &str, items: usize) -> bool {
        self.summing().has_failed(self.began.elapsed(), &(gateway.owner(), conversation.to_owned()), items)
    }

    /// For ever.
    pub async fn run(&self, gateway: &Arc<Gateway>) {
        let mut running = JoinSet::new();
        loop {
            while running.len() < self.settings.at_once
                && let Some((key, wish)) = self.take()
            {
                let (gateway, settings) = (Arc::clone(gateway), self.settings.clone());
                running.spawn(async move {
                    let made =
                        AssertUnwindSafe(time::timeout(settings.deadline, make(&gateway, &settings, &key, &wish))).catch_unwind().await;
                    let made = match made {
                        Ok(Ok(made)) => made,
                        Ok(Err(_)) => Err(Unmade::Failed(format!("it took longer than {:?}", settings.deadline))),
                        Err(_) => Err(Unmade::Failed("it panicked: please report this as a bug".into())),
                    };
                    (key, wish.items, made)
                });
            }
            metrics::show_summaries_waiting(self.summing().waiting());
            tokio::select! {
                () = self.come.notified() => {}
                Some(ended) = running.join_next() => {
                    let (key, items, made) = ended.expect("a panic was caught");
                    self.ended(&key, items, made);
                }
            }
        }
    }

    fn ended(&self, key: &Key, items: usize, made: Result<(), Unmade>) {
        let failed = match made {
            Ok(()) => {
                metrics::count_summary("made");
                None
            }
            Err(Unmade::Gone) => {
                metrics::count_summary("gone");
                None
            }
            Err(Unmade::Failed(reason)) => {
                tracing::warn!(conversation = key.1, reason, "a conversation was not summarized: it goes on without");
                metrics::count_summary("failed");
                Some(items)
            }
        };
        self.summing().ended(self.began.elapsed(), key, failed);
    }

    fn take(&self) -> Option<(Key, Wish)> {
        self.summing().take()
    }

    /// Nothing that holds the lock panics.
    fn summing(&self) -> MutexGuard<'_, Summing<Key, Wish>> {
        self.summing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn make(gateway: &Arc<Gateway>, settings: &Settings, (owner, id): &Key, wish: &Wish) -> Result<(), Unmade> {
    let record = gateway.store().load(owner, id, Part::All).await?;
    let kept = Summaries::read(record.summary.as_deref());
    if kept.iter().any(|summary| summary.items == wish.items) {
        return Ok(());
    }
    let told = record.items.get(..wish.items).ok_or(Unmade::Gone)?;
    let last = told.last().ok_or(Unmade::Gone)?.id.clone();
    let caller = gateway.tenants().caller_of_batch(&wish.sender).map_err(Unmade::Failed)?;
    let gateway = gateway.for_caller(Arc::new(caller));
    let given_to = gateway.select(Some(&wish.model))?;
    let maker = gateway.select(Some(settings.model.as_deref().unwrap_or(&wish.model)))?;
    let before = kept.clone().within(wish.items).newest().cloned();
    let new = told[before.as_ref().map_or(0, |before| before.items)..].to_vec();
    let worker = Arc::clone(&maker);
    let parts = maker.compute(move || Ok(parts(&worker, &new))).await??;
    if parts.len() > PARTS_MAX {
        return Err(Unmade::Failed(format!("there is too much to summarize at once: {} prompts", parts.len())));
    }
    let mut text = before.map(|before| before.text);
    for part in parts {
        text = Some(asked(&maker, text.as_deref(), &part).await?);
    }
    let Some(text) = text.filter(|text| !text.is_empty()) else {
        return Err(Unmade::Failed("the model had nothing to say".into()));
    };
    // Or every prompt that it is put into would be refused.
    if given_to.safety().is_some_and(|safety| !safety.accepts(&text, &[])) {
        return Err(Unmade::Failed("safety checks refuse it".into()));
    }
    // Another model's tokens are not those of the prompts that it is put into.
    let text = given_to.text().tokenizer.cut(&text, TOKENS_MAX.into());
    let tokens = given_to.text().tokenizer.count(&text) as u32;
    let summary = Summary { text, items: wish.items, tokens, model: maker.model_name().to_owned(), created_at: unix_seconds() };
    let summary = store::Summary { body: kept.with(summary).write(), items: wish.items, last };
    Ok(gateway.store().summarize(owner, id, summary).await?)
}

/// What was said, in parts that fit into the model's window beside everything else.
fn parts(gateway: &Gateway, items: &[Item]) -> Result<Vec<String>, Unmade> {
    let tokenizer = &gateway.text().tokenizer;
    let frame = gateway.prompt_only("summary", &dialog(Some("a"), ""))?.len() as u64;
    let room = u64::from(gateway.context_tokens()?).saturating_sub(frame + 2 * u64::from(TOKENS_MAX) + SPARE);
    if room < ROOM_MIN {
        return Err(Unmade::Failed("the model's window is too small to summarize in".into()));
    }
    let lines = items.iter().map(|item| Ok(line(recall(item)?.1))).collect::<Result<Vec<_>, ApiError>>()?;
    Ok(summary::parts(lines.into_iter().flatten().collect(), room, |text| tokenizer.count(text), |text, most| tokenizer.cut(text, most)))
}

/// Thoughts are not summarized: no later turn is given them.
fn line(said: Said) -> Option<String> {
    match said {
        Said::Message { role, text } if role == "assistant" => Some(format!("Assistant: {text}\n")),
        Said::Message { role, text } if role == "user" => Some(format!("User: {text}\n")),
        Said::Message { text, .. } => Some(format!("Rule: {text}\n")),
        Said::Call(call) => Some(format!("Assistant calls {} with {}\n", call.name, call.arguments)),
        Said::Returned { text, .. } => Some(format!("It returns: {text}\n")),
        Said::Thought(_) | Said::Reference(_) | Said::Nothing => None,
    }
}

fn dialog(before: Option<&str>, said: &str) -> Dialog {
    let message = |role: &str, content: String| Message { role: role.into(), content: Some(content), ..Message::default() };
    let request = format!("{}\n\n{}", summary::INSTRUCTIONS, summary::request(before, said));
    let reasoning = ReasoningWish { effort: Some("none".into()), enable_thinking: Some(false) };
    Dialog { messages: vec![message("user", request)], reasoning, ..Dialog::default() }
}

/// One prompt's answer. Greedy: the same history has the same summary.
async fn asked(gateway: &Arc<Gateway>, before: Option<&str>, said: &str) -> Result<String, Unmade> {
    let mut rest = FIRST_RETRY;
    let answer = loop {
        let request =
            GenerateRequest { temperature: Some(0.0), max_tokens: Some(TOKENS_MAX), min_tokens: Some(1), ..GenerateRequest::default() };
        let options = gateway.options(Instant::now(), request)?;
        match gateway.start_dialog("summary", dialog(before, said), options).await {
            Ok(running) => break running.answer,
            Err(error) if [429, 503].iter().any(|busy| error.status() == *busy) => {
                time::sleep(rest).await;
                rest *= 2;
            }
            Err(error) => return Err(error.into()),
        }
    };
    let choices = Rounded::new(gateway, answer, None).whole().await?;
    let piece = choices.into_iter().next().map(|choice| choice.piece).unwrap_or_default();
    if piece.finish.is_some_and(|finish| finish.reason == FinishReason::ContentFilter) {
        return Err(Unmade::Failed("safety checks ended it".into()));
    }
    Ok(piece.text.trim().to_owned())
}

impl From<ApiError> for Unmade {
    fn from(error: ApiError) -> Self {
        Self::Failed(error.message().to_owned())
    }
}

impl From<StoreError> for Unmade {
    fn from(error: StoreError) -> Self {
        match error {
            StoreError::NotFound(_) | StoreError::Changed(_) => Self::Gone,
            error => Self::Failed(error.to_string()),
        }
    }
}
