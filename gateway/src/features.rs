//! What operators may switch on beside answers: feedback, tools that run here, grammars, summaries.
//!
//! - [`feedback`]: what users think of answers
//! - [`server_tools`]: tools that run here, for models that call them
//! - [`grammars`]: what answers shall follow, judged where it can do no harm
//! - [`summarizer`]: running summaries of long conversations, made in the background

pub mod feedback;
pub mod grammars;
pub mod server_tools;
pub mod summarizer;
