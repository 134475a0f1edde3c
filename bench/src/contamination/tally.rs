//! The comparison of answers with the reference.

use super::asks::Ask;
use serde::Serialize;
use std::{collections::BTreeSet, fmt, time::Duration};

/// One answer.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Got {
    pub text: String,
    pub finish_reason: Option<String>,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
}

/// The comparison of all answers of one pass.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Pass {
    pub name: String,
    pub requests: u64,
    /// The number of answers that differ from the reference's.
    pub different: u64,
    /// The number of answers with another conversation's secret word.
    pub leaked: u64,
    pub failed: u64,
    pub prompt_tokens: u64,
    pub cached_tokens: u64,
    pub seconds: f64,
    /// Descriptions of the first faults.
    pub findings: Vec<String>,
}

/// The most findings of a pass that are shown.
const FINDINGS_MAX: usize = 10;
const EXCERPT_CHARS: usize = 80;

impl Pass {
    /// Compares answers, which come with the numbers of their requests. `reference` is `None` for the reference itself.
    pub fn new(name: String, asks: &[Ask], reference: Option<&[Got]>, answers: &[(usize, Result<Got, String>)], seconds: Duration) -> Self {
        let mut pass = Self { name, seconds: seconds.as_secs_f64(), ..Self::default() };
        for (n, answer) in answers {
            let ask = &asks[*n];
            pass.requests += 1;
            match answer {
                Ok(got) => pass.compare(ask, asks, reference.map(|reference| &reference[*n]), got),
                Err(error) => {
                    pass.failed += 1;
                    pass.find(format!("{}: no answer: {error}", ask.name));
                }
            }
        }
        pass
    }

    fn compare(&mut self, ask: &Ask, asks: &[Ask], expected: Option<&Got>, got: &Got) {
        self.prompt_tokens += got.prompt_tokens;
        self.cached_tokens += got.cached_tokens;
        let said = got.text.to_lowercase();
        let others = asks.iter().filter(|other| other.name != ask.name);
        let others = others.filter(|other| other.secret.as_ref().is_some_and(|secret| said.contains(secret)));
        let others: Vec<&str> = others.map(|other| other.name.as_str()).collect();
        if !others.is_empty() {
            self.leaked += 1;
            self.find(format!("{}: the answer has the secret word of {}: {}", ask.name, others.join(", "), excerpt(&got.text)));
        }
        if let Some(expected) = expected
            && (&expected.text, &expected.finish_reason) != (&got.text, &got.finish_reason)
        {
            self.different += 1;
            self.find(format!(
                "{}: another answer than without a cache: {} ({}) instead of {} ({})",
                ask.name,
                excerpt(&got.text),
                got.finish_reason.as_deref().unwrap_or("no reason"),
                excerpt(&expected.text),
                expected.finish_reason.as_deref().unwrap_or("no reason"),
            ));
        }
    }

    fn find(&mut self, finding: String) {
        if self.findings.len() < FINDINGS_MAX {
            self.findings.push(finding);
        }
    }

    /// Whether every answer arrived, and was right.
    pub fn is_clean(&self) -> bool {
        self.different + self.leaked + self.failed == 0
    }
}

impl fmt::Display for Pass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, requests, different, leaked, failed, prompt_tokens, cached_tokens, seconds, findings } = self;
        write!(f, "{name}: {requests} requests in {seconds:.1} s, {different} different, {leaked} leaked, {failed} failed; ")?;
        write!(f, "{cached_tokens} of {prompt_tokens} prompt tokens cached")?;
        findings.iter().try_for_each(|finding| write!(f, "\n  {finding}"))
    }
}

/// The reasons why a run shows less than it seems to.
pub fn doubts(asks: &[Ask], reference: &[Got], of_reference: &Pass, passes: &[Pass]) -> Vec<String> {
    let mut doubts = Vec::new();
    if of_reference.cached_tokens > 0 {
        doubts.push("the reference came from a cache itself: give another server with --reference, or --reference-fields".to_owned());
    }
    // The first pass may only fill the cache.
    let uncached: Vec<&str> = passes.iter().skip(1).filter(|pass| pass.cached_tokens == 0).map(|pass| pass.name.as_str()).collect();
    if !uncached.is_empty() {
        let passes = uncached.join(", ");
        doubts.push(format!("no cached token in {passes}: the server has no cache, has lost it or does not say; this proves nothing"));
    }
    let conversations = asks.iter().filter(|ask| ask.secret.is_some()).count();
    let answers: BTreeSet<&str> =
        asks.iter().zip(reference).filter(|(ask, _)| ask.secret.is_some()).map(|(_, got)| got.text.as_str()).collect();
    if answers.len() < conversations {
        let answers = answers.len();
        doubts
            .push(format!("the {conversations} conversations have only {answers} different answers: a mix-up of equal ones does not show"));
    }
    doubts
}

fn excerpt(text: &str) -> String {
    let short: String = text.chars().take(EXCERPT_CHARS).collect();
    format!("{short:?}{}", if short.len() < text.len() { "…" } else { "" })
}

#[cfg(test)]
mod tests {
    use super::{super::asks, *};

    fn got(text: &str, cached_tokens: u64) -> Got {
        Got { text: text.into(), finish_reason: Some("stop".into()), prompt_tokens: 100, cached_tokens }
    }

    #[test]
    fn an_answer_with_anothers_secret_is_found_even_where_the_reference_has_it() {
        let asks = asks::all(1, 2, 10, 1, 16);
        let other = asks[1].secret.clone().unwrap();
        let reference = [got(&other, 0), got(&other, 0), got("sum", 0)];
        let answers: Vec<_> = (0..3).map(|n| (n, Ok(reference[n].clone()))).collect();
        let pass = Pass::new("pass 1".into(), &asks, Some(&reference), &answers, Duration::ZERO);
        assert_eq!((pass.leaked, pass.different, pass.failed), (1, 0, 0), "{pass}");
        assert!(!pass.is_clean() && pass.to_string().contains("conversation 0: the answer has the secret word of conversation 1"));
    }

    #[test]
    fn other_texts_other_ends_and_no_answers_are_found() {
        let asks = asks::all(1, 2, 10, 1, 16);
        let reference = [got("a", 0), got("b", 0), got("sum", 0)];
        let cut = Got { finish_reason: Some("length".into()), ..got("b", 64) };
        let answers = [(0, Ok(got("a ", 64))), (1, Ok(cut)), (2, Err("refused".to_owned()))];
        let pass = Pass::new("pass 1".into(), &asks, Some(&reference), &answers, Duration::ZERO);
        assert_eq!((pass.leaked, pass.different, pass.failed, pass.cached_tokens), (0, 2, 1, 128), "{pass}");
    }

    #[test]
    fn a_run_that_proves_nothing_says_so() {
        let asks = asks::all(1, 2, 10, 1, 16);
        let pass = |name: &str, cached_tokens| Pass { name: name.into(), cached_tokens, ..Pass::default() };
        let reference = [got("a", 0), got("b", 0), got("a", 0)];
        let doubts = |of_reference: u64, last: u64, reference: &[Got]| {
            super::doubts(&asks, reference, &pass("reference", of_reference), &[pass("pass 1", 0), pass("pass 2", last)])
        };
        assert_eq!(doubts(0, 5, &reference), Vec::<String>::new());
        assert!(doubts(0, 0, &reference)[0].contains("no cached token in pass 2"));
        assert!(doubts(1, 5, &reference)[0].contains("--reference"));
        assert!(doubts(0, 5, &vec![got("a", 0); 3])[0].contains("only 1 different answers"));
    }
}
