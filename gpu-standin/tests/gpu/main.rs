//! What the CUDA backend does, on the stand-in for a GPU. Each test runs itself again as another process, with the
//! stand-in where the libraries are looked for (`standin.rs`).

mod blocks;
mod cluster;
mod libraries;
mod models;
mod operations;
mod planted;
mod rules;
mod standin;
