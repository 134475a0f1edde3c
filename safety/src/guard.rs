//! The whole cascade over a whole text.

use crate::{
    category::{Category, Finding, Stage, Threshold, Thresholds},
    classifier::{Classifier, Scores},
    corpus::{self, TRAINING},
    normal::Normal,
    patterns::Patterns,
};

/// The checks that all texts share. Built once.
#[derive(Debug)]
pub struct Guard {
    pub patterns: Patterns,
    /// `None` if there are only patterns.
    pub classifier: Option<Classifier>,
}

impl Guard {
    /// The built-in list, and the classifier trained with the built-in corpus. Takes a moment.
    pub fn built_in() -> Self {
        Self { patterns: Patterns::built_in(), classifier: Some(built_in_classifier()) }
    }

    /// Checks a text. Of several findings, returns that of the first stage, then the one with the highest score.
    pub fn check(&self, text: &str, thresholds: &Thresholds) -> Option<Finding> {
        self.examine(text, thresholds).0
    }

    /// Checks a text. Also returns whether a text without a finding should go to a later stage.
    pub fn examine(&self, text: &str, thresholds: &Thresholds) -> (Option<Finding>, bool) {
        let normal = Normal::of(text);
        let listed = self.patterns.find(normal.bytes()).filter(|category| 1.0 >= thresholds.of(*category).score());
        if let Some(category) = listed {
            return (Some(Finding { category, stage: Stage::Patterns, score: 1.0 }), false);
        }
        let Some(classifier) = &self.classifier else { return (None, false) };
        let scores = classifier.score_windows(normal.bytes());
        let found = worst(&scores, thresholds);
        (found, found.is_none() && scores.iter().any(|score| *score >= Threshold::Low.score()))
    }

    /// The score of every category.
    pub fn scores(&self, text: &str) -> Scores {
        let normal = Normal::of(text);
        let mut scores = self.classifier.as_ref().map_or([0.0; Category::ALL.len()], |classifier| classifier.score_windows(normal.bytes()));
        if let Some(category) = self.patterns.find(normal.bytes()) {
            scores[category as usize] = 1.0;
        }
        scores
    }
}

pub fn built_in_classifier() -> Classifier {
    let examples = corpus::examples(TRAINING).expect("the built-in corpus is well-formed: a test reads it");
    Classifier::train(examples.iter().map(|(text, label)| (text.as_str(), *label)))
}

/// The highest score that exceeds its threshold.
pub(crate) fn worst(scores: &Scores, thresholds: &Thresholds) -> Option<Finding> {
    let found = Category::ALL.into_iter().zip(scores).filter(|(category, score)| **score >= thresholds.of(*category).score());
    let (category, score) = found.max_by(|a, b| a.1.total_cmp(b.1))?;
    Some(Finding { category, stage: Stage::Classifier, score: *score })
}
