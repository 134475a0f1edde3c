//! Constraints on answers: OpenAI's `response_format`, and vLLM's `structured_outputs` and `guided_*`.

use crate::requests::{
    error::ApiError,
    generate::{GenerateRequest, ResponseFormat, StructuredOutputs},
};
use serde_json::{Value, json};
use tidemill_grammar::{
    GrammarError,
    compiler::{CHOICES_MAX, check_size},
    gbnf,
    helper::handle::AskError,
    lark,
    schema::{Terms, Whitespace},
};
use tidemill_proto::grammar::Grammar;

/// Checks a schema, and returns the grammar for the compiler.
pub type JudgeSchema<'a> = &'a mut dyn FnMut(&Value, Terms) -> Result<Grammar, AskError>;

/// A grammar, and the field of the request that asked for it.
#[derive(Clone, Debug, PartialEq)]
pub struct RequestedGrammar {
    pub grammar: Grammar,
    pub param: &'static str,
}

/// Takes the constraint that a request names, if any. The whole grammar is checked later, by `Gateway::check_constraint`.
pub fn grammar(request: &mut GenerateRequest, judge: JudgeSchema<'_>) -> Result<Option<RequestedGrammar>, ApiError> {
    grammar_beside(request, None, judge)
}

/// Like [`grammar`], for a protocol with a constraint field of its own, which asked for `format`.
pub fn grammar_beside(
    request: &mut GenerateRequest,
    format: Option<RequestedGrammar>,
    judge: JudgeSchema<'_>,
) -> Result<Option<RequestedGrammar>, ApiError> {
    let mut asked: Vec<RequestedGrammar> = format.into_iter().collect();
    if let Some(format) = request.response_format.take() {
        asked.extend(response_format(format, &mut *judge)?);
    }
    let outputs = request.structured_outputs.take().unwrap_or_default();
    let whitespace = check_layout(request, &outputs)?;
    let none = Whitespace::default();
    for (param, schema, whitespace) in
        [("structured_outputs.json", outputs.json, whitespace), ("guided_json", request.guided_json.take(), none)]
    {
        if let Some(schema) = schema {
            asked.push(RequestedGrammar { grammar: schema_grammar(param, &parsed(param, schema)?, whitespace, &mut *judge)?, param });
        }
    }
    if outputs.json_object == Some(true) {
        let param = "structured_outputs.json_object";
        asked.push(RequestedGrammar { grammar: schema_grammar(param, &any_object(), whitespace, &mut *judge)?, param });
    }
    for (param, expression) in [("structured_outputs.regex", outputs.regex), ("guided_regex", request.guided_regex.take())] {
        if let Some(expression) = expression {
            check_size(expression.len()).map_err(|error| refused(param, &error))?;
            asked.push(RequestedGrammar { grammar: Grammar::Regex(expression.into()), param });
        }
    }
    for (param, choices) in [("structured_outputs.choice", outputs.choice), ("guided_choice", request.guided_choice.take())] {
        match choices {
            Some(choices) if choices.is_empty() => {
                return Err(ApiError::invalid(param, format!("`{param}` is empty: one choice at least")));
            }
            Some(choices) if choices.len() > CHOICES_MAX => {
                let message = format!("`{param}` has {} choices: {CHOICES_MAX} is the most", choices.len());
                return Err(ApiError::invalid(param, message));
            }
            Some(choices) => {
                check_size(choices.iter().map(String::len).sum()).map_err(|error| refused(param, &error))?;
                asked.push(RequestedGrammar { grammar: lark::choice(&choices), param });
            }
            None => {}
        }
    }
    for (param, text) in [("structured_outputs.grammar", outputs.grammar), ("guided_grammar", request.guided_grammar.take())] {
        if let Some(text) = text {
            asked.push(RequestedGrammar { grammar: written_grammar(param, text)?, param });
        }
    }
    match &asked[..] {
        [] | [_] => Ok(asked.pop()),
        [first, second, ..] => Err(ApiError::invalid(
            second.param,
            format!("`{}` and `{}` are both given: an answer follows one of them", first.param, second.param),
        )),
    }
}

/// Reads an answer's format as Responses and Messages write it: the schema beside the type. `param` and `schema_param` name its fields.
pub fn flat_format(
    param: &'static str,
    schema_param: &'static str,
    format: &Value,
    judge: JudgeSchema<'_>,
) -> Result<Option<RequestedGrammar>, ApiError> {
    match format["type"].as_str() {
        Some("text") => Ok(None),
        Some("json_object") => {
            Ok(Some(RequestedGrammar { grammar: schema_grammar(param, &any_object(), Terms::default(), judge)?, param }))
        }
        Some("json_schema") => {
            let schema = format.get("schema").ok_or_else(|| ApiError::invalid(schema_param, format!("`{schema_param}` is missing")))?;
            let terms = Terms { strict: format["strict"].as_bool().unwrap_or(false), ..Terms::default() };
            Ok(Some(RequestedGrammar { grammar: schema_grammar(schema_param, schema, terms, judge)?, param: schema_param }))
        }
        _ => {
            let message = format!("`{param}.type` is {}: it must be `text`, `json_object` or `json_schema`", format["type"]);
            Err(ApiError::invalid(format!("{param}.type"), message))
        }
    }
}

/// Refuses a grammar, naming the field and the place in it.
pub fn refused(param: &str, error: &GrammarError) -> ApiError {
    let param = format!("{param}{}", error.path().unwrap_or_default());
    let message = format!("`{param}`: {error}");
    ApiError::invalid(param, message)
}

/// Refuses a grammar that did not pass, or could not be checked.
pub fn unjudged(param: &str, error: &AskError) -> ApiError {
    match error {
        AskError::Refused(error) => refused(param, error),
        AskError::Unavailable(error) => ApiError::grammar_unjudged(param, &error.to_string()),
    }
}

fn response_format(format: ResponseFormat, judge: JudgeSchema<'_>) -> Result<Option<RequestedGrammar>, ApiError> {
    match format.r#type.as_str() {
        "text" => Ok(None),
        "json_object" => {
            let param = "response_format";
            Ok(Some(RequestedGrammar { grammar: schema_grammar(param, &any_object(), Terms::default(), judge)?, param }))
        }
        "json_schema" => {
            let param = "response_format.json_schema.schema";
            let (schema, strict) = format.json_schema.map_or((None, None), |json_schema| (json_schema.schema, json_schema.strict));
            let terms = Terms { strict: strict.unwrap_or(false), ..Terms::default() };
            let schema = schema.ok_or_else(|| ApiError::invalid(param, format!("`{param}` is missing")))?;
            Ok(Some(RequestedGrammar { grammar: schema_grammar(param, &schema, terms, judge)?, param }))
        }
        other => {
            let message = format!("`response_format.type` is `{other}`: it must be `text`, `json_object` or `json_schema`");
            Err(ApiError::invalid("response_format.type", message))
        }
    }
}

/// Refuses options of vLLM that are missing here, rather than ignoring them.
fn check_layout(request: &GenerateRequest, outputs: &StructuredOutputs) -> Result<Whitespace, ApiError> {
    for (param, given) in [
        ("structured_outputs.structural_tag", outputs.structural_tag.is_some()),
        ("structured_outputs.whitespace_pattern", outputs.whitespace_pattern.is_some()),
        ("structured_outputs.disable_additional_properties", outputs.disable_additional_properties == Some(true)),
        ("guided_whitespace_pattern", request.guided_whitespace_pattern.is_some()),
    ] {
        if given {
            return Err(ApiError::unsupported(param));
        }
    }
    Ok(if outputs.disable_any_whitespace == Some(true) { Whitespace::None } else { Whitespace::default() })
}

fn schema_grammar(param: &str, schema: &Value, terms: impl Into<Terms>, judge: JudgeSchema<'_>) -> Result<Grammar, ApiError> {
    judge(schema, terms.into()).map_err(|error| unjudged(param, &error))
}

/// Reads a schema, which may come as its text.
fn parsed(param: &str, schema: Value) -> Result<Value, ApiError> {
    match schema {
        Value::String(text) => {
            check_size(text.len()).map_err(|error| refused(param, &error))?;
            serde_json::from_str(&text).map_err(|error| ApiError::invalid(param, format!("`{param}` is not valid JSON: {error}")))
        }
        schema => Ok(schema),
    }
}

fn written_grammar(param: &str, text: String) -> Result<Grammar, ApiError> {
    check_size(text.len()).map_err(|error| refused(param, &error))?;
    let lark = match gbnf::is_gbnf(&text) {
        true => gbnf::to_lark(&text).map_err(|error| ApiError::invalid(param, format!("`{param}`: {error}")))?,
        false => text,
    };
    Ok(Grammar::Lark(lark.into()))
}

fn any_object() -> Value {
    json!({"type": "object"})
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::requests::parse;
    use tidemill_grammar::compiler::{GRAMMAR_BYTES_MAX, json_schema};

    fn asked(body: &Value) -> Result<Option<RequestedGrammar>, ApiError> {
        let judge = &mut |schema: &Value, terms: Terms| Ok(json_schema(schema, terms)?);
        grammar(&mut parse::json(body.to_string().as_bytes()).unwrap(), judge)
    }

    #[test]
    fn every_spelling_becomes_a_grammar() {
        let schema = json!({"type": "string"});
        for (body, param) in [
            (json!({"response_format": {"type": "json_object"}}), "response_format"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "strict": false, "schema": schema}}}),
                "response_format.json_schema.schema",
            ),
            (json!({"structured_outputs": {"json": schema}}), "structured_outputs.json"),
            (json!({"structured_outputs": {"json": schema.to_string(), "disable_any_whitespace": true}}), "structured_outputs.json"),
            (json!({"structured_outputs": {"json_object": true}}), "structured_outputs.json_object"),
            (json!({"structured_outputs": {"regex": "a+"}}), "structured_outputs.regex"),
            (json!({"structured_outputs": {"choice": ["a", "b"]}}), "structured_outputs.choice"),
            (json!({"structured_outputs": {"grammar": "start: \"a\""}}), "structured_outputs.grammar"),
            (json!({"guided_json": schema, "guided_regex": null, "response_format": {"type": "text"}}), "guided_json"),
            (json!({"guided_regex": "a+"}), "guided_regex"),
            (json!({"guided_choice": ["a"], "structured_outputs": {"json_object": false}}), "guided_choice"),
            (json!({"guided_grammar": "root ::= \"a\""}), "guided_grammar"),
        ] {
            assert_eq!(asked(&body).unwrap().map(|asked| asked.param), Some(param), "{body}");
        }
        assert_eq!(asked(&json!({"response_format": {"type": "text"}, "structured_outputs": null})), Ok(None));
        let grammar = |body: Value| asked(&body).unwrap().unwrap().grammar;
        assert_eq!(grammar(json!({"guided_grammar": "root ::= \"a\""})), grammar(json!({"guided_grammar": "start: \"a\"\n"})));
        assert_eq!(grammar(json!({"guided_json": schema})), grammar(json!({"guided_json": schema.to_string()})));
    }

    #[test]
    fn what_is_too_large_is_refused_by_name_before_anything_is_made_of_it() {
        let large = "a".repeat(GRAMMAR_BYTES_MAX + 1);
        let choices: Vec<_> = (0..20_000).map(|n| n.to_string()).collect();
        for (field, value) in [
            ("guided_regex", json!(large)),
            ("guided_grammar", json!(large)),
            ("guided_grammar", json!(format!("root ::= \"{large}\""))),
            ("guided_choice", json!([large])),
            ("guided_choice", json!(choices)),
            ("guided_json", json!({"title": large})),
            ("guided_json", json!(format!("{{\"title\": \"{large}\"}}"))),
        ] {
            let error = asked(&json!({field: value})).unwrap_err();
            assert!(
                error.status() == 400 && error.body()["error"]["param"] == field && error.message().contains("most"),
                "{field}: {error:?}"
            );
        }
    }

    #[test]
    fn what_could_not_be_judged_may_be_asked_again() {
        let judge = &mut |_: &Value, _| Err(std::io::Error::other("gone").into());
        let mut request = parse::json(br#"{"guided_json": {}}"#).unwrap();
        let error = grammar(&mut request, judge).unwrap_err();
        assert_eq!((error.status().as_u16(), error.retry_after_s()), (503, Some(1)));
        assert!(error.message().contains("`guided_json`"), "{error:?}");
    }

    #[test]
    fn what_cannot_be_followed_is_refused_by_name() {
        let set = json!({"type": "array", "items": {"type": "string"}, "uniqueItems": true});
        for strict in [json!(false), Value::Null] {
            let schema = json!({"name": "s", "strict": strict, "schema": set});
            assert!(asked(&json!({"response_format": {"type": "json_schema", "json_schema": schema}})).unwrap().is_some(), "relaxed");
        }
        for (body, param, word) in [
            (json!({"response_format": {"type": "xml"}}), "response_format.type", "json_schema"),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"name": "s"}}}),
                "response_format.json_schema.schema",
                "missing",
            ),
            (json!({"response_format": {"type": "json_object"}, "guided_regex": "a"}), "guided_regex", "both"),
            (json!({"structured_outputs": {"regex": "a", "choice": ["b"]}}), "structured_outputs.choice", "both"),
            (json!({"structured_outputs": {"structural_tag": "{}"}}), "structured_outputs.structural_tag", "not supported"),
            (json!({"structured_outputs": {"json": "{"}}), "structured_outputs.json", "not valid JSON"),
            (json!({"guided_whitespace_pattern": " "}), "guided_whitespace_pattern", "not supported"),
            (json!({"guided_choice": []}), "guided_choice", "empty"),
            (json!({"guided_grammar": "root ::= x"}), "guided_grammar", "line 1"),
            (
                json!({"guided_json": {"properties": {"a": {"type": "array", "contains": {}, "maxContains": 2}}}}),
                "guided_json.properties.a.maxContains",
                "not supported",
            ),
            (
                json!({"response_format": {"type": "json_schema", "json_schema": {"strict": true, "schema": set}}}),
                "response_format.json_schema.schema.uniqueItems",
                "strict",
            ),
            (json!({"guided_json": {"items": {"pattern": "("}}}), "guided_json.items", "unclosed"),
        ] {
            let error = asked(&body).unwrap_err().body()["error"].clone();
            assert!(error["param"] == param && error["message"].as_str().unwrap().contains(word), "{body}: {error}");
        }
    }
}
