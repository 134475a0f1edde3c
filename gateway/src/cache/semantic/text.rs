//! A question's text in pieces: words, numbers, signs and quotations. No language is known here.

/// The kind of a piece, with what it says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Piece {
    /// A word in small letters; a character where a script is written without spaces.
    Word { text: String, capitals: Capitals },
    /// Digits, in ASCII, with separators as they were written.
    Number(String),
    /// A character that is neither punctuation nor part of a word.
    Sign(char),
    /// Text between quotation marks, in small letters.
    Quotation(String),
}

/// The capitals of a word.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Capitals {
    /// None, or the first letter of a sentence.
    Ordinary,
    /// The first letter, within a sentence.
    First,
    /// Another letter than the first.
    Later,
}

/// Cuts a text into pieces.
pub(super) fn pieces(text: &str) -> Vec<Piece> {
    let mut reader = Reader { rest: text, before: None, begins: true, pieces: Vec::new() };
    while reader.read().is_some() {}
    reader.pieces
}

struct Reader<'a> {
    rest: &'a str,
    /// The character before the rest.
    before: Option<char>,
    /// Whether the next word begins a sentence.
    begins: bool,
    pieces: Vec<Piece>,
}

impl Reader<'_> {
    /// Reads what comes next. Returns `None` at the end.
    fn read(&mut self) -> Option<()> {
        let c = self.rest.chars().next()?;
        if let Some((quoted, length)) = quotation(self.rest, self.before) {
            let quoted: Vec<_> = quoted.split_whitespace().map(str::to_lowercase).collect();
            self.pieces.push(Piece::Quotation(quoted.join(" ")));
            self.begins = false;
            self.skip(length);
        } else if digit(c).is_some() {
            self.number();
        } else if is_of_word(c) {
            self.word();
        } else {
            self.sign(c);
        }
        Some(())
    }

    fn skip(&mut self, bytes: usize) {
        let (read, rest) = self.rest.split_at(bytes);
        self.before = read.chars().next_back();
        self.rest = rest;
    }

    fn number(&mut self) {
        let mut number = String::new();
        let mut length = 0;
        let mut chars = self.rest.char_indices().peekable();
        while let Some((at, c)) = chars.next() {
            let separates = matches!(c, '.' | ',' | ':') && chars.peek().is_some_and(|(_, next)| digit(*next).is_some());
            match digit(c) {
                Some(digit) => number.push(digit),
                None if separates => number.push(c),
                None => break,
            }
            length = at + c.len_utf8();
        }
        self.pieces.push(Piece::Number(number));
        self.begins = false;
        self.skip(length);
    }

    fn word(&mut self) {
        let first = self.rest.chars().next().expect("a word has letters");
        let length = match is_word_by_itself(first) {
            true => first.len_utf8(),
            false => self.rest.find(|c| !is_of_word(c) || is_word_by_itself(c)).unwrap_or(self.rest.len()),
        };
        let written = &self.rest[..length];
        let mut text = written.to_lowercase();
        let contracted = self.before.is_some_and(is_apostrophe) && text == "t";
        if let (true, Some(Piece::Word { text: verb, .. })) = (contracted, self.pieces.last_mut())
            && verb.ends_with('n')
        {
            // "isn't" is "is" and "nt".
            verb.pop();
            text = "nt".to_owned();
        }
        let is_capital = |c: char| c.is_uppercase();
        let capitals = match (written.chars().skip(1).any(is_capital), is_capital(first)) {
            (true, _) => Capitals::Later,
            (false, true) if !self.begins => Capitals::First,
            _ => Capitals::Ordinary,
        };
        self.pieces.push(Piece::Word { text, capitals });
        self.begins = false;
        self.skip(length);
    }

    fn sign(&mut self, c: char) {
        if ".?!:;。？！¿¡؟।".contains(c) {
            self.begins = true;
        }
        let rest = &self.rest[c.len_utf8()..];
        let is_minus = matches!(c, '-' | '−' | '–')
            && rest.trim_start().starts_with(|next| digit(next).is_some())
            && !self.before.is_some_and(char::is_alphabetic);
        if is_minus {
            self.pieces.push(Piece::Sign('-'));
        } else if !c.is_whitespace() && !c.is_control() && !is_punctuation(c) {
            self.pieces.push(Piece::Sign(c));
        }
        self.skip(c.len_utf8());
    }
}

/// The text within quotation marks that opens here, and its length with the marks.
fn quotation(rest: &str, before: Option<char>) -> Option<(&str, usize)> {
    let open = rest.chars().next()?;
    let close: &[char] = match open {
        '"' => &['"'],
        '`' => &['`'],
        '\'' | '‘' if !before.is_some_and(char::is_alphanumeric) => &['\'', '’'],
        '“' => &['”'],
        '„' => &['“', '”'],
        '«' => &['»'],
        '»' => &['«'],
        '《' => &['》'],
        '「' => &['」'],
        '『' => &['』'],
        _ => return None,
    };
    let within = &rest[open.len_utf8()..];
    let mut ends = within.char_indices().filter(|(_, c)| close.contains(c));
    let (end, mark) = ends.find(|(at, mark)| {
        let after = within[at + mark.len_utf8()..].chars().next();
        !(is_apostrophe(*mark) && after.is_some_and(char::is_alphanumeric))
    })?;
    (end > 0).then(|| (&within[..end], open.len_utf8() + end + mark.len_utf8()))
}

fn is_apostrophe(c: char) -> bool {
    matches!(c, '\'' | '’')
}

/// Punctuation that says nothing about a question's content.
fn is_punctuation(c: char) -> bool {
    matches!(c, '.' | ',' | ';' | ':' | '!' | '?' | '¿' | '¡' | '\'' | '’' | '‘' | '"' | '“' | '”' | '„' | '«' | '»' | '`')
        || matches!(c, '(' | ')' | '[' | ']' | '{' | '}' | '-' | '–' | '—' | '…' | '_' | '·')
        || matches!(c, '؟' | '،' | '؛' | '।' | '！' | '，' | '：' | '；' | '？' | '（' | '）' | '～' | '\u{200b}'..='\u{200f}')
        || ('\u{3000}'..='\u{3020}').contains(&c)
}

/// Letters, and marks that are written with them.
fn is_of_word(c: char) -> bool {
    let is_mark = || {
        matches!(c, '\u{300}'..='\u{36f}' | '\u{591}'..='\u{5c7}' | '\u{610}'..='\u{61a}' | '\u{64b}'..='\u{65f}' | '\u{670}')
            || matches!(c, '\u{900}'..='\u{963}' | '\u{966}'..='\u{dff}' | '\u{e31}'..='\u{e4e}' | '\u{eb1}'..='\u{ecd}')
    };
    (c.is_alphabetic() || is_mark()) && digit(c).is_none()
}

/// Characters of scripts that put no spaces between words.
fn is_word_by_itself(c: char) -> bool {
    matches!(c, '\u{e00}'..='\u{eff}' | '\u{1000}'..='\u{109f}' | '\u{1780}'..='\u{17ff}' | '\u{3040}'..='\u{30ff}')
        || matches!(c, '\u{3400}'..='\u{9fff}' | '\u{ac00}'..='\u{d7af}' | '\u{f900}'..='\u{faff}' | '\u{20000}'..='\u{3ffff}')
}

/// The ASCII digit of a decimal digit in any of the scripts whose digits are in common use.
fn digit(c: char) -> Option<char> {
    const ZEROS: [char; 17] = [
        '0', '\u{660}', '\u{6f0}', '\u{966}', '\u{9e6}', '\u{a66}', '\u{ae6}', '\u{b66}', '\u{be6}', '\u{c66}', '\u{ce6}', '\u{d66}',
        '\u{e50}', '\u{ed0}', '\u{1040}', '\u{17e0}', '\u{ff10}',
    ];
    let value = ZEROS.iter().find_map(|zero| u32::from(c).checked_sub(u32::from(*zero)).filter(|value| *value < 10))?;
    char::from_digit(value, 10)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn word(text: &str) -> Piece {
        Piece::Word { text: text.into(), capitals: Capitals::Ordinary }
    }

    fn number(text: &str) -> Piece {
        Piece::Number(text.into())
    }

    #[test]
    fn numbers_are_kept_as_they_are() {
        assert_eq!(pieces("1,000 of 14:30, 5km"), [number("1,000"), word("of"), number("14:30"), number("5"), word("km")]);
        assert_eq!(pieces("٢٥ २५ ２５"), [number("25"), number("25"), number("25")]);
        assert_eq!(pieces("-5 covid-19"), [Piece::Sign('-'), number("5"), word("covid"), number("19")]);
        assert_eq!(pieces("3 - 4"), [number("3"), Piece::Sign('-'), number("4")]);
    }

    #[test]
    fn what_is_quoted_is_one_piece() {
        for text in ["\"Good  night\"", "'good night'", "“good night”", "„good night“", "«good night»", "`good night`", "「good night」"]
        {
            assert_eq!(pieces(text), [Piece::Quotation("good night".into())], "{text}");
        }
        assert_eq!(pieces("Anna's dog's"), ["anna", "s", "dog", "s"].map(word));
        assert_eq!(pieces("\"open"), [word("open")]);
    }

    #[test]
    fn a_contraction_is_its_verb_and_its_negation() {
        assert_eq!(pieces("it isn't"), ["it", "is", "nt"].map(word));
        assert_eq!(pieces("can’t"), ["ca", "nt"].map(word));
    }

    #[test]
    fn capitals_count_within_a_sentence() {
        let capitals = |text: &str| {
            let capitals = |piece| if let Piece::Word { capitals, .. } = piece { Some(capitals) } else { None };
            pieces(text).into_iter().filter_map(capitals).collect::<Vec<_>>()
        };
        use Capitals::{First, Later, Ordinary};
        assert_eq!(capitals("Where is Rome? Here."), [Ordinary, Ordinary, First, Ordinary]);
        assert_eq!(capitals("TCP on iPhones"), [Later, Ordinary, Later]);
    }

    #[test]
    fn scripts_without_spaces_give_characters() {
        assert_eq!(pieces("狗可以"), ["狗", "可", "以"].map(word));
        assert_eq!(pieces("क्या है"), ["क्या", "है"].map(word));
        assert_eq!(
            pieces("C++ C# 👍"),
            [word("c"), Piece::Sign('+'), Piece::Sign('+'), word_first("c"), Piece::Sign('#'), Piece::Sign('👍')]
        );
    }

    fn word_first(text: &str) -> Piece {
        Piece::Word { text: text.into(), capitals: Capitals::First }
    }

    proptest! {
        #[test]
        fn any_text_is_read_to_its_end(text in "\\PC{0,80}") {
            pieces(&text);
        }
    }
}
