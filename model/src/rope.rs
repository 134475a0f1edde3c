//! Rotary frequencies, computed in f32 step by step like Hugging Face: at position 2,000 the last f32 bit of an angle
//! is worth 1e-4, so a more exact frequency would be a different one.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::f32::consts::PI;

/// How frequencies are scaled for long contexts.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) enum RopeScaling {
    None,
    /// Positions divided by a factor (Chen et al., 2023).
    Linear {
        factor: f32,
    },
    /// Llama 3.1: low frequencies divided by a factor, high ones kept, a ramp between.
    Llama3 {
        factor: f32,
        low_freq_factor: f32,
        high_freq_factor: f32,
        original_positions: f32,
    },
}

/// The rotary settings of `config.json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct RopeConfig {
    pub(crate) theta: f32,
    pub(crate) scaling: RopeScaling,
}

/// The default base.
const THETA_DEFAULT: f64 = 10_000.0;

/// Settings of the rope types that have any.
#[derive(Deserialize)]
struct Settings {
    factor: f64,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
}

impl RopeConfig {
    /// From `rope_parameters` (transformers 5) or `rope_scaling` (older), and `rope_theta` beside them. The error
    /// completes "config.json: …".
    pub(crate) fn parse(section: Option<&Value>, theta_beside: Option<f64>) -> Result<Self, String> {
        let empty = Map::new();
        let section = match section {
            None | Some(Value::Null) => &empty,
            Some(Value::Object(section)) => section,
            Some(_) => return Err("the rotary settings (rope_parameters or rope_scaling) must be an object".into()),
        };
        if section.values().any(Value::is_object) {
            return Err("rotary settings per layer type are not supported".into());
        }
        let number = |key| section.get(key).and_then(Value::as_f64);
        let theta = number("rope_theta").or(theta_beside).unwrap_or(THETA_DEFAULT);
        if number("partial_rotary_factor").is_some_and(|part| part != 1.0) {
            return Err("partial_rotary_factor other than 1 is not supported".into());
        }
        let settings = || serde_json::from_value::<Settings>(Value::Object(section.clone())).map_err(|e| format!("rotary settings: {e}"));
        let kind = section.get("rope_type").or(section.get("type")).map_or(Some("default"), Value::as_str);
        let scaling = match kind {
            Some("default") if !section.contains_key("mrope_section") => RopeScaling::None,
            Some("linear") => RopeScaling::Linear { factor: settings()?.factor as f32 },
            Some("llama3") => {
                let settings = settings()?;
                let need = |value: Option<f64>, key| value.map(|v| v as f32).ok_or(format!("rope type llama3 needs {key}"));
                RopeScaling::Llama3 {
                    factor: settings.factor as f32,
                    low_freq_factor: need(settings.low_freq_factor, "low_freq_factor")?,
                    high_freq_factor: need(settings.high_freq_factor, "high_freq_factor")?,
                    original_positions: need(settings.original_max_position_embeddings, "original_max_position_embeddings")?,
                }
            }
            Some("default") => return Err("multimodal rotary settings (mrope_section) are not supported".into()),
            Some(other) => return Err(format!("unsupported rope type {other:?}; supported are default, linear and llama3")),
            None => return Err("rope_type must be a string".into()),
        };
        let config = Self { theta: theta as f32, scaling };
        config.check()?;
        Ok(config)
    }

    fn check(&self) -> Result<(), String> {
        let positive = |x: f32| x.is_finite() && x > 0.0;
        let sound = match self.scaling {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } => positive(factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                positive(factor) && positive(low_freq_factor) && high_freq_factor > low_freq_factor && positive(original_positions)
            }
        };
        if sound && positive(self.theta) { Ok(()) } else { Err(format!("rotary settings make no sense: {self:?}")) }
    }
}

/// By how much each pair of a head's numbers rotates from one position to the next.
pub(crate) struct Rope {
    frequencies: Vec<f32>,
}

impl Rope {
    pub(crate) fn new(config: &RopeConfig, head_dim: usize) -> Self {
        let base = f64::from(config.theta);
        let frequency = |i: usize| {
            let exponent = (2 * i) as f32 / head_dim as f32;
            scale(1.0 / base.powf(f64::from(exponent)) as f32, &config.scaling)
        };
        Self { frequencies: (0..head_dim / 2).map(frequency).collect() }
    }

    /// Appends the cosines and sines of one position's angles.
    pub(crate) fn push(&self, position: usize, cos: &mut Vec<f32>, sin: &mut Vec<f32>) {
        for frequency in &self.frequencies {
            let (s, c) = f64::from(position as f32 * frequency).sin_cos();
            cos.push(c as f32);
            sin.push(s as f32);
        }
    }
}

fn scale(frequency: f32, scaling: &RopeScaling) -> f32 {
    match *scaling {
        RopeScaling::None => frequency,
        RopeScaling::Linear { factor } => frequency / factor,
        RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
            let wavelength = 2.0 * PI / frequency;
            if wavelength > original_positions / low_freq_factor {
                frequency / factor
            } else if wavelength < original_positions / high_freq_factor {
                frequency
            } else {
                let smooth = (original_positions / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                (1.0 - smooth) * frequency / factor + smooth * frequency
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn both_layouts_mean_the_same() {
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        let old = RopeConfig::parse(Some(&llama3), Some(5e5)).unwrap();
        let mut new = llama3;
        new["rope_theta"] = json!(5e5);
        assert_eq!(old, RopeConfig::parse(Some(&new), None).unwrap());
        assert_eq!(old.theta, 5e5);
        let plain = RopeConfig { theta: 1e4, scaling: RopeScaling::None };
        assert_eq!(RopeConfig::parse(None, None).unwrap(), plain);
        assert_eq!(RopeConfig::parse(Some(&Value::Null), Some(1e4)).unwrap(), plain);
        let linear = RopeConfig::parse(Some(&json!({"type": "linear", "factor": 2})), None).unwrap();
        assert_eq!(linear.scaling, RopeScaling::Linear { factor: 2.0 });
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (section, word) in [
            (json!({"rope_type": "yarn", "factor": 4.0}), "yarn"),
            (json!({"type": "dynamic", "factor": 4.0}), "dynamic"),
            (json!({"rope_type": "llama3", "factor": 4.0}), "low_freq_factor"),
            (json!({"rope_type": "linear"}), "factor"),
            (json!({"rope_type": "linear", "factor": 0.0}), "make no sense"),
            (json!({"rope_type": 3}), "rope_type"),
            (json!({"full_attention": {"rope_type": "default"}}), "per layer type"),
            (json!({"type": "default", "mrope_section": [16, 24, 24]}), "mrope_section"),
            (json!({"partial_rotary_factor": 0.5}), "partial_rotary_factor"),
            (json!([]), "object"),
        ] {
            let error = RopeConfig::parse(Some(&section), None).unwrap_err();
            assert!(error.contains(word), "{section}: {error}");
        }
    }

    #[test]
    fn llama3_keeps_high_frequencies_and_divides_low_ones() {
        let scaling = RopeScaling::Llama3 { factor: 8.0, low_freq_factor: 1.0, high_freq_factor: 4.0, original_positions: 64.0 };
        assert_eq!(scale(1.0, &scaling), 1.0);
        assert_eq!(scale(0.01, &scaling), 0.01 / 8.0);
        let between = scale(0.2, &scaling);
        assert!(between > 0.2 / 8.0 && between < 0.2);
    }
}
