//! JSON as clients write it, beyond what `serde_json` reads: a byte order mark before it, half of a surrogate pair (JavaScript cuts texts
//! between the two halves), and schemas nested deeper than 128 levels. Only texts that were refused are examined again, so other bodies pay
//! nothing. And JSON as clients read it: [without](unbroken) characters that some take for the end of a line.

use memchr::memchr2_iter;
use serde::de::DeserializeOwned;
use serde_json::{Deserializer, Value, de::SliceRead};
use std::borrow::Cow;

/// The maximum nesting of arrays and objects. Each level takes stack when it is read, walked and dropped.
pub const DEPTH_MAX: usize = 200;
/// The maximum number of values in one body: a million token ids, and as many again. In memory, a value may take a hundred times its bytes.
pub const VALUES_MAX: usize = 1 << 21;
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// The target of an event for each text that is parsed, with its length, by which tests count how often a body is parsed.
pub const PARSES: &str = "tidemill::json";

/// Reads JSON as `T`.
pub fn from_slice<T: DeserializeOwned>(bytes: &[u8]) -> serde_json::Result<T> {
    note_parse(bytes);
    let bytes = unmarked(bytes);
    serde_json::from_slice(bytes).or_else(|error| match mended(bytes) {
        Some(mended) => T::deserialize(&mut deep(&mended)),
        None => Err(error),
    })
}

/// Reports to subscribers of [`PARSES`] that a text is parsed.
pub fn note_parse(bytes: &[u8]) {
    #[cfg(feature = "shell")]
    tracing::trace!(target: PARSES, bytes = bytes.len(), "a text is parsed");
    #[cfg(not(feature = "shell"))]
    let _ = bytes;
}

/// Strips the byte order mark from a text that starts with one.
pub fn unmarked(bytes: &[u8]) -> &[u8] {
    bytes.strip_prefix(BYTE_ORDER_MARK).unwrap_or(bytes)
}

/// Returns a reader of JSON whose depth was [bounded](mended).
pub fn deep(bytes: &[u8]) -> Deserializer<SliceRead<'_>> {
    let mut json = Deserializer::from_slice(bytes);
    json.disable_recursion_limit();
    json
}

/// Returns a text that [`deep`] may read, if `serde_json` refused this one for its depth or for half of a surrogate pair, which becomes
/// U+FFFD. Returns `None` if there was a different fault, or it is nested deeper than [`DEPTH_MAX`].
pub fn mended(bytes: &[u8]) -> Option<Cow<'_, [u8]>> {
    let mut mended = Cow::Borrowed(bytes);
    let (mut at, mut in_string, mut depth, mut deepest) = (0, false, 0_usize, 0);
    while let Some(&byte) = bytes.get(at) {
        at += 1;
        match byte {
            b'"' => in_string = !in_string,
            b'\\' if in_string => {
                let escape = at;
                at += 1;
                let Some(unit) = unit(bytes, escape) else { continue };
                at += 4;
                let is_pair = (0xd800..0xdc00).contains(&unit)
                    && bytes.get(at) == Some(&b'\\')
                    && self::unit(bytes, at + 1).is_some_and(|second| (0xdc00..0xe000).contains(&second));
                match unit {
                    _ if is_pair => at += 6,
                    0xd800..0xe000 => mended.to_mut()[escape + 1..escape + 5].copy_from_slice(b"fffd"),
                    _ => {}
                }
            }
            b'[' | b'{' if !in_string => {
                depth += 1;
                deepest = deepest.max(depth);
            }
            b']' | b'}' if !in_string => depth = depth.saturating_sub(1),
            _ => {}
        }
    }
    let was_too_deep = deepest >= SERDE_DEPTH_MAX;
    (deepest <= DEPTH_MAX && (was_too_deep || matches!(mended, Cow::Owned(_)))).then_some(mended)
}

/// Counts the values in a text by its punctuation: names of fields count as values.
pub fn values(bytes: &[u8]) -> usize {
    let (mut at, mut in_string, mut values) = (0, false, 0_usize);
    while let Some(&byte) = bytes.get(at) {
        match byte {
            b'"' => in_string = !in_string,
            b'\\' if in_string => at += 1,
            b',' | b':' | b'[' | b'{' if !in_string => values += 1,
            _ => {}
        }
        at += 1;
    }
    values
}

/// The characters outside ASCII that end a line for Unicode, by which Python's `splitlines` and some clients' readers of streams go, with
/// their escapes.
const BREAKS: [(&[u8], &[u8]); 3] = [(b"\xc2\x85", b"\\u0085"), (b"\xe2\x80\xa8", b"\\u2028"), (b"\xe2\x80\xa9", b"\\u2029")];

/// Writes these characters as escapes: JSON has such only within strings, where both mean the same. Returns `None` if there are none.
pub fn unbroken(json: &[u8]) -> Option<Vec<u8>> {
    let found = memchr2_iter(0xc2, 0xe2, json).filter_map(|at| {
        let (character, escape) = BREAKS.iter().find(|(character, _)| json[at..].starts_with(character))?;
        Some((at, character.len(), *escape))
    });
    let mut written = Vec::new();
    let mut end = 0;
    for (at, length, escape) in found {
        written.extend_from_slice(&json[end..at]);
        written.extend_from_slice(escape);
        end = at + length;
    }
    (end > 0).then(|| [&written, &json[end..]].concat())
}

/// Counts the bytes at the end of a piece of JSON with which one of these characters may begin: the next piece tells.
pub fn unfinished_break(json: &[u8]) -> usize {
    [2, 1]
        .into_iter()
        .find(|&length| json.len() >= length && BREAKS.iter().any(|(character, _)| is_begun(json, character, length)))
        .unwrap_or(0)
}

fn is_begun(json: &[u8], character: &[u8], length: usize) -> bool {
    length < character.len() && json.ends_with(&character[..length])
}

/// Visits every string in `value`, except names of fields.
pub fn each_string(value: &mut Value, act: &mut impl FnMut(&mut String)) {
    match value {
        Value::String(text) => act(text),
        Value::Array(items) => items.iter_mut().for_each(|item| each_string(item, act)),
        Value::Object(fields) => fields.values_mut().for_each(|field| each_string(field, act)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// The depth from which `serde_json` refuses a text.
const SERDE_DEPTH_MAX: usize = 128;

/// Reads the UTF-16 unit of an escape such as `u00e9`.
fn unit(bytes: &[u8], at: usize) -> Option<u32> {
    let digits = bytes.get(at..at + 5)?.strip_prefix(b"u")?;
    digits.iter().try_fold(0, |unit, digit| Some(unit << 4 | char::from(*digit).to_digit(16)?))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn text(json: &str) -> String {
        from_slice(json.as_bytes()).unwrap()
    }

    #[test]
    fn half_of_a_surrogate_pair_is_a_replacement_character() {
        assert_eq!(text(r#""a\ud83d""#), "a\u{fffd}");
        assert_eq!(text(r#""\ud83dx\ude00""#), "\u{fffd}x\u{fffd}");
        assert_eq!(text(r#""\ud83d\ud83d\ude00""#), "\u{fffd}😀");
        assert_eq!(text(r#""\ude00\ud83d\n""#), "\u{fffd}\u{fffd}\n");
        assert_eq!(text(r#""\\ud83d\"\ud83d""#), "\\ud83d\"\u{fffd}");
        assert!(from_slice::<String>(br#""\ud83"#).is_err() && from_slice::<String>(br#""\ud83d\u12"#).is_err());
    }

    #[test]
    fn a_byte_order_mark_may_stand_before_it() {
        assert_eq!(text("\u{feff}\"a\""), "a");
        assert!(from_slice::<Value>("\u{feff}".as_bytes()).is_err());
    }

    #[test]
    fn so_many_levels_and_no_more() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        for depth in [1, 127, 128, DEPTH_MAX] {
            assert!(from_slice::<Value>(nested(depth).as_bytes()).is_ok(), "{depth}");
        }
        for depth in [DEPTH_MAX + 1, 100_000] {
            assert!(from_slice::<Value>(nested(depth).as_bytes()).is_err(), "{depth}");
        }
    }

    #[test]
    fn values_are_counted_and_texts_are_not() {
        let long = |part: &str| format!("[{}1]", part.repeat(VALUES_MAX + 1));
        assert!(values(long("1,").as_bytes()) > VALUES_MAX);
        assert_eq!(values(long(" ").as_bytes()), 1);
        assert_eq!(values(format!("[\"{}\\\",\"]", ",".repeat(VALUES_MAX + 1)).as_bytes()), 1);
    }

    #[test]
    fn no_character_is_left_that_ends_a_line_elsewhere() {
        let escaped = |json: &str| unbroken(json.as_bytes()).map(|bytes| String::from_utf8(bytes).unwrap());
        assert_eq!(escaped("\"a\u{85}b\u{2028}\u{2029}\""), Some(r#""a\u0085b\u2028\u2029""#.into()));
        assert_eq!(escaped("\u{2028}x"), Some(r"\u2028x".into()));
        for plain in ["", "{}", "\"é “quoted” — 潮 \u{2027}\u{202a}\u{84} 🌊\""] {
            assert_eq!(escaped(plain), None);
        }
        for (end, length) in [("\u{2028}", 2), ("\u{85}", 1)] {
            let end = end.as_bytes();
            assert_eq!(unfinished_break(&[b"x", &end[..length]].concat()), length);
            assert_eq!(unfinished_break(end), 0);
        }
        assert_eq!((unfinished_break(b"x\xe2"), unfinished_break(b"x"), unfinished_break("é".as_bytes())), (1, 0, 0));
    }

    proptest! {
        #[test]
        fn what_is_escaped_means_the_same(text in "[a\"\\\\\u{80}-\u{90}\u{2020}-\u{2030}é]*") {
            let json = serde_json::to_string(&text).unwrap();
            let escaped = unbroken(json.as_bytes()).unwrap_or_else(|| json.clone().into());
            let breaks = ['\u{85}', '\u{2028}', '\u{2029}'];
            prop_assert!(!std::str::from_utf8(&escaped).unwrap().contains(breaks));
            prop_assert_eq!(from_slice::<String>(&escaped).unwrap(), text);
        }

        #[test]
        fn what_is_mended_is_as_long_and_can_be_read(units: Vec<u16>) {
            let json: String = units.iter().map(|unit| format!("\\u{unit:04x}")).collect();
            let read: String = from_slice(format!("\"{json}\"").as_bytes()).unwrap();
            prop_assert_eq!(read, String::from_utf16_lossy(&units));
        }

        #[test]
        fn nothing_panics(bytes in prop::collection::vec(prop::sample::select(&b"\"\\u[]{}d8c0f:,1 "[..]), 0..64)) {
            let _ = from_slice::<Value>(&bytes);
        }
    }
}
