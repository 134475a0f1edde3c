//! The fields that all generating routes share.

use crate::http::openapi::schema::{
    Field,
    Kind::{Any, Bool, Either, Integer, List, Map, Named, Number, Text},
    Object,
    Part::Own,
    field, sent,
};

pub(super) const GENERATE: &[Field] = &[
    field(
        "model",
        Text,
        "The model's name or alias; `auto`, or a name of the operator's rules, lets the server choose. Without one: the first.",
    ),
    field("stream", Bool, "Whether the answer comes as server-sent events while it is made."),
    field("stream_options", Named("StreamOptions"), "The extras of a stream."),
    field("n", Integer, "The number of answers to each prompt."),
    field("best_of", Integer, "The number of answers; it must be `n`, if both are given."),
    field("max_tokens", Integer, "The most tokens of an answer."),
    field("max_completion_tokens", Integer, "The most tokens of an answer; the smaller counts if `max_tokens` is given as well."),
    field("min_tokens", Integer, "The least tokens of an answer: until then, it does not end by itself."),
    field("stop", Either(&[Text, List(&Text)]), "Texts at which an answer ends."),
    field("stop_token_ids", List(&Integer), "Tokens at which an answer ends."),
    field("ignore_eos", Bool, "Whether an answer goes on after the model has ended it."),
    field("include_stop_str_in_output", Bool, "Whether the stop text is part of the answer."),
    field("skip_special_tokens", Bool, "Whether special tokens are left out of the text."),
    field("temperature", Number, "The temperature of sampling; 0 takes the likeliest token."),
    field("top_p", Number, "The share of probability from which tokens are drawn, the likeliest first."),
    field("top_k", Integer, "The number of likeliest tokens to draw from; 0 or -1 is all."),
    field("min_p", Number, "The least probability of a token, as a share of the likeliest one's."),
    field("seed", Integer, "The 64 bits that all draws follow from, with a sign or without."),
    field("presence_penalty", Number, "The amount taken from the logit of each token that the answer has."),
    field("frequency_penalty", Number, "The amount taken from a token's logit for each time that the answer has it."),
    field("repetition_penalty", Number, "The divisor of the logits of tokens that the prompt or the answer has."),
    field("logit_bias", Map(&Number), "Amounts that are added to logits, by token id."),
    field("return_token_ids", Bool, "Whether the answer has the ids of its tokens and of the prompt's."),
    field("response_format", Named("ResponseFormat"), "The form of the answer's text."),
    field("structured_outputs", Named("StructuredOutputs"), "A constraint on the answer's text, as in vLLM."),
    field("guided_json", Any, "A JSON Schema, or its text, that the answer matches (vLLM's older field)."),
    field("guided_regex", Text, "An expression that the answer matches (vLLM's older field)."),
    field("guided_choice", List(&Text), "Texts of which the answer is one (vLLM's older field)."),
    field("guided_grammar", Text, "A grammar that the answer follows (vLLM's older field)."),
    field("json_schema", Any, "A JSON Schema, or its text, that the answer matches (SGLang's and llama.cpp's field)."),
    field("regex", Text, "An expression that the answer matches (SGLang's field)."),
    field("ebnf", Text, "A grammar that the answer follows (SGLang's field)."),
    field("grammar", Text, "A grammar that the answer follows (llama.cpp's field)."),
    field("format", Any, "`json`, or a JSON Schema that the answer matches (Ollama's field)."),
    field("nvext", Named("Nvext"), "Dynamo's extensions."),
    field("n_predict", Integer, "The most tokens of an answer; without a limit if negative (llama.cpp's field)."),
    field("cache_salt", Text, "A salt of cached prefixes: only requests with the same one share them."),
    field("service_tier", Text, "The service class."),
    field("safety_settings", List(&Named("SafetySetting")), "Stricter thresholds of safety checks, as in Gemini's API."),
];

pub(super) const OBJECTS: &[Object] = &[
    sent(
        "StreamOptions",
        "The extras of a stream.",
        &[Own(&[
            field("include_usage", Bool, "Whether a last chunk has the usage."),
            field("continuous_usage_stats", Bool, "Whether each chunk has the usage so far.").ours(),
        ])],
    ),
    sent(
        "ResponseFormat",
        "The form of an answer's text.",
        &[Own(&[
            field(
                "type",
                Text,
                "`text`, `json_object` or `json_schema`; `json`, `regex`, `grammar` and the like, as other servers have them.",
            )
            .needed(),
            field("json_schema", Named("JsonSchema"), "The schema, for the type `json_schema`."),
            field("schema", Any, "The schema beside the type, as in llama.cpp, Together and Fireworks.").ours(),
            field("value", Any, "The schema or expression, as in TGI.").ours(),
            field("pattern", Text, "The expression, as in Together.").ours(),
            field("regex", Text, "The expression, as in TensorRT-LLM.").ours(),
            field("grammar", Text, "The grammar, as in Fireworks.").ours(),
            field("ebnf", Text, "The grammar, as in TensorRT-LLM.").ours(),
        ])],
    ),
    sent(
        "JsonSchema",
        "A JSON Schema that an answer matches.",
        &[Own(&[
            field("schema", Any, "The schema itself."),
            field("strict", Bool, "Whether keywords that could only be relaxed are refused."),
        ])],
    ),
    sent(
        "StructuredOutputs",
        "vLLM's constraints: one of them, and the layout of JSON.",
        &[Own(&[
            field("json", Any, "A JSON Schema, or its text.").ours(),
            field("regex", Text, "An expression.").ours(),
            field("choice", List(&Text), "Texts of which the answer is one.").ours(),
            field("grammar", Text, "A grammar.").ours(),
            field("json_object", Bool, "Whether the answer is any JSON object.").ours(),
            field("disable_any_whitespace", Bool, "Whether JSON has no white space.").ours(),
        ])],
    ),
    sent(
        "Nvext",
        "Dynamo's extensions of a request.",
        &[Own(&[
            field("guided_json", Any, "A JSON Schema, or its text.").ours(),
            field("guided_regex", Text, "An expression.").ours(),
            field("guided_choice", List(&Text), "Texts of which the answer is one.").ours(),
            field("guided_grammar", Text, "A grammar.").ours(),
            field("top_k", Integer, "As `top_k` outside.").ours(),
            field("repetition_penalty", Number, "As `repetition_penalty` outside.").ours(),
            field("ignore_eos", Bool, "As `ignore_eos` outside.").ours(),
            field("greed_sampling", Bool, "Whether the likeliest token is always drawn.").ours(),
        ])],
    ),
    sent(
        "SafetySetting",
        "A threshold of one category of safety checks.",
        &[Own(&[
            field("category", Text, "The category's name.").needed().ours(),
            field("threshold", Text, "The threshold's name.").needed().ours(),
        ])],
    ),
];
