//! The cost of retrieving old messages in a conversation of maximum length: `cargo run --release -p tidemill-gateway --example
//! retrieval_cost`.

use std::time::Instant;
use tidemill_gateway::context::bm25;

const MESSAGES: usize = 16_384;
const WORDS: usize = 40;
const VOCABULARY: usize = 5_000;
const ROUNDS: u32 = 20;

fn main() {
    let words: Vec<_> = (0..VOCABULARY).map(|n| format!("word{n}")).collect();
    let text = |n: usize| (0..WORDS).map(|at| words[(n * 7919 + at * at * 31) % VOCABULARY].as_str()).collect::<Vec<_>>().join(" ");
    let texts: Vec<_> = (0..MESSAGES).map(text).collect();
    let texts: Vec<_> = texts.iter().map(String::as_str).collect();
    let began = Instant::now();
    let mut found = 0;
    for round in 0..ROUNDS {
        found += bm25::best(&format!("what about word{round} and word22 of word333 in word444"), &texts, 4).len();
    }
    println!(
        "{found} found; {:.1} ms per question to {MESSAGES} messages of {WORDS} words",
        began.elapsed().as_secs_f64() * 1e3 / f64::from(ROUNDS)
    );
}
