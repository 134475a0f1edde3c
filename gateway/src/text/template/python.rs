//! Python's way to print, test and cut values, where chat templates depend on it and MiniJinja differs.

use minijinja::{
    Environment, Error, ErrorKind, Output, State, Value,
    formatting::FormatStyle,
    value::{Kwargs, Rest, ValueKind, from_args},
};
use std::fmt::Write;

/// The maximum width to which shorter texts are padded.
const WIDTH_MAX: usize = 1 << 16;
/// The depth from which values are printed as `...`.
const DEPTH_MAX: usize = 256;

/// Makes an environment print and test values as Jinja2 does.
pub(super) fn install(env: &mut Environment<'static>) {
    env.set_formatter(print);
    env.set_unknown_method_callback(method);
    env.add_filter("string", |value: &Value| if value.kind() == ValueKind::String { value.clone() } else { Value::from(str_of(value)) });
    env.add_filter("trim", |value: &Value, chars: Option<&str>| strip(&str_of(value), chars, true, true).to_owned());
    env.add_filter("format", |format: &str, values: Rest<Value>| {
        let printed = |value: &Value| match value.kind() {
            ValueKind::Seq | ValueKind::Iterable | ValueKind::Map => str_of(value).into(),
            _ => value.clone(),
        };
        minijinja::formatting::format(FormatStyle::Printf, format, &values.iter().map(printed).collect::<Vec<_>>())
    });
    env.add_filter("length", length);
    env.add_filter("count", length);
    env.add_filter("items", |value: &Value| match value.kind() {
        ValueKind::Undefined => Ok(Value::from(Vec::<Value>::new())),
        _ => minijinja::filters::items(value),
    });
    env.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    env.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Undefined | ValueKind::String | ValueKind::Seq | ValueKind::Iterable | ValueKind::Map)
    });
}

fn length(value: &Value) -> Result<usize, Error> {
    if value.is_undefined() { Ok(0) } else { minijinja::filters::length(value) }
}

fn print(out: &mut Output, state: &mut State, value: &Value) -> Result<(), Error> {
    match value.kind() {
        ValueKind::Undefined | ValueKind::String | ValueKind::Plain | ValueKind::Bytes | ValueKind::Invalid => {
            minijinja::escape_formatter(out, state, value)
        }
        _ => Ok(out.write_str(&str_of(value))?),
    }
}

/// `str(value)`.
fn str_of(value: &Value) -> String {
    match value.as_str() {
        Some(text) => text.to_owned(),
        None => {
            let mut out = String::new();
            write_repr(value, 0, &mut out);
            out
        }
    }
}

/// `repr(value)`.
fn write_repr(value: &Value, depth: usize, out: &mut String) {
    if depth > DEPTH_MAX {
        out.push_str("...");
        return;
    }
    let all = |out: &mut String, items: &mut dyn Iterator<Item = Value>, each: &dyn Fn(&Value, &mut String)| {
        for (place, item) in items.enumerate() {
            out.push_str(if place > 0 { ", " } else { "" });
            each(&item, out);
        }
    };
    match value.kind() {
        ValueKind::String => write_text(value.as_str().unwrap_or_default(), out),
        ValueKind::Number if !value.is_integer() => match f64::try_from(value.clone()) {
            Ok(number) => out.push_str(&float(number)),
            Err(_) => _ = write!(out, "{value}"),
        },
        ValueKind::Seq | ValueKind::Iterable => {
            let (open, close) = if value.is_tuple() { ('(', ')') } else { ('[', ']') };
            out.push(open);
            all(out, &mut value.try_iter().into_iter().flatten(), &|item, out| write_repr(item, depth + 1, out));
            if value.is_tuple() && value.len() == Some(1) {
                out.push(',');
            }
            out.push(close);
        }
        ValueKind::Map => {
            out.push('{');
            all(out, &mut value.try_iter().into_iter().flatten(), &|name, out| {
                write_repr(name, depth + 1, out);
                out.push_str(": ");
                write_repr(&value.get_item(name).unwrap_or_default(), depth + 1, out);
            });
            out.push('}');
        }
        // This includes None, True and False.
        _ => _ = write!(out, "{value}"),
    }
}

fn write_text(text: &str, out: &mut String) {
    let quote = if text.contains('\'') && !text.contains('"') { '"' } else { '\'' };
    out.push(quote);
    for c in text.chars() {
        _ = match c {
            '\\' => write!(out, "\\\\"),
            '\n' => write!(out, "\\n"),
            '\r' => write!(out, "\\r"),
            '\t' => write!(out, "\\t"),
            c if c == quote => write!(out, "\\{c}"),
            c if c.is_control() && u32::from(c) <= 0xFF => write!(out, "\\x{:02x}", u32::from(c)),
            '\u{a0}' | '\u{ad}' => write!(out, "\\x{:02x}", u32::from(c)),
            c if c != ' ' && (c.is_whitespace() || is_invisible(c)) => write!(out, "\\u{:04x}", u32::from(c)),
            c => write!(out, "{c}"),
        };
    }
    out.push(quote);
}

/// Whether a character is a direction mark, joiner or the like, which Python considers not printable.
fn is_invisible(c: char) -> bool {
    matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// `repr` of a float: the shortest digits that identify it, with an exponent below 1e-4 and from 1e16 on.
pub(super) fn float(number: f64) -> String {
    if number.is_nan() {
        return "nan".into();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf".into() } else { "-inf".into() };
    }
    let size = number.abs();
    if size != 0.0 && !(1e-4..1e16).contains(&size) {
        let text = format!("{number:e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let (sign, exponent) = exponent.strip_prefix('-').map_or(('+', exponent), |exponent| ('-', exponent));
        return format!("{digits}e{sign}{exponent:0>2}");
    }
    let text = number.to_string();
    if text.contains('.') { text } else { text + ".0" }
}

/// White space as `str.strip` sees it.
fn is_space(c: char) -> bool {
    c.is_whitespace() || ('\x1c'..='\x1f').contains(&c)
}

fn strip<'a>(text: &'a str, chars: Option<&str>, left: bool, right: bool) -> &'a str {
    let strips = |c: char| chars.map_or_else(|| is_space(c), |chars| chars.contains(c));
    let text = if left { text.trim_start_matches(strips) } else { text };
    if right { text.trim_end_matches(strips) } else { text }
}

/// Methods of Python's strings; for other values, those that MiniJinja's own layer supports.
fn method(state: &mut State, value: &Value, name: &str, args: &[Value]) -> Result<Value, Error> {
    match value.as_str() {
        Some(text) => match string_method(text, name, args) {
            Some(result) => result,
            None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
        },
        None => minijinja_contrib::pycompat::unknown_method_callback(state, value, name, args),
    }
}

/// Returns `None` if it is not one of these methods.
fn string_method(text: &str, name: &str, args: &[Value]) -> Option<Result<Value, Error>> {
    Some(match name {
        "strip" | "lstrip" | "rstrip" => {
            from_args(args).map(|(chars,): (Option<&str>,)| strip(text, chars, name != "rstrip", name != "lstrip").into())
        }
        "removeprefix" => from_args(args).map(|(prefix,): (&str,)| text.strip_prefix(prefix).unwrap_or(text).into()),
        "removesuffix" => from_args(args).map(|(suffix,): (&str,)| text.strip_suffix(suffix).unwrap_or(text).into()),
        "partition" => from_args(args).map(|(at,): (&str,)| parts(text.split_once(at).map(|(a, b)| [a, at, b]).unwrap_or([text, "", ""]))),
        "rpartition" => {
            from_args(args).map(|(at,): (&str,)| parts(text.rsplit_once(at).map(|(a, b)| [a, at, b]).unwrap_or(["", "", text])))
        }
        "split" | "rsplit" => split(text, name == "rsplit", args),
        "splitlines" => from_args(args).map(|(keep,): (Option<bool>,)| Value::from_iter(lines(text, keep.unwrap_or(false)))),
        "index" | "rindex" => from_args(args).and_then(|(what,): (&str,)| {
            let found = if name == "index" { text.find(what) } else { text.rfind(what) };
            found.map(|at| Value::from(text[..at].chars().count())).ok_or_else(|| invalid("substring not found"))
        }),
        "ljust" | "rjust" | "center" | "zfill" => padded(text, name, args),
        "swapcase" => from_args(args).map(|()| Value::from(text.chars().map(swapped).collect::<String>())),
        "casefold" => from_args(args).map(|()| Value::from(text.to_lowercase().replace('ß', "ss"))),
        "title" => from_args(args).map(|()| Value::from(title(text))),
        "isdecimal" => from_args(args).map(|()| Value::from(!text.is_empty() && text.chars().all(char::is_numeric))),
        _ => return None,
    })
}

fn invalid(message: &'static str) -> Error {
    Error::new(ErrorKind::InvalidOperation, message)
}

fn parts(parts: [&str; 3]) -> Value {
    Value::from_iter(parts)
}

/// `split(sep=None, maxsplit=-1)`, with arguments by position or by name, and `rsplit`.
fn split(text: &str, from_end: bool, args: &[Value]) -> Result<Value, Error> {
    let (positional, named): (Rest<Value>, Kwargs) = from_args(args)?;
    let take = |place: usize, name: &str| match positional.get(place) {
        Some(value) => Ok::<_, Error>(Some(value.clone())),
        None => named.get(name),
    };
    let (at, most) = (take(0, "sep")?, take(1, "maxsplit")?);
    named.assert_all_used()?;
    let most = most.filter(|most| !most.is_none()).map(i64::try_from).transpose()?.and_then(|most| usize::try_from(most).ok());
    let at = at.filter(|at| !at.is_none());
    let at = match &at {
        None => None,
        Some(at) => Some(at.as_str().filter(|at| !at.is_empty()).ok_or_else(|| invalid("split: the separator must be a text"))?),
    };
    Ok(Value::from_iter(match (at, from_end) {
        (Some(at), false) => text.splitn(most.map_or(usize::MAX, |most| most.saturating_add(1)), at).collect::<Vec<_>>(),
        (Some(at), true) => reversed(text.rsplitn(most.map_or(usize::MAX, |most| most.saturating_add(1)), at).collect()),
        (None, false) => words(text, most.unwrap_or(usize::MAX)),
        (None, true) => words_from_end(text, most.unwrap_or(usize::MAX)),
    }))
}

fn reversed<T>(mut items: Vec<T>) -> Vec<T> {
    items.reverse();
    items
}

/// Splits at white space, at most `most` times; the last piece is the rest.
fn words(text: &str, most: usize) -> Vec<&str> {
    let mut out = Vec::new();
    let mut rest = text.trim_start_matches(is_space);
    while !rest.is_empty() {
        if out.len() == most {
            out.push(rest);
            break;
        }
        let end = rest.find(is_space).unwrap_or(rest.len());
        out.push(&rest[..end]);
        rest = rest[end..].trim_start_matches(is_space);
    }
    out
}

fn words_from_end(text: &str, most: usize) -> Vec<&str> {
    let mut out = Vec::new();
    let mut rest = text.trim_end_matches(is_space);
    while !rest.is_empty() {
        if out.len() == most {
            out.push(rest);
            break;
        }
        let start = rest.char_indices().rev().find(|(_, c)| is_space(*c)).map_or(0, |(at, c)| at + c.len_utf8());
        out.push(&rest[start..]);
        rest = rest[..start].trim_end_matches(is_space);
    }
    reversed(out)
}

fn lines(text: &str, keep: bool) -> Vec<&str> {
    let ends_line = |c: char| matches!(c, '\n' | '\r' | '\x0b' | '\x0c' | '\x1c'..='\x1e' | '\u{85}' | '\u{2028}' | '\u{2029}');
    let mut out = Vec::new();
    let mut rest = text;
    while let Some(end) = rest.find(ends_line) {
        let after = &rest[end..];
        let width = if after.starts_with("\r\n") { 2 } else { after.chars().next().map_or(0, char::len_utf8) };
        out.push(&rest[..if keep { end + width } else { end }]);
        rest = &rest[end + width..];
    }
    if !rest.is_empty() {
        out.push(rest);
    }
    out
}

fn padded(text: &str, name: &str, args: &[Value]) -> Result<Value, Error> {
    let (width, fill): (usize, Option<&str>) = from_args(args)?;
    let missing = width.min(WIDTH_MAX).saturating_sub(text.chars().count());
    let fill = if name == "zfill" { "0" } else { fill.unwrap_or(" ") };
    let pad = |count: usize| fill.repeat(count);
    Ok(Value::from(match name {
        "ljust" => text.to_owned() + &pad(missing),
        // Python puts the odd space on the left if the width is odd.
        "center" => {
            let left = missing / 2 + (missing & width & 1);
            pad(left) + text + &pad(missing - left)
        }
        "zfill" if text.starts_with(['-', '+']) => text[..1].to_owned() + &pad(missing) + &text[1..],
        _ => pad(missing) + text,
    }))
}

fn swapped(c: char) -> char {
    let mut other: Box<dyn Iterator<Item = char>> = if c.is_uppercase() { Box::new(c.to_lowercase()) } else { Box::new(c.to_uppercase()) };
    other.next().unwrap_or(c)
}

/// Capitalizes each letter that does not follow a letter.
fn title(text: &str) -> String {
    let mut inside = false;
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        if inside {
            out.extend(c.to_lowercase());
        } else {
            out.extend(c.to_uppercase());
        }
        inside = c.is_alphabetic();
    }
    out
}
