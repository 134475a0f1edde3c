//! Answers of chat completions and completions, the models, and errors.

use crate::http::openapi::schema::{
    Field,
    Kind::{Any, Bool, Either, Integer, List, Map, Named, Null, Number, Text, Words},
    Object,
    Part::Own,
    answered, field,
};

const FINISHES: &[&str] = &["stop", "length", "tool_calls", "content_filter", "function_call"];

/// The fields of a completion, whole or as a chunk.
const COMPLETION: &[Field] = &[
    field("id", Text, "The answer's id.").needed(),
    field("object", Text, "`text_completion`.").needed(),
    field("created", Integer, "The time in Unix seconds.").needed(),
    field("model", Text, "The model that answered.").needed(),
    field("choices", List(&Named("CompletionChoice")), "The answers.").needed(),
    field("usage", Either(&[Named("Usage"), Null]), "The tokens."),
    field("service_tier", Text, "The service class, if the client asked for one."),
];

pub(super) const OBJECTS: &[Object] = &[
    answered(
        "ChatCompletion",
        "An answer to a dialog.",
        &[Own(&[
            field("id", Text, "The answer's id.").needed(),
            field("object", Text, "`chat.completion`.").needed(),
            field("created", Integer, "The time in Unix seconds.").needed(),
            field("model", Text, "The model that answered.").needed(),
            field("choices", List(&Named("ChatChoice")), "The answers.").needed(),
            field("usage", Named("Usage"), "The tokens.").needed(),
            field("prompt_token_ids", List(&Integer), "The prompt's tokens, if they were asked for.").ours(),
            field("service_tier", Text, "The service class, if the client asked for one."),
            field("conversation", Any, "Whether and where the turn was stored, if the client named a conversation.").ours(),
        ])],
    ),
    answered(
        "ChatChoice",
        "One of the answers.",
        &[Own(&[
            field("index", Integer, "The answer's place.").needed(),
            field("message", Named("ChatMessage"), "The message.").needed(),
            field("logprobs", Either(&[Named("ChatLogprobs"), Null]), "The log-probabilities, if they were asked for.").needed(),
            field("finish_reason", Words(FINISHES), "The reason of its end.").needed(),
            field("stop_reason", Any, "The stop text or token, or the finding that ended it.").needed().ours(),
            field("token_ids", List(&Integer), "The tokens, if they were asked for.").ours(),
        ])],
    ),
    answered(
        "ChatMessage",
        "A message of the assistant.",
        &[Own(&[
            field("role", Text, "`assistant`.").needed(),
            field("content", Either(&[Text, Null]), "The text; null if there are only calls.").needed(),
            field("refusal", Either(&[Text, Null]), "The words of a refusal.").needed(),
            field("reasoning", Text, "The reasoning.").ours(),
            field("reasoning_content", Text, "The older name of `reasoning`.").ours(),
            field("tool_calls", List(&Named("CallPart")), "The calls."),
            field("function_call", Named("FunctionPart"), "The call, if the client asked with the older field."),
            field("server_tool_calls", List(&Named("ServerToolCall")), "The calls of tools that ran on the server.").ours(),
        ])],
    ),
    answered(
        "CallPart",
        "A call, or a stream's part of one.",
        &[Own(&[
            field("index", Integer, "The call's place, in streams."),
            field("id", Text, "The call's id, which its result names."),
            field("type", Text, "`function` or `custom`."),
            field("function", Named("FunctionPart"), "The function and its arguments."),
            field("custom", Named("CustomPart"), "The tool and its text."),
        ])],
    ),
    answered(
        "FunctionPart",
        "A function's call.",
        &[Own(&[field("name", Text, "The function's name."), field("arguments", Text, "The arguments, as JSON.").needed()])],
    ),
    answered(
        "CustomPart",
        "A call with text.",
        &[Own(&[field("name", Text, "The tool's name."), field("input", Text, "The text.").needed()])],
    ),
    answered(
        "ServerToolCall",
        "A call of a tool that ran on the server.",
        &[Own(&[
            field("id", Text, "The call's id.").needed().ours(),
            field("type", Text, "`function`.").needed().ours(),
            field("function", Named("FunctionPart"), "The function and its arguments.").needed().ours(),
            field("output", Text, "The result.").needed().ours(),
        ])],
    ),
    answered(
        "ChatLogprobs",
        "The log-probabilities of an answer.",
        &[Own(&[field("content", List(&Named("ChatTokenLogprob")), "One for each token.").needed()])],
    ),
    answered(
        "ChatTokenLogprob",
        "A token's log-probability, and those of likely ones in its place.",
        &[Own(&[
            field("token", Text, "The token's text.").needed(),
            field("logprob", Number, "The log-probability.").needed(),
            field("bytes", List(&Integer), "The token's bytes.").needed(),
            field("top_logprobs", List(&Named("ChatToken")), "The likely tokens.").needed(),
        ])],
    ),
    answered(
        "ChatToken",
        "A likely token.",
        &[Own(&[
            field("token", Text, "The token's text.").needed(),
            field("logprob", Number, "The log-probability.").needed(),
            field("bytes", List(&Integer), "The token's bytes.").needed(),
        ])],
    ),
    answered(
        "ChatChunk",
        "A part of an answer's stream, which `[DONE]` ends.",
        &[Own(&[
            field("id", Text, "The answer's id.").needed(),
            field("object", Text, "`chat.completion.chunk`.").needed(),
            field("created", Integer, "The time in Unix seconds.").needed(),
            field("model", Text, "The model that answers.").needed(),
            field("choices", List(&Named("ChatChunkChoice")), "The parts of the answers.").needed(),
            field("usage", Either(&[Named("Usage"), Null]), "The tokens, if they were asked for."),
            field("prompt_token_ids", List(&Integer), "The prompt's tokens, if they were asked for.").ours(),
            field("service_tier", Text, "The service class, if the client asked for one."),
            field("conversation", Any, "Whether and where the turn was stored, in the last chunk.").ours(),
        ])],
    ),
    answered(
        "ChatChunkChoice",
        "A part of one of the answers.",
        &[Own(&[
            field("index", Integer, "The answer's place.").needed(),
            field("delta", Named("ChatDelta"), "The message's growth.").needed(),
            field("logprobs", Either(&[Named("ChatLogprobs"), Null]), "The log-probabilities, if they were asked for.").needed(),
            field("finish_reason", Either(&[Words(FINISHES), Null]), "The reason of its end, in its last part.").needed(),
            field("stop_reason", Any, "The stop text or token, or the finding that ended it.").ours(),
            field("token_ids", List(&Integer), "The tokens, if they were asked for.").ours(),
        ])],
    ),
    answered(
        "ChatDelta",
        "A message's growth.",
        &[Own(&[
            field("role", Text, "`assistant`."),
            field("content", Text, "Text."),
            field("reasoning", Text, "Reasoning.").ours(),
            field("reasoning_content", Text, "The older name of `reasoning`.").ours(),
            field("tool_calls", List(&Named("CallPart")), "Parts of calls."),
            field("function_call", Named("FunctionPart"), "A part of the call, if the client asked with the older field."),
            field("server_tool_calls", List(&Named("ServerToolCall")), "The calls of tools that ran on the server.").ours(),
        ])],
    ),
    answered("Completion", "A text's continuation, whole or in part: `[DONE]` ends a stream of these.", &[Own(COMPLETION)]),
    answered(
        "CompletionChoice",
        "One of the continuations.",
        &[Own(&[
            field("index", Integer, "The continuation's place.").needed(),
            field("text", Text, "The text.").needed(),
            field("logprobs", Either(&[Named("CompletionLogprobs"), Null]), "The log-probabilities, if they were asked for.").needed(),
            field("finish_reason", Either(&[Words(FINISHES), Null]), "The reason of its end.").needed(),
            field("stop_reason", Any, "The stop text or token, or the finding that ended it.").needed().ours(),
            field("token_ids", List(&Integer), "The tokens, if they were asked for.").ours(),
            field("prompt_token_ids", List(&Integer), "The prompt's tokens, if they were asked for.").ours(),
        ])],
    ),
    answered(
        "CompletionLogprobs",
        "Log-probabilities, with one entry for each token in each list.",
        &[Own(&[
            field("tokens", List(&Text), "The tokens' texts.").needed(),
            field("token_logprobs", List(&Either(&[Number, Null])), "Their log-probabilities.").needed(),
            field("top_logprobs", List(&Either(&[Map(&Number), Null])), "The likely tokens in each place.").needed(),
            field("text_offset", List(&Integer), "Their places in the text, in characters.").needed(),
        ])],
    ),
    answered(
        "Usage",
        "The tokens of an answer.",
        &[Own(&[
            field("prompt_tokens", Integer, "The tokens of the prompt.").needed(),
            field("completion_tokens", Integer, "The tokens of the answer.").needed(),
            field("total_tokens", Integer, "Both together.").needed(),
            field("prompt_tokens_details", Named("PromptTokensDetails"), "Details of the prompt.").needed(),
            field("completion_tokens_details", Named("CompletionTokensDetails"), "Details of the answer.").needed(),
            field("tidemill", Either(&[Named("TidemillUsage"), Null]), "Times, sources and workers; null in running totals.")
                .needed()
                .ours(),
        ])],
    ),
    answered(
        "PromptTokensDetails",
        "Details of a prompt.",
        &[Own(&[field("cached_tokens", Integer, "The tokens whose KV was found.").needed()])],
    ),
    answered(
        "CompletionTokensDetails",
        "Details of an answer.",
        &[Own(&[field("reasoning_tokens", Integer, "The tokens of the reasoning.").needed()])],
    ),
    answered(
        "TidemillUsage",
        "Times, sources and workers of an answer. Of several choices, the slowest counts in each phase.",
        &[Own(&[
            field("tokens", Map(&Integer), "The prompt's tokens, by the source of their KV.").needed().ours(),
            field("queue_ms", Number, "The time in the queue.").needed().ours(),
            field("fetch_ms", Number, "The time of fetching KV.").needed().ours(),
            field("prefill_ms", Number, "The time of prefill.").needed().ours(),
            field("transfer_ms", Number, "The time of moving KV from prefill to decode.").needed().ours(),
            field("tail_ms", Number, "The time of the prompt's last tokens.").needed().ours(),
            field("decode_ms", Number, "The time of the answer's tokens.").needed().ours(),
            field("decode_worker", Text, "The worker that decoded.").needed().ours(),
            field("prefill_worker", Either(&[Text, Null]), "The worker that prefilled, if there was one.").needed().ours(),
            field("preemptions", Integer, "The times that the sequence made room for others.").needed().ours(),
            field("rescues", Integer, "The times that another worker took the sequence over.").needed().ours(),
            field("tokens_drafted", Integer, "The tokens that were guessed.").needed().ours(),
            field("tokens_accepted", Integer, "Those of them that were right.").needed().ours(),
            field("response_cache", Either(&[Bool, Text]), "Whether the answer was cached; `semantic` for that of a similar question.")
                .needed()
                .ours(),
            field("similar_to", Named("SimilarQuestion"), "The similar question whose answer was used.").ours(),
            field("route", Named("RouteUsage"), "The choice of the model, if the server chose it.").ours(),
            field("context", Named("ContextUsage"), "The parts of the dialog that were left out, and those that were added.").ours(),
        ])],
    ),
    answered(
        "SimilarQuestion",
        "The similar question whose answer was used.",
        &[Own(&[
            field("response", Text, "The id of the answer that was made for it.").needed().ours(),
            field("similarity", Number, "The similarity, from 0 to 1.").needed().ours(),
        ])],
    ),
    answered(
        "RouteUsage",
        "The choice of a model.",
        &[Own(&[
            field("asked", Either(&[Text, Null]), "The name in the request.").needed().ours(),
            field("model", Text, "The model that answered.").needed().ours(),
            field("why", Text, "The reason.").needed().ours(),
        ])],
    ),
    answered(
        "ContextUsage",
        "The parts of a dialog that were left out, and those that were added.",
        &[Own(&[
            field("strategy", Text, "The strategy.").needed().ours(),
            field("turns", Integer, "The turns of the whole dialog.").needed().ours(),
            field("turns_left_out", Integer, "The turns that were left out.").needed().ours(),
            field("tokens_left_out", Integer, "The tokens of those.").needed().ours(),
            field("summary", Named("SummaryUsage"), "The summary of what was left out.").ours(),
            field("retrieved", Named("RetrievedUsage"), "The old messages that were retrieved.").ours(),
            field("memory", Named("MemoryUsage"), "What was remembered of the user.").ours(),
            field("ranked", Named("RankedUsage"), "The ranking of old messages and facts.").ours(),
        ])],
    ),
    answered(
        "SummaryUsage",
        "The summary of the turns that were left out.",
        &[Own(&[
            field("state", Text, "`not_needed`, `given`, `awaited`, `late` or `failed`.").needed().ours(),
            field("turns", Integer, "The turns that it covers.").needed().ours(),
            field("tokens", Integer, "Its tokens.").needed().ours(),
        ])],
    ),
    answered(
        "RetrievedUsage",
        "The old messages that were retrieved.",
        &[Own(&[field("messages", List(&Text), "Their ids.").needed().ours(), field("tokens", Integer, "Their tokens.").needed().ours()])],
    ),
    answered(
        "MemoryUsage",
        "What was remembered of the user.",
        &[Own(&[
            field("facts", Integer, "The facts in the prompt.").needed().ours(),
            field("facts_chosen", Integer, "Those that were chosen by what was said last, if not all fit.").ours(),
            field("facts_left_out", Integer, "The facts that did not fit.").needed().ours(),
            field("tokens", Integer, "Their tokens.").needed().ours(),
            field("reason", Text, "The reason why there are none, if the store does not answer.").ours(),
        ])],
    ),
    answered(
        "RankedUsage",
        "The ranking of old messages and facts.",
        &[Own(&[
            field("by", Text, "`words` or `both`: words and vectors.").needed().ours(),
            field("texts", Integer, "The texts.").needed().ours(),
            field("vectors", Integer, "Those whose vectors were there.").needed().ours(),
            field("reason", Text, "The reason why the question was not read, if it was not.").ours(),
        ])],
    ),
    answered(
        "ModelList",
        "The models.",
        &[Own(&[
            field("object", Text, "`list`.").needed(),
            field("data", List(&Named("Model")), "The models and their aliases.").needed(),
            field("models", List(&Named("ModelCard")), "The same, in the form that Codex reads.").needed().ours(),
        ])],
    ),
    answered(
        "Model",
        "A model, or an alias of one.",
        &[Own(&[
            field("id", Text, "The name.").needed(),
            field("object", Text, "`model`.").needed(),
            field("created", Integer, "The time in Unix seconds.").needed(),
            field("owned_by", Text, "`tidemill`.").needed(),
            field("root", Text, "The model that an alias stands for.").needed().ours(),
            field("max_model_len", Integer, "The longest sequence.").needed().ours(),
        ])],
    ),
    answered(
        "ModelCard",
        "A model in the form that Codex reads.",
        &[Own(&[
            field("slug", Text, "The name.").needed().ours(),
            field("display_name", Text, "The name.").needed().ours(),
            field("description", Text, "A description.").needed().ours(),
            field("supported_reasoning_levels", List(&Any), "None.").needed().ours(),
            field("shell_type", Text, "The kind of shell tool.").needed().ours(),
            field("visibility", Text, "`list`.").needed().ours(),
            field("supported_in_api", Bool, "True.").needed().ours(),
            field("priority", Integer, "The place among all.").needed().ours(),
            field("upgrade", Null, "None.").needed().ours(),
            field("base_instructions", Text, "The beginning of an agent's prompt.").needed().ours(),
            field("supports_reasoning_summaries", Bool, "False.").needed().ours(),
            field("support_verbosity", Bool, "False.").needed().ours(),
            field("default_verbosity", Null, "None.").needed().ours(),
            field("apply_patch_tool_type", Null, "None.").needed().ours(),
            field("truncation_policy", Named("TruncationPolicy"), "The most of a tool's output that an agent keeps.").needed().ours(),
            field("supports_parallel_tool_calls", Bool, "Whether an answer may have several calls.").needed().ours(),
            field("context_window", Integer, "The longest sequence.").needed().ours(),
            field("experimental_supported_tools", List(&Any), "None.").needed().ours(),
            field("input_modalities", List(&Text), "`text`.").needed().ours(),
        ])],
    ),
    answered(
        "TruncationPolicy",
        "The most of a tool's output that an agent keeps.",
        &[Own(&[field("mode", Text, "The unit.").needed().ours(), field("limit", Integer, "The number of units.").needed().ours()])],
    ),
    answered("Error", "A failure.", &[Own(&[field("error", Named("ErrorDetails"), "The failure.").needed()])]),
    answered(
        "ErrorDetails",
        "A failure.",
        &[Own(&[
            field("message", Text, "The reason, and what to do.").needed(),
            field("type", Text, "The kind, such as `invalid_request_error`.").needed(),
            field("param", Either(&[Text, Null]), "The field that is wrong.").needed(),
            field("code", Either(&[Text, Null]), "The kind in more detail.").needed(),
            field("appeal_id", Text, "The id with which a client may appeal against a block.").ours(),
        ])],
    ),
    answered(
        "Who",
        "The operator who asks.",
        &[Own(&[
            field("operator", Any, "The operator, or null.").needed().ours(),
            field("sign_in", Bool, "Whether browsers can sign in.").needed().ours(),
        ])],
    ),
];
