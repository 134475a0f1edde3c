//! The last stage: a model reads the parts of which the classifier is unsure, and answers with one word. As with Llama Guard (Inan et al.,
//! 2023), the score is the probability of that word as the first token.

use crate::{
    category::{Category, Finding, Stage, Threshold, Thresholds},
    classifier::{Scores, take_worse},
    guard::Guard,
    normal::Normal,
};
use std::borrow::Cow;

/// The maximum length of a doubt's text, which bounds the model's prompt for any input.
pub(crate) const PART_BYTES_MAX: usize = 2048;
/// The length of the text kept before the doubtful part of a longer text.
pub(crate) const BEFORE_BYTES: usize = 512;
/// The maximum number of doubts of one prompt, after short ones were joined. Of more, those with the highest scores are kept.
pub const DOUBTS_MAX: usize = 8;
/// The separator between joined doubts.
const BETWEEN: &str = "\n\n";
/// The least probability of both words together that counts as an answer.
const ANSWERED_MIN: f32 = 0.1;
/// Stands for the text in a prompt.
pub const PLACE: &str = "{text}";
/// Asks for `safe` or `unsafe`.
pub const PROMPT: &str = include_str!("../lists/judge.txt");

/// A part of a text that may be harmful, of which the classifier is unsure.
#[derive(Clone, PartialEq, Debug)]
pub struct Doubt {
    pub text: String,
    /// The suspected categories, the likeliest first; never empty.
    pub suspicions: Vec<Suspicion>,
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Suspicion {
    pub category: Category,
    /// The classifier's score.
    pub score: f32,
    /// The score from which a text is refused in this category.
    pub limit: f32,
}

impl Doubt {
    pub fn categories(&self) -> impl Iterator<Item = Category> {
        self.suspicions.iter().map(|suspicion| suspicion.category)
    }

    /// Returns the finding, if the model's score exceeds a limit.
    pub fn settle(&self, score: f32) -> Option<Finding> {
        let found = self.suspicions.iter().find(|suspicion| score >= suspicion.limit)?;
        Some(Finding { category: found.category, stage: Stage::Model, score })
    }

    /// The order of doubts: those that may be about children first, then the likelier ones.
    fn rank(&self) -> (bool, f32) {
        let of_children = self.categories().any(|category| category == Category::Csam);
        (of_children, self.suspicions.first().map_or(0.0, |suspicion| suspicion.score))
    }

    /// Appends a second doubt, if there is room.
    fn join(&mut self, other: &Self) -> bool {
        if self.text.len() + BETWEEN.len() + other.text.len() > PART_BYTES_MAX {
            return false;
        }
        self.text += BETWEEN;
        self.text += &other.text;
        for theirs in &other.suspicions {
            match self.suspicions.iter_mut().find(|ours| ours.category == theirs.category) {
                Some(ours) => ours.score = ours.score.max(theirs.score),
                None => self.suspicions.push(*theirs),
            }
        }
        self.suspicions.sort_by(|a, b| b.score.total_cmp(&a.score));
        true
    }
}

impl Guard {
    /// The parts of a text without a finding that should go to a later stage.
    pub fn doubts(&self, text: &str, thresholds: &Thresholds) -> Vec<Doubt> {
        let Some(classifier) = &self.classifier else { return Vec::new() };
        let normal = Normal::of(text);
        let mut parts: Vec<Part<'_>> = Vec::new();
        for (window, scores) in classifier.windows(normal.bytes()) {
            if suspicions(&scores, thresholds).is_empty() {
                continue;
            }
            let [start, end] = [window.start, window.end].map(|byte| normal.origin(byte, text.len()));
            if let Some(part) = parts.last_mut().filter(|part| end <= part.end) {
                take_worse(&mut part.scores, &scores);
                continue;
            }
            let from = text.floor_char_boundary(start.saturating_sub(BEFORE_BYTES));
            let part_end = text.floor_char_boundary(from + PART_BYTES_MAX);
            // A text hidden between many invisible characters is read without them.
            let (text, end) = match end <= part_end {
                true => (Cow::Borrowed(&text[from..part_end]), part_end),
                false => (String::from_utf8_lossy(&normal.bytes()[window]).into_owned().into(), start),
            };
            parts.push(Part { text, end, scores });
        }
        let doubt = |part: Part<'_>| Doubt { text: part.text.into_owned(), suspicions: suspicions(&part.scores, thresholds) };
        parts.into_iter().map(doubt).collect()
    }
}

/// A part of a text.
#[derive(Debug)]
struct Part<'a> {
    text: Cow<'a, str>,
    /// The end of the last window in it.
    end: usize,
    scores: Scores,
}

/// The suspected categories, the likeliest first.
pub(crate) fn suspicions(scores: &Scores, thresholds: &Thresholds) -> Vec<Suspicion> {
    let mut found: Vec<_> = doubtful(scores, thresholds).collect();
    found.sort_by(|a, b| b.score.total_cmp(&a.score));
    found
}

pub(crate) fn is_doubtful(scores: &Scores, thresholds: &Thresholds) -> bool {
    doubtful(scores, thresholds).next().is_some()
}

fn doubtful(scores: &Scores, thresholds: &Thresholds) -> impl Iterator<Item = Suspicion> {
    let of = |(category, score): (Category, &f32)| Suspicion { category, score: *score, limit: thresholds.of(category).score() };
    // A category that is switched off raises no doubts.
    let is_doubtful = |found: &Suspicion| found.limit.is_finite() && (Threshold::Low.score()..found.limit).contains(&found.score);
    Category::ALL.into_iter().zip(scores).map(of).filter(is_doubtful)
}

/// The doubts about a prompt as they are put to the model: the worst first, with short ones joined, so that a long conversation cannot hide
/// one among many.
pub fn packed(mut doubts: Vec<Doubt>) -> Vec<Doubt> {
    doubts.sort_by(|a, b| b.rank().0.cmp(&a.rank().0).then(b.rank().1.total_cmp(&a.rank().1)));
    let mut packed: Vec<Doubt> = Vec::new();
    for doubt in doubts {
        if !packed.iter_mut().any(|pack| pack.join(&doubt)) && packed.len() < DOUBTS_MAX {
            packed.push(doubt);
        }
    }
    packed
}

/// The tokens with which the model starts its answer for a harmless text, and for a harmful one.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Words {
    safe: Vec<u32>,
    unsafe_: Vec<u32>,
}

/// The words cannot be told apart: they start with the same token, or one of them has none.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error("this model's tokenizer begins both words with the same token, or has none for one of them")]
pub struct SameWord;

impl Words {
    /// `safe` and `unsafe_` are the first tokens of each word, in all its spellings.
    pub fn new(safe: Vec<u32>, unsafe_: Vec<u32>) -> Result<Self, SameWord> {
        let told_apart = !safe.is_empty() && !unsafe_.is_empty() && safe.iter().all(|token| !unsafe_.contains(token));
        told_apart.then_some(Self { safe, unsafe_ }).ok_or(SameWord)
    }

    /// The probability that the text is harmful, from the likeliest first tokens with their log-probabilities. A word that is not among
    /// them counts as slightly less likely than the last one. `None` if the model answered neither.
    pub fn score(&self, top: &[(u32, f32)]) -> Option<f32> {
        let sum = |words: &[u32]| top.iter().filter(|(token, _)| words.contains(token)).map(|(_, logprob)| logprob.exp()).sum::<f32>();
        let (safe, harmful) = (sum(&self.safe), sum(&self.unsafe_));
        let answered = safe + harmful;
        if answered.is_nan() || answered < ANSWERED_MIN {
            return None;
        }
        let rest = 1.0 - top.iter().map(|(_, logprob)| logprob.exp()).sum::<f32>();
        let last = top.iter().map(|(_, logprob)| logprob.exp()).fold(1.0, f32::min);
        let floor = last.min(rest.max(0.0));
        let or_floor = |p: f32| if p > 0.0 { p } else { floor };
        Some(or_floor(harmful) / (or_floor(harmful) + or_floor(safe)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn words() -> Words {
        Words::new(vec![1, 2], vec![3]).unwrap()
    }

    fn top(tokens: &[(u32, f32)]) -> Vec<(u32, f32)> {
        tokens.iter().map(|(token, p)| (*token, p.ln())).collect()
    }

    #[test]
    fn a_score_is_the_share_of_the_first_token() {
        for (tokens, wanted) in [
            (&[(3, 0.6), (1, 0.1), (2, 0.1), (9, 0.2)][..], Some(0.75)),
            (&[(1, 0.9), (3, 0.1)], Some(0.1)),
            // A word that is not listed is as likely as the last one, or as the remaining probability.
            (&[(3, 0.9), (9, 0.05)], Some(0.9 / 0.95)),
            (&[(1, 0.9), (9, 0.08)], Some(0.02 / 0.92)),
            (&[(3, 1.0)], Some(1.0)),
            (&[(8, 0.9), (3, 0.05), (1, 0.04)], None),
            (&[(3, f32::NAN), (1, 0.5)], None),
            (&[], None),
        ] {
            let score = words().score(&top(tokens));
            assert_eq!(score.is_some(), wanted.is_some(), "{tokens:?}");
            assert!(score.zip(wanted).is_none_or(|(score, wanted)| (score - wanted).abs() < 1e-4), "{tokens:?}: {score:?}");
        }
        assert_eq!([Words::new(vec![1], vec![1, 3]), Words::new(vec![], vec![3])], [Err(SameWord), Err(SameWord)]);
    }

    #[test]
    fn the_model_settles_what_its_score_reaches() {
        let suspicion = |category, score, limit| Suspicion { category, score, limit };
        let suspicions = vec![suspicion(Category::Hate, 0.7, 0.95), suspicion(Category::Harassment, 0.6, 0.8)];
        let doubt = Doubt { text: String::new(), suspicions };
        let settled = |score| doubt.settle(score).map(|finding| (finding.category, finding.stage));
        let by_model = |category| Some((category, Stage::Model));
        assert_eq!([0.96, 0.9, 0.7].map(settled), [by_model(Category::Hate), by_model(Category::Harassment), None]);
    }

    #[test]
    fn what_the_classifier_is_not_sure_of_is_doubted_where_it_stands() {
        let guard = Guard::built_in();
        let held_out: Vec<_> = crate::corpus::examples(crate::corpus::HELD_OUT).unwrap().into_iter().map(|(text, _)| text).collect();
        let sentence = held_out.iter().find(|text| guard.examine(text, &Thresholds::INPUT) == (None, true));
        let sentence = sentence.expect("the classifier is not sure of everything");
        let texts = |text: &str| guard.doubts(text, &Thresholds::INPUT).into_iter().map(|doubt| doubt.text).collect::<Vec<_>>();
        assert_eq!(texts(sentence), [sentence.as_str()]);

        // Once or twice in a long text: some passage is doubtful there as well.
        let (before, behind) = ("The bread is on the table. ".repeat(200), " The tea is hot. The tea is cold.".repeat(200));
        let passages = held_out.iter().flat_map(|text| (1..6).map(|times| vec![text.as_str(); times].join(". ")));
        let among = |passage: &str| format!("{before}{passage}{behind}");
        let mut doubtful = passages.filter(|passage| guard.examine(&among(passage), &Thresholds::INPUT) == (None, true));
        let passage = doubtful.next().expect("one of many");
        let found = texts(&among(&passage));
        assert!(found.len() == 1 && found[0].contains(&passage) && found[0].len() <= PART_BYTES_MAX, "{found:?}");
        let found = texts(&among(&passage).repeat(2));
        assert!(found.len() == 2 && found.iter().all(|part| part.contains(&passage)), "{found:?}");

        // Spread over more text than a part has room for.
        let spread: String = sentence.chars().flat_map(|c| std::iter::once(c).chain(std::iter::repeat_n('\u{200b}', 200))).collect();
        let found = texts(&spread);
        assert!(found.len() == 1 && found[0].len() <= sentence.len() && !found[0].contains('\u{200b}'), "{found:?}");

        let mut off = Thresholds::INPUT;
        Category::ALL.into_iter().for_each(|category| off.set(category, Threshold::Off));
        assert!(guard.doubts(sentence, &off).iter().flat_map(Doubt::categories).all(|category| category == Category::Csam));
        assert_eq!(texts("Good morning!"), [""; 0]);
        assert!(PROMPT.contains(PLACE));
    }

    #[test]
    fn short_doubts_go_together_and_the_worst_are_not_left_out() {
        let doubt = |text: &str, category, score| Doubt { text: text.into(), suspicions: vec![Suspicion { category, score, limit: 0.95 }] };
        let short = [doubt("a", Category::Hate, 0.6), doubt("b", Category::Sexual, 0.7), doubt("c", Category::Csam, 0.5)];
        let [one] = &packed(short.to_vec())[..] else { panic!("they fit together") };
        assert_eq!(one.text, "c\n\nb\n\na");
        let of_each: Vec<_> = one.suspicions.iter().map(|found| (found.category, found.score)).collect();
        assert_eq!(of_each, [(Category::Sexual, 0.7), (Category::Hate, 0.6), (Category::Csam, 0.5)]);

        let long = "x".repeat(PART_BYTES_MAX);
        let mut many = vec![doubt(&long, Category::Hate, 0.9); 2 * DOUBTS_MAX];
        many.push(doubt(&long, Category::Csam, 0.5));
        let kept = packed(many);
        assert_eq!((kept.len(), kept[0].suspicions[0].category), (DOUBTS_MAX, Category::Csam));
    }
}
