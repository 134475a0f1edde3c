//! What a pool node decides: no clock, socket, thread or byte. Builds with `--no-default-features`.
//!
//! - [`announce`]: what coordinators are told of what a node holds
//! - [`directory`]: what a node holds, who may touch which slot, who waits for what
//! - [`eviction`]: which block leaves when room is needed, one policy per file
//! - [`objects`]: what a node keeps in object storage, and what it may ask of it
//! - [`validate`]: the check that every read passes after its copy

pub mod announce;
pub mod directory;
pub mod eviction;
pub mod objects;
pub mod validate;
