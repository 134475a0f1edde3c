//! `json.dumps` as the `tojson` filter of transformers calls it: unlike Jinja's own filter, it escapes no HTML.

use super::python;
use minijinja::{
    Error, ErrorKind, Value,
    value::{Kwargs, ValueKind},
};
use serde::Serialize;
use serde_json::ser::{Formatter, Serializer};
use std::io;

const INDENT_MAX: usize = 16;

/// `tojson(ensure_ascii=False, indent=None, separators=None, sort_keys=False)`.
pub(super) fn to_json(value: &Value, kwargs: Kwargs) -> Result<Value, Error> {
    let indent = match kwargs.get::<Option<Value>>("indent")?.filter(|indent| !indent.is_none()) {
        None => None,
        Some(indent) => Some(match indent.as_str() {
            Some(text) => text.chars().take(INDENT_MAX).collect(),
            None => " ".repeat(usize::try_from(i64::try_from(indent)?).unwrap_or(0).min(INDENT_MAX)),
        }),
    };
    let ascii = kwargs.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false);
    let sorted = kwargs.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    let separators = kwargs.get::<Option<Value>>("separators")?.filter(|separators| !separators.is_none());
    kwargs.assert_all_used()?;
    let usual = [if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()];
    let [item, key] = separators.map_or(Ok(usual), |given| pair(&given))?;
    let style = Style { item, key, indent, ascii, depth: 0, filled: false };
    let sort = |value: &Value| serde_json::to_value(value).map(sorted_by_key);
    let json = if sorted { sort(value).and_then(|value| style.write(&value)) } else { style.write(value) };
    json.map(Value::from).map_err(|error| Error::new(ErrorKind::InvalidOperation, error.to_string()))
}

/// Writes a client's value in Python's default style.
pub(crate) fn dumps(value: &serde_json::Value) -> String {
    Style { item: ", ".into(), key: ": ".into(), indent: None, ascii: false, depth: 0, filled: false }.write(value).unwrap_or_default()
}

fn pair(given: &Value) -> Result<[String; 2], Error> {
    let texts = if matches!(given.kind(), ValueKind::Seq | ValueKind::Iterable) { given.try_iter()?.collect() } else { Vec::new() };
    let texts: Vec<_> = texts.iter().filter_map(Value::as_str).map(str::to_owned).collect();
    texts.try_into().map_err(|_| Error::new(ErrorKind::InvalidOperation, "tojson: `separators` must be two texts"))
}

fn sorted_by_key(value: serde_json::Value) -> serde_json::Value {
    match value {
        serde_json::Value::Object(fields) => {
            let mut fields: Vec<_> = fields.into_iter().map(|(key, field)| (key, sorted_by_key(field))).collect();
            fields.sort_by(|(a, _), (b, _)| a.cmp(b));
            serde_json::Value::Object(fields.into_iter().collect())
        }
        serde_json::Value::Array(items) => items.into_iter().map(sorted_by_key).collect(),
        other => other,
    }
}

struct Style {
    item: String,
    key: String,
    indent: Option<String>,
    ascii: bool,
    depth: usize,
    /// Whether the innermost array or object has elements.
    filled: bool,
}

impl Style {
    fn write<T: Serialize>(self, value: &T) -> serde_json::Result<String> {
        let mut json = Vec::new();
        value.serialize(&mut Serializer::with_formatter(&mut json, self))?;
        Ok(String::from_utf8(json).expect("JSON is UTF-8"))
    }

    fn line<W: ?Sized + io::Write>(&self, writer: &mut W) -> io::Result<()> {
        let Some(indent) = &self.indent else { return Ok(()) };
        writer.write_all(b"\n")?;
        (0..self.depth).try_for_each(|_| writer.write_all(indent.as_bytes()))
    }

    fn open<W: ?Sized + io::Write>(&mut self, writer: &mut W, mark: &[u8]) -> io::Result<()> {
        self.depth += 1;
        self.filled = false;
        writer.write_all(mark)
    }

    fn close<W: ?Sized + io::Write>(&mut self, writer: &mut W, mark: &[u8]) -> io::Result<()> {
        self.depth -= 1;
        if self.filled {
            self.line(writer)?;
        }
        self.filled = true;
        writer.write_all(mark)
    }

    fn next<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.filled = true;
        if !first {
            writer.write_all(self.item.as_bytes())?;
        }
        self.line(writer)
    }
}

impl Formatter for Style {
    fn write_f64<W: ?Sized + io::Write>(&mut self, writer: &mut W, value: f64) -> io::Result<()> {
        writer.write_all(python::float(value).as_bytes())
    }

    fn write_string_fragment<W: ?Sized + io::Write>(&mut self, writer: &mut W, fragment: &str) -> io::Result<()> {
        if !self.ascii || fragment.is_ascii() {
            return writer.write_all(fragment.as_bytes());
        }
        fragment.encode_utf16().try_for_each(|unit| match u8::try_from(unit).ok().filter(u8::is_ascii) {
            Some(byte) => writer.write_all(&[byte]),
            None => write!(writer, "\\u{unit:04x}"),
        })
    }

    fn begin_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"[")
    }

    fn end_array<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"]")
    }

    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.open(writer, b"{")
    }

    fn end_object<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        self.close(writer, b"}")
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        self.next(writer, first)
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(self.key.as_bytes())
    }
}
