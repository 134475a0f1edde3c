//! Limits on thoughts, kept to the token over all published templates with thoughts: whatever the model would go on to think, it draws the
//! template's own end of the thought after exactly as many tokens, and then its answer.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};
use tidemill_gateway::{
    dialog::{Dialog, Message},
    generation::{Pipeline, TextRules, piece::Ended},
    text::{TextModel, config::ModelConfig, output::OutputRules, template::ChatTemplate, tokenizer::Tokenizer},
};
use tidemill_proto::{block::Token, thought::ThoughtLimit};

const CHANNELS: [&str; 6] = ["<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"];

/// The templates with thoughts: the marks of a thought, and whether a prompt begins it.
const TEMPLATES: [(&str, &str, &str, bool); 9] = [
    ("command_r7b", "<|START_THINKING|>", "<|END_THINKING|>", false),
    ("qwen3", "<think>", "</think>", false),
    ("qwen35", "<think>", "</think>", true),
    ("deepseek_r1", "<think>", "</think>", true),
    ("deepseek_v31", "<think>", "</think>", true),
    ("glm45", "<think>", "</think>", false),
    ("nemotron_nano", "<think>", "</think>", true),
    ("r1_distill", "<think>", "</think>", true),
    ("gpt_oss", "<|channel|>analysis<|message|>", "<|end|>", false),
];

/// The tokens of marks in a vocabulary.
#[derive(Clone, Copy, PartialEq, Debug)]
enum Spelling {
    Special,
    Added,
    /// None: marks are text.
    Text,
}

fn dir() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/templates")
}

/// A template with the tokenizer of a fixture, to which marks are added.
fn model(template: &str, marks: &[&str], spelling: Spelling) -> TextModel {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama3/tokenizer.json");
    let mut tokenizer: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    for (content, id) in marks.iter().zip(512..).filter(|_| spelling != Spelling::Text) {
        let added = serde_json::json!({"id": id, "content": content, "single_word": false, "lstrip": false, "rstrip": false,
            "normalized": false, "special": spelling == Spelling::Special});
        tokenizer["added_tokens"].as_array_mut().unwrap().push(added);
    }
    let tokenizer = Arc::new(Tokenizer::parse(&path, tokenizer.to_string().as_bytes()).unwrap());
    let config = ModelConfig { bos_token: Some("<s>".into()), eos_token: Some("</s>".into()), ..ModelConfig::default() };
    let template = ChatTemplate::new(fs::read_to_string(dir().join(format!("{template}.jinja"))).unwrap(), &config).unwrap();
    TextModel::new(config, tokenizer, Some(template))
}

/// The rules by which the answer to a question is read, with thinking on.
fn output(model: &TextModel) -> OutputRules {
    let question = Message { role: "user".into(), content: Some("Why?".into()), ..Message::default() };
    let template_kwargs = ["enable_thinking", "thinking"].map(|name| (name.to_owned(), true.into())).into();
    let dialog = Dialog { messages: vec![question], template_kwargs, ..Dialog::default() };
    dialog.prompt(model, SystemTime::UNIX_EPOCH).unwrap().output
}

/// A model that would think for ever, under a limit.
struct Thinker<'a> {
    model: &'a TextModel,
    limit: ThoughtLimit,
    drawn: Vec<Token>,
}

impl Thinker<'_> {
    /// Draws what the model wants to say, except where the limit leaves it no choice.
    fn says(&mut self, text: &str) {
        for token in self.model.tokenizer.encode(text, false).unwrap() {
            let token = self.limit.required(self.limit.after(&self.drawn)).first().copied().unwrap_or(token);
            self.drawn.push(token);
        }
    }

    /// Draws what the limit requires.
    fn must(&mut self) {
        while let Some(&token) = self.limit.required(self.limit.after(&self.drawn)).first() {
            self.drawn.push(token);
        }
    }
}

/// The reasoning, the text and the number of tokens of thought in an answer.
fn read(model: &TextModel, output: OutputRules, tokens: &[Token]) -> (String, String, u64) {
    let rules = TextRules { skip_special: true, output, ..TextRules::default() };
    let mut pipeline = Pipeline::new(model, &[], &rules, 1);
    let (mut reasoning, mut text, mut thought) = (String::new(), String::new(), 0);
    let pieces: Vec<_> = tokens.iter().map(|&token| pipeline.push(token, None)).collect();
    for piece in pieces.into_iter().chain([pipeline.finish(Ended::Length)]) {
        (reasoning, text, thought) = (reasoning + &piece.reasoning, text + &piece.text, thought + piece.reasoning_tokens);
    }
    (reasoning, text, thought)
}

#[test]
fn a_limit_is_kept_to_the_token_in_all_templates_with_thoughts() {
    for (template, begin, end, open) in TEMPLATES {
        let channels = template == "gpt_oss";
        let marks = if channels { CHANNELS.to_vec() } else { vec![begin, end] };
        for spelling in [Spelling::Special, Spelling::Added, Spelling::Text] {
            if channels && spelling == Spelling::Text {
                continue;
            }
            let model = model(template, &marks, spelling);
            let output = output(&model);
            let thoughts = model.limited_thoughts().unwrap_or_else(|| panic!("{template} has thoughts"));
            assert_eq!(output.thought.as_ref().is_some_and(|thought| thought.open), open, "{template}");
            for tokens_max in [0, 1, 2, 17] {
                let what = format!("{template}, {spelling:?}, {tokens_max} tokens");
                let mut thinker = Thinker { model: &model, limit: thoughts.limit(tokens_max, open), drawn: Vec::new() };
                if channels && tokens_max == 0 {
                    thinker.says("<|channel|>");
                    let required = thinker.limit.required(thinker.limit.after(&thinker.drawn)).to_vec();
                    let first = |name: &str| model.tokenizer.encode(name, false).unwrap()[0];
                    assert_eq!(required, [first("final"), first("commentary")], "{what}: no thought begins");
                    continue;
                }
                if !open {
                    thinker.says(begin);
                }
                let began = thinker.drawn.len();
                while thinker.drawn.len() < began + tokens_max as usize {
                    thinker.says("a");
                }
                thinker.must();
                let closed = model.tokenizer.decode(&thinker.drawn[began + tokens_max as usize..], false);
                assert_eq!(closed, end, "{what}");
                if channels {
                    thinker.says("<|start|>assistant<|channel|>");
                    thinker.must();
                    let name = model.tokenizer.encode("final", false).unwrap();
                    thinker.drawn.extend(&name[1..]);
                    thinker.says("<|message|>");
                }
                thinker.says("The answer is <think> and so on, without an end.");
                let (reasoning, text, thought) = read(&model, output.clone(), &thinker.drawn);
                assert_eq!(reasoning, "a".repeat(tokens_max as usize), "{what}");
                assert!(text.starts_with("The answer is") && text.ends_with("without an end."), "{what}: {text}");
                assert_eq!(thought, u64::from(tokens_max), "{what}");
            }
        }
    }
}

/// A template that is added to the others cannot be forgotten here.
#[test]
fn the_table_has_all_templates_with_thoughts() {
    let mut names: Vec<String> = Vec::new();
    for entry in fs::read_dir(dir()).unwrap() {
        let path = entry.unwrap().path();
        if path.extension().is_some_and(|extension| extension == "jinja") {
            let name = path.file_stem().unwrap().to_str().unwrap().to_owned();
            let model = model(&name, &CHANNELS, Spelling::Special);
            names.extend(model.limited_thoughts().map(|_| name));
        }
    }
    let mut listed = TEMPLATES.map(|(name, ..)| name.to_owned());
    names.sort();
    listed.sort();
    assert_eq!(names, listed);
}

#[test]
fn a_thought_that_ends_by_itself_needs_no_limit_and_an_answer_may_speak_of_marks() {
    let model = model("qwen3", &["<think>", "</think>"], Spelling::Added);
    let limit = model.limited_thoughts().unwrap().limit(3, false);
    let tokens = model.tokenizer.encode("<think>a</think> Write <think> and go on, as long as you like", false).unwrap();
    for end in 0..tokens.len() {
        assert!(limit.required(limit.after(&tokens[..end])).is_empty(), "after {end} tokens");
    }
    let plain = model.tokenizer.encode("No thought. <think> is a mark, and this is a long text after it.", false).unwrap();
    assert_eq!(limit.after(&plain).tokens, 0);
}
