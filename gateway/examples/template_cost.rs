//! The time of rendering a chat by templates of published models: in this process, in a process with limits, and as a coordinator does it, which
//! uses this process for plain templates and short chats.
//!
//! `cargo run --release -p tidemill-gateway --example template_cost`

use serde_json::{Value, json};
use std::{
    env,
    error::Error,
    fs,
    path::Path,
    sync::Arc,
    time::{Duration, Instant, SystemTime},
};
use tidemill_gateway::{
    features::templates::{self, Templates},
    text::{
        config::ModelConfig,
        template::{ChatInput, ChatTemplate, Confinement},
    },
};

const MEASURED: Duration = Duration::from_secs(2);

/// The template that Llama 3 was published with, and one of chats in ChatML.
const LLAMA3: &str = "{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}";
const CHATML: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nYou are a helpful assistant<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}";

fn main() -> Result<(), Box<dyn Error>> {
    if env::args_os().nth(1).is_some_and(|argument| argument == templates::ARGUMENT) {
        return Ok(templates::run()?);
    }
    let process: Arc<dyn Confinement> = Arc::new(Templates::new(env::current_exe()?));
    let config = ModelConfig { bos_token: Some("<|begin_of_text|>".into()), ..ModelConfig::default() };
    let llama31 = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/templates/llama31.jinja");
    println!("{:9} {:>9} {:>8} {:>12} {:>14}", "template", "turns", "here, µs", "confined, µs", "coordinator, µs");
    for (name, source) in [("llama3", LLAMA3.to_owned()), ("chatml", CHATML.to_owned()), ("llama3.1", fs::read_to_string(llama31)?)] {
        let here = ChatTemplate::new(source.clone(), &config)?;
        // Macros are not plain: this one is never called.
        let always = format!("{{% macro unused() %}}{{% endmacro %}}{source}");
        let confined = ChatTemplate::within(always, &config, Arc::clone(&process))?;
        let coordinator = ChatTemplate::within(source, &config, Arc::clone(&process))?;
        for turns in [1, 9, 199] {
            let said = "The tide fills the pool, and the wheel turns as long as there is water in it; then everybody waits for the sea to come back.";
            let message = |turn: usize| json!({"role": if turn.is_multiple_of(2) { "user" } else { "assistant" }, "content": said});
            let messages: Vec<Value> = (0..turns).map(message).collect();
            let input = json!({"messages": messages, "tools": null, "add_generation_prompt": true, "kwargs": {}});
            let input: ChatInput = serde_json::from_value(input)?;
            let times = [&here, &confined, &coordinator].map(|template| time(template, &input));
            println!("{name:9} {turns:>9} {:>8.1} {:>12.1} {:>14.1}", times[0], times[1], times[2]);
        }
    }
    Ok(())
}

/// The microseconds of a rendering.
fn time(template: &ChatTemplate, input: &ChatInput) -> f64 {
    let (began, mut count) = (Instant::now(), 0);
    while began.elapsed() < MEASURED {
        let input = ChatInput { messages: input.messages.clone(), add_generation_prompt: true, ..ChatInput::default() };
        template.render(input, SystemTime::now()).expect("these messages suit the template");
        count += 1;
    }
    began.elapsed().as_secs_f64() * 1e6 / f64::from(count)
}
