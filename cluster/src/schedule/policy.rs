//! The policies by name, and the operator's other choices.

use super::{
    Decision, Placement, colocated, disaggregated, global_cache, goodput, least_ttft, load_balancing, local_cache, plan::Planner, random,
};
use std::{fmt, str::FromStr};

/// The operator's choices.
#[derive(Clone, Debug, Default)]
pub struct Policy {
    pub name: PolicyName,
    /// The longest missing suffix, in tokens, that the decode worker computes itself; `None` to decide by predicted time. Used by `goodput`
    /// and `least_ttft`.
    pub local_tail_tokens: Option<u32>,
    /// The maximum number of sequences given to one decode worker at a time; `None` for as many as it asks for.
    pub decode_sequences_max: Option<u32>,
    /// The number of network reads from which a block gets a copy at the reader's near node; `None` for no copies.
    pub replicate_after: Option<u8>,
}

/// The name of a policy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum PolicyName {
    #[default]
    Goodput,
    LeastTtft,
    Random,
    LoadBalancing,
    LocalCache,
    GlobalCache,
    Colocated,
    Disaggregated,
}

#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
#[error("there is no policy `{0}`: choose one of {names}", names = PolicyName::ALL.map(PolicyName::name).join(", "))]
pub struct UnknownPolicy(String);

impl PolicyName {
    pub const ALL: [PolicyName; 8] = [
        PolicyName::Goodput,
        PolicyName::LeastTtft,
        PolicyName::Random,
        PolicyName::LoadBalancing,
        PolicyName::LocalCache,
        PolicyName::GlobalCache,
        PolicyName::Colocated,
        PolicyName::Disaggregated,
    ];

    pub fn name(self) -> &'static str {
        match self {
            PolicyName::Goodput => "goodput",
            PolicyName::LeastTtft => "least_ttft",
            PolicyName::Random => "random",
            PolicyName::LoadBalancing => "load_balancing",
            PolicyName::LocalCache => "local_cache",
            PolicyName::GlobalCache => "global_cache",
            PolicyName::Colocated => "colocated",
            PolicyName::Disaggregated => "disaggregated",
        }
    }

    /// Whether the policy compares all workers, as baselines do; the others compare a shortlist.
    pub fn compares_all(self) -> bool {
        !matches!(self, PolicyName::Goodput | PolicyName::LeastTtft)
    }

    pub(super) fn decide(self, planner: &Planner<'_>) -> Decision {
        let served_with_room = |placement: Option<Placement>| placement.map_or(Decision::Queue, Decision::Place);
        match self {
            PolicyName::Goodput => goodput::decide(planner),
            PolicyName::LeastTtft => served_with_room(least_ttft::choose(planner)),
            PolicyName::Random => served_with_room(random::choose(planner)),
            PolicyName::LoadBalancing => served_with_room(load_balancing::choose(planner)),
            PolicyName::LocalCache => served_with_room(local_cache::choose(planner)),
            PolicyName::GlobalCache => served_with_room(global_cache::choose(planner)),
            PolicyName::Colocated => served_with_room(colocated::choose(planner)),
            PolicyName::Disaggregated => served_with_room(disaggregated::choose(planner)),
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for PolicyName {
    type Err = UnknownPolicy;

    fn from_str(name: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL.into_iter().find(|policy| policy.name() == name).ok_or_else(|| UnknownPolicy(name.to_owned()))
    }
}
