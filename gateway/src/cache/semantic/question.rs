//! A question in the form in which it is compared: a vector of its meaning, and what a vector does not see.
//!
//! To an embedding "5 miles" is nearly "50 miles", "to Rome" nearly "from Rome", and a password nearly a username. So a vector is believed
//! only where the words allow it:
//!
//! - *Equal* must be the language, numbers, signs, quotations and code, whether something is negated, relations (`from`, `after`, `or`), and
//!   the kind of question. These are part of the key under which a question is looked up.
//! - *In both* must be each name (a word with a capital), and what is negated or related to: "without eggs" is not "without milk".
//! - *In one order* must be the words that both have. A part of the sentence may have moved; neighbours that changed places have not.
//! - *In one only* may be words that only one of the questions adds. Each costs some similarity (`WORD_COST`). Where both have a word that the
//!   other lacks, something was replaced.
//!
//! Word forms count as one word if they begin alike. Apart from a table of closed classes (`words`) no language is known: in others,
//! words are compared all the same. A pure function of the text.

use super::{
    text::{Capitals, Piece, pieces},
    words::{self, Class},
};
use crate::vectors::vector::Vector;

/// The maximum length of a question: longer texts are seldom repeated.
const BYTES_MAX: usize = 1024;
/// The maximum number of words that are compared with each other.
const WORDS_MAX: usize = 96;

/// The similarity that a word costs which only one of two questions has. Chosen, with the threshold, on the paraphrase set.
const WORD_COST: f32 = 0.08;

/// A question in the form in which it is compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// The parts that must be equal.
    pub exact: Box<[u8]>,
    /// The words that are not of a closed class, in order.
    words: Box<[Word]>,
    tense: Tense,
    /// The encoder's vector of the text, once there is one.
    vector: Option<Vector>,
}

#[derive(Clone, Debug, PartialEq)]
struct Word {
    text: Box<str>,
    is_name: bool,
    /// The negation or relation that stands before it.
    bound: Option<&'static str>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Tense {
    past: bool,
    now: bool,
}

impl Question {
    /// Reads a question. Returns `None` if it is too long, or has nothing to compare.
    pub fn read(text: &str) -> Option<Self> {
        if text.len() > BYTES_MAX {
            return None;
        }
        let pieces = pieces(text);
        let mut reading = Reading::new(&pieces);
        pieces.iter().for_each(|piece| reading.take(piece));
        let asks = text.trim_end().ends_with(['?', '？', '؟']);
        let question = reading.question(asks);
        let says_something = !question.words.is_empty() || !pieces.iter().all(|piece| matches!(piece, Piece::Word { .. } | Piece::Sign(_)));
        (question.words.len() <= WORDS_MAX && says_something).then_some(question)
    }

    /// The question with its vector.
    pub fn with_vector(self, vector: Vector) -> Self {
        Self { vector: Some(vector), ..self }
    }

    /// The cosine of two questions' vectors; `None` without vectors.
    pub fn cosine(&self, other: &Self) -> Option<f32> {
        Some(self.vector.as_ref()?.cosine(other.vector.as_ref()?))
    }

    /// The similarity of two questions with this cosine that are equal in what must be equal; `None` if their words differ in what one
    /// answer cannot serve.
    pub fn similarity(&self, other: &Self, cosine: f32) -> Option<f32> {
        let (mine, theirs) = (self.tense, other.tense);
        let shifted = |a: Tense, b: Tense| a.past && !b.past && b.now;
        if shifted(mine, theirs) || shifted(theirs, mine) {
            return None;
        }
        let extra = self.extra_words(other)?;
        Some((cosine - WORD_COST * extra as f32).max(0.0))
    }

    /// The approximate size in memory.
    pub fn bytes(&self) -> u64 {
        let words = self.words.iter().map(|word| word.text.len() + size_of::<Word>()).sum::<usize>();
        (self.exact.len() + words) as u64 + self.vector.as_ref().map_or(0, Vector::bytes)
    }

    /// The number of words that one question has and the other lacks; `None` if the words do not allow one answer.
    fn extra_words(&self, other: &Self) -> Option<usize> {
        let binds = |bound: &Word, by: &Word| bound.bound == by.bound && is_same(&bound.text, &by.text);
        let bindings_are_in =
            |a: &Self, b: &Self| a.words.iter().filter(|word| word.bound.is_some()).all(|word| b.words.iter().any(|by| binds(word, by)));
        if !bindings_are_in(self, other) || !bindings_are_in(other, self) {
            return None;
        }
        let places = self.places_in(other);
        let lacks_name = |(word, place): (&Word, &Option<usize>)| place.is_none() && word.is_name;
        let found: Vec<usize> = places.iter().flatten().copied().collect();
        let theirs = other.words.iter().enumerate().filter(|(place, _)| !found.contains(place));
        if self.words.iter().zip(&places).any(lacks_name) || theirs.clone().any(|(_, word)| word.is_name) || !is_in_order(&found) {
            return None;
        }
        match (self.words.len() - found.len(), theirs.count()) {
            (0, extra) | (extra, 0) => Some(extra),
            _ => None,
        }
    }

    /// The place of each word in the other question, where it has it. No place is given twice.
    fn places_in(&self, other: &Self) -> Vec<Option<usize>> {
        let mut taken = vec![false; other.words.len()];
        let mut place = |word: &Word| {
            let is_word = |by: &Word| match word.is_name || by.is_name {
                true => is_same_name(&word.text, &by.text),
                false => is_same(&word.text, &by.text),
            };
            let place = other.words.iter().zip(&taken).position(|(by, taken)| !taken && is_word(by))?;
            taken[place] = true;
            Some(place)
        };
        self.words.iter().map(&mut place).collect()
    }
}

/// The parts of a question that have been read.
struct Reading {
    language: usize,
    classes: &'static words::Words,
    numbers: Vec<String>,
    signs: String,
    quotations: Vec<String>,
    kinds: Vec<&'static str>,
    asks_what: bool,
    is_negated: bool,
    relations: Vec<&'static str>,
    tense: Tense,
    words: Vec<Word>,
    /// The negation or relation that the next word is bound by.
    binds: Option<&'static str>,
}

impl Reading {
    fn new(pieces: &[Piece]) -> Self {
        let texts = pieces.iter().filter_map(|piece| if let Piece::Word { text, .. } = piece { Some(text.as_str()) } else { None });
        let (language, classes) = words::language(texts);
        Self {
            language,
            classes,
            numbers: Vec::new(),
            signs: String::new(),
            quotations: Vec::new(),
            kinds: Vec::new(),
            asks_what: false,
            is_negated: false,
            relations: Vec::new(),
            tense: Tense::default(),
            words: Vec::new(),
            binds: None,
        }
    }

    fn take(&mut self, piece: &Piece) {
        match piece {
            Piece::Number(number) => self.numbers.push(number.clone()),
            Piece::Sign(sign) => self.signs.push(*sign),
            Piece::Quotation(quoted) => self.quotations.push(quoted.clone()),
            Piece::Word { text, capitals } => self.word(text, *capitals),
        }
    }

    fn word(&mut self, text: &str, capitals: Capitals) {
        // "it" says nothing, and IT does.
        let class = self.classes.get(text).filter(|class| **class != Class::Light || capitals != Capitals::Later);
        match class {
            None => {
                let is_name = capitals != Capitals::Ordinary;
                self.words.push(Word { text: text.into(), is_name, bound: self.binds.take() });
            }
            Some(Class::Light) => {}
            Some(Class::Number(number)) => self.numbers.push((*number).to_owned()),
            Some(Class::Kind(kind)) => self.kinds.push(kind),
            Some(Class::What) => self.asks_what = true,
            Some(Class::Past) => self.tense.past = true,
            Some(Class::Now) => self.tense.now = true,
            Some(Class::Not) => {
                self.is_negated = true;
                self.binds = Some("not");
            }
            Some(Class::Relation(relation)) => {
                self.relations.push(relation);
                if !UNBOUND.contains(relation) {
                    self.binds = Some(relation);
                }
            }
        }
    }

    /// The question, which ends with a question mark if it `asks`.
    fn question(mut self, asks: bool) -> Question {
        for set in [&mut self.kinds, &mut self.relations] {
            set.sort_unstable();
            set.dedup();
        }
        // An order ("explain …") and a question after a thing ("what is …") may ask the same; whether something is so is another question.
        let is_open = self.asks_what || !asks;
        let kind = if self.kinds.is_empty() { if is_open { "open" } else { "whether" } } else { "" };
        let exact = ((self.language, &self.numbers, &self.signs, &self.quotations), (kind, &self.kinds, self.is_negated, &self.relations));
        let exact = serde_json::to_vec(&exact).expect("plain data").into();
        Question { exact, words: self.words.into(), tense: self.tense, vector: None }
    }
}

/// Whether words came from one order: a part of them may have moved as a whole, if it is more than neighbours that changed places.
fn is_in_order(places: &[usize]) -> bool {
    let mut sorted = places.to_vec();
    sorted.sort_unstable();
    let rank = |place: &usize| sorted.binary_search(place).expect("it is one of them");
    let ranks: Vec<usize> = places.iter().map(rank).collect();
    let mut falls = ranks.windows(2).filter(|two| two[1] < two[0]);
    let is_swap = |two: &[usize]| two[1] + 1 == two[0];
    match (falls.next(), falls.next()) {
        (None, _) => true,
        (Some(fall), None) => !is_swap(fall),
        (Some(_), Some(_)) => false,
    }
}

/// Whether two words are forms of one: they begin alike.
fn is_same(a: &str, b: &str) -> bool {
    let (shared, longer) = beginnings(a, b);
    a == b || shared >= 4 && 5 * shared >= 3 * longer || shared >= 3 && longer - shared <= 1
}

/// Whether two words are forms of one name: but for a last letter they are equal.
fn is_same_name(a: &str, b: &str) -> bool {
    let (shared, longer) = beginnings(a, b);
    a == b || shared >= 4 && longer - shared <= 1
}

/// The number of characters with which both words begin, and that of the longer word.
fn beginnings(a: &str, b: &str) -> (usize, usize) {
    let shared = a.chars().zip(b.chars()).take_while(|(a, b)| a == b).count();
    (shared, a.chars().count().max(b.chars().count()))
}

/// Relations that are not to a particular word.
const UNBOUND: [&str; 4] = ["or", "if", "your", "off"];

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The number of words that only one of two questions has, if one answer could serve both.
    fn extra(a: &str, b: &str) -> Option<usize> {
        let (a, b) = (Question::read(a).unwrap(), Question::read(b).unwrap());
        let similarity = |a: &Question, b: &Question| a.similarity(b, 1.0).filter(|_| a.exact == b.exact);
        assert_eq!(similarity(&a, &b), similarity(&b, &a), "{a:?} {b:?}");
        similarity(&a, &b).map(|similarity| ((1.0 - similarity) / WORD_COST).round() as usize)
    }

    #[test]
    fn other_words_for_the_same() {
        for (a, b, words) in [
            ("How do I reset my password?", "What is the way to reset a password?", 0),
            ("What is the capital of Chile?", "Tell me the capital of Chile.", 0),
            ("How do I delete my account?", "How can I delete my old account?", 1),
            ("Pancakes with no eggs?", "Pancakes without eggs?", 1),
            ("Give me three tips", "Give me 3 tips", 0),
            ("Welche drei Tipps hast du?", "Nenne 3 gute Tipps", 1),
            ("Je ne peux pas annuler ma commande", "Je ne peux pas annuler la commande", 0),
            ("¿Cómo cancelo mi pedido?", "¿Cómo puedo cancelar el pedido?", 0),
            ("Как отменить заказ?", "Как можно отменить заказ?", 0),
        ] {
            assert_eq!(extra(a, b), Some(words), "{a} / {b}");
        }
    }

    #[test]
    fn what_one_answer_cannot_serve() {
        for (a, b) in [
            ("Convert 5 miles to kilometers", "Convert 50 miles to kilometers"),
            ("Compute 3 + 4", "Compute 3 * 4"),
            ("Compute 3 - 4", "Compute 3 4"),
            ("How hot is -5 degrees?", "How hot is 5 degrees?"),
            ("The first step of the recipe", "The second step of the recipe"),
            ("Is the shop open?", "Is the shop not open?"),
            ("Isn't the shop open?", "Is the shop open?"),
            ("Pancakes with eggs", "Pancakes without eggs"),
            ("Pancakes without milk, with eggs", "Pancakes without eggs, with milk"),
            ("How tall is Anna?", "How tall is Hannah?"),
            ("Which train goes to Rome?", "Which train goes?"),
            ("Flights from Oslo to Rome", "Flights from Rome to Oslo"),
            ("Flights to Oslo from Rome", "Flights from Oslo to Rome"),
            ("Convert euros to dollars", "Convert dollars to euros"),
            ("Is a horse faster than a cheetah?", "Is a cheetah faster than a horse?"),
            ("Translate 'good night' into French", "Translate 'good day' into French"),
            ("What does `ls -l` do?", "What does `ls -a` do?"),
            ("What is new in C++?", "What is new in C#?"),
            ("Why do cats purr?", "How do cats purr?"),
            ("Can I return it?", "How can I return it?"),
            ("Return before Monday?", "Return after Monday?"),
            ("What is the name of the king?", "What was the name of the king?"),
            ("Reset my password", "Reset my username"),
            ("What about [EMAIL_1]?", "What about [EMAIL_2]?"),
            ("What is inflation?", "Was ist Inflation?"),
            ("Hat der Laden offen?", "Hat der Laden nicht offen?"),
            ("Crêpes avec du lait", "Crêpes sans lait"),
            ("Можно ли собакам молоко?", "Нельзя собакам молоко?"),
            ("狗可以吃吗？", "狗不可以吃吗？"),
            ("२५ किलो", "२६ किलो"),
        ] {
            assert_eq!(extra(a, b), None, "{a} / {b}");
        }
    }

    #[test]
    fn a_part_may_move_and_neighbours_may_not_change_places() {
        assert!(is_in_order(&[]) && is_in_order(&[7]) && is_in_order(&[1, 4, 9]));
        assert!(is_in_order(&[6, 7, 0, 3]), "the end came to the front");
        assert!(!is_in_order(&[0, 5, 2, 9]));
        assert!(!is_in_order(&[3, 1, 2, 0]));
    }

    #[test]
    fn what_says_nothing_is_not_read() {
        for text in ["", "What is this?", "How?", "…", &"very long ".repeat(200), &"go stop ".repeat(60)] {
            assert_eq!(Question::read(text), None, "{text}");
        }
        assert!(Question::read("今天天气怎么样?").is_some() && Question::read("2 + 2").is_some());
    }

    proptest! {
        #[test]
        fn any_text_is_as_it_is(text in "\\PC{0,80}") {
            if let Some(question) = Question::read(&text) {
                prop_assert_eq!(question.similarity(&question, 1.0), Some(1.0));
            }
        }
    }
}
