//! Constraints on answers, in the words of each API that has them: OpenAI's `response_format`, vLLM's `structured_outputs` and `guided_*`,
//! SGLang's `regex`, `ebnf` and `json_schema`, llama.cpp's `grammar`, Ollama's `format`, Dynamo's `nvext`, and what Together, Fireworks, TGI
//! and TensorRT-LLM add to `response_format`.

use crate::requests::{
    error::ApiError,
    generate::{GenerateRequest, Nvext, ResponseFormat, StructuredOutputs},
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

/// A constraint as a field of the request states it.
#[derive(Clone, Debug, PartialEq)]
pub struct Wish {
    param: &'static str,
    form: Form,
    whitespace: Whitespace,
}

#[derive(Clone, Debug, PartialEq)]
enum Form {
    /// Any JSON object.
    Object,
    /// JSON of a schema, which may come as its text.
    Schema {
        schema: Value,
        strict: bool,
    },
    Regex(String),
    Choice(Vec<String>),
    /// A grammar as Lark or GBNF writes it.
    Written(String),
}

/// Takes the constraint that a request names, if any. The whole grammar is checked later, by `Gateway::check_constraint`.
pub fn grammar(request: &mut GenerateRequest, judge: JudgeSchema<'_>) -> Result<Option<RequestedGrammar>, ApiError> {
    grammar_beside(request, None, judge)
}

/// Like [`grammar`], for a protocol with a constraint field of its own, which asked for `format`.
pub fn grammar_beside(
    request: &mut GenerateRequest,
    format: Option<Wish>,
    judge: JudgeSchema<'_>,
) -> Result<Option<RequestedGrammar>, ApiError> {
    let mut wishes: Vec<Wish> = format.into_iter().collect();
    if let Some(format) = request.response_format.take() {
        wishes.extend(response_format(format)?);
    }
    wishes.extend(structured_outputs(request.structured_outputs.take().unwrap_or_default()));
    wishes.extend(top_level(request)?);
    wishes.extend(request.nvext.take().into_iter().flat_map(nvext));
    match &wishes[..] {
        [] | [_] => wishes.pop().map(|wish| wish.grammar(judge)).transpose(),
        [first, second, ..] => Err(both(first.param, second.param)),
    }
}

/// Reads an answer's format as Responses and Messages write it: the schema beside the type. `param` and `schema_param` name its fields.
pub fn flat_format(param: &'static str, schema_param: &'static str, format: &Value) -> Result<Option<Wish>, ApiError> {
    let schema = format.get("schema").filter(|schema| !schema.is_null()).cloned();
    let strict = format["strict"].as_bool().unwrap_or(false);
    match (format["type"].as_str(), schema) {
        (Some("text"), None) => Ok(None),
        (Some("text"), Some(_)) => Err(stray(schema_param, "text")),
        (Some("json_object"), None) => Ok(Some(Wish::new(param, Form::Object))),
        (Some("json_object" | "json_schema"), Some(schema)) => Ok(Some(Wish::new(schema_param, Form::Schema { schema, strict }))),
        (Some("json_schema"), None) => Err(ApiError::invalid(schema_param, format!("`{schema_param}` is missing"))),
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

impl Wish {
    fn new(param: &'static str, form: Form) -> Self {
        Self { param, form, whitespace: Whitespace::default() }
    }

    /// Makes the grammar, within the limits on its size.
    fn grammar(self, judge: JudgeSchema<'_>) -> Result<RequestedGrammar, ApiError> {
        let Self { param, form, whitespace } = self;
        let bounded = |bytes| check_size(bytes).map_err(|error| refused(param, &error));
        let mut judged = |schema: &Value, strict| {
            let terms = Terms { whitespace, strict };
            judge(schema, terms).map_err(|error| unjudged(param, &error))
        };
        let grammar = match form {
            Form::Object => judged(&json!({"type": "object"}), false)?,
            Form::Schema { schema: Value::String(text), strict } => {
                bounded(text.len())?;
                let schema = serde_json::from_str(&text);
                judged(&schema.map_err(|error| ApiError::invalid(param, format!("`{param}` is not valid JSON: {error}")))?, strict)?
            }
            Form::Schema { schema, strict } => judged(&schema, strict)?,
            Form::Regex(expression) => {
                bounded(expression.len())?;
                Grammar::Regex(expression.into())
            }
            Form::Choice(choices) => {
                check_count(param, choices.len())?;
                bounded(choices.iter().map(String::len).sum())?;
                lark::choice(&choices)
            }
            Form::Written(text) => {
                bounded(text.len())?;
                let lark = match gbnf::is_gbnf(&text) {
                    true => gbnf::to_lark(&text).map_err(|error| ApiError::invalid(param, format!("`{param}`: {error}")))?,
                    false => text,
                };
                Grammar::Lark(lark.into())
            }
        };
        Ok(RequestedGrammar { grammar, param })
    }
}

fn check_count(param: &str, choices: usize) -> Result<(), ApiError> {
    match choices {
        0 => Err(ApiError::invalid(param, format!("`{param}` is empty: one choice at least"))),
        1..=CHOICES_MAX => Ok(()),
        _ => Err(ApiError::invalid(param, format!("`{param}` has {choices} choices: {CHOICES_MAX} is the most"))),
    }
}

/// Reads `response_format`. Each type takes its constraint from one of the fields beside it, in which APIs differ; any other of them is
/// refused.
fn response_format(format: ResponseFormat) -> Result<Option<Wish>, ApiError> {
    let ResponseFormat { r#type, json_schema, schema, value, pattern, regex, grammar, ebnf } = format;
    let (inner, strict) = json_schema.map_or((None, None), |json_schema| (json_schema.schema, json_schema.strict));
    let given = |param, value: Option<Value>| value.filter(|value| !value.is_null()).map(|value| (param, value));
    let text = |param, text: Option<String>| text.map(|text| (param, Value::String(text)));
    let schemas = [given("response_format.json_schema.schema", inner), given("response_format.schema", schema)];
    let value = given("response_format.value", value);
    let expressions = [text("response_format.pattern", pattern), text("response_format.regex", regex)];
    let grammars = [text("response_format.grammar", grammar), text("response_format.ebnf", ebnf)];
    let kind = match r#type.as_str() {
        "text" => Kind::None,
        "json" | "json_object" | "json_schema" => Kind::Schema,
        "regex" => Kind::Regex,
        "grammar" | "ebnf" => Kind::Grammar,
        "structural_tag" => return Err(ApiError::unsupported("response_format.structural_tag")),
        other => {
            let message =
                format!("`response_format.type` is `{other}`: it must be `text`, `json_object`, `json_schema`, `regex` or `grammar`");
            return Err(ApiError::invalid("response_format.type", message));
        }
    };
    let mut own: Option<(&'static str, Value)> = None;
    let of_kinds = [(Kind::Schema, schemas), (Kind::Regex, expressions), (Kind::Grammar, grammars)];
    let all = of_kinds.into_iter().flat_map(|(of, fields)| fields.map(|field| (of, field)));
    // TGI has one name for all kinds.
    for (of, field) in all.chain([(if kind == Kind::None { Kind::Schema } else { kind }, value)]) {
        match (field, &own) {
            (None, _) => {}
            (Some((param, _)), _) if of != kind => return Err(stray(param, &r#type)),
            (Some((second, _)), Some((first, _))) => return Err(both(first, second)),
            (Some(field), None) => own = Some(field),
        }
    }
    let missing = |param: &str| ApiError::invalid(param, format!("`{param}` is missing"));
    let written = |(param, value): (&'static str, Value)| match value {
        Value::String(text) => Ok((param, text)),
        _ => Err(ApiError::invalid(param, format!("`{param}` must be a string"))),
    };
    Ok(match (kind, own) {
        (Kind::None, _) => None,
        (Kind::Schema, None) if r#type == "json_schema" => return Err(missing("response_format.json_schema.schema")),
        (Kind::Schema, None) => Some(Wish::new("response_format", Form::Object)),
        (Kind::Schema, Some((param, schema))) => {
            // TGI wraps it as OpenAI does.
            let wrapped = r#type == "json_schema" && param == "response_format.value" && schema["schema"].is_object();
            let schema = if wrapped { schema["schema"].clone() } else { schema };
            Some(Wish::new(param, Form::Schema { schema, strict: strict.unwrap_or(false) }))
        }
        (Kind::Regex, None) => return Err(missing("response_format.pattern")),
        (Kind::Grammar, None) => return Err(missing("response_format.grammar")),
        (Kind::Regex, Some(field)) => written(field).map(|(param, text)| Some(Wish::new(param, Form::Regex(text))))?,
        (Kind::Grammar, Some(field)) => written(field).map(|(param, text)| Some(Wish::new(param, Form::Written(text))))?,
    })
}

/// The kind of constraint that a type of `response_format` has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    None,
    Schema,
    Regex,
    Grammar,
}

fn structured_outputs(outputs: StructuredOutputs) -> impl Iterator<Item = Wish> {
    let StructuredOutputs { json, regex, choice, grammar, json_object, disable_any_whitespace } = outputs;
    let whitespace = if disable_any_whitespace == Some(true) { Whitespace::None } else { Whitespace::default() };
    let forms = [
        ("structured_outputs.json", json.map(schema)),
        ("structured_outputs.json_object", json_object.filter(|wanted| *wanted).map(|_| Form::Object)),
        ("structured_outputs.regex", regex.map(Form::Regex)),
        ("structured_outputs.choice", choice.map(Form::Choice)),
        ("structured_outputs.grammar", grammar.map(Form::Written)),
    ];
    forms.into_iter().filter_map(move |(param, form)| Some(Wish { param, form: form?, whitespace }))
}

/// Takes the constraints that have a field of their own: vLLM's older ones, SGLang's, llama.cpp's and Ollama's.
fn top_level(request: &mut GenerateRequest) -> Result<impl Iterator<Item = Wish>, ApiError> {
    let some = |text: &mut Option<String>| text.take().filter(|text| !text.is_empty());
    let format = match request.format.take() {
        None => None,
        Some(Value::String(text)) if text.is_empty() => None,
        Some(Value::String(text)) if text == "json" => Some(Form::Object),
        Some(schema @ Value::Object(_)) => Some(self::schema(schema)),
        Some(_) => return Err(ApiError::invalid("format", "`format` must be `json`, or a JSON schema as an object")),
    };
    let forms = [
        ("guided_json", request.guided_json.take().map(schema)),
        ("guided_regex", request.guided_regex.take().map(Form::Regex)),
        ("guided_choice", request.guided_choice.take().map(Form::Choice)),
        ("guided_grammar", request.guided_grammar.take().map(Form::Written)),
        ("json_schema", request.json_schema.take().filter(|schema| *schema != "").map(schema)),
        ("regex", some(&mut request.regex).map(Form::Regex)),
        ("ebnf", some(&mut request.ebnf).map(Form::Written)),
        ("grammar", some(&mut request.grammar).map(Form::Written)),
        ("format", format),
    ];
    Ok(forms.into_iter().filter_map(|(param, form)| Some(Wish::new(param, form?))))
}

fn nvext(nvext: Nvext) -> impl Iterator<Item = Wish> {
    let forms = [
        ("nvext.guided_json", nvext.guided_json.map(schema)),
        ("nvext.guided_regex", nvext.guided_regex.map(Form::Regex)),
        ("nvext.guided_choice", nvext.guided_choice.map(Form::Choice)),
        ("nvext.guided_grammar", nvext.guided_grammar.map(Form::Written)),
    ];
    forms.into_iter().filter_map(|(param, form)| Some(Wish::new(param, form?)))
}

fn schema(schema: Value) -> Form {
    Form::Schema { schema, strict: false }
}

fn both(first: &str, second: &'static str) -> ApiError {
    ApiError::invalid(second, format!("`{first}` and `{second}` are both given: an answer follows one of them"))
}

/// Refuses a constraint that the type beside it has no use for.
fn stray(param: &str, beside: &str) -> ApiError {
    ApiError::invalid(param, format!("`{param}` does not go with the type `{beside}`: leave one of them out"))
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
            (json!({"response_format": {"type": "json_object", "schema": schema}}), "response_format.schema"),
            (json!({"response_format": {"type": "json_schema", "schema": schema}}), "response_format.schema"),
            (json!({"response_format": {"type": "json", "value": schema}}), "response_format.value"),
            (json!({"response_format": {"type": "json_schema", "value": {"name": "s", "schema": schema}}}), "response_format.value"),
            (json!({"response_format": {"type": "regex", "value": "a+"}}), "response_format.value"),
            (json!({"response_format": {"type": "regex", "pattern": "a+"}}), "response_format.pattern"),
            (json!({"response_format": {"type": "regex", "regex": "a+"}}), "response_format.regex"),
            (json!({"response_format": {"type": "grammar", "grammar": "root ::= \"a\""}}), "response_format.grammar"),
            (json!({"response_format": {"type": "ebnf", "ebnf": "root ::= \"a\""}}), "response_format.ebnf"),
            (json!({"json_schema": schema}), "json_schema"),
            (json!({"json_schema": schema.to_string(), "regex": "", "ebnf": null}), "json_schema"),
            (json!({"regex": "a+"}), "regex"),
            (json!({"ebnf": "root ::= \"a\""}), "ebnf"),
            (json!({"grammar": "root ::= \"a\"", "json_schema": ""}), "grammar"),
            (json!({"format": schema, "grammar": ""}), "format"),
            (json!({"format": "json"}), "format"),
            (json!({"nvext": {"guided_json": schema}}), "nvext.guided_json"),
            (json!({"nvext": {"guided_regex": "a+"}}), "nvext.guided_regex"),
            (json!({"nvext": {"guided_choice": ["a"]}}), "nvext.guided_choice"),
            (json!({"nvext": {"guided_grammar": "root ::= \"a\""}}), "nvext.guided_grammar"),
        ] {
            assert_eq!(asked(&body).unwrap().map(|asked| asked.param), Some(param), "{body}");
        }
        assert_eq!(asked(&json!({"response_format": {"type": "text"}, "structured_outputs": null})), Ok(None));
        let grammar = |body: Value| asked(&body).unwrap().unwrap().grammar;
        assert_eq!(grammar(json!({"guided_grammar": "root ::= \"a\""})), grammar(json!({"guided_grammar": "start: \"a\"\n"})));
        let as_vllm = grammar(json!({"guided_json": schema}));
        for (schema_too, named) in [
            ("guided_json", json!({"guided_json": schema.to_string()})),
            ("schema", json!({"response_format": {"type": "json_object", "schema": schema}})),
            ("value", json!({"response_format": {"type": "json_schema", "value": {"name": "s", "schema": schema}}})),
            ("json_schema", json!({"json_schema": schema.to_string()})),
            ("format", json!({"format": schema})),
            ("nvext", json!({"nvext": {"guided_json": schema}})),
        ] {
            assert_eq!(grammar(named), as_vllm, "{schema_too}");
        }
        assert_eq!(grammar(json!({"format": "json"})), grammar(json!({"response_format": {"type": "json_object"}})));
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
            (json!({"regex": "a", "nvext": {"guided_regex": "a"}}), "nvext.guided_regex", "both"),
            (json!({"response_format": {"type": "text"}, "format": 3}), "format", "schema"),
            (json!({"response_format": {"type": "text", "schema": {}}}), "response_format.schema", "text"),
            (json!({"response_format": {"type": "text", "value": {}}}), "response_format.value", "text"),
            (json!({"response_format": {"type": "json_object", "pattern": "a"}}), "response_format.pattern", "json_object"),
            (json!({"response_format": {"type": "regex", "pattern": "a", "value": "b"}}), "response_format.value", "both"),
            (json!({"response_format": {"type": "regex", "value": 3}}), "response_format.value", "string"),
            (json!({"response_format": {"type": "regex"}}), "response_format.pattern", "missing"),
            (json!({"response_format": {"type": "structural_tag"}}), "response_format.structural_tag", "not supported"),
            (json!({"structured_outputs": {"json": "{"}}), "structured_outputs.json", "not valid JSON"),
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
