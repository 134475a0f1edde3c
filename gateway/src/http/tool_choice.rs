//! `tool_choice` of chat and of Responses: a mode, a tool by its name, or a set of tools.

use crate::{dialog::ToolChoice, requests::error::ApiError, text::tool::Tool};
use serde_json::{Value, json};
use std::collections::HashSet;

/// Reads a choice; some choices leave fewer tools. Chat has names in an object of their own, Responses beside the type; both forms are
/// accepted in both APIs.
pub(crate) fn understand(tools: Vec<Tool>, choice: Option<&Value>) -> Result<(Vec<Tool>, ToolChoice), ApiError> {
    match choice {
        None | Some(Value::Null) => Ok((tools, ToolChoice::Auto)),
        Some(Value::String(name)) => Ok((tools, mode(name)?)),
        Some(object) => match object["type"].as_str() {
            // The older field names a function and no type.
            Some("function" | "custom") | None => Ok((tools, ToolChoice::Named(name(object).ok_or_else(wrong)?.to_owned()))),
            Some("allowed_tools") => {
                let some = if object["allowed_tools"].is_object() { &object["allowed_tools"] } else { object };
                let allowed: HashSet<_> = some["tools"].as_array().ok_or_else(wrong)?.iter().filter_map(name).collect();
                let tools = tools.into_iter().filter(|tool| allowed.contains(tool.name.as_str())).collect();
                Ok((tools, mode(some["mode"].as_str().unwrap_or("auto"))?))
            }
            Some(name) => Ok((tools, mode(name)?)),
        },
    }
}

/// Writes a choice as a response repeats it: only the parts that were understood, since each event that shows the response has it. `tools`
/// are the remaining ones.
pub(crate) fn repeated(tools: &[Tool], choice: Option<&Value>) -> Value {
    let Some(object) = choice.filter(|choice| choice.is_object()) else {
        return choice.and_then(Value::as_str).unwrap_or("auto").into();
    };
    match object["type"].as_str() {
        Some("allowed_tools") => {
            let some = if object["allowed_tools"].is_object() { &object["allowed_tools"] } else { object };
            let left: Vec<_> = tools.iter().map(|tool| json!({"type": "function", "name": tool.name})).collect();
            json!({"type": "allowed_tools", "mode": some["mode"].as_str().unwrap_or("auto"), "tools": left})
        }
        kind @ (Some("function" | "custom") | None) => json!({"type": kind.unwrap_or("function"), "name": name(object)}),
        Some(mode) => mode.into(),
    }
}

fn name(named: &Value) -> Option<&str> {
    ["function", "custom"].into_iter().find_map(|kind| named[kind]["name"].as_str()).or(named["name"].as_str())
}

fn mode(mode: &str) -> Result<ToolChoice, ApiError> {
    match mode {
        "none" => Ok(ToolChoice::None),
        "auto" => Ok(ToolChoice::Auto),
        // The second is Anthropic's and Mistral's word.
        "required" | "any" => Ok(ToolChoice::Required),
        _ => Err(wrong()),
    }
}

fn wrong() -> ApiError {
    let message = "`tool_choice` must be `none`, `auto`, `required` (or `any`), or an object that names a function or allowed tools";
    ApiError::invalid("tool_choice", message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn choices_name_a_mode_a_function_or_some() {
        let all = || ["f", "g"].map(|name| Tool { name: name.into(), ..Tool::default() }).to_vec();
        let choice = |value: Value| understand(all(), Some(&value)).map(|(tools, choice)| (tools.len(), choice));
        assert_eq!(choice(json!("required")).unwrap(), (2, ToolChoice::Required));
        assert_eq!(choice(json!("any")).unwrap(), (2, ToolChoice::Required));
        assert_eq!(choice(json!({"type": "none"})).unwrap(), (2, ToolChoice::None));
        for named in [
            json!({"type": "function", "name": "g"}),
            json!({"type": "function", "function": {"name": "g"}}),
            json!({"type": "custom", "custom": {"name": "g"}}),
            json!({"function": {"name": "g"}}),
            json!({"name": "g"}),
        ] {
            assert_eq!(choice(named).unwrap(), (2, ToolChoice::Named("g".into())));
        }
        let flat = json!({"type": "allowed_tools", "mode": "required", "tools": [{"type": "function", "name": "g"}]});
        let nested = json!({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [{"type": "function", "function": {"name": "g"}}]}});
        for some in [flat, nested] {
            assert_eq!(choice(some).unwrap(), (1, ToolChoice::Required));
        }
        let more = json!({"type": "allowed_tools", "tools": [{"name": "g", "note": "x".repeat(1000)}, {"name": "unknown"}], "note": 1});
        let (left, _) = understand(all(), Some(&more)).unwrap();
        let understood = json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "g"}]});
        assert_eq!(repeated(&left, Some(&more)), understood, "no more is repeated than was understood");
        assert_eq!(
            repeated(&left, Some(&json!({"type": "function", "function": {"name": "g"}}))),
            json!({"type": "function", "name": "g"})
        );
        assert_eq!((repeated(&left, None), repeated(&left, Some(&json!("any")))), (json!("auto"), json!("any")));
        for wrong in
            [json!("often"), json!(3), json!({"type": "web_search"}), json!({"type": "function"}), json!({"type": "allowed_tools"})]
        {
            assert!(choice(wrong).is_err());
        }
    }
}
