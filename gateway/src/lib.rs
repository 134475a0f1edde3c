//! The gateway: OpenAI's API on one side, token ids on the other. Text stops here.
//!
//! Core (builds with `--no-default-features`, without tokio):
//!
//! - [`text`]: tokenizer, chat template, incremental detokenizer, stop strings
//! - [`dialog`]: a conversation by whatever protocol, and its way to a prompt
//! - [`context`]: what of a long dialog a model is given, and what in place of the rest
//! - [`generation`]: a choice's tokens to the parts of its answer, one pure pipeline
//! - [`replay`]: answers that are recorded, for requests that are repeated
//! - [`response_cache`]: answers that are kept, for whoever asks the same
//! - [`semantic`]: answers that are kept, for whoever asks nearly the same
//! - [`routing`]: which model answers, by the operator's rules
//! - [`rollout`]: users that move from one model to another, step by step, and back (its shell is in the same room)
//! - [`batch`]: files of requests, and the order and pace in which they are answered
//! - [`json`]: what clients write, where that is more than a library reads
//! - [`owner`]: whose everything is that is stored; [`room`]: who makes room where tenants fill one together; [`shares`]: parts of what is in
//!   flight
//!
//! Shell (feature `shell`, on by default):
//!
//! - [`gateway`]: the state that all handlers share
//! - [`error`]: why a request fails
//! - [`http`]: endpoints and their server
//! - [`computing`]: threads for what is made of clients' data
//! - [`backend`]: the cluster as the gateway sees it
//! - [`registry`]: what coordinators agree on, as operators see and change it
//! - [`store`]: responses and conversations that clients may ask for again
//! - [`summarizer`]: running summaries of long conversations, made in the background
//! - [`batches`]: clients' files and batches, on disk and running
//! - [`tenants`]: who asks, how much, and what it came to
//! - [`usage`]: token counts, times and sources of an answer, as the APIs show them
//! - [`body`]: bodies on their way in; [`parse`]: bodies as values
//! - [`structured`]: what an answer's text must follow; `custom`: custom tools; `items`: items of stored histories
//! - [`answer`]: a running request's events as deltas of its choices; [`rounds`]: answers with calls of tools that run here
//! - [`replays`]: recordings of answers; [`running`]: responses that are being streamed
//! - [`request`]: the part of a body that all generating endpoints share
//! - [`options`]: a client's wishes, checked
//! - [`memories`]: facts about users, as chats are given them, and how many are kept
//! - [`origins`]: the origins whose web pages may use the API
//! - [`embedded`]: embeddings, collected from workers' events
//! - [`feedback`]: what users think of answers
//! - [`audit`]: what was blocked, and who appealed
//! - [`server_tools`]: tools that run here, for models that call them
//! - [`grammars`]: what answers shall follow, judged where it can do no harm
//! - [`safety`]: what may be asked and answered here; [`pii`]: what identifies people
//! - [`metrics`]: the numbers behind `/metrics`; [`recent`]: the last choices that ended

pub mod batch;
pub mod context;
pub mod dialog;
pub mod generation;
pub mod json;
pub mod owner;
pub mod replay;
pub mod response_cache;
pub mod rollout;
pub mod room;
pub mod routing;
pub mod semantic;
pub mod shares;
pub mod text;

#[cfg(feature = "shell")]
pub mod answer;
#[cfg(feature = "shell")]
pub mod audit;
#[cfg(feature = "shell")]
pub mod backend;
#[cfg(feature = "shell")]
pub mod batches;
#[cfg(feature = "shell")]
pub mod body;
#[cfg(feature = "shell")]
pub mod computing;
#[cfg(feature = "shell")]
pub mod custom;
#[cfg(feature = "shell")]
pub mod embedded;
#[cfg(feature = "shell")]
pub mod error;
#[cfg(feature = "shell")]
pub mod feedback;
#[cfg(feature = "shell")]
pub mod gateway;
#[cfg(feature = "shell")]
pub mod grammars;
#[cfg(feature = "shell")]
pub mod http;
#[cfg(feature = "shell")]
pub mod items;
#[cfg(feature = "shell")]
pub mod memories;
#[cfg(feature = "shell")]
pub mod metrics;
#[cfg(feature = "shell")]
pub mod options;
#[cfg(feature = "shell")]
pub mod origins;
#[cfg(feature = "shell")]
pub mod parse;
#[cfg(feature = "shell")]
pub mod pii;
#[cfg(feature = "shell")]
pub mod recent;
#[cfg(feature = "shell")]
pub mod registry;
#[cfg(feature = "shell")]
pub mod replays;
#[cfg(feature = "shell")]
pub mod request;
#[cfg(feature = "shell")]
pub mod rounds;
#[cfg(feature = "shell")]
pub mod running;
#[cfg(feature = "shell")]
pub mod safety;
#[cfg(feature = "shell")]
pub mod server_tools;
#[cfg(feature = "shell")]
mod stamp;
#[cfg(feature = "shell")]
pub mod store;
#[cfg(feature = "shell")]
pub mod structured;
#[cfg(feature = "shell")]
pub mod summarizer;
#[cfg(feature = "shell")]
pub mod tenants;
#[cfg(feature = "shell")]
pub mod usage;
