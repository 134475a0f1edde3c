//! A response's rounds: a client sees each call and what came of it as items of the one response.

use super::output::Output;
use crate::{
    dialog::{Dialog, ToolCall},
    metrics::usage::Usage,
    requests::{
        error::ApiError,
        items::{self, Said},
        options::Options,
    },
    serving::{
        answer::Answer,
        gateway::Gateway,
        rounds::{self, Rounds},
    },
};

#[derive(Debug)]
pub(super) struct ItemRounds {
    rounds: Rounds,
    /// Where this round's items begin.
    first_item: usize,
    /// What it said, and those of its calls that wait to be run.
    said: Vec<Said>,
    calls: Vec<ToolCall>,
}

impl ItemRounds {
    /// `None`: nothing runs here for this response.
    pub(super) fn new(gateway: &Gateway, names: Vec<String>, dialog: &Dialog, options: &Options) -> Option<Self> {
        let rounds = Rounds::new(gateway, "input", names, dialog, options)?;
        Some(Self { rounds, first_item: 0, said: Vec::new(), calls: Vec::new() })
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
        self.calls = self.rounds.ours(calls.collect());
        self.said = said;
        Ok(!self.calls.is_empty())
    }

    pub(super) fn has_calls(&self) -> bool {
        !self.calls.is_empty()
    }

    /// Runs the calls, and asks the model again. `false`: there is no room for more of the answer.
    pub(super) async fn next(&mut self, gateway: &Gateway, output: &mut Output, answer: &mut Answer) -> Result<bool, ApiError> {
        let Some(options) = self.rounds.room(answer.usage()) else { return Ok(false) };
        let calls = std::mem::take(&mut self.calls);
        let mut said = std::mem::take(&mut self.said);
        for (call, text) in calls.iter().zip(rounds::run(gateway, &calls).await?) {
            let returned = Said::Returned { call_id: call.id.clone(), text: text.clone() };
            output.returned(&call.id, &text, returned.tokens(&gateway.text().tokenizer));
            said.push(returned);
        }
        self.first_item = output.items().len();
        self.rounds.ask(gateway, options, items::turns(said), answer).await?;
        Ok(true)
    }

    /// Of all rounds together, the one that runs included.
    pub(super) fn usage(&self, running: &Usage) -> Usage {
        self.rounds.usage(running)
    }

    /// Items before the round that runs: they were counted.
    pub(super) fn counted(&self) -> usize {
        self.first_item
    }
}
