//! The compiler's messages about a schema, in terms of schemas: its own ones show expressions that it has created, and options that a
//! client does not have.

/// The beginning of the compiler's messages that no value matches.
const UNSATISFIABLE: &str = "Unsatisfiable schema: ";
/// The beginnings of the compiler's messages, and their replacements.
const WORDS: [(&str, &str); 16] = [
    (
        "Unsatisfiable schema: Regex is empty",
        "no text matches it: its `pattern`, `format` and length, or those that `allOf` adds, exclude each other",
    ),
    (
        "Unable to determine if regex is empty",
        "its `pattern`, `format` and length together are too complex to find a text that matches them: make them simpler",
    ),
    (
        "oneOf constraints",
        "its options in `oneOf` may hold at the same time: tell them apart by a required property with another `const` in each, or use \
         `anyOf`",
    ),
    ("patternProperty regexes", "a name may match two of its `patternProperties`: write expressions that exclude each other"),
    (
        "can't determine if patternProperty",
        "its `patternProperties` are too complex to tell whether a name may match two: make them simpler",
    ),
    (
        "min/maxProperties only",
        "`minProperties` and `maxProperties` are supported where all `properties` are required, or none but one may be there",
    ),
    ("circular references", "a reference leads back to itself beside other keywords, so that it has no end"),
    ("schema too large", TOO_LARGE),
    ("Schema intersection stack level", TOO_LARGE),
    ("initial lexer configuration", TOO_LARGE),
    ("grammar size", TOO_LARGE),
    ("fuel exhausted", TOO_LARGE),
    ("Failed to generate regex for", "no number is within its bounds, or they are too far apart"),
    ("lookarounds not supported", "its `pattern` has a word boundary, or `^` or `$` within it, which are not supported"),
    ("Value for 'multipleOf' has too many digits", "its `multipleOf` has too many digits"),
    ("unknown format", "its `format` is not supported"),
];
const TOO_LARGE: &str = "it is too large with all that `allOf`, `anyOf` and references bring together: make it smaller";

/// Whether a message means that no value matches.
pub(crate) fn is_unsatisfiable(message: &str) -> bool {
    message.starts_with(UNSATISFIABLE)
}

/// Rewords a message of the compiler about a schema.
pub(crate) fn of_schema(message: &str) -> String {
    if let Some((_, words)) = WORDS.iter().find(|(beginning, _)| message.starts_with(beginning)) {
        return (*words).to_owned();
    }
    if let Some(reason) = message.strip_prefix(UNSATISFIABLE) {
        return format!("no value matches it: {}", reason.lines().next().unwrap_or_default());
    }
    // A parser's message shows the expression, with a mark below, and then the error.
    if message.starts_with("regex parse error") {
        let reason = message.lines().filter_map(|line| line.trim().strip_prefix("error: ")).next_back();
        return format!("its `pattern` is no expression that can be followed: {}", reason.unwrap_or("it cannot be read"));
    }
    // These are this crate's own messages.
    if ["it ", "no text follows", "each of its numbers"].iter().any(|own| message.starts_with(own)) {
        return message.lines().next().unwrap_or_default().to_owned();
    }
    "it cannot be compiled: write it with fewer or simpler keywords".to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_expression_of_the_compilers_is_shown() {
        for (message, word) in [
            ("Unsatisfiable schema: Regex is empty: (/(?P<x>[0-9]+)/ & (?s:.*))", "exclude each other"),
            ("Unable to determine if regex is empty: (And ...)", "too complex"),
            ("patternProperty regexes /a/ and /[0-9]/ are not disjoint", "two of its"),
            ("Unsatisfiable schema: required property 'a' is unsatisfiable", "'a'"),
            ("regex parse error:\n    (?:[0-9]\n    ^\nerror: unclosed group", "unclosed group"),
            ("Some(Concat(Byte(3)))", "cannot be compiled"),
        ] {
            let worded = of_schema(message);
            assert!(worded.contains(word), "{worded}");
            assert!(!worded.contains(['[', '&', '\n']) && !worded.contains("Concat"), "{worded}");
        }
    }
}
