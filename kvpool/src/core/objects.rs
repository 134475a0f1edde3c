//! The object tier's decisions: the format of a pack, the content of the bucket, the blocks worth writing, and the requests that may be
//! made.
//!
//! - [`pack`]: the format of an object with many blocks and their index
//! - [`catalog`]: which pack holds which block, and which packs leave when the bucket is full
//! - [`wanted`]: which blocks are worth writing, and in which order
//! - [`budget`]: requests per second, dollars per day, and a breaker for a server that fails

pub mod budget;
pub mod catalog;
pub mod pack;
pub mod wanted;
