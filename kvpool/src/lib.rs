//! The tiered KV pool.

pub mod admission;
pub mod device;
pub mod directory;
pub mod eviction;
