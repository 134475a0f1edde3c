//! The HTTP API: OpenAI's, Anthropic's, and operators'.
//!
//! - [`access`]: authentication; [`doors`]: requests that a web page may have caused; `leftover`: bodies that were not read to their end;
//!   `unbroken`: answers that every client splits into the same lines;
//!   [`cors`]: pages that are allowed; [`admin`]: tenants and keys, for operators
//! - `gate`: operators' sign-in checked, and their changes recorded; `roles`: the role that each of their routes needs; [`sign_in`]: operators
//!   with a browser
//! - [`routes`]: both ports' routes; [`prices`]: the least that a client needs for each of its own; `paths`: the route for a path
//! - [`openapi`]: documents of both ports' routes, for generators of clients
//! - [`operator`]: for operators and probes; [`models`]: `/v1/models`
//! - [`console`]: `/console`, the web page; [`watch`]: `/cluster/events`, its live data
//! - [`endpoint`]: the part of a generating endpoint that differs; [`serve`]: the common part; `pages`: pages of stored items; [`chat`],
//!   [`completions`]: their wire shapes; [`openai`]: bodies
//! - [`responses`], [`conversations`]: stored answers and dialogs, which later requests continue by their ids
//! - [`stored`]: the stored data that a chat needs; [`memories`]: facts about users
//! - [`context`]: long dialogs fitted into the window
//! - [`files`], [`batches`]: requests in files, answered within a day; [`form`]: forms as they arrive
//! - [`messages`]: Anthropic's API; [`embeddings`], [`rerank`], [`score`], [`classify`], [`moderations`] and [`tokenize`]: endpoints that
//!   generate no text; `pairs`: two texts that are read together
//! - [`erasure`], [`export`]: a tenant's or a user's data erased, or exported, for operators; [`backup`]: all that is kept, for operators
//! - `errors`: errors as responses
//! - [`protocol`]: an answer on its way to its client, whole or as a stream, in any protocol
//! - [`records`]: the coordinators' agreed records, for operators; [`rollouts`]: users that move to a new model, for operators
//! - [`replay`]: repeated requests, and streams that resume
//! - `blocks`: an answer's pieces as blocks, or items, in any protocol that has them
//! - [`written`]: answers that are serialized on a compute thread
//! - [`server`]: clients' connections

pub mod access;
pub mod admin;
pub mod appeals;
pub mod backup;
pub mod batches;
mod blocks;
pub mod chat;
pub mod classify;
pub mod completions;
pub mod console;
pub mod context;
pub mod conversations;
pub mod cors;
#[cfg(test)]
mod dialects;
pub mod doors;
mod elsewhere;
pub mod embeddings;
pub mod endpoint;
pub mod erasure;
mod errors;
pub mod export;
pub mod feedback;
pub mod files;
pub mod form;
mod gate;
mod leftover;
mod logprob;
pub mod memories;
pub mod messages;
pub mod models;
pub mod moderations;
pub mod openai;
pub mod openapi;
pub mod operator;
mod pages;
mod pairs;
mod parameters;
mod paths;
pub mod prices;
pub mod protocol;
pub mod records;
pub mod replay;
pub mod rerank;
pub mod responses;
mod roles;
pub mod rollouts;
pub mod routes;
pub mod score;
pub mod serve;
pub mod server;
pub mod sign_in;
pub mod stored;
pub mod tokenize;
mod tool_choice;
mod unbroken;
pub mod watch;
pub mod written;
