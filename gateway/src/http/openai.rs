//! OpenAI's request and response bodies, with vLLM's usual extensions. Unknown fields are ignored, as both do.

use super::{context::ContextField, conversations::turn::ConversationField};
use crate::{
    generation::piece::{FinishReason, StopReason},
    metrics::usage::Usage,
};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use tidemill_proto::{block::Token, tokens::Tokens};

#[derive(Debug, Deserialize)]
pub struct ChatRequest {
    pub messages: Vec<Message>,
    #[serde(default)]
    pub logprobs: Option<bool>,
    #[serde(default)]
    pub top_logprobs: Option<u32>,
    #[serde(default)]
    pub add_generation_prompt: Option<bool>,
    #[serde(default)]
    pub chat_template_kwargs: Option<minijinja::Value>,
    #[serde(default)]
    pub tools: Option<Vec<ChatTool>>,
    #[serde(default)]
    pub tool_choice: Option<serde_json::Value>,
    #[serde(default)]
    pub parallel_tool_calls: Option<bool>,
    /// Names of tools that run on the server.
    #[serde(default)]
    pub server_tools: Option<Vec<String>>,
    /// The older form of `tools`.
    #[serde(default)]
    pub functions: Option<Vec<FunctionDefinition>>,
    /// The older form of `tool_choice`.
    #[serde(default)]
    pub function_call: Option<serde_json::Value>,
    #[serde(default)]
    pub reasoning_effort: Option<String>,
    /// vLLM's limit on the tokens of thought.
    #[serde(default)]
    pub thinking_token_budget: Option<i64>,
    /// The stored conversation that the messages continue, and to which they and the answer are added.
    #[serde(default)]
    pub conversation: Option<ConversationField>,
    /// The way in which a dialog that is too long is fitted into the window.
    #[serde(default)]
    pub context: Option<ContextField>,
    /// Whether the answer to a similar question is acceptable.
    #[serde(default)]
    pub semantic_cache: Option<bool>,
}

#[derive(Debug, Deserialize)]
pub struct ChatTool {
    pub r#type: String,
    #[serde(default)]
    pub function: Option<FunctionDefinition>,
    #[serde(default)]
    pub custom: Option<serde_json::Value>,
}

#[derive(Debug, Deserialize)]
pub struct FunctionDefinition {
    pub name: String,
    #[serde(default)]
    pub description: Option<String>,
    #[serde(default)]
    pub parameters: Option<serde_json::Value>,
    #[serde(default)]
    pub strict: Option<bool>,
}

/// A message. Fields that only the template knows are kept unchanged.
#[derive(Debug, Deserialize)]
pub struct Message {
    pub role: String,
    #[serde(default)]
    pub content: Option<Content>,
    #[serde(default)]
    pub reasoning: Option<String>,
    /// The older name of `reasoning`.
    #[serde(default)]
    pub reasoning_content: Option<String>,
    #[serde(default)]
    pub tool_calls: Option<Vec<ChatToolCall>>,
    /// The older form of `tool_calls`.
    #[serde(default)]
    pub function_call: Option<ChatFunctionCall>,
    #[serde(default)]
    pub refusal: Option<String>,
    #[serde(default)]
    pub tool_call_id: Option<String>,
    #[serde(default)]
    pub name: Option<String>,
    #[serde(flatten)]
    pub others: BTreeMap<String, minijinja::Value>,
}

/// A call in the history.
#[derive(Debug, Deserialize)]
pub struct ChatToolCall {
    #[serde(default)]
    pub id: Option<String>,
    #[serde(default)]
    pub function: Option<ChatFunctionCall>,
    #[serde(default)]
    pub custom: Option<ChatCustomCall>,
}

#[derive(Debug, Deserialize)]
pub struct ChatCustomCall {
    pub name: String,
    #[serde(default)]
    pub input: String,
}

#[derive(Debug, Deserialize)]
pub struct ChatFunctionCall {
    pub name: String,
    /// The arguments: JSON as text, as in OpenAI's API; some clients send the JSON itself.
    #[serde(default)]
    pub arguments: Option<serde_json::Value>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string or a list of content parts")]
pub enum Content {
    Text(String),
    Parts(Vec<ContentPart>),
    /// A single part: some clients omit the list.
    Part(TypedPart),
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a content part")]
pub enum ContentPart {
    Text(String),
    Typed(TypedPart),
}

#[derive(Debug, Deserialize)]
pub struct TypedPart {
    pub r#type: String,
    #[serde(default)]
    pub text: Option<String>,
    #[serde(default)]
    pub refusal: Option<String>,
}

#[derive(Debug, Deserialize)]
pub struct CompletionRequest {
    pub prompt: Prompt,
    #[serde(default)]
    pub echo: Option<bool>,
    #[serde(default)]
    pub logprobs: Option<u32>,
    #[serde(default)]
    pub suffix: Option<String>,
    #[serde(default)]
    pub thinking_token_budget: Option<i64>,
}

#[derive(Debug, Deserialize)]
#[serde(untagged, expecting = "expected a string, a list of token ids, or a list of either")]
pub enum Prompt {
    Text(String),
    Tokens(Vec<Token>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<Token>>),
}

#[derive(Debug, Serialize)]
pub struct ChatResponse {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChoice>,
    pub usage: Usage,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Tokens>,
    /// The tier in which it was served, if the client asked for one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_tier: Option<String>,
    /// Whether and where the turn was stored, if the client named a conversation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conversation: Option<serde_json::Value>,
}

#[derive(Debug, Serialize)]
pub struct ChatChoice {
    pub index: u32,
    pub message: ChatMessage,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: ChatFinish,
    pub stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<Token>>,
}

/// The end of a chat's choice.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub enum ChatFinish {
    Usual(FinishReason),
    /// A value of the older fields.
    Older(&'static str),
}

#[derive(Debug, Serialize)]
pub struct ChatMessage {
    pub role: &'static str,
    /// The text; `null` if the answer consists of calls.
    pub content: Option<String>,
    pub refusal: Option<String>,
    #[serde(flatten)]
    pub thought: Option<Thought>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<CallPart>,
    /// The call, if the client asked with the older field.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<FunctionPart>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub server_tool_calls: Vec<ServerToolCall>,
}

/// Reasoning, under both names that clients look for.
#[derive(Debug, Serialize)]
pub struct Thought {
    pub reasoning: String,
    pub reasoning_content: String,
}

/// A whole call, or a stream's part of one.
#[derive(Debug, Serialize)]
pub struct CallPart {
    /// The call's index, only in streams.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub index: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub r#type: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function: Option<FunctionPart>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub custom: Option<CustomPart>,
}

/// The part of a custom tool's call.
#[derive(Debug, Serialize)]
pub struct CustomPart {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub input: String,
}

#[derive(Debug, Serialize)]
pub struct FunctionPart {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    pub arguments: String,
}

/// A call of a tool that ran on the server.
#[derive(Debug, Serialize)]
pub struct ServerToolCall {
    pub id: String,
    pub r#type: &'static str,
    pub function: FunctionPart,
    pub output: String,
}

#[derive(Debug, Serialize)]
pub struct ChatChunk {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<ChatChunkChoice>,
    /// Present (perhaps `null`) in every chunk when the client asked for usage.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Tokens>,
    /// The tier in which it was served, if the client asked for one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_tier: Option<String>,
    /// Whether and where the turn was stored: in the last chunk, if the client named a conversation.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub conversation: Option<serde_json::Value>,
}

#[derive(Debug, Serialize)]
pub struct ChatChunkChoice {
    pub index: u32,
    pub delta: ChatDelta,
    pub logprobs: Option<ChatLogprobs>,
    pub finish_reason: Option<ChatFinish>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<Token>>,
}

#[derive(Debug, Default, Serialize)]
pub struct ChatDelta {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<&'static str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<String>,
    #[serde(flatten)]
    pub thought: Option<Thought>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<CallPart>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub function_call: Option<FunctionPart>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub server_tool_calls: Vec<ServerToolCall>,
}

#[derive(Debug, Default, Serialize)]
pub struct ChatLogprobs {
    pub content: Vec<ChatTokenLogprob>,
}

#[derive(Debug, Serialize)]
pub struct ChatTokenLogprob {
    #[serde(flatten)]
    pub token: ChatToken,
    pub top_logprobs: Vec<ChatToken>,
}

#[derive(Debug, Serialize)]
pub struct ChatToken {
    pub token: String,
    pub logprob: f32,
    pub bytes: Vec<u8>,
}

/// A whole answer, or (with partial choices) a chunk of a stream.
#[derive(Debug, Serialize)]
pub struct CompletionResponse {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub model: String,
    pub choices: Vec<CompletionChoice>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Option<Usage>>,
    /// The tier in which it was served, if the client asked for one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub service_tier: Option<String>,
}

#[derive(Debug, Serialize)]
pub struct CompletionChoice {
    pub index: u32,
    pub text: String,
    pub logprobs: Option<CompletionLogprobs>,
    pub finish_reason: Option<FinishReason>,
    pub stop_reason: Option<StopReason>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_ids: Option<Vec<Token>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub prompt_token_ids: Option<Tokens>,
}

/// Log-probabilities, with one entry per token in each list.
#[derive(Debug, Default, Serialize)]
pub struct CompletionLogprobs {
    pub tokens: Vec<String>,
    pub token_logprobs: Vec<Option<f32>>,
    pub top_logprobs: Vec<Option<BTreeMap<String, f32>>>,
    /// Positions of tokens, in characters from the start of the choice's text.
    pub text_offset: Vec<usize>,
}

/// A page of models, with the fields of OpenAI's and of Anthropic's lists.
#[derive(Debug, Serialize)]
pub struct ModelList {
    pub object: &'static str,
    pub data: Vec<Model>,
    pub models: Vec<ModelCard>,
    pub first_id: Option<String>,
    pub last_id: Option<String>,
    pub has_more: bool,
}

/// A model, with the fields of OpenAI's and of Anthropic's.
#[derive(Clone, Debug, Serialize)]
pub struct Model {
    pub id: String,
    pub object: &'static str,
    pub created: u64,
    pub r#type: &'static str,
    pub display_name: String,
    /// The time as text.
    pub created_at: String,
    pub owned_by: &'static str,
    pub root: String,
    /// The longest sequence (vLLM's extension).
    pub max_model_len: u32,
}

/// A model in the form that Codex requests (`models` beside `data`): it rejects a list whose entries lack one of these fields.
#[derive(Debug, Serialize)]
pub struct ModelCard {
    pub slug: String,
    pub display_name: String,
    pub description: String,
    pub supported_reasoning_levels: [(); 0],
    pub shell_type: &'static str,
    pub visibility: &'static str,
    pub supported_in_api: bool,
    pub priority: i32,
    pub upgrade: Option<()>,
    pub base_instructions: &'static str,
    pub supports_reasoning_summaries: bool,
    pub support_verbosity: bool,
    pub default_verbosity: Option<()>,
    pub apply_patch_tool_type: Option<()>,
    pub truncation_policy: TruncationPolicy,
    pub supports_parallel_tool_calls: bool,
    pub context_window: u32,
    pub experimental_supported_tools: [(); 0],
    pub input_modalities: [&'static str; 1],
}

/// The maximum length of a tool's output that an agent keeps.
#[derive(Debug, Serialize)]
pub struct TruncationPolicy {
    pub mode: &'static str,
    pub limit: u32,
}
