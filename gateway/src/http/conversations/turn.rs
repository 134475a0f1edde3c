//! A chat's turn in a stored conversation: the history before it, and the items that are added when its answer has ended. Its messages and
//! its answer are added together, before the answer's last part is sent: an answer that a client has in full is stored, and one that broke
//! off leaves no items.
//!
//! If the store does not answer, a chat is answered from the messages that were sent, and the answer reports it.

use super::{
    super::{
        context::{Cost, History, OldMessage},
        responses::output::Output,
    },
    no_item, place_of,
    record::{Changes, Conversation},
};
use crate::{
    base::stamp::{new_id, unix_seconds},
    context::summary::{Answered, Outlook, Summaries},
    dialog::{Dialog, Message},
    generation::piece::FinishReason,
    metrics::usage::Usage,
    requests::{
        error::ApiError,
        items::{self, ItemContent, Sent, recall},
    },
    serving::{answer::Delta, gateway::Gateway},
    store::{Addition, Cut, Item, Kind, NewRecord, Part, Record, Rewrite, StoreError, access::Loaded},
    text::tokenizer::Tokenizer,
};
use serde::Deserialize;
use serde_json::{Value, json};

/// Stands in place of an id for a conversation that does not exist yet.
const NEW: &str = "new";

/// `conversation` in a chat's body.
#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a conversation's id, `new`, or an object")]
pub enum ConversationField {
    Id(String),
    TurnOptions(Box<TurnOptions>),
}

/// The effect of a turn on its conversation.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct TurnOptions {
    /// The conversation's id; `None` for a new conversation.
    id: Option<String>,
    /// The first of the items that are removed when the new answer has ended.
    replace: Option<String>,
    /// Whether the last answer is removed.
    regenerate: bool,
    #[serde(flatten)]
    changes: Changes,
}

/// The conversation that a chat continues, as it was loaded.
#[derive(Debug)]
pub enum Before {
    New(Conversation),
    Stored {
        record: Loaded<Record>,
        conversation: Conversation,
        /// The number of items of its history from which the turn continues.
        kept: usize,
    },
    /// The failure of the store.
    Lost(StoreError),
}

/// A turn that is being answered.
#[derive(Debug)]
pub struct Turn {
    /// The gateway, bound to the answering model and to the conversation's owner.
    gateway: Gateway,
    fate: Fate,
    input: Vec<Item>,
    output: Output,
    /// The state from which summaries are requested, if any are made.
    outlook: Option<Outlook>,
}

/// The state of a turn: to be stored, stored, or not stored.
#[derive(Debug)]
enum Fate {
    Begins(Conversation),
    GoesOn {
        conversation: Conversation,
        /// The conversation's body, as it was loaded.
        body: String,
        cut: Option<Cut>,
    },
    Stored {
        id: String,
    },
    NotStored {
        reason: String,
    },
}

/// Loads the conversation that a chat's body names. One that will not be `shortened` is refused before that if it fits no model.
pub async fn before(gateway: &Gateway, named: ConversationField, shortened: bool) -> Result<Before, ApiError> {
    let wish = match named {
        ConversationField::Id(id) if id == NEW => TurnOptions::default(),
        ConversationField::Id(id) => TurnOptions { id: Some(id), ..TurnOptions::default() },
        ConversationField::TurnOptions(wish) => *wish,
    };
    let Some(id) = &wish.id else {
        if wish.regenerate || wish.replace.is_some() {
            return Err(ApiError::invalid(
                "conversation.id",
                "`conversation.id` is missing: only a stored conversation's turns can be replaced",
            ));
        }
        let mut conversation = Conversation::new(unix_seconds());
        conversation.change(gateway, wish.changes)?;
        return Ok(Before::New(conversation));
    };
    if !id.starts_with("conv_") {
        return Err(ApiError::not_found("conversation", format!("`{id}` is not a conversation's id")));
    }
    let is_cut = shortened || wish.replace.is_some() || wish.regenerate;
    let tokens_max = if is_cut { u64::MAX } else { gateway.largest_context() };
    let record = match gateway.store().load_for(&gateway.owner(), id, Part::All, tokens_max).await {
        Ok(record) => record,
        Err(error @ (StoreError::Failed(_) | StoreError::Busy)) => {
            tracing::warn!(%error, "could not load a conversation; answering the chat without it");
            return Ok(Before::Lost(error));
        }
        Err(error) => return Err(ApiError::of_store("conversation", error)),
    };
    let worker = gateway.clone();
    let found = gateway.compute_body(record.body.len(), move || {
        let kept = kept(&record, &wish)?;
        let mut conversation = Conversation::read(&record)?;
        conversation.change(&worker, wish.changes)?;
        Ok(Before::Stored { record, conversation, kept })
    });
    found.await
}

fn kept(record: &Record, wish: &TurnOptions) -> Result<usize, ApiError> {
    match (&wish.replace, wish.regenerate) {
        (Some(_), true) => Err(ApiError::invalid("conversation.replace", "`replace` and `regenerate` exclude each other")),
        (Some(item), false) => place_of(record, item).ok_or_else(|| no_item("conversation.replace", &record.id, item)),
        (None, false) => Ok(record.items.len()),
        (None, true) => {
            // An answer consists of all items after the last one that was input for the model.
            let answers = |item: &Item| {
                recall(item).is_ok_and(|(_, said)| match said {
                    ItemContent::Message { role, .. } => role == "assistant",
                    ItemContent::Thought(_) | ItemContent::Call(_) => true,
                    ItemContent::Returned { .. } | ItemContent::Reference(_) | ItemContent::Nothing => false,
                })
            };
            let kept = record.items.iter().rposition(|item| !answers(item)).map_or(0, |last| last + 1);
            if kept < record.items.len() {
                return Ok(kept);
            }
            Err(ApiError::invalid(
                "conversation.regenerate",
                format!("`{}` does not end with an answer: there is none to replace", record.id),
            ))
        }
    }
}

impl Before {
    /// The model that answered last, for a request without a model.
    pub fn model(&self) -> Option<&str> {
        match self {
            Self::New(conversation) | Self::Stored { conversation, .. } => conversation.model(),
            Self::Lost(_) => None,
        }
    }

    /// Counts the bytes of the history's items.
    pub fn bytes(&self) -> usize {
        if let Self::Stored { record, .. } = self { record.items.iter().map(|item| item.body.len()).sum() } else { 0 }
    }

    /// Returns the dialog with the conversation's history, this turn, and the history's costs. `dialog` has the messages that were sent.
    /// `looks_up` tells whether old messages may be retrieved.
    pub fn enter(self, gateway: &Gateway, mut dialog: Dialog, looks_up: bool) -> Result<(Dialog, Turn, Option<History>), ApiError> {
        let mut summaries = Summaries::default();
        let (mut conversation, recalled, found) = match self {
            Self::New(conversation) => (conversation, Vec::new(), None),
            Self::Stored { record, conversation, kept } => {
                // Its share ends with the work on it.
                let (mut record, _share) = record.into_parts();
                let cut = (kept < record.items.len()).then_some(Cut { keep: kept, of: record.items.len() });
                record.items.truncate(kept);
                summaries = Summaries::read(record.summary.as_deref()).within(kept);
                (conversation, record.items, Some((record.body, cut)))
            }
            Self::Lost(error) if dialog.messages.is_empty() => return Err(ApiError::of_store("conversation", error)),
            Self::Lost(error) => return Ok((dialog, Turn::new(gateway, Fate::NotStored { reason: error.to_string() }, Vec::new()), None)),
        };
        let instructs = dialog.messages.first().is_some_and(|first| matches!(first.role.as_str(), "system" | "developer"));
        if let Some(instructions) = instructs.then(|| dialog.messages.remove(0)).and_then(|first| first.content) {
            conversation.instruct(instructions);
        }
        conversation.answered_by(gateway.model_name());
        let sent = dialog.messages.into_iter().flat_map(bodies).enumerate();
        let sent = sent.map(|(place, body)| items::understand(&format!("messages[{place}]"), body)).collect::<Result<Vec<_>, _>>()?;
        let tokenizer = &gateway.text().tokenizer;
        let item = |sent: &Sent| Item { tokens: sent.said.tokens(tokenizer), ..sent.named(new_id(sent.prefix())) };
        let input: Vec<_> = sent.iter().map(item).collect();
        conversation.take_title(if recalled.is_empty() { &input } else { &recalled });

        let mut said = recalled.iter().map(|item| recall(item).map(|(_, said)| said)).collect::<Result<Vec<_>, _>>()?;
        said.extend(sent.into_iter().map(|sent| sent.said));
        let answerable = |last: &ItemContent| match last {
            ItemContent::Message { role, .. } => role != "assistant",
            last => matches!(last, ItemContent::Returned { .. }),
        };
        if !said.last().is_some_and(answerable) {
            let message = "a turn ends with what a user says or a call returned, and then the model answers: put it into `messages`";
            return Err(ApiError::invalid("messages", message));
        }
        let (costs, messages) = turns(recalled.iter().chain(&input).zip(&said), tokenizer, looks_up);
        let conversation_id = found.as_ref().map(|_| conversation.id().to_owned());
        let history = History { conversation: conversation_id, costs, summaries, messages };
        let system =
            conversation.instructions().map(|text| Message { role: "system".into(), content: Some(text.to_owned()), ..Message::default() });
        let messages = system.into_iter().chain(items::turns(said)).collect();
        let fate = match found {
            Some((body, cut)) => Fate::GoesOn { conversation, body, cut },
            None => Fate::Begins(conversation),
        };
        Ok((Dialog { messages, ..dialog }, Turn::new(gateway, fate, input), Some(history)))
    }
}

impl Turn {
    fn new(gateway: &Gateway, fate: Fate, input: Vec<Item>) -> Self {
        Self { gateway: gateway.clone(), fate, input, output: Output::default(), outlook: None }
    }

    /// Sets `outlook`, by which the turns that the next step leaves out are summarized once this one is stored.
    pub fn look_ahead(&mut self, outlook: Option<Outlook>) {
        self.outlook = outlook;
    }

    /// Takes the answer's next part. The turn is stored with the last one.
    pub async fn hear(&mut self, delta: &Delta, usage: &Usage) {
        self.output.push(&delta.piece);
        self.output.events();
        if let Some(finish) = &delta.piece.finish {
            let whole = matches!(finish.reason, FinishReason::Stop | FinishReason::ToolCalls);
            self.output.finish(if whole { "completed" } else { "incomplete" });
            self.store(usage).await;
        }
    }

    async fn store(&mut self, usage: &Usage) {
        let (store, owner, now) = (self.gateway.store(), self.gateway.owner(), unix_seconds());
        let mut items = std::mem::take(&mut self.input);
        let answer = self.output.counted(usage);
        let answered = answer.iter().map(|item| Answered { tokens: item.tokens.into(), is_thought: item.id.starts_with("rs_") }).collect();
        items.extend(answer);
        let (id, stored) = match &self.fate {
            Fate::Begins(conversation) => {
                let (id, body) = (conversation.id().to_owned(), conversation.body());
                let record = NewRecord { id: id.clone(), kind: Kind::Conversation, body, items, ..NewRecord::default() };
                (id, store.put(&owner, record, now).await)
            }
            Fate::GoesOn { conversation, body, cut } => {
                let to = conversation.body();
                let body = (to != *body).then(|| Rewrite { from: body.clone(), to });
                (conversation.id().to_owned(), store.append(&owner, conversation.id(), Addition { cut: *cut, items, body }, now).await)
            }
            Fate::Stored { .. } | Fate::NotStored { .. } => return,
        };
        self.fate = match stored {
            Ok(()) => {
                self.wish_for_a_summary(&id, answered);
                Fate::Stored { id }
            }
            Err(error) => {
                tracing::warn!(%error, conversation = id, "could not store a turn");
                Fate::NotStored { reason: error.to_string() }
            }
        };
    }

    fn wish_for_a_summary(&mut self, id: &str, answered: Vec<Answered>) {
        if let Some(items) = self.outlook.take().and_then(|outlook| outlook.ended(&answered)) {
            self.gateway.request_summary(id, items);
        }
    }

    /// The reason why the turn will not be stored.
    pub fn not_stored(&self) -> Option<&str> {
        if let Fate::NotStored { reason } = &self.fate { Some(reason) } else { None }
    }

    /// Describes the turn's state to the client, at the end.
    pub fn told(&self) -> Value {
        match &self.fate {
            Fate::Stored { id } => json!({"id": id, "stored": true}),
            Fate::NotStored { reason } => json!({"id": null, "stored": false, "reason": reason}),
            Fate::Begins(_) | Fate::GoesOn { .. } => json!({"id": null, "stored": false, "reason": "the answer has not ended"}),
        }
    }
}

/// Counts the cost of each turn, and collects the messages if they may be retrieved. Reasoning of past turns is not shown to the model
/// again.
fn turns<'a>(
    items: impl Iterator<Item = (&'a Item, &'a ItemContent)>,
    tokenizer: &Tokenizer,
    looks_up: bool,
) -> (Vec<Cost>, Vec<OldMessage>) {
    let (mut costs, mut messages): (Vec<Cost>, _) = (Vec::new(), Vec::new());
    let mut user_spoke = false;
    for (item, said) in items {
        let user = matches!(said, ItemContent::Message { role, .. } if role == "user");
        if costs.is_empty() || user && user_spoke {
            costs.push(Cost::default());
        }
        user_spoke |= user;
        let turn = costs.len() - 1;
        let cost = &mut costs[turn];
        cost.items += 1;
        if !matches!(said, ItemContent::Thought(_) | ItemContent::Nothing) {
            // Earlier versions stored items without a count.
            let tokens = if item.tokens > 0 { item.tokens } else { said.tokens(tokenizer) };
            cost.tokens += u64::from(tokens);
            cost.messages += 1;
        }
        if let (true, ItemContent::Message { role, text }) = (looks_up, said) {
            messages.push(OldMessage { id: item.id.clone(), role: role.clone(), text: text.clone(), turn });
        }
    }
    (costs, messages)
}

/// Writes a message as items, in the order in which answers have them.
fn bodies(message: Message) -> Vec<Value> {
    let Message { role, content, reasoning, tool_calls, tool_call_id, name, .. } = message;
    if matches!(role.as_str(), "tool" | "function") {
        let call_id = tool_call_id.or(name).unwrap_or_default();
        return vec![json!({"type": "function_call_output", "call_id": call_id, "output": content.unwrap_or_default()})];
    }
    let thought = reasoning.map(|text| json!({"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": text}]}));
    let said = content.map(|text| json!({"type": "message", "role": role, "content": text}));
    let calls = tool_calls.into_iter().map(|call| {
        let arguments = call.arguments.as_str().map_or_else(|| call.arguments.to_string(), str::to_owned);
        json!({"type": "function_call", "call_id": call.id, "name": call.name, "arguments": arguments})
    });
    thought.into_iter().chain(said).chain(calls).collect()
}
