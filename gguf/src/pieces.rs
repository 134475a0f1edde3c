//! SentencePiece's pieces and scores as the merges of byte-pair encoding: a piece of a higher score is made first.

use std::collections::HashMap;

/// The most characters of a piece that is merged from parts. Longer ones, such as rows of spaces, are looked up as a whole.
const CHARACTERS_MAX: usize = 256;

/// The merges in order: each piece from each pair that it can be made of, those of the highest score first; of one score, those with the
/// longer left part and then the longer right part first, and then in the order of the pieces and of their parts. `None` if there are more
/// than `most`.
pub(crate) fn merges<'a>(pieces: &[(&'a str, f32)], ids: &HashMap<&str, u32>, most: usize) -> Option<Vec<(&'a str, &'a str)>> {
    struct Merge<'a> {
        score: f32,
        lengths: (usize, usize),
        parts: (&'a str, &'a str),
    }
    let mut merges = Vec::new();
    for &(piece, score) in pieces {
        let characters = piece.chars().count();
        if characters > CHARACTERS_MAX {
            continue;
        }
        let first = merges.len();
        for (left_len, (at, _)) in piece.char_indices().enumerate().skip(1) {
            let (left, right) = piece.split_at(at);
            if ids.contains_key(left) && ids.contains_key(right) {
                merges.push(Merge { score, lengths: (left_len, characters - left_len), parts: (left, right) });
            }
        }
        merges[first..].sort_by_key(|merge: &Merge<'_>| (ids[merge.parts.0], ids[merge.parts.1]));
        if merges.len() > most {
            return None;
        }
    }
    merges.sort_by(|a, b| b.score.total_cmp(&a.score).then(b.lengths.cmp(&a.lengths)));
    Some(merges.into_iter().map(|merge| merge.parts).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn higher_scores_are_merged_first() {
        let pieces = [("a", -9.0), ("b", -9.0), ("c", -9.0), ("ab", -2.0), ("bc", -1.0), ("abc", -3.0)];
        let ids = pieces.iter().zip(0..).map(|((piece, _), id)| (*piece, id)).collect();
        assert_eq!(merges(&pieces, &ids, 4).unwrap(), [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]);
        assert_eq!(merges(&pieces, &ids, 3), None);
    }
}
