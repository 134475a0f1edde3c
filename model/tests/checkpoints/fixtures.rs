//! The fixtures (see `fixtures/make.py`), run chunk by chunk as an engine does.

use safetensors::{Dtype as FileDtype, SafeTensors, tensor::TensorView};
use serde::Deserialize;
use serde_json::Value;
use std::{
    collections::HashMap,
    path::{Path, PathBuf},
};
use tempfile::TempDir;
use tidemill_kernels::{
    Bf16Products, Dtype,
    dtype::{decode, encode},
};
use tidemill_model::{Chunk, Isa, KvMemory, LoadOptions, LogitRows, Model};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype, Token},
    step::StateBlocks,
};

/// The families by what tests must know of them: gives those of a group to the macro `$to`, as names of tests and of fixtures.
macro_rules! family_group {
    ($to:ident $with:tt in_f32) => {
        $to! { $with llama = "llama", }
    };
    // Two ranks cannot share a single KV head.
    ($to:ident $with:tt in_f32_with_one_kv_head) => {
        $to! { $with mistral = "mistral", }
    };
    ($to:ident $with:tt in_bf16) => {
        $to! { $with
            llama3 = "llama3",
            qwen2 = "qwen2",
            qwen3 = "qwen3",
            gemma2 = "gemma2",
            gemma3 = "gemma3",
            phi3 = "phi3",
            olmo2 = "olmo2",
            olmo3 = "olmo3",
            granite = "granite",
            smollm3 = "smollm3",
            glm4 = "glm4",
            cohere2 = "cohere2",
            starcoder2 = "starcoder2",
            exaone4 = "exaone4",
            seed_oss = "seed-oss",
            ministral3 = "ministral3",
        }
    };
    // Layers that keep a state.
    ($to:ident $with:tt in_bf16_with_state) => {
        $to! { $with lfm2 = "lfm2", qwen3_5 = "qwen3-5", }
    };
    ($to:ident $with:tt with_experts) => {
        $to! { $with
            mixtral = "mixtral",
            qwen3_moe = "qwen3-moe",
            qwen2_moe = "qwen2-moe",
            glm4_moe = "glm4-moe",
            minimax_m2 = "minimax-m2",
            gpt_oss = "gpt-oss",
            deepseek_v2 = "deepseek-v2",
            deepseek_v3 = "deepseek-v3",
        }
    };
    ($to:ident $with:tt with_experts_and_state) => {
        $to! { $with qwen3_next = "qwen3-next", qwen3_5_moe = "qwen3-5-moe", }
    };
}

/// `family_tests! { check: GROUPS }`: a test of each family in the groups, which calls `check` with the family, in a module of the same name.
/// `dense` is all families without experts: with experts, the slightest rounding may change the choice, and then logits differ by any amount.
macro_rules! family_tests {
    ($check:ident: all) => {
        family_tests! { $check: in_f32 in_f32_with_one_kv_head in_bf16 in_bf16_with_state with_experts with_experts_and_state }
    };
    ($check:ident: dense) => {
        family_tests! { $check: in_f32 in_f32_with_one_kv_head in_bf16 in_bf16_with_state }
    };
    ($check:ident: $($group:ident)+) => {
        mod $check {
            $(crate::fixtures::family_group! { tests_of ($check) $group })+
            use crate::fixtures::tests_of;
        }
    };
}

macro_rules! tests_of {
    (($check:ident) $($test:ident = $family:literal,)+) => {
        $(
            #[test]
            fn $test() {
                super::$check($family);
            }
        )+
    };
}

pub(crate) use {family_group, family_tests, tests_of};

macro_rules! names {
    (() $($test:ident = $family:literal,)+) => {
        &[$($family),+]
    };
}

const GROUPS: [&[&str]; 6] = [
    family_group! { names () in_f32 },
    family_group! { names () in_f32_with_one_kv_head },
    family_group! { names () in_bf16 },
    family_group! { names () in_bf16_with_state },
    family_group! { names () with_experts },
    family_group! { names () with_experts_and_state },
];

/// All families.
pub(crate) fn families() -> impl Iterator<Item = &'static str> {
    GROUPS.into_iter().flatten().copied()
}

/// The types in which a family's K and V can be stored; a latent cannot be in 8 bits.
pub(crate) fn kv_dtypes(family: &str) -> impl Iterator<Item = KvDtype> + use<> {
    let has_int8 = !["deepseek-v2", "deepseek-v3"].contains(&family);
    KvDtype::ALL.into_iter().filter(move |kv_dtype| has_int8 || *kv_dtype != KvDtype::Int8)
}

/// Checkpoints with weights in FP8, one per form.
pub(crate) const FP8: [&str; 4] = ["fp8-channel", "fp8-tensor", "fp8-fbgemm", "fp8-blocks"];

/// Checkpoints with weights in 4 bits, one per form.
pub(crate) const INT4: [&str; 4] = ["int4-awq", "int4-gptq", "int4-gptq-v2", "int4-packed"];

/// The output of transformers.
#[derive(Deserialize)]
pub(crate) struct Reference {
    pub(crate) prompts: Vec<Prompt>,
}

#[derive(Deserialize)]
pub(crate) struct Prompt {
    pub(crate) ids: Vec<Token>,
    pub(crate) greedy: Vec<Token>,
    /// Positions whose logits are kept.
    pub(crate) logit_rows: Vec<usize>,
}

pub(crate) fn fixture(family: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(family)
}

/// The reference, and the kept logits of each prompt.
pub(crate) fn reference(family: &str) -> (Reference, Vec<Vec<f32>>) {
    let dir = fixture(family);
    let reference: Reference = serde_json::from_slice(&std::fs::read(dir.join("reference.json")).unwrap()).unwrap();
    let bytes = std::fs::read(dir.join("reference.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let logits = (0..reference.prompts.len()).map(|i| {
        let tensor = tensors.tensor(&format!("logits.{i}")).unwrap();
        tensor.data().as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    });
    let logits = logits.collect();
    (reference, logits)
}

/// The reference's prompt of this length.
pub(crate) fn prompt_of(family: &str, length: usize) -> Vec<Token> {
    let prompts = reference(family).0.prompts;
    prompts.into_iter().map(|prompt| prompt.ids).find(|ids| ids.len() == length).expect("a prompt of this length")
}

pub(crate) fn load(family: &str, kv_dtype: KvDtype) -> Model {
    load_on(family, kv_dtype, 2, None)
}

pub(crate) fn load_on(family: &str, kv_dtype: KvDtype, threads: usize, isa: Option<Isa>) -> Model {
    load_dir(&fixture(family), kv_dtype, threads, isa)
}

pub(crate) fn load_dir(dir: &Path, kv_dtype: KvDtype, threads: usize, isa: Option<Isa>) -> Model {
    Model::load(dir, &LoadOptions { kv_dtype, quantize: None, threads, isa }, &mut |_, _| {}).unwrap()
}

/// Loads a family with bf16 numbers widened to f32, to compute in f32.
pub(crate) fn load_f32(family: &str, kv_dtype: KvDtype) -> Model {
    match is_bf16(family) {
        true => load_dir(restored(family, |_| Dtype::F32).path(), kv_dtype, 2, None),
        false => load(family, kv_dtype),
    }
}

/// An instruction set of each order in which products of bf16 are added: the machine's best, and, where it is not AMX, emulated AMX.
pub(crate) fn one_of_each_order() -> impl Iterator<Item = Isa> {
    let orders = [Bf16Products::Chain, Bf16Products::Blocks].into_iter();
    orders.filter_map(|order| Isa::testable().find(|isa| isa.bf16_products() == order))
}

/// Asserts what the exactness contract promises of a model: wherever its layout is the same, its logits have the same bits, on any number
/// of threads and in chunks of any size. `load` gets threads and an instruction set; `cuts` has some sizes for each number of threads.
/// `in_bf16`: whether weights, or K and V, are; then alone may AMX, which adds in a different order, have a layout of its own.
pub(crate) fn assert_same_bits(
    what: &str,
    in_bf16: bool,
    tokens: &[Token],
    cuts: &[(usize, &[usize])],
    load: impl Fn(usize, Isa) -> Model,
) {
    let mut expected = HashMap::new();
    for isa in Isa::testable() {
        for &(threads, chunks) in cuts {
            let mut model = load(threads, isa);
            let layout = model.layout();
            let expected = expected.entry(layout).or_insert_with(|| all_logits(&mut model, tokens, tokens.len()));
            for &chunk in chunks {
                assert!(all_logits(&mut model, tokens, chunk) == *expected, "{what} on {isa} with {threads} threads in chunks of {chunk}");
            }
        }
    }
    let layouts = if in_bf16 { one_of_each_order().count() } else { 1 };
    assert_eq!(expected.len(), layouts, "{what}: layouts");
}

pub(crate) fn is_bf16(family: &str) -> bool {
    !["llama", "mistral"].contains(&family)
}

/// A checkpoint of the same numbers, without FP8 and MXFP4; `dtype` chooses how each tensor is stored.
pub(crate) fn restored(family: &str, mut dtype: impl FnMut(&str) -> Dtype) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut config: Value = serde_json::from_slice(&std::fs::read(fixture(family).join("config.json")).unwrap()).unwrap();
    config.as_object_mut().unwrap().remove("quantization_config");
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let mut tensors = Vec::new();
    for file in std::fs::read_dir(fixture(family)).unwrap().map(|entry| entry.unwrap().path()) {
        let name = file.file_name().unwrap().to_str().unwrap();
        if !(name.starts_with("model") && name.ends_with(".safetensors")) {
            continue;
        }
        let bytes = std::fs::read(&file).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        for (name, tensor) in file.tensors().into_iter().filter(|(name, _)| !name.contains("_scale")) {
            let (mut name, mut shape) = (name, tensor.shape().to_vec());
            let numbers = match tensor.dtype() {
                FileDtype::U8 => {
                    let scales = file.tensor(&name.replace("_blocks", "_scales")).unwrap();
                    name.truncate(name.len() - "_blocks".len());
                    shape = vec![shape[0], 32 * shape[2], shape[1]];
                    of_mxfp4(tensor.data(), scales.data(), &shape)
                }
                FileDtype::F32 => decode(Dtype::F32, tensor.data()),
                FileDtype::F16 => decode(Dtype::F16, tensor.data()),
                FileDtype::BF16 => decode(Dtype::Bf16, tensor.data()),
                FileDtype::F8_E4M3 => dequantized(&file, &name),
                other => panic!("{name} is {other:?}"),
            };
            let (dtype, file_dtype) = match dtype(&name) {
                Dtype::F32 => (Dtype::F32, FileDtype::F32),
                Dtype::F16 => (Dtype::F16, FileDtype::F16),
                Dtype::Bf16 => (Dtype::Bf16, FileDtype::BF16),
            };
            tensors.push((name, file_dtype, shape, encode(dtype, &numbers)));
        }
    }
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    std::fs::write(dir.path().join("model.safetensors"), safetensors::serialize(views, None).unwrap()).unwrap();
    dir
}

/// The checkpoint with each KV head once for every query head that reads it: the same model, with as many KV heads as query heads.
pub(crate) fn with_all_kv_heads(dir: TempDir) -> TempDir {
    let [config_file, weights_file] = ["config.json", "model.safetensors"].map(|name| dir.path().join(name));
    let mut config: Value = serde_json::from_slice(&std::fs::read(&config_file).unwrap()).unwrap();
    let number = |config: &Value, key: &str| config[key].as_u64().unwrap() as usize;
    let [heads, kv_heads] = ["num_attention_heads", "num_key_value_heads"].map(|key| number(&config, key));
    config["num_key_value_heads"] = heads.into();
    let head_dim = config["head_dim"].as_u64().map_or(number(&config, "hidden_size") / heads, |head_dim| head_dim as usize);
    let bytes = std::fs::read(&weights_file).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let tensors = file.tensors().into_iter().map(|(name, tensor)| {
        let (mut shape, mut bytes) = (tensor.shape().to_vec(), tensor.data().to_vec());
        if ["k_proj", "v_proj", "k_norm"].iter().any(|part| name.contains(part)) && shape[0] == kv_heads * head_dim {
            bytes = bytes.chunks(bytes.len() / kv_heads).flat_map(|head| head.repeat(heads / kv_heads)).collect();
            shape[0] = heads * head_dim;
        }
        (name, tensor.dtype(), shape, bytes)
    });
    let tensors: Vec<_> = tensors.collect();
    let views = tensors.iter().map(|(name, dtype, shape, bytes)| (name, TensorView::new(*dtype, shape.clone(), bytes).unwrap()));
    std::fs::write(config_file, config.to_string()).unwrap();
    std::fs::write(weights_file, safetensors::serialize(views, None).unwrap()).unwrap();
    dir
}

/// Numbers in MXFP4, `[experts, outputs, inputs]`, as `[experts, inputs, outputs]`.
fn of_mxfp4(blocks: &[u8], scales: &[u8], shape: &[usize]) -> Vec<f32> {
    const VALUES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let [experts, inputs, outputs] = *shape else { panic!("three sizes") };
    let number = |expert: usize, input: usize, output: usize| {
        let at = (expert * outputs + output) * inputs + input;
        let bits = blocks[at / 2] >> (4 * (at % 2)) & 0xf;
        let value = VALUES[usize::from(bits % 8)] * 2f32.powi(i32::from(scales[at / 32]) - 127);
        if bits < 8 { value } else { -value }
    };
    let places = (0..experts).flat_map(|e| (0..inputs).flat_map(move |i| (0..outputs).map(move |o| (e, i, o))));
    places.map(|(expert, input, output)| number(expert, input, output)).collect()
}

/// FP8 numbers times their scales, rounded to bf16.
fn dequantized(file: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let weight = file.tensor(name).unwrap();
    let scale = |suffix: &str| file.tensor(&name.replace(".weight", suffix)).ok();
    let scale = scale(".weight_scale").or_else(|| scale(".weight_scale_inv")).unwrap();
    let scales = decode(if scale.dtype() == FileDtype::F32 { Dtype::F32 } else { Dtype::Bf16 }, scale.data());
    let [rows, cols] = weight.shape() else { panic!("{name} is no matrix") };
    let scale_at = |row: usize, col: usize| match scale.shape() {
        [1] => scales[0],
        [outputs, 1] if outputs == rows => scales[row],
        [_, across] => scales[row / 128 * across + col / 128],
        other => panic!("scales of {name} are {other:?}"),
    };
    let numbers = (0..rows * cols).map(|i| {
        let byte = weight.data()[i];
        let (exponent, mantissa) = (i32::from(byte >> 3 & 15), f64::from(byte & 7) / 8.0);
        let magnitude = if exponent == 0 { mantissa * 2f64.powi(-6) } else { (1.0 + mantissa) * 2f64.powi(exponent - 7) };
        (if byte < 128 { magnitude } else { -magnitude }) as f32 * scale_at(i / cols, i % cols)
    });
    decode(Dtype::Bf16, &encode(Dtype::Bf16, &numbers.collect::<Vec<f32>>()))
}

/// A sequence with its own blocks, taken from the top of the memory down, so that a block's id is not its index.
pub(crate) struct Sequence {
    pub(crate) tokens: Vec<Token>,
    pub(crate) blocks: Vec<u32>,
    /// The blocks of its state, if the model keeps one.
    pub(crate) state: Vec<u32>,
    pub(crate) computed: usize,
}

impl Sequence {
    pub(crate) fn new(model: &Model, tokens: &[Token], room: usize, free: &mut Vec<u32>) -> Self {
        let mut take = |blocks| (0..blocks).map(|_| free.pop().expect("enough blocks")).collect();
        let (blocks, state) = (take((tokens.len() + room).div_ceil(BLOCK_TOKENS)), take(model.state_blocks()));
        Self { tokens: tokens.to_vec(), blocks, state, computed: 0 }
    }

    /// The next `size` tokens that are not computed yet.
    pub(crate) fn next_chunk(&self, size: usize, logits: LogitRows) -> Chunk<'_> {
        let end = self.tokens.len().min(self.computed + size);
        let state = StateBlocks::in_place(self.computed, &self.state);
        Chunk { tokens: &self.tokens[self.computed..end], start: self.computed, blocks: &self.blocks, state, logits }
    }
}

/// Logits of all rows of `tokens`, computed in chunks.
pub(crate) fn all_logits(model: &mut Model, tokens: &[Token], chunk: usize) -> Vec<f32> {
    let blocks = tokens.len().div_ceil(BLOCK_TOKENS) + model.state_blocks();
    let mut kv = model.new_kv(blocks);
    let mut sequence = Sequence::new(model, tokens, 0, &mut (0..blocks as u32).collect());
    let mut logits = Vec::new();
    while sequence.computed < tokens.len() {
        let rows = model.forward(&[sequence.next_chunk(chunk, LogitRows::All)], &mut kv);
        (0..rows.rows()).for_each(|i| logits.extend_from_slice(rows.row(i)));
        sequence.computed = tokens.len().min(sequence.computed + chunk);
    }
    logits
}

/// Greedy continuations of all prompts together: in each step every sequence computes up to `chunk` tokens.
pub(crate) fn greedy_together(model: &mut Model, prompts: &[&[Token]], count: usize, chunk: usize) -> Vec<Vec<Token>> {
    let blocks: usize = prompts.iter().map(|p| (p.len() + count).div_ceil(BLOCK_TOKENS) + model.state_blocks()).sum();
    let mut free = (0..blocks as u32).collect();
    let mut kv: KvMemory = model.new_kv(blocks);
    let mut sequences: Vec<Sequence> = prompts.iter().map(|p| Sequence::new(model, p, count, &mut free)).collect();
    loop {
        let running: Vec<usize> = (0..sequences.len()).filter(|&i| sequences[i].tokens.len() < prompts[i].len() + count).collect();
        if running.is_empty() {
            return sequences.into_iter().zip(prompts).map(|(s, p)| s.tokens[p.len()..].to_vec()).collect();
        }
        let last = |i: &usize| sequences[*i].computed + chunk >= sequences[*i].tokens.len();
        let rows = |i| if last(i) { LogitRows::Last } else { LogitRows::None };
        let chunks: Vec<Chunk<'_>> = running.iter().map(|i| sequences[*i].next_chunk(chunk, rows(i))).collect();
        let logits = model.forward(&chunks, &mut kv);
        let mut row = 0;
        for i in running {
            let sequence = &mut sequences[i];
            let done = sequence.computed + chunk >= sequence.tokens.len();
            sequence.computed = sequence.tokens.len().min(sequence.computed + chunk);
            if done {
                sequence.tokens.push(argmax(logits.row(row)));
                row += 1;
            }
        }
    }
}

pub(crate) fn argmax(logits: &[f32]) -> Token {
    let best = (0..logits.len()).reduce(|best, i| if logits[i] > logits[best] { i } else { best });
    best.expect("a row of logits") as Token
}
