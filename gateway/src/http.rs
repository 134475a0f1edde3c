//! The HTTP API: OpenAI's, Anthropic's, and operators'.
//!
//! - [`access`]: authentication; [`doors`]: requests that a web page may have caused; `leftover`: bodies that were not read to their end;
//!   [`cors`]: pages that are allowed; [`admin`]: tenants and keys, for operators
//! - [`routes`]: both ports' routes; `paths`: which route a path means; [`operator`]: for operators and probes; [`models`]: `/v1/models`
//! - [`console`]: `/console`, the web page; [`watch`]: `/cluster/events`, its live data
//! - [`endpoint`]: what a generating endpoint adds; [`serve`]: what they have in common; `pages`: pages of stored items; [`chat`], [`completions`]: their wire shapes; [`openai`]: bodies
//! - [`responses`], [`conversations`]: stored answers and dialogs, which later requests continue by their ids
//! - [`stored`]: what a chat needs of these; [`memories`]: what is remembered of users
//! - [`context`]: long dialogs fitted into the window
//! - [`files`], [`batches`]: requests in files, answered within a day
//! - [`messages`]: Anthropic's API; [`embeddings`], [`rerank`], [`classify`], [`moderations`] and [`tokenize`]: endpoints that
//!   generate nothing
//! - `errors`: errors as responses
//! - [`protocol`]: an answer on its way to its client, at once or as a stream, whichever protocol it is written in
//! - [`records`]: the coordinators' agreed records, for operators; [`rollouts`]: users that move to another model, for operators
//! - [`replay`]: requests that are repeated, and streams that resume
//! - [`written`]: answers that are written beside the event loop
//! - [`server`]: clients' connections

pub mod access;
pub mod admin;
pub mod appeals;
pub mod batches;
pub mod chat;
pub mod classify;
pub mod completions;
pub mod console;
pub mod context;
pub mod conversations;
pub mod cors;
pub mod doors;
pub mod embeddings;
pub mod endpoint;
mod errors;
pub mod feedback;
pub mod files;
mod leftover;
mod logprob;
pub mod memories;
pub mod messages;
pub mod models;
pub mod moderations;
pub mod openai;
pub mod operator;
mod pages;
mod parameters;
mod paths;
pub mod protocol;
pub mod records;
pub mod replay;
pub mod rerank;
pub mod responses;
pub mod rollouts;
pub mod routes;
pub mod serve;
pub mod server;
pub mod stored;
pub mod tokenize;
mod tool_choice;
pub mod watch;
pub mod written;
