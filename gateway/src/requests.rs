//! Requests, checked: bodies, fields, schemas, and the errors that name them.
//!
//! - [`error`]: the reasons why a request fails
//! - [`body`]: bodies on their way in; [`parse`]: bodies as values; [`computing`]: threads for work on clients' data
//! - [`generate`]: the part of a body that all generating endpoints share; [`options`]: a client's options, checked
//! - [`fields`]: fields of other servers' APIs, and what becomes of each
//! - [`structured`]: constraints on an answer's text; [`thinking`]: those on its thought; [`custom`]: custom tools; [`items`]: items of stored histories

pub mod body;
pub mod computing;
pub mod custom;
pub mod error;
pub mod fields;
pub mod generate;
pub mod items;
pub mod options;
pub mod parse;
pub mod structured;
pub mod thinking;
