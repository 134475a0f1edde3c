//! Batches of requests, the deciding part: a file of requests in, a file of answers out, within a day.
//!
//! - [`input`]: lines of a file as requests, and their problems
//! - [`life`]: a batch's way from its file to its answers
//! - [`pace`]: which request runs next, and when one that was put off runs again
//! - [`record`]: lines of the files of answers and errors
//! - [`mod@file`]: files that clients have stored, and how many they may

pub mod file;
pub mod input;
pub mod life;
pub mod pace;
pub mod record;
