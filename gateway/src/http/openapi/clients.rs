//! The operations of the clients' port. Each row of the table of prices has one.

use super::{
    operation::{
        Content::{self, Events, Form, Json, JsonOrEvents, MaybeJson, Nothing},
        Operation, route,
    },
    schema::{
        Field,
        Kind::{Any, Bool, Either, Integer, List, Map, Named, Text, Words},
        field,
    },
};

const PAGE: &[Field] = &[
    field("after", Text, "The id after which the page begins: `last_id` of the page before."),
    field("limit", Integer, "The most entries of the page."),
    field("order", Words(&["asc", "desc"]), "The order by time; the newest come first without it."),
];
const FILES_PAGE: &[Field] = &[
    field("after", Text, "The id after which the page begins: `last_id` of the page before."),
    field("limit", Integer, "The most entries of the page."),
    field("order", Words(&["asc", "desc"]), "The order by time; the newest come first without it."),
    field("purpose", Text, "The purpose of the files that are listed; all without it."),
];
const MODELS_PAGE: &[Field] = &[
    field("limit", Integer, "The most models of the page; all without it."),
    field("after_id", Text, "The model after which the page begins."),
    field("before_id", Text, "The model before which the page ends."),
];
const RESUMED: &[Field] = &[
    field("stream", Bool, "Whether the stream goes on; a stored response comes whole without it."),
    field("starting_after", Integer, "The number of the last event that the client has."),
];
const MODEL: &[Field] = &[field("model", Text, "The model's name or alias; needed if there are several.")];
const ONCE: &[Field] = &[field("Idempotency-Key", Text, "A key under which a repeated request gets the same answer.").ours()];
const LAST: &[Field] = &[field("Last-Event-ID", Text, "The last event that the client has.").ours()];

const CHAT: &str = "Chat";
const COMPLETIONS: &str = "Completions";
const RESPONSES: &str = "Responses";
const MESSAGES: &str = "Messages";
const TEXTS: &str = "Texts";
const CONVERSATIONS: &str = "Conversations";
const MEMORIES: &str = "Memories";
const FILES: &str = "Files";
const BATCHES: &str = "Batches";
const SAFETY: &str = "Safety";
const MODELS: &str = "Models";
pub(super) const SERVER: &str = "Server";

pub(super) const OPERATIONS: &[Operation] = &[
    route("POST", "/v1/chat/completions", "create_chat_completion", CHAT, "Answers a dialog.")
        .headers(ONCE)
        .takes(Json(Named("ChatRequest")))
        .gives(JsonOrEvents(Named("ChatCompletion"), Named("ChatChunk"))),
    route("GET", "/v1/chat/completions/{id}", "resume_chat_completion", CHAT, "Goes on with an answer's stream.")
        .ours()
        .query(RESUMED)
        .headers(LAST)
        .gives(Events(Named("ChatChunk"))),
    route("POST", "/v1/completions", "create_completion", COMPLETIONS, "Continues a text.")
        .headers(ONCE)
        .takes(Json(Named("CompletionRequest")))
        .gives(JsonOrEvents(Named("Completion"), Named("Completion"))),
    route("GET", "/v1/completions/{id}", "resume_completion", COMPLETIONS, "Goes on with an answer's stream.")
        .ours()
        .query(RESUMED)
        .headers(LAST)
        .gives(Events(Named("Completion"))),
    route("POST", "/v1/responses", "create_response", RESPONSES, "Makes a response.")
        .headers(ONCE)
        .takes(Json(Named("ResponseRequest")))
        .gives(JsonOrEvents(Named("ResponseAnswer"), Named("ResponseEvent"))),
    route("GET", "/v1/responses/{id}", "retrieve_response", RESPONSES, "Shows a stored response, or goes on with its stream.")
        .query(RESUMED)
        .headers(LAST)
        .gives(JsonOrEvents(Named("ResponseAnswer"), Named("ResponseEvent"))),
    route("DELETE", "/v1/responses/{id}", "delete_response", RESPONSES, "Deletes a stored response.").gives(Json(Named("Deleted"))),
    route("POST", "/v1/responses/{id}/cancel", "cancel_response", RESPONSES, "Ends a response that is being streamed.")
        .gives(Json(Named("ResponseAnswer"))),
    route("GET", "/v1/responses/{id}/input_items", "list_input_items", RESPONSES, "Lists the items that a response answers.")
        .query(PAGE)
        .gives(Json(Named("ItemList"))),
    route("POST", "/v1/messages", "create_message", MESSAGES, "Answers a dialog, as in Anthropic's API.")
        .headers(ONCE)
        .takes(Json(Named("MessageRequest")))
        .gives(JsonOrEvents(Named("MessageAnswer"), Named("MessageEvent")))
        .fails_with("MessageError"),
    route("GET", "/v1/messages/{id}", "resume_message", MESSAGES, "Goes on with an answer's stream.")
        .ours()
        .query(RESUMED)
        .headers(LAST)
        .gives(Events(Named("MessageEvent"))),
    route("POST", "/v1/messages/count_tokens", "count_tokens", MESSAGES, "Counts the tokens of a dialog.")
        .takes(Json(Named("CountRequest")))
        .gives(Json(Named("TokenCount")))
        .fails_with("MessageError"),
    route("POST", "/v1/embeddings", "create_embeddings", TEXTS, "Reads texts as rows of numbers.")
        .takes(Json(Named("EmbeddingRequest")))
        .gives(Json(Named("EmbeddingList"))),
    route("POST", "/v1/rerank", "rerank", TEXTS, "Orders documents by their relevance to a query.")
        .ours()
        .takes(Json(Named("RerankRequest")))
        .gives(Json(Named("Ranking"))),
    route("POST", "/v2/rerank", "rerank_second", TEXTS, "Orders documents, as in Cohere's second API.")
        .ours()
        .takes(Json(Named("RerankRequest")))
        .gives(Json(Named("CohereRanking"))),
    route("POST", "/rerank", "rerank_bare", TEXTS, "Orders documents, as in vLLM; in TEI's form where they are `texts`.")
        .ours()
        .takes(Json(Named("RerankRequest")))
        .gives(Json(Either(&[Named("Ranking"), List(&Named("TeiRanked"))]))),
    route("POST", "/v1/score", "score", TEXTS, "Scores pairs of texts.")
        .ours()
        .takes(Json(Named("ScoreRequest")))
        .gives(Json(Named("ScoreList"))),
    route("POST", "/score", "score_bare", TEXTS, "Scores pairs of texts, as in vLLM.")
        .ours()
        .takes(Json(Named("ScoreRequest")))
        .gives(Json(Named("ScoreList"))),
    route("POST", "/v1/classify", "classify", TEXTS, "Classifies texts.")
        .ours()
        .takes(Json(Named("ClassifyRequest")))
        .gives(Json(Named("ClassList"))),
    route("POST", "/tokenize", "tokenize", TEXTS, "Turns a prompt or a chat into tokens, as in vLLM.")
        .ours()
        .takes(Json(Named("TokenizeRequest")))
        .gives(Json(Named("Tokenized"))),
    route("POST", "/detokenize", "detokenize", TEXTS, "Turns tokens into text, as in vLLM.")
        .ours()
        .takes(Json(Named("DetokenizeRequest")))
        .gives(Json(Named("Detokenized"))),
    route("GET", "/tokenizer_info", "tokenizer_info", TEXTS, "Gives the settings of a model's tokenizer, as in vLLM.")
        .ours()
        .query(MODEL)
        .gives(Json(Named("TokenizerInfo"))),
    route("GET", "/v1/conversations", "list_conversations", CONVERSATIONS, "Lists the caller's conversations.")
        .ours()
        .query(PAGE)
        .gives(Json(Named("ConversationList"))),
    route("POST", "/v1/conversations", "create_conversation", CONVERSATIONS, "Stores a conversation.")
        .takes(MaybeJson(Named("ConversationRequest")))
        .gives(Json(Named("Conversation"))),
    route(
        "GET",
        "/v1/conversations/export",
        "export_conversations",
        CONVERSATIONS,
        "Writes all of the caller's conversations as JSON lines.",
    )
    .ours()
    .gives(Content::Text("application/jsonl")),
    route("GET", "/v1/conversations/{id}", "retrieve_conversation", CONVERSATIONS, "Shows a conversation.")
        .gives(Json(Named("Conversation"))),
    route("POST", "/v1/conversations/{id}", "update_conversation", CONVERSATIONS, "Changes a conversation's own fields.")
        .takes(MaybeJson(Named("ConversationChange")))
        .gives(Json(Named("Conversation"))),
    route("DELETE", "/v1/conversations/{id}", "delete_conversation", CONVERSATIONS, "Deletes a conversation.")
        .gives(Json(Named("Deleted"))),
    route("POST", "/v1/conversations/{id}/branch", "branch_conversation", CONVERSATIONS, "Stores a conversation with the same beginning.")
        .ours()
        .takes(MaybeJson(Named("BranchRequest")))
        .gives(Json(Named("Conversation"))),
    route("GET", "/v1/conversations/{id}/export", "export_conversation", CONVERSATIONS, "Writes a conversation as a JSON line.")
        .ours()
        .gives(Content::Text("application/jsonl")),
    route("GET", "/v1/conversations/{id}/items", "list_items", CONVERSATIONS, "Lists a conversation's items.")
        .query(PAGE)
        .gives(Json(Named("ItemList"))),
    route("POST", "/v1/conversations/{id}/items", "create_items", CONVERSATIONS, "Adds items to a conversation.")
        .takes(Json(Named("ItemsRequest")))
        .gives(Json(Named("ItemList"))),
    route("GET", "/v1/conversations/{id}/items/{item}", "retrieve_item", CONVERSATIONS, "Shows an item.").gives(Json(Named("Item"))),
    route("DELETE", "/v1/conversations/{id}/items/{item}", "delete_item", CONVERSATIONS, "Deletes an item.")
        .gives(Json(Named("Conversation"))),
    route("GET", "/v1/memories", "list_memories", MEMORIES, "Lists what is remembered of the user.")
        .ours()
        .query(PAGE)
        .gives(Json(Named("MemoryList"))),
    route("POST", "/v1/memories", "create_memory", MEMORIES, "Remembers a fact.")
        .ours()
        .takes(Json(Named("MemoryRequest")))
        .gives(Json(Named("Memory"))),
    route("DELETE", "/v1/memories", "delete_memories", MEMORIES, "Forgets all facts.").ours().gives(Json(Named("MemoriesDeleted"))),
    route("GET", "/v1/memories/{id}", "retrieve_memory", MEMORIES, "Shows a fact.").ours().gives(Json(Named("Memory"))),
    route("DELETE", "/v1/memories/{id}", "delete_memory", MEMORIES, "Forgets a fact.").ours().gives(Json(Named("Deleted"))),
    route("GET", "/v1/files", "list_files", FILES, "Lists files.").query(FILES_PAGE).gives(Json(Named("FileList"))),
    route("POST", "/v1/files", "create_file", FILES, "Stores a file of requests.")
        .takes(Form(Named("FileForm")))
        .gives(Json(Named("FileObject"))),
    route("GET", "/v1/files/{id}", "retrieve_file", FILES, "Shows a file.").gives(Json(Named("FileObject"))),
    route("DELETE", "/v1/files/{id}", "delete_file", FILES, "Deletes a file.").gives(Json(Named("Deleted"))),
    route("GET", "/v1/files/{id}/content", "retrieve_file_content", FILES, "Reads a file.")
        .gives(Content::Bytes("application/octet-stream")),
    route("GET", "/v1/batches", "list_batches", BATCHES, "Lists batches.").query(FILES_PAGE).gives(Json(Named("BatchList"))),
    route("POST", "/v1/batches", "create_batch", BATCHES, "Has a file of requests answered within a day.")
        .takes(Json(Named("BatchRequest")))
        .gives(Json(Named("Batch"))),
    route("GET", "/v1/batches/{id}", "retrieve_batch", BATCHES, "Shows a batch.").gives(Json(Named("Batch"))),
    route("POST", "/v1/batches/{id}/cancel", "cancel_batch", BATCHES, "Ends a batch.").gives(Json(Named("Batch"))),
    route("POST", "/v1/moderations", "create_moderation", SAFETY, "Checks texts.")
        .takes(Json(Named("ModerationRequest")))
        .gives(Json(Named("Moderation"))),
    route("POST", "/v1/appeals", "create_appeal", SAFETY, "Appeals against a block.")
        .ours()
        .takes(Json(Named("AppealRequest")))
        .gives(Json(Named("Appeal"))),
    route("POST", "/v1/feedback", "create_feedback", SAFETY, "Takes a user's opinion of an answer.")
        .ours()
        .takes(Json(Named("FeedbackRequest")))
        .gives(Json(Named("Feedback"))),
    route("GET", "/v1/models", "list_models", MODELS, "Lists the models.").query(MODELS_PAGE).gives(Json(Named("ModelList"))),
    route("GET", "/v1/models/{*id}", "retrieve_model", MODELS, "Shows a model.").gives(Json(Named("Model"))),
    route("GET", "/", "greet", SERVER, "Says that this is Tidemill.").ours().gives(Content::Text("text/plain")),
    route("GET", "/health", "health", SERVER, "Answers while the process lives.").ours().gives(Nothing),
    route("GET", "/ready", "ready", SERVER, "Answers when a request would succeed.").ours().gives(Nothing),
    route("GET", "/openapi.json", "describe", SERVER, "Gives this document.").ours().gives(Json(Map(&Any))),
    route("GET", "/console", "console", SERVER, "Shows a web page.").ours().gives(Content::Text("text/html")),
    route("GET", "/console/", "console_with_slash", SERVER, "Shows a web page.").ours().gives(Content::Text("text/html")),
    route("GET", "/console/{asset}", "console_asset", SERVER, "Gives a file of the web page.").ours().gives(Content::Text("text/plain")),
    route("GET", "/console/who", "console_who", SERVER, "Shows who is signed in.").ours().gives(Json(Named("Who"))),
];
