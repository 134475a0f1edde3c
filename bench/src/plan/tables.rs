//! Models and hardware by name. Both only set rows of the assumptions.

use super::assumptions::Assumptions;
use anyhow::{Context, bail, ensure};
use serde::{Deserialize, Serialize};
use std::{fs, path::Path};

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ModelRow {
    pub name: &'static str,
    pub params_b: f64,
    pub active_b: f64,
    pub layers: f64,
    pub heads: f64,
    pub kv_heads: f64,
    pub head_dim: f64,
    /// The number of layers that keep K and V; 0 for all.
    pub kv_layers: f64,
    /// The count of numbers in a compressed K and V; 0 if K and V are not compressed.
    pub kv_latent: f64,
    pub hidden: f64,
    /// The width of a feed-forward layer, of all experts that a token passes.
    pub intermediate: f64,
    /// The number of experts of a layer, without shared ones; 0 for dense layers.
    pub experts: f64,
    pub experts_used: f64,
    /// The number of layers with experts; 0 for all.
    pub expert_layers: f64,
    /// 1 if experts are spread over GPUs and attention is by sequence, else 0.
    pub expert_parallel: f64,
    /// The bits per weight as published.
    pub weight_bits: f64,
}

const DENSE: ModelRow = ModelRow {
    name: "",
    params_b: 0.0,
    active_b: 0.0,
    layers: 0.0,
    heads: 0.0,
    kv_heads: 0.0,
    head_dim: 128.0,
    kv_layers: 0.0,
    kv_latent: 0.0,
    hidden: 0.0,
    intermediate: 0.0,
    experts: 0.0,
    experts_used: 0.0,
    expert_layers: 0.0,
    expert_parallel: 0.0,
    weight_bits: 16.0,
};

#[rustfmt::skip]
pub const MODELS: [ModelRow; 13] = [
    ModelRow { name: "llama2-70b", params_b: 69.0, active_b: 69.0, layers: 80.0, heads: 64.0, kv_heads: 8.0,
        hidden: 8192.0, intermediate: 28_672.0, ..DENSE },
    ModelRow { name: "llama-3.1-70b", params_b: 70.6, active_b: 70.6, layers: 80.0, heads: 64.0, kv_heads: 8.0,
        hidden: 8192.0, intermediate: 28_672.0, ..DENSE },
    ModelRow { name: "llama-3.1-8b", params_b: 8.03, active_b: 8.03, layers: 32.0, heads: 32.0, kv_heads: 8.0,
        hidden: 4096.0, intermediate: 14_336.0, ..DENSE },
    ModelRow { name: "llama-3.1-405b", params_b: 405.9, active_b: 405.9, layers: 126.0, heads: 128.0, kv_heads: 8.0,
        hidden: 16_384.0, intermediate: 53_248.0, ..DENSE },
    ModelRow { name: "llama2-7b", params_b: 6.74, active_b: 6.74, layers: 32.0, heads: 32.0, kv_heads: 32.0,
        hidden: 4096.0, intermediate: 11_008.0, ..DENSE },
    ModelRow { name: "qwen2.5-7b", params_b: 7.62, active_b: 7.62, layers: 28.0, heads: 28.0, kv_heads: 4.0,
        hidden: 3584.0, intermediate: 18_944.0, ..DENSE },
    ModelRow { name: "mixtral-8x7b", params_b: 46.7, active_b: 12.9, layers: 32.0, heads: 32.0, kv_heads: 8.0,
        hidden: 4096.0, intermediate: 28_672.0, experts: 8.0, experts_used: 2.0, ..DENSE },
    ModelRow { name: "smollm-135m", params_b: 0.135, active_b: 0.135, layers: 30.0, heads: 9.0, kv_heads: 3.0, head_dim: 64.0,
        hidden: 576.0, intermediate: 1536.0, ..DENSE },
    ModelRow { name: "deepseek-v3", params_b: 671.0, active_b: 37.0, layers: 61.0, heads: 128.0, kv_heads: 1.0, head_dim: 160.0, kv_latent: 576.0, weight_bits: 8.0,
        hidden: 7168.0, intermediate: 18_432.0, experts: 256.0, experts_used: 8.0, expert_layers: 58.0, expert_parallel: 1.0, ..DENSE },
    ModelRow { name: "gpt-oss-120b", params_b: 116.8, active_b: 5.1, layers: 36.0, heads: 64.0, kv_heads: 8.0, head_dim: 64.0, weight_bits: 4.3,
        hidden: 2880.0, intermediate: 11_520.0, experts: 128.0, experts_used: 4.0, ..DENSE },
    ModelRow { name: "qwen3-30b-a3b", params_b: 30.5, active_b: 3.3, layers: 48.0, heads: 32.0, kv_heads: 4.0,
        hidden: 2048.0, intermediate: 6144.0, experts: 128.0, experts_used: 8.0, ..DENSE },
    ModelRow { name: "qwen3-next-80b-a3b", params_b: 80.0, active_b: 3.0, layers: 48.0, heads: 16.0, kv_heads: 2.0, head_dim: 256.0, kv_layers: 12.0,
        hidden: 2048.0, intermediate: 5632.0, experts: 512.0, experts_used: 10.0, ..DENSE },
    ModelRow { name: "lfm2-1.2b", params_b: 1.17, active_b: 1.17, layers: 16.0, heads: 32.0, kv_heads: 8.0, head_dim: 64.0, kv_layers: 6.0,
        hidden: 2048.0, intermediate: 8192.0, ..DENSE },
];

#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct HardwareRow {
    pub name: &'static str,
    pub memory_gb: f64,
    pub bandwidth_gb_s: f64,
    /// Dense operations, with 16-bit inputs.
    pub tflops: f64,
    /// The price of one GPU (of the whole machine for `cpu`).
    pub price_h: f64,
    pub nic_gb_s: f64,
    /// The link to other GPUs, in each direction.
    pub link_gb_s: f64,
    /// The number of GPUs that it joins.
    pub link_gpus: f64,
}

/// Links by the vendors' data sheets, half of what these give for both directions: NVLink 4 900 GB/s (H100, H200), NVLink 3 600 (A100) and 400
/// (A800), NVLink 5 1,800 (B200), PCIe 4.0 × 16 64 (L40S). Ranks on CPUs read one another's memory.
#[rustfmt::skip]
pub const HARDWARE: [HardwareRow; 7] = [
    HardwareRow { name: "h100", memory_gb: 80.0, bandwidth_gb_s: 3350.0, tflops: 989.0, price_h: 2.0, nic_gb_s: 50.0, link_gb_s: 450.0, link_gpus: 8.0 },
    HardwareRow { name: "h200", memory_gb: 141.0, bandwidth_gb_s: 4800.0, tflops: 989.0, price_h: 2.8, nic_gb_s: 50.0, link_gb_s: 450.0, link_gpus: 8.0 },
    HardwareRow { name: "a100", memory_gb: 80.0, bandwidth_gb_s: 2039.0, tflops: 312.0, price_h: 1.3, nic_gb_s: 25.0, link_gb_s: 300.0, link_gpus: 8.0 },
    HardwareRow { name: "a800", memory_gb: 80.0, bandwidth_gb_s: 2039.0, tflops: 312.0, price_h: 1.3, nic_gb_s: 25.0, link_gb_s: 200.0, link_gpus: 8.0 },
    HardwareRow { name: "b200", memory_gb: 180.0, bandwidth_gb_s: 7700.0, tflops: 2250.0, price_h: 4.0, nic_gb_s: 50.0, link_gb_s: 900.0, link_gpus: 8.0 },
    HardwareRow { name: "l40s", memory_gb: 48.0, bandwidth_gb_s: 864.0, tflops: 362.0, price_h: 0.9, nic_gb_s: 12.5, link_gb_s: 32.0, link_gpus: 8.0 },
    HardwareRow { name: "cpu", memory_gb: 768.0, bandwidth_gb_s: 460.0, tflops: 9.0, price_h: 2.5, nic_gb_s: 12.5, link_gb_s: 460.0, link_gpus: 1.0 },
];

impl ModelRow {
    pub fn apply(&self, assumptions: Assumptions) -> Assumptions {
        assumptions.with(&[
            ("params_b", self.params_b),
            ("active_b", self.active_b),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("kv_layers", self.kv_layers),
            ("kv_latent", self.kv_latent),
            ("hidden", self.hidden),
            ("intermediate", self.intermediate),
            ("experts", self.experts),
            ("experts_used", self.experts_used),
            ("expert_layers", self.expert_layers),
            ("expert_parallel", self.expert_parallel),
            ("weight_bits", self.weight_bits),
        ])
    }
}

impl HardwareRow {
    pub fn apply(&self, assumptions: Assumptions) -> Assumptions {
        assumptions.with(&[
            ("memory_gb", self.memory_gb),
            ("bandwidth_gb_s", self.bandwidth_gb_s),
            ("tflops", self.tflops),
            ("price_h", self.price_h),
            ("nic_gb_s", self.nic_gb_s),
            ("link_gb_s", self.link_gb_s),
            ("link_gpus", self.link_gpus),
        ])
    }
}

pub fn hardware(name: &str) -> anyhow::Result<HardwareRow> {
    let names = HARDWARE.map(|row| row.name).join(", ");
    HARDWARE.into_iter().find(|row| row.name == name).with_context(|| format!("there is no hardware `{name}`; there are {names}"))
}

/// The assumptions of a model by name, or from a `config.json` or its directory.
pub fn model(name: &str, assumptions: Assumptions) -> anyhow::Result<Assumptions> {
    if let Some(row) = MODELS.iter().find(|row| row.name == name) {
        return Ok(row.apply(assumptions));
    }
    let path = Path::new(name);
    let path = if path.is_dir() { path.join("config.json") } else { path.to_owned() };
    if !path.exists() {
        bail!("there is no model `{name}`, nor such a file; there are {}", MODELS.map(|row| row.name).join(", "));
    }
    let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
    from_config(&text, assumptions).with_context(|| path.display().to_string())
}

#[derive(Deserialize)]
struct Config {
    hidden_size: f64,
    intermediate_size: f64,
    num_hidden_layers: f64,
    num_attention_heads: f64,
    num_key_value_heads: Option<f64>,
    head_dim: Option<f64>,
    vocab_size: f64,
    #[serde(default)]
    tie_word_embeddings: bool,
    #[serde(alias = "num_local_experts")]
    num_experts: Option<f64>,
    num_experts_per_tok: Option<f64>,
    moe_intermediate_size: Option<f64>,
    layer_types: Option<Vec<String>>,
    kv_lora_rank: Option<f64>,
    qk_rope_head_dim: Option<f64>,
}

/// Counts the parameters of a decoder with gated MLPs, dense or of experts, and grouped attention in each layer. If `config.json` describes
/// another kind of layer, its KV is right, and the parameters are those of such a decoder: `--set params_b=…`.
fn from_config(text: &str, assumptions: Assumptions) -> anyhow::Result<Assumptions> {
    let config: Config = serde_json::from_str(text)?;
    let Config { hidden_size: hidden, num_hidden_layers: layers, num_attention_heads: heads, .. } = config;
    ensure!(hidden > 0.0 && layers > 0.0 && heads > 0.0, "hidden_size, num_hidden_layers and num_attention_heads must be above 0");
    let kv_heads = config.num_key_value_heads.unwrap_or(heads);
    let head_dim = config.head_dim.unwrap_or(hidden / heads);
    let attention = hidden * head_dim * (2.0 * heads + 2.0 * kv_heads);
    let width = config.moe_intermediate_size.filter(|_| config.num_experts.is_some()).unwrap_or(config.intermediate_size);
    let expert = 3.0 * hidden * width;
    let experts = config.num_experts.unwrap_or(1.0);
    let used = config.num_experts_per_tok.unwrap_or(1.0).min(experts);
    let embeddings = hidden * config.vocab_size * if config.tie_word_embeddings { 1.0 } else { 2.0 };
    let kv_layers = config
        .layer_types
        .map_or(0.0, |types| types.iter().filter(|kind| kind.ends_with("attention") && *kind != "linear_attention").count() as f64);
    let kv_latent = config.kv_lora_rank.map_or(0.0, |latent| latent + config.qk_rope_head_dim.unwrap_or(0.0));
    let params = |experts: f64| (layers * (attention + experts * expert) + embeddings) / 1e9;
    Ok(assumptions.with(&[
        ("params_b", params(experts)),
        ("active_b", params(used)),
        ("layers", layers),
        ("heads", heads),
        ("kv_heads", kv_heads),
        ("head_dim", head_dim),
        ("kv_layers", kv_layers),
        ("kv_latent", kv_latent),
        ("hidden", hidden),
        ("intermediate", used * width),
        ("experts", config.num_experts.unwrap_or(0.0)),
        ("experts_used", config.num_experts.map_or(0.0, |_| used)),
        ("expert_layers", 0.0),
        ("expert_parallel", f64::from(u8::from(config.num_experts.is_some() && kv_latent > 0.0))),
    ]))
}

#[cfg(test)]
mod tests {
    use super::{super::fleet::Fleet, *};
    use tidemill_sim::shape::SHAPES;

    #[test]
    fn a_config_gives_the_published_parameters() {
        let of = |text: &str| {
            let assumptions = from_config(text, Assumptions::default()).unwrap();
            (assumptions.get("params_b"), assumptions.get("active_b"), assumptions.get("kv_heads"), assumptions.get("head_dim"))
        };
        // huggingface.co/meta-llama/Llama-3.1-8B: 8,030,261,248 with its norms.
        let (params, active, kv_heads, head_dim) = of(r#"{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
            "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": false}"#);
        assert!((params / 8.030_261_248 - 1.0).abs() < 1e-3 && params == active, "{params}");
        assert_eq!((kv_heads, head_dim), (8.0, 128.0));
        // huggingface.co/mistralai/Mixtral-8x7B-v0.1: 46.7 and 12.9 billion.
        let (params, active, ..) =
            of(r#"{"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
            "num_key_value_heads": 8, "vocab_size": 32000, "num_local_experts": 8, "num_experts_per_tok": 2}"#);
        assert!((params / 46.7 - 1.0).abs() < 2e-3 && (active / 12.9 - 1.0).abs() < 3e-3, "{params} {active}");
        assert!(from_config("{}", Assumptions::default()).is_err());
    }

    #[test]
    fn a_token_takes_what_its_model_keeps() {
        let bytes = |name: &str| Fleet::plan(&model(name, Assumptions::default()).unwrap()).kv_bytes_per_token;
        // The simulator's shapes are counted from the tensors.
        for shape in SHAPES {
            assert_eq!(bytes(shape.name), shape.kv_token_bytes() as f64, "{}", shape.name);
        }
        let of = |text: &str| Fleet::plan(&from_config(text, Assumptions::default()).unwrap()).kv_bytes_per_token;
        let config = |more: &str| {
            format!(
                r#"{{"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "vocab_size": 512{more}}}"#
            )
        };
        assert_eq!(of(&config("")), 4.0 * 2.0 * 64.0 * 2.0);
        assert_eq!(of(&config(r#", "kv_lora_rank": 32, "qk_rope_head_dim": 8"#)), 4.0 * 40.0 * 2.0);
        let mixed = r#", "layer_types": ["linear_attention", "full_attention", "sliding_attention", "conv"]"#;
        assert_eq!(of(&config(mixed)), 2.0 * 2.0 * 64.0 * 2.0);
    }

    #[test]
    fn names_and_files_are_found() {
        let fixture = concat!(env!("CARGO_MANIFEST_DIR"), "/../model/tests/fixtures/llama3");
        assert!(model(fixture, Assumptions::default()).unwrap().get("params_b") < 0.1);
        assert_eq!(model("llama-3.1-8b", Assumptions::default()).unwrap().get("layers"), 32.0);
        assert!(model("gpt-9", Assumptions::default()).unwrap_err().to_string().contains("llama2-70b"));
        assert!(hardware("tpu").unwrap_err().to_string().contains("h100"));
    }
}
