//! Texts as vectors of an encoder: rounded to 8 bits, kept for a while, and waited for only while the encoder is in time. A core.
//!
//! - [`vector`]: an embedding, rounded; [`kept`]: those of tenants' texts, bounded
//! - [`patience`]: when requests wait for an encoder

pub mod kept;
pub mod patience;
pub mod vector;
