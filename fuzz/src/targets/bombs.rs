//! Chat templates of hostile authors, put together from what makes values longer and deeper. Each costs at most its own rendering: the
//! processes that render go on, and what is rendered in this process stays short.

use super::tree;
use crate::{
    dice::Dice,
    target::{Subject, Target},
};
use serde_json::{Value, json};
use std::{
    sync::Arc,
    time::{Duration, SystemTime},
};
use tidemill_gateway::{
    features::templates::Templates,
    text::{
        config::ModelConfig,
        template::{ChatInput, ChatTemplate, Confinement, TemplateError},
    },
};

pub(crate) const BOMBS: Target = Target {
    name: "bombs",
    about: "chat templates that let values grow, in the processes that render them",
    open,
    // Plain templates are rendered in this process, some of them often; all others in processes with limits of their own.
    cpu_max: Duration::from_secs(5),
    // The longest prompt, once as it arrives, and what plain templates make.
    bytes_max: 256 << 20,
    short: 100,
};

const HONEST: &str = "{% macro m(x) %}{{ x.content }}{% endmacro %}{% for x in messages %}{{ m(x) }}{% endfor %}";

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let process: Arc<dyn Confinement> = Arc::new(Templates::new(std::env::current_exe()?));
    let config = ModelConfig { bos_token: Some("<s>".into()), eos_token: Some("</s>".into()), ..ModelConfig::default() };
    let seeds = tree::texts_of(&tree::models()?, "chat_template.jinja");
    let load = move |source: String| ChatTemplate::within(source, &config, Arc::clone(&process));
    let honest = load(HONEST.into())?;
    Ok(Box::new(move |dice: &mut Dice| {
        let mut source = String::from("{% set ns = namespace(a='x') %}{% macro f(x) %}");
        // Most are without macros and namespaces, so that some are plain.
        let is_wild = dice.one_in(3);
        if is_wild {
            body(dice, &mut source, 2, true);
            source += "{% endmacro %}";
        } else {
            source.clear();
        }
        body(dice, &mut source, 0, is_wild);
        if dice.one_in(8) {
            source.push_str(dice.pick::<String>(&seeds));
        }
        dice.show("template", source.as_bytes());
        let template = match load(source) {
            Ok(template) => template,
            Err(TemplateError::Unavailable(reason)) => return Err(format!("it was not compiled: {reason}")),
            Err(_) => return well(&honest),
        };
        let text = dice.pick(&["hi", "a\"\\\u{1}\u{ad}'", ""]).repeat(*dice.pick(&[1, 1, 30, 1000]));
        let messages: Vec<Value> = (0..1 + dice.few(60)).map(|_| json!({"role": "user", "content": text})).collect();
        let input = json!({"messages": messages, "tools": [{"a": [[["b"]]]}], "add_generation_prompt": true, "kwargs": {}});
        let input: ChatInput = serde_json::from_value(input).map_err(|error| error.to_string())?;
        match template.render(input, SystemTime::UNIX_EPOCH) {
            Err(TemplateError::Unavailable(reason)) => Err(format!("it was not rendered: {reason}")),
            _ => well(&honest),
        }
    }))
}

/// Whether an honest template is still rendered.
fn well(honest: &ChatTemplate) -> Result<(), String> {
    let input = json!({"messages": [{"role": "user", "content": "hello"}], "tools": null, "add_generation_prompt": true, "kwargs": {}});
    let input = serde_json::from_value(input).map_err(|error| error.to_string())?;
    match honest.render(input, SystemTime::UNIX_EPOCH) {
        Ok(text) if text == "hello" => Ok(()),
        other => Err(format!("another template is rendered as {other:?}")),
    }
}

const NAMES: &[&str] = &["a", "b", "c"];

fn body(dice: &mut Dice, out: &mut String, depth: usize, is_wild: bool) {
    for _ in 0..1 + dice.few(if depth == 0 { 8 } else { 4 }) {
        let mut statement = String::new();
        self::statement(dice, &mut statement, depth, is_wild);
        let times = if depth > 1 || !dice.one_in(6) { 1 } else { *dice.pick(&[2, 10, 40]) };
        *out += &statement.repeat(times);
    }
}

fn statement(dice: &mut Dice, out: &mut String, depth: usize, is_wild: bool) {
    let value = expression(dice, 0, is_wild);
    let name = *dice.pick(NAMES);
    match dice.below(if depth > 3 { 4 } else { 8 }) {
        0 => *out += &format!("{{{{ {value} }}}}"),
        1 if is_wild => *out += &format!("{{% set ns.a = {value} %}}"),
        1..4 => *out += &format!("{{% set {name} = {value} %}}"),
        4 | 5 => {
            let over = if is_wild && dice.one_in(3) { format!("range({})", dice.pick(&[10, 1000, 99_000])) } else { value };
            *out += &format!("{{% for {} in {over} %}}", dice.pick(&["m", "m", name]));
            body(dice, out, depth + 1, is_wild);
            *out += "{% endfor %}";
        }
        _ => {
            *out += &format!("{{% if {value} %}}");
            body(dice, out, depth + 1, is_wild);
            *out += "{% else %}";
            body(dice, out, depth + 1, is_wild);
            *out += "{% endif %}";
        }
    }
}

fn expression(dice: &mut Dice, depth: usize, is_wild: bool) -> String {
    if depth > 3 || dice.one_in(4) {
        let leaf =
            *dice.pick(&["messages", "messages", "messages[0].content", "m", "m.content", "m['role']", "tools", "'x'", "'\"\\\\'", "3"]);
        return if dice.one_in(2) { (*dice.pick(NAMES)).to_owned() } else { leaf.to_owned() };
    }
    let one = expression(dice, depth + 1, is_wild);
    let mut other = || expression(dice, depth + 1, is_wild);
    let two = other();
    match dice.below(if is_wild { 26 } else { 15 }) {
        0..3 => format!("({one} ~ {two})"),
        3 | 4 => format!("({one} + {two})"),
        5 => format!("({one})|tojson"),
        6 => format!("({one})|trim"),
        7 => format!("({one})|string"),
        8 => format!("({one})[1:]"),
        9 => format!("({one})[::-1]"),
        10 => format!("({one} or {two})"),
        11 => format!("({one} if {two} else {one})"),
        12 => format!("({one} == {two})"),
        13 => format!("({one})|{}", dice.pick(&["first", "last", "length"])),
        14 => format!("({one}).strip()"),
        15 => format!("({one}).replace('x', {two})"),
        16 => format!("({one})|replace('', {two})"),
        17 => format!("[{one}, {two}]|join({one})"),
        18 => format!("[{one}, {two}]"),
        19 => format!("{{'a': {one}, 'b': {two}}}"),
        20 => format!("'%s%s'|format({one}, {two})"),
        21 => format!("({one})|tojson(indent=16)"),
        22 => format!("({one})|indent({})", dice.pick(&[1, 1000, 1_000_000])),
        23 => format!("({one} * {})", dice.pick(&[2, 1000, 1_000_000])),
        24 => format!("f({one})"),
        _ => "ns.a".to_owned(),
    }
}
