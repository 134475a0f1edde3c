//! The CUDA backend on the stand-in for a GPU. Each test runs itself again in a process of its own, with the stand-in in the place of the
//! libraries (`standin.rs`).

mod blocks;
mod cluster;
mod libraries;
mod models;
mod operations;
mod planted;
mod ranks;
mod rules;
mod standin;
