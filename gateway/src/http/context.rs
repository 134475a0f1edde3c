//! A dialog fitted into the model's window: the system prompt and the newest turns stay, and a summary, old messages and facts stand in for
//! the rest. [`crate::context`] decides which turns are left out and what replaces them.

use crate::{
    base::memories::Facts,
    context::{
        self, Strategy, blocks,
        limits::Limits,
        ranking::{self, Meaning},
        steps::steps,
        summary::{self, Choice, Outlook, State, Summaries, TOKENS_MAX},
    },
    dialog::{Dialog, Message},
    metrics::{
        self,
        usage::{ContextUsage, MemoryUsage, RankedBy, RankedUsage, RetrievedUsage, SummaryUsage},
    },
    requests::{error::ApiError, options::Options, parse::in_range},
    serving::gateway::{Gateway, encoding::Unread, prompt::Measured},
};
use serde::Deserialize;

/// The maximum part of the window reserved for a client's `max_tokens`, as a divisor.
const ANSWER_PARTS: u64 = 4;
/// The share of the window that a prompt may fill before turns are left out.
const WINDOW_SHARE: f64 = 0.75;
/// Tokens that a template puts around a message, if the template cannot tell.
const MARKS: u64 = 8;
/// The maximum number of attempts to fit a prompt whose parts take more tokens together than separately.
const ATTEMPTS_MAX: usize = 4;
/// The maximum number of old messages that are retrieved for a new one.
const RETRIEVE_MAX: usize = 32;
/// The default limit on tokens of retrieved messages.
const RETRIEVE_TOKENS: u64 = 512;
/// The maximum part of the window for facts about a user, as a divisor.
const FACTS_SHARE: u64 = 8;
/// Tokens of a fact besides its text, its part of the block's head included, if all facts fit.
const FACT_MARKS: u64 = 16;
/// Tokens of line breaks between a block and its neighbours.
const JOINTS: u64 = 4;

/// The field `context` of a chat's body.
#[derive(Clone, Copy, Debug, Deserialize)]
#[serde(
    untagged,
    expecting = "expected `none`, `slide`, `steps`, `summary`, or an object with `strategy`, `turns_max`, `window_share`, `retrieve` and \
                 `retrieve_tokens`"
)]
pub enum ContextField {
    Strategy(Strategy),
    Wish(ContextWish),
}

#[derive(Clone, Copy, Debug, Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ContextWish {
    strategy: Option<Strategy>,
    turns_max: Option<usize>,
    window_share: Option<f64>,
    retrieve: Option<usize>,
    retrieve_tokens: Option<u64>,
}

impl ContextField {
    /// Whether old messages are to be retrieved.
    pub fn retrieves(&self) -> bool {
        matches!(self, Self::Wish(wish) if wish.retrieve.is_some_and(|retrieve| retrieve > 0))
    }
}

/// The field `context`, checked.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ContextOptions {
    pub strategy: Strategy,
    turns_max: Option<usize>,
    window_share: f64,
    /// The maximum number of old messages that are retrieved.
    pub retrieve: usize,
    retrieve_tokens: u64,
}

/// A stored conversation's turns, as needed here.
#[derive(Clone, Debug, Default)]
pub struct History {
    /// The conversation's id; `None` if it has none yet.
    pub conversation: Option<String>,
    pub costs: Vec<Cost>,
    pub summaries: Summaries,
    /// Its messages, if they may be retrieved.
    pub messages: Vec<OldMessage>,
}

/// A turn's tokens, messages, and items of the history.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cost {
    pub tokens: u64,
    pub messages: u64,
    pub items: usize,
}

#[derive(Clone, Debug)]
pub struct OldMessage {
    pub id: String,
    pub role: String,
    pub text: String,
    /// The index of its turn.
    pub turn: usize,
}

/// Data that was stored before a chat.
#[derive(Debug, Default)]
pub struct Recalled<'a> {
    /// The turns of a stored conversation.
    pub history: Option<History>,
    pub facts: Option<&'a Facts>,
    /// The reason why the question was not read, if it should have been.
    pub unread: Option<Unread>,
}

#[derive(Debug)]
pub struct Fitted {
    pub dialog: Dialog,
    /// The dialog's prompt, if it had to be measured.
    pub measured: Option<Measured>,
    /// The usage; `None` if the dialog was given unchanged.
    pub usage: Option<ContextUsage>,
    /// The state from which summaries are requested, if any are made.
    pub outlook: Option<Outlook>,
}

/// Checks the field `context`. Without one, the strategy is `usual`. `stored` tells whether the dialog is a conversation.
pub fn wanted(field: Option<ContextField>, usual: Strategy, stored: bool) -> Result<ContextOptions, ApiError> {
    let wish = match field {
        None => ContextWish::default(),
        Some(ContextField::Strategy(strategy)) => ContextWish { strategy: Some(strategy), ..ContextWish::default() },
        Some(ContextField::Wish(wish)) => wish,
    };
    wish.turns_max.map(|turns| in_range("context.turns_max", turns, 1..)).transpose()?;
    wish.window_share.map(|share| in_range("context.window_share", share, 0.05..=1.0)).transpose()?;
    let retrieve = in_range("context.retrieve", wish.retrieve.unwrap_or(0), 0..=RETRIEVE_MAX)?;
    let retrieve_tokens = in_range("context.retrieve_tokens", wish.retrieve_tokens.unwrap_or(RETRIEVE_TOKENS), 32..=65_536)?;
    // A client that sets a limit wants it to apply.
    let set = wish.turns_max.is_some() || wish.window_share.is_some() || retrieve > 0;
    let usual = if set && usual == Strategy::None { Strategy::Steps } else { usual };
    let strategy = wish.strategy.unwrap_or(usual);
    if !stored && strategy == Strategy::Summary {
        let message = "`context.strategy` is `summary`, which is kept with a stored conversation: name one with `conversation`";
        return Err(ApiError::invalid("context.strategy", message));
    }
    if !stored && retrieve > 0 {
        let message = "`context.retrieve` looks up a stored conversation's messages: name one with `conversation`";
        return Err(ApiError::invalid("context.retrieve", message));
    }
    Ok(ContextOptions {
        strategy,
        turns_max: wish.turns_max,
        window_share: wish.window_share.unwrap_or(WINDOW_SHARE),
        retrieve,
        retrieve_tokens,
    })
}

/// Leaves out turns that do not fit, and puts in what replaces them.
pub fn fit(
    gateway: &Gateway,
    param: &str,
    mut dialog: Dialog,
    Recalled { history, facts, unread }: Recalled<'_>,
    wanted: ContextOptions,
    options: &Options,
) -> Result<Fitted, ApiError> {
    if wanted.strategy == Strategy::None {
        // Its tokens are known: a prompt that cannot fit is not made.
        let tokens = history.iter().flat_map(|history| &history.costs).map(|cost| cost.tokens).sum();
        let context = gateway.context_tokens_max();
        if tokens > u64::from(context) {
            return Err(ApiError::context_length(param, context, tokens, 0));
        }
    }
    if wanted.strategy == Strategy::None && facts.is_none() {
        return Ok(Fitted { dialog, measured: None, usage: None, outlook: None });
    }
    let fixed = dialog.messages.iter().position(|message| !instructs(message)).unwrap_or(dialog.messages.len());
    let said = dialog.messages.split_off(fixed);
    let starts: Vec<_> = starts(&said).collect();
    let marks = marks(gateway, &dialog);
    let history = history.filter(|history| history.costs.len() == starts.len());
    let counted = || counted(gateway, &said, &starts);
    let costs = history.as_ref().map_or_else(counted, |history| history.costs.clone());
    let instructions = std::mem::take(&mut dialog.messages);
    let question = said.iter().rfind(|message| message.role == "user").and_then(|message| message.content.clone()).unwrap_or_default();
    let facts = facts.map(|facts| remembered(gateway, facts, &question)).transpose()?.unwrap_or_default();
    if let Some(history) = history.as_ref().filter(|_| wanted.retrieve > 0) {
        gateway.read_ahead(history.messages.iter().map(|message| message.text.as_str()));
    }
    let mut fitting = Fitting {
        gateway,
        takes_system: instructions.is_empty() && takes_system(gateway, &dialog),
        turns: costs.iter().map(|cost| cost.tokens + cost.messages * marks).collect(),
        costs,
        marks,
        instructions,
        facts,
        question,
        unread,
        said,
        starts,
        wanted,
        history: history.unwrap_or_default(),
    };
    // Without a stored conversation there is no place for a summary.
    if wanted.strategy == Strategy::Summary && fitting.history.costs.is_empty() {
        fitting.wanted.strategy = Strategy::Steps;
    }
    let usage = ContextUsage {
        strategy: fitting.wanted.strategy,
        turns: fitting.turns.len(),
        turns_left_out: 0,
        tokens_left_out: 0,
        summary: None,
        retrieved: None,
        memory: fitting.facts.usage.clone(),
        ranked: fitting.ranked(None),
    };
    if wanted.strategy == Strategy::None {
        dialog.messages = fitting.placed(0, None, "");
        usage.ranked.iter().for_each(|ranked| metrics::count_ranked(ranked.by));
        return Ok(Fitted { dialog, measured: None, usage: Some(usage), outlook: None });
    }
    fitting.fit(param, dialog, usage, options)
}

struct Fitting<'a> {
    gateway: &'a Gateway,
    instructions: Vec<Message>,
    /// Whether a system message may be added if there is none yet.
    takes_system: bool,
    facts: Remembered,
    /// The text of the user's newest message.
    question: String,
    unread: Option<Unread>,
    said: Vec<Message>,
    /// The indices in `said` at which turns start.
    starts: Vec<usize>,
    costs: Vec<Cost>,
    /// Tokens of each turn, with the template's marks.
    turns: Vec<u64>,
    marks: u64,
    wanted: ContextOptions,
    history: History,
}

impl Fitting<'_> {
    fn fit(self, param: &str, mut dialog: Dialog, usage: ContextUsage, options: &Options) -> Result<Fitted, ApiError> {
        let window = u64::from(self.gateway.context_tokens()?);
        let asked = u64::from(options.max_tokens.unwrap_or(1));
        // An upper bound is not a wish: it reserves no more than a part of the window.
        let answer = if options.max_tokens_shrinks { asked.min(window / ANSWER_PARTS) } else { asked };
        let summarizes = self.wanted.strategy == Strategy::Summary;
        let beside = self.beside();
        let own = self.own(param, &dialog);
        let share = (window as f64 * self.wanted.window_share) as u64;
        let usual = Limits { turns: self.wanted.turns_max.unwrap_or(usize::MAX), tokens: share.saturating_sub(own + beside) };
        // While a summary is awaited, half of the free tokens may be used, and a quarter more turns.
        let mut late = Limits {
            turns: usual.turns.saturating_add(usual.turns.div_ceil(4)),
            tokens: (share.midpoint(window)).min(window.saturating_sub(answer)).saturating_sub(own + beside),
        };
        let mut limits = usual;
        let told: Vec<usize> = self.history.summaries.iter().map(|summary| self.turns_of(summary.items)).collect();
        let total: u64 = self.turns.iter().sum();
        for attempt in 1.. {
            let Choice { left_out, summary, state } = match summarizes {
                true => summary::choose(limits, late, &self.turns, &told, self.has_failed(steps(limits, &self.turns).left_out)),
                false => Choice {
                    left_out: context::left_out(self.wanted.strategy, limits, &self.turns),
                    summary: None,
                    state: State::NotNeeded,
                },
            };
            let summary_text = summary.and_then(|place| self.history.summaries.iter().nth(place)).map(|summary| summary.text.as_str());
            let (passages, retrieved, looked_at) = self.retrieved(left_out, options);
            dialog.messages = self.placed(left_out, summary_text, &passages);
            let usage = ContextUsage {
                turns_left_out: left_out,
                tokens_left_out: self.turns[..left_out].iter().sum(),
                summary: summarizes.then(|| SummaryUsage {
                    state,
                    turns: summary.map_or(0, |place| told[place]),
                    tokens: summary_text.map_or(0, |text| self.count(text)),
                }),
                retrieved,
                ranked: self.ranked(looked_at),
                ..usage.clone()
            };
            let given = total - usage.tokens_left_out;
            let last = attempt == ATTEMPTS_MAX || left_out + 1 >= self.turns.len();
            let mut measured = None;
            // The sum over parts is exact to a few tokens, which is enough well below the limit.
            let fits = last || own + beside + given + answer <= window / 2 || {
                let exact = measured.insert(self.gateway.measured(param, &dialog)?).tokens.len() as u64;
                let over = (exact + answer).saturating_sub(window);
                limits.tokens = given.min(limits.tokens).saturating_sub(over);
                late = limits;
                over == 0
            };
            if fits {
                let outlook = summarizes.then(|| Outlook {
                    limits: usual,
                    turns: self.turns.iter().zip(&self.costs).map(|(tokens, cost)| (*tokens, cost.items)).collect(),
                    marks: self.marks,
                    told: self.history.summaries.iter().map(|summary| summary.items).collect(),
                });
                usage.ranked.iter().for_each(|ranked| metrics::count_ranked(ranked.by));
                return Ok(Fitted { dialog, measured, usage: Some(usage), outlook });
            }
        }
        unreachable!("the last attempt returns")
    }

    /// Counts the tokens reserved for the replacement of turns, so that its length does not affect which turns are left out.
    fn beside(&self) -> u64 {
        let summary = match self.wanted.strategy {
            Strategy::Summary => self.count(&blocks::summary("")) + u64::from(TOKENS_MAX) + JOINTS,
            _ => 0,
        };
        let retrieved = if self.wanted.retrieve > 0 { self.wanted.retrieve_tokens + JOINTS } else { 0 };
        let chosen = if self.facts.chosen.is_empty() { 0 } else { self.count(&self.facts.chosen) + JOINTS };
        summary + retrieved + chosen
    }

    /// Counts the tokens of the messages that are always given.
    fn own(&self, param: &str, dialog: &Dialog) -> u64 {
        let facts = if self.facts.always.is_empty() { 0 } else { self.count(&self.facts.always) + JOINTS };
        let instructions: u64 = self.instructions.iter().map(|message| tokens(self.gateway, message) + self.marks).sum();
        if dialog.tools.is_empty() {
            return instructions + facts;
        }
        // Only the template determines how tools are rendered.
        let question = Message { role: "user".into(), content: Some("a".into()), ..Message::default() };
        let messages = self.instructions.iter().cloned().chain([question]).collect();
        let with_tools = self.gateway.prompt_only(param, &Dialog { messages, ..dialog.clone() });
        with_tools.map_or(instructions, |prompt| (prompt.len() as u64).saturating_sub(self.marks)) + facts
    }

    /// Counts the turns of which these first items consist; 0 if the items are not whole turns.
    fn turns_of(&self, items: usize) -> usize {
        let mut before = 0;
        let turns = self.costs.iter().position(|cost| {
            before += cost.items;
            before >= items
        });
        turns.filter(|_| before == items).map_or(0, |last| last + 1)
    }

    /// Whether summarizing these turns has failed.
    fn has_failed(&self, turns: usize) -> bool {
        let items = self.costs[..turns].iter().map(|cost| cost.items).sum();
        let conversation = self.history.conversation.as_deref();
        conversation.is_some_and(|conversation| self.gateway.summary_has_failed(conversation, items))
    }

    /// Returns the old messages most relevant to the user's newest one, as a block, among those that are left out.
    fn retrieved(&self, left_out: usize, options: &Options) -> (String, Option<RetrievedUsage>, Option<LookedAt>) {
        if self.wanted.retrieve == 0 {
            return Default::default();
        }
        let old: Vec<_> = self.history.messages.iter().filter(|message| message.turn < left_out).collect();
        let texts: Vec<_> = old.iter().map(|message| message.text.as_str()).collect();
        let meaning = self.gateway.meaning(&self.question, &texts);
        let ranked = ranking::best(&self.question, &texts, meaning.as_ref(), self.wanted.retrieve);
        let ranked: Vec<_> = ranked.into_iter().map(|place| (place, (old[place].role.as_str(), old[place].text.as_str()))).collect();
        // The client did not send them with this prompt, so they must not cause its refusal.
        let ranked: Vec<_> = ranked.into_iter().filter(|(_, (_, text))| self.gateway.accepts(text, options)).collect();
        let tokenizer = &self.gateway.text().tokenizer;
        let count = |text: &str| tokenizer.count(text);
        let cut = |text: &str, most: u64| tokenizer.cut(text, most);
        let taken = blocks::passages_that_fit(&ranked, self.wanted.retrieve_tokens, count, cut);
        let block = match taken.is_empty() {
            true => String::new(),
            false => blocks::passages(taken.iter().map(|(place, text)| (old[*place].role.as_str(), text.as_str()))),
        };
        let messages = taken.iter().map(|(place, _)| old[*place].id.clone()).collect();
        let usage = RetrievedUsage { messages, tokens: self.count(&block) };
        (block, Some(usage), LookedAt::of(&texts, meaning.as_ref()))
    }

    /// Returns how old messages and facts were ranked, if any were, and their meaning counts.
    fn ranked(&self, messages: Option<LookedAt>) -> Option<RankedUsage> {
        let all = [messages, self.facts.looked_at].into_iter().flatten().reduce(LookedAt::and)?;
        let by = if all.vectors > 0 { RankedBy::Both } else { RankedBy::Words };
        self.gateway.recalls().then_some(RankedUsage { by, texts: all.texts, vectors: all.vectors, reason: self.unread })
    }

    /// Returns all messages in order: the parts that change least come first, and those that change with every question just before it.
    fn placed(&self, left_out: usize, summary: Option<&str>, passages: &str) -> Vec<Message> {
        let from = self.starts.get(left_out).copied().unwrap_or(0);
        let mut messages: Vec<_> = self.instructions.iter().chain(&self.said[from..]).cloned().collect();
        let summary = summary.map(blocks::summary).unwrap_or_default();
        let block = blocks::joined([self.facts.always.as_str(), &summary]);
        if !block.is_empty() {
            match self.instructions.len().checked_sub(1) {
                Some(last) => append(&mut messages[last], &block),
                None if self.takes_system => {
                    messages.insert(0, Message { role: "system".into(), content: Some(block), ..Message::default() });
                }
                None => messages.iter_mut().find(|message| message.role == "user").into_iter().for_each(|first| prepend(first, &block)),
            }
        }
        let passages = blocks::joined([self.facts.chosen.as_str(), passages]);
        if !passages.is_empty() {
            messages.iter_mut().rfind(|message| message.role == "user").into_iter().for_each(|newest| prepend(newest, &passages));
        }
        messages
    }

    fn count(&self, text: &str) -> u64 {
        self.gateway.text().tokenizer.count(text)
    }
}

fn append(message: &mut Message, block: &str) {
    message.content = Some(blocks::joined([message.content.as_deref().unwrap_or_default(), block]));
}

fn prepend(message: &mut Message, block: &str) {
    message.content = Some(blocks::joined([block, message.content.as_deref().unwrap_or_default()]));
}

/// Facts about the user, as a prompt has them.
#[derive(Debug, Default)]
struct Remembered {
    /// The block at the beginning: the first facts, whatever is asked.
    always: String,
    /// The block just before the newest message: those of the other facts that may matter to it.
    chosen: String,
    usage: Option<MemoryUsage>,
    /// The facts that were ranked.
    looked_at: Option<LookedAt>,
}

/// The numbers of ranked texts, and of those that have a vector.
#[derive(Clone, Copy, Debug, PartialEq)]
struct LookedAt {
    texts: usize,
    vectors: usize,
}

impl LookedAt {
    fn of(texts: &[&str], meaning: Option<&Meaning>) -> Option<Self> {
        let vectors = meaning.map_or(0, |meaning| meaning.texts.iter().flatten().count());
        (!texts.is_empty()).then_some(Self { texts: texts.len(), vectors })
    }

    fn and(self, other: Self) -> Self {
        Self { texts: self.texts + other.texts, vectors: self.vectors + other.vectors }
    }
}

/// Whether all facts fit, whatever model answers: a token has at least a byte.
pub fn surely_fit(gateway: &Gateway, facts: &Facts) -> bool {
    let bytes: u64 = facts.texts.iter().map(|text| text.len() as u64 + FACT_MARKS).sum();
    gateway.models().filter(Gateway::writes).all(|model| bytes <= u64::from(model.context_tokens().unwrap_or(0)) / FACTS_SHARE)
}

/// Returns the blocks of facts, and their usage. Facts that do not fit are ranked by the question; so that the prompt's beginning does not
/// depend on it, the first ones stay there, in half of the room.
fn remembered(gateway: &Gateway, Facts { texts, lost }: &Facts, question: &str) -> Result<Remembered, ApiError> {
    let tokenizer = &gateway.text().tokenizer;
    let count = |text: &str| tokenizer.count(text);
    let room = u64::from(gateway.context_tokens()?) / FACTS_SHARE;
    let all_fit = blocks::facts_that_fit(texts, room, count) == texts.len();
    let first = if all_fit { texts.len() } else { blocks::facts_that_fit(texts, room / 2, count) };
    let rest: Vec<&str> = texts[first..].iter().map(String::as_str).collect();
    gateway.read_ahead(rest.iter().copied());
    let meaning = if rest.is_empty() { None } else { gateway.meaning(question, &rest) };
    let ranked = ranking::best(question, &rest, meaning.as_ref(), rest.len());
    let chosen = blocks::chosen_facts_that_fit(&rest, &ranked, room - room / 2, count);
    let always = if first == 0 { String::new() } else { blocks::facts(texts[..first].iter().map(String::as_str)) };
    let chosen_block = if chosen.is_empty() { String::new() } else { blocks::chosen_facts(chosen.iter().map(|place| rest[*place])) };
    let usage = MemoryUsage {
        facts: first + chosen.len(),
        facts_chosen: (!rest.is_empty()).then_some(chosen.len()),
        facts_left_out: rest.len() - chosen.len(),
        tokens: count(&always) + count(&chosen_block),
        reason: lost.clone(),
    };
    Ok(Remembered { always, chosen: chosen_block, usage: Some(usage), looked_at: LookedAt::of(&rest, meaning.as_ref()) })
}

fn instructs(message: &Message) -> bool {
    matches!(message.role.as_str(), "system" | "developer")
}

/// Returns the indices at which turns start: at a user's message. Messages before the first one belong to it.
fn starts(messages: &[Message]) -> impl Iterator<Item = usize> {
    let mut user_spoke = false;
    messages.iter().enumerate().filter_map(move |(place, message)| {
        let user = message.role == "user";
        let begins = place == 0 || (user && user_spoke);
        user_spoke |= user;
        begins.then_some(place)
    })
}

fn counted(gateway: &Gateway, said: &[Message], starts: &[usize]) -> Vec<Cost> {
    let ends = starts.iter().skip(1).copied().chain([said.len()]);
    let cost = |(start, end): (&usize, usize)| Cost {
        tokens: said[*start..end].iter().map(|message| tokens(gateway, message)).sum(),
        messages: (end - start) as u64,
        items: end - start,
    };
    starts.iter().zip(ends).map(cost).collect()
}

fn tokens(gateway: &Gateway, message: &Message) -> u64 {
    let count = |text: &str| gateway.text().tokenizer.count(text);
    let calls = message.tool_calls.iter().map(|call| count(&call.name) + count(&call.arguments.to_string()));
    message.content.as_deref().map_or(0, count) + calls.sum::<u64>()
}

fn rendered(gateway: &Gateway, dialog: &Dialog, roles: &[&str]) -> Result<u64, ApiError> {
    let said = |role: &&str| Message { role: (*role).into(), content: Some("a".into()), ..Message::default() };
    let messages = roles.iter().map(said).collect();
    let probe = Dialog { messages, template_kwargs: dialog.template_kwargs.clone(), ..Dialog::default() };
    gateway.prompt_only("messages", &probe).map(|prompt| prompt.len() as u64)
}

/// Counts the tokens that the template puts around a message.
fn marks(gateway: &Gateway, dialog: &Dialog) -> u64 {
    let letter = gateway.text().tokenizer.count("a").max(1);
    match (rendered(gateway, dialog, &["user"]), rendered(gateway, dialog, &["user", "assistant", "user"])) {
        (Ok(one), Ok(three)) => three.saturating_sub(one).div_ceil(2).saturating_sub(letter),
        _ => MARKS,
    }
}

/// Whether the template has a place for a system message.
fn takes_system(gateway: &Gateway, dialog: &Dialog) -> bool {
    match (rendered(gateway, dialog, &["user"]), rendered(gateway, dialog, &["system", "user"])) {
        (Ok(without), Ok(with)) => with > without,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn turns_begin_with_what_a_user_says() {
        let of = |roles: &str| {
            let message = |role: &str| Message { role: role.into(), ..Message::default() };
            starts(&roles.split_whitespace().map(message).collect::<Vec<_>>()).collect::<Vec<_>>()
        };
        assert_eq!(of("user assistant user assistant tool assistant user"), [0, 2, 6]);
        assert_eq!(of("assistant user assistant user"), [0, 3]);
        assert_eq!(of("user user"), [0, 1]);
        assert!(of("").is_empty());
    }

    #[test]
    fn who_sets_a_limit_wants_it_kept() {
        let of = |json: &str, usual, stored| wanted(serde_json::from_str(json).unwrap(), usual, stored).map(|wanted| wanted.strategy).ok();
        let strategy = |json: &str, usual| of(json, usual, true);
        assert_eq!(strategy("null", Strategy::None), Some(Strategy::None));
        assert_eq!(strategy("null", Strategy::Steps), Some(Strategy::Steps));
        assert_eq!(strategy(r#""none""#, Strategy::Steps), Some(Strategy::None));
        assert_eq!(strategy(r#"{"turns_max": 10}"#, Strategy::None), Some(Strategy::Steps));
        assert_eq!(strategy(r#"{"turns_max": 10}"#, Strategy::Summary), Some(Strategy::Summary));
        assert_eq!(strategy(r#"{"turns_max": 0}"#, Strategy::None), None);
        assert_eq!(strategy(r#"{"window_share": 1.5}"#, Strategy::None), None);
        assert_eq!(strategy(r#"{"retrieve": 33}"#, Strategy::Steps), None);
        assert!(serde_json::from_str::<ContextField>(r#""all""#).is_err());
        assert_eq!(of(r#"{"turns_max": 10}"#, Strategy::None, false), Some(Strategy::Steps));
        assert_eq!(of(r#""summary""#, Strategy::None, false), None, "there is nothing to keep it with");
        assert_eq!(of(r#"{"retrieve": 3}"#, Strategy::None, false), None);
    }
}
