//! Grammars that force calls, over a real tokenizer: any output under one is read as calls that follow their schemas. In every format, with
//! marks as tokens or spelled out.

use serde_json::{Value, json};
use std::{fs, path::PathBuf, time::SystemTime};
use tidemill_gateway::{
    dialog::{Dialog, Message, ToolChoice},
    generation::{
        Pipeline, TextRules,
        piece::{Ended, FinishReason, Piece},
    },
    text::{
        TextModel,
        output::OutputRules,
        tool::Tool,
        tools::grammar::{AnswerRules, Forced},
    },
};
use tidemill_grammar::{Compiler, Matcher, Vocabulary, compiler::json_schema, schema::Terms};
use tidemill_proto::{
    block::Token,
    grammar::{Constraint, Grammar},
};

const EOS: Token = 1;
/// The width of a row of logits: the fixture's vocabulary and the marks.
const WIDTH: usize = 560;

/// Formats by the signs of their templates.
const TEMPLATES: [(&str, &str); 7] = [
    ("hermes", "{{ messages }}<tool_call></tool_call>"),
    ("qwen_coder", "{{ messages }}<tool_call><function=<parameter=</tool_call>"),
    ("mistral_list", "{{ messages }}[TOOL_CALLS]"),
    ("mistral", "{{ messages }}[TOOL_CALLS][ARGS]"),
    ("pythonic", "{{ messages }}<|python_start|>"),
    ("llama_json", "{{ messages }}<|python_tag|>"),
    ("plain", "{{ messages }}"),
];

const MARKS: [&str; 8] =
    ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_start|>", "<|python_tag|>", "<think>", "</think>"];

fn fixture() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama3")
}

fn tokenizer_json(marks: bool) -> Vec<u8> {
    let mut tokenizer: Value = serde_json::from_slice(&fs::read(fixture().join("tokenizer.json")).unwrap()).unwrap();
    if marks {
        for (mark, id) in MARKS.iter().zip(512..) {
            // As published: some are special, Qwen's are not.
            let special = !mark.contains("tool_call>");
            tokenizer["added_tokens"]
                .as_array_mut()
                .unwrap()
                .push(json!({"id": id, "content": mark, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": special}));
        }
    }
    tokenizer.to_string().into_bytes()
}

/// The fixture's tokenizer, with the marks as tokens if `marks`, and this template.
fn model(template: &str, marks: bool) -> TextModel {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "generation_config.json", "tokenizer_config.json"] {
        fs::copy(fixture().join(file), dir.path().join(file)).unwrap();
    }
    fs::write(dir.path().join("tokenizer.json"), tokenizer_json(marks)).unwrap();
    fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    TextModel::load(dir.path()).unwrap()
}

fn tools() -> Vec<Tool> {
    let parameters = json!({
        "type": "object", "required": ["n"], "additionalProperties": false,
        "properties": {
            "n": {"type": "integer", "minimum": -9, "maximum": 99}, "e": {"enum": ["x", "y \"z\""]},
            "l": {"type": "array", "maxItems": 2, "items": {"$ref": "#/$defs/flag"}},
            "o": {"type": "object", "properties": {"k": {"type": "string", "maxLength": 3}}, "additionalProperties": false},
        },
        "$defs": {"flag": {"type": "boolean"}},
    });
    let f = Tool { name: "f".into(), parameters: Some(parameters), strict: true, ..Tool::default() };
    vec![f, Tool { name: "get-time".into(), ..Tool::default() }]
}

fn keeps_to_its_schema(name: &str, arguments: &Value) -> bool {
    let fields = arguments.as_object().unwrap();
    let allowed = |(key, value): (&String, &Value)| match key.as_str() {
        // `-0` is an integer in JSON, and a float to readers.
        "n" => value.as_f64().is_some_and(|n| n.fract() == 0.0 && (-9.0..=99.0).contains(&n)),
        "e" => *value == json!("x") || *value == json!("y \"z\""),
        "l" => value.as_array().is_some_and(|list| list.len() <= 2 && list.iter().all(Value::is_boolean)),
        "o" => value.as_object().is_some_and(|o| o.iter().all(|(k, v)| k == "k" && v.as_str().is_some_and(|v| v.chars().count() <= 3))),
        _ => false,
    };
    match name {
        "f" => fields.contains_key("n") && fields.iter().all(allowed),
        "get-time" => fields.is_empty(),
        _ => false,
    }
}

struct World {
    model: TextModel,
    output: OutputRules,
    compiler: Compiler,
    constraint: Constraint,
    numbers: u64,
}

impl World {
    fn new(template: &str, marks: bool, parallel: bool, forced: Forced, tools: Vec<Tool>) -> Self {
        let model = model(template, marks);
        let tool_choice = match forced {
            Forced::Any => ToolChoice::Required,
            Forced::Named(name) => ToolChoice::Named(name.into()),
            Forced::Nothing => ToolChoice::Auto,
        };
        let message = Message { role: "user".into(), content: Some("x".into()), ..Message::default() };
        let dialog = Dialog { messages: vec![message], tools, tool_choice, parallel, ..Dialog::default() };
        let output = dialog.prompt(&model, SystemTime::UNIX_EPOCH).unwrap().output;
        let calls = output.calls.as_ref().unwrap();
        let rules =
            AnswerRules { tokenizer: &model.tokenizer, thought: output.thought.as_ref(), calls: Some((calls, forced)), answer: None };
        let prepare = &mut |schema: &Value, strict| {
            json_schema(schema, Terms { strict, ..Terms::default() }).map(|grammar| grammar.text().to_owned())
        };
        let lark = rules.lark(prepare).unwrap();
        let constraint = Constraint { grammar: Grammar::Lark(lark.as_str().into()), end_tokens: vec![EOS], ends_late: false };
        let compiler = Compiler::new(&Vocabulary::new(&tokenizers::Tokenizer::from_bytes(tokenizer_json(marks)).unwrap(), WIDTH));
        compiler.compile(&constraint.grammar).unwrap_or_else(|error| panic!("{error}\n{lark}"));
        Self { model, output, compiler, constraint, numbers: 11 }
    }

    fn random(&mut self, below: usize) -> usize {
        self.numbers = self.numbers.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
        (self.numbers >> 33) as usize % below
    }

    /// Writes `first`, then samples at random to the end; `None` if the end does not come.
    fn walk(&mut self, first: &str, most: usize) -> Option<Vec<Token>> {
        let compiled = self.compiler.compile(&self.constraint.grammar).unwrap();
        let mut tokens = self.model.tokenizer.encode(first, false).unwrap();
        let mut matcher = Matcher::new(&compiled, &self.constraint, &tokens).unwrap_or_else(|error| panic!("{first:?}: {error}"));
        for _ in 0..most {
            let allowed: Vec<Token> = matcher.mask().unwrap().tokens().collect();
            let token = allowed[self.random(allowed.len())];
            matcher.advance(token).unwrap();
            if token == EOS {
                return Some(tokens);
            }
            tokens.push(token);
        }
        None
    }

    fn read(&self, tokens: &[Token]) -> Piece {
        let rules = TextRules {
            stop_tokens: vec![EOS],
            eos_tokens: vec![EOS],
            skip_special: true,
            output: self.output.clone(),
            ..TextRules::default()
        };
        let mut pipeline = Pipeline::new(&self.model, &[30, 31], &rules, 1);
        let mut whole = Piece::default();
        for &token in tokens {
            whole.append(pipeline.push(token, None));
            if pipeline.has_ended() {
                return whole;
            }
        }
        whole.append(pipeline.finish(Ended::StopToken(EOS)));
        whole
    }

    fn text(&self, tokens: &[Token]) -> String {
        self.model.tokenizer.decode(tokens, false)
    }
}

fn check_calls(world: &World, tokens: &[Token], name: &str) -> usize {
    let piece = world.read(tokens);
    let said = world.text(tokens);
    assert_eq!(piece.finish.unwrap().reason, FinishReason::ToolCalls, "{name}: {said}");
    for call in &piece.calls {
        let arguments: Value = serde_json::from_str(&call.arguments).unwrap_or_else(|error| panic!("{name}: {error}: {said}"));
        assert!(keeps_to_its_schema(call.name.as_deref().unwrap(), &arguments), "{name}: {said}");
    }
    piece.calls.len()
}

#[test]
fn whatever_is_drawn_under_a_forced_format_is_calls() {
    for (name, template) in TEMPLATES {
        for marks in [false, true] {
            let mut world = World::new(template, marks, true, Forced::Any, tools());
            let walks: Vec<_> = (0..40).filter_map(|_| world.walk("", 300)).collect();
            assert!(walks.len() >= 10, "{name}: {}", walks.len());
            let mut most = 0;
            for tokens in walks {
                most = most.max(check_calls(&world, &tokens, name));
                assert_eq!(world.read(&tokens).text, "", "{name}: {}", world.text(&tokens));
            }
            assert!(most > 1, "{name}: several calls");
            let mut world = World::new(template, marks, false, Forced::Named("get-time"), tools());
            let tokens = world.walk("", 100).unwrap_or_else(|| panic!("{name} ends"));
            let piece = world.read(&tokens);
            let arguments: Value = serde_json::from_str(&piece.calls[0].arguments).unwrap();
            assert_eq!((piece.calls.len(), piece.calls[0].name.as_deref(), arguments), (1, Some("get-time"), json!({})));
        }
    }
}

#[test]
fn a_thought_may_come_first() {
    for (name, template) in TEMPLATES {
        for (open, marks) in [(false, false), (false, true), (true, false), (true, true)] {
            let template = format!("{template}{{# </think> #}}{{# <think> #}}{}", if open { "<think>\n" } else { "" });
            let mut world = World::new(&template, marks, true, Forced::Any, tools());
            let begin = if open { "" } else { "<think>" };
            let walks: Vec<_> = (0..10).filter_map(|_| world.walk(&format!("{begin}\nWhat? {{}} <\n</think>\n\n"), 300)).collect();
            assert!(!walks.is_empty(), "{name}");
            for tokens in walks {
                check_calls(&world, &tokens, name);
                assert_eq!(world.read(&tokens).reasoning, "What? {} <", "{name}: {}", world.text(&tokens));
            }
        }
    }
}

#[test]
fn strict_tools_keep_to_their_schemas_in_an_answer_that_is_free() {
    for (name, template) in &TEMPLATES[..6] {
        for marks in [false, true] {
            let mut world = World::new(template, marks, true, Forced::Nothing, tools());
            let bare = matches!(*name, "pythonic" | "llama_json");
            let free = world.text(&world.model.tokenizer.encode("Hello {}, how < are [you]?", false).unwrap());
            let compiled = world.compiler.compile(&world.constraint.grammar).unwrap();
            let tokens = world.model.tokenizer.encode(&free, false).unwrap();
            let mut matcher = Matcher::new(&compiled, &world.constraint, &tokens).unwrap();
            assert!(matcher.mask().unwrap().tokens().any(|token| token == EOS), "{name}: text alone is an answer");
            // At the start of a call, only a call may follow.
            let begin = match *name {
                "hermes" => "Look: <tool_call>\n{",
                "qwen_coder" => "Look: <tool_call>\n<function=",
                "mistral_list" => "Look: [TOOL_CALLS][{",
                "mistral" => "Look: [TOOL_CALLS]",
                "pythonic" => "[",
                _ => "{",
            };
            let mut read = 0;
            for _ in 0..30 {
                // Free text after the calls rarely ends by chance.
                let Some(tokens) = world.walk(begin, 150) else { continue };
                let piece = world.read(&tokens);
                assert!(!piece.calls.is_empty(), "{name}: {}", world.text(&tokens));
                assert!(bare || piece.text.starts_with("Look:"), "{name}: {}", world.text(&tokens));
                for call in &piece.calls {
                    let arguments: Value = serde_json::from_str(&call.arguments).unwrap();
                    assert!(keeps_to_its_schema(call.name.as_deref().unwrap(), &arguments), "{name}: {}", world.text(&tokens));
                }
                read += 1;
            }
            assert!(read > 0 || !bare, "{name}");
        }
    }
}

#[test]
fn text_between_tags_may_be_any_text() {
    let template = TEMPLATES.iter().find(|(name, _)| *name == "qwen_coder").unwrap().1;
    let parameters = json!({"type": "object", "properties": {"s": {"type": "string"}}, "required": ["s"]});
    let tool = Tool { name: "write".into(), parameters: Some(parameters), ..Tool::default() };
    for marks in [false, true] {
        let mut world = World::new(template, marks, false, Forced::Any, vec![tool.clone()]);
        let first = "<tool_call>\n<function=write>\n<parameter=s>\nline 1\n\"é\" </param>\n\n</parameter>\n";
        let tokens = world.walk(first, 60).expect("one way is left");
        let piece = world.read(&tokens);
        let arguments: Value = serde_json::from_str(&piece.calls[0].arguments).unwrap();
        assert_eq!(arguments, json!({"s": "line 1\n\"é\" </param>\n"}), "{}", world.text(&tokens));
    }
}
