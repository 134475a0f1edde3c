//! The decisions of a pool node: no clock, socket, thread or byte. Builds with `--no-default-features`.
//!
//! - [`announce`]: the events that inform coordinators of the blocks that a node holds
//! - [`directory`]: the blocks that a node holds, the access to its slots, and the readers that wait
//! - [`division`]: the extents of a node's memory, and the layouts of blocks that own them
//! - [`eviction`]: which block leaves when room is needed, one policy per file
//! - [`layouts`]: a directory for each layout of blocks, and the memory that moves between them
//! - [`objects`]: the blocks that a node keeps in object storage, and the requests that it may make there
//! - [`validate`]: the check that every read passes after its copy

pub mod announce;
pub mod directory;
pub mod division;
pub mod eviction;
pub mod layouts;
pub mod objects;
pub mod validate;
