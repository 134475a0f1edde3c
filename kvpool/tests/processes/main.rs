//! Pool nodes as real processes: see each module.

mod node;
mod nvme;
mod support;
