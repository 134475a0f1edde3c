//! The golden set that comes with Tidemill, written by `golden/make.py`. It tests little of a model's knowledge of the world, but shows
//! whether a model still does what it did: arithmetic, extraction, formats, classification, instructions, tools, refusals.

/// The golden set, as a file of cases.
pub const CASES: &str = include_str!("../golden/cases.jsonl");

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{case, check::Check};
    use std::collections::{BTreeMap, BTreeSet};

    #[test]
    fn there_are_five_hundred_different_cases_of_many_kinds() {
        let cases = case::read(CASES).unwrap();
        assert_eq!(cases.len(), 500);
        let questions: BTreeSet<_> = cases.iter().map(|ready| (ready.case.question(), ready.case.request.len())).collect();
        assert_eq!(questions.len(), cases.len(), "no question comes twice");
        let mut tags = BTreeMap::<&str, usize>::new();
        cases.iter().flat_map(|ready| &ready.case.tags).for_each(|tag| *tags.entry(tag).or_default() += 1);
        assert!(tags.len() >= 12 && tags.values().all(|&count| (5..=80).contains(&count)), "{tags:?}");
        let checks: BTreeSet<_> = cases.iter().flat_map(|ready| ready.case.checks.iter().map(Check::name)).collect();
        assert_eq!(checks.len(), 7, "{checks:?}");
    }
}
