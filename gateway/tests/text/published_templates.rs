//! Templates of published models with clients' inputs, compared byte for byte with the output of transformers (`templates/make.py`).

use serde::Deserialize;
use serde_json::Value as Json;
use std::{
    collections::BTreeMap,
    fmt::Write,
    fs,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime},
};
use tidemill_gateway::{
    dialog::{Dialog, Message, ToolCall},
    text::{TextModel, config::ModelConfig, template::ChatTemplate, tokenizer::Tokenizer, tool::Tool},
};

#[derive(Deserialize)]
struct Reference {
    now: u64,
    specials: Specials,
    histories: BTreeMap<String, History>,
    texts: BTreeMap<String, BTreeMap<String, Text>>,
}

#[derive(Deserialize)]
struct Specials {
    bos_token: String,
    eos_token: String,
}

#[derive(Deserialize)]
struct History {
    messages: Vec<Json>,
    tools: Vec<Json>,
    prompt: bool,
}

#[derive(Deserialize)]
#[serde(rename_all = "snake_case")]
enum Text {
    Text(String),
    Refused(String),
}

fn text(value: &Json) -> Option<String> {
    value.as_str().map(str::to_owned)
}

fn message(sent: &Json) -> Message {
    let calls = sent["tool_calls"].as_array().into_iter().flatten();
    let call = |call: &Json| {
        let function = &call["function"];
        ToolCall::new(call["id"].as_str().unwrap(), function["name"].as_str().unwrap(), function["arguments"].as_str().unwrap())
    };
    Message {
        role: text(&sent["role"]).unwrap(),
        content: text(&sent["content"]).or(text(&sent["refusal"])),
        reasoning: text(&sent["reasoning_content"]),
        tool_calls: calls.map(call).collect(),
        tool_call_id: text(&sent["tool_call_id"]),
        name: text(&sent["name"]),
        others: BTreeMap::new(),
    }
}

fn tool(sent: &Json) -> Tool {
    let function = &sent["function"];
    let parameters = Some(function["parameters"].clone());
    Tool { name: text(&function["name"]).unwrap(), description: text(&function["description"]), parameters, ..Tool::default() }
}

fn dialog(history: &History) -> Dialog {
    Dialog {
        messages: history.messages.iter().map(message).collect(),
        tools: history.tools.iter().map(tool).collect(),
        parallel: true,
        continues: !history.prompt,
        ..Dialog::default()
    }
}

#[test]
fn prompts_are_those_of_transformers() {
    let dir = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/templates");
    let reference: Reference = serde_json::from_str(&fs::read_to_string(dir.join("reference.json")).unwrap()).unwrap();
    let now = SystemTime::UNIX_EPOCH + Duration::from_secs(reference.now);
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures/llama3/tokenizer.json");
    let tokenizer = Arc::new(Tokenizer::parse(&path, &fs::read(&path).unwrap()).unwrap());
    let Specials { bos_token, eos_token } = reference.specials;
    let config = ModelConfig { bos_token: Some(bos_token), eos_token: Some(eos_token), ..ModelConfig::default() };
    assert!(reference.texts.len() >= 25, "{} templates", reference.texts.len());
    let mut wrong = String::new();
    for (name, texts) in &reference.texts {
        let source = fs::read_to_string(dir.join(format!("{name}.jinja"))).unwrap();
        let template = ChatTemplate::new(source, &config).unwrap_or_else(|error| panic!("{name}: {error}"));
        let model = TextModel::new(config.clone(), Arc::clone(&tokenizer), Some(template)).with_clients_marks();
        for (history, expected) in texts {
            let prompt = dialog(&reference.histories[history]).prompt(&model, now).map(|made| made.prompt.text);
            match (expected, prompt) {
                (Text::Text(expected), Ok(text)) if *expected == text => {}
                (Text::Refused(_), Err(_)) => {}
                (Text::Text(expected), Ok(text)) => _ = writeln!(wrong, "--- {name}: {history}\n{expected:?}\n{text:?}"),
                (Text::Text(expected), Err(error)) => _ = writeln!(wrong, "--- {name}: {history}\n{expected:?}\n{error}"),
                (Text::Refused(refused), Ok(text)) => _ = writeln!(wrong, "--- {name}: {history}\n{refused}\n{text:?}"),
            }
        }
    }
    assert!(wrong.is_empty(), "transformers' and ours:\n{wrong}");
}
