//! The texts most relevant to a question, by BM25 (Robertson and Zaragoza, 2009).
//!
//! A chat has loaded its conversation anyway, so there is no index that could be stale, and every store ranks alike.

use std::collections::HashMap;

/// The saturation of a word's frequency, and the penalty for a text's length: the usual values.
const K1: f64 = 1.2;
const B: f64 = 0.75;

/// The relevance of texts to a question.
#[derive(Clone, Debug, PartialEq)]
pub struct Relevance {
    /// The score of each text: 0 for one without a common word.
    pub scores: Vec<f64>,
    /// A score that no text exceeds, however often it repeats each word of the question.
    pub bound: f64,
}

/// Returns the places of the `most` most relevant texts, the best first. Of equal ones, the later goes first; texts without a common word
/// are left out.
pub fn best(question: &str, texts: &[&str], most: usize) -> Vec<usize> {
    best_of(relevance(question, texts).scores.into_iter().enumerate().filter(|(_, score)| *score > 0.0), most)
}

/// Returns the places with the highest scores, the best first. Of equal ones, the later goes first.
pub(super) fn best_of(scores: impl Iterator<Item = (usize, f64)>, most: usize) -> Vec<usize> {
    let mut ranked: Vec<_> = scores.collect();
    ranked.sort_by(|(place, score), (other_place, other)| other.total_cmp(score).then(other_place.cmp(place)));
    ranked.truncate(most);
    ranked.into_iter().map(|(place, _)| place).collect()
}

/// Returns the score of each text.
pub fn relevance(question: &str, texts: &[&str]) -> Relevance {
    // The words of the question in order, since sums of floats depend on it.
    let mut asked: HashMap<String, usize> = HashMap::new();
    each_word(question, |word| {
        let next = asked.len();
        asked.entry(word.to_owned()).or_insert(next);
    });
    let mut having = vec![0u32; asked.len()];
    let mut counted = Vec::with_capacity(texts.len());
    let mut words_of_all = 0u64;
    for text in texts {
        let mut words = 0u32;
        let mut found: Vec<(usize, u32)> = Vec::new();
        each_word(text, |word| {
            words += 1;
            if let Some(&place) = asked.get(word) {
                match found.iter_mut().find(|(other, _)| *other == place) {
                    Some((_, count)) => *count += 1,
                    None => found.push((place, 1)),
                }
            }
        });
        found.sort_unstable();
        found.iter().for_each(|&(place, _)| having[place] += 1);
        words_of_all += u64::from(words);
        counted.push((words, found));
    }
    let mean = words_of_all as f64 / texts.len().max(1) as f64;
    let rarity = |place: usize| {
        let having = f64::from(having[place]);
        (1.0 + (texts.len() as f64 - having + 0.5) / (having + 0.5)).ln()
    };
    let score = |(words, found): &(u32, Vec<(usize, u32)>)| -> f64 {
        let length = 1.0 - B + B * f64::from(*words) / mean;
        found.iter().map(|&(place, count)| rarity(place) * f64::from(count) * (K1 + 1.0) / (f64::from(count) + K1 * length)).sum()
    };
    Relevance { scores: counted.iter().map(score).collect(), bound: (0..asked.len()).map(|place| rarity(place) * (K1 + 1.0)).sum() }
}

/// Visits runs of letters and digits, in lower case. In scripts without spaces, each character is a word.
fn each_word(text: &str, mut act: impl FnMut(&str)) {
    let mut word = String::new();
    let mut end = |word: &mut String| {
        if !word.is_empty() {
            act(word);
            word.clear();
        }
    };
    for character in text.chars() {
        if character.is_ascii_alphanumeric() {
            word.push(character.to_ascii_lowercase());
        } else if !character.is_alphanumeric() {
            end(&mut word);
        } else if is_a_word(character) {
            end(&mut word);
            word.push(character);
            end(&mut word);
        } else {
            word.extend(character.to_lowercase());
        }
    }
    end(&mut word);
}

/// Whether a character is a word by itself: Chinese, Japanese, and Thai and its neighbours.
fn is_a_word(character: char) -> bool {
    matches!(character, '\u{0e00}'..='\u{0fff}' | '\u{1000}'..='\u{109f}' | '\u{1780}'..='\u{17ff}' | '\u{3040}'..='\u{30ff}'
        | '\u{3400}'..='\u{4dbf}' | '\u{4e00}'..='\u{9fff}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{323af}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rare_words_count_more_than_common_ones() {
        let texts = ["The tide comes at noon.", "The wheel turns, the mill grinds.", "My sister's name is Ada.", "The tide goes at six."];
        assert_eq!(best("When does the tide come at noon?", &texts, 2), [0, 3]);
        assert_eq!(best("What is my SISTER's name?", &texts, 1), [2]);
        assert_eq!(best("Nothing in common?", &texts, 4), [] as [usize; 0]);
        assert_eq!(best("", &texts, 4), [] as [usize; 0]);
        assert_eq!(best("tide", &[], 4), [] as [usize; 0]);
    }

    #[test]
    fn scores_are_those_of_the_formula() {
        // Worked by hand: two texts of 2 and 4 words, mean 3; `a` is in both, `b` in the second only.
        // idf(a) = ln(1 + 0.5 / 2.5) = 0.18232, idf(b) = ln(1 + 1.5 / 1.5) = 0.69315.
        // First: a twice, length 0.75: 0.18232 · 2 · 2.2 / (2 + 0.9) = 0.2766. Second: a once, length 1.25: 0.18232 · 2.2 / 2.5 = 0.1604;
        // with b, 0.69315 · 2.2 / 2.5 = 0.6100 more.
        assert_eq!(best("a", &["a a", "a b x y"], 2), [0, 1]);
        assert_eq!(best("a b", &["a a", "a b x y"], 2), [1, 0]);
    }

    #[test]
    fn no_score_exceeds_the_bound() {
        let texts = ["a a a a a a a a a a a a", "a b", "c"];
        let Relevance { scores, bound } = relevance("a b", &texts);
        assert!(scores.iter().all(|score| *score <= bound) && scores[2] == 0.0, "{scores:?} {bound}");
        assert_eq!(relevance("", &texts).bound, 0.0);
    }

    #[test]
    fn the_later_of_equals_comes_first_and_some_words_have_no_spaces() {
        assert_eq!(best("wheel", &["wheel", "other", "wheel"], 3), [2, 0]);
        assert_eq!(best("潮汐几点", &["风车", "今天的潮汐", "海"], 3), [1]);
        assert_eq!(best("ÜBER", &["über uns"], 1), [0]);
    }
}
