//! The price of each route of the clients' port: one table. What a route does for its caller must be paid for, by a key at least, or be so
//! little that anybody may have it; the row says why. `scenarios` walks over the table, and asks each route in ways that should cost it.

/// The least that a caller needs for a route's answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Price {
    Nothing,
    /// A key, whose quota may be used up.
    Key,
    /// A key, and one request of its quota.
    Request,
    /// A key, one request and all tokens.
    Tokens,
}

#[derive(Debug)]
pub struct Row {
    pub method: &'static str,
    pub path: &'static str,
    pub price: Price,
    /// The reason of a route that takes no quota.
    pub why: &'static str,
}

pub const TABLE: &[Row] = &[
    free("/", "a few bytes, for clients that check whether their base URL exists"),
    free("/health", "probes have no key"),
    free("/ready", "probes have no key"),
    free("/openapi.json", "a document for generators of clients, from memory"),
    free("/console", "the page that asks for a key, from memory"),
    free("/console/", "a redirect"),
    free("/console/{asset}", "the page's files, from memory"),
    free("/console/who", "a constant"),
    keyed("GET", "/v1/models", "a client may see what there is before it asks again"),
    keyed("GET", "/v1/models/{*id}", "a client may see what there is before it asks again"),
    keyed("POST", "/v1/responses/{id}/cancel", "it ends what takes quota"),
    keyed("POST", "/v1/batches/{id}/cancel", "it ends what takes quota"),
    keyed("GET", "/v1/batches/{id}", "a client that waits for a batch asks often, and the batch needs the quota"),
    counted("GET", "/v1/responses/{id}"),
    counted("DELETE", "/v1/responses/{id}"),
    counted("GET", "/v1/responses/{id}/input_items"),
    counted("GET", "/v1/chat/completions/{id}"),
    counted("GET", "/v1/completions/{id}"),
    counted("GET", "/v1/messages/{id}"),
    counted("GET", "/v1/batches"),
    counted("POST", "/v1/batches"),
    counted("GET", "/v1/conversations"),
    counted("POST", "/v1/conversations"),
    counted("GET", "/v1/conversations/export"),
    counted("GET", "/v1/conversations/{id}"),
    counted("POST", "/v1/conversations/{id}"),
    counted("DELETE", "/v1/conversations/{id}"),
    counted("POST", "/v1/conversations/{id}/branch"),
    counted("GET", "/v1/conversations/{id}/export"),
    counted("GET", "/v1/conversations/{id}/items"),
    counted("POST", "/v1/conversations/{id}/items"),
    counted("GET", "/v1/conversations/{id}/items/{item}"),
    counted("DELETE", "/v1/conversations/{id}/items/{item}"),
    counted("GET", "/v1/memories"),
    counted("POST", "/v1/memories"),
    counted("DELETE", "/v1/memories"),
    counted("GET", "/v1/memories/{id}"),
    counted("DELETE", "/v1/memories/{id}"),
    counted("POST", "/v1/messages/count_tokens"),
    counted("GET", "/v1/files"),
    counted("POST", "/v1/files"),
    counted("GET", "/v1/files/{id}"),
    counted("DELETE", "/v1/files/{id}"),
    counted("GET", "/v1/files/{id}/content"),
    counted("POST", "/v1/moderations"),
    counted("POST", "/v1/appeals"),
    counted("POST", "/v1/feedback"),
    counted("POST", "/tokenize"),
    counted("POST", "/detokenize"),
    counted("GET", "/tokenizer_info"),
    generating("/v1/chat/completions"),
    generating("/v1/completions"),
    generating("/v1/responses"),
    generating("/v1/messages"),
    generating("/v1/embeddings"),
    generating("/v1/rerank"),
    generating("/v2/rerank"),
    generating("/rerank"),
    generating("/v1/score"),
    generating("/score"),
    generating("/v1/classify"),
];

const fn free(path: &'static str, why: &'static str) -> Row {
    Row { method: "GET", path, price: Price::Nothing, why }
}

const fn keyed(method: &'static str, path: &'static str, why: &'static str) -> Row {
    Row { method, path, price: Price::Key, why }
}

const fn counted(method: &'static str, path: &'static str) -> Row {
    Row { method, path, price: Price::Request, why: "" }
}

const fn generating(path: &'static str) -> Row {
    Row { method: "POST", path, price: Price::Tokens, why: "" }
}
