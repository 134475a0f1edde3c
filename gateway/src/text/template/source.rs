//! A template's source rewritten for MiniJinja: features of Jinja2 that MiniJinja lacks are expressed differently.

/// The most words, signs and texts of one tag. Each may make an expression one level deeper, and MiniJinja compiles those by recursion.
const TOKENS_MAX: usize = 2000;

/// Replaces `{% generation %}`, which marks the assistant's part for training and prints nothing, by a condition that always holds, keeping
/// its white-space marks. `'…' % value` becomes the equivalent filter.
pub(super) fn adapted(source: &str) -> Result<String, String> {
    let mut out = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(at) = next_tag(rest) {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let close = match &rest[..2] {
            "{#" => "#}",
            "{%" => "%}",
            _ => "}}",
        };
        let end = tag_end(&rest[2..], close);
        let inner = &rest[2..end.map_or(rest.len(), |end| 2 + end)];
        if close != "#}" && tokens(inner).nth(TOKENS_MAX).is_some() {
            let begins: String = inner.chars().take(40).collect();
            return Err(format!("the tag that begins with {begins:?} has more than {TOKENS_MAX} words and signs: divide it"));
        }
        let Some(end) = end else { break };
        out.push_str(&rest[..2]);
        match close {
            "#}" => out.push_str(inner),
            _ => out.push_str(&with_formats(&without_generation(inner))),
        }
        out.push_str(close);
        rest = &rest[2 + end + close.len()..];
    }
    Ok(out + rest)
}

/// The words, signs and texts of a tag.
fn tokens(inner: &str) -> impl Iterator<Item = &str> {
    let mut rest = inner;
    let all = std::iter::from_fn(move || {
        let (token, after) = rest.split_at_checked(token_bytes(rest)).filter(|(token, _)| !token.is_empty())?;
        rest = after;
        Some(token)
    });
    all.filter(|token| !token.trim().is_empty())
}

fn next_tag(text: &str) -> Option<usize> {
    text.as_bytes().windows(2).position(|pair| matches!(pair, b"{{" | b"{%" | b"{#"))
}

/// Finds the end of a tag, outside strings and brackets within it.
fn tag_end(text: &str, close: &str) -> Option<usize> {
    if close == "#}" {
        return text.find(close);
    }
    let mut depth = 0_usize;
    let mut at = 0;
    while at < text.len() {
        if depth == 0 && text[at..].starts_with(close) {
            return Some(at);
        }
        let token = token_bytes(&text[at..]);
        match &text[at..at + token] {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += token;
    }
    None
}

fn without_generation(inner: &str) -> String {
    let word = inner.trim_matches(['-', '+']).trim();
    match word {
        "generation" => inner.replacen(word, "if true", 1),
        "endgeneration" => inner.replacen(word, "endif", 1),
        _ => inner.to_owned(),
    }
}

/// Rewrites formatting of literal texts: elsewhere `%` is taken for a division's remainder.
fn with_formats(inner: &str) -> String {
    let mut out = String::with_capacity(inner.len());
    let mut at = 0;
    let mut after_text = false;
    while at < inner.len() {
        let token = &inner[at..at + token_bytes(&inner[at..])];
        if token == "%" && after_text {
            let from = at + 1;
            let operand = &inner[from..from + operand_bytes(&inner[from..])];
            out.push_str("|format(");
            out.push_str(&with_formats(tuple(operand.trim()).unwrap_or(operand)));
            out.push(')');
            at = from + operand.len();
            after_text = false;
            continue;
        }
        out.push_str(token);
        if !token.trim().is_empty() {
            after_text = token.starts_with(['\'', '"']);
        }
        at += token.len();
    }
    out
}

/// Returns the inside of the brackets of `(a, b)`.
fn tuple(operand: &str) -> Option<&str> {
    let inside = operand.strip_prefix('(')?;
    let end = bracket_bytes(operand)?;
    (end == operand.len()).then(|| inside[..inside.len() - 1].trim_end().trim_end_matches(','))
}

/// The length of an operand: white space, a sign, a value, and all dots, brackets and filters that belong to it.
fn operand_bytes(text: &str) -> usize {
    let space = |at: usize| at + (text[at..].len() - text[at..].trim_start().len());
    let mut at = space(0);
    if text[at..].starts_with(['-', '+']) {
        at = space(at + 1);
    }
    let part = |at: usize| match text[at..].chars().next() {
        Some('(' | '[' | '{') => bracket_bytes(&text[at..]).unwrap_or(text.len() - at),
        Some(_) => token_bytes(&text[at..]),
        None => 0,
    };
    at += part(at);
    loop {
        let next = space(at);
        match text[next..].chars().next() {
            Some('(' | '[') => at = next + part(next),
            Some('.' | '|') => {
                let name = space(next + 1);
                at = name + part(name);
            }
            _ => return at,
        }
    }
}

/// The length of a bracketed part, including the brackets.
fn bracket_bytes(text: &str) -> Option<usize> {
    let mut depth = 0_usize;
    let mut at = 0;
    while at < text.len() {
        let token = token_bytes(&text[at..]);
        match &text[at..at + token] {
            "(" | "[" | "{" => depth += 1,
            ")" | "]" | "}" => depth = depth.saturating_sub(1),
            _ => {}
        }
        at += token;
        if depth == 0 {
            return Some(at);
        }
    }
    None
}

/// The length of the first token: a string, a name or number, a run of white space, or a character.
fn token_bytes(text: &str) -> usize {
    let Some(first) = text.chars().next() else { return 0 };
    let run = |is: fn(char) -> bool| text.find(|c| !is(c)).unwrap_or(text.len());
    match first {
        '\'' | '"' => {
            let mut escaped = false;
            let end = text.char_indices().skip(1).find(|(_, c)| {
                let ends = *c == first && !escaped;
                escaped = *c == '\\' && !escaped;
                ends
            });
            end.map_or(text.len(), |(at, _)| at + 1)
        }
        c if c.is_whitespace() => run(char::is_whitespace),
        c if c.is_alphanumeric() || c == '_' => run(|c| c.is_alphanumeric() || c == '_'),
        c => c.len_utf8(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_formatted_by_a_filter_and_numbers_divided() {
        for (source, expected) in [
            ("{{ '%s' % x }}", "{{ '%s' |format( x) }}"),
            ("{{ a ~ '%d/%d' % (i, n|length) ~ b }}", "{{ a ~ '%d/%d' |format(i, n|length) ~ b }}"),
            ("{{ \"%s\" % x.y[0]|f(1) }}", "{{ \"%s\" |format( x.y[0]|f(1)) }}"),
            ("{{ '%s' % ('a' % b,) }}", "{{ '%s' |format('a' |format( b)) }}"),
            ("{% if i % 2 %}%{% endif %}", "{% if i % 2 %}%{% endif %}"),
            ("{{ x['a'] % 2 }}", "{{ x['a'] % 2 }}"),
            ("{{ '}}' }}{# '%' % x #} % {{ {'a': {}} }}", "{{ '}}' }}{# '%' % x #} % {{ {'a': {}} }}"),
            ("{%- generation -%} x {% endgeneration %}", "{%- if true -%} x {% endif %}"),
            ("{{ 'é", "{{ 'é"),
        ] {
            assert_eq!(adapted(source).as_deref(), Ok(expected));
        }
    }

    #[test]
    fn an_expression_is_no_deeper_than_a_stack() {
        let sum = |terms: usize| format!("a{}", " % 0".repeat(terms));
        for whole in ["{{ @ }}", "{% if @ %}x{% endif %}", "{{ @", "{{ ('%' % @) }}"] {
            let source = whole.replace('@', &sum(20_000));
            let error = adapted(&source).unwrap_err();
            assert!(error.contains("2000 words and signs"), "{error}");
        }
        assert!(adapted(&format!("{{{{ {} }}}}", sum(900))).is_ok());
        assert!(adapted(&format!("{{{{ '{}' }}}}", "a b ".repeat(20_000))).is_ok(), "a text is one word");
    }
}
