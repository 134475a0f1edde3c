//! Kinds of harm, and the thresholds of their scores.

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Category {
    Harassment,
    Hate,
    /// Weapons, drugs, break-ins: instructions for doing harm.
    Dangerous,
    Sexual,
    SelfHarm,
    /// Sexual content about children. Its check cannot be turned off.
    Csam,
    /// A text that gives the model orders in its operator's place.
    Injection,
}

impl Category {
    pub const ALL: [Self; 7] = [Self::Harassment, Self::Hate, Self::Dangerous, Self::Sexual, Self::SelfHarm, Self::Csam, Self::Injection];

    pub fn name(self) -> &'static str {
        match self {
            Self::Harassment => "harassment",
            Self::Hate => "hate",
            Self::Dangerous => "dangerous",
            Self::Sexual => "sexual",
            Self::SelfHarm => "self_harm",
            Self::Csam => "csam",
            Self::Injection => "injection",
        }
    }
}

impl fmt::Display for Category {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// An unknown category or threshold.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{given}` is not one of {known}")]
pub struct Unknown {
    given: String,
    known: String,
}

fn unknown(given: &str, known: impl Iterator<Item = &'static str>) -> Unknown {
    Unknown { given: given.into(), known: known.map(|name| format!("`{name}`")).collect::<Vec<_>>().join(", ") }
}

impl FromStr for Category {
    type Err = Unknown;

    fn from_str(name: &str) -> Result<Self, Unknown> {
        let found = Self::ALL.into_iter().find(|category| category.name() == name);
        found.ok_or_else(|| unknown(name, Self::ALL.into_iter().map(Self::name)))
    }
}

/// The score from which a category counts as a violation, from the strictest to the laxest.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Threshold {
    Low,
    Medium,
    High,
    Off,
}

impl Threshold {
    const ALL: [Self; 4] = [Self::Low, Self::Medium, Self::High, Self::Off];

    /// The name in Gemini's API.
    pub fn name(self) -> &'static str {
        match self {
            Self::Low => "BLOCK_LOW_AND_ABOVE",
            Self::Medium => "BLOCK_MEDIUM_AND_ABOVE",
            Self::High => "BLOCK_HIGH_AND_ABOVE",
            Self::Off => "BLOCK_NONE",
        }
    }

    /// The least score that counts.
    pub fn score(self) -> f32 {
        match self {
            Self::Low => 0.5,
            Self::Medium => 0.8,
            Self::High => 0.95,
            Self::Off => f32::INFINITY,
        }
    }
}

impl FromStr for Threshold {
    type Err = Unknown;

    fn from_str(name: &str) -> Result<Self, Unknown> {
        let found = Self::ALL.into_iter().find(|threshold| threshold.name() == name);
        found.ok_or_else(|| unknown(name, Self::ALL.into_iter().map(Self::name)))
    }
}

/// A threshold for each category.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Thresholds([Threshold; Category::ALL.len()]);

impl Thresholds {
    /// The default for prompts: only near-certain violations are refused.
    pub const INPUT: Self = Self([Threshold::High; Category::ALL.len()]);
    /// The default for answers.
    pub const OUTPUT: Self = Self([Threshold::Medium; Category::ALL.len()]);

    pub fn of(&self, category: Category) -> Threshold {
        self.0[category as usize]
    }

    /// Sets the threshold of a category. The check for child abuse cannot be turned off.
    pub fn set(&mut self, category: Category, threshold: Threshold) {
        self.0[category as usize] = if category == Category::Csam { threshold.min(Threshold::High) } else { threshold };
    }

    /// Sets the threshold of a category, unless that would be less strict.
    pub fn tighten(&mut self, category: Category, threshold: Threshold) {
        self.set(category, self.of(category).min(threshold));
    }
}

/// A violation found by a check.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub struct Finding {
    pub category: Category,
    pub stage: Stage,
    /// The score, from 0 to 1.
    pub score: f32,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    Patterns,
    Classifier,
    /// A moderation model of the cluster.
    Model,
}

impl Stage {
    pub fn name(self) -> &'static str {
        match self {
            Self::Patterns => "patterns",
            Self::Classifier => "classifier",
            Self::Model => "model",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        assert!(Category::ALL.into_iter().all(|category| category.name().parse() == Ok(category)));
        assert!(Threshold::ALL.into_iter().all(|threshold| threshold.name().parse() == Ok(threshold)));
        assert!(Category::ALL.iter().enumerate().all(|(place, category)| *category as usize == place));
        assert!("violence".parse::<Category>().unwrap_err().to_string().contains("`self_harm`"));
    }

    #[test]
    fn child_abuse_is_always_checked_and_tightening_never_loosens() {
        let mut thresholds = Thresholds::INPUT;
        thresholds.set(Category::Csam, Threshold::Off);
        assert_eq!(thresholds.of(Category::Csam), Threshold::High);
        thresholds.tighten(Category::Hate, Threshold::Low);
        thresholds.tighten(Category::Hate, Threshold::Off);
        assert_eq!(thresholds.of(Category::Hate), Threshold::Low);
    }
}
