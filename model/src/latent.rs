//! The settings of latent attention (DeepSeek-V2, 2024, section 2.1): K and V of all heads are one compressed vector and one rotated key.

use crate::config::{Fields, SIZE_MAX};
use serde::Serialize;
use serde_json::Value;

/// The sizes of the parts of queries, keys and values.
#[derive(Clone, Copy, PartialEq, Debug, Serialize)]
pub(crate) struct LatentConfig {
    /// The width that queries' input is compressed to; if `None`, queries are made from the layer's input.
    pub(crate) query_rank: Option<usize>,
    /// The size of the latent that keys and values of all heads are made from.
    pub(crate) rank: usize,
    /// The size of the part of each head's query and key that does not rotate.
    pub(crate) plain: usize,
    /// The size of the part that rotates, which each head's query has, and one key for all heads.
    pub(crate) rotated: usize,
    /// The size of each head's value.
    pub(crate) value: usize,
    /// Whether neighbouring numbers rotate together, instead of those half of `rotated` apart.
    pub(crate) is_interleaved: bool,
}

impl LatentConfig {
    pub(crate) fn parse(fields: &Fields) -> Result<Self, String> {
        let size = |key: &str| match fields.get(key).and_then(Value::as_u64) {
            Some(n) if (1..=SIZE_MAX as u64).contains(&n) => Ok(n as usize),
            _ => Err(format!("{key} is {}, which is not within 1..={SIZE_MAX}", fields.get(key).unwrap_or(&Value::Null))),
        };
        let even = |key: &str, why: &str| match size(key)? {
            n if n.is_multiple_of(2) => Ok(n),
            n => Err(format!("{key} {n} is odd: {why}")),
        };
        let query_rank = match fields.get("q_lora_rank") {
            None | Some(Value::Null) => None,
            Some(_) => Some(size("q_lora_rank")?),
        };
        Ok(Self {
            query_rank,
            rank: even("kv_lora_rank", "the latent is stored in pairs")?,
            plain: size("qk_nope_head_dim")?,
            rotated: even("qk_rope_head_dim", "the rotary embedding turns pairs")?,
            value: even("v_head_dim", "values are computed in pairs")?,
            is_interleaved: match fields.get("rope_interleave") {
                None | Some(Value::Null) => true,
                Some(value) => value.as_bool().ok_or(format!("rope_interleave is {value}, where true or false is needed"))?,
            },
        })
    }

    /// Numbers of a head's query and key.
    pub(crate) fn query_dim(&self) -> usize {
        self.plain + self.rotated
    }

    /// Numbers that a position stores.
    pub(crate) fn stored_dim(&self) -> usize {
        self.rank + self.rotated
    }

    /// The factor of scores. YaRN's `mscale_all_dim` belongs to scores as a whole here, not to the rotated part alone.
    pub(crate) fn score_factor(&self, rope: Option<&Value>) -> Result<f32, String> {
        let factor = 1.0 / (self.query_dim() as f64).sqrt();
        let Some(rope) = rope else { return Ok(factor as f32) };
        let kind = rope.get("rope_type").or(rope.get("type")).and_then(Value::as_str).unwrap_or("default");
        let number = |key: &str| rope.get(key).and_then(Value::as_f64).unwrap_or_default();
        let (all, by) = (number("mscale_all_dim"), number("factor"));
        if kind == "default" || all == 0.0 || by <= 1.0 {
            return Ok(factor as f32);
        }
        let scale = 0.1 * all * by.ln() + 1.0;
        match (factor * scale * scale) as f32 {
            factor if factor.is_finite() && factor > 0.0 => Ok(factor),
            _ => Err(format!("mscale_all_dim {all} with factor {by} makes no sense")),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn settings() -> Value {
        json!({"q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128})
    }

    fn parse(settings: &Value) -> Result<LatentConfig, String> {
        LatentConfig::parse(settings.as_object().unwrap())
    }

    #[test]
    fn deepseek_v3_stores_576_numbers() {
        let config = parse(&settings()).unwrap();
        assert_eq!((config.stored_dim(), config.query_dim(), config.query_rank, config.is_interleaved), (576, 192, Some(1536), true));
        let mut lite = settings();
        lite["q_lora_rank"] = Value::Null;
        assert_eq!(parse(&lite).unwrap().query_rank, None);
    }

    #[test]
    fn malformed_settings_are_named() {
        for (key, value, expected) in [
            ("kv_lora_rank", json!(0), "kv_lora_rank is 0"),
            ("kv_lora_rank", json!(31), "kv_lora_rank 31 is odd"),
            ("qk_rope_head_dim", json!(7), "qk_rope_head_dim 7 is odd"),
            ("qk_rope_head_dim", json!(0), "qk_rope_head_dim is 0"),
            ("qk_nope_head_dim", json!(-1), "qk_nope_head_dim is -1"),
            ("v_head_dim", json!(null), "v_head_dim is null"),
            ("q_lora_rank", json!(0), "q_lora_rank is 0"),
            ("q_lora_rank", json!("many"), "q_lora_rank is \"many\""),
            ("rope_interleave", json!(1), "rope_interleave is 1"),
        ] {
            let mut settings = settings();
            settings[key] = value;
            assert!(parse(&settings).unwrap_err().contains(expected), "{key}");
        }
    }

    #[test]
    fn yarn_scales_scores_by_the_square_of_its_mscale() {
        let config = parse(&settings()).unwrap();
        let plain = 1.0 / 192f32.sqrt();
        assert_eq!(config.score_factor(None).unwrap(), plain);
        let rope = json!({"rope_type": "yarn", "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 1.0});
        let mscale = 0.1 * 40f64.ln() + 1.0;
        assert!((config.score_factor(Some(&rope)).unwrap() - (f64::from(plain) * mscale * mscale) as f32).abs() < 1e-7);
        assert!(config.score_factor(Some(&json!({"type": "yarn", "factor": 1e300, "mscale_all_dim": 1e300}))).is_err());
    }
}
