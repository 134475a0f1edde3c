//! Whole checkpoints, as made by `../fixtures/make.py`.

mod corrupt;
mod exact;
mod fixtures;
mod int8;
mod reference;
