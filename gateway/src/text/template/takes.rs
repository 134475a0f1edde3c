//! The forms of a dialog that a template accepts unchanged.

use serde::{Deserialize, Serialize};

/// The forms of dialogs that a template accepts unchanged.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Takes {
    /// A call's arguments are JSON text: the template adds them to other text.
    pub(crate) arguments_as_text: bool,
    /// Arguments that are text, although others are objects: some templates insert these unchanged.
    pub(crate) text_arguments: bool,
    /// Arguments that are a list or a number.
    pub(crate) other_arguments: bool,
    /// Calls only show in messages whose content is `none`.
    pub(crate) none_beside_calls: bool,
    /// A system message at the beginning.
    pub(crate) system: bool,
    /// System messages anywhere else.
    pub(crate) later_systems: bool,
    /// Two consecutive turns of the user.
    pub(crate) users_in_row: bool,
    pub(crate) assistants_in_row: bool,
    /// A turn of the user after a tool's output, and before it.
    pub(crate) user_after_result: bool,
    pub(crate) user_before_result: bool,
    /// An answer without text and calls.
    pub(crate) silent_answer: bool,
    /// Calls and their outputs.
    pub(crate) calls: bool,
    /// Several calls in one answer.
    pub(crate) several_calls: bool,
}

impl Default for Takes {
    /// All forms are accepted.
    fn default() -> Self {
        Self {
            arguments_as_text: false,
            text_arguments: true,
            other_arguments: true,
            none_beside_calls: false,
            system: true,
            later_systems: true,
            users_in_row: true,
            assistants_in_row: true,
            user_after_result: true,
            user_before_result: true,
            silent_answer: true,
            calls: true,
            several_calls: true,
        }
    }
}

impl Takes {
    /// As little as any template accepts.
    pub(crate) fn least(&self) -> Self {
        Self {
            text_arguments: false,
            other_arguments: false,
            later_systems: false,
            users_in_row: false,
            assistants_in_row: false,
            user_after_result: false,
            user_before_result: false,
            silent_answer: false,
            ..self.clone()
        }
    }
}
