//! Trained checkpoints, which are too large to commit, against transformers. Run by hand.

use crate::fixtures::{all_logits, load_dir};
use serde::Deserialize;
use std::path::PathBuf;
use tidemill_model::token_logprob;
use tidemill_proto::block::{KvDtype, Token};

/// A page as `fixtures/logprobs.py` writes it.
#[derive(Deserialize)]
struct Page {
    ids: Vec<Token>,
    /// The log-probabilities of every token but the first.
    logprobs: Vec<f64>,
}

/// Run with `TIDEMILL_TRAINED=DIR cargo test --release -p tidemill-model --test checkpoints trained -- --ignored --nocapture`.
#[test]
#[ignore = "needs a trained checkpoint in $TIDEMILL_TRAINED, with the logprobs.json of fixtures/logprobs.py"]
fn log_probabilities_of_a_page_are_those_of_transformers() {
    let dir = PathBuf::from(std::env::var_os("TIDEMILL_TRAINED").expect("TIDEMILL_TRAINED is a directory"));
    let page: Page = serde_json::from_slice(&std::fs::read(dir.join("logprobs.json")).unwrap()).unwrap();
    let mut model = load_dir(&dir, KvDtype::F32, 2, None);
    let vocab = model.config().vocab();
    let logits = all_logits(&mut model, &page.ids, 256);
    let ours = page.ids.iter().skip(1).zip(logits.chunks(vocab)).map(|(&id, row)| f64::from(token_logprob(row, id, 0).logprob));
    let differences: Vec<f64> = ours.zip(&page.logprobs).map(|(ours, theirs)| (ours - theirs).abs()).collect();
    let (mean, largest) = (differences.iter().sum::<f64>() / differences.len() as f64, differences.iter().copied().fold(0.0, f64::max));
    println!("{} tokens: log-probabilities differ by {mean:.4} on average, at most by {largest:.4}", page.ids.len());
    assert!(mean < 0.05);
}
