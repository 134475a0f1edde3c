//! A model with a notation of calls, over a real tokenizer: the grammar that forces calls, random answers under it, and what is read of them.

use serde_json::{Value, json};
use std::{fs, path::PathBuf, time::SystemTime};
use tidemill_gateway::{
    dialog::{Dialog, Message, ToolChoice},
    generation::{
        Pipeline, TextRules,
        piece::{Ended, Piece},
    },
    text::{
        TextModel,
        output::OutputRules,
        tool::Tool,
        tools::grammar::{AnswerRules, Forced},
    },
};
use tidemill_grammar::{Compiler, Matcher, Vocabulary, compiler::json_schema_parts, schema::Terms};
use tidemill_proto::{
    block::Token,
    grammar::{Constraint, Grammar},
};

pub(crate) const EOS: Token = 1;
/// The width of a row of logits: the fixture's vocabulary and the marks.
const WIDTH: usize = 560;

/// Formats by the signs of their templates.
pub(crate) const TEMPLATES: [(&str, &str); 7] = [
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

/// A model, the grammar of its forced calls, and what reads them.
pub(crate) struct World {
    pub(crate) model: TextModel,
    output: OutputRules,
    pub(crate) compiler: Compiler,
    pub(crate) constraint: Constraint,
    numbers: u64,
}

impl World {
    pub(crate) fn new(template: &str, marks: bool, parallel: bool, forced: Forced, tools: Vec<Tool>) -> Self {
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
        let prepare =
            &mut |schema: &Value, parts: &[Vec<String>], strict| json_schema_parts(schema, parts, Terms { strict, ..Terms::default() });
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
    pub(crate) fn walk(&mut self, first: &str, most: usize) -> Option<Vec<Token>> {
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

    pub(crate) fn read(&self, tokens: &[Token]) -> Piece {
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

    pub(crate) fn text(&self, tokens: &[Token]) -> String {
        self.model.tokenizer.decode(tokens, false)
    }
}
