//! An answer's calls of tools that run here. The model is asked again with what they returned, a bounded number of times; a client sees
//! each call and what came of it as items of the one response.

use super::{
    items::{self, Said},
    output::Output,
};
use crate::{
    dialog::{Dialog, ToolCall, ToolChoice},
    gateway::{Gateway, RunningDialog},
    http::{answer::Answer, errors::ApiError, openai::Usage, parse::Options},
};
use futures_util::future::join_all;
use std::sync::Arc;

/// Calls of one round that run; the model is told of the others that they did not.
const CALLS_MAX: usize = 16;

/// What the next round needs.
#[derive(Debug)]
pub(super) struct Rounds {
    /// Names of the tools that run here.
    names: Vec<String>,
    dialog: Dialog,
    options: Options,
    number: u32,
    max: u32,
    /// Where this round's items begin.
    first_item: usize,
    /// What it said, and those of its calls that wait to be run.
    said: Vec<Said>,
    calls: Vec<ToolCall>,
    /// Of the rounds before.
    spent: Usage,
}

impl Rounds {
    /// `None`: nothing runs here for this response. A shadow's calls are never run: they have run for the answer that it shadows.
    pub(super) fn new(gateway: &Gateway, names: Vec<String>, dialog: &Dialog, options: &Options) -> Option<Self> {
        let tools = gateway.server_tools().filter(|_| !names.is_empty() && !gateway.is_shadow())?;
        Some(Self {
            names,
            dialog: dialog.clone(),
            options: options.clone(),
            number: 1,
            max: tools.rounds_max,
            first_item: 0,
            said: Vec::new(),
            calls: Vec::new(),
            spent: Usage::default(),
        })
    }

    /// The model has called, and waits. Whether there is something to run, and so another round.
    pub(super) fn take_calls(&mut self, output: &mut Output, usage: &Usage) -> Result<bool, ApiError> {
        let items = output.end_round(self.first_item, usage);
        let mut said = Vec::with_capacity(items.len());
        for item in items {
            said.push(items::recall(item)?.1);
        }
        self.first_item += said.len();
        let calls = said.iter().filter_map(|said| if let Said::Call(call) = said { Some(call.clone()) } else { None });
        let (ours, theirs): (Vec<_>, Vec<_>) = calls.partition(|call| self.names.contains(&call.name));
        // Where a client has to answer, too, it answers to all of it.
        self.said = said;
        self.calls = if theirs.is_empty() && self.number < self.max { ours } else { Vec::new() };
        Ok(!self.calls.is_empty())
    }

    pub(super) fn has_calls(&self) -> bool {
        !self.calls.is_empty()
    }

    /// Runs the calls, and asks the model again. `None`: there is no room for more of the answer.
    pub(super) async fn next(&mut self, gateway: &Arc<Gateway>, output: &mut Output, usage: &Usage) -> Result<Option<Answer>, ApiError> {
        let spent = self.usage(usage);
        let mut options = self.options.clone();
        if let Some(max_tokens) = options.max_tokens {
            let left = u64::from(max_tokens).saturating_sub(spent.completion_tokens);
            if left == 0 {
                return Ok(None);
            }
            options.max_tokens = Some(left as u32);
        }
        let tools = gateway.server_tools().ok_or_else(|| ApiError::internal("the tools are gone: please report this as a bug"))?;
        let calls = std::mem::take(&mut self.calls);
        let run = calls.iter().enumerate().map(|(place, call)| async move {
            match place {
                ..CALLS_MAX => tools.call(&call.name, call.arguments.clone()).await,
                _ => format!("error: at most {CALLS_MAX} calls run at a time"),
            }
        });
        let mut said = std::mem::take(&mut self.said);
        for (call, text) in calls.iter().zip(join_all(run).await) {
            let returned = Said::Returned { call_id: call.id.clone(), text: text.clone() };
            output.returned(&call.id, &text, returned.tokens(&gateway.text().tokenizer));
            said.push(returned);
        }
        self.dialog.messages.extend(items::turns(said));
        self.first_item = output.items().len();
        self.number += 1;
        // Who was made to call has called; and in the end the model has to answer.
        self.dialog.tool_choice = if self.number == self.max { ToolChoice::None } else { ToolChoice::Auto };
        let round = gateway.for_round(self.number);
        let RunningDialog { answer, .. } = round.start_dialog("input", self.dialog.clone(), options).await?;
        self.spent = spent;
        Ok(Some(answer))
    }

    /// Of all rounds together, the one that runs included.
    pub(super) fn usage(&self, running: &Usage) -> Usage {
        let mut usage = self.spent.clone();
        usage.add(running);
        usage
    }

    /// Items before the round that runs: they were counted.
    pub(super) fn counted(&self) -> usize {
        self.first_item
    }
}
