//! Chat templates, and the messages of clients that they render.

use super::tree;
use crate::{
    dice::Dice,
    mutate::{json, text},
    target::{Subject, Target},
};
use minijinja::Value;
use serde_json::json;
use std::{
    collections::BTreeMap,
    time::{Duration, SystemTime},
};
use tidemill_gateway::text::{
    config::ModelConfig,
    template::{ChatInput, ChatTemplate},
};

pub(crate) const TEMPLATES: Target = Target {
    name: "templates",
    about: "chat templates and the messages that they render",
    open,
    // The limit is the template's fuel.
    cpu_max: Duration::from_secs(10),
    bytes_max: 512 << 20,
    short: 2000,
};

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let models = tree::models()?;
    let mut seeds = tree::texts_of(&models, "chat_template.jinja");
    for config in tree::texts_of(&models, "tokenizer_config.json")
        .iter()
        .chain(&tree::texts_of(&[tree::path("deploy/demo-model")], "tokenizer_config.json"))
    {
        let config: serde_json::Value = serde_json::from_str(config)?;
        seeds.extend(config["chat_template"].as_str().map(str::to_owned));
    }
    seeds.extend(SEEDS.iter().map(|&seed| seed.to_owned()));
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": null, "reasoning_content": "hm", "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}]},
        {"role": "tool", "tool_call_id": "c1", "content": "{\"b\": 2}"},
        {"role": "user", "content": "and now?"},
    ]);
    let tools = json!([{"type": "function", "function": {"name": "f", "description": "d", "parameters": {"type": "object"}}}]);
    let keys = json::keys([&messages, &tools]);
    let config = ModelConfig { bos_token: Some("<s>".into()), eos_token: Some("</s>".into()), ..ModelConfig::default() };
    Ok(Box::new(move |dice: &mut Dice| {
        let mut source = dice.pick(&seeds).clone();
        if !dice.one_in(3) {
            source = text::mutate(dice, &source, WORDS);
        }
        dice.show("template", source.as_bytes());
        let (mut messages, mut tools) = (messages.clone(), tools.clone());
        if !dice.one_in(4) {
            json::mutate(dice, &mut messages, &keys);
            json::mutate(dice, &mut tools, &keys);
        }
        dice.show("messages", messages.to_string().as_bytes());
        dice.show("tools", tools.to_string().as_bytes());
        let Ok(template) = ChatTemplate::new(source, &config) else { return Ok(()) };
        let list = |values: serde_json::Value| -> Vec<Value> { serde_json::from_value(values).unwrap_or_default() };
        let kwargs = if dice.one_in(4) {
            BTreeMap::from([((*dice.pick(WORDS)).to_owned(), serde_json::from_value(json::value(dice, 0)).unwrap_or_default())])
        } else {
            BTreeMap::new()
        };
        let tools = dice.one_in(2).then(|| list(tools));
        let input = ChatInput { messages: list(messages), tools, add_generation_prompt: dice.one_in(2), kwargs };
        let _ = template.render(input, SystemTime::UNIX_EPOCH + Duration::from_secs(dice.bits() >> 32));
        Ok(())
    }))
}

const SEEDS: &[&str] = &[
    "{%- macro part(m) -%}{%- if m.content is string -%}{{ m.content }}{%- else -%}{%- for p in m.content -%}{{ p.text }}{%- endfor -%}{%- endif -%}{%- endmacro -%}\
     {%- for message in messages -%}{{ '<|' + message['role'] + '|>' }}{{ part(message) | trim }}{%- if loop.last and add_generation_prompt -%}<|assistant|>{%- endif -%}{%- endfor -%}",
    "{%- set ns = namespace(found=false) -%}{%- for m in messages[::-1] -%}{%- if m.role == 'user' and not ns.found -%}{%- set ns.found = true -%}{{ m.content }}{%- endif -%}{%- endfor -%}\
     {%- if tools is not none -%}{%- for tool in tools -%}{{ tool | tojson(indent=4) }}{%- endfor -%}{%- endif -%}",
    "{{ bos_token }}{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}{% endif %}\
     {% generation %}{{ m['content'].strip().split('</think>')[-1] }}{% endgeneration %}{{ eos_token }}{% endfor %}{{ strftime_now('%d %b %Y') }}",
];

const WORDS: &[&str] = &[
    "{{",
    "}}",
    "{%",
    "%}",
    "{%-",
    "-%}",
    "{#",
    "#}",
    "for",
    "in",
    "if",
    "elif",
    "else",
    "endif",
    "endfor",
    "set",
    "endset",
    "macro",
    "endmacro",
    "call",
    "block",
    "include",
    "extends",
    "import",
    "filter",
    "with",
    "do",
    "raw",
    "endraw",
    "recursive",
    "loop",
    "loop.index",
    "loop(messages)",
    "break",
    "continue",
    "messages",
    "message",
    "tools",
    "content",
    "role",
    "range(100000)",
    "range(10)",
    "namespace()",
    "dict()",
    "cycler",
    "joiner",
    "| tojson",
    "| length",
    "| trim",
    "| join",
    "| list",
    "| sort",
    "| unique",
    "| reverse",
    "| batch(2)",
    "| groupby('role')",
    "| map(attribute='role')",
    "| selectattr('role')",
    "| replace('a', 'aa')",
    "| indent(5)",
    "| string",
    "| int",
    "| pprint",
    "| urlencode",
    "| safe",
    "| first",
    "| last",
    "| slice(3)",
    "| sum",
    "| dictsort",
    "| items",
    "~",
    "*",
    "**",
    "//",
    "%",
    "+",
    "-",
    "==",
    "is defined",
    "is string",
    "is mapping",
    "not",
    "and",
    "or",
    "none",
    "true",
    "false",
    "'a'",
    "1",
    "[1:2]",
    "[::-1]",
    ".strip()",
    ".split('a')",
    ".startswith('a')",
    ".items()",
    ".format(1)",
    ".upper()",
    ".title()",
    ".replace('', 'aaaa')",
    "strftime_now('%Y-%m-%d')",
    "raise_exception('x')",
    "self",
    "super()",
    "caller()",
    "debug()",
    "generation",
    "endgeneration",
    "bos_token",
    "add_generation_prompt",
];
