//! The core beside simpler models of it, under random operations.

mod directory_model;
mod layouts_model;
