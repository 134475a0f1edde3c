//! A conversation, whatever protocol it came by: what was said, what may be called, how to think. Endpoints translate their
//! bodies into a [`Dialog`]; the model's chat template turns it into a prompt. `written`: which parts clients and tools write;
//! `mended`: what becomes of an order of turns that the template refuses.

mod mended;
pub(crate) mod render;
mod written;

use crate::text::{
    TextModel,
    marks::{self, Edges, Sewn},
    output::OutputRules,
    reasoning::Thought,
    template::{ChatTemplate, TemplateError},
    tools::{Calls, ToolFormat},
};
use minijinja::Value;
use std::{
    borrow::Cow,
    collections::{BTreeMap, BTreeSet, HashSet},
    time::SystemTime,
};

/// Of a tool's name.
const NAME_CHARS_MAX: usize = 128;
/// Tools of one dialog. Hosts of agents that offer everything they have come to some hundreds.
const TOOLS_MAX: usize = 1024;

#[derive(Clone, Debug, Default)]
pub struct Dialog {
    pub messages: Vec<Message>,
    pub tools: Vec<Tool>,
    pub tool_choice: ToolChoice,
    /// More than one call per answer is allowed.
    pub parallel: bool,
    pub reasoning: ReasoningWish,
    /// Variables for the template; they win over those that the fields above imply.
    pub template_kwargs: BTreeMap<String, Value>,
    /// The prompt ends in the middle of the last message, and the model goes on with it.
    pub continues: bool,
}

/// One turn of any role.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Message {
    /// `system`, `developer`, `user`, `assistant`, or `tool`.
    pub role: String,
    pub content: Option<String>,
    /// What an assistant thought before it spoke.
    pub reasoning: Option<String>,
    pub tool_calls: Vec<ToolCall>,
    /// Of a `tool` message: the call that it answers.
    pub tool_call_id: Option<String>,
    pub name: Option<String>,
    /// Fields that only the template knows.
    pub others: BTreeMap<String, Value>,
}

/// A call that an assistant made.
#[derive(Clone, Debug, PartialEq)]
pub struct ToolCall {
    pub id: String,
    pub name: String,
    /// An object; where the model or the client wrote something else, that: a string for what is no JSON.
    pub arguments: serde_json::Value,
}

/// A function that the model may call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: Option<String>,
    /// JSON schema of its arguments; `None`: it has none.
    pub parameters: Option<serde_json::Value>,
    /// Calls keep to the schema.
    pub strict: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model does not learn of its tools.
    None,
    #[default]
    Auto,
    /// At least one call, and nothing else.
    Required,
    /// This tool.
    Named(String),
}

/// How much the model shall think, as far as its template can say it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ReasoningWish {
    /// `none`, `minimal`, `low`, …
    pub effort: Option<String>,
    pub enable_thinking: Option<bool>,
}

impl Dialog {
    /// Everything that anybody said, wrote into a call, or got from one.
    pub fn each_text(&mut self, mut act: impl FnMut(&mut String)) {
        for message in &mut self.messages {
            message.content.iter_mut().chain(&mut message.reasoning).for_each(&mut act);
            message.tool_calls.iter_mut().for_each(|call| each_string(&mut call.arguments, &mut act));
        }
    }
}

fn each_string(value: &mut serde_json::Value, act: &mut impl FnMut(&mut String)) {
    match value {
        serde_json::Value::String(text) => act(text),
        serde_json::Value::Array(items) => items.iter_mut().for_each(|item| each_string(item, act)),
        serde_json::Value::Object(fields) => fields.values_mut().for_each(|field| each_string(field, act)),
        serde_json::Value::Null | serde_json::Value::Bool(_) | serde_json::Value::Number(_) => {}
    }
}

/// A dialog, put to a model.
#[derive(Debug)]
pub struct DialogPrompt {
    pub prompt: Sewn,
    pub output: OutputRules,
}

/// A dialog cannot be put to this model.
#[derive(Debug, thiserror::Error)]
pub enum DialogError {
    #[error("this model has no chat template (it is a base model, perhaps): use /v1/completions")]
    NoTemplate,
    #[error(transparent)]
    Template(#[from] TemplateError),
    #[error("`{0}` is not a tool's name: it must be 1 to {NAME_CHARS_MAX} letters, digits, or any of `_-.:/`")]
    ToolName(String),
    #[error("there are {0} tools: {TOOLS_MAX} is the most")]
    TooManyTools(usize),
    #[error("there are two tools `{0}`")]
    ToolTwice(String),
    #[error("the parameters of tool `{0}` must be a JSON schema: an object")]
    Parameters(String),
    #[error("the answer must call a tool, but there are no tools")]
    NoTools,
    #[error("the answer must call `{0}`, but there is no such tool")]
    NoSuchTool(String),
    #[error("these messages use every character that is for private use: leave some of them out")]
    NoSeam,
}

impl ToolCall {
    /// `arguments` as clients send them: JSON as text, nothing for no arguments.
    pub fn new(id: impl Into<String>, name: impl Into<String>, arguments: &str) -> Self {
        Self { id: id.into(), name: name.into(), arguments: understood(arguments) }
    }
}

/// Some clients encode an object twice, and some send `null` for no arguments.
fn understood(arguments: &str) -> serde_json::Value {
    use serde_json::Value;
    let none = || Value::Object(serde_json::Map::new());
    if arguments.trim().is_empty() {
        return none();
    }
    match serde_json::from_str(arguments) {
        Err(_) => arguments.into(),
        Ok(Value::Null) => none(),
        Ok(Value::String(text)) => match serde_json::from_str(&text) {
            Ok(inner @ Value::Object(_)) => inner,
            _ => text.into(),
        },
        Ok(value) => value,
    }
}

impl Dialog {
    /// What the model is given, and how its answer is read. `now`: templates may show the date.
    pub fn prompt(&self, model: &TextModel, now: SystemTime) -> Result<DialogPrompt, DialogError> {
        self.check_tools()?;
        self.check_choice()?;
        let template = model.template.as_ref().ok_or(DialogError::NoTemplate)?;
        let prompt = self.rendered(model, template, now)?;
        let text = &prompt.text;
        let thought = Thought::after(template, text);
        let format = ToolFormat::of(template);
        let format = match self.tool_choice {
            _ if self.tools.is_empty() => None,
            ToolChoice::None => None,
            // A template without a format may show the tools all the same; what the model makes of them is text.
            ToolChoice::Auto => format,
            ToolChoice::Required | ToolChoice::Named(_) => format.or(Some(ToolFormat::plain())),
        };
        let forced_most = match self.tool_choice {
            ToolChoice::None | ToolChoice::Auto => None,
            ToolChoice::Required | ToolChoice::Named(_) if self.parallel => Some(model.forced_calls_max),
            ToolChoice::Required | ToolChoice::Named(_) => Some(1),
        };
        let calls = format.map(|format| Calls { format, tools: self.tools.as_slice().into(), parallel: self.parallel, forced_most });
        Ok(DialogPrompt { output: OutputRules::new(model, thought, calls), prompt })
    }

    /// As the template has it. Where something that a client or a tool wrote could be taken for one of its marks, it cannot any more.
    fn rendered(&self, model: &TextModel, template: &ChatTemplate, now: SystemTime) -> Result<Sewn, DialogError> {
        let plain = || Ok(Sewn { text: render::render(self, template, now)?, cuts: Vec::new() });
        let Some(marks) = &model.marks else { return plain() };
        let (mut touched, mut taken) = (false, BTreeSet::new());
        self.each_written(&mut |text| {
            touched |= marks.touch(text);
            marks::note_taken(text, &mut taken);
        });
        if !touched {
            return plain();
        }
        let seam = marks::seam(&taken).ok_or(DialogError::NoSeam)?;
        let mut guarded = self.clone();
        guarded.take_out_thoughts(template);
        let guard = |text: &mut String, edges: Edges| {
            if let Cow::Owned(changed) = marks.guarded(&model.tokenizer, text, seam, edges) {
                *text = changed;
            }
        };
        guarded.change_written(&mut |text| guard(text, Edges::Guarded), &mut |name| guard(name, Edges::Left));
        Ok(marks.sewn(&render::render(&guarded, template, now)?, seam))
    }

    /// Some clients send an assistant's thoughts back as a part of what it said, and some templates find them there by their marks. They
    /// would not find marks that are guarded.
    fn take_out_thoughts(&mut self, template: &ChatTemplate) {
        let Some((begin, end)) = Thought::taken_out_by(template) else { return };
        let spoken = self.messages.iter_mut().filter(|message| message.role == "assistant" && message.reasoning.is_none());
        for message in spoken {
            let Some((before, _)) = message.content.as_deref().and_then(|content| content.split_once(end)) else { continue };
            let thought = before.trim_end_matches('\n').rsplit(begin).next().unwrap_or_default().trim_start_matches('\n').to_owned();
            let said = message.content.as_deref().and_then(|content| content.rsplit(end).next()).unwrap_or_default();
            let said = if template.mentions("lstrip") { said.trim_start_matches('\n') } else { said };
            message.content = Some(said.to_owned());
            message.reasoning = Some(thought);
        }
    }

    /// Names become parts of calls, of grammars, and of tags.
    fn check_tools(&self) -> Result<(), DialogError> {
        if self.tools.len() > TOOLS_MAX {
            return Err(DialogError::TooManyTools(self.tools.len()));
        }
        let mut names = HashSet::with_capacity(self.tools.len());
        for tool in &self.tools {
            let name = &tool.name;
            if !(1..=NAME_CHARS_MAX).contains(&name.chars().count()) || !name.chars().all(|c| c.is_alphanumeric() || "_-.:/".contains(c)) {
                return Err(DialogError::ToolName(name.clone()));
            }
            if !names.insert(name) {
                return Err(DialogError::ToolTwice(name.clone()));
            }
            if tool.parameters.as_ref().is_some_and(|parameters| !parameters.is_object()) {
                return Err(DialogError::Parameters(name.clone()));
            }
        }
        Ok(())
    }

    fn check_choice(&self) -> Result<(), DialogError> {
        match &self.tool_choice {
            ToolChoice::None | ToolChoice::Auto => Ok(()),
            ToolChoice::Required if self.tools.is_empty() => Err(DialogError::NoTools),
            ToolChoice::Required => Ok(()),
            ToolChoice::Named(name) if self.tools.iter().any(|tool| tool.name == *name) => Ok(()),
            ToolChoice::Named(name) => Err(DialogError::NoSuchTool(name.clone())),
        }
    }
}
