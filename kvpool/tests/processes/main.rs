//! Tests of pool nodes as real processes: see each module.

mod device;
mod node;
mod nvme;
mod objects;
mod support;
