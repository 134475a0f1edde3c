//! Everything that a plan assumes: one row each, with its unit, its source, and its plausible range. The command line, the printed plan,
//! the sensitivities and the page's sliders are made from these rows.

use serde::{Serialize, Serializer};
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, Serialize)]
pub struct Assumption {
    pub key: &'static str,
    pub group: &'static str,
    pub name: &'static str,
    pub unit: &'static str,
    pub value: f64,
    /// The range of the slider.
    pub range: (f64, f64),
    pub source: &'static str,
}

const fn row(
    key: &'static str,
    group: &'static str,
    name: &'static str,
    unit: &'static str,
    value: f64,
    range: (f64, f64),
    source: &'static str,
) -> Assumption {
    Assumption { key, group, name, unit, value, range, source }
}

const OWN: &str = "yours to know";
const MODEL: &str = "the model's config.json";
const SHEET: &str = "the vendor's data sheet, dense";

#[rustfmt::skip]
pub const TABLE: [Assumption; 51] = [
    row("users", "traffic", "daily users", "", 1e6, (1e3, 1e8), OWN),
    row("sessions", "traffic", "sessions per user and day", "", 3.0, (1.0, 20.0), OWN),
    row("turns", "traffic", "turns per session", "", 5.0, (1.0, 50.0), OWN),
    row("input_tokens", "traffic", "prompt tokens per turn, all of them", "", 800.0, (50.0, 32_000.0), OWN),
    row("output_tokens", "traffic", "answer tokens per turn", "", 400.0, (10.0, 4_000.0), OWN),
    row("peak", "traffic", "peak over mean rate", "×", 4.0, (1.0, 10.0), "a public chat service by day and night: 3 to 5"),
    row("swing", "traffic", "peak over night rate", "×", 10.0, (1.0, 50.0), "for autoscaling; the rate is taken as a sine in its logarithm"),
    row("prefix_hit", "traffic", "prompt tokens found in the KV pool", "share", 0.37, (0.0, 0.99),
        "0.37 in Mooncake's conversation trace with an unlimited pool: tidemill-bench replay --cache-only"),
    row("small_share", "traffic", "traffic that a small model can answer", "share", 0.0, (0.0, 0.9), "yours to measure"),
    row("small_cost", "traffic", "cost of such traffic, relative", "share", 0.12, (0.01, 1.0), "parameters of the small model over the large one's: 8B over 70B"),
    row("ttft_s", "limits", "time to the first token", "s", 1.0, (0.1, 30.0), OWN),
    row("tpot_ms", "limits", "time per output token", "ms", 60.0, (5.0, 300.0), "faster than people read: 60 to 100 ms"),
    row("params_b", "model", "parameters", "10⁹", 69.0, (0.1, 1_000.0), MODEL),
    row("active_b", "model", "parameters that a token passes", "10⁹", 69.0, (0.1, 1_000.0), MODEL),
    row("layers", "model", "layers", "", 80.0, (8.0, 160.0), MODEL),
    row("heads", "model", "attention heads", "", 64.0, (4.0, 256.0), MODEL),
    row("kv_heads", "model", "KV heads", "", 8.0, (1.0, 128.0), MODEL),
    row("head_dim", "model", "dimension of a head", "", 128.0, (32.0, 256.0), MODEL),
    row("kv_layers", "model", "layers that keep K and V (0: all)", "", 0.0, (0.0, 160.0), "recurrent layers keep none"),
    row("kv_latent", "model", "numbers of a compressed K and V (0: there are K and V)", "", 0.0, (0.0, 1_024.0), "kv_lora_rank + qk_rope_head_dim"),
    row("hidden", "model", "width of the residual stream", "", 8192.0, (256.0, 32_768.0), MODEL),
    row("intermediate", "model", "width of a feed-forward layer, of all experts that a token passes", "", 28_672.0, (256.0, 131_072.0), MODEL),
    row("experts", "model", "experts of a layer (0: it is dense)", "", 0.0, (0.0, 1_024.0), "the model's config.json, without shared ones"),
    row("experts_used", "model", "experts that a token passes", "", 0.0, (0.0, 64.0), "the model's config.json, without shared ones"),
    row("expert_layers", "model", "layers with experts (0: all)", "", 0.0, (0.0, 160.0), MODEL),
    row("weight_bits", "model", "bits of a weight", "", 16.0, (4.0, 16.0), "bf16; 8 for fp8 or int8"),
    row("kv_bits", "model", "bits of a number in the KV cache", "", 16.0, (4.0, 16.0), "bf16; 8 for fp8 or int8"),
    row("memory_gb", "hardware", "memory of a GPU", "GB", 80.0, (16.0, 1_000.0), SHEET),
    row("bandwidth_gb_s", "hardware", "its memory's bandwidth", "GB/s", 3350.0, (100.0, 10_000.0), SHEET),
    row("tflops", "hardware", "its peak at 16 bits", "TFLOP/s", 989.0, (1.0, 3_000.0), SHEET),
    row("price_h", "hardware", "price of a GPU", "$/h", 2.0, (0.2, 10.0), "what an hour costs: quotes differ threefold, so put in yours"),
    row("nic_gb_s", "hardware", "network of a GPU", "GB/s", 50.0, (1.0, 200.0), "one 400 Gbit/s card per GPU"),
    row("link_gb_s", "hardware", "link between GPUs, in each direction", "GB/s", 450.0, (8.0, 2_000.0),
        "the vendor's data sheet: H100's NVLink has 900 GB/s in both directions together"),
    row("link_gpus", "hardware", "GPUs within reach of that link; others are reached by network", "", 8.0, (1.0, 576.0), "eight in an HGX machine"),
    row("tp", "engine", "GPUs per instance (0: the fewest that hold the model)", "", 0.0, (0.0, 16.0), "weights may fill 70 % of what is not reserved"),
    row("stages", "engine", "pipeline stages of an instance; its GPUs are shared out evenly", "", 1.0, (1.0, 16.0), "as many micro-batches as stages are taken to be under way"),
    row("expert_parallel", "engine", "each expert on one GPU, and attention by sequence (0: every matrix is split)", "", 0.0, (0.0, 1.0),
        "splitting a latent would store it on every GPU"),
    row("all_reduce", "engine", "partial sums by all-reduce (0: columns are gathered)", "", 0.0, (0.0, 1.0),
        "gathers give the same bits on any number of GPUs: docs/guides/tensor-parallel.md"),
    row("link_bits", "engine", "bits of a number between GPUs", "", 16.0, (4.0, 32.0), "bf16; on the way to experts 8, as DeepSeek-V3's report has it"),
    row("reserve_gb", "engine", "memory per GPU for activations and buffers", "GB", 4.0, (0.0, 20.0), "a few GB in common engines"),
    row("flops_efficiency", "engine", "peak that prompts reach", "share", 0.5, (0.1, 0.9), "the simulator's default; measured engines: 0.4 to 0.6"),
    row("memory_efficiency", "engine", "bandwidth that decoding reaches", "share", 0.8, (0.3, 0.95), "the simulator's default; measured engines: 0.7 to 0.85"),
    row("sequences_max", "engine", "sequences that decode together, per instance", "", 256.0, (1.0, 1_024.0), "a common engine's default"),
    row("prefill_tok_s", "engine", "prompt tokens/s of a GPU (0: by the roofline)", "", 0.0, (0.0, 100_000.0), "tidemill-bench kernels, or a load test"),
    row("decode_tok_s", "engine", "output tokens/s of a GPU (0: by the roofline)", "", 0.0, (0.0, 20_000.0), "tidemill-bench goodput, or a load test"),
    row("utilization", "engine", "share of time that prefill may be busy at peak", "share", 0.8, (0.3, 1.0), "queues grow as u / (1 − u)"),
    row("headroom", "engine", "GPUs over what the peak takes", "×", 1.3, (1.0, 2.0), "failures, deploys, growth: 1.2 to 1.5"),
    row("dram_minutes", "pool", "KV kept in DRAM for", "min", 10.0, (0.0, 120.0), "a user's next turn comes within minutes"),
    row("nvme_hours", "pool", "KV kept on NVMe for", "h", 24.0, (0.0, 168.0), "tomorrow's session"),
    row("autoscaled", "cost", "fleet that follows the load", "share", 0.0, (0.0, 1.0), "0: all of it is paid for day and night"),
    row("spot_share", "cost", "fleet on spot machines", "share", 0.0, (0.0, 1.0), "decode instances can be lost: sequences resume elsewhere"),
];

/// An assumption outside the table, for arithmetic and not for sliders.
pub const SPOT_DISCOUNT: f64 = 0.6;
pub const HOURS_PER_MONTH: f64 = 730.0;

/// A value for each row of [`TABLE`].
#[derive(Clone, Debug, PartialEq)]
pub struct Assumptions([f64; TABLE.len()]);

impl Default for Assumptions {
    fn default() -> Self {
        Self(TABLE.map(|row| row.value))
    }
}

fn place(key: &str) -> Option<usize> {
    TABLE.iter().position(|row| row.key == key)
}

impl Assumptions {
    /// The value of a row. Panics if there is no such row: keys in code are literals.
    pub fn get(&self, key: &str) -> f64 {
        self.0[place(key).expect("code asks for rows of the table")]
    }

    #[must_use]
    pub fn with(mut self, changes: &[(&str, f64)]) -> Self {
        for (key, value) in changes {
            self.0[place(key).expect("code sets rows of the table")] = *value;
        }
        self
    }

    /// Sets an assumption from the text `key=value`.
    pub fn set(&mut self, text: &str) -> Result<(), String> {
        let (key, value) = text.split_once('=').ok_or_else(|| format!("`{text}`: write key=value"))?;
        let Some(place) = place(key.trim()) else {
            let keys: Vec<&str> = TABLE.iter().map(|row| row.key).collect();
            return Err(format!("there is no assumption `{}`; there are {}", key.trim(), keys.join(", ")));
        };
        let row = TABLE[place];
        let value: f64 = value.trim().parse().map_err(|_| format!("`{text}`: not a number"))?;
        let most = if row.unit == "share" { 1.0 } else { 1e12 };
        let least = if row.range.0 > 0.0 && row.unit != "share" { f64::MIN_POSITIVE } else { 0.0 };
        if !(least..=most).contains(&value) {
            return Err(format!("`{key}`: must be {} {} at most", if least > 0.0 { "above 0 and" } else { "from 0 to" }, most));
        }
        self.0[place] = value;
        Ok(())
    }

    pub fn rows(&self) -> impl Iterator<Item = (&'static Assumption, f64)> {
        TABLE.iter().zip(self.0)
    }
}

impl Serialize for Assumptions {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_map(self.rows().map(|(row, value)| (row.key, value)).collect::<BTreeMap<_, _>>())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_set_by_name_and_checked() {
        let mut assumptions = Assumptions::default();
        assumptions.set("users = 5e5").unwrap();
        assert_eq!((assumptions.get("users"), assumptions.get("turns")), (5e5, 5.0));
        for (wrong, complaint) in [
            ("user=1", "there are users"),
            ("users", "key=value"),
            ("peak=x", "number"),
            ("peak=0", "above 0"),
            ("prefix_hit=2", "1 at most"),
        ] {
            let error = assumptions.set(wrong).unwrap_err();
            assert!(error.contains(complaint), "{error}");
        }
    }

    #[test]
    fn every_row_is_in_its_range_has_a_source_and_a_key_of_its_own() {
        for (number, row) in TABLE.iter().enumerate() {
            assert!((row.range.0..=row.range.1).contains(&row.value) && !row.source.is_empty(), "{row:?}");
            assert_eq!(place(row.key), Some(number), "{row:?}");
        }
    }
}
