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
    pub weights_gb_per_gpu: f64,
    /// The memory left for KV.
    pub kv_gb_per_gpu: f64,
    /// A token's KV on each GPU of its instance, on average.
    pub kv_bytes_per_token_per_gpu: f64,
    /// The bytes that a GPU receives from others for each row that it computes, in each layer with collectives.
    pub collective_bytes: f64,
    /// The bytes that a row takes from one pipeline stage to the next.
    pub stage_bytes: f64,
    /// The time of collectives in a decode step.
    pub collective_ms: f64,
    /// The time of collectives for a thousand prompt tokens of an instance.
    pub collective_prompt_ms: f64,
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
        let stages = v("stages").floor().max(1.0);
        let is_spread = v("expert_parallel") > 0.5 && v("experts") > v("experts_used");
        // A token passes all parameters but those of the experts that it does not use, which are equally large.
        let experts_b = (v("params_b") - v("active_b")) / (v("experts") - v("experts_used")) * v("experts");
        let experts_gb = if is_spread { experts_b.min(v("params_b")) * v("weight_bits") / 8.0 } else { 0.0 };
        // With experts spread over GPUs, each GPU has all other weights of its stage.
        let weights_per_gpu =
            |gpus: f64| if is_spread { (weights_gb - experts_gb) / stages + experts_gb / gpus } else { weights_gb / gpus };
        let gpus_per_instance = if v("tp") > 0.0 { v("tp") } else { least_gpus(weights_per_gpu, free_gb) };
        let weights_gb_per_gpu = weights_per_gpu(gpus_per_instance);
        let kv_gb_per_gpu = free_gb - weights_gb_per_gpu;
        let ranks = (gpus_per_instance / stages).max(1.0);
        // A head of keys, and a latent, is on each rank that needs it.
        let kv_heads = if v("kv_latent") > 0.0 { 1.0 } else { v("kv_heads") };
        let kv_copies = if is_spread { 1.0 } else { (ranks / kv_heads).max(1.0) };
        let kv_gb_per_turn_per_gpu = kv_gb_per_turn * kv_copies / gpus_per_instance;

        let of_others = (ranks - 1.0) / ranks;
        let numbers = if v("all_reduce") > 0.5 {
            2.0 * 2.0 * v("hidden")
        } else {
            v("heads") * v("head_dim") + 2.0 * v("hidden") + v("intermediate")
        };
        let to_experts_and_back = v("experts_used") * v("hidden") * (8.0 + v("link_bits")) / 8.0;
        let collective_bytes = of_others * if is_spread { to_experts_and_back } else { numbers * v("link_bits") / 8.0 };
        let stage_bytes = if stages > 1.0 { v("hidden") * v("link_bits") / 8.0 } else { 0.0 };
        // Bytes come from all other ranks alike, by the link and by the network at the same time.
        let near = (ranks.min(v("link_gpus")) - 1.0).max(0.0);
        let share = |gpus: f64| if ranks > 1.0 { gpus / (ranks - 1.0) } else { 0.0 };
        let s_per_byte = (share(near) / v("link_gb_s")).max(share(ranks - 1.0 - near) / v("nic_gb_s")) / 1e9;
        let layers = if is_spread && v("expert_layers") > 0.0 { v("expert_layers") } else { v("layers") };
        // The rows of an instance are in `stages` micro-batches; with attention by sequence, each rank has a part of them.
        let rows_together = if is_spread { ranks } else { 1.0 };
        let hops_s = (stages - 1.0) / stages * stage_bytes / (v("nic_gb_s") * 1e9);
        let row_s = layers * collective_bytes * s_per_byte / (stages * rows_together) + hops_s;

        let bytes_s = v("bandwidth_gb_s") * v("memory_efficiency");
        let flops = v("tflops") * 1e12 * v("flops_efficiency");
        let token_flops = 2.0 * v("active_b") * 1e9;
        // A token passes the stages one after the other.
        let weights_s = stages * weights_gb_per_gpu / bytes_s;
        let by_memory = kv_gb_per_gpu / kv_gb_per_turn_per_gpu;
        let by_time = (v("tpot_ms") / 1e3 - weights_s) / (kv_gb_per_turn_per_gpu / bytes_s + row_s);
        let by_compute = v("tpot_ms") / 1e3 / (token_flops / (flops * gpus_per_instance) + row_s);
        let batch = by_memory.min(by_time).min(by_compute).min(v("sequences_max")).max(0.0);
        let step_s =
            (weights_s + batch * kv_gb_per_turn_per_gpu / bytes_s).max(batch * token_flops / (flops * gpus_per_instance)) + batch * row_s;
        let decode_tok_s_per_gpu = if v("decode_tok_s") > 0.0 { v("decode_tok_s") } else { batch / step_s / gpus_per_instance };
        // Each token attends to half the prompt: four operations per head, dimension and pair.
        let attention_flops = 4.0 * kv_layers * v("heads") * v("head_dim") * v("input_tokens") / 2.0;
        let prefill_tok_s_per_gpu = if v("prefill_tok_s") > 0.0 {
            v("prefill_tok_s")
        } else {
            1.0 / ((token_flops + attention_flops) / flops + gpus_per_instance * row_s)
        };

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
            weights_gb_per_gpu,
            kv_gb_per_gpu,
            kv_bytes_per_token_per_gpu: kv_bytes_per_token * kv_copies / gpus_per_instance,
            collective_bytes,
            stage_bytes,
            collective_ms: batch * row_s * 1e3,
            collective_prompt_ms: 1e3 * row_s * 1e3,
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
        let stages = a.get("stages").floor().max(1.0);
        warn(
            self.gpus_per_instance % stages != 0.0,
            format!("{} GPUs cannot be shared out over {stages} stages evenly: change `tp` or `stages`", self.gpus_per_instance),
        );
        warn(self.network_share > 0.7, format!("K and V take {:.0} % of the network", 100.0 * self.network_share));
        warnings
    }
}

/// The least power of two of GPUs that hold the weights, of which each has `weights_gb` of their number.
fn least_gpus(weights_gb: impl Fn(f64) -> f64, free_gb: f64) -> f64 {
    let mut gpus = 1.0;
    while weights_gb(gpus) > WEIGHTS_MAX * free_gb && gpus < GPUS_PER_INSTANCE_MAX {
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

    /// The rows of docs/results/parallel.md, computed by hand.
    #[test]
    fn a_70b_on_eight_gpus_is_split() {
        let of = |changes: &[(&str, f64)]| Fleet::plan(&Assumptions::default().with(&[("tp", 8.0)]).with(changes));
        let gathers = of(&[]);
        // 69 × 2 GB / 8; 80 layers × 2 × 8 heads × 128 × 2 bytes / 8, one KV head on each GPU.
        assert_eq!((gathers.weights_gb_per_gpu, gathers.kv_bytes_per_token_per_gpu), (17.25, 40_960.0));
        // 7/8 of (64 × 128 + 2 × 8192 + 28672) numbers of 2 bytes; 80 × 93,184 B / 450 GB/s are 16.566 µs.
        assert_eq!(gathers.collective_bytes, 93_184.0);
        assert!((gathers.collective_prompt_ms - 16.566).abs() < 1e-3, "{gathers:?}");
        assert!((gathers.collective_ms - 16.566e-3 * gathers.batch).abs() < 1e-3 * gathers.batch);
        // 7/8 of 2 × 2 × 8192 numbers of 2 bytes.
        let sums = of(&[("all_reduce", 1.0)]);
        assert_eq!(sums.collective_bytes, 57_344.0);
        assert!(sums.step_ms < gathers.step_ms || sums.batch > gathers.batch);
        // On sixteen GPUs, two have the same KV head, and eight of fifteen others are behind the network: 8 / 15 of the bytes at 50 GB/s.
        let sixteen = of(&[("tp", 16.0)]);
        assert_eq!((sixteen.kv_bytes_per_token_per_gpu, sixteen.collective_bytes), (40_960.0, 99_840.0));
        assert!((sixteen.collective_prompt_ms - 80.0 * 99_840.0 * 8.0 / 15.0 / 50e3).abs() < 1e-6);
    }

    #[test]
    fn experts_are_spread_over_sixteen_gpus() {
        let assumptions = crate::plan::tables::model("deepseek-v3", Assumptions::default()).unwrap();
        let of = |changes: &[(&str, f64)]| Fleet::plan(&assumptions.clone().with(&[("tp", 16.0)]).with(changes));
        let fleet = of(&[("link_gpus", 16.0)]);
        // A layer's 248 unused experts are 634 of 671 billion parameters, all 256 are 654.45; 16.55 + 654.45 / 16 GB.
        assert!((fleet.weights_gb_per_gpu - 57.45).abs() < 0.01, "{fleet:?}");
        // 61 × 576 numbers of 2 bytes, on one of sixteen.
        assert_eq!(fleet.kv_bytes_per_token_per_gpu, 4392.0);
        // 15/16 of 8 experts × 7168 numbers, in 8 bits to them and in 16 back.
        assert_eq!(fleet.collective_bytes, 161_280.0);
        // 58 layers × 161,280 B / 450 GB/s are 20.79 µs for each row of a GPU, a sixteenth for each of the instance.
        assert!((fleet.collective_prompt_ms - 20.787 / 16.0).abs() < 1e-3, "{fleet:?}");
        // Two machines of eight: 8 / 15 of the bytes at 50 GB/s.
        assert!((of(&[]).collective_prompt_ms - 99.779 / 16.0).abs() < 1e-3);
        // Split like a dense model, each GPU has the whole latent.
        let split = of(&[("expert_parallel", 0.0)]);
        assert_eq!((split.kv_bytes_per_token_per_gpu, split.weights_gb_per_gpu), (70_272.0, 671.0 / 16.0));
    }

    #[test]
    fn stages_hold_more_and_are_no_faster_for_a_token() {
        let of = |changes: &[(&str, f64)]| Fleet::plan(&Assumptions::default().with(changes));
        let (whole, staged) = (of(&[("tp", 4.0)]), of(&[("tp", 8.0), ("stages", 2.0)]));
        // Stages of four GPUs: the same gathers, and half of the weights and the KV on each GPU.
        assert_eq!((staged.collective_bytes, staged.weights_gb_per_gpu), (whole.collective_bytes, whole.weights_gb_per_gpu / 2.0));
        // A row of 8192 numbers of 2 bytes.
        assert_eq!((whole.stage_bytes, staged.stage_bytes), (0.0, 16_384.0));
        let alone = |fleet: &Fleet, kv_share: f64| fleet.step_ms - fleet.collective_ms - kv_share * fleet.batch;
        let kv_ms = whole.kv_gb_per_turn / (3.350 * 0.8);
        assert!(
            (alone(&whole, kv_ms / 4.0) - alone(&staged, kv_ms / 8.0)).abs() < 1e-9,
            "a token reads all weights, one stage after the other"
        );
        let uneven = Assumptions::default().with(&[("tp", 8.0), ("stages", 3.0)]);
        assert!(Fleet::plan(&uneven).warnings(&uneven)[0].contains("3 stages"));
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
