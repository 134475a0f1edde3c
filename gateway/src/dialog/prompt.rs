//! A dialog as a model's prompt, and the rules by which its answer is read.

use super::render;
use super::{Dialog, ToolChoice};
use crate::text::{
    TextModel,
    harmony::Channels,
    marks::{self, Edges},
    output::OutputRules,
    reasoning::Thought,
    sewn::Sewn,
    template::{ChatTemplate, TemplateError},
    tools::{Calls, format::ToolFormat},
};
use std::{
    borrow::Cow,
    collections::{BTreeSet, HashSet},
    time::SystemTime,
};

/// The maximum length of a tool's name, in characters.
const NAME_CHARS_MAX: usize = 128;
/// The maximum number of tools in one dialog. Hosts of agents that offer everything they have reach some hundreds.
const TOOLS_MAX: usize = 1024;

/// A dialog's prompt for a model, with the rules by which the answer is read.
#[derive(Debug)]
pub struct DialogPrompt {
    pub prompt: Sewn,
    pub output: OutputRules,
}

/// The reason why a dialog cannot be put to this model.
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

impl Dialog {
    /// Makes the prompt, and the rules by which its answer is read. `now` is for templates that show the date.
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
            // A template without a format may show the tools all the same; the model's attempts at calls are text.
            ToolChoice::Auto => format,
            ToolChoice::Required | ToolChoice::Named(_) => format.or(Some(ToolFormat::plain())),
        };
        // A tool that is named is called once: clients read one call then, and each call has its effect.
        let parallel = self.parallel && !matches!(self.tool_choice, ToolChoice::Named(_));
        let forced_most = match self.tool_choice {
            ToolChoice::None | ToolChoice::Auto => None,
            ToolChoice::Required | ToolChoice::Named(_) if parallel => Some(model.forced_calls_max),
            ToolChoice::Required | ToolChoice::Named(_) => Some(1),
        };
        let calls = format.map(|format| Calls::new(format, &self.tools, parallel, forced_most));
        let tools = if self.tool_choice == ToolChoice::Auto { &self.tools[..] } else { &[] };
        let channels = Channels::of(template, tools);
        Ok(DialogPrompt { output: OutputRules::new(model, thought, calls, channels), prompt })
    }

    /// Renders the dialog by the template, so that text of clients and tools cannot be taken for the template's marks.
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

    /// Moves reasoning out of an answer's text, in which some clients send it back and some templates find it by its marks. Templates would
    /// not find marks that are guarded.
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

    /// Checks the names of tools, which become parts of calls, of grammars, and of tags.
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
