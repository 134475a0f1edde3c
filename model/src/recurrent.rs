//! The settings of layers that keep a state where others keep keys and values.

use crate::{
    config::{Fields, SIZE_MAX},
    family::Recurrence,
};
use serde::Serialize;
use serde_json::Value;
use tidemill_kernels::cpu::delta_rule::DeltaHeads;

/// A model's recurrent layers.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct RecurrentConfig {
    /// The numbers of these layers, ascending.
    layers: Vec<usize>,
    pub(crate) kind: RecurrentKind,
}

#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) enum RecurrentKind {
    /// A gate, a causal convolution of each of `channels` numbers with `taps` weights of its own, and another gate (LFM2). The state is the
    /// last `taps - 1` inputs of the convolution.
    ShortConv { channels: usize, taps: usize, has_bias: bool },
    /// Linear attention by a gated delta rule, over rows of a causal convolution (Qwen3-Next). The state is the last `taps - 1` inputs of
    /// the convolution, and a matrix for each value head.
    DeltaRule {
        #[serde(serialize_with = "HeadNumbers::serialize")]
        heads: DeltaHeads,
        taps: usize,
    },
}

/// The fields of [`DeltaHeads`], for the fingerprint.
#[derive(Serialize)]
#[serde(remote = "DeltaHeads")]
struct HeadNumbers {
    key_heads: usize,
    value_heads: usize,
    key_dim: usize,
    value_dim: usize,
}

/// The most taps of a convolution that counts as short.
const TAPS_MAX: usize = 64;
/// The most heads of a delta rule, and the most numbers of one. No published model has as many.
const HEADS_MAX: usize = 1 << 12;
/// The interval of layers that attend, if `layer_types` and `full_attention_interval` are absent.
const INTERVAL: u64 = 4;

impl RecurrentConfig {
    pub(crate) fn parse(rule: Recurrence, fields: &Fields, layers: usize, hidden: usize) -> Result<Self, String> {
        let (kind, name) = match rule {
            Recurrence::ShortConv => {
                let taps = within(fields, "conv_L_cache", TAPS_MAX)?;
                let has_bias = fields.get("conv_bias").and_then(Value::as_bool).unwrap_or(false);
                (RecurrentKind::ShortConv { channels: hidden, taps, has_bias }, "conv")
            }
            Recurrence::DeltaRule(_) => {
                let taps = within(fields, "linear_conv_kernel_dim", TAPS_MAX)?;
                (RecurrentKind::DeltaRule { heads: delta_heads(fields)?, taps }, "linear_attention")
            }
        };
        let of_kind = match (fields.get("layer_types"), rule) {
            (None | Some(Value::Null), Recurrence::ShortConv) => {
                let attending = numbers(fields, "full_attn_idxs")?;
                (0..layers).map(|layer| attending.as_ref().is_some_and(|listed| !listed.contains(&layer))).collect()
            }
            (None | Some(Value::Null), Recurrence::DeltaRule(_)) => {
                let every = match fields.get("full_attention_interval") {
                    None | Some(Value::Null) => INTERVAL,
                    Some(every) => every
                        .as_u64()
                        .filter(|every| *every > 0)
                        .ok_or(format!("full_attention_interval is {every}, which is not a number of layers"))?,
                };
                (1..=layers as u64).map(|nth| !nth.is_multiple_of(every)).collect()
            }
            (Some(types), _) => by_type(types, layers, name)?,
        };
        let listed: Vec<usize> = (0..layers).filter(|&layer| of_kind[layer]).collect();
        if listed.len() == layers {
            return Err("layer_types: no layer attends, which is not supported: blocks would hold no keys and values".into());
        }
        Ok(Self { layers: listed, kind })
    }

    /// The recurrent layers' numbers, ascending.
    pub(crate) fn layers(&self) -> &[usize] {
        &self.layers
    }

    pub(crate) fn is_recurrent(&self, layer: usize) -> bool {
        self.layers.binary_search(&layer).is_ok()
    }

    pub(crate) fn layers_before(&self, layer: usize) -> usize {
        self.layers.partition_point(|&recurrent| recurrent < layer)
    }

    /// Numbers of one layer's state, in f32.
    pub(crate) fn layer_numbers(&self) -> usize {
        match self.kind {
            RecurrentKind::ShortConv { channels, taps, .. } => channels * (taps - 1),
            RecurrentKind::DeltaRule { heads, taps } => heads.channels() * (taps - 1) + heads.state_numbers(),
        }
    }

    /// Numbers of all layers' states.
    pub(crate) fn state_numbers(&self) -> usize {
        self.layers.len() * self.layer_numbers()
    }
}

fn delta_heads(fields: &Fields) -> Result<DeltaHeads, String> {
    let [key_heads, value_heads, key_dim, value_dim] =
        ["linear_num_key_heads", "linear_num_value_heads", "linear_key_head_dim", "linear_value_head_dim"]
            .map(|key| within(fields, key, HEADS_MAX));
    let (key_heads, value_heads) = (key_heads?, value_heads?);
    match value_heads.is_multiple_of(key_heads) {
        true => Ok(DeltaHeads { key_heads, value_heads, key_dim: key_dim?, value_dim: value_dim? }),
        false => Err(format!("linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}")),
    }
}

fn within(fields: &Fields, key: &str, max: usize) -> Result<usize, String> {
    match fields.get(key).and_then(Value::as_u64) {
        Some(n) if (1..=max as u64).contains(&n) => Ok(n as usize),
        _ => Err(format!("{key} is {}, which is not within 1..={max}", fields.get(key).unwrap_or(&Value::Null))),
    }
}

/// The layers that `types` calls `recurrent`; all others must attend to everything.
fn by_type(types: &Value, layers: usize, recurrent: &str) -> Result<Vec<bool>, String> {
    let types = types.as_array().ok_or_else(|| format!("layer_types is {types}, where a list is needed"))?;
    if types.len() != layers {
        return Err(format!("layer_types has {} entries for {layers} layers", types.len()));
    }
    let kind = |kind: &Value| match kind.as_str() {
        Some("full_attention") => Ok(false),
        Some(name) if name == recurrent => Ok(true),
        _ => Err(format!("layer_types: {kind} is not supported; supported are full_attention and {recurrent}")),
    };
    types.iter().map(kind).collect()
}

/// A list of layers' numbers.
fn numbers(fields: &Fields, key: &str) -> Result<Option<Vec<usize>>, String> {
    let wrong = |value: &Value| format!("{key} is {value}, where a list of layers' numbers is needed");
    match fields.get(key) {
        None | Some(Value::Null) => Ok(None),
        Some(value) => {
            let list = value.as_array().ok_or_else(|| wrong(value))?;
            let number = |n: &Value| n.as_u64().filter(|n| *n <= SIZE_MAX as u64).map(|n| n as usize).ok_or_else(|| wrong(value));
            list.iter().map(number).collect::<Result<_, _>>().map(Some)
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::family::DeltaStorage;
    use serde_json::json;

    fn parse(config: Value) -> Result<RecurrentConfig, String> {
        let mut config = config;
        for (key, default) in [("conv_L_cache", json!(3)), ("conv_bias", json!(false))] {
            config.as_object_mut().unwrap().entry(key).or_insert(default);
        }
        RecurrentConfig::parse(Recurrence::ShortConv, config.as_object().unwrap(), 4, 8)
    }

    #[test]
    fn layers_are_those_of_either_layout_of_the_settings() {
        let types = parse(json!({"layer_types": ["conv", "full_attention", "conv", "conv"]})).unwrap();
        let listed = parse(json!({"full_attn_idxs": [1]})).unwrap();
        assert_eq!(types, listed);
        assert_eq!((types.layers(), types.layers_before(3), types.state_numbers()), (&[0, 2, 3][..], 2, 3 * 2 * 8));
        assert!(parse(json!({})).unwrap().layers().is_empty(), "without either, all layers attend");
    }

    fn parse_delta(config: Value) -> Result<RecurrentConfig, String> {
        let mut all = json!({
            "linear_conv_kernel_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 6, "linear_key_head_dim": 8,
            "linear_value_head_dim": 16,
        });
        all.as_object_mut().unwrap().extend(config.as_object().unwrap().clone());
        RecurrentConfig::parse(Recurrence::DeltaRule(DeltaStorage::ByKeyHead), all.as_object().unwrap(), 8, 32)
    }

    #[test]
    fn a_delta_rule_keeps_inputs_and_a_matrix_for_each_value_head() {
        let every_fourth = parse_delta(json!({})).unwrap();
        assert_eq!(every_fourth.layers(), [0, 1, 2, 4, 5, 6]);
        assert_eq!(every_fourth.layer_numbers(), 3 * (2 * 2 * 8 + 6 * 16) + 6 * 8 * 16);
        assert_eq!(parse_delta(json!({"full_attention_interval": 2})).unwrap().layers(), [0, 2, 4, 6]);
        let types = ["linear_attention", "full_attention"].repeat(4);
        assert_eq!(parse_delta(json!({"layer_types": types})).unwrap().layers(), [0, 2, 4, 6]);
        for (config, word) in [
            (json!({"full_attention_interval": 0}), "full_attention_interval"),
            (json!({"full_attention_interval": 9}), "no layer attends"),
            (json!({"linear_num_value_heads": 5}), "not a multiple"),
            (json!({"linear_key_head_dim": 0}), "linear_key_head_dim"),
            (json!({"linear_conv_kernel_dim": null}), "linear_conv_kernel_dim"),
        ] {
            let error = parse_delta(config).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (config, word) in [
            (json!({"layer_types": ["conv", "full_attention"]}), "2 entries for 4 layers"),
            (json!({"layer_types": ["conv", "conv", "conv", "mamba"]}), "mamba"),
            (json!({"full_attn_idxs": []}), "no layer attends"),
            (json!({"full_attn_idxs": [-1]}), "full_attn_idxs"),
            (json!({"full_attn_idxs": [1], "conv_L_cache": 0}), "conv_L_cache"),
        ] {
            let error = parse(config).unwrap_err();
            assert!(error.contains(word), "{error}");
        }
    }
}
