//! Facts about users, as chats are given them, and how many are kept.

/// Bounds of the facts of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub facts: usize,
    /// Bytes of their texts.
    pub bytes: usize,
}

/// The facts about the sender of a chat, in the order in which they were added, so that known ones keep their place in the prompt.
#[derive(Debug, Default)]
pub struct Facts {
    pub texts: Vec<String>,
    /// Why there are none, where the store does not answer.
    pub lost: Option<String>,
}
