//! From assumptions to a fleet. `page/page.js` does the same arithmetic, line by line, and checks itself against cases that are computed
//! here.

use super::assumptions::{Assumptions, HOURS_PER_MONTH, SPOT_DISCOUNT};
use serde::Serialize;

const DAY_S: f64 = 86_400.0;
/// The points of the day at which the load is evaluated.
const DAY_POINTS: u32 = 96;
/// The share of the free memory that weights may fill, if the number of GPUs is not given.
const WEIGHTS_MAX: f64 = 0.7;
const GPUS_PER_INSTANCE_MAX: f64 = 64.0;

/// A planned fleet. Rates are per second; bytes are decimal.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Fleet {
    pub turns_per_day: f64,
    pub output_tokens_per_day: f64,
    pub mean_requests_per_s: f64,
    pub peak_requests_per_s: f64,
    pub mean_output_tokens_per_s: f64,
    pub peak_output_tokens_per_s: f64,
    /// The prompt tokens per second at peak, without cached ones.
    pub peak_prompt_tokens_per_s: f64,
    /// The number by Little's law, if both limits are just kept.
    pub turns_in_flight: f64,
    pub kv_bytes_per_token: f64,
    /// The KV of a turn in the middle of its answer.
    pub kv_gb_per_turn: f64,
    pub kv_in_flight_gb: f64,
    pub weights_gb: f64,
    pub gpus_per_instance: f64,
    /// The memory left for KV.
    pub kv_gb_per_gpu: f64,
    /// The sequences that an instance decodes together, limited by memory, by TPOT, or by the engine.
    pub batch: f64,
    pub step_ms: f64,
    pub decode_tok_s_per_gpu: f64,
    pub prefill_tok_s_per_gpu: f64,
    /// The mean at peak: waiting (a queue with Poisson arrivals and equal service times), the prompt, and one step.
    pub ttft_s: f64,
    pub prefill_gpus: f64,
    pub decode_gpus: f64,
    pub small_model_gpus: f64,
    pub gpus: f64,
    pub pool_dram_gb: f64,
    pub pool_nvme_gb: f64,
    /// K and V into the pool and out of it, at peak.
    pub network_gb_s: f64,
    /// The share of the capacity of the fleet's network cards.
    pub network_share: f64,
    pub dollars_per_month: f64,
    pub dollars_per_million_output_tokens: f64,
    pub dollars_per_turn: f64,
}

impl Fleet {
    pub fn plan(a: &Assumptions) -> Fleet {
        let v = |key| a.get(key);
        let turns_per_day = v("users") * v("sessions") * v("turns");
        let mean_requests_per_s = turns_per_day / DAY_S;
        let peak_requests_per_s = mean_requests_per_s * v("peak");
        let own = 1.0 - v("small_share");
        let computed = v("input_tokens") * (1.0 - v("prefix_hit"));
        let peak_prompt_tokens_per_s = peak_requests_per_s * computed;
        let peak_output_tokens_per_s = peak_requests_per_s * v("output_tokens");
        let turns_in_flight = peak_requests_per_s * (v("ttft_s") + v("output_tokens") * v("tpot_ms") / 1e3);

        let kv_layers = if v("kv_layers") > 0.0 { v("kv_layers") } else { v("layers") };
        let kv_numbers = if v("kv_latent") > 0.0 { v("kv_latent") } else { 2.0 * v("kv_heads") * v("head_dim") };
        let kv_bytes_per_token = kv_layers * kv_numbers * v("kv_bits") / 8.0;
        let kv_gb_per_turn = (v("input_tokens") + v("output_tokens") / 2.0) * kv_bytes_per_token / 1e9;
        let weights_gb = v("params_b") * v("weight_bits") / 8.0;
        let free_gb = v("memory_gb") - v("reserve_gb");
        let gpus_per_instance = if v("tp") > 0.0 { v("tp") } else { least_gpus(weights_gb, free_gb) };
        let kv_gb_per_gpu = free_gb - weights_gb / gpus_per_instance;

        let bytes_s = gpus_per_instance * v("bandwidth_gb_s") * v("memory_efficiency");
        let flops = v("tflops") * 1e12 * v("flops_efficiency");
        let token_flops = 2.0 * v("active_b") * 1e9;
        let by_memory = kv_gb_per_gpu * gpus_per_instance / kv_gb_per_turn;
        let by_time = (v("tpot_ms") / 1e3 * bytes_s - weights_gb) / kv_gb_per_turn;
        let by_compute = v("tpot_ms") / 1e3 * flops * gpus_per_instance / token_flops;
        let batch = by_memory.min(by_time).min(by_compute).min(v("sequences_max")).max(0.0);
        let step_s = ((weights_gb + batch * kv_gb_per_turn) / bytes_s).max(batch * token_flops / (flops * gpus_per_instance));
        let decode_tok_s_per_gpu = if v("decode_tok_s") > 0.0 { v("decode_tok_s") } else { batch / step_s / gpus_per_instance };
        // Each token attends to half the prompt: four operations per head, dimension and pair.
        let attention_flops = 4.0 * kv_layers * v("heads") * v("head_dim") * v("input_tokens") / 2.0;
        let prefill_tok_s_per_gpu = if v("prefill_tok_s") > 0.0 { v("prefill_tok_s") } else { flops / (token_flops + attention_flops) };

        let prefill_needed = peak_prompt_tokens_per_s / (prefill_tok_s_per_gpu * v("utilization"));
        let decode_needed = peak_output_tokens_per_s / decode_tok_s_per_gpu;
        let instances = |needed: f64| (needed * v("headroom") / gpus_per_instance - 1e-9).ceil().max(0.0) * gpus_per_instance;
        let prefill_gpus = instances(own * prefill_needed);
        let decode_gpus = instances(own * decode_needed);
        let small_needed = v("small_share") * v("small_cost") * (prefill_needed + decode_needed);
        let small_model_gpus = (small_needed * v("headroom") - 1e-9).ceil().max(0.0);
        let gpus = prefill_gpus + decode_gpus + small_model_gpus;

        let prompt_s = computed / (prefill_tok_s_per_gpu * gpus_per_instance);
        let busy = (own * prefill_needed * v("utilization") / prefill_gpus.max(gpus_per_instance)).min(0.99);
        let ttft_s = prompt_s * (1.0 + busy / (2.0 * (1.0 - busy))) + step_s;

        let kept_gb_s = (computed + v("output_tokens")) * kv_bytes_per_token / 1e9;
        let network_gb_s = own * peak_requests_per_s * (computed + v("input_tokens")) * kv_bytes_per_token / 1e9;
        let running = v("autoscaled") * mean_over_peak(v("swing")) + 1.0 - v("autoscaled");
        let dollars_per_month = gpus * v("price_h") * HOURS_PER_MONTH * running * (1.0 - v("spot_share") * SPOT_DISCOUNT);
        let turns_per_month = mean_requests_per_s * 3600.0 * HOURS_PER_MONTH;
        Fleet {
            turns_per_day,
            output_tokens_per_day: turns_per_day * v("output_tokens"),
            mean_requests_per_s,
            peak_requests_per_s,
            mean_output_tokens_per_s: mean_requests_per_s * v("output_tokens"),
            peak_output_tokens_per_s,
            peak_prompt_tokens_per_s,
            turns_in_flight,
            kv_bytes_per_token,
            kv_gb_per_turn,
            kv_in_flight_gb: turns_in_flight * kv_gb_per_turn,
            weights_gb,
            gpus_per_instance,
            kv_gb_per_gpu,
            batch,
            step_ms: step_s * 1e3,
            decode_tok_s_per_gpu,
            prefill_tok_s_per_gpu,
            ttft_s,
            prefill_gpus,
            decode_gpus,
            small_model_gpus,
            gpus,
            pool_dram_gb: own * peak_requests_per_s * 60.0 * v("dram_minutes") * kept_gb_s,
            pool_nvme_gb: own * mean_requests_per_s * 3600.0 * v("nvme_hours") * kept_gb_s,
            network_gb_s,
            network_share: network_gb_s / (gpus.max(1.0) * v("nic_gb_s")),
            dollars_per_month,
            dollars_per_million_output_tokens: dollars_per_month / (turns_per_month * v("output_tokens") / 1e6),
            dollars_per_turn: dollars_per_month / turns_per_month,
        }
    }

    /// The obstacles to this plan.
    pub fn warnings(&self, a: &Assumptions) -> Vec<String> {
        let mut warnings = Vec::new();
        let mut warn = |wrong: bool, text: String| warnings.extend(wrong.then_some(text));
        warn(self.kv_gb_per_gpu <= 0.0, format!("the weights do not fit {} GPUs: raise `tp`", self.gpus_per_instance));
        warn(
            self.kv_gb_per_gpu > 0.0 && self.batch < 1.0 && a.get("decode_tok_s") == 0.0,
            "not even one sequence decodes within the limit of TPOT: raise `tp` or `tpot_ms`".into(),
        );
        warn(
            self.ttft_s > a.get("ttft_s"),
            format!("the mean TTFT at peak, {:.2} s, is above the limit of {} s", self.ttft_s, a.get("ttft_s")),
        );
        warn(self.network_share > 0.7, format!("K and V take {:.0} % of the network", 100.0 * self.network_share));
        warnings
    }
}

/// The least power of two of GPUs that hold the weights.
fn least_gpus(weights_gb: f64, free_gb: f64) -> f64 {
    let mut gpus = 1.0;
    while weights_gb / gpus > WEIGHTS_MAX * free_gb && gpus < GPUS_PER_INSTANCE_MAX {
        gpus *= 2.0;
    }
    gpus
}

/// The ratio of mean and peak for a day whose rate is a sine in its logarithm and falls to 1 / `swing` of the peak.
pub fn mean_over_peak(swing: f64) -> f64 {
    let at = |point: u32| swing.powf(((std::f64::consts::TAU * f64::from(point) / f64::from(DAY_POINTS)).cos() - 1.0) / 2.0);
    (0..DAY_POINTS).map(at).sum::<f64>() / f64::from(DAY_POINTS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_is_its_parts() {
        let assumptions = Assumptions::default();
        let fleet = Fleet::plan(&assumptions);
        assert_eq!((fleet.turns_per_day, fleet.kv_bytes_per_token, fleet.gpus_per_instance), (15e6, 327_680.0, 4.0));
        // This is 80 GB less 138 / 4 of weights and 4 of reserve.
        assert!((fleet.kv_gb_per_gpu - 41.5).abs() < 1e-9);
        assert!(fleet.step_ms <= 60.0 + 1e-9 && fleet.batch <= 256.0);
        assert_eq!(fleet.gpus % 4.0, 0.0);
        assert!(fleet.warnings(&assumptions).is_empty(), "{:?}", fleet.warnings(&assumptions));
    }

    #[test]
    fn what_cannot_be_is_said() {
        let said = |changes: &[(&str, f64)]| {
            let assumptions = Assumptions::default().with(changes);
            Fleet::plan(&assumptions).warnings(&assumptions).join("; ")
        };
        assert!(said(&[("tp", 1.0)]).contains("do not fit"));
        assert!(said(&[("tpot_ms", 5.0)]).contains("not even one sequence"));
        assert!(said(&[("ttft_s", 0.02)]).contains("TTFT"));
        assert!(said(&[("nic_gb_s", 0.01)]).contains("network"));
    }

    #[test]
    fn more_of_everything_costs_more() {
        let dollars = |changes: &[(&str, f64)]| Fleet::plan(&Assumptions::default().with(changes)).dollars_per_month;
        let base = dollars(&[]);
        for dearer in [("users", 2e6), ("input_tokens", 1600.0), ("price_h", 3.0), ("headroom", 1.5), ("peak", 5.0)] {
            assert!(dollars(&[dearer]) > base, "{dearer:?}");
        }
        for cheaper in [("prefix_hit", 0.7), ("kv_bits", 8.0), ("autoscaled", 1.0), ("spot_share", 0.5), ("small_share", 0.5)] {
            assert!(dollars(&[cheaper]) <= base, "{cheaper:?}");
        }
    }
}
