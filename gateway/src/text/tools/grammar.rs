//! Grammars that force calls: the model's own format in llguidance's dialect of Lark, each tool's schema inside.
//!
//! ```text
//! start: thought row                          what must be called
//! start: thought (free row)* tail             what may be, strictly
//! start: thought answer                       a response format after a thought
//! row: begin call (join call)* end
//! ```

use super::{
    Calls,
    arguments::{Notation, PrepareSchema, Preparing, Writer},
};
use crate::text::{
    reasoning::Thought,
    tokenizer::Tokenizer,
    tool::Tool,
    tools::format::{Call, Script},
};
use serde_json::{Value, json};
use std::fmt::Write;
use tidemill_grammar::{GrammarError, compiler::check_size, lark::literal as quoted};

/// White space between reasoning and the following text.
const GAP: &str = r"/\n{0,2}/";

/// The parts that an answer may have.
#[derive(Debug)]
pub struct AnswerRules<'a> {
    pub tokenizer: &'a Tokenizer,
    /// Reasoning, which may come first.
    pub thought: Option<&'a Thought>,
    pub calls: Option<(&'a Calls, Forced<'a>)>,
    /// The part of a rule for an answer without calls.
    pub answer: Option<&'a str>,
}

/// The calls that the grammar forces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Forced<'a> {
    /// At least one call, of any tool.
    Any,
    /// One call of this tool, or several if the client allows it.
    Named(&'a str),
    /// No calls, but those that come must follow their schemas.
    Nothing,
}

/// The tool whose schema is refused.
#[derive(Debug, PartialEq, Eq)]
pub struct Refused {
    pub tool: usize,
    pub error: GrammarError,
}

impl AnswerRules<'_> {
    /// Writes the grammar as text. A schema that cannot be enforced is refused for a strict tool; for other tools any object is accepted.
    pub fn lark(&self, prepare: PrepareSchema<'_>) -> Result<String, Refused> {
        let mut preparing = Preparing::new(prepare);
        let mut lark = String::new();
        let thought = self.thought.filter(|thought| thought.wanted);
        let thought = thought.map(|thought| self.thought(thought, &mut lark)).unwrap_or_default();
        let answer = self.answer.map(|answer| {
            let _ = writeln!(lark, "answer: {answer}");
        });
        let start = match self.calls {
            None => "answer".to_owned(),
            Some((calls, forced)) => {
                let script = &calls.format.script;
                let free = matches!((forced, answer), (Forced::Nothing, None));
                let spelled = if free { self.spelled_mark(calls) } else { None };
                let mut names = Vec::new();
                for (i, tool) in calls.tools.iter().enumerate() {
                    if matches!(forced, Forced::Named(name) if name != tool.name) {
                        continue;
                    }
                    let called = self.call(script, spelled, i, tool, &mut preparing, &mut lark);
                    // A grammar that is too large need not be written to its end.
                    called.and_then(|()| check_size(lark.len())).map_err(|error| Refused { tool: i, error })?;
                    names.push(format!("call_{i}"));
                }
                let _ = writeln!(lark, "call: {}", names.join(" | "));
                let begin = without(script.begin, spelled);
                // If each call has a mark of its own, which ends the text before it, a call is a row.
                let one = !calls.parallel || spelled.is_some() && begin == script.begin;
                let more = match calls.forced_most {
                    _ if one => String::new(),
                    Some(most) => format!("({} call){{0,{}}}", self.literal(script.join), most.saturating_sub(1)),
                    None => format!("({} call)*", self.literal(script.join)),
                };
                let _ = writeln!(lark, "row: {} call {more} {}", self.literal(begin), self.literal(script.end));
                match (forced, answer) {
                    (Forced::Any | Forced::Named(_), _) => "row".to_owned(),
                    (Forced::Nothing, Some(())) => "(row | answer)".to_owned(),
                    (Forced::Nothing, None) => self.free(calls, spelled, &mut lark),
                }
            }
        };
        Ok(format!("start: {thought}{start}\n{lark}"))
    }

    /// Writes the rules of reasoning, and returns a reference to them.
    fn thought(&self, thought: &Thought, lark: &mut String) -> String {
        self.until("thought_end", thought.end, lark);
        if thought.open { format!("thought_end {GAP} ") } else { format!("({} thought_end {GAP})? ", self.literal(thought.begin)) }
    }

    /// Writes a rule for any text up to this mark, including the mark.
    fn until(&self, rule: &str, mark: &str, lark: &mut String) {
        let _ = match self.tokenizer.unspoken_id_of(mark) {
            Some(id) => writeln!(lark, "{rule}: /(.|\\n)*/ <[{id}]>"),
            None => writeln!(lark, "{rule}[suffix={}]: /(.|\\n)*/", quoted(mark)),
        };
    }

    /// The mark of this format's calls, if it is ordinary text.
    fn spelled_mark(&self, calls: &Calls) -> Option<&'static str> {
        let mark = calls.format.begins.first().filter(|_| calls.format.bare.is_none())?;
        self.tokenizer.unspoken_id_of(mark).is_none().then_some(*mark)
    }

    /// Writes the rules for text and rows of calls in any order, with a row after each mark.
    fn free(&self, calls: &Calls, spelled: Option<&str>, lark: &mut String) -> String {
        let format = calls.format;
        if let Some(bare) = format.bare {
            // Without a mark, calls are the whole answer.
            let _ = writeln!(lark, "FREE: /([ \\n\\t]*[^ \\n\\t\\{bare}](.|\\n)*)?/");
            return "(row | FREE)".to_owned();
        }
        let marks = format.begins.iter().chain(format.opens).filter(|mark| self.tokenizer.unspoken_id_of(mark).is_none());
        let without: String = marks.map(|mark| format!(" & ~/(.|\\n)*{}(.|\\n)*/", escaped(mark))).collect();
        let _ = writeln!(lark, "FREE: /(.|\\n)*/{without}");
        let often = if calls.parallel { '*' } else { '?' };
        match spelled {
            Some(mark) => {
                // The lexer never backtracks: the text before a call must end with the mark itself.
                self.until("marked", mark, lark);
                format!("(marked row){often} FREE")
            }
            None => format!("FREE (row FREE){often}"),
        }
    }

    /// Writes the rules of a call. `spelled` is a mark that was already written.
    fn call(
        &self,
        script: &Script,
        spelled: Option<&str>,
        i: usize,
        tool: &Tool,
        preparing: &mut Preparing<'_>,
        lark: &mut String,
    ) -> Result<(), GrammarError> {
        let none = json!({"type": "object", "properties": {}, "additionalProperties": false});
        let schema = tool.parameters.as_ref().unwrap_or(&none);
        let written = match self.arguments(script, i, schema, tool.strict, preparing) {
            Err(_) if !tool.strict => self.arguments(script, i, &json!({"type": "object"}), false, preparing),
            written => written,
        };
        let (arguments, rules) = written?;
        let _ = match script.call {
            Call::Around { before, between, after } => {
                let before = self.literal(&format!("{}{}{between}", without(before, spelled), tool.name));
                writeln!(lark, "call_{i}: {before} {arguments} {}", self.literal(after))
            }
            Call::Python => writeln!(lark, "call_{i}: {} {arguments} \")\"", self.literal(&format!("{}(", tool.name))),
            Call::Tags { before, after } => {
                let before = self.literal(&format!("{}<function={}>\n", without(before, spelled), tool.name));
                writeln!(lark, "call_{i}: {before} {arguments} {}", self.literal(&format!("</function>{after}")))
            }
        };
        lark.push_str(&rules);
        Ok(())
    }

    /// Writes the rules of a tool's arguments. Returns the name of the first, and all of them.
    fn arguments(
        &self,
        script: &Script,
        i: usize,
        schema: &Value,
        strict: bool,
        preparing: &mut Preparing<'_>,
    ) -> Result<(String, String), GrammarError> {
        let notation = match script.call {
            Call::Around { .. } => {
                let prepared = preparing.whole(schema, strict)?;
                return Ok((format!("arguments_{i}"), format!("arguments_{i}: %json {prepared}\n")));
            }
            Call::Python => Notation::Python,
            Call::Tags { .. } => Notation::Tags,
        };
        Writer { notation, tool: i, strict }.rules(schema, preparing)
    }

    /// Writes literal text; marks in it that are tokens are referenced by their ids.
    fn literal(&self, text: &str) -> String {
        const MARK_BYTES_MAX: usize = 32;
        let mut parts = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(c) = rest.chars().next() {
            let ends = rest.char_indices().map(|(at, c)| at + c.len_utf8()).take_while(|end| *end <= MARK_BYTES_MAX);
            let mark = ends.filter_map(|end| Some((end, self.tokenizer.unspoken_id_of(&rest[..end])?))).last();
            match mark {
                Some((end, id)) => {
                    if !plain.is_empty() {
                        parts.push(quoted(&std::mem::take(&mut plain)));
                    }
                    parts.push(format!("<[{id}]>"));
                    rest = &rest[end..];
                }
                None => {
                    plain.push(c);
                    rest = &rest[c.len_utf8()..];
                }
            }
        }
        if !plain.is_empty() || parts.is_empty() {
            parts.push(quoted(&plain));
        }
        parts.join(" ")
    }
}

/// Strips a mark from the beginning of a text.
fn without<'a>(text: &'a str, mark: Option<&str>) -> &'a str {
    mark.and_then(|mark| text.strip_prefix(mark)).unwrap_or(text)
}

/// Escapes text for a regular expression.
fn escaped(text: &str) -> String {
    let escape = |c: char| if c.is_alphanumeric() || matches!(c, '_' | '<' | '>' | '=') { c.to_string() } else { format!("\\{c}") };
    text.chars().map(escape).collect()
}

#[cfg(test)]
mod tests {
    use super::{
        super::{hermes, llama_json, mistral, pythonic, qwen_coder},
        *,
    };
    use crate::text::tokenizer::tests::{sentencepiece, sentencepiece_with};
    use crate::text::tools::format::ToolFormat;

    fn no() -> GrammarError {
        GrammarError::Invalid("no".into())
    }

    fn prepare(schema: &Value, parts: &[Vec<String>], _: bool) -> Result<Vec<String>, GrammarError> {
        if schema.to_string().contains("forbidden") {
            return Err(no());
        }
        Ok(parts.iter().map(|places| places.iter().map(|place| schema.pointer(place).unwrap().to_string()).collect()).collect())
    }

    fn calls(format: &'static ToolFormat, parallel: bool) -> Calls {
        let parameters = json!({"properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]});
        let tools =
            [Tool { name: "f".into(), parameters: Some(parameters), ..Tool::default() }, Tool { name: "g".into(), ..Tool::default() }];
        Calls::new(format, &tools, parallel, None)
    }

    fn lark(tokenizer: &Tokenizer, thought: Option<&Thought>, calls: &Calls, forced: Forced) -> String {
        AnswerRules { tokenizer, thought, calls: Some((calls, forced)), answer: None }.lark(&mut prepare).unwrap()
    }

    #[test]
    fn required_calls_are_in_the_models_own_format() {
        assert_eq!(
            lark(&sentencepiece(), None, &calls(&hermes::FORMAT, true), Forced::Any),
            r#"start: row
call_0: "<tool_call>\n{\"name\": \"f\", \"arguments\": " arguments_0 "}\n</tool_call>"
arguments_0: %json {"properties":{"a":{"type":"integer"},"b":{"type":"string"}},"required":["a"]}
call_1: "<tool_call>\n{\"name\": \"g\", \"arguments\": " arguments_1 "}\n</tool_call>"
arguments_1: %json {"type":"object","properties":{},"additionalProperties":false}
call: call_0 | call_1
row: "" call ("\n" call)* ""
"#
        );
    }

    #[test]
    fn so_many_calls_are_forced_at_most() {
        let calls = Calls { forced_most: Some(8), ..calls(&hermes::FORMAT, true) };
        let lark = lark(&sentencepiece(), None, &calls, Forced::Any);
        assert!(lark.ends_with("row: \"\" call (\"\\n\" call){0,7} \"\"\n"), "{lark}");
    }

    #[test]
    fn marks_that_are_tokens_go_by_their_ids_and_a_named_tool_is_alone() {
        let tokenizer = sentencepiece_with(&["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]"]);
        let id = |mark| tokenizer.id_of(mark).unwrap();
        let thought = Thought { begin: "[THINK]", end: "[/THINK]", open: false, wanted: true };
        assert_eq!(
            lark(&tokenizer, Some(&thought), &calls(&mistral::NAMED, false), Forced::Named("g")),
            format!(
                "start: (<[{}]> thought_end /\\n{{0,2}}/)? row\nthought_end: /(.|\\n)*/ <[{}]>\n\
                 call_1: <[{}]> \"g\" <[{}]> arguments_1 \"\"\n\
                 arguments_1: %json {{\"type\":\"object\",\"properties\":{{}},\"additionalProperties\":false}}\ncall: call_1\nrow: \"\" call  \"\"\n",
                id("[THINK]"),
                id("[/THINK]"),
                id("[TOOL_CALLS]"),
                id("[ARGS]")
            )
        );
    }

    #[test]
    fn arguments_that_are_no_object_have_a_rule_each() {
        let python = lark(&sentencepiece(), None, &calls(&pythonic::FORMAT, false), Forced::Named("f"));
        for line in [
            r#"value_0_0: %json {"type":"integer"}"#,
            r#"first_0_0:  "a=" value_0_0 next_0_1"#,
            r#"next_0_1: ", " "b=" value_0_1 next_0_2 | next_0_2"#,
            r#"first_0_1:  "b=" value_0_1 next_0_2 | first_0_2"#,
            r#"call_0: "f(" first_0_0 ")""#,
            r#"row: "[" call  "]""#,
        ] {
            assert!(python.lines().any(|l| l == line), "{line} in\n{python}");
        }
        let tags = lark(&sentencepiece(), None, &calls(&qwen_coder::FORMAT, false), Forced::Named("f"));
        for line in [
            r#"value_0_0: value_0_0_json "\n</parameter>\n""#,
            r#"value_0_1[suffix="\n</parameter>\n"]: /(.|\n)*/"#,
            r#"next_0_1:  "<parameter=b>\n" value_0_1 next_0_2 | next_0_2"#,
            r#"call_0: "<tool_call>\n<function=f>\n" first_0_0 "</function>\n</tool_call>""#,
        ] {
            assert!(tags.lines().any(|l| l == line), "{line} in\n{tags}");
        }
    }

    #[test]
    fn strict_tools_leave_the_rest_of_the_answer_free() {
        let start = |format, tokenizer: &Tokenizer| {
            let lark = lark(tokenizer, None, &calls(format, true), Forced::Nothing);
            let free = lark.lines().find(|line| line.starts_with("FREE")).unwrap().to_owned();
            (lark.lines().next().unwrap().to_owned(), free)
        };
        let token = sentencepiece_with(&["[TOOL_CALLS]"]);
        assert_eq!(start(&mistral::LIST, &token), ("start: FREE (row FREE)*".into(), "FREE: /(.|\\n)*/".into()));
        let free = "FREE: /(.|\\n)*/ & ~/(.|\\n)*<tool_call>(.|\\n)*/".to_owned();
        assert_eq!(start(&hermes::FORMAT, &sentencepiece()), ("start: (marked row)* FREE".into(), free));
        let lark = lark(&sentencepiece(), None, &calls(&hermes::FORMAT, true), Forced::Nothing);
        assert!(lark.contains("call_0: \"\\n{\\\"name\\\": "), "its mark has come already: {lark}");
        assert_eq!(
            start(&llama_json::FORMAT, &sentencepiece()),
            ("start: (row | FREE)".into(), r"FREE: /([ \n\t]*[^ \n\t\{](.|\n)*)?/".into())
        );
    }

    #[test]
    fn an_answer_may_follow_a_thought() {
        let thought = Thought { begin: "<think>", end: "</think>", open: true, wanted: true };
        let rules = AnswerRules { tokenizer: &sentencepiece(), thought: Some(&thought), calls: None, answer: Some("%json {}") };
        assert_eq!(
            rules.lark(&mut prepare).unwrap(),
            "start: thought_end /\\n{0,2}/ answer\nthought_end[suffix=\"</think>\"]: /(.|\\n)*/\nanswer: %json {}\n"
        );
        let calls = calls(&hermes::FORMAT, true);
        let rules = AnswerRules { calls: Some((&calls, Forced::Nothing)), thought: None, ..rules };
        assert!(rules.lark(&mut prepare).unwrap().starts_with("start: (row | answer)\nanswer: %json {}\n"));
    }

    #[test]
    fn a_schema_that_cannot_be_kept_is_refused_where_it_must_be() {
        let forbidden = Tool { name: "f".into(), parameters: Some(json!({"forbidden": 1})), ..Tool::default() };
        let lark = |tool| {
            let calls = Calls::new(&hermes::FORMAT, &[tool], true, None);
            AnswerRules { tokenizer: &sentencepiece(), thought: None, calls: Some((&calls, Forced::Any)), answer: None }.lark(&mut prepare)
        };
        assert_eq!(lark(Tool { strict: true, ..forbidden.clone() }), Err(Refused { tool: 0, error: no() }));
        assert!(lark(forbidden).unwrap().contains(r#"arguments_0: %json {"type":"object"}"#));
    }

    /// Each property comes with rules of its own.
    #[test]
    fn many_properties_are_refused_before_all_are_written_or_may_be_any() {
        let properties: serde_json::Map<_, _> = (0..3000).map(|i| (format!("p{i}"), json!({"type": "integer"}))).collect();
        let definitions: serde_json::Map<_, _> = (0..3000).map(|i| (format!("d{i}"), json!({"type": "null"}))).collect();
        let parameters = json!({"type": "object", "properties": properties, "$defs": definitions});
        let lark = |strict| {
            let tool = Tool { name: "f".into(), parameters: Some(parameters.clone()), strict, ..Tool::default() };
            let calls = Calls::new(&qwen_coder::FORMAT, &[tool], false, None);
            let rules = AnswerRules { tokenizer: &sentencepiece(), thought: None, calls: Some((&calls, Forced::Any)), answer: None };
            let mut judged = 0;
            let lark = rules.lark(&mut |schema, parts, strict| {
                judged += 1;
                prepare(schema, parts, strict)
            });
            // Any object is judged as well, for the tool that need not follow its schema.
            assert_eq!(judged, if strict { 1 } else { 2 });
            lark
        };
        let refused = lark(true);
        assert!(matches!(refused, Err(Refused { tool: 0, error: GrammarError::TooLarge { .. } })), "{refused:?}");
        assert!(lark(false).unwrap().contains("first_0_0: open_0*"));
    }
}
