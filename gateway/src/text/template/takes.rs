//! The forms of a dialog that a template takes as they are.

/// The forms of dialogs that a template takes as they are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Takes {
    /// A call's arguments are JSON text: the template adds them to other text.
    pub(crate) arguments_as_text: bool,
    /// Arguments that are text, though others are objects: some templates put those as they are.
    pub(crate) text_arguments: bool,
    /// Arguments that are a list or a number.
    pub(crate) other_arguments: bool,
    /// Calls show only in messages whose content is `none`.
    pub(crate) none_beside_calls: bool,
    /// A system message at the beginning.
    pub(crate) system: bool,
    /// System messages anywhere else.
    pub(crate) later_systems: bool,
    /// Two turns of the user.
    pub(crate) users_in_row: bool,
    pub(crate) assistants_in_row: bool,
    /// A turn of the user after what a tool returned, and before it.
    pub(crate) user_after_result: bool,
    pub(crate) user_before_result: bool,
    /// An answer without text and calls.
    pub(crate) silent_answer: bool,
    /// Calls and what they return.
    pub(crate) calls: bool,
    /// Several calls of one answer.
    pub(crate) several_calls: bool,
}

impl Default for Takes {
    /// Everything.
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
    /// As little as any template.
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
