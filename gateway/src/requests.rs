//! Requests, checked: bodies, fields, schemas, and the errors that name them.
//!
//! - [`error`]: why a request fails
//! - [`body`]: bodies on their way in; [`parse`]: bodies as values; [`computing`]: threads for what is made of clients' data
//! - [`generate`]: the part of a body that all generating endpoints share; [`options`]: a client's wishes, checked
//! - [`structured`]: what an answer's text must follow; [`custom`]: custom tools; [`items`]: items of stored histories

pub mod body;
pub mod computing;
pub mod custom;
pub mod error;
pub mod generate;
pub mod items;
pub mod options;
pub mod parse;
pub mod structured;
