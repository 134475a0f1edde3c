//! A template that is compiled in this process.

use super::{
    content::{ChatInput, OUTPUT_BYTES_MAX, TemplateError, TemplateText},
    json, python, source,
};
use minijinja::{Environment, Error, ErrorKind, Value, context, syntax::SyntaxConfig};
use std::{
    io::{self, Write},
    panic::{AssertUnwindSafe, catch_unwind},
    time::SystemTime,
};
use time::{OffsetDateTime, format_description::parse_strftime_borrowed};

#[derive(Debug)]
pub(super) struct Engine {
    env: Environment<'static>,
    specials: Vec<(String, String)>,
}

pub(super) fn syntax() -> Result<SyntaxConfig, TemplateError> {
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    syntax.map_err(|error| TemplateError::Refused(error.to_string()))
}

impl Engine {
    pub(super) fn new(text: &TemplateText) -> Result<Self, TemplateError> {
        let mut env = Environment::new();
        env.set_syntax(syntax()?);
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        python::install(&mut env);
        env.add_filter("tojson", json::to_json);
        env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        let adapted = source::adapted(&text.source).map_err(TemplateError::Refused)?;
        env.add_template_owned("chat", adapted).map_err(|e| described(&e))?;
        Ok(Self { env, specials: text.specials.clone() })
    }

    /// Bounds the instructions of each rendering.
    pub(super) fn with_fuel(mut self, fuel: u64) -> Self {
        self.env.set_fuel(Some(fuel));
        self
    }

    pub(super) fn render(&self, input: &ChatInput, now: SystemTime) -> Result<String, TemplateError> {
        let ChatInput { messages, tools, add_generation_prompt, kwargs } = input;
        let strftime_now = Value::from_function(move |format: String| strftime(now, &format));
        let specials = Value::from_pairs(self.specials.iter().map(|(name, token)| (name.as_str(), Value::from(token.as_str()))));
        let base = context! {
            messages => messages.clone(), tools => tools.clone(), add_generation_prompt, strftime_now,
            documents => Value::from(()),
            ..specials
        };
        let all = context! { ..Value::from(kwargs.clone()), ..base };
        let template = self.env.get_template("chat").map_err(|e| described(&e))?;
        let mut prompt = Bounded { bytes: Vec::new(), is_full: false };
        // The library panics on some slices. No state of ours is changed meanwhile, and its environment is only read.
        let rendered = catch_unwind(AssertUnwindSafe(|| template.render_captured_to(all, &mut prompt).map(drop)));
        match rendered {
            Err(_) => Err(TemplateError::Refused("it broke the template engine: please report this as a bug".into())),
            Ok(Err(_)) if prompt.is_full => Err(TemplateError::TooMuch),
            Ok(Err(error)) => Err(described(&error)),
            Ok(Ok(())) => Ok(String::from_utf8(prompt.bytes).expect("templates write texts")),
        }
    }
}

/// A prompt that is being written, up to its bound.
struct Bounded {
    bytes: Vec<u8>,
    is_full: bool,
}

impl Write for Bounded {
    fn write(&mut self, text: &[u8]) -> io::Result<usize> {
        self.is_full |= self.bytes.len() + text.len() > OUTPUT_BYTES_MAX;
        if self.is_full {
            return Err(io::Error::from(io::ErrorKind::FileTooLarge));
        }
        self.bytes.extend_from_slice(text);
        Ok(text.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn described(error: &Error) -> TemplateError {
    match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => TemplateError::TooLong,
        (ErrorKind::InvalidOperation, Some(detail)) => TemplateError::Refused(detail.to_owned()),
        _ => TemplateError::Refused(error.to_string()),
    }
}

/// Formats dates in UTC.
fn strftime(now: SystemTime, format: &str) -> Result<String, Error> {
    let invalid = |reason: String| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {reason}"));
    let description = parse_strftime_borrowed(format).map_err(|e| invalid(e.to_string()))?;
    OffsetDateTime::from(now).format(&description).map_err(|e| invalid(e.to_string()))
}
