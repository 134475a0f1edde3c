//! A few hundred seeds; `make sim-faults SEEDS=10000` runs more.

use super::*;

/// The number of seeds that take a minute of one core.
const SEEDS: u64 = 300;

#[test]
fn nothing_is_lost_under_faults() {
    let mut all = Report::default();
    for seed in 0..SEEDS {
        let report = run(seed, None, false);
        if let Some(violation) = &report.violation {
            let trace = run(seed, None, true).trace;
            let last = &trace[trace.len().saturating_sub(150)..];
            panic!("seed {seed}: {violation}\n{}\nagain: {}", last.join("\n"), replay_command(seed, None));
        }
        all.requests += report.requests;
        all.complete += report.complete;
        all.rescues += report.rescues;
        all.troubles += report.troubles;
        all.events += report.events;
    }
    // The tests only mean something if most requests are answered in spite of many faults.
    assert!(all.complete * 10 > all.requests * 5, "{all:?}");
    assert!(all.rescues > SEEDS / 4 && all.troubles > SEEDS * 5, "{all:?}");
}

#[test]
fn the_same_seed_is_the_same_world() {
    for seed in [1, 7, 12] {
        let [a, b] = [false, true].map(|traced| run(seed, None, traced));
        assert_eq!((a.digest, a.events, a.complete, a.violation), (b.digest, b.events, b.complete, b.violation));
    }
}

#[test]
fn planted_bugs_are_found() {
    for &mutation in Mutation::ALL {
        assert!(find(mutation, 0..1000).is_some(), "{mutation} is not found within 1,000 seeds");
    }
}
