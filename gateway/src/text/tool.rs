//! A function that a model may call.

/// A function that the model may call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: Option<String>,
    /// The JSON schema of its arguments; `None` if it has none.
    pub parameters: Option<serde_json::Value>,
    /// Whether calls must follow the schema.
    pub strict: bool,
}
