//! Facts about users, as chats are given them, and how many are kept.

/// Of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub facts: usize,
    /// Of their texts.
    pub bytes: usize,
}

/// What is remembered of the sender of a chat, in the order in which it was put: so that what was known stays at its place in the prompt.
#[derive(Debug, Default)]
pub struct Facts {
    pub texts: Vec<String>,
    /// Why there are none, where the store does not answer.
    pub lost: Option<String>,
}
