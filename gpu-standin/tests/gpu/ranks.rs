//! Models on several devices: against the CPU, with blocks handed over between different numbers of devices, and with bugs planted into what
//! the devices do together.

use crate::standin::{Standin, cache, repository, told};
use std::os::unix::fs::symlink;
use tempfile::TempDir;
use tidemill_kernels::cuda::checks::Checks;
use tidemill_model::{
    CudaExecutor, Executor, ExecutorError, ModelError,
    cuda::{CudaOptions, KvBytes},
};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype, Token},
    sampling::Sampling,
    step::{Draw, History, Segment, StateBlocks, Wanted},
};

/// Checkpoints that differ in what is shared out: FP8; tied embeddings, biases, and experts with a shared one.
const FAMILIES: &[&str] = &["fp8-channel", "qwen2-moe"];

/// A folder with these checkpoints.
fn checkpoints(families: &[&str]) -> TempDir {
    let folder = TempDir::new().unwrap();
    let fixtures = repository().join("model/tests/fixtures").canonicalize().unwrap();
    for family in families {
        assert!(fixtures.join(family).exists(), "{family}");
        symlink(fixtures.join(family), folder.path().join(family)).unwrap();
    }
    folder
}

fn check(families: &[&str], ranks: [usize; 2]) {
    let mut checks = Checks::new(0);
    tidemill_model::cuda::checks::models_on_several(checkpoints(families).path(), &cache(), ranks, &mut checks).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
}

#[test]
fn two_devices_compute_as_the_cpu_and_hand_over_to_one() {
    print!("{}", Standin::new("devices=2").passes("ranks::on_two"));
}

#[test]
fn four_devices_hand_over_to_two() {
    print!("{}", Standin::new("devices=4,arch=80").passes("ranks::on_four"));
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn on_two() {
    check(FAMILIES, [2, 1]);
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn on_four() {
    check(&["llama"], [4, 2]);
}

fn load(model: &str, ranks: usize) -> Result<CudaExecutor, ModelError> {
    load_for(model, ranks, 0)
}

/// Loads a model that draws tokens for so many sequences.
fn load_for(model: &str, ranks: usize, sequences_max: usize) -> Result<CudaExecutor, ModelError> {
    let (kv, kv_dtype) = (KvBytes::Exactly(1 << 20), KvDtype::Bf16);
    let options = CudaOptions { kernel_cache: cache(), step_tokens: 64, sequences_max, kv, kv_dtype, ranks };
    CudaExecutor::load(&repository().join("model/tests/fixtures").join(model), &options, &mut |_, _| {})
}

const BLOCKS: [u32; 3] = [2, 0, 1];

fn prompt() -> Vec<Token> {
    (0..2 * BLOCK_TOKENS as Token).map(|i| 1 + i * 7 % 90).collect()
}

/// The blocks of a prompt.
fn blocks_of(executor: &mut CudaExecutor) -> Vec<Vec<u8>> {
    let tokens = prompt();
    let segment = Segment { tokens: &tokens, start: 0, blocks: &BLOCKS, state: StateBlocks::default(), wanted: Wanted::Nothing };
    executor.step(&[segment]).unwrap();
    executor.read_blocks(&BLOCKS[..2]).unwrap().wait().unwrap().iter().map(|block| block.as_ref().to_vec()).collect()
}

/// The tokens that follow the prompt: the first is drawn from it, the others by recorded steps.
fn tokens_of(executor: &mut CudaExecutor) -> Result<Vec<Token>, ExecutorError> {
    let (sampling, history) = (Sampling { temperature: 0.0, ..Sampling::default() }, History::default());
    let (mut tokens, mut start) = (prompt(), 0);
    let first = tokens.len();
    while tokens.len() < first + BLOCK_TOKENS {
        let draw = Draw { sampling: &sampling, history: &history, index: 0, banned: &[], allowed: None };
        let wanted = Wanted::Token(draw);
        let segment = Segment { tokens: &tokens[start..], start, blocks: &BLOCKS, state: StateBlocks::default(), wanted };
        let drawn = executor.step(&[segment])?.remove(0).drawn;
        start = tokens.len();
        tokens.extend(drawn.iter().map(|(token, _)| *token));
    }
    Ok(tokens.split_off(first))
}

#[test]
fn any_number_of_devices_leaves_the_same_blocks_and_tokens() {
    for seed in 1..3 {
        let standin = Standin::new(&format!("devices=4,seed={seed}"));
        standin.passes("ranks::same_blocks");
        standin.passes("ranks::same_tokens");
    }
}

/// The stand-in sums a product's output in one order, as cuBLASLt does not promise to.
#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn same_blocks() {
    for (model, degrees) in [("llama", &[2, 4][..]), ("qwen3-moe", &[2]), ("cohere2", &[2])] {
        let mut whole = load(model, 1).unwrap();
        let expected = blocks_of(&mut whole);
        for &ranks in degrees {
            let mut split = load(model, ranks).unwrap();
            assert_eq!(split.layout(), whole.layout(), "{model} on {ranks}");
            assert!(blocks_of(&mut split) == expected, "{model} on {ranks}: other bytes");
        }
    }
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn same_tokens() {
    let [whole, split] = [1, 2].map(|ranks| tokens_of(&mut load_for("llama", ranks, 1).unwrap()).unwrap());
    assert!(split == whole, "other tokens: {split:?} for {whole:?}");
}

/// One device fails in the middle of a step that the other waits for.
#[test]
fn a_device_that_fails_ends_the_step_of_all() {
    let folder = TempDir::new().unwrap();
    for device in [0, 1] {
        let file = folder.path().join(format!("fail-{device}"));
        Standin::new(&format!("devices=2,fail_device={device},fail_when={}", file.display())).passes("ranks::failing");
    }
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn failing() {
    let mut executor = load_for("llama", 2, 1).unwrap();
    let options = std::env::var("TIDEMILL_GPU_STANDIN").unwrap();
    std::fs::write(options.split_once("fail_when=").unwrap().1, "").unwrap();
    let error = tokens_of(&mut executor).unwrap_err();
    assert!(error.to_string().contains("the CUDA device failed"), "{error}");
}

#[test]
fn devices_that_cannot_reach_each_other_are_refused() {
    Standin::new("devices=2,peers=0").passes("ranks::unreachable");
    Standin::new("devices=2").passes("ranks::too_few");
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn unreachable() {
    load("llama3", 1).unwrap();
    let Err(error) = load("llama3", 2) else { panic!("it is refused") };
    assert!(error.to_string().contains("device 0 cannot read the memory of device 1"), "{error}");
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn too_few() {
    for (ranks, words) in [(4, "finds no device 2 (2 in all)"), (3, "not shared out over 3 devices")] {
        let Err(error) = load("llama", ranks) else { panic!("it is refused") };
        assert!(error.to_string().contains(words), "{error}");
    }
}

/// Each of these errors of what devices do together is found, by a rule that it breaks or by the blocks.
#[test]
fn planted_bugs_of_what_devices_do_together_are_found() {
    let edits = [
        ("columns of another device", "parts.at[part]", "parts.at[0]"),
        ("columns of another row", "[u64(row) * width", "[u64(row) * (width + 1)"),
        ("columns one further", "(column - first)]", "(column - first + 1) % width]"),
    ];
    for (what, from, to) in edits {
        let told = told(&Standin::new("devices=2").with_edit(("gather.cu", from, to)).run("ranks::same_blocks"));
        let said = [OTHER_BYTES, "WrongPeerBytes", "[address]"];
        assert!(said.into_iter().any(|said| told.contains(said)), "{what} is not found:\n{told}");
    }
    // Without recorded steps, in which a wait that is left out is an error of its own.
    let waits =
        [("drop=waits_across", OTHER_BYTES), ("drop=waits_across,every=5", OTHER_BYTES), ("drop=pool_access", "access is not enabled")];
    for (options, said) in waits {
        for seed in 1..3 {
            let told = told(&Standin::new(&format!("devices=2,{options},seed={seed}")).run("ranks::same_blocks"));
            assert!(told.contains(said), "{options} is not found:\n{told}");
        }
    }
}

const OTHER_BYTES: &str = "other bytes";
