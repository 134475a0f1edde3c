//! The last placements: the choices that were compared, their predictions and their outcome. Shown to operators in `/cluster`.

use crate::{
    ClusterSettings,
    membership::Membership,
    requests::{ChoiceId, Request},
    schedule::{Considered, Placement},
};
use serde::Serialize;
use std::{collections::VecDeque, time::Duration};
use tidemill_proto::ids::{Epoch, SequenceId};

const KEPT_MAX: usize = 64;

#[derive(Debug, Default)]
pub(crate) struct Decisions(VecDeque<Record>);

#[derive(Debug)]
struct Record {
    sequence: SequenceId,
    at: Duration,
    request: String,
    choice: u32,
    class: String,
    policy: &'static str,
    prompt_tokens: u32,
    /// Leading tokens that pool nodes hold.
    read_tokens: u32,
    waited_ms: f64,
    chosen: Considered,
    others: Vec<Considered>,
    ttft_ms: Option<f64>,
    tpot_ms: Option<f64>,
    tokens: u32,
    outcome: Option<&'static str>,
}

/// A placement as `/cluster` shows it. Times are milliseconds.
#[derive(Debug, Serialize)]
pub struct DecisionView {
    pub age_ms: f64,
    /// The requested model.
    pub model: String,
    pub request: String,
    pub choice: u32,
    pub class: String,
    pub policy: &'static str,
    pub prompt_tokens: u32,
    /// The number of these tokens that pool nodes held.
    pub read_tokens: u32,
    /// Time in the coordinator's queue.
    pub waited_ms: f64,
    pub chosen: ConsideredView,
    /// The best of the other choices.
    pub others: Vec<ConsideredView>,
    /// Time from the request's arrival, queueing included; `None` before the first token.
    pub ttft_ms: Option<f64>,
    /// `None` until the sequence has ended, and for one of a single token.
    pub tpot_ms: Option<f64>,
    pub tokens: u32,
    /// `stop`, `length`, `failed`, or `left` if its client or a stop string ended it; `None` until it has ended.
    pub outcome: Option<&'static str>,
}

#[derive(Debug, Serialize)]
pub struct ConsideredView {
    /// The worker's name, or its epoch if it is gone.
    pub decode: String,
    pub prefill: Option<String>,
    /// Time from the decision on.
    pub predicted_ttft_ms: f64,
    pub predicted_tpot_ms: f64,
    /// The probability that the limits are kept.
    pub chance: f64,
    /// The loss of other requests, in requests of weight 1.
    pub harm: f64,
}

impl Decisions {
    pub(crate) fn push(
        &mut self,
        now: Duration,
        at: ChoiceId,
        sequence: SequenceId,
        request: &Request,
        settings: &ClusterSettings,
        placement: &Placement,
    ) {
        let itself = Considered {
            decode: placement.decode,
            prefill: placement.prefill,
            ttft_ms: placement.ttft_ms,
            tpot_ms: placement.tpot_ms,
            chance: placement.chance,
            harm: 0.0,
        };
        let mut considered = placement.considered.iter().copied();
        let chosen = considered.next().unwrap_or(itself);
        if self.0.len() == KEPT_MAX {
            self.0.pop_front();
        }
        self.0.push_back(Record {
            sequence,
            at: now,
            request: at.0.to_string(),
            choice: at.1 as u32,
            class: settings.classes.get(request.new.class).name.clone(),
            policy: settings.policy.name.name(),
            prompt_tokens: request.len_of(at.1),
            read_tokens: placement.read.iter().map(|run| run.blocks).sum::<u32>() * tidemill_proto::block::BLOCK_TOKENS as u32,
            waited_ms: now.saturating_sub(request.submitted).as_secs_f64() * 1e3,
            chosen,
            others: considered.collect(),
            ttft_ms: None,
            tpot_ms: None,
            tokens: 0,
            outcome: None,
        });
    }

    pub(crate) fn first_token(&mut self, sequence: SequenceId, ttft: Duration) {
        if let Some(record) = self.last_of(sequence) {
            record.ttft_ms = Some(ttft.as_secs_f64() * 1e3);
        }
    }

    pub(crate) fn end(&mut self, sequence: SequenceId, outcome: &'static str, tokens: u32, tpot_ms: Option<f64>) {
        if let Some(record) = self.last_of(sequence) {
            record.outcome = Some(outcome);
            (record.tokens, record.tpot_ms) = (tokens, tpot_ms);
        }
    }

    /// The newest record of a sequence, which has several if it was moved.
    fn last_of(&mut self, sequence: SequenceId) -> Option<&mut Record> {
        self.0.iter_mut().rev().find(|record| record.sequence == sequence)
    }

    /// The decisions, the newest first.
    pub(crate) fn view(&self, now: Duration, membership: &Membership) -> Vec<DecisionView> {
        let name = |epoch: Epoch| membership.get(epoch).map_or_else(|| epoch.to_string(), |member| member.name.clone());
        let considered = |considered: &Considered| ConsideredView {
            decode: name(considered.decode),
            prefill: considered.prefill.map(name),
            predicted_ttft_ms: considered.ttft_ms,
            predicted_tpot_ms: considered.tpot_ms,
            chance: considered.chance,
            harm: considered.harm,
        };
        let view = |record: &Record| DecisionView {
            age_ms: now.saturating_sub(record.at).as_secs_f64() * 1e3,
            model: String::new(),
            request: record.request.clone(),
            choice: record.choice,
            class: record.class.clone(),
            policy: record.policy,
            prompt_tokens: record.prompt_tokens,
            read_tokens: record.read_tokens,
            waited_ms: record.waited_ms,
            chosen: considered(&record.chosen),
            others: record.others.iter().map(considered).collect(),
            ttft_ms: record.ttft_ms,
            tpot_ms: record.tpot_ms,
            tokens: record.tokens,
            outcome: record.outcome,
        };
        self.0.iter().rev().map(view).collect()
    }
}
