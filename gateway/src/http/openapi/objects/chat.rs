//! Chat completions and completions: what clients send.

use super::generate::GENERATE;
use crate::http::openapi::schema::{
    Field,
    Kind::{Any, Bool, Either, Integer, List, Named, Number, Text, Words},
    Object,
    Part::{Own, Shared},
    field, sent,
};

const CHAT: &[Field] = &[
    field("messages", List(&Named("Message")), "The dialog so far.").needed(),
    field("logprobs", Bool, "Whether the answer has log-probabilities of its tokens."),
    field("top_logprobs", Integer, "The number of likely tokens beside each token, with `logprobs`."),
    field("add_generation_prompt", Bool, "Whether the template begins an answer after the last message.").ours(),
    field("chat_template_kwargs", Any, "Variables of the model's chat template.").ours(),
    field("tools", List(&Named("Tool")), "The tools that the model may call."),
    field("tool_choice", Any, "`auto`, `none`, `required`, or an object that names a tool or lists those allowed."),
    field("parallel_tool_calls", Bool, "Whether one answer may have several calls."),
    field("server_tools", List(&Text), "Names of tools that run on the server.").ours(),
    field("functions", List(&Named("FunctionDefinition")), "The older form of `tools`."),
    field("function_call", Any, "The older form of `tool_choice`."),
    field("reasoning_effort", Text, "The length of the model's reasoning: in the template's words, or as a number of tokens."),
    field("thinking_token_budget", Integer, "The most tokens of the model's reasoning; 0 is none.").ours(),
    field(
        "conversation",
        Either(&[Text, Named("ConversationTurn")]),
        "The stored conversation that the messages continue: its id, `new`, or an object.",
    )
    .ours(),
    field(
        "context",
        Either(&[Words(STRATEGIES), Named("ContextWish")]),
        "The way in which a dialog that is too long is fitted into the window.",
    )
    .ours(),
    field("semantic_cache", Bool, "Whether the answer to a similar question is acceptable.").ours(),
];

const STRATEGIES: &[&str] = &["none", "slide", "steps", "summary"];

pub(super) const OBJECTS: &[Object] = &[
    sent(
        "ChatRequest",
        "A dialog to be answered.",
        &[
            Own(CHAT),
            Own(&[field("memory", Bool, "Whether the prompt has what is remembered of the user.").ours()]),
            Shared {
                fields: GENERATE,
                standard: &[
                    "model",
                    "stream",
                    "stream_options",
                    "n",
                    "max_tokens",
                    "max_completion_tokens",
                    "stop",
                    "temperature",
                    "top_p",
                    "seed",
                    "presence_penalty",
                    "frequency_penalty",
                    "logit_bias",
                    "response_format",
                    "service_tier",
                ],
                without: &[],
            },
        ],
    ),
    sent(
        "Message",
        "A message of a dialog. Further fields are given to the model's template unchanged.",
        &[Own(&[
            field("role", Text, "`system`, `developer`, `user`, `assistant`, `tool`, or a role that the template knows.").needed(),
            field(
                "content",
                Either(&[Text, List(&Either(&[Text, Named("ContentPart")])), Named("ContentPart")]),
                "The text, or its parts.",
            ),
            field("reasoning", Text, "The assistant's reasoning before it spoke.").ours(),
            field("reasoning_content", Text, "The older name of `reasoning`.").ours(),
            field("tool_calls", List(&Named("ToolCall")), "The calls that the assistant made."),
            field("function_call", Named("FunctionCall"), "The older form of `tool_calls`."),
            field("refusal", Text, "The words of an assistant that refused."),
            field("tool_call_id", Text, "The call that a tool's message answers."),
            field("name", Text, "The name of a tool or of a participant."),
        ])],
    ),
    sent(
        "ContentPart",
        "A part of a message's text. Images and sounds are refused.",
        &[Own(&[
            field("type", Text, "`text`, `input_text`, `output_text` or `refusal`.").needed(),
            field("text", Text, "The text."),
            field("refusal", Text, "The words of a refusal."),
        ])],
    ),
    sent(
        "ToolCall",
        "A call in the history.",
        &[Own(&[
            field("id", Text, "The call's id, which its result names."),
            field("function", Named("FunctionCall"), "The call of a function."),
            field("custom", Named("CustomCall"), "The call of a tool that takes text."),
        ])],
    ),
    sent(
        "FunctionCall",
        "A call of a function.",
        &[Own(&[
            field("name", Text, "The function's name.").needed(),
            field("arguments", Any, "The arguments: JSON as text, or the JSON itself."),
        ])],
    ),
    sent(
        "CustomCall",
        "A call of a tool that takes text.",
        &[Own(&[field("name", Text, "The tool's name.").needed(), field("input", Text, "The text.").not_null()])],
    ),
    sent(
        "Tool",
        "A tool that the model may call.",
        &[Own(&[
            field("type", Text, "`function` or `custom`.").needed(),
            field("function", Named("FunctionDefinition"), "The function."),
            field("custom", Any, "The tool that takes text: `name`, `description`, `format`."),
        ])],
    ),
    sent(
        "FunctionDefinition",
        "A function that the model may call.",
        &[Own(&[
            field("name", Text, "The function's name.").needed(),
            field("description", Text, "The description that the model is given."),
            field("parameters", Any, "The JSON Schema of the arguments: an object."),
            field("strict", Bool, "Whether calls match the schema in all that it says."),
        ])],
    ),
    sent(
        "ConversationTurn",
        "A chat's turn in a stored conversation.",
        &[
            Own(&[
                field("id", Text, "The conversation's id; without one, a new conversation.").ours(),
                field("replace", Text, "The first of the items that are removed when the new answer has ended.").ours(),
                field("regenerate", Bool, "Whether the last answer is removed.").not_null().ours(),
            ]),
            super::stored::CHANGES,
        ],
    ),
    sent(
        "ContextWish",
        "The way in which a dialog that is too long is fitted into the window.",
        &[Own(&[
            field("strategy", Words(STRATEGIES), "The strategy.").ours(),
            field("turns_max", Integer, "The most turns that are given.").ours(),
            field("window_share", Number, "The share of the window that a prompt may fill before turns are left out.").ours(),
            field("retrieve", Integer, "The most old messages that are retrieved.").ours(),
            field("retrieve_tokens", Integer, "The most tokens of those.").ours(),
        ])],
    ),
    sent(
        "CompletionRequest",
        "A text to be continued.",
        &[
            Own(&[
                field(
                    "prompt",
                    Either(&[Text, List(&Text), List(&Integer), List(&List(&Integer))]),
                    "The text, its token ids, or several of either.",
                )
                .needed(),
                field("echo", Bool, "Whether the answer begins with the prompt."),
                field("logprobs", Integer, "The number of likely tokens beside each token."),
                field("suffix", Text, "The text after the gap that the answer fills, for models whose tokenizer has marks for that."),
                field("thinking_token_budget", Integer, "Refused: a completion knows no reasoning.").ours(),
            ]),
            Shared {
                fields: GENERATE,
                standard: &[
                    "model",
                    "stream",
                    "stream_options",
                    "n",
                    "best_of",
                    "max_tokens",
                    "stop",
                    "temperature",
                    "top_p",
                    "seed",
                    "presence_penalty",
                    "frequency_penalty",
                    "logit_bias",
                ],
                without: &[],
            },
        ],
    ),
    sent(
        "TokenizeRequest",
        "A prompt, or a chat, to be turned into tokens.",
        &[
            Own(&[
                field("model", Text, "The model's name.").ours(),
                field("prompt", Text, "The prompt.").ours(),
                field("add_special_tokens", Bool, "Whether special tokens are added: by default for a prompt.").ours(),
                field("return_token_strs", Bool, "Whether the answer has each token's text.").ours(),
                field("messages", List(&Named("Message")), "The dialog, in place of a prompt.").ours(),
            ]),
            // The fields of a chat that shape its prompt.
            Shared { fields: CHAT, standard: &[], without: &["messages"] },
        ],
    ),
    sent(
        "DetokenizeRequest",
        "Tokens to be turned into text.",
        &[Own(&[field("model", Text, "The model's name.").ours(), field("tokens", List(&Integer), "The tokens' ids.").needed().ours()])],
    ),
];
