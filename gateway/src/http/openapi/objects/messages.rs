//! Anthropic's messages.

use super::generate::GENERATE;
use crate::http::openapi::schema::{
    Field,
    Kind::{Any, Bool, Either, Integer, List, Map, Named, Null, Text},
    Object, Part,
    Part::{Own, Shared},
    answered, field, sent,
};

const BODY: &[Field] = &[
    field("messages", List(&Named("Turn")), "The dialog so far. A last turn of the assistant is the beginning of the answer.").needed(),
    field("system", Either(&[Text, List(&Named("Block"))]), "The system prompt."),
    field("stop_sequences", List(&Text), "Texts at which the answer ends."),
    field("tools", List(&Map(&Any)), "The tools that the model may call."),
    field("server_tools", List(&Text), "Names of tools that run on the server.").ours(),
    field("tool_choice", Named("ToolChoice"), "The choice of a tool."),
    field("thinking", Named("Thinking"), "The wish for reasoning: without it, there is none."),
    field("output_config", Named("OutputConfig"), "The effort, and the form of the answer."),
    field("output_format", Map(&Any), "The older form of `output_config.format`."),
];

const SHARED: Part = Shared {
    fields: GENERATE,
    standard: &["model", "stream", "temperature", "top_p", "top_k", "service_tier"],
    without: &["n", "best_of", "max_tokens", "max_completion_tokens", "n_predict", "stop"],
};

pub(super) const OBJECTS: &[Object] = &[
    sent(
        "MessageRequest",
        "A dialog to be answered.",
        &[Own(BODY), Own(&[field("max_tokens", Integer, "The most tokens of the answer.").needed()]), SHARED],
    ),
    sent("CountRequest", "A dialog whose tokens are counted.", &[Own(BODY), Own(&[field("max_tokens", Integer, "Of no effect.")]), SHARED]),
    sent(
        "Turn",
        "A message of a dialog.",
        &[Own(&[
            field("role", Text, "`user`, `assistant` or `system`.").needed(),
            field("content", Either(&[Text, List(&Named("Block"))]), "The text, or blocks."),
        ])],
    ),
    sent(
        "Block",
        "A block of a message. Which fields count depends on its type.",
        &[Own(&[
            field("type", Text, "`text`, `thinking`, `tool_use`, `tool_result`, and others.").needed(),
            field("text", Text, "The text."),
            field("thinking", Text, "The assistant's reasoning."),
            field("id", Text, "The id of a call."),
            field("name", Text, "The tool's name."),
            field("input", Any, "The arguments of a call."),
            field("tool_use_id", Text, "The call that a result answers."),
            field("content", Either(&[Text, List(&Named("Block"))]), "The result of a call."),
            field("is_error", Bool, "Whether the call failed."),
        ])],
    ),
    sent(
        "ToolChoice",
        "The choice of a tool.",
        &[Own(&[
            field("type", Text, "`auto`, `any`, `tool` or `none`.").needed(),
            field("name", Text, "The tool's name, for the type `tool`."),
            field("disable_parallel_tool_use", Bool, "Whether an answer has one call at most."),
        ])],
    ),
    sent(
        "Thinking",
        "The wish for reasoning.",
        &[Own(&[
            field("type", Text, "`enabled`, `adaptive` or `disabled`.").needed(),
            field("budget_tokens", Integer, "The most tokens of reasoning, at least 1024, for the type `enabled`."),
        ])],
    ),
    sent(
        "OutputConfig",
        "The effort, and the form of an answer.",
        &[Own(&[
            field("effort", Text, "The length of the model's reasoning."),
            field("format", Map(&Any), "A JSON Schema with `type` and `schema`."),
        ])],
    ),
    answered(
        "MessageAnswer",
        "An answer.",
        &[Own(&[
            field("id", Text, "The answer's id.").needed(),
            field("type", Text, "`message`.").needed(),
            field("role", Text, "`assistant`.").needed(),
            field("model", Text, "The model that answered.").needed(),
            field("content", List(&Named("AnswerBlock")), "The blocks.").needed(),
            field("stop_reason", Either(&[Text, Null]), "`end_turn`, `max_tokens`, `stop_sequence`, `tool_use` or `refusal`.").needed(),
            field("stop_sequence", Either(&[Text, Null]), "The stop sequence at which it ended.").needed(),
            field("stop_details", Any, "The finding that ended a refused answer, and the way to appeal."),
            field("usage", Named("MessageUsage"), "The tokens.").needed(),
        ])],
    ),
    answered(
        "AnswerBlock",
        "A block of an answer.",
        &[Own(&[
            field("type", Text, "`text`, `thinking`, `tool_use`, `server_tool_use` or `server_tool_result`.").needed(),
            field("text", Text, "The text."),
            field("thinking", Text, "The reasoning."),
            field("id", Text, "The id of a call."),
            field("name", Text, "The tool's name."),
            field("input", Any, "The arguments of a call."),
            field("tool_use_id", Text, "The call that a result answers."),
            field("content", Any, "The result of a call that ran on the server."),
        ])],
    ),
    answered(
        "MessageUsage",
        "The tokens of an answer.",
        &[Own(&[
            field("input_tokens", Integer, "The tokens of the prompt whose KV was computed.").needed(),
            field("cache_creation_input_tokens", Integer, "Always 0.").needed(),
            field("cache_read_input_tokens", Integer, "The tokens of the prompt whose KV was found.").needed(),
            field("output_tokens", Integer, "The tokens of the answer.").needed(),
            field("tidemill", Either(&[Named("TidemillUsage"), Null]), "Times, sources and workers.").ours(),
        ])],
    ),
    answered(
        "MessageEvent",
        "An event of an answer's stream. Its further fields depend on its type.",
        &[Own(&[field("type", Text, "`message_start`, `content_block_delta`, and others.").needed()])],
    ),
    answered("TokenCount", "The number of a dialog's tokens.", &[Own(&[field("input_tokens", Integer, "The tokens.").needed()])]),
    answered(
        "MessageError",
        "A failure, as Anthropic's API has it.",
        &[Own(&[field("type", Text, "`error`.").needed(), field("error", Named("MessageErrorDetails"), "The failure.").needed()])],
    ),
    answered(
        "MessageErrorDetails",
        "A failure.",
        &[Own(&[
            field("type", Text, "The kind, such as `invalid_request_error`.").needed(),
            field("message", Text, "The reason, and what to do.").needed(),
            field("appeal_id", Text, "The id with which a client may appeal against a block.").ours(),
        ])],
    ),
];
