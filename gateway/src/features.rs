//! Features that operators may switch on: feedback, tools that run on the server, grammars, summaries. Also what is done in processes of its own.
//!
//! - [`feedback`]: users' opinions of answers
//! - [`server_tools`]: tools that run on the server, for models that call them
//! - [`grammars`]: the grammars of answers, compiled in a process that can do no harm; [`templates`]: chat templates, rendered in such processes
//! - [`summarizer`]: running summaries of long conversations, made in the background

pub mod feedback;
pub mod grammars;
mod metrics;
pub mod server_tools;
pub mod summarizer;
pub mod templates;
