//! Weights in 4 bits: `awq` (Lin et al., 2023; AutoAWQ's layout `gemm`), `gptq` (Frantar et al., 2022; both versions of its
//! zeros, with and without an order of inputs) and `compressed-tensors` in its format `pack-quantized`.

use super::Numbers;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The layout of 4-bit weights in their tensors. Serialized for the fingerprint.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Int4Scheme {
    pub(crate) packing: Packing,
    /// The number of consecutive inputs that share a scale; all if `None`.
    pub(crate) group: Option<usize>,
    /// Modules that the file lists as not quantized, as it writes them.
    #[serde(skip)]
    pub(super) unquantized: Vec<String>,
}

/// Eight integers of 4 bits in each word of 32.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize)]
pub(crate) enum Packing {
    /// `qweight [inputs, outputs / 8]`, outputs in the order 0, 2, 4, 6, 1, 3, 5, 7 from the lowest bits on; `qzeros` alike.
    Awq,
    /// `qweight [inputs / 8, outputs]`, `qzeros [groups, outputs / 8]`, `g_idx [inputs]`.
    Gptq {
        /// Whether zeros are stored minus 1.
        is_less_one: bool,
    },
    /// `weight_packed [outputs, inputs / 8]`, `weight_zero_point [outputs / 8, groups]` or 8.
    CompressedTensors { has_zeros: bool },
}

#[derive(Deserialize)]
pub(super) struct Awq {
    bits: u32,
    group_size: i64,
    version: Option<String>,
    modules_to_not_convert: Option<Vec<String>>,
}

impl Awq {
    pub(super) fn scheme(self) -> Result<Int4Scheme, String> {
        if let Some(version) = self.version.filter(|version| !version.eq_ignore_ascii_case("gemm")) {
            return Err(format!("version {version:?} of awq is not supported, only gemm"));
        }
        must_be_4_bits(self.bits)?;
        let unquantized = self.modules_to_not_convert.unwrap_or_default();
        Ok(Int4Scheme { packing: Packing::Awq, group: group(self.group_size)?, unquantized })
    }
}

#[derive(Deserialize)]
pub(super) struct Gptq {
    bits: u32,
    group_size: i64,
    checkpoint_format: Option<String>,
    /// Settings that differ by module.
    dynamic: Option<Value>,
}

impl Gptq {
    pub(super) fn scheme(self) -> Result<Int4Scheme, String> {
        let is_less_one = match self.checkpoint_format.as_deref().unwrap_or("gptq") {
            "gptq" => true,
            "gptq_v2" => false,
            other => return Err(format!("checkpoint_format {other:?} is not supported")),
        };
        must_be_4_bits(self.bits)?;
        if self.dynamic.as_ref().and_then(Value::as_object).is_some_and(|modules| !modules.is_empty()) {
            return Err("dynamic (other settings for some modules) is not supported".into());
        }
        Ok(Int4Scheme { packing: Packing::Gptq { is_less_one }, group: group(self.group_size)?, unquantized: Vec::new() })
    }
}

/// The scheme of compressed-tensors' weights.
pub(super) fn packed(weights: &Numbers, unquantized: Vec<String>) -> Result<Int4Scheme, String> {
    if weights.kind != "int" {
        return Err(format!("packed weights of type {:?} are not supported", weights.kind));
    }
    must_be_4_bits(weights.num_bits)?;
    let group = match (weights.strategy.as_deref(), weights.group_size) {
        (Some("channel"), _) | (None, None) => None,
        (Some("group") | None, Some(size)) => group(size)?,
        (strategy, size) => return Err(format!("packed weights with a scale per {strategy:?} of {size:?} are not supported")),
    };
    Ok(Int4Scheme { packing: Packing::CompressedTensors { has_zeros: !weights.symmetric }, group, unquantized })
}

fn must_be_4_bits(bits: u32) -> Result<(), String> {
    if bits == 4 { Ok(()) } else { Err(format!("weights in {bits} bits are not supported")) }
}

fn group(size: i64) -> Result<Option<usize>, String> {
    match usize::try_from(size) {
        Ok(size) if size > 0 => Ok(Some(size)),
        Err(_) if size == -1 => Ok(None),
        _ => Err(format!("group_size is {size}, which is neither a positive number nor -1")),
    }
}

#[cfg(test)]
mod tests {
    use super::{super::Scheme, *};
    use serde_json::json;

    fn parse(config: Value) -> Result<Int4Scheme, String> {
        Scheme::parse(Some(&config)).map(|scheme| scheme.and_then(|scheme| scheme.int4().cloned()).expect("a scheme of 4 bits"))
    }

    fn packed() -> Value {
        json!({"quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": {
            "targets": ["Linear"], "input_activations": null, "output_activations": null, "weights": {"num_bits": 4, "type": "int",
            "strategy": "group", "group_size": 128, "symmetric": true, "dynamic": false, "actorder": null}}}})
    }

    #[test]
    fn the_three_forms_are_read() {
        let awq = json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm", "zero_point": true});
        let scheme = parse(awq).unwrap();
        assert_eq!((scheme.packing, scheme.group), (Packing::Awq, Some(128)));
        let gptq = json!({"quant_method": "gptq", "bits": 4, "group_size": -1, "desc_act": true, "sym": false, "dynamic": {}});
        let scheme = parse(gptq.clone()).unwrap();
        assert_eq!((scheme.packing, scheme.group), (Packing::Gptq { is_less_one: true }, None));
        let mut second = gptq;
        second["checkpoint_format"] = json!("gptq_v2");
        assert_eq!(parse(second).unwrap().packing, Packing::Gptq { is_less_one: false });
        let scheme = parse(packed()).unwrap();
        assert_eq!((scheme.packing, scheme.group), (Packing::CompressedTensors { has_zeros: false }, Some(128)));
        assert_eq!(scheme.unquantized, ["lm_head"]);
        let mut channels = packed();
        channels["config_groups"]["group_0"]["weights"]["strategy"] = json!("channel");
        channels["config_groups"]["group_0"]["weights"]["symmetric"] = json!(false);
        let scheme = parse(channels).unwrap();
        assert_eq!((scheme.packing, scheme.group), (Packing::CompressedTensors { has_zeros: true }, None));
    }

    #[test]
    fn others_are_refused_by_name() {
        let gptq = |key: &str, value: Value| {
            let mut config = json!({"quant_method": "gptq", "bits": 4, "group_size": 128});
            config[key] = value;
            config
        };
        let of_packed = |key: &str, value: Value| {
            let mut config = packed();
            config["config_groups"]["group_0"]["weights"][key] = value;
            config
        };
        let mut with_activations = packed();
        with_activations["config_groups"]["group_0"]["input_activations"] = json!({"num_bits": 8, "type": "int"});
        for (config, word) in [
            (gptq("bits", json!(3)), "weights in 3 bits"),
            (gptq("group_size", json!(0)), "group_size is 0"),
            (gptq("group_size", json!("all")), "\"all\""),
            (gptq("checkpoint_format", json!("marlin")), "marlin"),
            (gptq("dynamic", json!({"lm_head": {"bits": 8}})), "dynamic"),
            (json!({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}), "gemv"),
            (of_packed("num_bits", json!(8)), "weights in 8 bits"),
            (of_packed("type", json!("float")), "float"),
            (of_packed("group_size", json!(null)), "group"),
            (with_activations, "activations"),
        ] {
            let error = parse(config).unwrap_err();
            assert!(error.starts_with("quantization_config: ") && error.contains(word), "{error}");
        }
    }
}
