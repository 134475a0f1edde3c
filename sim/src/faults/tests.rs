//! A few hundred seeds; `make sim-faults SEEDS=10000` runs more. One seed for each planted bug: the tests are beside their rows, in `mutation`.

use super::*;
use std::ops::Range;

macro_rules! ranges {
    ($($test:ident: $seeds:expr,)*) => {
        mod nothing_is_lost_under_faults {
            $(
                #[test]
                fn $test() {
                    super::nothing_is_lost($seeds);
                }
            )*
        }
    };
}

// 300 seeds, which take a minute of one core.
ranges! {
    seeds_from_0: 0..50,
    seeds_from_50: 50..100,
    seeds_from_100: 100..150,
    seeds_from_150: 150..200,
    seeds_from_200: 200..250,
    seeds_from_250: 250..300,
}

fn nothing_is_lost(seeds: Range<u64>) {
    let count = seeds.end - seeds.start;
    let mut all = Report::default();
    for seed in seeds {
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
    assert!(all.rescues > count / 4 && all.troubles > count * 5, "{all:?}");
}

/// Checks that the seed of this bug finds it.
pub(super) fn is_found(mutation: Mutation) {
    let (seed, rule) = mutation.found_by();
    let violation = run(seed, Some(mutation), false).violation;
    assert!(
        violation.as_ref().is_some_and(|violation| violation.contains(rule)),
        "seed {seed} finds {mutation} no longer, or by another rule: `make sim-mutations` finds the seed to write beside it in faults/mutation.rs\n\
         expected: {rule}\nfound: {violation:?}\nagain: {}",
        replay_command(seed, Some(mutation))
    );
}

#[test]
fn the_same_seed_is_the_same_world() {
    for seed in [1, 7, 12] {
        let [a, b] = [false, true].map(|traced| run(seed, None, traced));
        assert_eq!((a.digest, a.events, a.complete, a.violation), (b.digest, b.events, b.complete, b.violation));
    }
}
