//! A rendered prompt, with the places where it must be cut before it is tokenized.

/// A rendered prompt, with the places where it must be cut before it is tokenized.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Sewn {
    pub text: String,
    pub cuts: Vec<usize>,
}
