//! Custom tools: they are called with text, which the model writes as the single argument of a function. A regular expression as their
//! format is enforced; any other grammar is described to the model.

use crate::{requests::error::ApiError, text::tool::Tool};
use serde_json::{Value, json};

/// The name of the function's single argument.
const INPUT: &str = "input";
/// The beginning of the arguments up to the text, without white space.
const BEGIN: &str = "{\"input\":\"";
/// The maximum white space before the text: with more it is not a call of a custom tool.
const BEGIN_BYTES_MAX: usize = 1024;
/// The longest escape of a character: `\uD83C\uDF0A`.
const ESCAPE_BYTES_MAX: usize = 12;

/// Reads a custom tool's definition: an object with a name, and optionally a description and a format. `param` is its field, for errors.
pub(crate) fn tool(param: &str, definition: &Value) -> Result<Tool, ApiError> {
    let name = definition["name"].as_str();
    let name = name.ok_or_else(|| ApiError::invalid(format!("{param}.name"), format!("`{param}` needs `name`")))?.to_owned();
    let mut description = definition["description"].as_str().unwrap_or_default().to_owned();
    let mut text = json!({"type": "string"});
    let mut strict = false;
    let format = &definition["format"];
    // The chat API has the grammar in an object of its own.
    let grammar = if format["grammar"].is_object() { &format["grammar"] } else { format };
    match (format["type"].as_str(), grammar["syntax"].as_str(), grammar["definition"].as_str()) {
        (None | Some("text"), ..) => {}
        (Some("grammar"), Some("regex"), Some(pattern)) => {
            text["pattern"] = format!("^(?:{pattern})$").into();
            strict = true;
        }
        (Some("grammar"), Some("lark"), Some(grammar)) => {
            description += &format!("\n\nThe input keeps to this grammar, in Lark's notation:\n{grammar}");
        }
        _ => {
            let param = format!("{param}.format");
            let message =
                format!("`{param}` must be of type `text`, or of type `grammar` with `syntax` (`lark` or `regex`) and `definition`");
            return Err(ApiError::invalid(param, message));
        }
    }
    let parameters = json!({"type": "object", "properties": {INPUT: text}, "required": [INPUT], "additionalProperties": false});
    Ok(Tool {
        name,
        description: Some(description.trim().to_owned()).filter(|text| !text.is_empty()),
        parameters: Some(parameters),
        strict,
    })
}

/// Writes a custom tool's input as arguments.
pub(crate) fn arguments(input: String) -> Value {
    json!({INPUT: input})
}

/// Extracts the text from arguments as they grow. Arguments in any other form are the text themselves.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct InputReader(State);

#[derive(Debug, PartialEq, Eq)]
enum State {
    /// Before the text.
    Before(String),
    /// In the text, possibly in an escape.
    Inside(String),
    After,
    /// The arguments do not have the expected form.
    Raw,
}

impl Default for State {
    fn default() -> Self {
        Self::Before(String::new())
    }
}

impl InputReader {
    pub(crate) fn push(&mut self, arguments: &str) -> String {
        let mut text = String::new();
        for c in arguments.chars() {
            match &mut self.0 {
                State::Before(begun) => {
                    begun.push(c);
                    let compact: String = begun.chars().filter(|c| !c.is_whitespace()).collect();
                    if compact == BEGIN {
                        self.0 = State::Inside(String::new());
                    } else if !BEGIN.starts_with(&compact) || begun.len() > BEGIN_BYTES_MAX {
                        text.push_str(begun);
                        self.0 = State::Raw;
                    }
                }
                State::Inside(escape) if escape.is_empty() => match c {
                    '"' => self.0 = State::After,
                    '\\' => escape.push(c),
                    c => text.push(c),
                },
                State::Inside(escape) => {
                    escape.push(c);
                    let is_short = escape.len() == 2 && c != 'u';
                    if is_short || escape.len() == ESCAPE_BYTES_MAX / 2 || escape.len() >= ESCAPE_BYTES_MAX {
                        match serde_json::from_str::<String>(&format!("\"{escape}\"")) {
                            Ok(character) => {
                                text.push_str(&character);
                                escape.clear();
                            }
                            // It may be the first half of a character.
                            Err(_) if escape.len() < ESCAPE_BYTES_MAX && !is_short => {}
                            Err(_) => {
                                text.push(char::REPLACEMENT_CHARACTER);
                                escape.clear();
                            }
                        }
                    }
                }
                State::After => {}
                State::Raw => text.push(c),
            }
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn whole(arguments: &str) -> String {
        InputReader::default().push(arguments)
    }

    #[test]
    fn the_text_of_arguments_comes_as_they_grow() {
        let input = "a \"b\"\\\n\u{1}é🌊\t/";
        for json in
            [arguments(input.into()).to_string(), "{ \"input\" :\n\"a \\\"b\\\"\\\\\\n\\u0001\\u00e9\\ud83c\\udf0a\\t\\/\" }".into()]
        {
            assert_eq!(whole(&json), input);
            let mut reader = InputReader::default();
            let parts: String = json.chars().map(|c| reader.push(c.encode_utf8(&mut [0; 4]))).collect();
            assert_eq!(parts, input);
        }
        assert_eq!(whole("{\"input\": \"cut \\u00"), "cut ");
        assert_eq!(whole("{\"other\": 1}"), "{\"other\": 1}");
        assert_eq!(whole("{\"input\": 3}"), "{\"input\": 3}");
    }

    #[test]
    fn formats_are_kept_or_told() {
        let regex = tool("tools[0]", &json!({"name": "f", "format": {"type": "grammar", "syntax": "regex", "definition": "a|b"}})).unwrap();
        assert_eq!((&regex.parameters.unwrap()["properties"]["input"]["pattern"], regex.strict), (&json!("^(?:a|b)$"), true));
        let nested = json!({"name": "f", "format": {"type": "grammar", "grammar": {"syntax": "lark", "definition": "start: \"a\""}}});
        let lark = tool("tools[0]", &nested).unwrap();
        assert!(lark.description.unwrap().ends_with("start: \"a\"") && !lark.strict);
        assert!(tool("tools[0]", &json!({"name": "f", "format": {"type": "text"}})).unwrap().description.is_none());
        for wrong in [json!({}), json!({"name": "f", "format": {"type": "grammar"}}), json!({"name": "f", "format": {"type": "x"}})] {
            assert!(tool("tools[0]", &wrong).unwrap_err().message().contains("tools[0]"));
        }
    }
}
