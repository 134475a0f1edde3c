//! Experts in MXFP4 (`mxfp4`), as GPT-OSS is published.

use serde::{Deserialize, Serialize};

/// The list of unquantized modules; MXFP4 itself has only one form. Serialized for the fingerprint.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Mxfp4Scheme {
    /// Modules that the file lists as not quantized.
    #[serde(skip)]
    pub(super) unquantized: Vec<String>,
}

#[derive(Deserialize)]
pub(super) struct Mxfp4 {
    modules_to_not_convert: Option<Vec<String>>,
}

impl Mxfp4 {
    pub(super) fn scheme(self) -> Mxfp4Scheme {
        // Transformers reads names as patterns; only `*` is used.
        let pattern = |name: String| if name.contains('*') { format!("re:(?:{name})(?:\\.|$)") } else { name };
        Mxfp4Scheme { unquantized: self.modules_to_not_convert.unwrap_or_default().into_iter().map(pattern).collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::super::Scheme;
    use serde_json::json;

    #[test]
    fn modules_are_listed_by_name_and_by_pattern() {
        let config = json!({"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]});
        let scheme = Scheme::parse(Some(&config)).unwrap().unwrap();
        let listed = scheme.unquantized();
        for (module, is_listed) in [
            ("model.layers.12.self_attn.q_proj", true),
            ("model.layers.12.self_attn", true),
            ("lm_head", true),
            ("model.layers.12.self_attn_norm", false),
            ("model.layers.12.mlp.experts", false),
        ] {
            assert_eq!(listed.contains(module), is_listed, "{module}");
        }
        let all = Scheme::parse(Some(&json!({"quant_method": "mxfp4"}))).unwrap().unwrap();
        assert!(!all.unquantized().contains("lm_head"));
    }
}
