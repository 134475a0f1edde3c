//! The similarity of two questions, without a model: the words that they share, and the parts that must be equal for one answer to serve
//! both.
//!
//! A question becomes a vector of hashed features: words (rare ones weigh more: a list says which are common), their trigrams of letters,
//! and pairs of neighbours. That alone takes "5 miles" for "50 miles". So some features are *guards* that must be equal: numbers, negated
//! words, quotations, code, signs, the kind of question, tense and possessor; names must be in both and in one order; and origins and
//! destinations must not be swapped. A pure function of the texts. It knows English; a question in letters other than Latin is not read.

use std::{
    collections::{HashMap, HashSet},
    hash::{DefaultHasher, Hash, Hasher},
    sync::LazyLock,
};

/// The maximum length of a question: longer texts are seldom repeated.
const BYTES_MAX: usize = 1024;

/// The weights of a question's features, relative to a word that is not common.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Weights {
    /// The weight of a common word; the more other words there are, the less it weighs.
    pub common: f32,
    /// The weight of a question's form (how, what).
    pub form: f32,
    /// The share of a word's weight in its letters; the rest is in the whole word.
    pub letters: f32,
    pub pair: f32,
    /// The maximum length of a question in words, so that one different word also counts in a long question.
    pub words_max: f32,
}

/// The best weights of a search over one half of the paraphrase set (`examples/semantic_curve.rs`).
pub const WEIGHTS: Weights = Weights { common: 0.4, form: 0.6, letters: 0.2, pair: 0.2, words_max: 1.5 };

/// A question in the form in which it is compared.
#[derive(Clone, Debug, PartialEq)]
pub struct Question {
    /// A digest of everything that must be equal.
    pub guard: u64,
    vector: Vector,
    /// All words of the question, sorted.
    words: Box<[u64]>,
    /// Names and quoted words, in order.
    names: Box<[u64]>,
    /// Words that follow words of direction, and numbers.
    ways: Box<[(Way, u64)]>,
}

#[derive(Clone, Debug, PartialEq)]
enum Vector {
    Words {
        features: Box<[(u64, f32)]>,
        /// The square of its length.
        square: f32,
        /// A bit for each rare word: a bit that is set in only one of two questions means a word that the other lacks.
        rare: u64,
        weights: Weights,
    },
    /// A model's embedding, normalized to length 1.
    Dense(Box<[f32]>),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    To,
    From,
    Than,
    Before,
    After,
    Number(u64),
}

impl Question {
    /// Reads a question. Returns `None` if its meaning cannot be judged.
    pub fn read(text: &str) -> Option<Self> {
        Self::weighed(text, WEIGHTS)
    }

    pub fn weighed(text: &str, weights: Weights) -> Option<Self> {
        if text.len() > BYTES_MAX || text.chars().any(|c| c.is_alphabetic() && c > '\u{24f}') {
            return None;
        }
        let Parts { mut words, mut guards } = parts(text);
        drop_phrases(&mut words);
        guards.push(format!("kind {:?}", take_kinds(&mut words)));
        guards.extend(tense_and_person(&words));
        let mut question = Self {
            guard: 0,
            vector: Vector::Dense(Box::default()),
            words: Box::default(),
            names: words.iter().filter_map(|word| word.name).collect(),
            ways: Box::default(),
        };
        // Each feature counts once, however often it occurs.
        let mut features: HashMap<u64, f32> = HashMap::new();
        let mut ways = Vec::new();
        let (mut way, mut negation, mut before, mut bits) = (None, None, None, 0);
        let rare = words.iter().filter(|word| word.kind == Kind::Quotation || word.kind == Kind::Word && !is_common(&word.text)).count();
        let common = weights.common / rare.max(1) as f32;
        features.extend(form(&words).map(|form| (hash(&("form", form)), weights.form)));
        if rare < 2 {
            // A single word says too little: the common ones must be equal as well.
            let mut common: Vec<_> = words.iter().map(|word| word.text.as_str()).filter(|word| is_common(word)).collect();
            common.retain(|word| !["a", "an", "the", "please"].contains(word));
            common.sort_unstable();
            guards.push(common.join(" "));
        }
        for Word { text, stem, kind, .. } in &words {
            match kind {
                Kind::Number => {
                    way = Some(Way::Number(hash(text)));
                    continue;
                }
                Kind::Quotation => {
                    features.insert(hash(&("quotation", text)), 1.0);
                    before = Some(text);
                    continue;
                }
                Kind::Word => {}
            }
            if let Some(kind) = negates(text) {
                negation = Some(kind);
                continue;
            }
            way = way_of(text).or(way);
            if is_common(text) {
                // A number's unit follows right after it.
                way = way.filter(|way| !matches!(way, Way::Number(_)));
                features.insert(hash(&("common", stem)), common);
                continue;
            }
            if let Some(kind) = negation.take() {
                guards.push(format!("{kind} {stem}"));
            }
            ways.extend(way.take().map(|way| (way, hash(stem))));
            bits |= 1 << (hash(stem) % 64);
            let letters: Vec<char> = format!("^{stem}$").chars().collect();
            let share = (weights.letters / (letters.len() as f32 - 2.0)).sqrt();
            features.insert(hash(&("word", stem)), (1.0 - weights.letters).sqrt());
            features.extend(letters.windows(3).map(|three| (hash(&("letters", three)), share)));
            if let Some(before) = before.replace(stem) {
                features.insert(hash(&("pair", before, stem)), weights.pair.sqrt());
            }
        }
        // Without words of its own, it says no more than `What is this?`
        before?;
        guards.extend(negation.map(str::to_owned));
        let mut features: Box<[_]> = features.into_iter().collect();
        features.sort_unstable_by_key(|(feature, _)| *feature);
        let square = features.iter().map(|(_, weight)| weight * weight).sum();
        let mut all: Vec<u64> = words.iter().flat_map(|word| [hash(&word.text), hash(&word.stem)]).collect();
        all.sort_unstable();
        all.dedup();
        question.words = all.into();
        question.ways = ways.into();
        question.guard = hash(&guards);
        question.vector = Vector::Words { features, square, rare: bits, weights };
        Some(question)
    }

    /// Replaces the words by a model's embedding; the guards stay.
    pub fn embedded(self, mut embedding: Vec<f32>) -> Self {
        let length = embedding.iter().map(|value| value * value).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
        embedding.iter_mut().for_each(|value| *value /= length);
        Self { vector: Vector::Dense(embedding.into()), ..self }
    }

    /// Returns the similarity from 0 to 1, where 1 is the same question, or `None` if a guard differs.
    pub fn similarity(&self, other: &Self) -> Option<f32> {
        let agree = self.guard == other.guard && self.names_are_in(other) && other.names_are_in(self) && !self.is_swapped(other);
        if !agree {
            return None;
        }
        Some(match (&self.vector, &other.vector) {
            (Vector::Words { rare, weights, .. }, Vector::Words { rare: others, .. })
                if (rare ^ others).count_ones() as f32 * (1.0 - weights.letters) > 2.0 * weights.words_max =>
            {
                // The comparison below would give the same result.
                0.0
            }
            (Vector::Words { features, square, weights, .. }, Vector::Words { features: others, square: other_square, .. }) => {
                // The cosine, 1 - |a - b|² / 2|a||b|, with |a||b| bounded.
                let apart = square + other_square - 2.0 * dot(features, others);
                (1.0 - apart.max(0.0) / (2.0 * (square * other_square).sqrt().min(weights.words_max))).max(0.0)
            }
            (Vector::Dense(mine), Vector::Dense(theirs)) => mine.iter().zip(theirs).map(|(a, b)| a * b).sum::<f32>().clamp(0.0, 1.0),
            _ => 0.0,
        })
    }

    /// Returns the approximate size in memory.
    pub fn bytes(&self) -> u64 {
        let vector = match &self.vector {
            Vector::Words { features, .. } => features.len() * 16,
            Vector::Dense(values) => values.len() * 4,
        };
        (size_of::<Self>() + vector + (self.words.len() + self.names.len() + 2 * self.ways.len()) * 8) as u64
    }

    fn names_are_in(&self, other: &Self) -> bool {
        let of_both = |names: &[u64], others: &[u64]| names.iter().filter(|name| others.contains(name)).copied().collect::<Vec<_>>();
        self.names.iter().all(|name| other.words.binary_search(name).is_ok())
            && of_both(&self.names, &other.names) == of_both(&other.names, &self.names)
    }

    /// Whether a word in both is an origin in one and a destination in the other.
    fn is_swapped(&self, other: &Self) -> bool {
        let in_both = |word: &u64| self.words.binary_search(word).is_ok() && other.words.binary_search(word).is_ok();
        let only = |these: &[(Way, u64)], those: &[(Way, u64)], way| {
            these.iter().any(|(its, word)| *its == way && in_both(word) && !those.contains(&(way, *word)))
        };
        let turned = |these: &[(Way, u64)], those: &[(Way, u64)]| {
            these.iter().any(|(way, word)| *way == Way::From && those.contains(&(Way::To, *word)) && !these.contains(&(Way::To, *word)))
        };
        self.ways.iter().any(|&(way, _)| only(&self.ways, &other.ways, way) && only(&other.ways, &self.ways, way))
            || turned(&self.ways, &other.ways)
            || turned(&other.ways, &self.ways)
    }
}

#[derive(Debug)]
struct Word {
    /// The word in lower case.
    text: String,
    stem: String,
    kind: Kind,
    /// A digest of a name, or of a quoted word as written.
    name: Option<u64>,
    /// Whether it starts a sentence, or a part of one.
    begins: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Word,
    Number,
    Quotation,
}

impl Word {
    fn new(text: &str, kind: Kind, begins: bool) -> Self {
        let stem = if kind == Kind::Word { canonical(text) } else { text.to_owned() };
        Self { text: text.to_owned(), stem, kind, name: None, begins }
    }
}

struct Parts {
    words: Vec<Word>,
    guards: Vec<String>,
}

/// Splits a text into words, and other parts that must be equal: quotations and code as written, numbers, signs.
fn parts(text: &str) -> Parts {
    let (mut words, mut guards) = (Vec::new(), Vec::new());
    let (mut begins, mut of_sentence) = (true, true);
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        let before = text[..text.len() - rest.len()].chars().next_back();
        if let Some((quoted, after)) = quotation(rest, before) {
            let small = quoted.to_lowercase();
            if !small.is_empty() && small.chars().all(char::is_alphabetic) {
                // It is quoted because the word itself is meant.
                words.push(Word { name: Some(hash(&small)), ..Word::new(&small, Kind::Word, begins) });
            } else {
                guards.push(format!("quotation {quoted}"));
                words.push(Word::new(quoted, Kind::Quotation, begins));
            }
            (begins, of_sentence) = (false, false);
            rest = after;
            continue;
        }
        let is_part = |at: usize, c: char| {
            let after = || rest[at + c.len_utf8()..].chars().next();
            c.is_alphanumeric()
                || (matches!(c, '\'' | '’') && after().is_some_and(char::is_alphabetic))
                || (matches!(c, '.' | ',' | ':')
                    && rest[..at].ends_with(|c: char| c.is_ascii_digit())
                    && after().is_some_and(|c| c.is_ascii_digit()))
        };
        let end = rest.char_indices().find(|(at, c)| !is_part(*at, *c)).map_or(rest.len(), |(at, _)| at);
        if first.is_alphanumeric() && end > 0 {
            let token = &rest[..end];
            let small = token.to_lowercase().replace('’', "'");
            let number = NUMBERS.iter().position(|number| *number == small).map(|place| (place + 2).to_string());
            let digits = || token.contains(|c: char| c.is_numeric()).then(|| small.replace(',', ""));
            if let Some(number) = number.or_else(digits) {
                guards.push(format!("number {number}"));
                words.push(Word::new(&number, Kind::Number, begins));
            } else {
                let capital = first.is_uppercase() && small != "i" && !small.starts_with("i'");
                let acronym = token.chars().count() > 1 && token.chars().all(char::is_uppercase);
                let is_name = capital && (!of_sentence || acronym);
                push(&mut words, &small, is_name, begins);
            }
            (begins, of_sentence) = (false, false);
            rest = &rest[end..];
            continue;
        }
        let next = rest[first.len_utf8()..].chars().next();
        match first {
            '.' | '!' | '?' | ':' | ';' | '\n' => (begins, of_sentence) = (true, true),
            ',' => begins = true,
            // The sign of a number, or between numbers.
            '-' | '−'
                if next.is_some_and(|c| c.is_ascii_digit())
                    || before.is_some_and(|c| c == ' ' || c.is_ascii_digit()) && next == Some(' ') =>
            {
                guards.push("sign -".into());
            }
            '%' => push(&mut words, "percent", false, false),
            '-' | '–' | '—' | '\'' | '’' | '"' | '(' | ')' | '…' => {}
            other if other.is_whitespace() => {}
            sign => guards.push(format!("sign {sign}")),
        }
        rest = &rest[first.len_utf8()..];
    }
    Parts { words, guards }
}

/// Returns the inside of a quotation and the text after it; `None` if the text does not start with a quotation.
fn quotation(text: &str, before: Option<char>) -> Option<(&str, &str)> {
    let pairs = [("```", "```"), ("`", "`"), ("\"", "\""), ("“", "”"), ("„", "“"), ("«", "»")];
    let (open, close) = pairs.into_iter().find(|(open, _)| text.starts_with(open)).or_else(|| {
        let opens = before.is_none_or(|c| !c.is_alphanumeric()) && text.starts_with('\'');
        opens.then_some(("'", "'"))
    })?;
    let inside = &text[open.len()..];
    let end = inside.find(close)?;
    Some((&inside[..end], &inside[end + close.len()..]))
}

/// Adds a word, or the two words that an apostrophe joins.
fn push(words: &mut Vec<Word>, small: &str, is_name: bool, begins: bool) {
    let (head, tail) = match (small, small.split_once('\'')) {
        ("can't" | "cannot", _) => ("can", "not"),
        ("won't", _) => ("will", "not"),
        (_, Some((head, "t"))) => (head.strip_suffix('n').unwrap_or(head), "not"),
        // A contraction of `is`, or a possessive.
        (_, Some((head, "s"))) => (head, if is_common(head) { "is" } else { "" }),
        (_, Some((head, "re"))) => (head, "are"),
        (_, Some((head, "ve"))) => (head, "have"),
        (_, Some((head, "m"))) => (head, "am"),
        (_, Some((head, "ll"))) => (head, "will"),
        (_, Some((head, "d"))) => (head, "would"),
        _ => (small, ""),
    };
    for (text, is_name, begins) in [(head, is_name, begins), (tail, false, false)] {
        if !text.is_empty() {
            let word = Word::new(text, Kind::Word, begins);
            words.push(Word { name: is_name.then(|| hash(&word.stem)), ..word });
        }
    }
}

/// Replaces each known phrase by the word that stands for it, and drops polite wrappings of questions.
fn drop_phrases(words: &mut Vec<Word>) {
    let mut at = 0;
    while at < words.len() {
        let found = (2..=6.min(words.len() - at)).rev().find_map(|length| {
            let joined: Vec<_> = words[at..at + length].iter().map(|word| stem(&word.text)).collect();
            LISTS.phrases.get(&joined.join("-")).map(|stands_for| (length, stands_for))
        });
        match found {
            Some((length, Some(word))) => {
                let begins = words[at].begins;
                words.splice(at..at + length, [Word { stem: word.clone(), ..Word::new(word, Kind::Word, begins) }]);
                at += 1;
            }
            Some((length, None)) if words[at].begins => {
                words.drain(at..at + length);
                // A part of the sentence starts here.
                words.iter_mut().skip(at).take(1).for_each(|word| word.begins = true);
            }
            _ => at += 1,
        }
    }
}

/// Returns the kinds of question that these words ask, each once, sorted. `what`, `which`, `how to` and commands have no kind of their own.
/// Words without further meaning are removed.
fn take_kinds(words: &mut Vec<Word>) -> Vec<&'static str> {
    let mut kinds = Vec::new();
    let mut taken = HashSet::new();
    for at in 0..words.len() {
        let text = |at: usize| words.get(at).map_or("", |word: &Word| word.text.as_str());
        let asks = words[at].begins || AFTER.contains(&text(at.saturating_sub(1)));
        let mut take = |at: usize, kind| {
            taken.insert(at);
            Some(kind)
        };
        kinds.extend(match (text(at), text(at + 1)) {
            ("how", next) => measure(next).and_then(|kind| take(at + 1, kind)),
            ("what" | "which", "time" | "year" | "date" | "day" | "month" | "months") => take(at + 1, "when"),
            ("what" | "which", "person" | "people") => take(at + 1, "who"),
            ("what" | "which", "amount") => take(at + 1, "much"),
            ("what" | "which", "makes") => take(at + 1, "why"),
            ("reason" | "reasons", _) => take(at, "why"),
            ("number", "of") => take(at, "many"),
            ("distance", _) => take(at, "far"),
            ("why", _) if asks => Some("why"),
            ("when", _) if asks => Some("when"),
            ("where", _) if asks => Some("where"),
            ("who" | "whom" | "whose", _) if asks => Some("who"),
            ("possible" | "allowed" | "able", _) => Some("can"),
            _ => None,
        });
    }
    if kinds.is_empty() && !words.iter().any(|word| matches!(word.text.as_str(), "what" | "which" | "how")) {
        kinds.extend(words.iter().filter(|word| word.begins).find_map(|word| match word.text.as_str() {
            "can" | "could" | "may" => Some("can"),
            "should" | "ought" => Some("should"),
            "is" | "are" | "am" | "does" | "do" | "did" | "was" | "were" | "will" | "would" | "has" | "have" | "had" => Some("whether"),
            _ => None,
        }));
    }
    if kinds.iter().any(|kind| ["can", "should", "whether"].contains(kind)) {
        // "Is it possible to …" is treated as first person unless another subject is named.
        let open = words.windows(2).any(|two| matches!(two[0].text.as_str(), "possible" | "allowed") && two[1].text == "to");
        kinds.extend((open || words.iter().any(|word| word.text == "i")).then_some("i"));
    }
    kinds.sort_unstable();
    kinds.dedup();
    let mut at = 0;
    words.retain(|_| {
        at += 1;
        !taken.contains(&(at - 1))
    });
    kinds
}

/// Lists the question's tense and persons: past, third person, an act upon the asker, or no question at all.
fn tense_and_person(words: &[Word]) -> Vec<String> {
    let text = |at: usize| words[at].text.as_str();
    let is_now = |at: usize| ["is", "are", "be", "am", "been", "being"].contains(&text(at));
    let is_past = |at: usize| match text(at) {
        "was" | "were" | "did" | "had" | "won" | "wrote" | "began" | "came" | "became" | "made" | "took" | "went" => true,
        word => word.len() > 4 && word.ends_with("ed") && !(at.saturating_sub(4)..at).any(is_now),
    };
    let suffers = |at: usize| {
        let givers = ["tell", "give", "show", "help", "explain", "teach", "write", "let", "to", "for", "with"];
        text(at) == "me" && at > 0 && !givers.contains(&text(at - 1))
    };
    let mut found = Vec::new();
    let states = ["i", "you", "it", "this", "that", "he", "she", "we", "they", "there"]
        .iter()
        .any(|word| words.first().is_some_and(|first| first.text == **word));
    let asks = words
        .iter()
        .skip(1)
        .any(|word| word.begins || ["what", "which", "how", "why", "when", "where", "who"].contains(&word.text.as_str()));
    found.extend((states && !asks).then(|| "statement".to_owned()));
    found.extend((0..words.len()).any(is_past).then(|| "past".to_owned()));
    found.extend((0..words.len()).any(suffers).then(|| "me".to_owned()));
    let owners = ["you", "your", "yours", "his", "her", "their", "our"];
    found.extend(owners.iter().filter(|owner| words.iter().any(|word| word.text == **owner)).map(|owner| format!("of {owner}")));
    found
}

/// Returns the form of a question: how something is done, or what something is, if it has one of these.
fn form(words: &[Word]) -> Option<&'static str> {
    let has = |these: &[&str]| words.iter().any(|word| these.contains(&word.text.as_str()));
    let does =
        words.windows(2).any(|two| two[0].text == "do" && ["to", "when", "if", "so", "about", "against"].contains(&two[1].text.as_str()));
    if has(&["how", "way", "ways", "step", "steps", "procedure", "method"]) || does {
        Some("how")
    } else {
        has(&["what", "which"]).then_some("what")
    }
}

fn negates(word: &str) -> Option<&'static str> {
    match word {
        "not" | "no" | "never" | "none" | "nobody" | "nothing" | "neither" | "nor" | "dont" | "cant" | "doesnt" | "isnt" => Some("not"),
        "without" | "unless" | "except" => Some("without"),
        _ => None,
    }
}

fn way_of(word: &str) -> Option<Way> {
    match word {
        "to" | "into" | "onto" => Some(Way::To),
        "from" => Some(Way::From),
        "than" => Some(Way::Than),
        "before" => Some(Way::Before),
        "after" => Some(Way::After),
        _ => None,
    }
}

fn is_common(word: &str) -> bool {
    LISTS.common.contains(word)
}

/// Returns the canonical word for this one, without its ending.
fn canonical(word: &str) -> String {
    if is_common(word) {
        return word.to_owned();
    }
    let stem = stem(word);
    LISTS.same.get(&stem).cloned().unwrap_or(stem)
}

/// Returns a word without the endings that do not change the question (plurals, -ing, -ed, -ly), in one spelling.
fn stem(word: &str) -> String {
    let mut stem = word.to_owned();
    let has_vowel = |stem: &str| stem.contains(['a', 'e', 'i', 'o', 'u', 'y']);
    if let Some(head) = stem.strip_suffix("ies").filter(|head| head.len() > 1) {
        stem = format!("{head}y");
    } else if stem.len() > 3 && stem.ends_with('s') && !["ss", "us", "is"].iter().any(|end| stem.ends_with(end)) {
        stem.pop();
    }
    for ending in ["ing", "ed", "ly"] {
        let Some(head) = stem.strip_suffix(ending).filter(|head| head.len() > 2 && has_vowel(head)) else { continue };
        let mut head = head.to_owned();
        let last: Vec<char> = head.chars().rev().take(2).collect();
        if ending != "ly" && last[0] == last[1] && !['l', 's', 'z', 'e', 'o'].contains(&last[0]) {
            head.pop();
        }
        stem = head;
        break;
    }
    for (other, usual) in [("ise", "ize"), ("yse", "yze"), ("our", "or"), ("tre", "ter")] {
        if let Some(head) = stem.strip_suffix(other).filter(|head| head.len() > 2) {
            stem = format!("{head}{usual}");
        }
    }
    if stem.len() > 3 && stem.ends_with('e') {
        stem.pop();
    }
    stem
}

fn hash(of: &impl Hash) -> u64 {
    let mut hasher = DefaultHasher::new();
    of.hash(&mut hasher);
    hasher.finish()
}

fn dot(mine: &[(u64, f32)], theirs: &[(u64, f32)]) -> f32 {
    let (mut i, mut j, mut sum) = (0, 0, 0.0);
    while let (Some((a, mine)), Some((b, theirs))) = (mine.get(i), theirs.get(j)) {
        if a == b {
            sum += mine * theirs;
        }
        i += usize::from(a <= b);
        j += usize::from(b <= a);
    }
    sum
}

/// Numbers written as words, from two on: `one` is seldom a number.
const NUMBERS: [&str; 11] = ["two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve"];

/// Returns the measure that `how` and this word ask for.
fn measure(word: &str) -> Option<&'static str> {
    Some(match word {
        "many" => "many",
        "much" => "much",
        "long" => "long",
        "often" | "frequently" => "often",
        "far" => "far",
        "old" => "old",
        "tall" | "high" => "tall",
        "big" | "large" => "big",
        "wide" => "wide",
        "deep" => "deep",
        "heavy" => "heavy",
        "fast" | "quickly" => "fast",
        "good" => "good",
        _ => return None,
    })
}

/// Words after which `when` asks a question, instead of introducing a clause.
const AFTER: [&str; 14] = ["explain", "me", "know", "say", "ask", "and", "or", "in", "at", "by", "for", "from", "since", "until"];

struct Lists {
    common: HashSet<&'static str>,
    /// The canonical word for each stem.
    same: HashMap<String, String>,
    /// The word that replaces each phrase; `None` if it is dropped.
    phrases: HashMap<String, Option<String>>,
}

static LISTS: LazyLock<Lists> = LazyLock::new(|| {
    let mut lists = Lists { common: HashSet::new(), same: HashMap::new(), phrases: HashMap::new() };
    let phrase = |words: &str| words.split('-').map(stem).collect::<Vec<_>>().join("-");
    let mut section = "";
    for line in include_str!("words.txt").lines().filter(|line| !line.starts_with('#')) {
        if line.starts_with('[') {
            section = line;
            continue;
        }
        let mut words = line.split(' ').filter(|word| !word.is_empty());
        match section {
            "[common]" => lists.common.extend(words),
            "[dropped]" => lists.phrases.extend(words.map(|words| (phrase(words), None))),
            _ => {
                let Some(first) = words.next() else { continue };
                let first = stem(first);
                for other in words {
                    match other.contains('-') {
                        true => drop(lists.phrases.insert(phrase(other), Some(first.clone()))),
                        false => drop(lists.same.insert(stem(other), first.clone())),
                    }
                }
            }
        }
    }
    lists
});

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cache::semantic::THRESHOLD;

    fn alike(a: &str, b: &str) -> bool {
        let read = |text| Question::read(text).unwrap();
        let (there, back) = (read(a).similarity(&read(b)), read(b).similarity(&read(a)));
        assert_eq!(there, back, "{a} / {b}");
        there.is_some_and(|similarity| similarity >= THRESHOLD)
    }

    #[test]
    fn other_words_for_the_same() {
        for (a, b) in [
            ("How do I delete my account?", "what is the way of deleting an account"),
            ("What is the capital of Chile?", "Which city's Chile's capital?"),
            ("Why is the sky blue?", "What makes the sky blue?"),
            ("It won't turn on", "it isn't turning on"),
            ("Split 1,000 euros among four friends", "Please split 1000 euros among 4 friends."),
            ("What does \"ubiquitous\" mean?", "What does ubiquitous mean?"),
            ("Explain the output of `ls -l`", "Please explain the output of `ls -l`."),
        ] {
            assert_eq!(alike(a, b), a != "What is the capital of Chile?", "{a} / {b}");
        }
    }

    #[test]
    fn guards_stop_what_differs_in_a_sign_or_a_word() {
        for (a, b) in [
            ("Convert 5 miles to kilometers", "Convert 50 miles to kilometers"),
            ("Compute 3 + 4", "Compute 3 * 4"),
            ("Compute 3 - 4", "Compute 3 4"),
            ("How hot is -5 degrees?", "How hot is 5 degrees?"),
            ("How many grams are 3 ounces?", "How many ounces are 3 grams?"),
            ("Is the shop open?", "Is the shop not open?"),
            ("Tea that is hot but not sweet?", "Tea that is not hot but sweet?"),
            ("Pancakes with eggs", "Pancakes without eggs"),
            ("How tall is Anna?", "How tall is Hannah?"),
            ("Flights from Oslo to Rome", "Flights from Rome to Oslo"),
            ("Convert euros to dollars", "Convert dollars to euros"),
            ("Is a horse faster than a cheetah?", "Is a cheetah faster than a horse?"),
            ("Translate 'good night' into French", "Translate 'good day' into French"),
            ("What does `ls -l` do?", "What does `ls -a` do?"),
            ("What is new in C++?", "What is new in C#?"),
            ("Why do cats purr?", "How do cats purr?"),
            ("Can I return it?", "How can I return it?"),
            ("Who is the king of Spain?", "Who was the king of Spain?"),
            ("What is my address?", "What is your address?"),
            ("What about [EMAIL_1]?", "What about [EMAIL_2]?"),
        ] {
            assert_eq!(Question::read(a).unwrap().similarity(&Question::read(b).unwrap()), None, "{a} / {b}");
        }
    }

    #[test]
    fn one_word_more_is_never_a_hit_however_long_the_question() {
        let long = "I have a puppy that chews the sofa whenever the family is out at the cinema, how can I stop it";
        for (a, b) in
            [("What are side effects of ibuprofen?".to_owned(), "rare"), ("What is inflation?".into(), "negative"), (long.into(), "old")]
        {
            let words: Vec<&str> = a.split(' ').collect();
            for place in 1..words.len() {
                let more = [&words[..place], &[b], &words[place..]].concat().join(" ");
                assert!(!alike(&a, &more), "{more}");
            }
        }
    }

    #[test]
    fn what_cannot_be_told_is_not_read() {
        for text in ["", "What is this?", "How?", "今天天气怎么样?", "Что такое инфляция?", &"very long ".repeat(200)]
        {
            assert_eq!(Question::read(text), None, "{text}");
        }
    }

    #[test]
    fn a_models_opinion_replaces_the_words_and_not_the_guards() {
        let read = |text, embedding: &[f32]| Question::read(text).unwrap().embedded(embedding.to_vec());
        let (a, b) = (read("How old is the moon?", &[3.0, 4.0]), read("What is the age of a star?", &[0.0, 2.0]));
        assert_eq!(a.similarity(&b), None);
        let c = read("How old is a star?", &[0.0, 2.0]);
        assert_eq!(a.similarity(&c), Some(0.8));
    }
}
