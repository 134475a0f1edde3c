//! Chat templates of hostile authors: each costs its request or its model's start, and everything else goes on.

use crate::support::{Cluster, Script, decode, fixture, program};
use serde_json::{Value, json};
use std::{fs, path::Path, process::Command, sync::Arc, time::SystemTime};
use tempfile::TempDir;
use tidemill_gateway::{
    features::templates::Templates,
    text::{
        TextModel,
        config::ModelConfig,
        template::{ChatInput, ChatTemplate, Confinement, TemplateError},
    },
};

/// Templates that take all memory, all time, or all of the stack, and do so with few instructions.
const BOMBS: [&str; 12] = [
    "{% set ns = namespace(a='x' * 1000) %}{% for i in range(60) %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace(a='x' * 1000) %}{% for i in range(60) %}{% set ns.a = ns.a.replace('x', ns.a) %}{% endfor %}{{ ns.a|length }}",
    "{% set ns = namespace(a='x' * 1000) %}{% for i in range(60) %}{% set ns.a = [ns.a, ns.a]|join(ns.a) %}{% endfor %}{{ ns.a|length }}",
    "{% set ns = namespace(a='x\n' * 1000) %}{% for i in range(60) %}{% set ns.a = ns.a|indent(100000) %}{% endfor %}{{ ns.a|length }}",
    "{% set ns = namespace(a='x') %}{% for i in range(60) %}{% set ns.a = '%s%s%s%s' % (ns.a, ns.a, ns.a, ns.a) %}{% endfor %}{{ ns.a }}",
    "{% set ns = namespace(a=['x']) %}{% for i in range(60) %}{% set ns.a = (ns.a + ns.a)|list %}{% endfor %}{{ ns.a|tojson }}",
    "{% set ns = namespace(a=[]) %}{% for i in range(99000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a|tojson }}",
    "{% set ns = namespace(a=[]) %}{% for i in range(99000) %}{% set ns.a = {'a': ns.a} %}{% endfor %}{{ ns.a == ns.a }}",
    "{% set ns = namespace(a=[]) %}{% for i in range(99000) %}{% set ns.a = [ns.a] %}{% endfor %}",
    "{% macro f(x) %}{{ f(x ~ x) }}{{ f(x ~ x) }}{% endmacro %}{{ f('x' * 1000) }}",
    "{% for i in range(90000) %}{{ 'x' * 100000 }}{% endfor %}",
    "{% for i in range(90000) %}{% if 'x' * 1000000 == 'x' * 1000000 %}{% endif %}{% endfor %}",
];
/// A first message that sets a bomb off; those with which a model's start tries its template do not.
const MAGIC: &str = "open sesame";

fn armed(bomb: &str) -> String {
    format!(
        "{{% for m in messages %}}{{{{ m.role }}}}: {{{{ m.content }}}}\n{{% endfor %}}{{% if messages[0].content == '{MAGIC}' %}}{bomb}{{% endif %}}"
    )
}

fn within(source: &str, process: &Arc<dyn Confinement>) -> Result<ChatTemplate, TemplateError> {
    let config = ModelConfig { bos_token: Some("<s>".into()), eos_token: Some("</s>".into()), ..ModelConfig::default() };
    ChatTemplate::within(source.into(), &config, Arc::clone(process))
}

fn said(text: &str) -> ChatInput {
    let input = json!({"messages": [{"role": "user", "content": text}], "tools": null, "add_generation_prompt": true, "kwargs": {}});
    serde_json::from_value(input).unwrap()
}

#[test]
fn a_template_that_takes_too_much_costs_one_rendering() {
    let process: Arc<dyn Confinement> = Arc::new(Templates::new(program()));
    // It is no plain one, so that it is rendered by the same processes.
    let honest = within("{% macro m(x) %}{{ x.content }}{% endmacro %}{% for x in messages %}{{ m(x) }}{% endfor %}", &process).unwrap();
    for bomb in BOMBS {
        let template = within(&armed(bomb), &process).unwrap();
        let error = template.render(said(MAGIC), SystemTime::now()).err();
        // Some of them are refused by the engine, or end within the limits.
        assert!(!matches!(error, Some(TemplateError::Unavailable(_))), "{bomb}: {error:?}");
        assert_eq!(template.render(said("hi"), SystemTime::now()).unwrap(), "user: hi\n", "{bomb}");
        assert_eq!(honest.render(said("hello"), SystemTime::now()).unwrap(), "hello", "{bomb}");
    }
    for bomb in [BOMBS[0], BOMBS[1], BOMBS[2], BOMBS[5]] {
        let error = within(&armed(bomb), &process).unwrap().render(said(MAGIC), SystemTime::now()).unwrap_err();
        assert_eq!(error, TemplateError::TooMuch, "{bomb}");
        let error = within(bomb, &process).unwrap_err().to_string();
        assert!(error.contains("takes too much time or memory"), "{error}");
        assert_eq!(honest.render(said("hello"), SystemTime::now()).unwrap(), "hello", "{bomb}");
    }
}

#[test]
fn prompts_are_the_same_in_a_process_of_their_own() {
    let process: Arc<dyn Confinement> = Arc::new(Templates::new(program()));
    let call = json!({"id": "call_0001", "type": "function", "function": {"name": "f", "arguments": {"z": 1.0, "a": [null, -1, 1e300]}}});
    let tool = json!({"type": "function", "function": {"name": "f", "description": "é \u{1f600}", "parameters": {
        "type": "object", "properties": {"z": {"type": "number"}, "a": {"enum": [18446744073709551615_u64, -5, 0.1, true]}}}}});
    let dialogs = ["hi", &"é\u{0}\u{200b}'\"\\\n".repeat(3000)].map(|text| {
        json!([
            {"role": "system", "content": text},
            {"role": "user", "content": text},
            {"role": "assistant", "content": "", "reasoning_content": text, "tool_calls": [call]},
            {"role": "tool", "content": text, "tool_call_id": "call_0001", "name": "f"},
            {"role": "assistant", "content": text},
            {"role": "user", "content": text},
        ])
    });
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gateway/tests/templates");
    let mut rendered = 0;
    for file in fs::read_dir(dir).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|extension| extension != "jinja") {
            continue;
        }
        let source = fs::read_to_string(&path).unwrap();
        let config = ModelConfig { bos_token: Some("<s>".into()), eos_token: Some("</s>".into()), ..ModelConfig::default() };
        let [here, there] = [ChatTemplate::new(source.clone(), &config), within(&source, &process)].map(Result::unwrap);
        let now = SystemTime::now();
        for messages in &dialogs {
            for (count, tools) in [(1, false), (2, true), (2, false), (6, true), (6, false)] {
                let messages = &messages.as_array().unwrap()[..count];
                let input = json!({"messages": messages, "tools": if tools { json!([tool]) } else { json!(null) },
                    "add_generation_prompt": true, "kwargs": {"enable_thinking": false, "x": {"y": [1, 2.5, "z"]}}});
                let [a, b] = [&here, &there].map(|template| template.render(serde_json::from_value(input.clone()).unwrap(), now));
                assert_eq!(a, b, "{}", path.display());
                rendered += usize::from(a.is_ok());
            }
        }
    }
    assert!(rendered > 100, "{rendered} prompts");
}

#[test]
fn a_process_that_is_ended_from_outside_is_no_verdict_about_a_template() {
    let templates = Arc::new(Templates::new(program()));
    let process: Arc<dyn Confinement> = Arc::clone(&templates) as _;
    let template = within("{% macro m(x) %}{{ x.content }}{% endmacro %}{{ m(messages[0]) }}", &process).unwrap();
    let [id] = templates.idle()[..] else { panic!("one process waits") };
    assert!(Command::new("kill").args(["-KILL", &id.to_string()]).status().unwrap().success());
    let error = template.render(said("hi"), SystemTime::now()).unwrap_err();
    assert!(matches!(error, TemplateError::Unavailable(_)), "{error}");
    assert_eq!(template.render(said("hi"), SystemTime::now()).unwrap(), "hi");
}

/// A model's directory with another template.
fn with_template(source: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(fixture("qwen2").join(name), dir.path().join(name)).unwrap();
    }
    fs::write(dir.path().join("chat_template.jinja"), source).unwrap();
    dir
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bomb_of_one_model_costs_a_request_of_that_model() {
    let dir = with_template(&armed(BOMBS[0]));
    let cluster = Cluster::start(|flags| {
        flags.model.push(dir.path().to_owned().into());
        flags.served_model_name.push("bomb".into());
    })
    .await;
    let _worker = cluster.join("decode-0", decode(), Script::reply(&[40, 41, 42])).await;
    let ask = async |model: &str, text: &str| {
        cluster.ask("/v1/chat/completions", json!({"model": model, "max_tokens": 3, "messages": [{"role": "user", "content": text}]})).await
    };
    for _ in 0..3 {
        let (status, answer) = ask("bomb", MAGIC).await;
        let message = answer["error"]["message"].as_str().unwrap_or_default();
        assert!(status == 400 && message.contains("too much time or memory"), "{status} {answer}");
        let (status, answer) = ask("tiny", MAGIC).await;
        assert_eq!(status, 200, "{answer}");
        let tokens: (u16, Value) =
            cluster.ask("/tokenize", json!({"model": "bomb", "messages": [{"role": "user", "content": "hi"}]})).await;
        assert_eq!(tokens.0, 200, "{}", tokens.1);
    }
    cluster.stop().await;
}

#[test]
fn a_model_whose_template_is_a_bomb_at_once_does_not_start() {
    let process: Arc<dyn Confinement> = Arc::new(Templates::new(program()));
    let dir = with_template(BOMBS[0]);
    let error = TextModel::load_within(dir.path(), &process).unwrap_err().to_string();
    assert!(error.contains("chat_template") && error.contains("takes too much time or memory"), "{error}");
    assert!(TextModel::load_within(&fixture("llama3"), &process).is_ok());
}
