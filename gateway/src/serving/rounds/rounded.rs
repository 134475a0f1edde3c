//! All rounds as one answer. What is said in each is passed on as it comes; calls wait for the end of their round, when it is known who runs
//! them. Those that run here are told of by themselves, each with what it returned.

use super::{Rounds, run};
use crate::{
    dialog::{Message, ToolCall},
    generation::piece::{CallDelta, Finish, FinishReason, Piece},
    metrics::usage::Usage,
    requests::error::ApiError,
    serving::{
        answer::{Answer, Delta, News, Ran},
        gateway::Gateway,
    },
};
use std::sync::Arc;

/// An answer, with all of its rounds if tools run here for it.
#[derive(Debug)]
pub struct Rounded {
    answer: Answer,
    steps: Option<Steps>,
}

#[derive(Debug)]
struct Steps {
    gateway: Arc<Gateway>,
    rounds: Rounds,
    /// In this round.
    said: Piece,
    /// Calls of the round that has ended, to be run.
    to_run: Vec<ToolCall>,
}

impl Rounded {
    /// `rounds` are for an answer of one choice.
    pub fn new(gateway: &Arc<Gateway>, answer: Answer, rounds: Option<Rounds>) -> Self {
        let steps = rounds.map(|rounds| Steps { gateway: Arc::clone(gateway), rounds, said: Piece::default(), to_run: Vec::new() });
        Self { answer, steps }
    }

    /// The answer of the round that runs.
    pub fn running(&mut self) -> &mut Answer {
        &mut self.answer
    }

    /// Totals so far; complete after the last delta.
    pub fn usage(&self) -> Usage {
        let running = self.answer.usage();
        self.steps.as_ref().map_or_else(|| running.clone(), |steps| steps.rounds.usage(running))
    }

    /// The next news of any choice; `None` after the last delta. Not to be called again once it was dropped before its end.
    pub async fn next(&mut self) -> Result<Option<News>, ApiError> {
        let Self { answer, steps } = self;
        let Some(steps) = steps else { return answer.next().await };
        loop {
            let delta = match answer.next().await? {
                Some(News::Delta(delta)) => steps.take(delta),
                None if !steps.to_run.is_empty() => steps.step(answer).await?,
                other => return Ok(other),
            };
            // A call is held back until its round has ended.
            if !delta.is_empty() {
                return Ok(Some(News::Delta(delta)));
            }
        }
    }

    /// The next delta of any choice; `None` after the last.
    pub async fn next_delta(&mut self) -> Result<Option<Delta>, ApiError> {
        loop {
            match self.next().await? {
                Some(News::Delta(delta)) => return Ok(Some(delta)),
                Some(News::Waiting(_)) => {}
                None => return Ok(None),
            }
        }
    }

    /// All that each choice gains, to the end.
    pub async fn whole(&mut self) -> Result<Vec<Delta>, ApiError> {
        let mut choices: Vec<_> = (0..self.answer.choices() as u32).map(|index| Delta { index, ..Delta::default() }).collect();
        while let Some(delta) = self.next_delta().await? {
            choices[delta.index as usize].append(delta);
        }
        Ok(choices)
    }
}

impl Steps {
    fn take(&mut self, mut delta: Delta) -> Delta {
        self.said.append(delta.piece.clone());
        delta.piece.calls.clear();
        if let Some(finish) = delta.piece.finish.take() {
            if finish.reason == FinishReason::ToolCalls {
                self.to_run = self.rounds.ours(self.said.calls.iter().map(called).collect());
            }
            if self.to_run.is_empty() {
                delta.piece.calls = std::mem::take(&mut self.said.calls);
                delta.piece.finish = Some(finish);
            }
        }
        delta
    }

    /// Runs what was called and asks the model again, if the answer may still grow.
    async fn step(&mut self, answer: &mut Answer) -> Result<Delta, ApiError> {
        let calls = std::mem::take(&mut self.to_run);
        let said = std::mem::take(&mut self.said);
        let Some(options) = self.rounds.room(answer.usage()) else {
            return Ok(Delta { piece: Piece { finish: Some(Finish::LENGTH), ..Piece::default() }, ..Delta::default() });
        };
        let outputs = run(&self.gateway, &calls).await?;
        let returned = calls.iter().zip(&outputs).map(|(call, output)| Message {
            role: "tool".into(),
            content: Some(output.clone()),
            name: Some(call.name.clone()),
            tool_call_id: Some(call.id.clone()),
            ..Message::default()
        });
        let spoken = |text: String| (!text.is_empty()).then_some(text);
        let turn = Message {
            role: "assistant".into(),
            content: spoken(said.text),
            reasoning: spoken(said.reasoning),
            tool_calls: calls.clone(),
            ..Message::default()
        };
        let messages = std::iter::once(turn).chain(returned).collect();
        self.rounds.ask(&self.gateway, options, messages, answer).await?;
        let ran = said.calls.into_iter().zip(outputs).map(|(call, output)| Ran {
            id: call.id.unwrap_or_default(),
            name: call.name.unwrap_or_default(),
            arguments: call.arguments,
            output,
        });
        Ok(Delta { ran: ran.collect(), ..Delta::default() })
    }
}

fn called(call: &CallDelta) -> ToolCall {
    ToolCall::new(call.id.clone().unwrap_or_default(), call.name.clone().unwrap_or_default(), &call.arguments)
}
