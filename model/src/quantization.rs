//! `quantization_config` of `config.json`: the scaling of a checkpoint's quantized weights, in the forms that are published. Any other form
//! is refused by name.
//!
//! - FP8, here: `compressed-tensors`, format `float-quantized` (llm-compressor): a scale per tensor, output channel or block;
//!   `fbgemm_fp8` (Meta's Llama 3.1): a scale per output channel, and a bound on activations; `fp8` with `weight_block_size`
//!   (DeepSeek, Qwen3): a scale per block
//! - 4 bits: [`int4`]; [`mxfp4`]
//!
//! A projection's tensors decide whether it is quantized (`weight`). Lists of modules that are not quantized are checked against the
//! tensors.

pub(crate) mod int4;
pub(crate) mod mxfp4;

use int4::Int4Scheme;
use mxfp4::Mxfp4Scheme;
use regex::Regex;
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::collections::BTreeMap;

/// The scaling of FP8 weights, and the intended precision of their activations. Serialized for the fingerprint.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct Fp8Scheme {
    /// The suffix of the scales' name, after the module's.
    pub(crate) scale_name: &'static str,
    pub(crate) scale_per: ScalePer,
    pub(crate) inputs: Inputs,
    /// Modules that the file lists as not quantized, as it writes them.
    #[serde(skip)]
    unquantized: Vec<String>,
}

/// The numbers that share a scale.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) enum ScalePer {
    Tensor,
    /// A row, which is an output channel.
    Row,
    Block {
        rows: usize,
        columns: usize,
    },
}

/// The intended precision of the inputs that the weights are multiplied with.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) enum Inputs {
    Unquantized,
    /// FP8, scaled by the largest number of each row, or by `largest_max` where that is smaller.
    Dynamic {
        largest_max: Option<f32>,
    },
    /// FP8 with the scale in `input_scale`.
    Static,
}

impl ScalePer {
    /// Rows and columns of a block of a matrix `[rows, cols]`.
    pub(crate) fn block(self, rows: usize, cols: usize) -> (usize, usize) {
        match self {
            Self::Tensor => (rows, cols),
            Self::Row => (1, cols),
            Self::Block { rows, columns } => (rows, columns),
        }
    }

    /// The shapes that the scales of a matrix `[rows, cols]` may have, the usual one first.
    pub(crate) fn shapes(self, rows: usize, cols: usize) -> Vec<Vec<usize>> {
        match self {
            Self::Tensor => vec![vec![1], vec![], vec![1, 1]],
            Self::Row => vec![vec![rows, 1], vec![rows]],
            Self::Block { rows: down, columns: across } => vec![vec![rows.div_ceil(down), cols.div_ceil(across)]],
        }
    }
}

/// The quantization of a checkpoint's weights.
#[derive(Clone, PartialEq, Debug, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Scheme {
    Fp8(Fp8Scheme),
    Int4(Int4Scheme),
    Mxfp4(Mxfp4Scheme),
}

impl Scheme {
    /// Parses `quantization_config`; `None` for checkpoints that are not quantized.
    pub(crate) fn parse(config: Option<&Value>) -> Result<Option<Self>, String> {
        let Some(config) = config.filter(|config| !config.is_null()) else { return Ok(None) };
        let scheme = match config["quant_method"].as_str() {
            Some("compressed-tensors") => read::<CompressedTensors>(config)?.scheme(),
            Some("fbgemm_fp8") => read::<Fbgemm>(config)?.scheme().map(Self::Fp8),
            Some("fp8") => read::<Blocks>(config)?.scheme().map(Self::Fp8),
            Some("awq") => read::<int4::Awq>(config)?.scheme().map(Self::Int4),
            Some("gptq") => read::<int4::Gptq>(config)?.scheme().map(Self::Int4),
            Some("mxfp4") => Ok(Self::Mxfp4(read::<mxfp4::Mxfp4>(config)?.scheme())),
            Some(other) => Err(format!("quant_method {other:?} is not supported")),
            None => Err("it names no quant_method".into()),
        };
        scheme.map(Some).map_err(|problem| format!("quantization_config: {problem}; {WHAT_TO_DO}"))
    }

    pub(crate) fn fp8(&self) -> Option<&Fp8Scheme> {
        match self {
            Self::Fp8(scheme) => Some(scheme),
            Self::Int4(_) | Self::Mxfp4(_) => None,
        }
    }

    pub(crate) fn int4(&self) -> Option<&Int4Scheme> {
        match self {
            Self::Int4(scheme) => Some(scheme),
            Self::Fp8(_) | Self::Mxfp4(_) => None,
        }
    }

    pub(crate) fn is_mxfp4(&self) -> bool {
        matches!(self, Self::Mxfp4(_))
    }

    /// The modules that the file lists as not quantized.
    pub(crate) fn unquantized(&self) -> Unquantized {
        Unquantized::new(match self {
            Self::Fp8(scheme) => &scheme.unquantized,
            Self::Int4(scheme) => &scheme.unquantized,
            Self::Mxfp4(scheme) => &scheme.unquantized,
        })
    }
}

const WHAT_TO_DO: &str = "use the checkpoint in FP8 (compressed-tensors' float-quantized, fbgemm_fp8, or fp8 with weight_block_size), in \
                          4 bits (awq, gptq, mxfp4, or compressed-tensors' pack-quantized), or the unquantized one, with --quantize int8 \
                          for 8-bit weights on a CPU";

fn read<T: DeserializeOwned>(config: &Value) -> Result<T, String> {
    T::deserialize(config).map_err(|error| format!("quantization_config: {error}; download config.json again"))
}

#[derive(Deserialize)]
struct CompressedTensors {
    format: Option<String>,
    config_groups: BTreeMap<String, Group>,
    #[serde(default)]
    ignore: Option<Vec<String>>,
    kv_cache_scheme: Option<Value>,
    sparsity_config: Option<Value>,
    transform_config: Option<Value>,
}

#[derive(PartialEq, Deserialize)]
struct Group {
    format: Option<String>,
    weights: Option<Numbers>,
    input_activations: Option<Numbers>,
    output_activations: Option<Numbers>,
}

#[derive(PartialEq, Deserialize)]
struct Numbers {
    num_bits: u32,
    #[serde(rename = "type")]
    kind: String,
    strategy: Option<String>,
    #[serde(default = "yes")]
    symmetric: bool,
    /// A boolean, or "local".
    #[serde(default)]
    dynamic: Value,
    block_structure: Option<Value>,
    /// The number of inputs per group; -1 for all inputs.
    group_size: Option<i64>,
}

fn yes() -> bool {
    true
}

impl CompressedTensors {
    fn scheme(self) -> Result<Scheme, String> {
        let mut groups = self.config_groups.into_iter();
        let (name, group) = groups.next().ok_or("config_groups is empty")?;
        if let Some((other, _)) = groups.find(|(_, other)| *other != group) {
            return Err(format!("config_groups {name} and {other} differ, but one scheme is supported for all"));
        }
        let mut formats = [self.format.as_deref(), group.format.as_deref()].into_iter().flatten();
        let format = formats.next().unwrap_or(FLOAT_QUANTIZED);
        let known = [FLOAT_QUANTIZED, PACK_QUANTIZED];
        if let Some(other) = std::iter::once(format).chain(formats).find(|other| *other != format || !known.contains(other)) {
            return Err(format!("format {other:?} is not supported"));
        }
        let is_packed = format == PACK_QUANTIZED;
        if self.kv_cache_scheme.is_some() {
            return Err("kv_cache_scheme (scales for K and V) is not supported".into());
        }
        let dense = |config: &Value| config["format"].as_str().is_none_or(|format| format == "dense");
        if self.sparsity_config.as_ref().is_some_and(|config| !dense(config)) {
            return Err("sparsity_config (sparse weights) is not supported".into());
        }
        let is_empty = |config: &Value| config["config_groups"].as_object().is_none_or(|groups| groups.is_empty());
        if self.transform_config.as_ref().is_some_and(|config| !is_empty(config)) {
            return Err("transform_config (transformed weights) is not supported".into());
        }
        if group.output_activations.is_some() {
            return Err("output_activations are not supported".into());
        }
        let weights = group.weights.ok_or("quantized activations of unquantized weights are not supported")?;
        if weights.dynamic != Value::Null && weights.dynamic != Value::Bool(false) {
            return Err("dynamic scales of weights are not supported".into());
        }
        let unquantized = self.ignore.unwrap_or_default();
        if is_packed {
            if group.input_activations.is_some() {
                return Err("activations that are quantized beside weights in 4 bits are not supported".into());
            }
            return int4::packed(&weights, unquantized).map(Scheme::Int4);
        }
        weights.must_be_e4m3("weights")?;
        let scale_per = match weights.strategy.as_deref().unwrap_or("tensor") {
            "tensor" => ScalePer::Tensor,
            "channel" => ScalePer::Row,
            "block" => block(&weights.block_structure.unwrap_or_default())?,
            other => return Err(format!("weights with a scale per {other:?} are not supported")),
        };
        let inputs = match group.input_activations {
            None => Inputs::Unquantized,
            Some(inputs) => {
                inputs.must_be_e4m3("input_activations")?;
                match (&inputs.dynamic, inputs.strategy.as_deref()) {
                    (Value::Bool(true), None | Some("token" | "tensor")) => Inputs::Dynamic { largest_max: None },
                    (Value::Bool(true), Some("group")) if matches!(scale_per, ScalePer::Block { .. }) => {
                        Inputs::Dynamic { largest_max: None }
                    }
                    (Value::Null | Value::Bool(false), None | Some("tensor")) => Inputs::Static,
                    (dynamic, strategy) => {
                        let strategy = strategy.unwrap_or("tensor");
                        return Err(format!("input_activations with dynamic {dynamic} and a scale per {strategy:?} are not supported"));
                    }
                }
            }
        };
        Ok(Scheme::Fp8(Fp8Scheme { scale_name: "weight_scale", scale_per, inputs, unquantized }))
    }
}

const FLOAT_QUANTIZED: &str = "float-quantized";
const PACK_QUANTIZED: &str = "pack-quantized";

impl Numbers {
    fn must_be_e4m3(&self, what: &str) -> Result<(), String> {
        let Self { num_bits, kind, symmetric, .. } = self;
        match (num_bits, kind.as_str(), symmetric) {
            (8, "float", true) => Ok(()),
            (_, _, false) => Err(format!("{what} with zero points (symmetric is false) are not supported")),
            _ => Err(format!("{what} in {num_bits} bits of type {kind:?} are not supported")),
        }
    }
}

#[derive(Deserialize)]
struct Fbgemm {
    activation_scale_ub: Option<f32>,
    modules_to_not_convert: Option<Vec<String>>,
}

impl Fbgemm {
    fn scheme(self) -> Result<Fp8Scheme, String> {
        let largest_max = self.activation_scale_ub;
        if let Some(bound) = largest_max.filter(|bound| !(bound.is_finite() && *bound > 0.0)) {
            return Err(format!("activation_scale_ub is {bound}, which is not a positive number"));
        }
        let unquantized = self.modules_to_not_convert.unwrap_or_default();
        Ok(Fp8Scheme { scale_name: "weight_scale", scale_per: ScalePer::Row, inputs: Inputs::Dynamic { largest_max }, unquantized })
    }
}

#[derive(Deserialize)]
struct Blocks {
    fmt: Option<String>,
    activation_scheme: Option<String>,
    weight_block_size: Option<Value>,
    modules_to_not_convert: Option<Vec<String>>,
    /// The older name of `modules_to_not_convert`.
    ignored_layers: Option<Vec<String>>,
}

impl Blocks {
    fn scheme(self) -> Result<Fp8Scheme, String> {
        if let Some(format) = self.fmt.filter(|format| !["e4m3", "float8_e4m3fn"].contains(&format.as_str())) {
            return Err(format!("fmt {format:?} is not supported"));
        }
        if let Some(scheme) = self.activation_scheme.filter(|scheme| scheme != "dynamic") {
            return Err(format!("activation_scheme {scheme:?} is not supported"));
        }
        let size = self.weight_block_size.filter(|size| !size.is_null()).ok_or("fp8 without weight_block_size is not supported")?;
        let unquantized = [self.modules_to_not_convert, self.ignored_layers].into_iter().flatten().flatten().collect();
        Ok(Fp8Scheme {
            scale_name: "weight_scale_inv",
            scale_per: block(&size)?,
            inputs: Inputs::Dynamic { largest_max: None },
            unquantized,
        })
    }
}

fn block(size: &Value) -> Result<ScalePer, String> {
    match <[usize; 2]>::deserialize(size) {
        Ok([rows, columns]) if rows > 0 && columns > 0 => Ok(ScalePer::Block { rows, columns }),
        _ => Err(format!("a block of {size} is not two positive numbers, such as [128, 128]")),
    }
}

/// Modules that the file lists as not quantized.
pub(crate) struct Unquantized(Vec<Listed>);

enum Listed {
    /// The name of a module, of a module that contains it, or the end of its name.
    Module(String),
    Pattern(Regex),
}

impl Unquantized {
    fn new(names: &[String]) -> Self {
        let listed = names.iter().filter_map(|name| match name.strip_prefix("re:") {
            // A pattern that only Python can read is not checked: the tensors' types decide, not lists.
            Some(pattern) => Regex::new(&format!("^(?:{pattern})")).ok().map(Listed::Pattern),
            None => Some(Listed::Module(name.clone())),
        });
        Self(listed.collect())
    }

    pub(crate) fn contains(&self, module: &str) -> bool {
        self.0.iter().any(|listed| match listed {
            Listed::Pattern(pattern) => pattern.is_match(module),
            Listed::Module(name) => {
                let after = module.strip_prefix(name.as_str());
                let before = module.strip_suffix(name.as_str());
                after.is_some_and(|rest| rest.is_empty() || rest.starts_with('.')) || before.is_some_and(|rest| rest.ends_with('.'))
            }
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(config: Value) -> Result<Fp8Scheme, String> {
        Scheme::parse(Some(&config)).map(|scheme| scheme.and_then(|scheme| scheme.fp8().cloned()).expect("a scheme of FP8"))
    }

    /// The configuration that llm-compressor's FP8_DYNAMIC writes.
    fn dynamic() -> Value {
        let numbers = |strategy: &str, dynamic: bool| {
            json!({"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": true, "dynamic": dynamic, "actorder": null,
                "block_structure": null, "group_size": null, "observer": "minmax", "observer_kwargs": {}})
        };
        json!({
            "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
            "global_compression_ratio": 1.4, "ignore": ["lm_head"], "kv_cache_scheme": null, "sparsity_config": {}, "version": "0.11.0",
            "config_groups": {"group_0": {
                "targets": ["Linear"], "output_activations": null, "weights": numbers("channel", false),
                "input_activations": numbers("token", true),
            }},
        })
    }

    #[test]
    fn the_three_forms_are_read() {
        let scheme = parse(dynamic()).unwrap();
        assert_eq!(
            (scheme.scale_name, scheme.scale_per, scheme.inputs),
            ("weight_scale", ScalePer::Row, Inputs::Dynamic { largest_max: None })
        );
        let mut config = dynamic();
        let group = &mut config["config_groups"]["group_0"];
        group["weights"]["strategy"] = json!("tensor");
        group["input_activations"]["strategy"] = json!("tensor");
        group["input_activations"]["dynamic"] = json!(false);
        let scheme = parse(config).unwrap();
        assert_eq!((scheme.scale_per, scheme.inputs), (ScalePer::Tensor, Inputs::Static));
        let mut config = dynamic();
        let group = &mut config["config_groups"]["group_0"];
        group["weights"]["strategy"] = json!("block");
        group["weights"]["block_structure"] = json!([128, 128]);
        group["input_activations"]["strategy"] = json!("group");
        assert_eq!(parse(config).unwrap().scale_per, ScalePer::Block { rows: 128, columns: 128 });
        let mut config = dynamic();
        config["config_groups"]["group_0"]["input_activations"] = json!(null);
        assert_eq!(parse(config).unwrap().inputs, Inputs::Unquantized);

        let scheme = parse(json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": null})).unwrap();
        assert_eq!((scheme.scale_per, scheme.inputs), (ScalePer::Row, Inputs::Dynamic { largest_max: Some(1200.0) }));

        let blocks = json!({"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]});
        let scheme = parse(blocks).unwrap();
        assert_eq!((scheme.scale_name, scheme.scale_per), ("weight_scale_inv", ScalePer::Block { rows: 128, columns: 128 }));
        assert_eq!(Scheme::parse(None).unwrap(), None);
        assert_eq!(Scheme::parse(Some(&json!(null))).unwrap(), None);
    }

    #[test]
    fn others_are_refused_by_name() {
        type Edit = fn(&mut Value);
        let cases: [(Edit, &str); 17] = [
            (|c| c["quant_method"] = json!("aqlm"), "quant_method \"aqlm\""),
            (|c| c["quant_method"] = json!(null), "quant_method"),
            (|c| c["format"] = json!("int-quantized"), "int-quantized"),
            (|c| c["config_groups"]["group_0"]["format"] = json!("nvfp4-pack-quantized"), "nvfp4-pack-quantized"),
            (|c| c["kv_cache_scheme"] = json!({"num_bits": 8}), "kv_cache_scheme"),
            (|c| c["sparsity_config"] = json!({"format": "sparse-24-bitmask"}), "sparsity_config"),
            (|c| c["transform_config"] = json!({"config_groups": {"u": {}}}), "transform_config"),
            (|c| c["config_groups"] = json!({}), "config_groups is empty"),
            (|c| c["config_groups"]["group_0"]["weights"]["num_bits"] = json!(4), "weights in 4 bits"),
            (|c| c["config_groups"]["group_0"]["weights"]["type"] = json!("int"), "\"int\""),
            (|c| c["config_groups"]["group_0"]["weights"]["symmetric"] = json!(false), "zero points"),
            (|c| c["config_groups"]["group_0"]["weights"]["strategy"] = json!("group"), "group"),
            (|c| c["config_groups"]["group_0"]["weights"] = json!(null), "activations of unquantized weights"),
            (|c| c["config_groups"]["group_0"]["input_activations"]["dynamic"] = json!("local"), "local"),
            (|c| c["config_groups"]["group_1"] = json!({"targets": ["lm_head"]}), "group_1"),
            (|c| *c = json!({"quant_method": "fp8", "weight_block_size": [128]}), "[128]"),
            (|c| *c = json!({"quant_method": "fp8", "fmt": "e5m2", "weight_block_size": [128, 128]}), "e5m2"),
        ];
        for (edit, word) in cases {
            let mut config = dynamic();
            edit(&mut config);
            let error = parse(config).unwrap_err();
            assert!(error.starts_with("quantization_config: ") && error.contains(word) && error.contains("unquantized"), "{error}");
        }
        for (config, word) in [
            (json!({"quant_method": "fp8", "activation_scheme": "dynamic"}), "without weight_block_size"),
            (json!({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]}), "static"),
            (json!({"quant_method": "fbgemm_fp8", "activation_scale_ub": -1.0}), "activation_scale_ub"),
        ] {
            let error = parse(config).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn lists_name_modules_what_they_are_part_of_their_ends_and_patterns() {
        let names = ["lm_head", "model.layers.1", "gate_proj", "re:.*self_attn\\.[qk]_proj", "re:(?<=x)unreadable"];
        let listed = Unquantized::new(&names.map(String::from));
        for module in ["lm_head", "model.layers.1.mlp.up_proj", "model.layers.4.mlp.gate_proj", "model.layers.3.self_attn.k_proj"] {
            assert!(listed.contains(module), "{module}");
        }
        for module in ["model.layers.10.mlp.up_proj", "model.layers.3.self_attn.v_proj", "model.layers.3.mlp.up_gate_proj"] {
            assert!(!listed.contains(module), "{module}");
        }
    }
}
