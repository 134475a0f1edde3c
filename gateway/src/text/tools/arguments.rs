//! The rules of a call's arguments where these are no JSON object: each parameter has a rule of its own.
//!
//! ```text
//! first_0_0: "a=" value_0_0 next_0_1 | first_0_1        an optional parameter may be left out
//! next_0_1: ", " "b=" value_0_1 next_0_2                one that follows another
//! ```

use serde_json::{Value, json};
use std::fmt::Write;
use tidemill_grammar::{
    GrammarError,
    compiler::check_size,
    lark::literal,
    schema::{
        SchemaError,
        outline::{Arguments, Effort, Parameter, Texts},
        path_of,
    },
};

/// Checks parts of a schema of a tool that may be strict, and writes them for the compiler. A part is the schemas at some places, pointers
/// into the schema, all of which apply to one value.
pub(super) type PrepareSchema<'a> = &'a mut dyn FnMut(&Value, &[Vec<String>], bool) -> Result<Vec<String>, GrammarError>;

/// The work of one grammar on its tools' schemas.
pub(super) struct Preparing<'a> {
    prepare: PrepareSchema<'a>,
    effort: Effort,
}

impl<'a> Preparing<'a> {
    pub(super) fn new(prepare: PrepareSchema<'a>) -> Self {
        Self { prepare, effort: Effort::default() }
    }

    /// The schema as a whole.
    pub(super) fn whole(&mut self, schema: &Value, strict: bool) -> Result<String, GrammarError> {
        self.parts(schema, &[vec![String::new()]], strict).map(|parts| parts.concat())
    }

    fn parts(&mut self, schema: &Value, parts: &[Vec<String>], strict: bool) -> Result<Vec<String>, GrammarError> {
        (self.prepare)(schema, parts, strict)
    }
}

/// A notation of arguments.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Notation {
    /// `a=1, b="x"`.
    Python,
    /// `<parameter=a>`, and the value on lines of its own, strings without quotation marks.
    Tags,
}

/// Writes the rules of one tool's arguments.
#[derive(Clone, Copy, Debug)]
pub(super) struct Writer {
    pub(super) notation: Notation,
    /// The tool's index, which is part of all names.
    pub(super) tool: usize,
    pub(super) strict: bool,
}

/// The text after a value between tags.
const TAG_END: &str = "\n</parameter>\n";
/// Texts that go on after the first end of a value.
const BEYOND_TAG_END: &str = r"/(.|\n)*\n<\/parameter>\n(.|\n)+/";
/// The maximum length of a parameter's name.
const NAME_BYTES_MAX: usize = 256;

const LOOSE: &str = "its values are plain text in this model's notation of calls, in which its constraints cannot be kept, and the tool is \
                     strict: allow any string, or make it a string with an `enum` or a simple `pattern`, or no string";

/// The grammar of a parameter's value.
enum Form {
    Json,
    Text,
    Few(Vec<String>),
    Terminal(String),
}

impl Writer {
    /// Writes the rules. Returns the name of the first, and all of them.
    pub(super) fn rules(self, schema: &Value, preparing: &mut Preparing<'_>) -> Result<(String, String), GrammarError> {
        let Self { tool, strict, .. } = self;
        check_size(schema.to_string().len())?;
        let arguments = Arguments::of(schema);
        if let Some(loose) = arguments.loose.filter(|_| strict) {
            return Err(loose.into());
        }
        let mut forms = Vec::new();
        for parameter in &arguments.parameters {
            if self.can_write(&parameter.name) {
                forms.push((parameter, self.form(parameter, &mut preparing.effort)?));
            } else if strict {
                return Err(unkept(parameter, "this model's notation of calls cannot write its name, and the tool is strict").into());
            }
        }
        // The whole is checked as well, so that refusals do not depend on the notation.
        let json = forms.iter().filter(|(_, form)| matches!(form, Form::Json)).map(|(parameter, _)| parameter.places.clone());
        let parts: Vec<_> = [vec![String::new()]].into_iter().chain(json).collect();
        let mut prepared = preparing.parts(schema, &parts, strict)?.into_iter().skip(1);
        let mut lark = String::new();
        for (n, (parameter, form)) in forms.iter().enumerate() {
            let json = if matches!(form, Form::Json) { prepared.next().unwrap_or_default() } else { String::new() };
            self.value(&format!("{tool}_{n}"), form, &json, &mut lark);
            self.place(n, parameter, &mut lark);
            check_size(lark.len())?;
        }
        match arguments.open {
            true => self.open(preparing, &mut lark)?,
            false => {
                let end = forms.len();
                let _ = writeln!(lark, "first_{tool}_{end}: \"\"\nnext_{tool}_{end}: \"\"");
            }
        }
        Ok((format!("first_{tool}_0"), lark))
    }

    fn form(self, parameter: &Parameter, effort: &mut Effort) -> Result<Form, SchemaError> {
        if self.notation == Notation::Python {
            return Ok(Form::Json);
        }
        let texts = parameter.values.texts();
        let terminal = if texts == Texts::Terminal && self.strict { parameter.values.terminal(effort) } else { None };
        match (texts, terminal) {
            (Texts::Json, _) => Ok(Form::Json),
            (Texts::Few(texts), _) => Ok(Form::Few(texts)),
            (_, Some(terminal)) => Ok(Form::Terminal(terminal)),
            (Texts::Loose | Texts::Terminal, None) if self.strict => Err(unkept(parameter, LOOSE)),
            (Texts::Any | Texts::Loose | Texts::Terminal, None) => Ok(Form::Text),
        }
    }

    fn can_write(self, name: &str) -> bool {
        !name.is_empty()
            && name.len() <= NAME_BYTES_MAX
            && match self.notation {
                Notation::Python => name.chars().all(|c| c.is_alphanumeric() || matches!(c, '_' | '.' | '-')),
                Notation::Tags => name.chars().all(|c| c != '>' && !c.is_control()),
            }
    }

    /// Writes the rule of a value. Its name, and that of its terminal, end with `id`.
    fn value(self, id: &str, form: &Form, json: &str, lark: &mut String) {
        let end = literal(TAG_END);
        let _ = match form {
            Form::Json if self.notation == Notation::Python => writeln!(lark, "value_{id}: %json {json}"),
            Form::Json => writeln!(lark, "value_{id}: value_{id}_json {end}\nvalue_{id}_json: %json {json}"),
            Form::Text => writeln!(lark, "value_{id}[suffix={end}]: /(.|\\n)*/"),
            Form::Few(texts) => {
                let texts: Vec<_> = texts.iter().map(|text| literal(text)).collect();
                writeln!(lark, "value_{id}: ({}) {end}", texts.join(" | "))
            }
            // The lexer never backtracks, so the value and its end are one lexeme, which can go on no further.
            Form::Terminal(terminal) => writeln!(lark, "value_{id}: VALUE_{id}\nVALUE_{id}: ({terminal} {end}) & ~{BEYOND_TAG_END}"),
        };
    }

    /// Writes the rules by which a parameter comes first or next, or is left out.
    fn place(self, n: usize, parameter: &Parameter, lark: &mut String) {
        let (tool, next) = (self.tool, n + 1);
        let (before, join) = match self.notation {
            Notation::Python => (literal(&format!("{}=", parameter.name)), literal(", ")),
            Notation::Tags => (literal(&format!("<parameter={}>\n", parameter.name)), String::new()),
        };
        for (kind, join) in [("first", ""), ("next", &join)] {
            let _ = write!(lark, "{kind}_{tool}_{n}: {join} {before} value_{tool}_{n} next_{tool}_{next}");
            let _ = if parameter.required { writeln!(lark) } else { writeln!(lark, " | {kind}_{tool}_{next}") };
        }
    }

    /// Writes the rules for any arguments.
    fn open(self, preparing: &mut Preparing<'_>, lark: &mut String) -> Result<(), GrammarError> {
        let tool = self.tool;
        let _ = match self.notation {
            Notation::Python => {
                let json = preparing.whole(&json!({}), false)?;
                self.value(&tool.to_string(), &Form::Json, &json, lark);
                writeln!(lark, "first_{tool}_0: (open_{tool} (\", \" open_{tool})*)?\nopen_{tool}: NAME_{tool} \"=\" value_{tool}")
            }
            Notation::Tags => {
                self.value(&tool.to_string(), &Form::Text, "", lark);
                writeln!(lark, "first_{tool}_0: open_{tool}*\nopen_{tool}: \"<parameter=\" NAME_{tool} \">\\n\" value_{tool}")
            }
        };
        let _ = writeln!(lark, "NAME_{tool}: /[A-Za-z_][A-Za-z0-9_]{{0,63}}/");
        Ok(())
    }
}

/// The error of a parameter whose values cannot be kept.
fn unkept(parameter: &Parameter, problem: &str) -> SchemaError {
    let path = parameter.places.first().map_or_else(|| ".required".to_owned(), |place| path_of(place));
    SchemaError { path, problem: format!("`{}`: {problem}", parameter.name) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn rules(notation: Notation, strict: bool, schema: &Value) -> Result<(String, String), GrammarError> {
        let prepare = &mut |schema: &Value, parts: &[Vec<String>], _: bool| {
            Ok(parts.iter().map(|places| places.iter().map(|place| schema.pointer(place).unwrap().to_string()).collect()).collect())
        };
        Writer { notation, tool: 0, strict }.rules(schema, &mut Preparing::new(prepare))
    }

    #[test]
    fn what_a_strict_tool_cannot_have_between_tags_is_refused_with_its_parameter() {
        let one = |schema: Value| json!({"properties": {"p": schema}, "$defs": {"Id": {"type": "string", "pattern": "(?<=a)b"}}});
        let number_or_text = json!({"anyOf": [{"type": "string"}, {"type": "integer", "minimum": 3}]});
        for (schema, path) in [
            (one(number_or_text), ".properties.p"),
            (one(json!({"$ref": "#/$defs/Id"})), ".properties.p"),
            (one(json!({"type": ["string", "array"], "items": {"type": "null"}})), ".properties.p"),
            (one(json!({"not": {"const": "x"}})), ".properties.p"),
            (one(json!({"type": "string", "format": "iri"})), ".properties.p"),
            (json!({"properties": {"a>b": {}}}), r#".properties["a>b"]"#),
            (json!({"properties": {"p": {}}, "anyOf": [{"required": ["p"]}]}), ".anyOf"),
            (json!({"properties": {"p": {}}, "minProperties": 1}), ".minProperties"),
            (json!({"additionalProperties": {"type": "null"}}), ".additionalProperties"),
        ] {
            let error = rules(Notation::Tags, true, &schema).unwrap_err();
            assert!(error.path() == Some(path) && error.to_string().contains("strict"), "{schema}: {:?} {error}", error.path());
            assert!(rules(Notation::Tags, false, &schema).is_ok(), "{schema}: the model may be right");
        }
        let spaced = json!({"properties": {"a b": {"type": "null"}}, "required": ["a b"]});
        assert_eq!(rules(Notation::Python, true, &spaced).unwrap_err().path(), Some(r#".properties["a b"]"#));
    }

    #[test]
    fn the_parts_of_a_schema_are_those_that_apply() {
        let schema = json!({
            "allOf": [{"$ref": "#/$defs/A"}, {"properties": {"n": {"minimum": 1}}, "required": ["m"]}],
            "$defs": {"A": {"properties": {"n": {"type": "integer"}, "s": {"enum": ["a", 1, null]}}, "required": ["n"]}},
        });
        let (first, lark) = rules(Notation::Tags, false, &schema).unwrap();
        assert_eq!(first, "first_0_0");
        for line in [
            r#"value_0_0_json: %json {"type":"integer"}{"minimum":1}"#,
            r#"value_0_1: ("a" | "1" | "null") "\n</parameter>\n""#,
            r#"first_0_0:  "<parameter=n>\n" value_0_0 next_0_1"#,
            r#"next_0_2:  "<parameter=m>\n" value_0_2 next_0_3"#,
        ] {
            assert!(lark.lines().any(|known| known == line), "{line} in\n{lark}");
        }
    }
}
