//! Chat messages to text, as `apply_chat_template` of Hugging Face's transformers renders them (`chat_template_utils.py` there): the same
//! Jinja settings, the same extra functions, Python's way to print values.
//!
//! - `source`: features of Jinja2 that MiniJinja lacks, rewritten
//! - `python`: printing, tests and methods of values; `json`: `tojson`
//! - `takes`: the forms of messages that a template accepts; `probe`: how they are detected

pub(crate) mod json;
mod probe;
mod python;
mod source;
pub(crate) mod takes;

use super::config::ModelConfig;
use minijinja::{Environment, Error, ErrorKind, Value, context, syntax::SyntaxConfig};
use std::{
    collections::BTreeMap,
    panic::{AssertUnwindSafe, catch_unwind},
    time::SystemTime,
};
use takes::Takes;
use time::{OffsetDateTime, format_description::parse_strftime_borrowed};

/// The maximum number of instructions of one rendering: some hundred per message of the longest chat that fits a request.
const FUEL: u64 = 20_000_000;

/// The target of an event for each rendered prompt, with its length, by which tests count how often a prompt is rendered.
pub const RENDERS: &str = "tidemill::template";

/// Fuel for a dialog of a few words that tests the template.
const FUEL_TO_TRY: u64 = 200_000;

#[derive(Debug)]
pub struct ChatTemplate {
    env: Environment<'static>,
    source: String,
    specials: Vec<(&'static str, String)>,
    takes: Takes,
}

/// The input of a template.
#[derive(Debug, Default)]
pub struct ChatInput {
    pub messages: Vec<Value>,
    pub tools: Option<Vec<Value>>,
    pub add_generation_prompt: bool,
    /// More variables: the request's `chat_template_kwargs`.
    pub kwargs: BTreeMap<String, Value>,
}

/// An error of a template: it does not compile, or refuses these messages.
#[derive(Debug, thiserror::Error)]
#[error("chat template: {0}")]
pub struct TemplateError(String);

const TOO_LONG: &str = "rendering these messages takes too long";

impl TemplateError {
    /// Whether the error is about the number of messages, rather than their form.
    pub(crate) fn is_too_long(&self) -> bool {
        self.0 == TOO_LONG
    }
}

impl ChatTemplate {
    pub fn new(source: String, config: &ModelConfig) -> Result<Self, TemplateError> {
        let mut env = Environment::new();
        let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|e| TemplateError(e.to_string()))?);
        env.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
        python::install(&mut env);
        env.set_fuel(Some(FUEL));
        env.add_filter("tojson", json::to_json);
        env.add_function("raise_exception", |message: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, message))
        });
        let adapted = source::adapted(&source).map_err(TemplateError)?;
        env.add_template_owned("chat", adapted).map_err(|e| TemplateError(describe(&e)))?;
        let specials = [
            ("bos_token", &config.bos_token),
            ("eos_token", &config.eos_token),
            ("unk_token", &config.unk_token),
            ("pad_token", &config.pad_token),
        ];
        let specials = specials.into_iter().filter_map(|(name, token)| Some((name, token.clone()?))).collect();
        let mut template = Self { env, source, specials, takes: Takes::default() };
        template.env.set_fuel(Some(FUEL_TO_TRY));
        template.takes = Takes::found(&template);
        template.env.set_fuel(Some(FUEL));
        Ok(template)
    }

    /// Returns the forms of dialogs that the template accepts.
    pub(crate) fn takes(&self) -> &Takes {
        &self.takes
    }

    /// Whether the template's own text contains this.
    pub fn mentions(&self, text: &str) -> bool {
        self.source.contains(text)
    }

    pub fn source(&self) -> &str {
        &self.source
    }

    pub fn render(&self, input: ChatInput, now: SystemTime) -> Result<String, TemplateError> {
        let ChatInput { messages, tools, add_generation_prompt, kwargs } = input;
        let strftime_now = Value::from_function(move |format: String| strftime(now, &format));
        let specials = Value::from_pairs(self.specials.iter().map(|(name, token)| (*name, Value::from(token.as_str()))));
        let base = context! {
            messages, tools, add_generation_prompt, strftime_now,
            documents => Value::from(()),
            ..specials
        };
        let all = context! { ..Value::from(kwargs), ..base };
        let template = self.env.get_template("chat").map_err(|e| TemplateError(describe(&e)))?;
        // The library panics on some slices. No state of ours is changed meanwhile, and its environment is only read.
        let rendered = catch_unwind(AssertUnwindSafe(|| template.render(all)));
        let rendered = rendered.map_err(|_| TemplateError("it broke the template engine: please report this as a bug".into()))?;
        #[cfg(feature = "shell")]
        tracing::trace!(target: RENDERS, bytes = rendered.as_ref().map_or(0, String::len), "a prompt is rendered");
        rendered.map_err(|e| TemplateError(describe(&e)))
    }
}

fn describe(error: &Error) -> String {
    match (error.kind(), error.detail()) {
        (ErrorKind::OutOfFuel, _) => TOO_LONG.into(),
        (ErrorKind::InvalidOperation, Some(detail)) => detail.to_owned(),
        _ => error.to_string(),
    }
}

/// Formats dates in UTC.
fn strftime(now: SystemTime, format: &str) -> Result<String, Error> {
    let invalid = |reason: String| Error::new(ErrorKind::InvalidOperation, format!("strftime_now({format:?}): {reason}"));
    let description = parse_strftime_borrowed(format).map_err(|e| invalid(e.to_string()))?;
    OffsetDateTime::from(now).format(&description).map_err(|e| invalid(e.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    fn render(source: &str, message: serde_json::Value) -> Result<String, TemplateError> {
        let config = ModelConfig { bos_token: Some("<s>".into()), ..ModelConfig::default() };
        let message: Value = serde_json::from_value(message).unwrap();
        let input = ChatInput { messages: vec![message], add_generation_prompt: true, ..ChatInput::default() };
        ChatTemplate::new(source.into(), &config)?.render(input, SystemTime::UNIX_EPOCH + Duration::from_secs(86400 * 45))
    }

    #[test]
    fn prints_as_python_does() {
        let text = render(
            "{{ true }} {{ none }} {{ missing }}{{ 1.0 }} {{ messages[0]|tojson }}",
            serde_json::json!({"b": "<é>", "a": [1, null]}),
        );
        assert_eq!(text.unwrap(), r#"True None 1.0 {"b": "<é>", "a": [1, null]}"#);
        let text = render("{{ messages[0]|tojson(indent=2) }}", serde_json::json!({"a": 1}));
        assert_eq!(text.unwrap(), "{\n  \"a\": 1\n}");
    }

    #[test]
    fn blocks_are_trimmed_as_hugging_face_does() {
        let source = "{% for m in messages %}\n    {% if m.role == 'user' %}\nU:{{ m.content.strip() }}\n    {% endif %}\n{% endfor %}\n";
        assert_eq!(render(source, serde_json::json!({"role": "user", "content": " x "})).unwrap(), "U:x\n");
    }

    #[test]
    fn a_template_that_breaks_the_engine_is_an_error() {
        let error = render("{{ ({}.items())[::-1] }}", serde_json::json!({})).unwrap_err().to_string();
        assert!(error.contains("broke the template engine"), "{error}");
        assert!(render("{%}", serde_json::json!({})).is_err(), "a tag of three bytes");
    }

    #[test]
    fn generation_tags_print_nothing() {
        let source = "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration %}{% break %}{% endfor %}.";
        assert_eq!(render(source, serde_json::json!({"content": "x"})).unwrap(), "x.");
    }

    #[test]
    fn knows_special_tokens_and_dates() {
        let text = render("{{ bos_token }}{{ strftime_now('%d %b %Y') }}{% if eos_token is defined %}!{% endif %}", serde_json::json!({}));
        assert_eq!(text.unwrap(), "<s>15 Feb 1970");
    }

    #[test]
    fn errors_are_the_templates_own_words() {
        let error = render("{{ raise_exception('Roles must alternate') }}", serde_json::json!({})).unwrap_err();
        assert_eq!(error.to_string(), "chat template: Roles must alternate");
        let endless = "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";
        assert!(render(endless, serde_json::json!({})).unwrap_err().to_string().contains("too long"));
        assert!(render("{% if %}", serde_json::json!({})).is_err());
    }
}
