//! Facts about users, as chats are given them, and limits on them.

/// Limits on the facts of one owner.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    pub facts: usize,
    /// The maximum size of all texts together.
    pub bytes: usize,
}

/// The facts about a chat's sender, in the order in which they were added, so that known ones keep their place in the prompt.
#[derive(Debug, Default)]
pub struct Facts {
    pub texts: Vec<String>,
    /// The reason why there are none, if the store does not answer.
    pub lost: Option<String>,
}
