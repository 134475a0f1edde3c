//! The body of `/v1/messages` as a dialog.
//!
//! The same conversation must give the same prompt at every turn, or the KV pool is of no use. So parts that change from request to request
//! without affecting the meaning are left out: the billing header that an agent puts before its system prompt, `cache_control`, signatures.

use crate::{
    dialog::{Dialog, Message, ToolCall, ToolChoice, thinking::ReasoningWish},
    requests::{
        error::ApiError,
        fields::{self, row::Door},
        generate::{GenerateRequest, StopField},
        options::Options,
        parse::JsonBody,
        structured::{self, Wish},
        thinking::{self, Thinking},
    },
    serving::{
        gateway::{Gateway, route::RouteRequest},
        rounds::{self, Rounds},
    },
    text::tool::Tool,
};
use serde::Deserialize;
use serde_json::Value;
use std::{collections::HashMap, sync::Arc, time::Instant};

/// The start of a first system block that differs in every request.
const BILLING_HEADER: &str = "x-anthropic-billing-header:";
/// The start of failed calls' outputs.
const ERROR: &str = "Error";
/// The maximum number of messages in one request.
const MESSAGES_MAX: usize = 100_000;

#[derive(Debug, Deserialize)]
struct Body {
    messages: Vec<Turn>,
    #[serde(default)]
    max_tokens: Option<u32>,
    #[serde(default)]
    system: Option<Content>,
    #[serde(default)]
    stop_sequences: Option<Vec<String>>,
    #[serde(default)]
    tools: Option<Vec<Value>>,
    /// Names of tools that run on the server.
    #[serde(default)]
    server_tools: Option<Vec<String>>,
    #[serde(default)]
    tool_choice: Option<Choice>,
    #[serde(default)]
    thinking: Option<Thinking>,
    #[serde(default)]
    output_config: Option<OutputConfig>,
    /// The older form of `output_config.format`.
    #[serde(default)]
    output_format: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Turn {
    role: String,
    #[serde(default)]
    content: Option<Content>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of content blocks")]
enum Content {
    Text(String),
    Blocks(Vec<Block>),
}

/// A block of any type; each type has some of these fields.
#[derive(Debug, Deserialize)]
struct Block {
    r#type: String,
    #[serde(default)]
    text: Option<String>,
    #[serde(default)]
    thinking: Option<String>,
    #[serde(default)]
    id: Option<String>,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    input: Option<Value>,
    #[serde(default)]
    tool_use_id: Option<String>,
    #[serde(default)]
    content: Option<Content>,
    #[serde(default)]
    is_error: Option<bool>,
}

#[derive(Debug, Deserialize)]
struct Choice {
    r#type: String,
    #[serde(default)]
    name: Option<String>,
    #[serde(default)]
    disable_parallel_tool_use: Option<bool>,
}

#[derive(Debug, Default, Deserialize)]
struct OutputConfig {
    #[serde(default)]
    effort: Option<String>,
    #[serde(default)]
    format: Option<Value>,
}

/// The gateway of the requested model, the dialog and options, and the tools that run on the server for it.
type ToAnswer = (Arc<Gateway>, Dialog, Options, Option<Rounds>);

/// Reads a body whose dialog is to be answered.
pub(super) fn to_answer(gateway: &Gateway, arrived: Instant, body: JsonBody) -> Result<ToAnswer, ApiError> {
    let (gateway, dialog, mut request, rest) = understand(gateway, body, Some("/v1/messages"))?;
    match rest.max_tokens {
        None => return Err(ApiError::invalid("max_tokens", "`max_tokens` is missing: how long may the answer be?")),
        Some(0) => return Err(ApiError::invalid("max_tokens", "`max_tokens` is 0: it must be at least 1")),
        Some(max_tokens) => thinking::leaves_room(dialog.reasoning.budget, max_tokens)?,
    }
    request.n = None;
    request.best_of = None;
    request.max_completion_tokens = None;
    request.stop = rest.stop_sequences.map(StopField::Many);
    let asked = {
        let mut hearing = gateway.hearing();
        let judge = &mut |schema: &Value, terms| hearing.schema(schema, terms);
        structured::grammar_beside(&mut request, rest.format, judge)?
    };
    let mut options = gateway.options(arrived, request)?;
    if let Some(asked) = asked {
        options.constrain(asked, gateway.text());
    }
    // Always so in this API: agents ask for as many tokens as their own models write.
    options.max_tokens_shrinks = true;
    if dialog.continues && !rest.server_tools.is_empty() {
        return Err(ApiError::invalid(
            "server_tools",
            "`server_tools`: the last message must be the user's, not the beginning of the answer",
        ));
    }
    let rounds = Rounds::new(&gateway, "messages", rest.server_tools, &dialog, &options);
    Ok((gateway, dialog, options, rounds))
}

/// The gateway of the requested model, the dialog, the common fields, and the rest of the body.
type Understood = (Arc<Gateway>, Dialog, GenerateRequest, Rest);

/// Reads a body. `path` is the endpoint's, if the dialog is to be answered.
pub(super) fn understand(gateway: &Gateway, body: JsonBody, path: Option<&'static str>) -> Result<Understood, ApiError> {
    let request = fields::generating(Door::Messages, &body)?;
    let (model, service_tier) = (request.model.as_deref(), request.service_tier.as_deref());
    let gateway = gateway.route(RouteRequest { path, model, service_tier, body: body.fields() })?;
    let body: Body = body.into()?;
    if body.messages.is_empty() || body.messages.len() > MESSAGES_MAX {
        return Err(ApiError::invalid("messages", format!("`messages` must hold 1 to {MESSAGES_MAX} messages")));
    }
    let parallel = !body.tool_choice.as_ref().and_then(|choice| choice.disable_parallel_tool_use).unwrap_or(false);
    // A final assistant message is the beginning of the answer.
    let continues = body.messages.last().is_some_and(|last| last.role == "assistant");
    let system = body.system.map(system).transpose()?.filter(|text| !text.is_empty());
    let mut messages: Vec<_> =
        system.map(|text| Message { role: "system".into(), content: Some(text), ..Message::default() }).into_iter().collect();
    let mut names = HashMap::new();
    for (place, turn) in body.messages.into_iter().enumerate() {
        turns(place, turn, &mut names, &mut messages)?;
    }
    let output = body.output_config.unwrap_or_default();
    // Without the field, thinking is off.
    let (thinks, budget) = body.thinking.map_or(Ok((false, None)), |thinking| thinking.check())?;
    let here = rounds::offered(&gateway, &body.server_tools.unwrap_or_default())?;
    let server_tools = here.iter().map(|tool| tool.name.clone()).collect();
    let dialog = Dialog {
        messages,
        tools: tools(body.tools.unwrap_or_default())?.into_iter().chain(here).collect(),
        tool_choice: tool_choice(body.tool_choice)?,
        parallel,
        reasoning: ReasoningWish {
            effort: thinking::effort("output_config.effort", output.effort)?,
            enable_thinking: Some(thinks),
            budget,
            ..ReasoningWish::default()
        },
        continues,
        ..Dialog::default()
    };
    let format = format(output.format, body.output_format)?;
    let rest = Rest { server_tools, max_tokens: body.max_tokens, stop_sequences: body.stop_sequences, format };
    Ok((gateway, dialog, request, rest))
}

#[derive(Debug)]
pub(super) struct Rest {
    server_tools: Vec<String>,
    max_tokens: Option<u32>,
    stop_sequences: Option<Vec<String>>,
    format: Option<Wish>,
}

/// Reads the answer's format, which has an older field.
fn format(format: Option<Value>, older: Option<Value>) -> Result<Option<Wish>, ApiError> {
    match (format, older) {
        (None, None) => Ok(None),
        (Some(format), None) => structured::flat_format("output_config.format", "output_config.format.schema", &format),
        (None, Some(format)) => structured::flat_format("output_format", "output_format.schema", &format),
        (Some(_), Some(_)) => {
            let message = "`output_format` and `output_config.format` are both given: leave the older one, `output_format`, out";
            Err(ApiError::invalid("output_format", message))
        }
    }
}

/// Reads a body as far as that depends on no model.
#[cfg(test)]
pub(in crate::http) fn read(body: JsonBody) -> Result<(), ApiError> {
    let body: Body = body.into()?;
    tool_choice(body.tool_choice)?;
    format(body.output_config.and_then(|config| config.format), body.output_format).map(drop)
}

fn system(content: Content) -> Result<String, ApiError> {
    match content {
        Content::Text(text) if text.starts_with(BILLING_HEADER) => {
            Ok(text.split_once('\n').map_or(String::new(), |(_, rest)| rest.to_owned()))
        }
        Content::Text(text) => Ok(text),
        Content::Blocks(mut blocks) => {
            if blocks.first().is_some_and(|first| first.text.as_deref().is_some_and(|text| text.starts_with(BILLING_HEADER))) {
                blocks.remove(0);
            }
            text("system", Content::Blocks(blocks))
        }
    }
}

/// Joins text blocks by line breaks, as in chat.
fn text(param: &str, content: Content) -> Result<String, ApiError> {
    match content {
        Content::Text(text) => Ok(text),
        Content::Blocks(blocks) => Ok(blocks.into_iter().map(|block| plain(param, block)).collect::<Result<Vec<_>, _>>()?.join("\n")),
    }
}

fn plain(param: &str, block: Block) -> Result<String, ApiError> {
    match (block.r#type.as_str(), block.text) {
        ("text", Some(text)) => Ok(text),
        ("text", None) => Err(ApiError::invalid(param, format!("`{param}`: a block of type `text` needs `text`"))),
        ("image", _) => Err(ApiError::no_images(param)),
        (other, _) => {
            Err(ApiError::invalid(param, format!("`{param}`: blocks of type `{other}` are not supported: this model reads text")))
        }
    }
}

/// Converts a client's message into the turns that templates know: outputs of tools are turns of their own.
fn turns(place: usize, turn: Turn, names: &mut HashMap<String, String>, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let param = format!("messages[{place}].content");
    let blocks = match turn.content {
        Some(Content::Text(text)) => vec![Block::text(text)],
        Some(Content::Blocks(blocks)) => blocks,
        None if turn.role == "assistant" => Vec::new(),
        None => return Err(ApiError::invalid(param.clone(), format!("`{param}` is missing: only an assistant may say nothing"))),
    };
    match turn.role.as_str() {
        "assistant" => answer(&param, blocks, names, messages)?,
        "user" | "system" => {
            let mut said: Option<String> = None;
            let message = |text| Message { role: turn.role.clone(), content: Some(text), ..Message::default() };
            for block in blocks {
                if block.r#type == "tool_result" {
                    messages.extend(said.take().map(message));
                    messages.push(result(&param, block, names)?);
                    continue;
                }
                let text = plain(&param, block)?;
                said = Some(said.map_or_else(|| text.clone(), |said| said + "\n" + &text));
            }
            messages.extend(said.map(message));
        }
        other => {
            let message = format!("`messages[{place}].role` is `{other}`: it must be `user`, `assistant` or `system`");
            return Err(ApiError::invalid(format!("messages[{place}].role"), message));
        }
    }
    Ok(())
}

/// Converts an assistant's message into turns: several, if tools ran on the server for it. Signatures concern only the server that signed;
/// here they are ignored.
fn answer(param: &str, blocks: Vec<Block>, names: &mut HashMap<String, String>, messages: &mut Vec<Message>) -> Result<(), ApiError> {
    let new = || Message { role: "assistant".into(), ..Message::default() };
    let (mut message, before) = (new(), messages.len());
    let is_silent = |message: &Message| message.content.is_none() && message.reasoning.is_none() && message.tool_calls.is_empty();
    for block in blocks {
        match block.r#type.as_str() {
            "thinking" => *message.reasoning.get_or_insert_default() += &block.thinking.unwrap_or_default(),
            "redacted_thinking" => {}
            "tool_use" | "server_tool_use" => {
                let (Some(id), Some(name)) = (block.id, block.name) else {
                    return Err(ApiError::invalid(param, format!("`{param}`: a block of type `{}` needs `id` and `name`", block.r#type)));
                };
                names.insert(id.clone(), name.clone());
                let arguments = block.input.unwrap_or_else(|| Value::Object(serde_json::Map::new()));
                message.tool_calls.push(ToolCall { id, name, arguments });
            }
            "server_tool_result" => {
                if !is_silent(&message) {
                    messages.push(std::mem::replace(&mut message, new()));
                }
                messages.push(result(param, block, names)?);
            }
            _ => *message.content.get_or_insert_default() += &plain(param, block)?,
        }
    }
    // After a tool's output, an answer may have been cut.
    if messages.len() == before || !is_silent(&message) {
        messages.push(message);
    }
    Ok(())
}

fn result(param: &str, block: Block, names: &HashMap<String, String>) -> Result<Message, ApiError> {
    let id = block
        .tool_use_id
        .ok_or_else(|| ApiError::invalid(param, format!("`{param}`: a block of type `{}` needs `tool_use_id`", block.r#type)))?;
    let content = block.content.map_or(Ok(String::new()), |content| text(param, content))?;
    let content = if block.is_error == Some(true) { failed(content) } else { content };
    Ok(Message { role: "tool".into(), content: Some(content), name: names.get(&id).cloned(), tool_call_id: Some(id), ..Message::default() })
}

/// Marks the output of a failed tool as an error in words, unless it already starts so.
fn failed(content: String) -> String {
    match content.trim_start().get(..ERROR.len()) {
        Some(begin) if begin.eq_ignore_ascii_case(ERROR) => content,
        _ if content.trim().is_empty() => ERROR.to_owned(),
        _ => format!("{ERROR}: {content}"),
    }
}

/// Reads tools. Those that Anthropic would run itself are skipped: they have a type, and no schema.
fn tools(tools: Vec<Value>) -> Result<Vec<Tool>, ApiError> {
    let ours = tools.into_iter().enumerate().filter(|(_, tool)| matches!(tool["type"].as_str(), None | Some("custom")));
    let tool = |(place, tool): (usize, Value)| {
        let name = tool["name"].as_str().map(str::to_owned);
        let name = name.ok_or_else(|| ApiError::invalid(format!("tools[{place}].name"), format!("`tools[{place}]` needs `name`")))?;
        let parameters = match tool.get("input_schema") {
            Some(Value::Object(schema)) => Some(Value::Object(schema.clone())),
            None | Some(Value::Null) => None,
            Some(_) => {
                let param = format!("tools[{place}].input_schema");
                return Err(ApiError::invalid(param.clone(), format!("`{param}` must be an object")));
            }
        };
        let description = tool["description"].as_str().map(str::to_owned);
        Ok(Tool { name, description, parameters, strict: tool["strict"].as_bool().unwrap_or(false) })
    };
    ours.map(tool).collect()
}

fn tool_choice(choice: Option<Choice>) -> Result<ToolChoice, ApiError> {
    let Some(Choice { r#type, name, .. }) = choice else { return Ok(ToolChoice::Auto) };
    match (r#type.as_str(), name) {
        ("auto", _) => Ok(ToolChoice::Auto),
        ("any", _) => Ok(ToolChoice::Required),
        ("none", _) => Ok(ToolChoice::None),
        ("tool", Some(name)) => Ok(ToolChoice::Named(name)),
        ("tool", None) => Err(ApiError::invalid("tool_choice.name", "`tool_choice` of type `tool` needs `name`")),
        (other, _) => Err(ApiError::invalid(
            "tool_choice.type",
            format!("`tool_choice.type` is `{other}`: it must be `auto`, `any`, `tool` or `none`"),
        )),
    }
}

impl Block {
    fn text(text: String) -> Self {
        Self {
            r#type: "text".into(),
            text: Some(text),
            thinking: None,
            id: None,
            name: None,
            input: None,
            tool_use_id: None,
            content: None,
            is_error: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn content(value: Value) -> Content {
        serde_json::from_value(value).unwrap()
    }

    fn all(messages: Value) -> Result<Vec<Message>, ApiError> {
        let (mut names, mut out) = (HashMap::new(), Vec::new());
        for (place, turn) in serde_json::from_value::<Vec<Turn>>(messages).unwrap().into_iter().enumerate() {
            turns(place, turn, &mut names, &mut out)?;
        }
        Ok(out)
    }

    #[test]
    fn the_system_prompt_is_the_same_at_every_turn() {
        let blocks = |header: &str, cache: Value| {
            let blocks = json!([{"type": "text", "text": header}, {"type": "text", "text": "You help."},
                {"type": "text", "text": "Briefly.", "cache_control": cache}]);
            system(content(blocks)).unwrap()
        };
        let first = blocks("x-anthropic-billing-header: cc_version=2.1; cch=00001;", json!({"type": "ephemeral"}));
        assert_eq!(first, "You help.\nBriefly.");
        assert_eq!(first, blocks("x-anthropic-billing-header: cc_version=2.1; cch=9f3a2;", Value::Null));
        assert_eq!(system(content(json!("x-anthropic-billing-header: a\nYou help."))).unwrap(), "You help.");
        assert_eq!(blocks("Hello", Value::Null), "Hello\nYou help.\nBriefly.", "any other block stays");
    }

    #[test]
    fn results_are_turns_and_an_answer_is_one() {
        let messages = all(json!([
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "hm", "signature": ""}, {"type": "redacted_thinking", "data": "x"},
                {"type": "text", "text": "Look."}, {"type": "tool_use", "id": "t1", "name": "look", "input": {"z": 1, "a": 2}}]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "t1", "content": [{"type": "text", "text": "sun"}]},
                {"type": "tool_result", "tool_use_id": "t2", "content": "rain", "is_error": true},
                {"type": "text", "text": "So?"}]},
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Go"},
        ]));
        let messages = messages.unwrap();
        let told: Vec<_> = messages.iter().map(|message| (message.role.as_str(), message.content.as_deref().unwrap_or("-"))).collect();
        let expected = [
            ("user", "a\nb"),
            ("assistant", "Look."),
            ("tool", "sun"),
            ("tool", "Error: rain"),
            ("user", "So?"),
            ("system", "Be brief."),
            ("user", "Go"),
        ];
        assert_eq!(told, expected);
        assert_eq!(
            (messages[1].reasoning.as_deref(), messages[2].name.as_deref(), messages[3].name.as_deref()),
            (Some("hm"), Some("look"), None)
        );
        assert_eq!(messages[1].tool_calls, [ToolCall { id: "t1".into(), name: "look".into(), arguments: json!({"z": 1, "a": 2}) }]);
    }

    #[test]
    fn an_assistant_may_say_nothing() {
        for nothing in
            [json!({"role": "assistant"}), json!({"role": "assistant", "content": null}), json!({"role": "assistant", "content": []})]
        {
            let messages = all(json!([nothing])).unwrap();
            assert_eq!((messages.len(), messages[0].content.as_deref().unwrap_or_default()), (1, ""));
        }
    }

    #[test]
    fn a_failed_call_says_so_once() {
        for (content, told) in [("rain", "Error: rain"), ("error: rain", "error: rain"), (" ", "Error"), ("é", "Error: é")] {
            assert_eq!(failed(content.into()), told);
        }
    }

    #[test]
    fn an_answer_that_tools_ran_for_is_the_turns_that_it_was() {
        let called = |id: &str| json!({"type": "server_tool_use", "id": id, "name": "look", "input": {}});
        let returned = |id: &str| json!({"type": "server_tool_result", "tool_use_id": id, "content": "sun"});
        let content = json!([called("1"), called("2"), returned("1"), returned("2"), {"type": "text", "text": "Sunny."}]);
        let messages = all(json!([{"role": "assistant", "content": content}])).unwrap();
        let told: Vec<_> = messages.iter().map(|message| (message.role.as_str(), message.tool_calls.len())).collect();
        assert_eq!(told, [("assistant", 2), ("tool", 0), ("tool", 0), ("assistant", 0)]);
        assert_eq!(messages[1].name.as_deref(), Some("look"));
        let cut = all(json!([{"role": "assistant", "content": [called("1"), returned("1")]}])).unwrap();
        assert_eq!(cut.len(), 2);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        for (turn, param, word) in [
            (json!({"role": "robot", "content": "x"}), "messages[0].role", "robot"),
            (json!({"role": "user", "content": [{"type": "image", "source": {}}]}), "messages[0].content", "image input is not supported"),
            (json!({"role": "user", "content": [{"type": "document"}]}), "messages[0].content", "document"),
            (json!({"role": "user", "content": null}), "messages[0].content", "missing"),
            (json!({"role": "user", "content": [{"type": "tool_result"}]}), "messages[0].content", "tool_use_id"),
            (json!({"role": "assistant", "content": [{"type": "tool_use", "id": "x"}]}), "messages[0].content", "name"),
        ] {
            let error = all(json!([turn])).unwrap_err();
            assert_eq!(error.body()["error"]["param"], param);
            assert!(error.message().contains(word), "{}", error.message());
        }
    }

    #[test]
    fn tools_and_choices() {
        let found = tools(vec![
            json!({"type": "web_search_20250305", "name": "web_search"}),
            json!({"name": "look", "description": "Looks.", "input_schema": {"type": "object"}, "cache_control": {"type": "ephemeral"}}),
        ]);
        let expected =
            Tool { name: "look".into(), description: Some("Looks.".into()), parameters: Some(json!({"type": "object"})), strict: false };
        assert_eq!(found.unwrap(), [expected]);
        let choice = |value: Value| tool_choice(serde_json::from_value(value).unwrap());
        assert_eq!(choice(json!({"type": "any"})), Ok(ToolChoice::Required));
        assert_eq!(choice(json!({"type": "tool", "name": "look"})), Ok(ToolChoice::Named("look".into())));
        assert!(choice(json!({"type": "tool"})).is_err() && choice(json!({"type": "some"})).is_err());
    }
}
