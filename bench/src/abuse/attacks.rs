//! The attacks, each a row of [`ALL`]. Most are requests of an audit that once succeeded, and variants of them.
//!
//! - [`connections`]: sockets, heads and bodies that are not finished, or are not HTTP
//! - [`grammars`]: schemas, expressions and grammars
//! - [`texts`]: long and odd bodies
//! - [`streams`]: answers: many, long, unread and left
//! - [`stored`]: conversations, responses, facts, files and batches
//! - [`caches`]: answers that are kept for repeats, and votes
//! - [`doors`]: access to data of other tenants and of operators

pub mod caches;
pub mod connections;
pub mod doors;
pub mod grammars;
pub mod stored;
pub mod streams;
pub mod texts;

use super::attacker::Attacker;
use futures_util::{FutureExt, future::LocalBoxFuture};

/// An attack.
pub struct Attack {
    pub name: &'static str,
    pub what: &'static str,
    /// The statuses that it deserves. 429 and 503 are always allowed.
    pub deserves: &'static [u16],
    /// The number of keys of the lowest tier that it has besides its own, each of another tenant.
    pub keys: usize,
    pub run: fn(Attacker) -> LocalBoxFuture<'static, ()>,
}

macro_rules! attacks {
    ($($name:literal $(with $keys:literal keys)?, $what:literal, $deserves:expr, $run:expr;)*) => {
        &[$(Attack {
            name: $name, what: $what, deserves: &$deserves, keys: 0 $(+ $keys)?, run: |attacker| $run(attacker).boxed_local()
        }),*]
    };
}

/// All attacks. A 500 is deserved if following a grammar may exceed its limits, which the answer then reports.
pub const ALL: &[Attack] = attacks! {
    "schema-compared-chat", "schemas of 300 bytes whose parts are compared in 2^16 ways and more, in chats", [400], grammars::compared_chat;
    "schema-compared-text", "the same in completions", [400], grammars::compared_completions;
    "schema-compared-messages", "the same in Anthropic's form", [400], grammars::compared_messages;
    "schema-compared-responses", "the same in responses", [400], grammars::compared_responses;
    "schema-compared-batch", "the same as lines of batches", [200, 400], grammars::compared_batch;
    "patterns-intersected", "schemas that intersect 12 to 100 expressions", [400], grammars::intersected;
    "schema-faulty-part", "schemas of 100 KiB with one part at fault", [400], grammars::faulty;
    "schemas-never-seen", "schemas that take long to compile, each another", [200, 400], grammars::never_seen;
    "expressions", "regular expressions that explode", [200, 400, 500], grammars::expressions;
    "lark", "Lark grammars that refer to one another, repeat and intersect", [200, 400, 500], grammars::lark;
    "gbnf-rules", "GBNF of 40,000 rules", [400], grammars::gbnf;
    "grammar-followed", "a grammar that costs much at each token", [200, 400, 500], grammars::followed;
    "masks-slow", "grammars that take a third of a second at each token, from the start or later", [200, 400, 500], grammars::slow_masks;
    "choices-many", "a choice of 20,000 texts", [400], grammars::choices;
    "tools-many", "150,000 tools", [400], grammars::tools;
    "tools-allowed-many", "1,000 tools of 40,000 allowed ones, which the response repeats", [200, 400], grammars::allowed_tools;
    "tools-strict", "1,000 strict tools, each with a schema of its own", [200, 400], grammars::strict_tools;

    "tokenize-long", "texts of 8 MiB to tokenize", [400], texts::tokenize_long;
    "tokenize-leave", "the same, by clients that leave at once", [400], texts::tokenize_leave;
    "tokenize-fits", "the longest texts that a context may hold, to tokenize", [200, 400], texts::tokenize_fits;
    "detokenize", "as many tokens as a context holds, to text", [200, 400], texts::detokenize;
    "count-tokens", "messages of 7 MiB to count", [400], texts::count_tokens;
    "moderations", "texts of 7 MiB to moderate", [200, 400, 501], texts::moderations;
    "embeddings", "2,048 texts to embed", [200, 400], texts::embeddings;
    "json-deep", "100,000 brackets in every place", [200, 400], texts::deep;
    "json-many-keys", "400,000 fields that mean nothing", [200, 400], texts::many_keys;
    "json-numbers", "numbers of a megabyte", [200, 400], texts::numbers;
    "json-escapes", "a text of a million escapes", [400], texts::escapes;
    "messages-many", "50,000 system messages", [400], texts::many_messages;
    "template-kwargs", "variables of 7 MiB for the chat template", [200, 400], texts::template_kwargs;
    "logit-bias-and-stops", "300,000 biases, 300,000 stop strings", [400], texts::biases_and_stops;
    "control-tokens", "messages that spell special tokens: they must stay text", [200], texts::control_tokens;

    "heads-half", "4,096 connections that send half a head", [408], connections::half_heads;
    "heads-slow", "heads that come byte by byte", [408], connections::slow_heads;
    "heads-without-host", "requests that name no host", [400], connections::no_host;
    "heads-giant", "heads of 180 KiB, and of 2,000 lines", [400, 431], connections::giant_heads;
    "connections-idle", "4,096 connections that rest after a request", [200], connections::idle;
    "connections-of-many", "half heads from 16 addresses", [408], connections::many_addresses;
    "connections-churn", "connections that are closed at once", [200], connections::churn;
    "requests-pipelined", "1,000 requests in one go, and again", [200], connections::pipelined;
    "requests-pipelined-unread", "the same, with answers that are not read", [200], connections::pipelined_unread;
    "http2-rapid-reset", "HTTP/2 streams that are reset at once", [400, 505], connections::rapid_reset;
    "not-http", "bytes that are no HTTP", [400, 431], connections::not_http;
    "bodies-stalled", "150 bodies that stall at 7.9 of 8 MiB", [400, 408], connections::stalled_bodies;
    "bodies-promised", "150 bodies of 8 MiB that are promised and not sent", [100, 408], connections::promised_bodies;
    "bodies-in-chunks", "bodies in chunks of one byte", [200, 400, 408, 413], connections::chunked_bodies;

    "queue-filled", "requests of 1,024 prompts", [200, 400], streams::queue;
    "answers-many", "128 answers to one prompt, with log-probabilities", [200, 400], streams::choices;
    "prompts-long", "prompts that fill the context, each another", [200, 400], streams::long_prompts;
    "streams-unread", "long streams that are not read", [200, 400], streams::unread;
    "streams-left", "streams that are left after their first bytes", [200, 400], streams::left;
    "streams-many", "as many streams as the key gets", [200, 400], streams::many;

    "conversations-large", "conversations of 4 MiB: others' must stay", [200, 400, 507], stored::large_conversations;
    "conversations-waited-for", "tools of 150,000 fields beside a conversation that is looked up first", [200, 400, 507], stored::waited_for;
    "conversations-many", "conversations, as many as there is time for", [200, 507], stored::many_conversations;
    "conversation-read-back", "a conversation of 30 MiB, read four times at once", [200, 400, 507], stored::read_back;
    "conversation-read-slowly", "the same, by clients that do not read", [200, 400, 507], stored::read_slowly;
    "conversation-gone-on-with", "the same, continued again and again by chats and responses", [200, 400, 507], stored::gone_on_with;
    "items-named-often", "inputs that name one stored item 100,000 times", [200, 400, 404, 507], stored::named_often;
    "branches", "branches of branches of a long conversation", [200, 400, 404, 507], stored::branches;
    "exports", "everything exported, again and again", [200, 400, 507], stored::exports;
    "responses-stored", "responses to long inputs, each stored", [200, 400, 507], stored::responses;
    "facts", "facts to remember, as many as there is time for", [200, 400, 507], stored::facts;
    "files-many", "files, as many as there is time for", [200, 400], stored::files;
    "uploads-slow", "16 files that come byte by byte", [200, 400, 408], stored::slow_uploads;
    "uploads-of-many-keys" with 8 keys, "four files of each key that come byte by byte: who pays must upload", [200, 400, 408],
        stored::slow_uploads_of_many;
    "uploads-without-end", "files of 64 MiB without a boundary, with such a head, and after 1,000 small fields", [400], stored::endless_uploads;
    "uploads-of-many", "forms of 1,000 files each", [400], stored::many_files_in_one;
    "batch-of-50000", "batches of 50,000 requests", [200, 400, 413], stored::large_batches;
    "batches-many", "batches of one request, as many as there is time for", [200, 400], stored::many_batches;
    "batches-before-one", "batches of twenty long answers: who pays must get a short one", [200, 400], stored::before_one;
    "batch-answers-large", "batches whose answers are a thousand times their lines: they must keep within a tenant's room",
        [200, 400, 404], stored::large_answers;
    "batch-file-odd", "files of lines that are no requests", [200, 400, 413], stored::odd_files;

    "replays", "answers to keep for repeats, as many as there is time for", [200, 400], caches::replays;
    "replays-of-bodies", "bodies of 7 MiB with an Idempotency-Key, each another", [400], caches::large_replays;
    "replay-of-another", "another tenant's Idempotency-Key and request", [200, 404, 422], caches::others_replay;
    "response-cache", "greedy requests, each another", [200, 400], caches::response_cache;
    "semantic-cache", "questions, each another", [200, 400], caches::semantic_cache;
    "votes", "opinions of one answer under many names", [200, 404], caches::votes;

    "others-things", "reading, changing and deleting what belongs to others", [200, 400, 404, 405], doors::others;
    "operators-paths", "operators' paths at the front door", [400, 404, 405], doors::operators;
    "paths-odd", "paths that leave their directory", [400, 401, 404, 405], doors::odd_paths;
    "keys-guessed", "keys and tokens that do not exist", [401], doors::guessed_keys;
    "tokens-forged", "tokens whose key an identity provider that is silent might know, from 16 addresses", [401], doors::forged_tokens;
    "keys-of-many" with 1000 keys, "each within its quota: chats, embeddings, files, conversations", [200, 400, 507],
        doors::many_keys;
};

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn every_attack_has_a_name_of_its_own() {
        let names: BTreeSet<_> = ALL.iter().map(|attack| attack.name).collect();
        assert_eq!(names.len(), ALL.len());
    }
}
