//! The form of a text that checks read. It removes the means of hiding a word: capitals, accents, full-width letters, look-alike letters of
//! other alphabets, invisible characters, runs of spaces.

use unicode_normalization::char::{decompose_compatible, is_combining_mark};

/// Text in normal form, with the origin of each byte.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Normal {
    bytes: Vec<u8>,
    /// For each byte, the offset in the text of the character that it comes from.
    origins: Vec<usize>,
}

impl Normal {
    pub fn of(text: &str) -> Self {
        let mut normal = Self::default();
        normal.push(text, 0, None);
        normal
    }

    /// Appends a text that starts at `offset`, after the byte `before` of the normal form.
    pub fn push(&mut self, text: &str, offset: usize, before: Option<u8>) {
        for (at, c) in text.char_indices() {
            let before = self.bytes.last().copied().or(before);
            fold(c, |folded| {
                if folded == ' ' && matches!(self.bytes.last().copied().or(before), None | Some(b' ')) {
                    return;
                }
                let bytes = self.bytes.len();
                let mut utf8 = [0; 4];
                self.bytes.extend_from_slice(folded.encode_utf8(&mut utf8).as_bytes());
                self.origins.resize(self.origins.len() + self.bytes.len() - bytes, offset + at);
            });
        }
    }

    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The offset in the text from which a byte of the normal form comes; `end` for a byte past the end.
    pub fn origin(&self, byte: usize, end: usize) -> usize {
        self.origins.get(byte).copied().unwrap_or(end)
    }

    /// Drops the bytes that come from before this offset of the text, and counts offsets from there.
    pub fn forget_before(&mut self, offset: usize) {
        let bytes = self.origins.partition_point(|origin| *origin < offset);
        self.bytes.drain(..bytes);
        self.origins.drain(..bytes);
        self.origins.iter_mut().for_each(|origin| *origin -= offset);
    }
}

/// Gives the normal form of one more character, after a text whose normal form ends with `before`.
pub(crate) fn of_char(c: char, mut before: Option<u8>, mut give: impl FnMut(u8)) {
    fold(c, |folded| {
        if folded == ' ' && matches!(before, None | Some(b' ')) {
            return;
        }
        for &byte in folded.encode_utf8(&mut [0; 4]).as_bytes() {
            before = Some(byte);
            give(byte);
        }
    });
}

/// The normal form of a text in a pattern list.
pub fn normal(text: &str) -> String {
    String::from_utf8(Normal::of(text.trim()).bytes).expect("folded characters are characters")
}

/// Whether `\b` counts the byte as part of a word, in ASCII.
pub(crate) fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

fn fold(c: char, mut give: impl FnMut(char)) {
    if c.is_ascii() {
        return match c {
            c if c.is_ascii_whitespace() => give(' '),
            c if c.is_ascii_control() => {}
            c => give(c.to_ascii_lowercase()),
        };
    }
    if is_invisible(c) {
        return;
    }
    decompose_compatible(c, |part| {
        if is_combining_mark(part) || is_invisible(part) {
        } else if part.is_whitespace() {
            give(' ');
        } else {
            part.to_lowercase().for_each(|lower| give(latin(lower)));
        }
    });
}

fn is_invisible(c: char) -> bool {
    matches!(c, '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{e0000}'..='\u{e007f}')
}

/// The Latin letter that resembles a Cyrillic or Greek one.
fn latin(c: char) -> char {
    match c {
        'а' | 'α' => 'a',
        'е' | 'ε' => 'e',
        'о' | 'ο' => 'o',
        'р' | 'ρ' => 'p',
        'с' => 'c',
        'у' | 'γ' => 'y',
        'х' | 'χ' => 'x',
        'і' | 'ι' => 'i',
        'ѕ' => 's',
        'ј' => 'j',
        'ԁ' => 'd',
        'һ' => 'h',
        'к' | 'κ' => 'k',
        'м' => 'm',
        'т' | 'τ' => 't',
        'ν' => 'v',
        'ı' => 'i',
        c => c,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_hides_a_word_does_not_matter() {
        for hidden in ["Bomb", "ｂｏｍｂ", "b\u{200b}o\u{ad}mb", "bоmb", "bómb", "𝐛𝐨𝐦𝐛"] {
            assert_eq!(normal(hidden), "bomb", "{hidden:?}");
        }
        assert_eq!(normal("a \n\t b\u{a0}c"), "a b c");
        assert_eq!(normal("日本語"), "日本語");
    }

    #[test]
    fn origins_lead_back_and_pieces_give_what_the_whole_gives() {
        let text = "É  ﬁt\u{200b}s ß日";
        let whole = Normal::of(text);
        assert_eq!(whole.bytes(), "e fits ß日".as_bytes());
        assert_eq!(whole.origin(0, text.len()), 0);
        assert_eq!((whole.origin(2, 99), whole.origin(3, 99)), (4, 4), "both letters of the ligature");
        let mut pieces = Normal::default();
        for (at, c) in text.char_indices() {
            pieces.push(&text[at..at + c.len_utf8()], at, None);
        }
        assert_eq!(pieces, whole);
        pieces.forget_before(4);
        assert_eq!((pieces.bytes(), pieces.origin(0, 9)), ("fits ß日".as_bytes(), 0));
    }
}
