//! Rotary frequencies, computed in f32 step by step like Hugging Face: at position 2,000, the last f32 bit of an angle is worth 1e-4, so a
//! more exact frequency would be a different one.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::f32::consts::PI;

/// The scaling of frequencies for long contexts.
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
    /// Like `Llama3`, with the ramp over the pairs of a head, between those that turn `beta_fast` and `beta_slow` times in the original
    /// context (YaRN: Peng et al., 2023).
    Yarn {
        factor: f32,
        beta_fast: f64,
        beta_slow: f64,
        /// Whether the ramp begins and ends at whole pairs.
        truncate: bool,
        original_positions: f64,
        attention_factor: f32,
    },
    /// Each pair's frequency divided by a factor of its own (LongRoPE: Ding et al., 2024).
    Long {
        factors: Vec<f32>,
        attention_factor: f32,
    },
    /// Only the first part of the pairs rotates, with the frequencies of whole heads.
    Proportional {
        factor: f32,
    },
}

/// The rotary settings of `config.json`.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub(crate) struct RopeConfig {
    pub(crate) theta: f32,
    pub(crate) scaling: RopeScaling,
    /// The share of a head's numbers that rotate; all if `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) part: Option<f64>,
}

/// Settings of `config.json` outside the rotary section that rotations need.
#[derive(Clone, Copy, Default)]
pub(crate) struct Beside {
    pub(crate) theta: Option<f64>,
    pub(crate) part: Option<f64>,
    /// `max_position_embeddings`
    pub(crate) positions: usize,
    /// `original_max_position_embeddings`
    pub(crate) original_positions: Option<f64>,
    /// Whether positions may be on several axes, on all of which text has the same position.
    pub(crate) has_axes: bool,
}

/// The default base.
const THETA_DEFAULT: f64 = 10_000.0;

/// Settings of the rope types that have any.
#[derive(Deserialize)]
struct Settings {
    factor: Option<f64>,
    low_freq_factor: Option<f64>,
    high_freq_factor: Option<f64>,
    original_max_position_embeddings: Option<f64>,
    attention_factor: Option<f64>,
    beta_fast: Option<f64>,
    beta_slow: Option<f64>,
    mscale: Option<f64>,
    mscale_all_dim: Option<f64>,
    truncate: Option<bool>,
    short_factor: Option<Vec<f64>>,
    long_factor: Option<Vec<f64>>,
}

impl RopeConfig {
    /// Parses `rope_parameters` (transformers 5) or `rope_scaling` (older), and the settings outside it. The error completes "config.json:
    /// …".
    pub(crate) fn parse(section: Option<&Value>, beside: Beside) -> Result<Self, String> {
        let empty = Map::new();
        let section = match section {
            None | Some(Value::Null) => &empty,
            Some(Value::Object(section)) => section,
            Some(_) => return Err("the rotary settings (rope_parameters or rope_scaling) must be an object".into()),
        };
        if section.values().any(Value::is_object) {
            return Err("rotary settings per layer type are not supported for this architecture".into());
        }
        let number = |key| section.get(key).and_then(Value::as_f64);
        let theta = number("rope_theta").or(beside.theta).unwrap_or(THETA_DEFAULT);
        let part = number("partial_rotary_factor").or(beside.part).filter(|part| *part != 1.0);
        let kind = section.get("rope_type").or(section.get("type")).map_or(Some("default"), Value::as_str);
        let scaling = match kind {
            None => return Err("rope_type must be a string".into()),
            Some("default") if section.contains_key("mrope_section") && !beside.has_axes => {
                return Err("multimodal rotary settings (mrope_section) are not supported".into());
            }
            // The base grows with a sequence once that is longer than max_position_embeddings. No sequence here is, so every position has
            // the frequencies that transformers gives it.
            Some("default" | "dynamic") => RopeScaling::None,
            Some(kind) => {
                let settings = serde_json::from_value(Value::Object(section.clone())).map_err(|e| format!("rotary settings: {e}"))?;
                scaling(kind, settings, beside)?
            }
        };
        let config = Self { theta: theta as f32, scaling, part };
        config.check()?;
        Ok(config)
    }

    /// The longest context that the scaling is made for; if `None`, that of `config.json`. Published YaRN settings extend a context without
    /// raising `max_position_embeddings`.
    pub(crate) fn extended_positions(&self) -> Option<f64> {
        match self.scaling {
            RopeScaling::Yarn { factor, original_positions, .. } => Some((f64::from(factor) * original_positions).floor()),
            _ => None,
        }
    }

    /// The number of a head's numbers that rotate.
    pub(crate) fn rotated(&self, head_dim: usize) -> usize {
        match (self.part, &self.scaling) {
            (None, _) | (_, RopeScaling::Proportional { .. }) => head_dim,
            (Some(part), _) => (head_dim as f64 * part) as usize,
        }
    }

    /// Checks that the settings cover all pairs of heads of `head_dim` numbers.
    pub(crate) fn check_heads(&self, head_dim: usize) -> Result<(), String> {
        let rotated = self.rotated(head_dim);
        if !rotated.is_multiple_of(2) || rotated == 0 {
            return Err(format!("{rotated} of a head's {head_dim} numbers rotate (partial_rotary_factor), which are no pairs"));
        }
        match &self.scaling {
            RopeScaling::Long { factors, .. } if factors.len() != rotated / 2 => {
                Err(format!("rope type longrope has {} factors for {} pairs of a head's numbers", factors.len(), rotated / 2))
            }
            _ => Ok(()),
        }
    }

    fn check(&self) -> Result<(), String> {
        let positive = |x: f32| x.is_finite() && x > 0.0;
        let sound = match &self.scaling {
            RopeScaling::None => true,
            RopeScaling::Linear { factor } | RopeScaling::Proportional { factor } => positive(*factor),
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_positions } => {
                positive(*factor) && positive(*low_freq_factor) && high_freq_factor > low_freq_factor && positive(*original_positions)
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_positions, attention_factor, .. } => {
                [*factor, *beta_fast as f32, *beta_slow as f32, *original_positions as f32, *attention_factor].into_iter().all(positive)
            }
            RopeScaling::Long { factors, attention_factor } => positive(*attention_factor) && factors.iter().copied().all(positive),
        };
        let part = self.part.is_none_or(|part| part > 0.0 && part <= 1.0);
        if sound && part && positive(self.theta) { Ok(()) } else { Err(format!("rotary settings make no sense: {self:?}")) }
    }
}

/// The scaling of a rope type with settings.
fn scaling(kind: &str, settings: Settings, beside: Beside) -> Result<RopeScaling, String> {
    let need = |value: Option<f64>, key| value.ok_or(format!("rope type {kind} needs {key}"));
    let positions = beside.positions as f64;
    let original = beside.original_positions.or(settings.original_max_position_embeddings);
    Ok(match kind {
        "linear" => RopeScaling::Linear { factor: need(settings.factor, "factor")? as f32 },
        "proportional" => RopeScaling::Proportional { factor: settings.factor.unwrap_or(1.0) as f32 },
        "llama3" => RopeScaling::Llama3 {
            factor: need(settings.factor, "factor")? as f32,
            low_freq_factor: need(settings.low_freq_factor, "low_freq_factor")? as f32,
            high_freq_factor: need(settings.high_freq_factor, "high_freq_factor")? as f32,
            original_positions: need(original, "original_max_position_embeddings")? as f32,
        },
        // Early checkpoints of Phi-3 use the name "su".
        "longrope" | "su" => {
            let original = original.unwrap_or(positions);
            let factor = settings.factor.unwrap_or(positions / original);
            let default = if factor <= 1.0 { 1.0 } else { (1.0 + factor.ln() / original.ln()).sqrt() };
            // Transformers uses one set for sequences up to the original context and the other for longer ones. A prompt's blocks would
            // then change as it grows, so here the model's context chooses for all sequences.
            let (factors, key) = match positions > original {
                true => (settings.long_factor, "long_factor"),
                false => (settings.short_factor, "short_factor"),
            };
            let factors = factors.ok_or(format!("rope type {kind} needs {key}"))?;
            RopeScaling::Long {
                factors: factors.into_iter().map(|factor| factor as f32).collect(),
                attention_factor: settings.attention_factor.unwrap_or(default) as f32,
            }
        }
        "yarn" => {
            let original = original.unwrap_or(positions);
            let factor = settings.factor.unwrap_or(positions / original);
            let mscale = |by: f64| if factor <= 1.0 { 1.0 } else { 0.1 * by * factor.ln() + 1.0 };
            let given = |value: Option<f64>| value.filter(|value| *value != 0.0);
            let default = match (given(settings.mscale), given(settings.mscale_all_dim)) {
                (Some(one), Some(all)) => mscale(one) / mscale(all),
                _ => mscale(1.0),
            };
            RopeScaling::Yarn {
                factor: factor as f32,
                beta_fast: given(settings.beta_fast).unwrap_or(32.0),
                beta_slow: given(settings.beta_slow).unwrap_or(1.0),
                truncate: settings.truncate.unwrap_or(true),
                original_positions: original,
                attention_factor: settings.attention_factor.unwrap_or(default) as f32,
            }
        }
        other => {
            let known = "default, linear, dynamic, llama3, yarn, longrope and proportional";
            return Err(format!("unsupported rope type {other:?}; supported are {known}"));
        }
    })
}

/// The rotation of each pair of a head's numbers from one position to the next.
pub(crate) struct Rope {
    frequencies: Vec<f32>,
    /// The factor of cosines and sines.
    factor: f32,
}

impl Rope {
    pub(crate) fn new(config: &RopeConfig, head_dim: usize) -> Self {
        let (base, rotated) = (f64::from(config.theta), config.rotated(head_dim));
        let power = |i: usize| base.powf(f64::from((2 * i) as f32 / rotated as f32)) as f32;
        let pairs = 0..rotated / 2;
        let (frequencies, factor) = match &config.scaling {
            RopeScaling::Yarn { factor, attention_factor, .. } => {
                let ramp = Ramp::of(&config.scaling, base, rotated);
                let frequency = |i| {
                    let kept = 1.0 - ramp.at(i);
                    1.0 / (factor * power(i)) * (1.0 - kept) + 1.0 / power(i) * kept
                };
                (pairs.map(frequency).collect(), *attention_factor)
            }
            RopeScaling::Long { factors, attention_factor } => {
                (pairs.zip(factors).map(|(i, factor)| 1.0 / (factor * power(i))).collect(), *attention_factor)
            }
            RopeScaling::Proportional { factor } => {
                let turning = (head_dim as f64 * config.part.unwrap_or(1.0)) as usize / 2;
                (pairs.map(|i| if i < turning { 1.0 / power(i) / factor } else { 0.0 }).collect(), 1.0)
            }
            scaling => (pairs.map(|i| scale(1.0 / power(i), scaling)).collect(), 1.0),
        };
        Self { frequencies, factor }
    }

    /// Pairs of a head that rotate.
    pub(crate) fn pairs(&self) -> usize {
        self.frequencies.len()
    }

    /// Appends the cosines and sines of one position's angles.
    pub(crate) fn push(&self, position: usize, cos: &mut Vec<f32>, sin: &mut Vec<f32>) {
        for frequency in &self.frequencies {
            let (s, c) = f64::from(position as f32 * frequency).sin_cos();
            cos.push(c as f32 * self.factor);
            sin.push(s as f32 * self.factor);
        }
    }

    /// The mean cosines and sines of the first `positions` positions' angles.
    pub(crate) fn mean(&self, positions: usize) -> (Vec<f32>, Vec<f32>) {
        let mean = |frequency: &f32, part: fn(f64) -> f64| {
            let sum: f64 = (0..positions).map(|position| part(f64::from(position as f32 * frequency))).sum();
            (sum / positions as f64) as f32 * self.factor
        };
        let all = |part| self.frequencies.iter().map(|frequency| mean(frequency, part)).collect();
        (all(f64::cos), all(f64::sin))
    }
}

/// The pairs between which YaRN changes from kept to divided frequencies.
struct Ramp {
    start: f32,
    len: f32,
}

impl Ramp {
    fn of(scaling: &RopeScaling, base: f64, rotated: usize) -> Self {
        let RopeScaling::Yarn { beta_fast, beta_slow, truncate, original_positions, .. } = scaling else {
            panic!("only YaRN has a ramp");
        };
        let pair_of = |turns: &f64| rotated as f64 * (original_positions / (turns * std::f64::consts::TAU)).ln() / (2.0 * base.ln());
        let (mut start, mut end) = (pair_of(beta_fast), pair_of(beta_slow));
        if *truncate {
            (start, end) = (start.floor(), end.ceil());
        }
        (start, end) = (start.max(0.0), end.min((rotated - 1) as f64));
        let len = if start == end { 0.001 } else { end - start };
        Self { start: start as f32, len: len as f32 }
    }

    fn at(&self, pair: usize) -> f32 {
        ((pair as f32 - self.start) / self.len).clamp(0.0, 1.0)
    }
}

fn scale(frequency: f32, scaling: &RopeScaling) -> f32 {
    match *scaling {
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
        _ => frequency,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn theta(theta: f64) -> Beside {
        Beside { theta: Some(theta), ..Beside::default() }
    }

    #[test]
    fn both_layouts_mean_the_same() {
        let llama3 = json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192});
        let old = RopeConfig::parse(Some(&llama3), theta(5e5)).unwrap();
        let mut new = llama3;
        new["rope_theta"] = json!(5e5);
        assert_eq!(old, RopeConfig::parse(Some(&new), Beside::default()).unwrap());
        assert_eq!(old.theta, 5e5);
        let plain = RopeConfig { theta: 1e4, scaling: RopeScaling::None, part: None };
        assert_eq!(RopeConfig::parse(None, Beside::default()).unwrap(), plain);
        assert_eq!(RopeConfig::parse(Some(&Value::Null), theta(1e4)).unwrap(), plain);
        let linear = RopeConfig::parse(Some(&json!({"type": "linear", "factor": 2})), Beside::default()).unwrap();
        assert_eq!(linear.scaling, RopeScaling::Linear { factor: 2.0 });
    }

    #[test]
    fn what_is_not_supported_is_named() {
        for (section, word) in [
            (json!({"rope_type": "axial", "factor": 4.0}), "axial"),
            (json!({"rope_type": "longrope", "factor": 4.0}), "short_factor"),
            (json!({"rope_type": "yarn", "factor": -4.0, "original_max_position_embeddings": 64}), "make no sense"),
            (json!({"rope_type": "llama3", "factor": 4.0}), "low_freq_factor"),
            (json!({"rope_type": "linear"}), "factor"),
            (json!({"rope_type": "linear", "factor": 0.0}), "make no sense"),
            (json!({"rope_type": 3}), "rope_type"),
            (json!({"full_attention": {"rope_type": "default"}}), "per layer type"),
            (json!({"type": "default", "mrope_section": [16, 24, 24]}), "mrope_section"),
            (json!({"partial_rotary_factor": 1.5}), "make no sense"),
            (json!([]), "object"),
        ] {
            let error = RopeConfig::parse(Some(&section), Beside::default()).unwrap_err();
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

    /// Frequencies of transformers 5.23 for heads of 16, and the factor of cosines and sines.
    #[test]
    fn frequencies_are_those_of_transformers() {
        let yarn = json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 64});
        let yarn_scaled = json!({
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 16.0, "original_max_position_embeddings": 64, "mscale": 1.0,
            "mscale_all_dim": 0.8, "beta_fast": 8.0, "beta_slow": 2.0, "truncate": false,
        });
        let long = json!({
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "partial_rotary_factor": 0.75,
            "short_factor": [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], "long_factor": [1.5, 2.0, 3.0, 4.0, 5.0, 6.0],
        });
        let proportional = json!({"rope_type": "proportional", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "factor": 2.0});
        let cases: [(Value, usize, &[f32], f32); 4] = [
            (
                yarn,
                256,
                &[1.0, 0.111_142_464, 7.905_695e-3, 1.405_853_3e-3, 2.5e-4, 4.445_698_5e-5, 7.905_694e-6, 1.405_853_4e-6],
                1.138_629_4,
            ),
            (yarn_scaled, 1024, &[1.0, 0.121_679_5, 6.25e-3, 1.976_423_7e-3, 6.25e-4, 1.976_423_7e-4, 6.25e-5, 1.976_423_7e-5], 1.045_385),
            (long, 128, &[0.666_666_7, 0.107_721_72, 1.547_196e-2, 2.5e-3, 4.308_868_4e-4, 7.735_983e-5], 1.183_216),
            (proportional, 128, &[0.5, 0.158_113_88, 0.05, 1.581_139e-2, 0.0, 0.0, 0.0, 0.0], 1.0),
        ];
        for (section, positions, frequencies, factor) in cases {
            let config = RopeConfig::parse(Some(&section), Beside { positions, ..Beside::default() }).unwrap();
            config.check_heads(16).unwrap();
            let rope = Rope::new(&config, 16);
            assert_eq!(rope.factor, factor, "{section}");
            assert_eq!(rope.frequencies.len(), frequencies.len(), "{section}");
            for (ours, theirs) in rope.frequencies.iter().zip(frequencies) {
                assert!((ours - theirs).abs() <= 2e-7 * theirs, "{section}: {ours} is not {theirs}");
            }
        }
    }

    #[test]
    fn the_context_chooses_the_factors_of_longrope_for_all_sequences() {
        let section = json!({"type": "su", "short_factor": [1.0, 1.25], "long_factor": [2.0, 4.0]});
        let scaling = |positions, original| {
            let beside = Beside { positions, original_positions: Some(original), ..Beside::default() };
            RopeConfig::parse(Some(&section), beside).unwrap().scaling
        };
        assert_eq!(scaling(4096, 4096.0), RopeScaling::Long { factors: vec![1.0, 1.25], attention_factor: 1.0 });
        let RopeScaling::Long { factors, attention_factor } = scaling(131_072, 4096.0) else { panic!("longrope") };
        assert_eq!((factors, attention_factor), (vec![2.0, 4.0], 1.190_238_1));
        let config = RopeConfig::parse(Some(&section), Beside { positions: 64, ..Beside::default() }).unwrap();
        assert!(config.check_heads(4).is_ok() && config.check_heads(8).unwrap_err().contains("2 factors for 4 pairs"));
    }

    #[test]
    fn dynamic_scaling_begins_beyond_the_context() {
        let config = RopeConfig::parse(Some(&json!({"type": "dynamic", "factor": 4.0})), theta(1e6)).unwrap();
        assert_eq!(config, RopeConfig { theta: 1e6, scaling: RopeScaling::None, part: None });
    }

    #[test]
    fn yarn_extends_the_context() {
        let section = json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
        let extended =
            |section| RopeConfig::parse(section, Beside { positions: 40_960, ..Beside::default() }).unwrap().extended_positions();
        assert_eq!((extended(Some(&section)), extended(None)), (Some(131_072.0), None));
    }
}
