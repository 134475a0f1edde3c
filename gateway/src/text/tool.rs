//! A function that a model may call.

/// A function that the model may call.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Tool {
    pub name: String,
    pub description: Option<String>,
    /// JSON schema of its arguments; `None`: it has none.
    pub parameters: Option<serde_json::Value>,
    /// Calls keep to the schema.
    pub strict: bool,
}
