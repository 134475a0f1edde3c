//! `tidemill safety`: trains the classifier of the safety checks with your own examples, and evaluates it.

use anyhow::Context;
use std::{collections::BTreeMap, fs, path::PathBuf, time::Instant};
use tidemill_safety::{
    category::Thresholds,
    classifier::Classifier,
    corpus::{self, Example, HELD_OUT, TRAINING},
    guard::Guard,
    patterns::Patterns,
};

#[derive(Debug, clap::Subcommand)]
pub enum SafetyCommand {
    /// Train a classifier for `[safety] classifier = "FILE"`
    Train {
        /// Files of examples besides the built-in ones: `[category]` or `[harmless]`, then one per line, `{a|b}` for alternatives
        #[arg(long = "corpus", value_name = "FILE")]
        corpora: Vec<PathBuf>,
        /// Only these files, without the built-in examples
        #[arg(long, requires = "corpora")]
        alone: bool,
        #[arg(long, value_name = "FILE")]
        out: PathBuf,
    },
    /// Judge examples with the checks, and count how many of each category are refused as prompts
    Judge {
        /// Examples [default: the built-in ones that the built-in classifier was not trained with]
        #[arg(long, value_name = "FILE")]
        corpus: Option<PathBuf>,
        /// [default: the built-in one]
        #[arg(long, value_name = "FILE")]
        classifier: Option<PathBuf>,
        /// Show every example that is judged wrongly
        #[arg(long)]
        verbose: bool,
    },
}

pub fn safety(command: SafetyCommand) -> anyhow::Result<()> {
    match command {
        SafetyCommand::Train { corpora, alone, out } => {
            let mut examples = if alone { Vec::new() } else { corpus::examples(TRAINING)? };
            for path in &corpora {
                examples.extend(read(path)?);
            }
            let classifier = Classifier::train(examples.iter().map(|(text, label)| (text.as_str(), *label)));
            fs::write(&out, classifier.write()).with_context(|| format!("cannot write {}", out.display()))?;
            println!("trained with {} examples: {}", examples.len(), out.display());
        }
        SafetyCommand::Judge { corpus, classifier, verbose } => {
            let examples = corpus.map_or_else(|| Ok(corpus::examples(HELD_OUT)?), |path| read(&path))?;
            let guard = match classifier {
                Some(path) => {
                    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
                    let classifier = Classifier::read(&text).with_context(|| path.display().to_string())?;
                    Guard { patterns: Patterns::built_in(), classifier: Some(classifier) }
                }
                None => Guard::built_in(),
            };
            judge(&guard, &examples, verbose);
        }
    }
    Ok(())
}

fn read(path: &PathBuf) -> anyhow::Result<Vec<Example>> {
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    corpus::examples(&text).with_context(|| path.display().to_string())
}

fn judge(guard: &Guard, examples: &[Example], verbose: bool) {
    // The number of refused examples and of all examples, by category.
    let mut counts = BTreeMap::<&str, (usize, usize)>::new();
    let mut times = Vec::with_capacity(examples.len());
    for (text, label) in examples {
        let started = Instant::now();
        let found = guard.check(text, &Thresholds::INPUT);
        times.push(started.elapsed());
        let count = counts.entry(label.map_or("harmless", |label| label.name())).or_default();
        *count = (count.0 + usize::from(found.is_some()), count.1 + 1);
        if verbose && found.is_some() != label.is_some() {
            println!("{}: {text}", found.map_or("passed".into(), |found| format!("refused ({})", found.category)));
        }
    }
    for (name, (refused, all)) in counts {
        println!("{name:12} {refused:5} of {all:5} refused");
    }
    times.sort_unstable();
    if let Some(last) = times.len().checked_sub(1) {
        println!("time of one check: p50 {:?}, p99 {:?}", times[last / 2], times[last * 99 / 100]);
    }
}
