//! Bugs planted into kernels' sources, and dropped driver calls: each is found, by a rule that it breaks or by its results.

use crate::standin::{Standin, cache, repository, told};
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
    what: &'static str,
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

const ALL: &[Planted] = &[
    Planted {
        what: "a dropped __syncthreads",
        options: "arch=80",
        edit: Some((
            PREFILL,
            "        // V is there, and no thread reads K any more.\n        copies_wait<0>();\n        __syncthreads();",
            "        copies_wait<0>();",
        )),
        test: ATTENTION,
        said: UNORDERED,
    },
    Planted {
        what: "a dropped __syncthreads of decode, after its last use of what the warps share",
        options: "",
        edit: Some((
            DECODE,
            "        share(shared, state, warp, g, t);\n        __syncthreads();",
            "        share(shared, state, warp, g, t);",
        )),
        test: ATTENTION,
        said: UNORDERED,
    },
    Planted {
        what: "a barrier that some warps do not reach",
        options: "",
        edit: Some((
            DECODE,
            "            }\n        }\n        __syncthreads();\n    }\n}",
            "            }\n        }\n        if (warp != 3) __syncthreads();\n    }\n}",
        )),
        test: ATTENTION,
        said: &[DIVERGENCE],
    },
    Planted {
        what: "a shuffle that some lanes do not reach",
        options: "",
        edit: Some(("rope_kv_write.cu", "        } else if (weight) {", "        } else if (weight && lane != 5) {")),
        test: ROWS,
        said: &[DIVERGENCE],
    },
    Planted {
        what: "a dropped copies_wait",
        options: "arch=80",
        edit: Some((
            PREFILL,
            "        // V is there, and no thread reads K any more.\n        copies_wait<0>();",
            "        copies_wait<1>();",
        )),
        test: ATTENTION,
        said: UNORDERED,
    },
    Planted {
        what: "a buffer reused too early",
        options: "arch=80",
        edit: Some((
            PREFILL,
            "        copies_wait<0>();\n        __syncthreads();\n        load_tile(shared.v, kv, values, block_bytes, table, base, end);",
            "        copies_wait<0>();\n        load_tile(shared.v, kv, values, block_bytes, table, base, end);\n        __syncthreads();",
        )),
        test: ATTENTION,
        said: UNORDERED,
    },
    Planted {
        what: "a dropped wait for a warpgroup's products",
        options: "arch=90",
        edit: Some((
            HOPPER,
            "        products_wait<1>();\n        pin(scores);\n        tell_empty(K, stage, base);",
            "        pin(scores);\n        tell_empty(K, stage, base);",
        )),
        test: ATTENTION,
        said: UNORDERED,
    },
    Planted {
        what: "copies that are not made visible to products",
        options: "arch=90",
        edit: Some((
            HOPPER,
            "        copies_to_products();\n#pragma unroll\n        for (u32 group",
            "#pragma unroll\n        for (u32 group",
        )),
        test: ATTENTION,
        said: UNORDERED,
    },
    Planted {
        what: "sums scaled while products add to them",
        options: "arch=90",
        edit: Some((
            HOPPER,
            "        stage = after(stage);\n        products_wait<0>();\n        pin(state.out);",
            "        stage = after(stage);\n        pin(state.out);",
        )),
        test: ATTENTION_TO_ALL,
        said: UNORDERED,
    },
    Planted {
        what: "keys copied over those that products still read",
        options: "arch=90",
        edit: Some((HOPPER, "        if (used > 0) meet(empty(K, stage), THREADS);\n", "")),
        test: ATTENTION_TO_ALL,
        said: ORDER,
    },
    Planted {
        what: "a buffer that is told to be empty before the product that reads it has ended",
        options: "arch=90",
        edit: Some((
            HOPPER,
            "    products_wait<0>();\n    pin(scores);\n    tell_empty(K, 0, span.first);",
            "    tell_empty(K, 0, span.first);\n    products_wait<0>();\n    pin(scores);",
        )),
        test: ATTENTION_TO_ALL,
        said: UNORDERED,
    },
    Planted {
        what: "values that are told to be there while they are copied",
        options: "arch=90",
        edit: Some((HOPPER, "    }\n    copies_wait<0>();\n    tell_full(V, before(stage));", "    }\n    tell_full(V, before(stage));")),
        test: ATTENTION_TO_ALL,
        said: UNORDERED,
    },
    Planted {
        what: "values that are multiplied before they are told to be there",
        options: "arch=90",
        edit: Some((HOPPER, "        meet(full(V, last, group), FULL_THREADS);\n", "")),
        test: ATTENTION_TO_ALL,
        said: ORDER,
    },
    Planted {
        what: "a buffer that no one tells to be empty",
        options: "arch=90",
        edit: Some((HOPPER, "        tell_empty(K, stage, base);\n        cap_scores", "        cap_scores")),
        test: ATTENTION_TO_ALL,
        said: &[DIVERGENCE],
    },
    Planted {
        what: "more registers than a block has",
        options: "arch=90",
        edit: Some((
            HOPPER,
            "\"setmaxnreg.inc.sync.aligned.u32 %0;\" ::\"n\"(CONSUMER_REGISTERS)",
            "\"setmaxnreg.inc.sync.aligned.u32 %0;\" ::\"n\"(232)",
        )),
        test: ATTENTION,
        said: &[DIVERGENCE],
    },
    Planted {
        what: "a wrong swizzle",
        options: "arch=90",
        edit: Some((HOPPER, "(vector % 8 ^ row % 8) * 16", "(vector % 8 ^ row % 4) * 16")),
        test: ATTENTION,
        said: &[WRONG_RESULT],
    },
    Planted {
        what: "an off-by-one in the causal mask",
        options: "arch=80",
        edit: Some((PREFILL, "if (at - seen >= window)", "if (at + 1 - seen >= window)")),
        test: ATTENTION,
        said: &[WRONG_RESULT],
    },
    Planted {
        what: "an off-by-one in the mask of the Hopper kernel",
        options: "arch=90",
        edit: Some((HOPPER, "if (at - seen >= window)", "if (at - seen - 1 >= window)")),
        test: ATTENTION,
        said: &[WRONG_RESULT],
    },
    Planted {
        what: "decode that sees one position too few",
        options: "",
        edit: Some((DECODE, "end = position + 1;", "end = position > 0 ? position : 1;")),
        test: ATTENTION,
        said: &[WRONG_RESULT],
    },
    Planted {
        what: "the scale of a position that is not seen",
        options: "",
        edit: Some((DECODE, "c[n] = NEG_INFINITY, v_scales[n / 2] = 0.0f;", "c[n] = NEG_INFINITY;")),
        test: ATTENTION_IN_8_BITS,
        said: &[WRONG_RESULT],
    },
    Planted {
        what: "the scale of another position",
        options: "arch=80",
        edit: Some(("common.cuh", "reinterpret_cast<const float*>(head)[position]", "reinterpret_cast<const float*>(head)[position ^ 1]")),
        test: ATTENTION_IN_8_BITS,
        said: &[WRONG_RESULT],
    },
    Planted {
        what: "8-bit integers that are not made visible to products",
        options: "arch=90",
        edit: Some((
            HOPPER,
            "        copies_to_products();\n#pragma unroll\n        for (u32 group",
            "#pragma unroll\n        for (u32 group",
        )),
        test: ATTENTION_IN_8_BITS,
        said: UNORDERED,
    },
    Planted {
        what: "scores that are capped once they are masked",
        options: "arch=90",
        edit: Some((
            HOPPER,
            "        cap_scores(scores, scale_log2, cap_log2);\n        hide(scores, base);",
            "        hide(scores, base);\n        cap_scores(scores, scale_log2, cap_log2);",
        )),
        test: ATTENTION_WITH_A_CAP,
        said: &[WRONG_RESULT],
    },
    Planted {
        what: "capped scores that are scaled again",
        options: "",
        edit: Some((DECODE, "absorb(state, c, scale_left(scale_log2));", "absorb(state, c, scale_log2);")),
        test: ATTENTION_WITH_A_CAP,
        said: &[WRONG_RESULT],
    },
    Planted {
        what: "a sink that joins only where a row has one part",
        options: "",
        edit: Some((DECODE, "    sum = with_sink(sum, max, sinks, blockIdx.x);\n", "")),
        test: ATTENTION_WITH_SINKS,
        said: &[WRONG_RESULT],
    },
    Planted {
        what: "another head's sink",
        options: "arch=80",
        edit: Some((PREFILL, "with_sink(sum, state.max[m][half], sinks, head)", "with_sink(sum, state.max[m][half], sinks, kv_head)")),
        test: ATTENTION_WITH_SINKS,
        said: &[WRONG_RESULT],
    },
    Planted {
        what: "a mean of one warp's numbers",
        options: "",
        edit: Some(("norm.cu", "mean = block_sum(of_numbers) / float(width);", "mean = warp_sum(of_numbers) / float(width);")),
        test: ROWS,
        said: &["FAILED norm"],
    },
    Planted {
        what: "the factor of a row's queries, for its keys",
        options: "",
        edit: Some(("rope_kv_write.cu", "scales[2 * row + !is_query]", "scales[2 * row]")),
        test: ROWS,
        said: &["FAILED kv_write"],
    },
    Planted {
        what: "an unaligned vector load",
        options: "",
        edit: Some((
            DECODE,
            "load_kv(low[i], k, g * HEAD_DIM + i * K_CHUNK + t * K_VEC);",
            "load_kv(low[i], k, g * HEAD_DIM + i * K_CHUNK + t * K_VEC + 2);",
        )),
        test: ATTENTION,
        said: &[ALIGNMENT],
    },
    Planted {
        what: "a read beyond the block tables",
        options: "",
        edit: Some((
            DECODE,
            "const u32* table = tables + u64(index) * table_stride;",
            "const u32* table = tables + u64(index + 1) * table_stride;",
        )),
        test: ATTENTION,
        said: &[ADDRESS],
    },
    Planted {
        what: "shared memory that was not written",
        options: "",
        edit: Some((
            "common.cuh",
            "    if (lane == 0) of_warps[threadIdx.x / 32] = x;\n",
            "    if (lane == 0 && threadIdx.x > 32) of_warps[threadIdx.x / 32] = x;\n",
        )),
        test: ROWS,
        said: &[UNINITIALIZED],
    },
    Planted {
        what: "an expert whose rows begin among those of another",
        options: "",
        edit: Some((ROUTING, "lower += entries[i] < expert;", "lower += entries[i] + 1 < expert;")),
        test: EXPERTS,
        said: &[WRONG_EXPERTS, "[race]", UNINITIALIZED, ADDRESS],
    },
    Planted {
        what: "rows of experts that others chose",
        options: "",
        edit: Some((ROUTING, "rows_by_slot[slot] = i / chosen;", "rows_by_slot[slot] = i % chosen;")),
        test: EXPERTS,
        said: &[WRONG_EXPERTS],
    },
    Planted {
        what: "the higher of experts with equal scores",
        options: "",
        edit: Some((ROUTING, "best = max(best, entry_of(keys[e], e));", "best = max(best, entry_of(keys[e] | e % 3, e));")),
        test: EXPERTS,
        said: &[WRONG_EXPERTS],
    },
    Planted {
        what: "a dropped wait for the weights of an expert",
        options: "arch=80",
        edit: Some((GROUPED, "copies_wait<F::STAGES - 2>();", "copies_wait<F::STAGES - 1>();")),
        test: EXPERTS,
        said: UNORDERED,
    },
    Planted {
        what: "weights of an expert that not all threads have copied",
        options: "",
        edit: Some((GROUPED, "        __syncthreads();\n        load(step + F::STAGES - 1);", "        load(step + F::STAGES - 1);")),
        test: EXPERTS,
        said: UNORDERED,
    },
    Planted {
        what: "a missing event between copy and compute stream",
        options: "drop=cuStreamWaitEvent",
        edit: None,
        test: HANDED_OVER,
        said: &["FAILED "],
    },
    Planted {
        what: "a host buffer read before its copy",
        options: "drop=cuEventSynchronize",
        edit: None,
        test: HANDED_OVER,
        said: &["computed what cannot be", "[in flight]"],
    },
    Planted {
        what: "a slot given back before the device has read it",
        options: "drop=cuEventQuery",
        edit: None,
        test: "blocks::overwritten",
        said: &["the device has copied what was there in the end"],
    },
];

#[test]
fn every_planted_bug_is_found() {
    for planted in ALL {
        let mut standin = Standin::new(planted.options);
        if let Some(edit) = planted.edit {
            standin = standin.with_edit(edit);
        }
        let output = standin.run(planted.test);
        let text = told(&output);
        assert!(!output.status.success(), "{} is not found:\n{text}", planted.what);
        assert!(planted.said.iter().any(|said| text.contains(said)), "{} is not told as {:?}:\n{text}", planted.what, planted.said);
        println!("{}: found", planted.what);
    }
}

/// Without a bug, the same tests pass.
#[test]
fn nothing_is_found_where_nothing_is_planted() {
    for (test, options) in [
        (ATTENTION, "arch=80,seed=3"),
        (ATTENTION, "arch=90,seed=4"),
        (ATTENTION_TO_ALL, "arch=90,seed=9"),
        (ATTENTION_IN_8_BITS, "arch=80,seed=7"),
        (ATTENTION_IN_8_BITS, "arch=90,seed=8"),
        (ATTENTION_WITH_A_CAP, "arch=80,seed=10"),
        (ATTENTION_WITH_A_CAP, "arch=90,seed=11"),
        (ATTENTION_WITH_SINKS, "arch=80,seed=12"),
        (ATTENTION_WITH_SINKS, "arch=90,seed=13"),
        (BLOCKS, "seed=5"),
        (ROWS, "seed=6"),
        ("planted::every_form_of_rows", "seed=14"),
        (EXPERTS, "arch=80,seed=15"),
        (EXPERTS, "arch=90,seed=16"),
    ] {
        Standin::new(options).passes(test);
    }
}

/// An error names the kernel, the line in its source, and the other side of a race.
#[test]
fn an_error_says_where() {
    let early = ALL.iter().find(|planted| planted.what == "a buffer reused too early").expect("it is listed");
    let text = told(&Standin::new(early.options).with_edit(early.edit.expect("an edit")).run(ATTENTION));
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
