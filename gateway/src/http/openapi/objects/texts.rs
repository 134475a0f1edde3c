//! Routes that read texts and generate none.

use crate::http::openapi::schema::{
    Kind::{Any, Bool, Either, Integer, List, Map, Named, Null, Number, Text, Words},
    Object,
    Part::Own,
    answered, field, sent,
};

pub(super) const OBJECTS: &[Object] = &[
    sent(
        "EmbeddingRequest",
        "Texts to be read.",
        &[Own(&[
            field("model", Text, "The model's name."),
            field(
                "input",
                Either(&[Text, List(&Text), List(&Integer), List(&List(&Integer))]),
                "A text, its token ids, or several of either.",
            )
            .needed(),
            field("encoding_format", Text, "`float` or `base64`."),
            field("dimensions", Integer, "The number of dimensions that are kept."),
            field("truncate_prompt_tokens", Integer, "The most tokens of a text, which is cut there; -1 for the model's limit.").ours(),
        ])],
    ),
    answered(
        "EmbeddingList",
        "A row for each text.",
        &[Own(&[
            field("object", Text, "`list`.").needed(),
            field("data", List(&Named("Embedding")), "The rows.").needed(),
            field("model", Text, "The model.").needed(),
            field("usage", Named("ReadUsage"), "The tokens.").needed(),
        ])],
    ),
    answered(
        "Embedding",
        "A text's row.",
        &[Own(&[
            field("object", Text, "`embedding`.").needed(),
            field("index", Integer, "The text's place.").needed(),
            field("embedding", Either(&[List(&Number), Text]), "The numbers, or in base64 their 32-bit floats.").needed(),
        ])],
    ),
    answered(
        "ReadUsage",
        "The tokens of texts that were read.",
        &[Own(&[
            field("prompt_tokens", Integer, "The tokens.").needed(),
            field("total_tokens", Integer, "The tokens.").needed(),
            field("completion_tokens", Integer, "Always 0."),
        ])],
    ),
    sent(
        "RerankRequest",
        "Documents to be ordered by their relevance to a query.",
        &[Own(&[
            field("model", Text, "The model's name.").ours(),
            field("query", Text, "The query.").needed().ours(),
            field("documents", List(&Either(&[Text, Named("RerankDocument")])), "The documents; or else `texts`.").ours(),
            field("texts", List(&Either(&[Text, Named("RerankDocument")])), "The documents, by TEI's name, for an answer in its form.")
                .ours(),
            field("top_n", Integer, "The number of documents in the answer; all without it.").ours(),
            field("return_documents", Bool, "Whether the answer has the documents' texts; it has, unless this is false.").ours(),
            field("return_text", Bool, "The same, by TEI's name.").ours(),
            field("raw_scores", Bool, "Whether scores are the model's own numbers.").ours(),
            field("max_tokens_per_doc", Integer, "The most tokens of a document, which is cut there.").ours(),
            field(
                "truncate_prompt_tokens",
                Integer,
                "The most tokens of a query and a document, which is cut there; -1 for the model's limit.",
            )
            .ours(),
            field("truncate", Bool, "Whether a document that is too long is cut; it is refused if this is false.").ours(),
        ])],
    ),
    sent("RerankDocument", "A document.", &[Own(&[field("text", Text, "Its text.").needed().ours()])]),
    answered(
        "Ranking",
        "Documents, the most relevant first.",
        &[Own(&[
            field("id", Text, "The answer's id.").needed(),
            field("model", Text, "The model.").needed(),
            field("results", List(&Named("Ranked")), "The documents.").needed(),
            field("usage", Named("ReadUsage"), "The tokens.").needed(),
        ])],
    ),
    answered(
        "Ranked",
        "A document and its relevance.",
        &[Own(&[
            field("index", Integer, "The document's place in the request.").needed(),
            field("relevance_score", Number, "The relevance, from 0 to 1.").needed(),
            field("document", Any, "The document, as an object with `text`."),
        ])],
    ),
    answered(
        "CohereRanking",
        "Documents, the most relevant first, as in Cohere's second API.",
        &[Own(&[
            field("id", Text, "The answer's id.").needed(),
            field("results", List(&Named("Ranked")), "The documents.").needed(),
            field("meta", Map(&Any), "The API's version, and the tokens.").needed(),
        ])],
    ),
    answered(
        "TeiRanked",
        "A document and its relevance, as in TEI.",
        &[Own(&[
            field("index", Integer, "The document's place in the request.").needed(),
            field("score", Number, "The relevance.").needed(),
            field("text", Text, "The document."),
        ])],
    ),
    sent(
        "ScoreRequest",
        "Texts to be compared: one with one or several, or as many with as many.",
        &[Own(&[
            field("model", Text, "The model's name.").ours(),
            field("text_1", Either(&[Text, List(&Text)]), "The first text, or several.").ours(),
            field("text_2", Either(&[Text, List(&Text)]), "The second text, or several.").ours(),
            field("queries", Either(&[Text, List(&Text)]), "The newer name of `text_1`.").ours(),
            field("documents", Either(&[Text, List(&Text)]), "The newer name of `text_2`.").ours(),
            field(
                "truncate_prompt_tokens",
                Integer,
                "The most tokens of a pair, whose second text is cut there; -1 for the model's limit.",
            )
            .ours(),
        ])],
    ),
    answered(
        "ScoreList",
        "The score of each pair.",
        &[Own(&[
            field("id", Text, "The answer's id.").needed(),
            field("object", Text, "`list`.").needed(),
            field("created", Integer, "The time in Unix seconds.").needed(),
            field("model", Text, "The model.").needed(),
            field("data", List(&Named("Score")), "The scores.").needed(),
            field("usage", Named("ReadUsage"), "The tokens.").needed(),
        ])],
    ),
    answered(
        "Score",
        "A pair's score.",
        &[Own(&[
            field("index", Integer, "The pair's place.").needed(),
            field("object", Text, "`score`.").needed(),
            field("score", Number, "The score, from 0 to 1.").needed(),
        ])],
    ),
    sent(
        "ClassifyRequest",
        "Texts to be classified.",
        &[Own(&[
            field("model", Text, "The model's name.").ours(),
            field("input", Either(&[Text, List(&Text)]), "A text, or several.").needed().ours(),
            field("truncate_prompt_tokens", Integer, "The most tokens of a text, which is cut there; -1 for the model's limit.").ours(),
        ])],
    ),
    answered(
        "ClassList",
        "The class of each text.",
        &[Own(&[
            field("id", Text, "The answer's id.").needed(),
            field("object", Text, "`list`.").needed(),
            field("created", Integer, "The time in Unix seconds.").needed(),
            field("model", Text, "The model.").needed(),
            field("data", List(&Named("Class")), "The classes.").needed(),
            field("usage", Named("ReadUsage"), "The tokens.").needed(),
        ])],
    ),
    answered(
        "Class",
        "A text's class.",
        &[Own(&[
            field("index", Integer, "The text's place.").needed(),
            field("label", Either(&[Text, Null]), "The likeliest label, if the model names its labels.").needed(),
            field("probs", List(&Number), "The probability of each label.").needed(),
            field("num_classes", Integer, "The number of labels.").needed(),
        ])],
    ),
    sent(
        "ModerationRequest",
        "Texts to be checked.",
        &[Own(&[
            field("input", Either(&[Text, List(&Text), List(&Named("ModerationPart"))]), "A text, several, or parts of one.").needed(),
            field("side", Words(&["input", "output"]), "The side whose thresholds apply.").not_null().ours(),
        ])],
    ),
    sent("ModerationPart", "A part of a text.", &[Own(&[field("type", Text, "`text`.").needed(), field("text", Text, "The text.")])]),
    answered(
        "Moderation",
        "The safety checks' verdicts.",
        &[Own(&[
            field("id", Text, "The answer's id.").needed(),
            field("model", Text, "`tidemill-safety`.").needed(),
            field("results", List(&Named("ModerationResult")), "A verdict for each text.").needed(),
        ])],
    ),
    answered(
        "ModerationResult",
        "A verdict on one text.",
        &[Own(&[
            field("flagged", Bool, "Whether any category is over its threshold.").needed(),
            field("categories", Map(&Bool), "Whether each category is.").needed(),
            field("category_scores", Map(&Number), "The score of each category, from 0 to 1.").needed(),
        ])],
    ),
    answered(
        "Tokenized",
        "A text's tokens.",
        &[Own(&[
            field("count", Integer, "The number of tokens.").needed(),
            field("max_model_len", Integer, "The longest sequence of the model.").needed(),
            field("tokens", List(&Integer), "The tokens' ids.").needed(),
            field("token_strs", Either(&[List(&Text), Null]), "Each token's text, if that was asked for.").needed(),
        ])],
    ),
    answered(
        "TokenizerInfo",
        "The content of `tokenizer_config.json`, which has further fields.",
        &[Own(&[
            field("tokenizer_class", Text, "The class that the author names."),
            field("chat_template", Any, "The template of chats, or several."),
        ])],
    ),
    answered("Detokenized", "The text of tokens.", &[Own(&[field("prompt", Text, "The text.").needed()])]),
];
