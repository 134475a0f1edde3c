//! The texts most relevant to a question, by their words and their meaning.
//!
//! Words find names, numbers and codes; vectors find what is said in other words. A text's score is the cosine of its vector and the
//! question's, and half of the part that its BM25 score reaches of the highest possible one: a convex combination of scores, each normalized
//! by its theoretical bound (Bruch, Gai and Ingber, "An Analysis of Fusion Functions for Hybrid Retrieval", 2023). A fusion of ranks alone
//! (reciprocal rank fusion; Cormack et al., 2009) was measured beside it and finds less: the first by words may share no more than an article
//! with the question, and its rank does not tell.
//!
//! A text without a vector has its words' part alone, and without the question's vector all texts have.

use super::bm25::{self, Relevance};
use crate::vectors::vector::Vector;
use std::sync::Arc;

/// The weight of words beside vectors. Chosen on one of two sets of questions (`examples/retrieval_recall.rs`).
pub const WORDS: f64 = 0.5;

/// The vectors of a question and of texts.
#[derive(Debug)]
pub struct Meaning {
    pub question: Arc<Vector>,
    /// The vector of each text that has one.
    pub texts: Vec<Option<Arc<Vector>>>,
}

/// Returns the places of the `most` texts that are most relevant to a question, the best first. Of equal ones, the later goes first. Texts with
/// neither a common word nor a vector are left out.
pub fn best(question: &str, texts: &[&str], meaning: Option<&Meaning>, most: usize) -> Vec<usize> {
    match meaning {
        Some(meaning) => fused(question, texts, meaning, WORDS, most),
        None => bm25::best(question, texts, most),
    }
}

/// The ranking by words and vectors with this weight of words.
pub fn fused(question: &str, texts: &[&str], meaning: &Meaning, weight: f64, most: usize) -> Vec<usize> {
    let Relevance { scores, bound } = bm25::relevance(question, texts);
    let fused = scores.iter().zip(&meaning.texts).enumerate().filter_map(|(place, (words, vector))| {
        let cosine = vector.as_ref().map(|vector| f64::from(meaning.question.cosine(vector)));
        let words = if bound > 0.0 { weight * words / bound } else { 0.0 };
        (words > 0.0 || cosine.is_some()).then(|| (place, words + cosine.unwrap_or(0.0)))
    });
    bm25::best_of(fused, most)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const TEXTS: [&str; 4] = ["Our boat is the Marigold.", "The berth costs forty.", "It coughs when it is cold.", "Thank you."];

    /// Vectors in a plane, by their angles in degrees.
    fn meaning(question: f32, texts: &[Option<f32>]) -> Meaning {
        let vector = |degrees: f32| {
            let (sine, cosine) = degrees.to_radians().sin_cos();
            Arc::new(Vector::new(&[cosine, sine]).unwrap())
        };
        Meaning { question: vector(question), texts: texts.iter().map(|text| text.map(vector)).collect() }
    }

    #[test]
    fn what_is_said_in_other_words_is_found_by_its_vector() {
        let meaning = meaning(0.0, &[Some(80.0), Some(85.0), Some(10.0), Some(90.0)]);
        assert_eq!(best("Why does our engine not start?", &TEXTS, Some(&meaning), 1), [2]);
        assert_eq!(best("Why does our engine not start?", &TEXTS, None, 4), [0], "words alone");
    }

    #[test]
    fn a_name_is_found_by_its_word() {
        let meaning = meaning(0.0, &[Some(60.0), Some(50.0), Some(65.0), Some(70.0)]);
        assert_eq!(best("Marigold?", &TEXTS, Some(&meaning), 2), [0, 1]);
    }

    #[test]
    fn a_text_without_a_vector_has_its_words() {
        let meaning = meaning(0.0, &[None, None, Some(80.0), Some(89.0)]);
        assert_eq!(best("Marigold?", &TEXTS, Some(&meaning), 4), [0, 2, 3]);
    }

    proptest! {
        #[test]
        fn places_are_distinct_and_the_same_each_time(question in "\\PC{0,20}", angles in prop::collection::vec(prop::option::of(0.0f32..360.0), 4), most in 0usize..6) {
            let meaning = meaning(0.0, &angles);
            let ranked = best(&question, &TEXTS, Some(&meaning), most);
            prop_assert_eq!(&ranked, &best(&question, &TEXTS, Some(&meaning), most));
            prop_assert!(ranked.len() <= most && ranked.iter().all(|place| *place < 4));
            let mut sorted = ranked.clone();
            sorted.sort_unstable();
            sorted.dedup();
            prop_assert_eq!(sorted.len(), ranked.len());
        }
    }
}
