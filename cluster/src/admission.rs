//! May a request come in? A pure decision, apart from where its sequences will run.

use crate::{Rejection, pace::Pace};

/// The operator's choices.
#[derive(Clone, Debug)]
pub struct AdmissionPolicy {
    /// Sequences that may wait for a place.
    pub queue_max: usize,
}

/// The cluster as it is now.
#[derive(Debug)]
pub struct Occupancy<'a> {
    /// Longest sequence that some decode worker can hold; `None` without one.
    pub context_tokens: Option<u32>,
    /// Sequences that wait for a place.
    pub waiting: usize,
    pub pace: &'a Pace,
}

/// Refuses more choices at a time than even an empty queue could take: no retry would help.
pub fn check_choices(policy: &AdmissionPolicy, choices: usize) -> Result<(), Rejection> {
    let limit = policy.queue_max;
    if choices <= limit { Ok(()) } else { Err(Rejection::TooManyChoices { choices, limit }) }
}

/// Whether a request of `choices` sequences, each of at most `tokens` tokens, may come in. All of them may have to wait.
pub fn admit(policy: &AdmissionPolicy, now: &Occupancy<'_>, tokens: u64, choices: usize) -> Result<(), Rejection> {
    let context = now.context_tokens.ok_or(Rejection::NoWorker)?;
    if tokens > context.into() {
        return Err(Rejection::TooLong { tokens, context });
    }
    let ahead = now.waiting + choices - 1;
    if ahead >= policy.queue_max { Err(Rejection::Full { retry_after_ms: retry_after_ms(now, ahead) }) } else { Ok(()) }
}

/// When a rejected client may try again: half the queue will have gone by then.
fn retry_after_ms(now: &Occupancy<'_>, ahead: usize) -> u64 {
    (now.pace.wait_ms(ahead / 2).unwrap_or(0.0) as u64).clamp(1_000, 30_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of `context | waiting | tokens | choices | decision`, with room for four in the queue.
    #[test]
    fn what_fits_comes_in_while_the_queue_has_room() {
        let table = "
            -    | 0 | 100  | 1 | no worker
            4096 | 0 | 4096 | 1 | in
            4096 | 0 | 4097 | 1 | too long for 4096
            4096 | 9 | 4097 | 1 | too long for 4096
            4096 | 1 | 100  | 1 | in
            4096 | 3 | 100  | 1 | in
            4096 | 4 | 100  | 1 | full
            4096 | 0 | 100  | 4 | in
            4096 | 0 | 100  | 5 | full
            4096 | 2 | 100  | 2 | in
            4096 | 2 | 100  | 3 | full
            ";
        let (policy, pace) = (AdmissionPolicy { queue_max: 4 }, Pace::default());
        for row in table.lines().map(str::trim).filter(|row| !row.is_empty()) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let [context, waiting, tokens, choices, expected] = cells[..] else { panic!("row `{row}`") };
            let now = Occupancy { context_tokens: context.parse().ok(), waiting: waiting.parse().unwrap(), pace: &pace };
            let got = match admit(&policy, &now, tokens.parse().unwrap(), choices.parse().unwrap()) {
                Ok(()) => "in".to_owned(),
                Err(Rejection::NoWorker) => "no worker".into(),
                Err(Rejection::TooLong { context, .. }) => format!("too long for {context}"),
                Err(Rejection::Full { retry_after_ms: 1_000..=30_000 }) => "full".into(),
                Err(other) => format!("{other:?}"),
            };
            assert_eq!(got, expected, "{row}");
        }
        assert_eq!(check_choices(&policy, 4), Ok(()));
        assert_eq!(check_choices(&policy, 5), Err(Rejection::TooManyChoices { choices: 5, limit: 4 }));
    }
}
