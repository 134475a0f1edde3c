//! A linear classifier over hashed n-grams of a text in [normal form](crate::normal), one logistic regression per category.
//!
//! Features are words, pairs of neighbouring words, and runs of four letters, hashed into buckets (the "hashing trick" of Weinberger et
//! al., ICML 2009; features and loss as in Joulin et al., "Bag of Tricks for Efficient Text Classification", 2016, without the hidden
//! layer). Time is proportional to the length of a text, and memory does not depend on it.
//!
//! File format: a line `tidemill-classifier 1 <buckets>`, a line of the categories' names, a line of their biases, then a line `<bucket>
//! <weight> …` for each bucket with a non-zero weight.

use crate::{category::Category, normal::Normal};
use std::{fmt::Write, ops::Range};

const BUCKETS: usize = 1 << 16;
const CATEGORIES: usize = Category::ALL.len();
const MAGIC: &str = "tidemill-classifier 1";
/// The number of passes over the examples.
const EPOCHS: usize = 12;
const RATE: f32 = 0.5;
/// The decay of weights towards 0, per step.
const DECAY: f32 = 1e-5;
/// The smallest weight that is written.
const WEIGHT_LEAST: f32 = 1e-3;
/// The length of the runs of letters within a word.
const LETTERS: u32 = 4;
/// The length of the parts in which a text is classified, so that a single sentence does not drown among others. Each part overlaps half of
/// the last one.
pub const WINDOW_BYTES: usize = 320;

/// One score per category, from 0 to 1.
pub type Scores = [f32; CATEGORIES];

#[derive(Clone, Debug, PartialEq)]
pub struct Classifier {
    /// The weights, one row per bucket.
    weights: Vec<[f32; CATEGORIES]>,
    bias: [f32; CATEGORIES],
}

/// The features of a text that arrives byte by byte. The cost per byte does not depend on its length.
#[derive(Clone, Debug, Default)]
pub(crate) struct Growing {
    pub bytes: usize,
    features: usize,
    /// The sums of the features' weights.
    sums: [f32; CATEGORIES],
    /// The hash of the current word, and its length.
    word: Option<(u64, u32)>,
    /// The hash of the previous word.
    last: Option<u64>,
    /// The last four letters.
    letters: u32,
}

/// An error in a classifier file.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {reason}")]
pub struct FormatError {
    line: usize,
    reason: String,
}

impl Classifier {
    /// Trains a classifier from examples; `None` means harmless. The same examples give the same classifier.
    pub fn train<'a>(examples: impl IntoIterator<Item = (&'a str, Option<Category>)>) -> Self {
        let examples: Vec<_> =
            examples.into_iter().map(|(text, label)| (buckets(Normal::of(text).bytes()), label)).filter(|(x, _)| !x.is_empty()).collect();
        let mut classifier = Self { weights: vec![[0.0; CATEGORIES]; BUCKETS], bias: [-2.0; CATEGORIES] };
        let mut squares = vec![[1e-6f32; CATEGORIES]; BUCKETS];
        let mut order: Vec<usize> = (0..examples.len()).collect();
        let mut random = 0x9e37_79b9_7f4a_7c15u64;
        for _ in 0..EPOCHS {
            for i in (1..order.len()).rev() {
                random = random.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
                order.swap(i, (random >> 33) as usize % (i + 1));
            }
            for &example in &order {
                let (x, label) = &examples[example];
                let value = 1.0 / (x.len() as f32).sqrt();
                let scores = classifier.of_buckets(x);
                for (category, score) in scores.into_iter().enumerate() {
                    let wanted = if label.is_some_and(|label| label as usize == category) { 1.0 } else { 0.0 };
                    let error = wanted - score;
                    classifier.bias[category] += 0.01 * error;
                    for &bucket in x {
                        // AdaGrad (Duchi et al., JMLR 2011): rare features take larger steps.
                        let (weight, square) = (&mut classifier.weights[bucket][category], &mut squares[bucket][category]);
                        let gradient = error * value - DECAY * *weight;
                        *square += gradient * gradient;
                        *weight += RATE * gradient / square.sqrt().max(0.05);
                    }
                }
            }
        }
        classifier
    }

    /// The scores of a text in normal form that fits one window.
    pub fn score(&self, text: &[u8]) -> Scores {
        self.of_buckets(&buckets(text))
    }

    /// The scores of a whole text in normal form: for each category, that of the worst window.
    pub fn score_windows(&self, text: &[u8]) -> Scores {
        let mut worst = [0.0; CATEGORIES];
        self.windows(text).for_each(|(_, scores)| take_worse(&mut worst, &scores));
        worst
    }

    /// The scores of each window of a text in normal form.
    pub fn windows(&self, text: &[u8]) -> impl Iterator<Item = (Range<usize>, Scores)> {
        let mut next = Some(0);
        std::iter::from_fn(move || {
            let start = next?;
            let window = start..(start + WINDOW_BYTES).min(text.len());
            next = (window.end < text.len()).then_some(start + WINDOW_BYTES / 2);
            Some((window.clone(), self.score(&text[window])))
        })
    }

    /// Adds a byte of a text in normal form.
    pub(crate) fn grow(&self, text: &mut Growing, byte: u8) {
        text.bytes += 1;
        if !is_of_word(byte) {
            self.end_word(text);
            text.word = None;
            text.letters = 0;
            return;
        }
        let (word, letters) = text.word.unwrap_or((begun(1), 0));
        text.word = Some((added(word, byte), letters + 1));
        text.letters = text.letters << 8 | u32::from(byte);
        if letters + 1 >= LETTERS {
            self.add(text, bucket(hash(2, &text.letters.to_be_bytes())));
        }
    }

    /// The scores of the text so far, as if it ended here; `None` if all are below one half.
    pub(crate) fn score_so_far(&self, text: &Growing) -> Option<Scores> {
        let mut whole = text.clone();
        self.end_word(&mut whole);
        let value = 1.0 / (whole.features.max(1) as f32).sqrt();
        let logits: [f32; CATEGORIES] = std::array::from_fn(|i| self.bias[i] + value * whole.sums[i]);
        let is_likely = whole.features > 0 && logits.iter().any(|logit| *logit >= 0.0);
        is_likely.then(|| logits.map(sigmoid))
    }

    fn end_word(&self, text: &mut Growing) {
        let Some((word, _)) = text.word else { return };
        let word = mixed(word);
        self.add(text, bucket(word));
        if let Some(last) = text.last.replace(word) {
            self.add(text, bucket(pair(last, word)));
        }
    }

    fn add(&self, text: &mut Growing, bucket: usize) {
        text.sums.iter_mut().zip(&self.weights[bucket]).for_each(|(sum, weight)| *sum += weight);
        text.features += 1;
    }

    fn of_buckets(&self, x: &[usize]) -> Scores {
        let mut sums = [0.0f32; CATEGORIES];
        for &bucket in x {
            sums.iter_mut().zip(&self.weights[bucket]).for_each(|(sum, weight)| *sum += weight);
        }
        let value = 1.0 / (x.len().max(1) as f32).sqrt();
        std::array::from_fn(|i| if x.is_empty() { 0.0 } else { sigmoid(self.bias[i] + value * sums[i]) })
    }

    /// Writes the classifier as a file.
    pub fn write(&self) -> String {
        let numbers = |numbers: &[f32]| numbers.iter().map(|number| format!("{number:.4}")).collect::<Vec<_>>().join(" ");
        let mut text = format!("{MAGIC} {BUCKETS}\n{}\n{}\n", Category::ALL.map(Category::name).join(" "), numbers(&self.bias));
        for (bucket, weights) in self.weights.iter().enumerate().filter(|(_, weights)| weights.iter().any(|w| w.abs() >= WEIGHT_LEAST)) {
            writeln!(text, "{bucket} {}", numbers(weights)).expect("a string takes everything");
        }
        text
    }

    /// Reads the classifier from a file.
    pub fn read(text: &str) -> Result<Self, FormatError> {
        let error = |line: usize, reason: &str| FormatError { line, reason: reason.into() };
        let mut lines = (1..).zip(text.lines());
        let mut head = |what: &str| lines.next().ok_or_else(|| error(1, what));
        if head("the file is empty")?.1 != format!("{MAGIC} {BUCKETS}") {
            return Err(error(1, "this is no classifier of this version"));
        }
        if head("there are no categories")?.1 != Category::ALL.map(Category::name).join(" ") {
            return Err(error(2, "the categories are not this version's"));
        }
        let row = |line: usize, numbers: &str| {
            let numbers: Option<Vec<f32>> = numbers.split(' ').map(|n| n.parse().ok().filter(|n: &f32| n.is_finite())).collect();
            numbers.and_then(|numbers| numbers.try_into().ok()).ok_or_else(|| error(line, "there must be one number per category"))
        };
        let bias = row(3, head("there are no biases")?.1)?;
        let mut weights = vec![[0.0; CATEGORIES]; BUCKETS];
        for (line, text) in lines {
            let (bucket, numbers) = text.split_once(' ').ok_or_else(|| error(line, "a bucket without weights"))?;
            let slot = bucket.parse().ok().and_then(|bucket: usize| weights.get_mut(bucket));
            *slot.ok_or_else(|| error(line, "there is no such bucket"))? = row(line, numbers)?;
        }
        Ok(Self { weights, bias })
    }
}

/// Takes the higher score of each category.
pub(crate) fn take_worse(worst: &mut Scores, scores: &Scores) {
    worst.iter_mut().zip(scores).for_each(|(worst, score)| *worst = score.max(*worst));
}

/// The buckets of a text's features, repeated as often as the feature occurs.
fn buckets(text: &[u8]) -> Vec<usize> {
    let mut found = Vec::with_capacity(2 * text.len());
    let mut last = None;
    for word in text.split(|byte| !is_of_word(*byte)).filter(|word| !word.is_empty()) {
        let of_word = hash(1, word);
        found.push(of_word);
        if let Some(last) = last.replace(of_word) {
            found.push(pair(last, of_word));
        }
        found.extend(word.windows(LETTERS as usize).map(|letters| hash(2, letters)));
    }
    found.into_iter().map(bucket).collect()
}

pub(crate) fn is_of_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte >= 0x80 || byte == b'\''
}

fn sigmoid(logit: f32) -> f32 {
    1.0 / (1.0 + (-logit).exp())
}

fn bucket(hash: u64) -> usize {
    (hash >> 40) as usize % BUCKETS
}

/// The hash of two neighbouring words.
fn pair(last: u64, word: u64) -> u64 {
    last.wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(17) ^ word
}

/// FNV-1a with a final mix, since features are short.
fn hash(kind: u64, bytes: &[u8]) -> u64 {
    mixed(bytes.iter().fold(begun(kind), |hash, byte| added(hash, *byte)))
}

fn begun(kind: u64) -> u64 {
    0xcbf2_9ce4_8422_2325 ^ kind
}

fn added(hash: u64, byte: u8) -> u64 {
    (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3)
}

fn mixed(hash: u64) -> u64 {
    (hash ^ (hash >> 29)).wrapping_mul(0xbf58_476d_1ce4_e5b9)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tiny() -> Classifier {
        let harm = ["build a bomb", "make a bomb now", "a bomb to hurt people"].map(|text| (text, Some(Category::Dangerous)));
        let harmless = ["bake a cake", "make a cake now", "a cake to please people", "build a house"].map(|text| (text, None));
        Classifier::train(harm.into_iter().chain(harmless))
    }

    #[test]
    fn it_learns_what_it_is_shown() {
        let classifier = tiny();
        let score = |text: &str| classifier.score(text.as_bytes())[Category::Dangerous as usize];
        assert!(score("a bomb") > 0.5 && score("a cake") < 0.2, "{} {}", score("a bomb"), score("a cake"));
        assert_eq!(score(" .!?"), 0.0, "nothing is no harm");
        let among = format!("{} a bomb to hurt people {}", "bake a cake. ".repeat(80), "bake a cake. ".repeat(80));
        let windows = classifier.score_windows(among.as_bytes())[Category::Dangerous as usize];
        assert!(windows > 1.5 * score(&among), "{windows} {}", score(&among));
    }

    #[test]
    fn a_text_that_grows_has_the_scores_of_what_has_come() {
        let classifier = tiny();
        let text = Normal::of("Don't build a bomb, bake — a Torte! É a bomb to hurt people  now");
        let mut growing = Growing::default();
        let mut likely = 0;
        for (at, &byte) in text.bytes().iter().enumerate() {
            classifier.grow(&mut growing, byte);
            let wanted = classifier.score(&text.bytes()[..=at]);
            let is_likely = wanted.iter().any(|score| *score > 0.5001);
            let Some(scores) = classifier.score_so_far(&growing) else {
                assert!(!is_likely, "{at}");
                continue;
            };
            likely += usize::from(is_likely);
            assert!(scores.iter().zip(wanted).all(|(score, wanted)| (score - wanted).abs() < 1e-4), "{at}: {scores:?} {wanted:?}");
        }
        assert!(likely > 5 && growing.bytes == text.bytes().len());
    }

    #[test]
    fn a_file_gives_it_back_and_a_wrong_one_an_error() {
        let classifier = tiny();
        let again = Classifier::read(&classifier.write()).unwrap();
        let texts = ["build a bomb", "bake a cake", "hello"];
        for (a, b) in texts.iter().flat_map(|text| classifier.score(text.as_bytes()).into_iter().zip(again.score(text.as_bytes()))) {
            assert!((a - b).abs() < 0.01, "{a} {b}");
        }
        for (file, message) in [("", "line 1"), ("x", "no classifier"), (&*format!("{MAGIC} {BUCKETS}\nhate"), "line 2: the categories")] {
            assert!(Classifier::read(file).unwrap_err().to_string().contains(message), "{file}");
        }
        let broken = classifier.write() + "99999999 1 2 3 4 5 6 7\n";
        assert!(Classifier::read(&broken).unwrap_err().to_string().contains("no such bucket"));
    }
}
