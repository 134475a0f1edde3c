//! A prompt of 128k tokens through a tiny model: its memory beside the KV blocks does not grow with the context, and its bits do not depend
//! on how the prompt is cut. The test has a process of its own, whose peak memory it measures.

#![cfg(target_os = "linux")]

use serde_json::{Value, json};
use std::{fs, path::Path};
use tempfile::TempDir;
use tidemill_model::{Chunk, KvMemory, LoadOptions, LogitRows, Model};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype},
    step::StateBlocks,
};

const TOKENS: usize = 128 << 10;
const CHUNK: usize = 512;
/// The bound for all buffers of a chunk of [`CHUNK`] rows. Scores of all its positions would be 256 MiB for each head.
const BUFFERS_KIB_MAX: u64 = 16 << 10;

/// A fixture with a longer context and other settings.
fn lengthened(family: &str, edit: impl FnOnce(&mut Value)) -> (TempDir, Model) {
    let (dir, from) = (tempfile::tempdir().unwrap(), Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(family));
    fs::copy(from.join("model.safetensors"), dir.path().join("model.safetensors")).unwrap();
    let mut config: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    config["max_position_embeddings"] = json!(TOKENS + 1);
    edit(&mut config);
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let options = LoadOptions { kv_dtype: KvDtype::Bf16, quantize: None, threads: 2, isa: None };
    let model = Model::load(dir.path(), &options, &mut |_, _| {}).unwrap();
    (dir, model)
}

/// KiB of a field of `/proc/self/status`.
fn status(field: &str) -> u64 {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix(field)).expect("the field");
    line.trim_start_matches(':').split_whitespace().next().unwrap().parse().unwrap()
}

/// Runs `work`, and checks that peak memory exceeds that of `kv` in full use by [`BUFFERS_KIB_MAX`] at most.
fn bounded(kv: &mut KvMemory, work: impl FnOnce(&mut KvMemory)) {
    // Pages count when they are touched.
    (0..kv.blocks() as u32).for_each(|id| kv.block_mut(id).fill(0));
    fs::write("/proc/self/clear_refs", "5").expect("the peak starts again");
    let before = status("VmRSS");
    work(kv);
    let needed = status("VmHWM") - before;
    println!("{needed} KiB beside {} MiB of KV", (kv.blocks() * kv.block(0).len()) >> 20);
    assert!(needed <= BUFFERS_KIB_MAX, "{needed} KiB");
}

/// The logits of the last `all` rows, with the rest of the prompt in chunks.
fn run(model: &mut Model, kv: &mut KvMemory, blocks: &[u32], tokens: &[u32], chunk: usize, all: usize) -> Vec<f32> {
    let start = tokens.len() - all;
    for (nth, tokens) in tokens[..start].chunks(chunk).enumerate() {
        model.forward(&[Chunk { tokens, start: nth * chunk, blocks, state: StateBlocks::default(), logits: LogitRows::None }], kv);
    }
    let logits =
        model.forward(&[Chunk { tokens: &tokens[start..], start, blocks, state: StateBlocks::default(), logits: LogitRows::All }], kv);
    (0..logits.rows()).flat_map(|row| logits.row(row).to_vec()).collect()
}

#[test]
fn a_prompt_of_128k_tokens_needs_its_blocks_and_a_chunks_buffers() {
    let tokens: Vec<u32> = (0..TOKENS as u32).map(|i| i.wrapping_mul(0x9e37_79b9) >> 24).collect();
    let blocks: Vec<u32> = (0..TOKENS.div_ceil(BLOCK_TOKENS) as u32).rev().collect();

    // All layers but the last have windows. The last one attends to everything, but only for rows with logits, so nothing takes quadratic
    // time.
    let kinds = ["sliding_attention", "sliding_attention", "full_attention"];
    let (_dir, mut model) = lengthened("gemma3", |config| config["layer_types"] = json!(kinds));
    let mut kv = model.new_kv(blocks.len());
    let mut whole = Vec::new();
    bounded(&mut kv, |kv| whole = run(&mut model, kv, &blocks, &tokens, CHUNK, CHUNK));
    let alone = run(&mut model, &mut kv, &blocks, &tokens, 3 * CHUNK + 16, 1);
    assert!(whole[whole.len() - alone.len()..] == alone, "the last row alone, after other chunks");

    // With a latent, every layer attends to everything, for some rows at the end.
    let (_dir, mut model) = lengthened("deepseek-v3", |_| ());
    let mut kv = model.new_kv(blocks.len());
    bounded(&mut kv, |kv| {
        let start = TOKENS - CHUNK / 8;
        model.forward(
            &[Chunk { tokens: &tokens[start..], start, blocks: &blocks, state: StateBlocks::default(), logits: LogitRows::All }],
            kv,
        );
    });
}
