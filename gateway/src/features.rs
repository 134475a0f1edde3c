//! Features that operators may switch on beside answers: feedback, tools that run here, grammars, summaries.
//!
//! - [`feedback`]: users' opinions of answers
//! - [`server_tools`]: tools that run here, for models that call them
//! - [`grammars`]: the grammars of answers, judged where it can do no harm
//! - [`summarizer`]: running summaries of long conversations, made in the background

pub mod feedback;
pub mod grammars;
pub mod server_tools;
pub mod summarizer;
