//! The tiered KV pool.

pub mod device;
pub mod eviction;
