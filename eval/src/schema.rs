//! JSON Schema, by a library of 24 packages that takes longer to compile than all others of a cluster's programs but two. So it is a feature,
//! which the builds that `make up` needs leave out.

use serde_json::Value;

/// A schema that is ready for use.
#[derive(Debug)]
pub struct Schema(#[cfg(feature = "schema")] Box<jsonschema::Validator>, #[cfg(not(feature = "schema"))] std::convert::Infallible);

#[cfg(feature = "schema")]
impl Schema {
    pub fn compile(schema: &Value) -> Result<Self, String> {
        Ok(Self(Box::new(jsonschema::validator_for(schema).map_err(|error| error.to_string())?)))
    }

    pub fn allows(&self, json: &Value) -> bool {
        self.0.is_valid(json)
    }
}

#[cfg(not(feature = "schema"))]
impl Schema {
    pub fn compile(_schema: &Value) -> Result<Self, String> {
        Err("this `tidemill` is built without JSON Schema: use a package's, or build it by `make build`".into())
    }

    pub fn allows(&self, _json: &Value) -> bool {
        match self.0 {}
    }
}
