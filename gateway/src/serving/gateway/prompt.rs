//! The path from a dialog to a prompt: checked, rendered, tokenized, with the grammar that its answer must follow.

use super::Gateway;
use crate::{
    dialog::{
        Dialog, ToolChoice,
        prompt::{DialogError, DialogPrompt},
    },
    features::grammars::Hearing,
    requests::{
        computing,
        error::ApiError,
        options::{Constrained, FORM_OF_CALLS, Options},
        structured::{RequestedGrammar, unjudged},
    },
    safety::audit::Audit,
    text::{
        output::OutputRules,
        sewn::Sewn,
        template::TemplateError,
        tools::grammar::{AnswerRules, Forced, Refused},
    },
};
use serde_json::Value;
use std::{sync::Arc, time::SystemTime};
use tidemill_grammar::{GrammarError, helper::handle::AskError, lark, schema::Terms};
use tidemill_proto::{block::Token, grammar::Grammar, thought::ThoughtLimit};
use tidemill_safety::{
    category::{Category, Threshold},
    judge::Doubt,
};

/// A dialog's prompt that is rendered and tokenized.
#[derive(Debug)]
pub struct Measured {
    prompt: DialogPrompt,
    pub tokens: Vec<Token>,
}

impl Gateway {
    /// Refuses a prompt's text that must not be answered. The uncertain findings that it returns must be [moderated](Self::moderate) before
    /// an answer.
    #[must_use = "doubts have to be settled"]
    pub fn check_input<'a>(
        &self,
        param: &str,
        texts: impl IntoIterator<Item = &'a str>,
        stricter: &[(Category, Threshold)],
    ) -> Result<Vec<Doubt>, ApiError> {
        let Some(safety) = self.safety() else { return Ok(Vec::new()) };
        safety.check_input(texts, stricter).map_err(|(finding, text)| {
            let blocked = |audit: &Audit| audit.blocked("input", self.tenant(), &self.model.name, finding, text);
            ApiError::content_filter(param, finding, self.audit().map(blocked))
        })
    }

    /// Whether a text may be put into a prompt that its client did not write it into.
    pub fn accepts(&self, text: &str, options: &Options) -> bool {
        self.safety().is_none_or(|safety| safety.accepts(text, &options.safety))
    }

    /// Refuses text that cannot fit, without tokenizing it.
    pub fn check_text_length(&self, param: &str, text: &str) -> Result<(), ApiError> {
        let context = self.context_tokens_max();
        if text.len() > self.model.text.tokenizer.text_bytes_max(context as usize) {
            return Err(ApiError::context_length(param, context, u64::from(context) + 1, 0));
        }
        Ok(())
    }

    /// Makes a dialog's prompt, and puts the rules by which its answer is read into `options`. `param` is the field with its messages, for
    /// errors; `measured` is the dialog's prompt, if it had to be known before. Takes a while: see [`compute`](Self::compute).
    pub fn prompt(&self, param: &str, dialog: &Dialog, measured: Option<Measured>, options: &mut Options) -> Result<Vec<Token>, ApiError> {
        if self.safety().is_some() {
            let shown = dialog.shown_to_the_model();
            options.doubts.extend(self.check_input(param, shown.iter().map(AsRef::as_ref), &options.safety)?);
        }
        let hidden = self.pii().and_then(|pii| pii.hide_dialog(dialog, options));
        let (DialogPrompt { prompt, output }, tokens) = match (measured, &hidden) {
            (Some(Measured { prompt, tokens }), None) => (prompt, Some(tokens)),
            _ => (self.render(param, hidden.as_ref().unwrap_or(dialog))?, None),
        };
        options.rules.output = output;
        options.thought = self.thought_limit(dialog, &options.rules.output)?;
        options.inquiry = self.question(hidden.as_ref().unwrap_or(dialog), options);
        self.force(dialog, options)?;
        tokens.map_or_else(|| self.encode_rendered(param, &prompt), Ok)
    }

    /// Makes a dialog's prompt, independent of an answer.
    pub fn measured(&self, param: &str, dialog: &Dialog) -> Result<Measured, ApiError> {
        let prompt = self.render(param, dialog)?;
        Ok(Measured { tokens: self.encode_rendered(param, &prompt.prompt)?, prompt })
    }

    /// Makes a dialog's prompt, of which only the tokens matter.
    pub fn prompt_only(&self, param: &str, dialog: &Dialog) -> Result<Vec<Token>, ApiError> {
        self.measured(param, dialog).map(|measured| measured.tokens)
    }

    pub(super) fn render(&self, param: &str, dialog: &Dialog) -> Result<DialogPrompt, ApiError> {
        // Each message takes at least a token, and a template may be tried on all of them several times.
        let (messages, context) = (dialog.messages.len() as u64, self.context_tokens_max());
        if messages > u64::from(context) {
            return Err(ApiError::context_length(param, context, messages, 0));
        }
        dialog.prompt(self.text(), SystemTime::now()).map_err(|error| match error {
            DialogError::NoTools | DialogError::NoSuchTool(_) => ApiError::invalid("tool_choice", error.to_string()),
            DialogError::ToolName(_) | DialogError::TooManyTools(_) | DialogError::ToolTwice(_) | DialogError::Parameters(_) => {
                ApiError::invalid("tools", error.to_string())
            }
            DialogError::Template(TemplateError::Unavailable(reason)) => ApiError::not_rendered(&reason),
            DialogError::NoTemplate | DialogError::Template(_) | DialogError::NoSeam => ApiError::invalid(param, error.to_string()),
        })
    }

    fn encode_rendered(&self, param: &str, prompt: &Sewn) -> Result<Vec<Token>, ApiError> {
        self.check_text_length(param, &prompt.text)?;
        computing::checkpoint()?;
        // The template has written BOS if the model expects it.
        self.text().tokenizer.encode_sewn(prompt).map_err(|e| ApiError::invalid(param, e.to_string()))
    }

    /// The limit on the thought of an answer to a dialog, if the client wants one. A model without thoughts keeps any.
    fn thought_limit(&self, dialog: &Dialog, output: &OutputRules) -> Result<Option<ThoughtLimit>, ApiError> {
        let (text, budgets) = (self.text(), &self.shared.settings.requests.thought_budgets);
        let most = text.template.as_ref().and_then(|template| dialog.reasoning.tokens_max(template, &dialog.template_kwargs, budgets));
        let Some(most) = most.filter(|_| output.thought.is_some() || output.channels.is_some()) else { return Ok(None) };
        let open = output.channels.is_none() && output.thought.as_ref().is_some_and(|thought| thought.open);
        match text.limited_thoughts() {
            Some(thoughts) => Ok(Some(thoughts.limit(most, open))),
            None if most == 0 => Ok(None),
            None => Err(ApiError::invalid(
                "reasoning",
                "`reasoning`: this model's tokenizer has no tokens for the marks of thoughts, so a thought cannot be limited: ask without a budget",
            )),
        }
    }

    /// Adds a grammar if calls are forced or must follow their schemas, and if the client's own constraint follows reasoning.
    fn force(&self, dialog: &Dialog, options: &mut Options) -> Result<(), ApiError> {
        let OutputRules { thought, calls, .. } = &options.rules.output;
        let thought = thought.as_ref().filter(|thought| thought.wanted);
        let answer = options.constraint.as_ref().map(|asked| lark::part(&asked.constraint.grammar));
        let calls = calls.as_ref().and_then(|calls| {
            let forced = match &dialog.tool_choice {
                ToolChoice::Required => Forced::Any,
                ToolChoice::Named(name) => Forced::Named(name),
                _ if answer.is_some() || dialog.tools.iter().any(|tool| tool.strict) => Forced::Nothing,
                _ => return None,
            };
            Some((calls, forced))
        });
        if calls.is_none() && (thought.is_none() || answer.is_none()) {
            return Ok(());
        }
        let rules = AnswerRules { tokenizer: &self.text().tokenizer, thought, calls, answer: answer.as_deref() };
        let mut hearing = self.hearing();
        let mut unavailable = None;
        let prepare = &mut |schema: &Value, parts: &[Vec<String>], strict| {
            if unavailable.is_some() {
                return Err(GrammarError::Invalid("it was not checked".into()));
            }
            hearing.parts(schema, parts, Terms { strict, ..Terms::default() }).map_err(|error| match error {
                AskError::Refused(error) => error,
                // This is not the schema's fault: no looser schema may replace it.
                AskError::Unavailable(error) => {
                    unavailable = Some(ApiError::grammar_unjudged(FORM_OF_CALLS, &error.to_string()));
                    GrammarError::Invalid("it was not checked".into())
                }
            })
        };
        let grammar = rules.lark(prepare);
        if let Some(error) = unavailable {
            return Err(error);
        }
        let grammar = grammar.map_err(|Refused { tool, error }| refused_tool(tool, &error))?;
        // The client's own constraint, if there is one, is part of the grammar.
        let param = options.constraint.as_ref().map_or(FORM_OF_CALLS, |asked| asked.param);
        options.constrain(RequestedGrammar { grammar: Grammar::Lark(grammar.into()), param }, self.text());
        Ok(())
    }

    /// Refuses a grammar that does not compile, or takes too much work, so that it fails before the request is accepted. Blocks for
    /// milliseconds, or a second at worst: see [`compute`](Self::compute).
    pub fn check_constraint(&self, options: &mut Options) -> Result<(), ApiError> {
        let Some(Constrained { constraint, param, has_passed }) = &mut options.constraint else { return Ok(()) };
        if constraint.end_tokens.is_empty() {
            let message = format!("`{param}`: this model names no end-of-sequence token, so its answer could not end");
            return Err(ApiError::invalid(*param, message));
        }
        self.hearing().grammar(&constraint.grammar).map_err(|error| unjudged(param, &error))?;
        *has_passed = true;
        Ok(())
    }

    /// Opens one request's questions to the helper that compiles grammars. They block.
    pub fn hearing(&self) -> Hearing<'_> {
        let models = &self.shared.models;
        let model = models.iter().position(|model| Arc::ptr_eq(model, &self.model)).expect("a gateway is turned to one of its models");
        let spent = self.caller.as_ref().map(|caller| &*caller.grammars_spent);
        self.shared.settings.grammars.hearing(self.tenant(), model, spent)
    }
}

fn refused_tool(tool: usize, error: &GrammarError) -> ApiError {
    let param = format!("tools[{tool}].function.parameters{}", error.path().unwrap_or_default());
    ApiError::invalid(&*param, format!("`{param}`: {error}"))
}
