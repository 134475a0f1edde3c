//! Bugs planted into kernels' sources, and dropped driver calls: each is found, by a rule that it breaks or by its results.

use crate::standin::{Standin, cache, repository, told};
use std::process::Output;
use tidemill_kernels::{
    KvStorage,
    cuda::{
        checks::{
            self, Checks, Extent, TestGpu,
            attention::Form,
            rows::{Adds, Normed, Norms, Turn},
        },
        compile::{Heads, Scoring},
    },
};

/// A bug, and the symptoms expected from it.
struct Planted {
    options: &'static str,
    /// The file, the text, and its replacement.
    edit: Option<(&'static str, &'static str, &'static str)>,
    /// The test that detects it.
    test: &'static str,
    /// The expected messages, of which one must appear.
    said: &'static [&'static str],
}

/// The messages of unordered accesses: a race, or a use of data in flight or not yet begun.
const UNORDERED: &[&str] = &["[race]", "[in flight]", UNINITIALIZED];
/// The messages of a skipped barrier, as the thread may also arrive at the next one twice.
const ORDER: &[&str] = &["[race]", "[in flight]", UNINITIALIZED, DIVERGENCE];
const ALIGNMENT: &str = "[alignment]";
const ADDRESS: &str = "[address]";
const DIVERGENCE: &str = "[divergence]";
const UNINITIALIZED: &str = "[uninitialized]";
const WRONG_RESULT: &str = "FAILED attention";
const WRONG_EXPERTS: &str = "FAILED experts";

const PREFILL: &str = "attention_prefill.cu";
const HOPPER: &str = "attention_prefill_hopper.cu";
const DECODE: &str = "attention_decode.cu";
const ROUTING: &str = "experts.cu";
const GROUPED: &str = "experts_multiply.cu";
const ATTENTION: &str = "planted::attention";
/// The test with enough tiles for buffers to be reused.
const ATTENTION_TO_ALL: &str = "planted::attention_to_all";
const ATTENTION_IN_8_BITS: &str = "planted::attention_in_8_bits";
const ATTENTION_WITH_A_CAP: &str = "planted::attention_with_a_cap";
const ATTENTION_WITH_SINKS: &str = "planted::attention_with_sinks";
const BLOCKS: &str = "planted::blocks";
const ROWS: &str = "planted::rows";
const EXPERTS: &str = "planted::experts";
const HANDED_OVER: &str = "planted::handed_over";

/// A test of each bug, by its name.
macro_rules! bugs {
    ($($bug:ident = $planted:expr,)+) => {
        mod every_planted_bug_is_found {
            use super::*;

            $(
                #[test]
                fn $bug() {
                    $planted.is_found();
                }
            )+
        }
    };
}

const REUSED_TOO_EARLY: Planted = Planted {
    options: "arch=80",
    edit: Some((
        PREFILL,
        "        copies_wait<0>();\n        __syncthreads();\n        load_tile(shared.v, kv, values, block_bytes, table, base, end);",
        "        copies_wait<0>();\n        load_tile(shared.v, kv, values, block_bytes, table, base, end);\n        __syncthreads();",
    )),
    test: ATTENTION,
    said: UNORDERED,
};

bugs! {
    a_dropped_syncthreads = Planted {
        options: "arch=80",
        edit: Some((
            PREFILL,
            "        // V is there, and no thread reads K any more.\n        copies_wait<0>();\n        __syncthreads();",
            "        copies_wait<0>();",
        )),
        test: ATTENTION,
        said: UNORDERED,
    },
    a_dropped_syncthreads_of_decode_after_its_last_use_of_what_the_warps_share = Planted {
        options: "",
        edit: Some((
            DECODE,
            "        share(shared, state, warp, g, t);\n        __syncthreads();",
            "        share(shared, state, warp, g, t);",
        )),
        test: ATTENTION,
        said: UNORDERED,
    },
    a_barrier_that_some_warps_do_not_reach = Planted {
        options: "",
        edit: Some((
            DECODE,
            "            }\n        }\n        __syncthreads();\n    }\n}",
            "            }\n        }\n        if (warp != 3) __syncthreads();\n    }\n}",
        )),
        test: ATTENTION,
        said: &[DIVERGENCE],
    },
    a_shuffle_that_some_lanes_do_not_reach = Planted {
        options: "",
        edit: Some(("rope_kv_write.cu", "        } else if (weight) {", "        } else if (weight && lane != 5) {")),
        test: ROWS,
        said: &[DIVERGENCE],
    },
    a_dropped_copies_wait = Planted {
        options: "arch=80",
        edit: Some((
            PREFILL,
            "        // V is there, and no thread reads K any more.\n        copies_wait<0>();",
            "        copies_wait<1>();",
        )),
        test: ATTENTION,
        said: UNORDERED,
    },
    a_buffer_reused_too_early = REUSED_TOO_EARLY,
    a_dropped_wait_for_a_warpgroups_products = Planted {
        options: "arch=90",
        edit: Some((
            HOPPER,
            "        products_wait<1>();\n        pin(scores);\n        tell_empty(K, stage, base);",
            "        pin(scores);\n        tell_empty(K, stage, base);",
        )),
        test: ATTENTION,
        said: UNORDERED,
    },
    copies_that_are_not_made_visible_to_products = Planted {
        options: "arch=90",
        edit: Some((
            HOPPER,
            "        copies_to_products();\n#pragma unroll\n        for (u32 group",
            "#pragma unroll\n        for (u32 group",
        )),
        test: ATTENTION,
        said: UNORDERED,
    },
    sums_scaled_while_products_add_to_them = Planted {
        options: "arch=90",
        edit: Some((
            HOPPER,
            "        stage = after(stage);\n        products_wait<0>();\n        pin(state.out);",
            "        stage = after(stage);\n        pin(state.out);",
        )),
        test: ATTENTION_TO_ALL,
        said: UNORDERED,
    },
    keys_copied_over_those_that_products_still_read = Planted {
        options: "arch=90",
        edit: Some((HOPPER, "        if (used > 0) meet(empty(K, stage), THREADS);\n", "")),
        test: ATTENTION_TO_ALL,
        said: ORDER,
    },
    a_buffer_that_is_told_to_be_empty_before_the_product_that_reads_it_has_ended = Planted {
        options: "arch=90",
        edit: Some((
            HOPPER,
            "    products_wait<0>();\n    pin(scores);\n    tell_empty(K, 0, span.first);",
            "    tell_empty(K, 0, span.first);\n    products_wait<0>();\n    pin(scores);",
        )),
        test: ATTENTION_TO_ALL,
        said: UNORDERED,
    },
    values_that_are_told_to_be_there_while_they_are_copied = Planted {
        options: "arch=90",
        edit: Some((HOPPER, "    }\n    copies_wait<0>();\n    tell_full(V, before(stage));", "    }\n    tell_full(V, before(stage));")),
        test: ATTENTION_TO_ALL,
        said: UNORDERED,
    },
    values_that_are_multiplied_before_they_are_told_to_be_there = Planted {
        options: "arch=90",
        edit: Some((HOPPER, "        meet(full(V, last, group), FULL_THREADS);\n", "")),
        test: ATTENTION_TO_ALL,
        said: ORDER,
    },
    a_buffer_that_no_one_tells_to_be_empty = Planted {
        options: "arch=90",
        edit: Some((HOPPER, "        tell_empty(K, stage, base);\n        cap_scores", "        cap_scores")),
        test: ATTENTION_TO_ALL,
        said: &[DIVERGENCE],
    },
    more_registers_than_a_block_has = Planted {
        options: "arch=90",
        edit: Some((
            HOPPER,
            "\"setmaxnreg.inc.sync.aligned.u32 %0;\" ::\"n\"(CONSUMER_REGISTERS)",
            "\"setmaxnreg.inc.sync.aligned.u32 %0;\" ::\"n\"(232)",
        )),
        test: ATTENTION,
        said: &[DIVERGENCE],
    },
    a_wrong_swizzle = Planted {
        options: "arch=90",
        edit: Some((HOPPER, "(vector % 8 ^ row % 8) * 16", "(vector % 8 ^ row % 4) * 16")),
        test: ATTENTION,
        said: &[WRONG_RESULT],
    },
    an_off_by_one_in_the_causal_mask = Planted {
        options: "arch=80",
        edit: Some((PREFILL, "if (at - seen >= window)", "if (at + 1 - seen >= window)")),
        test: ATTENTION,
        said: &[WRONG_RESULT],
    },
    an_off_by_one_in_the_mask_of_the_hopper_kernel = Planted {
        options: "arch=90",
        edit: Some((HOPPER, "if (at - seen >= window)", "if (at - seen - 1 >= window)")),
        test: ATTENTION,
        said: &[WRONG_RESULT],
    },
    decode_that_sees_one_position_too_few = Planted {
        options: "",
        edit: Some((DECODE, "end = position + 1;", "end = position > 0 ? position : 1;")),
        test: ATTENTION,
        said: &[WRONG_RESULT],
    },
    the_scale_of_a_position_that_is_not_seen = Planted {
        options: "",
        edit: Some((DECODE, "c[n] = NEG_INFINITY, v_scales[n / 2] = 0.0f;", "c[n] = NEG_INFINITY;")),
        test: ATTENTION_IN_8_BITS,
        said: &[WRONG_RESULT],
    },
    the_scale_of_another_position = Planted {
        options: "arch=80",
        edit: Some(("common.cuh", "reinterpret_cast<const float*>(head)[position]", "reinterpret_cast<const float*>(head)[position ^ 1]")),
        test: ATTENTION_IN_8_BITS,
        said: &[WRONG_RESULT],
    },
    integers_of_8_bits_that_are_not_made_visible_to_products = Planted {
        options: "arch=90",
        edit: Some((
            HOPPER,
            "        copies_to_products();\n#pragma unroll\n        for (u32 group",
            "#pragma unroll\n        for (u32 group",
        )),
        test: ATTENTION_IN_8_BITS,
        said: UNORDERED,
    },
    scores_that_are_capped_once_they_are_masked = Planted {
        options: "arch=90",
        edit: Some((
            HOPPER,
            "        cap_scores(scores, scale_log2, cap_log2);\n        hide(scores, base);",
            "        hide(scores, base);\n        cap_scores(scores, scale_log2, cap_log2);",
        )),
        test: ATTENTION_WITH_A_CAP,
        said: &[WRONG_RESULT],
    },
    capped_scores_that_are_scaled_again = Planted {
        options: "",
        edit: Some((DECODE, "absorb(state, c, scale_left(scale_log2));", "absorb(state, c, scale_log2);")),
        test: ATTENTION_WITH_A_CAP,
        said: &[WRONG_RESULT],
    },
    a_sink_that_joins_only_where_a_row_has_one_part = Planted {
        options: "",
        edit: Some((DECODE, "    sum = with_sink(sum, max, sinks, blockIdx.x);\n", "")),
        test: ATTENTION_WITH_SINKS,
        said: &[WRONG_RESULT],
    },
    another_heads_sink = Planted {
        options: "arch=80",
        edit: Some((PREFILL, "with_sink(sum, state.max[m][half], sinks, head)", "with_sink(sum, state.max[m][half], sinks, kv_head)")),
        test: ATTENTION_WITH_SINKS,
        said: &[WRONG_RESULT],
    },
    a_mean_of_one_warps_numbers = Planted {
        options: "",
        edit: Some(("norm.cu", "mean = block_sum(of_numbers) / float(width);", "mean = warp_sum(of_numbers) / float(width);")),
        test: ROWS,
        said: &["FAILED norm"],
    },
    the_factor_of_a_rows_queries_for_its_keys = Planted {
        options: "",
        edit: Some(("rope_kv_write.cu", "scales[2 * row + !is_query]", "scales[2 * row]")),
        test: ROWS,
        said: &["FAILED kv_write"],
    },
    an_unaligned_vector_load = Planted {
        options: "",
        edit: Some((
            DECODE,
            "load_kv(low[i], k, g * HEAD_DIM + i * K_CHUNK + t * K_VEC);",
            "load_kv(low[i], k, g * HEAD_DIM + i * K_CHUNK + t * K_VEC + 2);",
        )),
        test: ATTENTION,
        said: &[ALIGNMENT],
    },
    a_read_beyond_the_block_tables = Planted {
        options: "",
        edit: Some((
            DECODE,
            "const u32* table = tables + u64(index) * table_stride;",
            "const u32* table = tables + u64(index + 1) * table_stride;",
        )),
        test: ATTENTION,
        said: &[ADDRESS],
    },
    shared_memory_that_was_not_written = Planted {
        options: "",
        edit: Some((
            "common.cuh",
            "    if (lane == 0) of_warps[threadIdx.x / 32] = x;\n",
            "    if (lane == 0 && threadIdx.x > 32) of_warps[threadIdx.x / 32] = x;\n",
        )),
        test: ROWS,
        said: &[UNINITIALIZED],
    },
    an_expert_whose_rows_begin_among_those_of_another = Planted {
        options: "",
        edit: Some((ROUTING, "lower += entries[i] < expert;", "lower += entries[i] + 1 < expert;")),
        test: EXPERTS,
        said: &[WRONG_EXPERTS, "[race]", UNINITIALIZED, ADDRESS],
    },
    rows_of_experts_that_others_chose = Planted {
        options: "",
        edit: Some((ROUTING, "rows_by_slot[slot] = i / chosen;", "rows_by_slot[slot] = i % chosen;")),
        test: EXPERTS,
        said: &[WRONG_EXPERTS],
    },
    the_higher_of_experts_with_equal_scores = Planted {
        options: "",
        edit: Some((ROUTING, "best = max(best, entry_of(keys[e], e));", "best = max(best, entry_of(keys[e] | e % 3, e));")),
        test: EXPERTS,
        said: &[WRONG_EXPERTS],
    },
    a_dropped_wait_for_the_weights_of_an_expert = Planted {
        options: "arch=80",
        edit: Some((GROUPED, "copies_wait<F::STAGES - 2>();", "copies_wait<F::STAGES - 1>();")),
        test: EXPERTS,
        said: UNORDERED,
    },
    weights_of_an_expert_that_not_all_threads_have_copied = Planted {
        options: "",
        edit: Some((GROUPED, "        __syncthreads();\n        load(step + F::STAGES - 1);", "        load(step + F::STAGES - 1);")),
        test: EXPERTS,
        said: UNORDERED,
    },
    a_missing_event_between_copy_and_compute_stream = Planted {
        options: "drop=cuStreamWaitEvent",
        edit: None,
        test: HANDED_OVER,
        said: &["FAILED "],
    },
    a_host_buffer_read_before_its_copy = Planted {
        options: "drop=cuEventSynchronize",
        edit: None,
        test: HANDED_OVER,
        said: &["computed what cannot be", "[in flight]"],
    },
    a_slot_given_back_before_the_device_has_read_it = Planted {
        options: "drop=cuEventQuery",
        edit: None,
        test: "blocks::overwritten",
        said: &["the device has copied what was there in the end"],
    },
}

impl Planted {
    fn run(&self) -> Output {
        let mut standin = Standin::new(self.options);
        if let Some(edit) = self.edit {
            standin = standin.with_edit(edit);
        }
        standin.run(self.test)
    }

    fn is_found(&self) {
        let said = self.said;
        let output = self.run();
        let text = told(&output);
        assert!(!output.status.success(), "it is not found:\n{text}");
        assert!(said.iter().any(|said| text.contains(said)), "it is not told as {said:?}:\n{text}");
    }
}

macro_rules! pass {
    ($($name:ident: $test:expr, $options:literal;)+) => {
        /// Without a bug, the same tests pass.
        mod nothing_is_found_where_nothing_is_planted {
            use super::*;

            $(
                #[test]
                fn $name() {
                    Standin::new($options).passes($test);
                }
            )+
        }
    };
}

pass! {
    attention_on_an_a100: ATTENTION, "arch=80,seed=3";
    attention_on_an_h100: ATTENTION, "arch=90,seed=4";
    attention_to_all: ATTENTION_TO_ALL, "arch=90,seed=9";
    attention_in_8_bits_on_an_a100: ATTENTION_IN_8_BITS, "arch=80,seed=7";
    attention_in_8_bits_on_an_h100: ATTENTION_IN_8_BITS, "arch=90,seed=8";
    attention_with_a_cap_on_an_a100: ATTENTION_WITH_A_CAP, "arch=80,seed=10";
    attention_with_a_cap_on_an_h100: ATTENTION_WITH_A_CAP, "arch=90,seed=11";
    attention_with_sinks_on_an_a100: ATTENTION_WITH_SINKS, "arch=80,seed=12";
    attention_with_sinks_on_an_h100: ATTENTION_WITH_SINKS, "arch=90,seed=13";
    blocks: BLOCKS, "seed=5";
    rows: ROWS, "seed=6";
    every_form_of_rows: "planted::every_form_of_rows", "seed=14";
    experts_on_an_a100: EXPERTS, "arch=80,seed=15";
    experts_on_an_h100: EXPERTS, "arch=90,seed=16";
}

/// An error names the kernel, the line in its source, and the other side of a race.
#[test]
fn an_error_says_where() {
    let text = told(&REUSED_TOO_EARLY.run());
    for part in
        ["kernel attention_prefill, block [", "attention_prefill.cu:", "inlined at", "PTX line", "lane ", "the other side: ", "seed 1"]
    {
        assert!(text.contains(part), "no {part} in:\n{text}");
    }
}

fn judge(run: impl FnOnce(&mut TestGpu, &mut Checks) -> Result<(), tidemill_kernels::cuda::CudaError>) {
    let mut gpu = TestGpu::open(&cache(), 30).unwrap();
    let mut checks = Checks::new(gpu.seed);
    run(&mut gpu, &mut checks).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn attention() {
    judge(|gpu, checks| checks::attention::both(gpu, checks, Heads::bf16(64), 1, 3, Form::from(Some(100))));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn attention_to_all() {
    judge(|gpu, checks| checks::attention::both(gpu, checks, Heads::bf16(64), 1, 3, Form::from(None)));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn attention_in_8_bits() {
    judge(|gpu, checks| checks::attention::both(gpu, checks, Heads { dim: 64, kv: KvStorage::Int8 }, 1, 3, Form::from(Some(100))));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn attention_with_a_cap() {
    let form = Form { window: Some(300), scoring: Scoring::Capped };
    judge(|gpu, checks| checks::attention::both(gpu, checks, Heads::bf16(64), 1, 3, form));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn attention_with_sinks() {
    let form = Form { window: None, scoring: Scoring::Sinks };
    judge(|gpu, checks| checks::attention::both(gpu, checks, Heads::bf16(64), 1, 3, form));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn blocks() {
    judge(checks::blocks::all);
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn rows() {
    judge(|gpu, checks| {
        checks::rows::rms_norm(gpu, checks, 3, 520, true, true)?;
        checks::rows::norm(gpu, checks, 3, 520, Adds::Normed, Normed::Centered { has_bias: true })?;
        checks::rows::rope_kv_write(gpu, checks, Heads::bf16(64), 2, 7, Turn { norms: Norms::Heads, ..Turn::default() })?;
        checks::rows::rope_kv_write(gpu, checks, Heads::bf16(32), 3, 5, Turn { norms: Norms::All, grows: true, is_still: false })
    });
}

/// The smallest case of every operation on rows.
#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn every_form_of_rows() {
    judge(|gpu, checks| checks::rows::all(gpu, checks, Extent::First));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn experts() {
    judge(checks::experts::one_of_each_form);
}

/// A checkpoint on two executors, and blocks from one to the other.
#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn handed_over() {
    let folder = tempfile::TempDir::new().unwrap();
    let fixture = repository().join("model/tests/fixtures/llama3").canonicalize().unwrap();
    std::os::unix::fs::symlink(fixture, folder.path().join("llama3")).unwrap();
    let mut checks = Checks::new(0);
    tidemill_model::cuda::checks::models(folder.path(), &cache(), &mut checks).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
}
