//! JSON as clients write it, beyond what `serde_json` reads: a byte order mark before it, half of a surrogate pair (JavaScript cuts texts
//! between the two halves), and schemas nested deeper than 128 levels. Only texts that were refused are examined again, so other bodies pay
//! nothing.

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

    proptest! {
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
