//! The decision core of batches of requests: a file of requests in, a file of answers out, within a day.
//!
//! - [`input`]: lines of a file as requests, and their problems
//! - [`life`]: the stages of a batch
//! - [`pace`]: which request runs next, and when a postponed one runs again
//! - [`record`]: lines of the files of answers and errors
//! - [`mod@file`]: clients' stored files, and limits on them

pub mod file;
pub mod input;
pub mod life;
pub mod pace;
pub mod record;
