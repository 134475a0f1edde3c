//! The time that the stages in this process take per prompt: `cargo run --release -p tidemill-safety --example stage_times`. The held-out
//! harmless sentences, one by one, then all of them as one long prompt.

use std::{
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_safety::{
    category::Thresholds,
    corpus::{self, HELD_OUT},
    guard::Guard,
    judge::DOUBTS_MAX,
    normal::Normal,
    pii::{Kind, find::Finder, redact, vault::Vault},
    stream,
};

/// The number of times that each sentence is timed. The least time counts, since it has the least interference from other processes.
const REPEATS: usize = 32;

fn main() {
    let guard = Arc::new(Guard::built_in());
    let classifier = guard.classifier.as_ref().expect("the built-in guard has one");
    let examples = corpus::examples(HELD_OUT).expect("the built-in corpus is well-formed: a test reads it");
    let harmless: Vec<String> = examples.iter().filter(|(_, label)| label.is_none()).map(|(text, _)| text.clone()).collect();
    let all = [harmless.join(" ")];
    let finder = Arc::new(Finder::new(&Kind::ALL));
    let normal = |text: &String| Normal::of(text);
    for (what, texts) in [("one sentence", &harmless[..]), ("all of them as one prompt", &all[..])] {
        let normals: Vec<_> = texts.iter().map(normal).collect();
        println!("{what}: {} of {} bytes on average", texts.len(), texts.iter().map(String::len).sum::<usize>() / texts.len());
        show("normal form", texts, |text| Normal::of(text));
        show("1 patterns", &normals, |normal| guard.patterns.find(normal.bytes()));
        show("2 classifier", &normals, |normal| classifier.score_windows(normal.bytes()));
        show("1 and 2 together", texts, |text| guard.examine(text, &Thresholds::INPUT));
        show("which parts a model sees", texts, |text| guard.doubts(text, &Thresholds::INPUT));
        show("PII in a prompt", texts, |text| {
            let mut vault = Vault::default();
            vault.see(text);
            vault.redact(&finder, text)
        });
        show("1 and 2, word by word", texts, |text| {
            let mut stream = stream::Stream::new(Arc::clone(&guard), Thresholds::OUTPUT);
            words(text).for_each(|word| drop(black_box(stream.push(word))));
            stream.finish()
        });
        show("the same, a model asked", texts, |text| as_answer(&guard, text));
        show("PII, word by word", texts, |text| {
            let mut stream = redact::Stream::new(Arc::clone(&finder));
            words(text).for_each(|word| drop(black_box(stream.push(word))));
            stream.finish()
        });
    }
    let doubts = |text: &String| guard.doubts(text, &Thresholds::INPUT).len();
    let sent = |harmful: bool| {
        let of: Vec<_> = examples.iter().filter(|(_, label)| label.is_some() == harmful).collect();
        (of.iter().filter(|(text, _)| guard.check(text, &Thresholds::INPUT).is_none() && doubts(text) > 0).count(), of.len())
    };
    println!(
        "sent to a model (3): {:?} of the harmless, {:?} of the harmful; {DOUBTS_MAX} parts of a prompt at most, of 2 KiB",
        sent(false),
        sent(true)
    );
    let asked = harmless.iter().filter(|text| as_answer(&guard, text) > 0).count();
    println!("the same of harmless ones that come as answers: {asked}");
}

/// The number of questions that a text raises if it arrives word by word and every question is settled at once as harmless.
fn as_answer(guard: &Arc<Guard>, text: &str) -> usize {
    let mut stream = stream::Stream::with_doubts(Arc::clone(guard), Thresholds::OUTPUT);
    let mut asked = 0;
    for word in words(text).map(Some).chain([None]) {
        let mut released = match word {
            Some(word) => stream.push(word),
            None => stream.finish(),
        };
        while black_box(&released).doubted {
            asked += 1;
            released = stream.settle(None);
        }
    }
    asked
}

/// The pieces in which an answer arrives.
fn words(text: &str) -> impl Iterator<Item = &str> {
    text.split_inclusive(' ')
}

fn show<T, R>(stage: &str, inputs: &[T], act: impl Fn(&T) -> R) {
    let least = |input: &T| {
        let timed = (0..REPEATS).map(|_| {
            let started = Instant::now();
            black_box(act(black_box(input)));
            started.elapsed()
        });
        timed.min().unwrap_or_default()
    };
    let mut times: Vec<Duration> = inputs.iter().map(least).collect();
    times.sort_unstable();
    let at = |share: f64| times[((times.len() - 1) as f64 * share).round() as usize];
    println!("  {stage:26} p50 {:9.1?}  p99 {:9.1?}", at(0.5), at(0.99));
}
