//! All rounds as one answer. Each round's text is passed on as it arrives. Calls wait for the end of their round, when it is known whether
//! they run on the server, unless the client is [shown them](Rounded::showing_calls). Calls that run on the server are passed on together
//! with their outputs, before the model is asked again.

use super::{Rounds, run};
use crate::{
    dialog::{Message, ToolCall},
    generation::piece::{CallDelta, Finish, FinishReason, Piece},
    metrics::usage::Usage,
    requests::{error::ApiError, options::Options},
    serving::{
        answer::{Answer, Delta, News, Ran},
        gateway::Gateway,
    },
};
use std::sync::Arc;

/// An answer, with all its rounds if tools run on the server for it.
#[derive(Debug)]
pub struct Rounded {
    answer: Answer,
    steps: Option<Steps>,
}

#[derive(Debug)]
struct Steps {
    gateway: Arc<Gateway>,
    rounds: Rounds,
    /// Whether the client sees calls as they arrive, and each round's end.
    shows_calls: bool,
    /// The model's output in this round.
    said: Piece,
    then: Then,
}

/// The step after the end of a round's answer.
#[derive(Debug, Default)]
enum Then {
    #[default]
    Nothing,
    /// Run these calls.
    Run(Vec<ToolCall>),
    /// Start the next round, with the messages since the model was asked last.
    Ask(Box<Options>, Vec<Message>),
}

/// The tokens used so far.
#[derive(Clone, Debug)]
pub struct Spent {
    pub total: Usage,
    /// The tokens of the running round.
    pub round: Usage,
}

impl Rounded {
    /// Makes one answer of all rounds. `rounds` require an answer of one choice.
    pub fn new(gateway: &Arc<Gateway>, answer: Answer, rounds: Option<Rounds>) -> Self {
        let steps =
            |rounds| Steps { gateway: Arc::clone(gateway), rounds, shows_calls: false, said: Piece::default(), then: Then::Nothing };
        Self { answer, steps: rounds.map(steps) }
    }

    /// Passes all calls on as they arrive, and each round's end.
    pub fn showing_calls(mut self) -> Self {
        self.steps.iter_mut().for_each(|steps| steps.shows_calls = true);
        self
    }

    /// The answer of the running round.
    pub fn running(&mut self) -> &mut Answer {
        &mut self.answer
    }

    /// The tokens used so far; complete after the last delta.
    pub fn spent(&self) -> Spent {
        let round = self.answer.usage().clone();
        Spent { total: self.steps.as_ref().map_or_else(|| round.clone(), |steps| steps.rounds.usage(&round)), round }
    }

    /// Returns the next event of any choice; `None` after the last delta. Not cancel safe: it must not be called again after it was
    /// dropped.
    pub async fn next(&mut self) -> Result<Option<News>, ApiError> {
        let Self { answer, steps } = self;
        let Some(steps) = steps else { return answer.next().await };
        loop {
            let delta = match answer.next().await? {
                Some(News::Delta(delta)) => steps.take(delta),
                Some(waiting) => return Ok(Some(waiting)),
                None => match std::mem::take(&mut steps.then) {
                    Then::Nothing => return Ok(None),
                    Then::Run(calls) => steps.run(&calls, answer.usage()).await?,
                    Then::Ask(options, said) => {
                        steps.rounds.ask(&steps.gateway, *options, said, answer).await?;
                        continue;
                    }
                },
            };
            // A call is held back until its round has ended.
            if !delta.is_empty() {
                return Ok(Some(News::Delta(delta)));
            }
        }
    }
}

impl Steps {
    fn take(&mut self, mut delta: Delta) -> Delta {
        self.said.append(delta.piece.clone());
        if !self.shows_calls {
            delta.piece.calls.clear();
        }
        let Some(finish) = &delta.piece.finish else { return delta };
        let calls = match finish.reason {
            FinishReason::ToolCalls => self.rounds.ours(self.said.calls.iter().map(called).collect()),
            _ => Vec::new(),
        };
        match (calls.is_empty(), self.shows_calls) {
            (true, true) => {}
            (true, false) => delta.piece.calls = std::mem::take(&mut self.said.calls),
            (false, true) => self.then = Then::Run(calls),
            (false, false) => {
                self.then = Then::Run(calls);
                delta.piece.finish = None;
            }
        }
        delta
    }

    /// Runs a round's calls, if the answer may still grow. `usage` is the round's.
    async fn run(&mut self, calls: &[ToolCall], usage: &Usage) -> Result<Delta, ApiError> {
        let said = std::mem::take(&mut self.said);
        let Some(options) = self.rounds.room(usage) else {
            return Ok(Delta { piece: Piece { finish: Some(Finish::LENGTH), ..Piece::default() }, ..Delta::default() });
        };
        let outputs = run(&self.gateway, calls).await?;
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
            tool_calls: calls.to_vec(),
            ..Message::default()
        };
        self.then = Then::Ask(Box::new(options), std::iter::once(turn).chain(returned).collect());
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
