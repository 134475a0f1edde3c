//! Admission: whether a request is accepted. A pure decision, apart from where its sequences will run.
//!
//! A full queue is shared: a higher priority displaces the lowest, and within one priority, requests of tenants that have more waiting than
//! the newcomer's tenant would have give way. So a tenant's flood displaces itself, and a tenant that is alone may use the whole queue.

use crate::{Rejection, pace::Pace};
use std::collections::HashMap;
use tidemill_proto::ids::RequestId;

/// The operator's choices.
#[derive(Clone, Debug)]
pub struct AdmissionPolicy {
    /// The maximum number of sequences that wait for a place.
    pub queue_max: usize,
}

/// The cluster as it is now.
#[derive(Debug)]
pub struct Occupancy<'a> {
    /// The longest sequence that any decode worker can hold; `None` without a decode worker.
    pub context_tokens: Option<u32>,
    /// Sequences that wait for a place.
    pub waiting: usize,
    pub pace: &'a Pace,
}

/// Refuses more choices at once than even an empty queue could take: a retry would not help.
pub fn check_choices(policy: &AdmissionPolicy, choices: usize) -> Result<(), Rejection> {
    let limit = policy.queue_max;
    if choices <= limit { Ok(()) } else { Err(Rejection::TooManyChoices { choices, limit }) }
}

/// Decides whether to accept a request of `choices` sequences, each of at most `tokens` tokens. All of them may have to wait.
pub fn admit(policy: &AdmissionPolicy, now: &Occupancy<'_>, tokens: u64, choices: usize) -> Result<(), Rejection> {
    let context = now.context_tokens.ok_or(Rejection::NoWorker)?;
    if tokens > context.into() {
        return Err(Rejection::TooLong { tokens, context });
    }
    let ahead = now.waiting + choices - 1;
    if ahead >= policy.queue_max { Err(Rejection::Full { retry_after_ms: retry_after_ms(now, ahead) }) } else { Ok(()) }
}

/// A waiting request of which no sequence has had a place yet.
#[derive(Clone, Copy, Debug)]
pub struct Waiting {
    pub id: RequestId,
    pub tenant: u64,
    pub priority: u8,
    pub sequences: usize,
}

/// A request for which a full queue has no room.
#[derive(Clone, Copy, Debug)]
pub struct Newcomer {
    pub tenant: u64,
    pub priority: u8,
    pub choices: usize,
}

/// Picks the requests that give way to a newcomer, or returns `None` if not enough of them would.
///
/// `of_tenants` counts the waiting sequences of each tenant, including those that had a place before. `waiting` starts with the oldest.
pub fn displaced(
    policy: &AdmissionPolicy,
    mut of_tenants: HashMap<u64, usize>,
    mut waiting: Vec<Waiting>,
    new: Newcomer,
) -> Option<Vec<RequestId>> {
    let total: usize = of_tenants.values().sum();
    let mut lacking = (total + new.choices).saturating_sub(policy.queue_max);
    let own = of_tenants.get(&new.tenant).copied().unwrap_or(0) + new.choices;
    let mut displaced = Vec::new();
    while lacking > 0 {
        let gives_way = |request: &Waiting| {
            request.priority < new.priority || (request.priority == new.priority && of_tenants.get(&request.tenant) > Some(&own))
        };
        // The newest sequence of the lowest priority, of the tenant that has the most.
        let least = waiting
            .iter()
            .enumerate()
            .filter(|(_, request)| gives_way(request))
            .max_by_key(|(place, request)| (u8::MAX - request.priority, of_tenants.get(&request.tenant).copied(), *place));
        let (place, _) = least?;
        let request = waiting.remove(place);
        displaced.push(request.id);
        lacking = lacking.saturating_sub(request.sequences);
        if let Some(of_tenant) = of_tenants.get_mut(&request.tenant) {
            *of_tenant = of_tenant.saturating_sub(request.sequences);
        }
    }
    Some(displaced)
}

/// Time after which a rejected client may try again: half the queue should have left by then.
pub(crate) fn retry_after_ms(now: &Occupancy<'_>, ahead: usize) -> u64 {
    (now.pace.wait_ms(ahead / 2).unwrap_or(0.0) as u64).clamp(1_000, 30_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Rows of waiting requests (`tenant/priority/sequences`, from the oldest), then the newcomer, then the requests that give way. The
    /// queue has room for six.
    #[test]
    fn a_full_queue_is_shared_by_priority_and_by_tenant() {
        let table = "
            1/1/2 1/1/2 1/1/2 | 2/1/1 | 2
            1/1/2 1/1/2 1/1/2 | 2/1/3 | 2 1
            1/1/2 1/1/2 1/1/2 | 2/1/4 | -
            1/1/2 1/1/2 1/1/2 | 1/1/1 | -
            1/1/1 1/1/1 1/1/1 2/1/1 2/1/1 2/1/1 | 3/1/1 | 5
            1/1/1 1/1/1 1/1/1 2/1/1 2/1/1 2/1/1 | 2/1/1 | -
            1/1/1 1/1/1 1/1/1 1/1/1 2/1/1 2/1/1 | 2/1/1 | 3
            1/0/3 2/1/3 | 1/1/1 | 0
            1/2/6 | 2/1/1 | -
            1/1/6 | 1/2/1 | 0
            1/1/4 2/0/1 3/0/1 | 4/1/1 | 2
            1/1/5 2/0/1 | 3/1/2 | 1 0
            1/1/3 | 2/1/1 |
            ";
        for row in table.lines().map(str::trim).filter(|row| !row.is_empty()) {
            let cells: Vec<&str> = row.split('|').map(str::trim).collect();
            let [waiting, newcomer, expected] = cells[..] else { panic!("row `{row}`") };
            let read = |item: &str| -> (u64, u8, usize) {
                let numbers: Vec<&str> = item.split('/').collect();
                (numbers[0].parse().unwrap(), numbers[1].parse().unwrap(), numbers[2].parse().unwrap())
            };
            let mut of_tenants = HashMap::new();
            let waiting = waiting.split_whitespace().enumerate().map(|(id, item)| {
                let (tenant, priority, sequences) = read(item);
                *of_tenants.entry(tenant).or_default() += sequences;
                Waiting { id: RequestId(id as u64), tenant, priority, sequences }
            });
            let waiting = waiting.collect();
            let (tenant, priority, choices) = read(newcomer);
            let got = displaced(&AdmissionPolicy { queue_max: 6 }, of_tenants, waiting, Newcomer { tenant, priority, choices });
            let ids = |ids: Vec<RequestId>| ids.iter().map(|id| id.0.to_string()).collect::<Vec<_>>().join(" ");
            assert_eq!(got.map_or("-".to_owned(), ids), expected, "{row}");
        }
    }

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
