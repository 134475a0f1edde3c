//! Compiled grammars, by the tokens that they allow.

mod masks;
mod numbers;
mod schemas;
