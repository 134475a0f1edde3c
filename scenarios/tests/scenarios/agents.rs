//! A model that calls a tool a number of times and then answers, for trying out coding agents. It only runs on request:
//!
//! ```sh
//! AGENTS_HTTP=127.0.0.1:8123 AGENTS_TURNS=20 cargo test --release -p tidemill-scenarios --test scenarios agents -- --ignored --nocapture
//! ```
//!
//! serves it for `AGENTS_SECONDS` (600), with `AGENTS_TURNS` (1) calls. Point an agent at it, and give it any task. Each prompt's length is
//! printed, with the length of the beginning that it shares with an earlier prompt and its answer: the part that a cache of KV blocks would
//! have.

use crate::support::{Cluster, Script, engine_of, fixture};
use std::{
    env, fs,
    path::Path,
    sync::{Arc, Mutex},
    time::Duration,
};
use tidemill_gateway::text::TextModel;
use tidemill_proto::{
    block::BLOCK_TOKENS,
    message::{EngineInfo, RoleInfo},
};

/// The template of Qwen's models, shortened.
const TEMPLATE: &str = "\
{%- if tools %}{{- '<|im_start|>system\\nCall tools as <tool_call>{\"name\": …, \"arguments\": {…}}</tool_call>. Tools:\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// The names that agents have for the tool that runs a command: as the prompt shows it, and the arguments to call it with.
const TOOLS: [(&str, &str); 5] = [
    ("Bash", r#"{"command": "echo agent-$((6*7))", "description": "Answer"}"#),
    ("exec_command", r#"{"cmd": "echo agent-$((6*7))"}"#),
    ("shell_command", r#"{"command": "echo agent-$((6*7))"}"#),
    ("shell", r#"{"command": ["bash", "-c", "echo agent-$((6*7))"]}"#),
    ("run_commands", r#"{"commands": ["echo agent-$((6*7))"]}"#),
];

/// The model's answer to a prompt, which contains the result of each call so far.
fn reply(prompt: &str, turns: usize) -> String {
    let called = prompt.matches("agent-42").count();
    if called >= turns {
        return "The command printed agent-42.".into();
    }
    let tool = TOOLS.iter().find(|(name, _)| prompt.contains(&format!("\"name\": \"{name}\"")));
    match tool {
        Some((name, arguments)) => {
            // Agents give up when a call repeats itself.
            let arguments = arguments.replace("echo ", &format!("echo {called} "));
            format!("I look.\n<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
        }
        None => "There is no tool that runs a command.".into(),
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "serves agents until its time is up"]
async fn a_model_for_agents_to_try() {
    let dir = tempfile::tempdir().unwrap();
    for name in ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"] {
        fs::copy(fixture("qwen3").join(name), dir.path().join(name)).unwrap();
    }
    fs::write(dir.path().join("chat_template.jinja"), TEMPLATE).unwrap();
    let http = env::var("AGENTS_HTTP").ok().map(|addr| addr.parse().unwrap());
    let cluster = Cluster::start(|flags| {
        flags.http = http.or(flags.http);
        flags.model = vec![dir.path().into()];
    });
    let cluster = cluster.await;
    let role = RoleInfo::Decode(EngineInfo { context_tokens: 1 << 20, device_blocks: 1 << 17, ..engine_of(dir.path()) });
    let script = Script { reply_to: Some(Arc::new(replies(dir.path()))), ..Script::reply(&[]) };
    let _worker = cluster.join("decode-0", role, script).await;
    let seconds = env::var("AGENTS_SECONDS").map_or(600, |seconds| seconds.parse().unwrap());
    eprintln!("serving `tiny` at {}/v1 for {seconds} s", cluster.url);
    tokio::time::sleep(Duration::from_secs(seconds)).await;
    cluster.stop().await;
}

/// Maps the ids of a prompt to those of the reply and the end of the turn.
fn replies(model: &Path) -> impl Fn(&[u32]) -> Vec<u32> + Send + Sync + use<> {
    let model = TextModel::load(model).unwrap();
    let turns = env::var("AGENTS_TURNS").map_or(1, |turns| turns.parse().unwrap());
    let known = Mutex::new(Vec::<Vec<u32>>::new());
    move |prompt| {
        let reply = reply(&model.tokenizer.decode(prompt, false), turns);
        let reply = [model.tokenizer.encode(&reply, false).unwrap(), model.eos_tokens()].concat();
        let mut known = known.lock().unwrap();
        let alike = |known: &Vec<u32>| prompt.iter().zip(known).take_while(|(a, b)| a == b).count() / BLOCK_TOKENS * BLOCK_TOKENS;
        let cached = known.iter().map(alike).max().unwrap_or(0);
        eprintln!("prompt {}: {} tokens, {cached} known ({} %)", known.len() + 1, prompt.len(), 100 * cached / prompt.len().max(1));
        known.push([prompt, &reply].concat());
        reply
    }
}
