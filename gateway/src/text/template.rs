//! Chat messages to text, as `apply_chat_template` of Hugging Face's transformers renders them (`chat_template_utils.py` there): the same
//! Jinja settings, the same extra functions, Python's way to print values.
//!
//! - `content`: a template's text, its input, its errors; `engine`: a compiled template; `source`: features of Jinja2 that MiniJinja lacks, rewritten
//! - `python`: printing, tests and methods of values; `json`: `tojson`
//! - `takes`: the forms of messages that a template accepts; `probe`: how they are detected
//! - `plain`: templates that can do no harm
//!
//! Templates come with models, whose makers are not trusted: fuel bounds a template's instructions, but neither the bytes nor the
//! depth of what they make. So a coordinator compiles and renders them in a [`Confinement`] process, where none costs more than its request. Plain
//! ones with short input are rendered here, which spares most requests of chats the way there and back.

mod content;
mod engine;
pub(crate) mod json;
mod plain;
mod probe;
mod python;
mod source;
pub(crate) mod takes;

use super::config::ModelConfig;
pub use content::{ChatInput, OUTPUT_BYTES_MAX, TemplateError, TemplateText};
use engine::Engine;
use serde::{Deserialize, Serialize};
use std::{fmt, io, sync::Arc, time::SystemTime};
use takes::Takes;

/// The maximum number of instructions of one rendering: some hundred per message of the longest chat that fits a request.
const FUEL: u64 = 20_000_000;

/// The target of an event for each rendered prompt, with its length, by which tests count how often a prompt is rendered.
pub const RENDERS: &str = "tidemill::template";

/// Fuel for a dialog of a few words that tests the template.
const FUEL_TO_TRY: u64 = 200_000;

/// The facts about a template for which it must be compiled.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct Facts {
    takes: Takes,
    is_plain: bool,
}

/// A process with limits, in which templates are compiled and rendered. A template that reaches a limit costs the one call.
pub trait Confinement: fmt::Debug + Send + Sync {
    /// Compiles a template. Returns the number by which it is rendered.
    fn load(&self, text: TemplateText) -> Result<(usize, Facts), TemplateError>;

    /// Does a [`Rendering`], given as JSON.
    fn render(&self, template: usize, rendering: &[u8]) -> Result<String, TemplateError>;
}

#[derive(Debug)]
pub struct ChatTemplate {
    text: TemplateText,
    takes: Takes,
    place: Place,
}

/// The place where a template is rendered.
#[derive(Debug)]
enum Place {
    Here(Engine),
    There {
        process: Arc<dyn Confinement>,
        number: usize,
        /// A plain template, which is rendered here if its input is short.
        plain: Option<Engine>,
    },
}

/// A rendering that a confined process is asked for.
#[derive(Debug, Serialize, Deserialize)]
pub struct Rendering {
    input: ChatInput,
    now: SystemTime,
}

impl TemplateText {
    /// Compiles the template in this process.
    pub fn compiled(self) -> Result<ChatTemplate, TemplateError> {
        let mut template =
            ChatTemplate { place: Place::Here(Engine::new(&self)?.with_fuel(FUEL_TO_TRY)), takes: Takes::default(), text: self };
        template.takes = Takes::found(&template);
        template.place = Place::Here(Engine::new(&template.text)?.with_fuel(FUEL));
        Ok(template)
    }
}

impl ChatTemplate {
    /// A template that is compiled and rendered in this process.
    pub fn new(source: String, config: &ModelConfig) -> Result<Self, TemplateError> {
        TemplateText::new(source, config).compiled()
    }

    /// A template that is compiled and rendered in a confined process.
    pub fn within(source: String, config: &ModelConfig, process: Arc<dyn Confinement>) -> Result<Self, TemplateError> {
        let text = TemplateText::new(source, config);
        let (number, Facts { takes, is_plain }) = process.load(text.clone()).map_err(|error| match error {
            TemplateError::TooMuch => {
                TemplateError::Refused("compiling it, and rendering a few words, takes too much time or memory".into())
            }
            error => error,
        })?;
        let plain = if is_plain { Some(Engine::new(&text)?.with_fuel(plain::FUEL)) } else { None };
        Ok(Self { text, takes, place: Place::There { process, number, plain } })
    }

    /// The facts that a confined process reports.
    pub fn facts(&self) -> Facts {
        Facts { takes: self.takes.clone(), is_plain: plain::is_plain(&self.text) }
    }

    /// Returns the forms of dialogs that the template accepts.
    pub(crate) fn takes(&self) -> &Takes {
        &self.takes
    }

    /// Whether the template's own text contains this.
    pub fn mentions(&self, text: &str) -> bool {
        self.text.source.contains(text)
    }

    pub fn source(&self) -> &str {
        &self.text.source
    }

    pub fn render(&self, input: ChatInput, now: SystemTime) -> Result<String, TemplateError> {
        let rendered = match &self.place {
            Place::Here(engine) => engine.render(&input, now),
            Place::There { process, number, plain } => {
                let rendering = Rendering { input, now };
                let as_json =
                    |rendering: &Rendering| serde_json::to_vec(rendering).map_err(|error| TemplateError::Refused(error.to_string()));
                match plain.as_ref().filter(|_| is_short(&rendering)) {
                    Some(engine) => match engine.render(&rendering.input, now) {
                        // Its process has more fuel.
                        Err(TemplateError::TooLong) => process.render(*number, &as_json(&rendering)?),
                        rendered => rendered,
                    },
                    None => process.render(*number, &as_json(&rendering)?),
                }
            }
        };
        #[cfg(feature = "shell")]
        tracing::trace!(target: RENDERS, bytes = rendered.as_ref().map_or(0, String::len), "a prompt is rendered");
        rendered
    }

    /// Renders what a confined process is asked for, as JSON.
    pub fn answer(&self, rendering: &[u8]) -> Result<String, TemplateError> {
        let mut json = serde_json::Deserializer::from_slice(rendering);
        // The depth of clients' bodies is bounded where they are read.
        json.disable_recursion_limit();
        let rendering = Rendering::deserialize(&mut json).map_err(|error| TemplateError::Unavailable(error.to_string()))?;
        self.render(rendering.input, rendering.now)
    }
}

/// Whether a rendering is so short, as JSON, that a plain template may do it here. Nothing is kept of the JSON.
fn is_short(rendering: &Rendering) -> bool {
    struct Room(usize);
    impl io::Write for Room {
        fn write(&mut self, text: &[u8]) -> io::Result<usize> {
            self.0 = self.0.checked_sub(text.len()).ok_or(io::ErrorKind::FileTooLarge)?;
            Ok(text.len())
        }
        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    serde_json::to_writer(Room(plain::BYTES_MAX), rendering).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;
    use minijinja::Value;
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
