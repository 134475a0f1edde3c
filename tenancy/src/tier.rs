//! Tiers: service levels that tenants are sold. Tiers are data, so that an operator can define others.

use crate::limits::{Limits, Overrides};
use std::{collections::BTreeMap, sync::Arc};

#[derive(Clone, Debug, PartialEq)]
pub struct Tier {
    pub name: String,
    pub limits: Limits,
    /// Limits by model, in addition to the others, for each tenant of the tier.
    pub models: BTreeMap<String, Limits>,
    /// The `service_tier` of requests that ask for none, or for one that the tier lacks.
    pub class: String,
    /// The service classes that the tier has, `class` among them.
    pub classes: Vec<String>,
    /// The order in load shedding: tiers with 1 are shed first, then those with 2, and those with 0 never.
    pub shed: u8,
    /// The maximum length of an answer whose length the client leaves open, if tokens are limited: that many have to be reserved.
    pub answer_tokens: u32,
}

/// More than most answers have, and few enough that a minute of a free tenant's requests fits its tokens.
pub const ANSWER_TOKENS: u32 = 4096;

impl Tier {
    /// Whether this tier is shed first. Its keys cost nothing, so that one person may have any number of them.
    pub fn is_shed_first(&self) -> bool {
        self.shed == 1
    }
}

/// All tiers; always includes the three built-in ones.
#[derive(Clone, Debug, PartialEq)]
pub struct Tiers(BTreeMap<String, Arc<Tier>>);

impl Default for Tiers {
    fn default() -> Self {
        let tier = |name: &str, requests: Option<u64>, tokens: Option<u64>, classes: &[&str], shed| Tier {
            name: name.into(),
            limits: Limits { requests_per_minute: requests, tokens_per_minute: tokens, ..Limits::default() },
            models: BTreeMap::new(),
            class: classes[0].into(),
            classes: classes.iter().map(|class| (*class).to_owned()).collect(),
            shed,
            answer_tokens: ANSWER_TOKENS,
        };
        let tiers = [
            tier("free", Some(20), Some(100_000), &["flex"], 1),
            tier("paid", Some(300), Some(2_000_000), &["default", "flex"], 2),
            tier("premium", None, None, &["priority", "default", "flex"], 0),
        ];
        Self(tiers.into_iter().map(|tier| (tier.name.clone(), Arc::new(tier))).collect())
    }
}

impl Tiers {
    pub fn get(&self, name: &str) -> Option<&Arc<Tier>> {
        self.0.get(name)
    }

    /// Adds a tier, or replaces the one of the same name.
    pub fn put(&mut self, tier: Tier) {
        self.0.insert(tier.name.clone(), Arc::new(tier));
    }

    pub fn iter(&self) -> impl Iterator<Item = &Tier> {
        self.0.values().map(|tier| &**tier)
    }

    /// The names in messages: `free`, `paid`, …
    pub fn names(&self) -> String {
        self.0.keys().map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ")
    }
}

impl Tier {
    /// The service tier of a request that asks for `asked`: one that the tier lacks becomes the tier's own.
    pub fn service_tier<'a>(&'a self, asked: Option<&'a str>) -> &'a str {
        asked.filter(|asked| self.classes.iter().any(|class| class == asked)).unwrap_or(&self.class)
    }

    /// The limits of a tenant with `overrides`.
    pub fn limits(&self, overrides: &Overrides) -> Limits {
        overrides.over(self.limits)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_has_the_classes_that_it_pays_for() {
        let tiers = Tiers::default();
        for (tier, asked, gets) in [
            ("free", None, "flex"),
            ("free", Some("priority"), "flex"),
            ("paid", Some("auto"), "default"),
            ("paid", Some("flex"), "flex"),
            ("premium", None, "priority"),
            ("premium", Some("default"), "default"),
        ] {
            assert_eq!(tiers.get(tier).unwrap().service_tier(asked), gets, "{tier} {asked:?}");
        }
    }
}
