//! A model that calls one tool and is done, for coding agents to be tried against. Nothing here runs by itself:
//!
//! ```sh
//! AGENTS_HTTP=127.0.0.1:8123 cargo test --release -p tidemill-coordinator --test scenarios agents -- --ignored
//! ```
//!
//! serves it for as long as `AGENTS_SECONDS` (600) says. Point an agent at it, and ask it for anything.

use crate::support::{Cluster, Script, engine_of, fixture};
use std::{env, fs, path::Path, sync::Arc, time::Duration};
use tidemill_gateway::text::TextModel;
use tidemill_proto::message::{EngineInfo, RoleInfo};

/// As Qwen's models have it, in short.
const TEMPLATE: &str = "\
{%- if tools %}{{- '<|im_start|>system\\nCall tools as <tool_call>{\"name\": …, \"arguments\": {…}}</tool_call>. Tools:\\n' }}
{%- for tool in tools %}{{- tool | tojson }}{{- '\\n' }}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
    {%- for call in message.tool_calls or [] %}{{- '<tool_call>' + (call.function | tojson) + '</tool_call>' }}{%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}";

/// Agents name the tool that runs a command differently. Its name as the prompt shows it, and what to call it with.
const TOOLS: [(&str, &str); 4] = [
    ("Bash", r#"{"command": "echo agent-$((6*7))", "description": "Answer"}"#),
    ("exec_command", r#"{"cmd": "echo agent-$((6*7))"}"#),
    ("shell_command", r#"{"command": "echo agent-$((6*7))"}"#),
    ("shell", r#"{"command": ["bash", "-c", "echo agent-$((6*7))"]}"#),
];

/// What the model says to a prompt.
fn reply(prompt: &str) -> String {
    if prompt.contains("agent-42") {
        return "The command printed agent-42.".into();
    }
    let tool = TOOLS.iter().find(|(name, _)| prompt.contains(&format!("\"name\": \"{name}\"")));
    match tool {
        Some((name, arguments)) => format!("I look.\n<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>"),
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

/// Ids to ids: the reply, and the end of the turn.
fn replies(model: &Path) -> impl Fn(&[u32]) -> Vec<u32> + Send + Sync + use<> {
    let model = TextModel::load(model).unwrap();
    move |prompt| {
        let reply = reply(&model.tokenizer.decode(prompt, false));
        [model.tokenizer.encode(&reply, false).unwrap(), model.eos_tokens()].concat()
    }
}
