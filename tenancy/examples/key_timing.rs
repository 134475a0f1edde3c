//! Whether the time of a refusal reveals how much of a key was right: two kinds of wrong keys in random order, and Welch's t of their times
//! (as dudect does it: Reparaz, Balasch, Verbauwhede, "Dude, is my code constant time?", DATE 2017, §III). Below 4.5 there is no evidence
//! of a difference. A comparison that ends at the first difference is measured in the same way: it must show, or else the measurement is
//! too coarse.
//!
//! `cargo run --release -p tidemill-tenancy --example key_timing [samples]`

use std::{hint::black_box, time::Instant};
use tidemill_tenancy::{
    directory::Directory,
    key::{Digest, Secret},
    limits::Overrides,
    records::{Change, Key, Tenant},
};

/// Comparisons in one sample, since the clock's resolution is coarser than one.
const EACH: usize = 16;
/// The share of samples that are kept: the longest ones are interrupts.
const KEPT: f64 = 0.9;

fn main() {
    let samples: usize = std::env::args().nth(1).map_or(400_000, |count| count.parse().expect("a number of samples"));
    let mut random = Random(0x1234_5678_9abc_def1);
    let (directory, right) = known();

    // Variants of the known key: with the first digit after the prefix changed, and with the last one changed.
    let early = changed(&right, 8);
    let late = changed(&right, 31);
    let t = compare(samples, &mut random, [&early, &late], |secret| directory.authenticate(2, secret).is_none());
    println!("keys that differ early and late: t = {t:.2}");

    let kept = Secret::new(right).digest();
    let text = String::from(kept).into_bytes();
    let differs_at = |at: usize| {
        let mut text = text.clone();
        text[at] = if text[at] == b'0' { b'1' } else { b'0' };
        text
    };
    let texts = [differs_at(0), differs_at(text.len() - 1)];
    let digest = |text: &Vec<u8>| Digest::try_from(String::from_utf8_lossy(text).into_owned()).expect("hexadecimal digits");
    let [early, late] = [digest(&texts[0]), digest(&texts[1])];
    let t = compare(samples, &mut random, [&early, &late], |sent| *black_box(sent) != kept);
    println!("digests that differ early and late: t = {t:.2}");
    let first_difference = |sent: &Vec<u8>| black_box(sent).iter().zip(&text).any(|(a, b)| black_box(a) != b);
    let t = compare(samples, &mut random, [&texts[0], &texts[1]], first_difference);
    println!("the same, by a comparison that ends at the first difference: t = {t:.2}");
}

/// A directory with one key.
fn known() -> (Directory, [u8; 32]) {
    let random = std::array::from_fn(|at| (at as u8).wrapping_mul(37) ^ 0x5a);
    let secret = Secret::new(random);
    let mut directory = Directory::default();
    directory.apply(Change::Tenant(Tenant {
        id: "acme".into(),
        tier: "paid".into(),
        limits: Overrides::default(),
        semantic_cache: false,
        erased: 0,
        erasures: Vec::new(),
        created: 1,
    }));
    directory.apply(Change::Key(Key {
        id: secret.prefix().into(),
        digest: secret.digest(),
        tenant: "acme".into(),
        user: None,
        name: None,
        limits: Overrides::default(),
        created: 1,
        expires: None,
        revoked: None,
    }));
    (directory, random)
}

fn changed(random: &[u8; 32], at: usize) -> Secret {
    let mut random = *random;
    random[at] ^= 1;
    Secret::new(random)
}

/// Welch's t of the times of a call with either argument.
fn compare<T: Clone>(samples: usize, random: &mut Random, arguments: [&T; 2], call: impl Fn(&T) -> bool) -> f64 {
    let mut times = [Vec::with_capacity(samples), Vec::with_capacity(samples)];
    for _ in 0..samples {
        let kind = (random.next() & 1) as usize;
        // Both at the same address: where a value lies also affects the time.
        let argument = arguments[kind].clone();
        let began = Instant::now();
        for _ in 0..EACH {
            assert!(call(black_box(&argument)), "wrong keys are refused");
        }
        times[kind].push(began.elapsed().as_nanos() as f64);
    }
    let mut all: Vec<f64> = times.iter().flatten().copied().collect();
    all.sort_by(f64::total_cmp);
    let most = all[(all.len() as f64 * KEPT) as usize];
    let [a, b] = times.map(|times| moments(times.into_iter().filter(|time| *time <= most)));
    (a.mean - b.mean) / (a.variance / a.count + b.variance / b.count).sqrt()
}

struct Moments {
    count: f64,
    mean: f64,
    variance: f64,
}

fn moments(times: impl Iterator<Item = f64> + Clone) -> Moments {
    let count = times.clone().count() as f64;
    let mean = times.clone().sum::<f64>() / count;
    let variance = times.map(|time| (time - mean).powi(2)).sum::<f64>() / (count - 1.0);
    Moments { count, mean, variance }
}

/// Xorshift (Marsaglia, 2003).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 >> 20
    }
}
