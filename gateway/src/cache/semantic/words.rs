//! The words of closed classes, by language (`words.txt`).

use std::{collections::HashMap, sync::LazyLock};

/// The meaning of a word of a closed class.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Class {
    /// Nothing that tells one question from another.
    Light,
    /// A number or an ordinal, as its digits.
    Number(&'static str),
    /// A negation.
    Not,
    /// The kind of a question: why, when, where or who.
    Kind(&'static str),
    /// A question of another kind: what, which, how.
    What,
    /// A relation to the words around: from, after, than, or.
    Relation(&'static str),
    Past,
    Now,
}

/// The classes of one language's words.
pub(super) type Words = HashMap<&'static str, Class>;

/// The words of the language that has most of these words; of the first one if none has more than others.
pub(super) fn language<'a>(words: impl Iterator<Item = &'a str> + Clone) -> (usize, &'static Words) {
    let found = |of: &Words| words.clone().filter(|word| of.contains_key(word)).count();
    let languages = LANGUAGES.iter().enumerate().rev();
    languages.max_by_key(|(_, of)| found(of)).expect("there are languages")
}

static LANGUAGES: LazyLock<Vec<Words>> = LazyLock::new(|| {
    let mut languages: Vec<Words> = Vec::new();
    for line in include_str!("words.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if line.starts_with('[') {
            languages.push(Words::new());
            continue;
        }
        let mut words = line.split(' ');
        let class = class(words.next().expect("a line has a first word"));
        languages.last_mut().expect("a language comes first").extend(words.map(|word| (word, class)));
    }
    languages
});

fn class(name: &'static str) -> Class {
    match name {
        "light" => Class::Light,
        "not" => Class::Not,
        "why" | "when" | "where" | "who" => Class::Kind(name),
        "what" => Class::What,
        "past" => Class::Past,
        "now" => Class::Now,
        "last" => Class::Number(name),
        number if number.starts_with(|c: char| c.is_ascii_digit()) => Class::Number(number),
        relation => Class::Relation(relation),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_questions_language_is_that_of_its_words() {
        let of = |text: &'static str| language(text.split(' ')).1;
        assert_eq!(of("how is the weather")["is"], Class::Now);
        assert_eq!(of("was ist das für ein hund")["was"], Class::What);
        assert_eq!(of("wetter")["was"], Class::Past, "the first language, if none is known");
        assert_eq!(of("сколько стоит доставка в минск")["не"], Class::Not);
    }

    #[test]
    fn a_word_has_one_class_in_a_language() {
        let (mut language, mut seen) = ("", Vec::new());
        for line in include_str!("words.txt").lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
            match line.starts_with('[') {
                true => (language, seen) = (line, Vec::new()),
                false => {
                    let words: Vec<_> = line.split(' ').skip(1).collect();
                    let twice: Vec<_> = words.iter().filter(|word| seen.contains(*word)).collect();
                    assert!(twice.is_empty(), "{language}: {twice:?}");
                    seen.extend(words);
                }
            }
        }
    }
}
