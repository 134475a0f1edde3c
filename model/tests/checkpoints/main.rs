//! Whole checkpoints, as made by `../fixtures/make.py`.

mod bf16;
mod corrupt;
mod exact;
mod fixtures;
mod int8;
mod reference;
