//! The settings of feed-forward layers of experts.

use super::{Columns, RawConfig, SIZE_MAX};
use crate::family::{ExpertRule, Flag, GroupRank, GroupRule, Scores, SharedWidth};
use serde::{Serialize, Serializer};
use serde_json::Value;
use std::fmt::Debug;

/// Feed-forward layers of experts.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct ExpertConfig {
    pub(crate) count: usize,
    /// The number of experts per row.
    pub(crate) chosen: usize,
    pub(crate) intermediate: usize,
    pub(crate) is_normalized: bool,
    /// Layers without experts, ascending.
    pub(crate) dense_layers: Vec<usize>,
    #[serde(skip_serializing_if = "is_softmax", serialize_with = "as_debug")]
    pub(crate) scores: Scores,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) groups: Option<ExpertGroups>,
    /// The factor of the chosen experts' scores; 1 if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) factor: Option<f32>,
    /// The width of the expert that every row goes through, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) shared: Option<usize>,
}

/// Groups of consecutive experts, all of the same size. A row's experts come from its best groups.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct ExpertGroups {
    pub(crate) count: usize,
    pub(crate) chosen: usize,
    #[serde(skip_serializing_if = "is_two_best", serialize_with = "as_debug")]
    pub(crate) rank: GroupRank,
}

const EXPERTS_MAX: usize = 1 << 12;

impl Columns<'_> {
    pub(super) fn experts(&self, rule: Option<&ExpertRule>, raw: &RawConfig) -> Result<Option<ExpertConfig>, String> {
        let Some(rule) = rule else { return Ok(None) };
        self.must_be("scoring_func", if rule.scores == Scores::Sigmoid { "sigmoid" } else { "softmax" })?;
        if rule.is_normalized == Flag::Never && self.fields.get("norm_topk_prob") == Some(&Value::Bool(true)) {
            return Err("norm_topk_prob true is not supported for this architecture".into());
        }
        let [usual, other] = rule.count;
        let count = self.count(if self.fields.contains_key(other) { other } else { usual }, EXPERTS_MAX)?;
        let chosen = self.count(rule.chosen, count)?;
        let intermediate = self.count(rule.intermediate, SIZE_MAX)?;
        let shared = match rule.shared.map(|shared| shared.width) {
            None => None,
            Some(SharedWidth::Key(key)) => Some(self.count(key, SIZE_MAX)?),
            Some(SharedWidth::TimesKey(key)) if self.fields.get(key).is_none_or(|n| n.is_null() || *n == 0) => None,
            Some(SharedWidth::TimesKey(key)) => Some(self.count(key, EXPERTS_MAX)? * intermediate),
        };
        let step = raw.decoder_sparse_step.unwrap_or(1);
        let listed = raw.mlp_only_layers.as_deref().unwrap_or_default();
        let leading = raw.first_k_dense_replace.unwrap_or(0);
        let is_dense = |layer: &usize| *layer < leading || listed.contains(layer) || step == 0 || !(layer + 1).is_multiple_of(step);
        Ok(Some(ExpertConfig {
            count,
            chosen,
            intermediate,
            is_normalized: self.flag(rule.is_normalized)?,
            dense_layers: (0..raw.num_hidden_layers).filter(is_dense).collect(),
            scores: rule.scores,
            groups: rule.groups.map(|groups| self.groups(groups, count, chosen)).transpose()?.flatten(),
            factor: self.factor(rule.factor)?.filter(|factor| *factor != 1.0),
            shared,
        }))
    }

    /// The groups of experts; `None` if they make no difference.
    fn groups(&self, rule: GroupRule, experts: usize, chosen_experts: usize) -> Result<Option<ExpertGroups>, String> {
        if rule.without.is_some_and(|method| self.fields.get("topk_method").is_some_and(|value| value == method)) {
            return Ok(None);
        }
        self.must_be("topk_method", rule.method)?;
        let [count_key, chosen_key] = rule.keys;
        let count = self.count(count_key, experts)?;
        let chosen = self.count(chosen_key, count)?;
        if chosen == count {
            return Ok(None);
        }
        let size = experts / count;
        if !experts.is_multiple_of(count) || size < 2 {
            return Err(format!("{count_key} {count} does not part {experts} experts into groups of as many, two or more"));
        }
        match size * chosen < chosen_experts {
            true => Err(format!("{chosen_key} {chosen} leaves fewer experts than the {chosen_experts} that a row has")),
            false => Ok(Some(ExpertGroups { count, chosen, rank: rule.rank })),
        }
    }

    fn count(&self, key: &str, max: usize) -> Result<usize, String> {
        match self.fields.get(key).and_then(Value::as_u64) {
            Some(n) if (1..=max as u64).contains(&n) => Ok(n as usize),
            _ => Err(format!("{key} is {}, which is not within 1..={max}", self.fields.get(key).unwrap_or(&Value::Null))),
        }
    }

    /// Checks a setting that has one supported value, which is also its default.
    fn must_be(&self, key: &str, supported: &str) -> Result<(), String> {
        match self.fields.get(key) {
            None | Some(Value::Null) => Ok(()),
            Some(value) if value == supported => Ok(()),
            Some(value) => Err(format!("{key} {value} is not supported for this architecture; supported is {supported:?}")),
        }
    }
}

fn is_softmax(scores: &Scores) -> bool {
    *scores == Scores::Softmax
}

fn is_two_best(rank: &GroupRank) -> bool {
    *rank == GroupRank::TwoBest
}

fn as_debug<S: Serializer>(choice: &impl Debug, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_str(&format!("{choice:?}"))
}
