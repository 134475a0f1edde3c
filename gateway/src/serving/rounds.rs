//! Tools that run on the server, in any protocol: a model that called some is asked again with their outputs, a bounded number of times.
//!
//! - [`Rounds`]: the calls that run, and the next round
//! - [`rounded`]: all rounds as one answer of one choice

pub mod rounded;

use super::answer::Answer;
use crate::{
    dialog::{Dialog, Message, ToolCall, ToolChoice},
    features::server_tools::{NotOffered, ServerTools, permission::Asker},
    metrics::usage::Usage,
    requests::{error::ApiError, options::Options},
    serving::gateway::{Gateway, start::Start},
    text::tool::Tool,
};
use futures_util::future::join_all;
use std::sync::Arc;

/// The maximum number of calls of one round that run; each further one gets an error.
const CALLS_MAX: usize = 16;

/// The state from which the next round starts.
#[derive(Debug)]
pub struct Rounds {
    /// The field with the messages, for errors.
    param: &'static str,
    /// Names of the tools that run on the server.
    names: Vec<String>,
    dialog: Dialog,
    options: Options,
    number: u32,
    max: u32,
    /// Usage of the earlier rounds.
    spent: Usage,
}

/// Returns the tools that run on the server, as the model sees them.
pub fn offered(gateway: &Gateway, names: &[String]) -> Result<Vec<Tool>, ApiError> {
    if names.is_empty() {
        return Ok(Vec::new());
    }
    let tools = gateway.server_tools().ok_or_else(|| ApiError::invalid("server_tools", "this server runs no tools"))?;
    let asker = Asker { tenant: gateway.tenant(), tier: gateway.tier() };
    tools.offered(&asker, names).map_err(|reason| match reason {
        NotOffered::Unknown { .. } => ApiError::invalid("server_tools", reason.to_string()),
        NotOffered::NotYet(_) => ApiError::no_tools_yet(reason.to_string()),
    })
}

impl Rounds {
    /// Prepares further rounds; `None` if no tools run for this answer. A shadow's calls never run: they have run for the original. `names`
    /// are those that the model knows, `options` those of the client.
    pub fn new(gateway: &Gateway, param: &'static str, names: Vec<String>, dialog: &Dialog, options: &Options) -> Option<Self> {
        let tools = gateway.server_tools().filter(|_| !names.is_empty() && !gateway.is_shadow())?;
        let (dialog, options) = (dialog.clone(), options.clone());
        Some(Self { param, names, dialog, options, number: 1, max: tools.rounds_max, spent: Usage::default() })
    }

    /// Selects the calls of a round that run on the server: none after the last round, and none if the client has to answer one of them,
    /// because then it answers all.
    pub fn ours(&self, calls: Vec<ToolCall>) -> Vec<ToolCall> {
        let all_ours = calls.iter().all(|call| self.names.contains(&call.name));
        if all_ours && self.number < self.max { calls } else { Vec::new() }
    }

    /// Returns the options of the next round; `None` if there is no room for more of the answer. `running` is the usage of the round that
    /// has ended.
    pub fn room(&self, running: &Usage) -> Option<Options> {
        let mut options = self.options.clone();
        if let Some(max_tokens) = options.max_tokens {
            let left = u64::from(max_tokens).saturating_sub(self.usage(running).completion_tokens);
            options.max_tokens = Some(u32::try_from(left).ok().filter(|left| *left > 0)?);
        }
        Some(options)
    }

    /// Asks the model again. `said` has the messages since it was asked last. The new answer replaces `running`.
    pub async fn ask(&mut self, gateway: &Gateway, options: Options, said: Vec<Message>, running: &mut Answer) -> Result<(), ApiError> {
        self.dialog.messages.extend(said);
        self.number += 1;
        // After a forced call, the choice returns to `auto`; in the last round the model has to answer.
        self.dialog.tool_choice = if self.number == self.max { ToolChoice::None } else { ToolChoice::Auto };
        self.dialog.reasoning.spent = self.usage(running.usage()).completion_tokens_details.reasoning_tokens;
        let round = gateway.for_round(self.number);
        let mut answer = round.start_dialog(self.dialog.clone(), options, Start::of(self.param)).await?;
        self.spent = self.usage(running.usage());
        answer.go_on_from(running);
        *running = answer;
        Ok(())
    }

    /// Usage of all rounds together, including the running one.
    pub fn usage(&self, running: &Usage) -> Usage {
        let mut usage = self.spent.clone();
        usage.add(running);
        usage
    }
}

/// Runs a round's calls, and returns their outputs.
pub async fn run(gateway: &Gateway, calls: &[ToolCall]) -> Result<Vec<String>, ApiError> {
    let tools = gateway.server_tools().ok_or_else(|| ApiError::internal("the tools are gone: please report this as a bug"))?;
    Ok(join_all(calls.iter().enumerate().map(|(place, call)| run_one(tools, gateway.tenant(), place, call))).await)
}

async fn run_one(tools: &Arc<ServerTools>, tenant: Option<&str>, place: usize, call: &ToolCall) -> String {
    match place {
        ..CALLS_MAX => tools.call(tenant, &call.name, call.arguments.clone()).await,
        _ => format!("error: at most {CALLS_MAX} calls run at a time"),
    }
}
