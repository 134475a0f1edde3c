//! Makes a conversation's running summary: a model is asked in the name of the conversation's sender. [`crate::features::summarizer`]
//! decides which conversation is next.

use super::{Gateway, start::Start};
use crate::{
    base::stamp::unix_seconds,
    context::summary::{self, PARTS_MAX, Summaries, Summary, TOKENS_MAX},
    dialog::{
        Dialog, Message,
        thinking::{NO_EFFORT, ReasoningWish},
    },
    features::summarizer::{Key, Settings, SummaryRequest, Unmade},
    generation::piece::{FinishReason, Piece},
    requests::{
        error::ApiError,
        generate::GenerateRequest,
        items::{ItemContent, recall},
    },
    store::{self, Item, Part, StoreError},
};
use std::{
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::time;

/// The pause before the first retry of a request for which the cluster, or a quota, has no room; it doubles each time.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// An estimate of the tokens of a template's marks. A prompt that is too long is refused.
const SPARE: u64 = 16;
/// The least room for messages in a window that is used for summarizing.
const ROOM_MIN: u64 = 64;

impl Gateway {
    /// Requests a summary of the first `items` of the sender's conversation.
    pub fn request_summary(&self, conversation: &str, items: usize) {
        let wish = SummaryRequest { sender: self.sender(), model: self.model_name().to_owned(), items };
        self.shared.summarizer.wish((self.owner(), conversation.to_owned()), wish);
    }

    /// Whether summarizing this many items of the sender's conversation failed a short while ago.
    pub fn summary_has_failed(&self, conversation: &str, items: usize) -> bool {
        self.shared.summarizer.has_failed(&(self.owner(), conversation.to_owned()), items)
    }

    /// Background loop: makes summaries. Never returns.
    pub async fn run_summaries(self: Arc<Self>) {
        let gateway = &self;
        self.shared.summarizer.run(|settings, key, wish| make(Arc::clone(gateway), settings, key, wish)).await;
    }
}

async fn make(gateway: Arc<Gateway>, settings: Settings, (owner, id): Key, wish: SummaryRequest) -> Result<(), Unmade> {
    let caller = gateway.tenants().caller_of_batch(&wish.sender).map_err(Unmade::Failed)?;
    let gateway = gateway.for_caller(Arc::new(caller));
    let record = gateway.store().load(&owner, &id, Part::All).await?;
    let kept = Summaries::read(record.summary.as_deref());
    if kept.iter().any(|summary| summary.items == wish.items) {
        return Ok(());
    }
    let told = record.items.get(..wish.items).ok_or(Unmade::Gone)?;
    let last = told.last().ok_or(Unmade::Gone)?.id.clone();
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
    // Otherwise every prompt that contains it would be refused.
    if given_to.safety().is_some_and(|safety| !safety.accepts(&text, &[])) {
        return Err(Unmade::Failed("safety checks refuse it".into()));
    }
    // A different model's tokens are not those of the prompts that will contain it.
    let text = given_to.text().tokenizer.cut(&text, TOKENS_MAX.into());
    let tokens = given_to.text().tokenizer.count(&text) as u32;
    let summary = Summary { text, items: wish.items, tokens, model: maker.model_name().to_owned(), created_at: unix_seconds() };
    let summary = store::Summary { body: kept.with(summary).write(), items: wish.items, last };
    Ok(gateway.store().summarize(&owner, &id, summary).await?)
}

/// Writes the items as text, in parts that fit into the model's window beside everything else.
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

/// Writes an item as a line. Reasoning is not summarized, since later turns are not given it.
fn line(said: ItemContent) -> Option<String> {
    match said {
        ItemContent::Message { role, text } if role == "assistant" => Some(format!("Assistant: {text}\n")),
        ItemContent::Message { role, text } if role == "user" => Some(format!("User: {text}\n")),
        ItemContent::Message { text, .. } => Some(format!("Rule: {text}\n")),
        ItemContent::Call(call) => Some(format!("Assistant calls {} with {}\n", call.name, call.arguments)),
        ItemContent::Returned { text, .. } => Some(format!("It returns: {text}\n")),
        ItemContent::Thought(_) | ItemContent::Reference(_) | ItemContent::Nothing => None,
    }
}

fn dialog(before: Option<&str>, said: &str) -> Dialog {
    let message = |role: &str, content: String| Message { role: role.into(), content: Some(content), ..Message::default() };
    let request = format!("{}\n\n{}", summary::INSTRUCTIONS, summary::request(before, said));
    let reasoning = ReasoningWish { effort: Some(NO_EFFORT.into()), enable_thinking: Some(false), ..ReasoningWish::default() };
    Dialog { messages: vec![message("user", request)], reasoning, ..Dialog::default() }
}

/// Gets the answer to one prompt. Greedy, so that the same history has the same summary.
async fn asked(gateway: &Arc<Gateway>, before: Option<&str>, said: &str) -> Result<String, Unmade> {
    let mut rest = FIRST_RETRY;
    let mut answer = loop {
        let request =
            GenerateRequest { temperature: Some(0.0), max_tokens: Some(TOKENS_MAX), min_tokens: Some(1), ..GenerateRequest::default() };
        let options = gateway.options(Instant::now(), request)?;
        match gateway.start_dialog(dialog(before, said), options, Start::of("summary")).await {
            Ok(answer) => break answer,
            Err(error) if [429, 503].iter().any(|busy| error.status() == *busy) => {
                time::sleep(rest).await;
                rest *= 2;
            }
            Err(error) => return Err(error.into()),
        }
    };
    let mut piece = Piece::default();
    while let Some(delta) = answer.next_delta().await? {
        piece.append(delta.piece);
    }
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
