//! The exactness contract for whole models: a row's logits and a block's bytes are the same bits regardless of how the tokens were cut,
//! batched and computed, on all machines of one layout fingerprint.

use crate::fixtures::{
    Sequence, all_logits, assert_same_bits, families, family_tests, fixture, is_bf16, kv_dtypes, load, load_on, one_of_each_order,
    prompt_of, reference,
};
use std::path::Path;
use tidemill_model::{Chunk, Isa, LoadOptions, LogitRows, Model};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype},
    step::StateBlocks,
};

/// A prompt that crosses several blocks and the sliding window, if there is one.
fn prompt(family: &str) -> Vec<u32> {
    prompt_of(family, 100)
}

/// K and V as numbers in bf16 and, if supported, as scaled integers.
fn smallest_kv_dtypes(family: &str) -> impl Iterator<Item = KvDtype> {
    kv_dtypes(family).skip(2)
}

fn chunks_threads_and_instruction_sets_do_not_change_a_bit(family: &str) {
    for kv_dtype in smallest_kv_dtypes(family) {
        let tokens = prompt(family);
        let in_bf16 = is_bf16(family) || kv_dtype == KvDtype::Bf16;
        let chunks = &[1, 7, 16, 32, 100];
        assert_same_bits(&format!("{family}, {kv_dtype:?}"), in_bf16, &tokens, &[(1, chunks), (3, chunks)], |threads, isa| {
            load_on(family, kv_dtype, threads, Some(isa))
        });
    }
}

family_tests! { chunks_threads_and_instruction_sets_do_not_change_a_bit: all }

fn the_batch_around_a_row_does_not_change_a_bit(family: &str) {
    for (kv_dtype, isa) in smallest_kv_dtypes(family).flat_map(|kv_dtype| one_of_each_order().map(move |isa| (kv_dtype, isa))) {
        let (reference, _) = reference(family);
        let mut model = load_on(family, kv_dtype, 2, Some(isa));
        let prompts: Vec<_> = reference.prompts.iter().map(|p| &p.ids[..p.ids.len().min(300)]).collect();
        let mut free = (0..128).collect();
        let sequences: Vec<_> = prompts.iter().map(|p| Sequence::new(&model, p, 0, &mut free)).collect();
        let mut kv = model.new_kv(128);
        let chunks: Vec<_> = sequences.iter().map(|s| s.next_chunk(300, LogitRows::All)).collect();
        let together = model.forward(&chunks, &mut kv);
        let together: Vec<Vec<f32>> = (0..together.rows()).map(|i| together.row(i).to_vec()).collect();
        let alone: Vec<f32> = prompts.iter().flat_map(|tokens| all_logits(&mut model, tokens, 64)).collect();
        assert!(together.concat() == alone, "{family}, {kv_dtype:?} on {isa}: prompts together");

        // Logits of the last rows, between chunks that want none.
        let rows = |i: usize| if i.is_multiple_of(2) { LogitRows::Last } else { LogitRows::None };
        let chunks: Vec<_> = sequences.iter().enumerate().map(|(i, s)| s.next_chunk(300, rows(i))).collect();
        let last = model.forward(&chunks, &mut kv);
        let ends = prompts.iter().scan(0, |end, p| {
            *end += p.len();
            Some(*end)
        });
        let wanted: Vec<usize> = ends.enumerate().filter(|(i, _)| i.is_multiple_of(2)).map(|(_, end)| end - 1).collect();
        assert_eq!(last.rows(), wanted.len());
        for (i, row) in wanted.into_iter().enumerate() {
            assert!(last.row(i) == together[row], "{family}, {kv_dtype:?} on {isa}: last rows only");
        }
    }
}

family_tests! { the_batch_around_a_row_does_not_change_a_bit: all }

fn blocks_are_the_same_bytes_whoever_computes_them_and_serve_another_sequence(family: &str) {
    let tokens = prompt(family);
    let blocks: Vec<u32> = (0..7).collect();
    for (kv_dtype, isa) in kv_dtypes(family).flat_map(|kv_dtype| one_of_each_order().map(move |isa| (kv_dtype, isa))) {
        // One worker computes the prompt whole and without logits, another in small chunks on different hardware of the same order.
        let mut prefill = load_on(family, kv_dtype, 2, Some(isa));
        let other = Isa::testable().filter(|other| other.bf16_products() == isa.bf16_products()).last();
        // States come after the seven blocks: that at the end of the sixth, and that at the end.
        let parts = prefill.state_blocks() as u32;
        let [sixth, end]: [Vec<u32>; 2] = [(7..7 + parts).collect(), (7 + parts..7 + 2 * parts).collect()];
        let all = 7 + 2 * parts as usize;
        let mut theirs = prefill.new_kv(all);
        let to = |start: usize| if start < 96 { &sixth } else { &end };
        let from = |start: usize| (start > 0).then_some(if start <= 96 { &sixth[..] } else { &end[..] });
        let state = |start: usize| StateBlocks { from: from(start), to: to(start) };
        let first = Chunk { tokens: &tokens[..96], start: 0, blocks: &blocks, state: state(0), logits: LogitRows::None };
        assert_eq!(prefill.forward(&[first], &mut theirs).rows(), 0);
        let last = Chunk { tokens: &tokens[96..], start: 96, blocks: &blocks, state: state(96), logits: LogitRows::None };
        assert_eq!(prefill.forward(&[last], &mut theirs).rows(), 0);

        let mut decode = load_on(family, kv_dtype, 1, other);
        assert_eq!(decode.layout(), prefill.layout());
        assert_eq!(decode.kv_shape().block_bytes(), theirs.block(0).len());
        let mut ours = decode.new_kv(all);
        let mut expected = Vec::new();
        // A chunk ends where the sixth block does.
        let cuts = (0..96).step_by(11).chain([96]).map(|start| (start, if start < 96 { 96.min(start + 11) } else { 100 }));
        for (start, to) in cuts {
            let chunk = Chunk { tokens: &tokens[start..to], start, blocks: &blocks, state: state(start), logits: LogitRows::Last };
            expected = decode.forward(&[chunk], &mut ours).row(0).to_vec();
        }
        for id in (0..(tokens.len() / BLOCK_TOKENS) as u32).chain(sixth.clone()) {
            assert!(ours.block(id) == theirs.block(id), "{family}, {kv_dtype:?} on {isa}: block {id}");
        }

        // Copied to other places, the blocks replace the computation.
        let mut moved = decode.new_kv(all);
        let table: Vec<u32> = (0..7).rev().collect();
        for id in 0..6 {
            moved.block_mut(table[id as usize]).copy_from_slice(theirs.block(id));
        }
        for id in &sixth {
            moved.block_mut(*id).copy_from_slice(theirs.block(*id));
        }
        let tail = Chunk { tokens: &tokens[96..], start: 96, blocks: &table, state: state(96), logits: LogitRows::Last };
        assert!(decode.forward(&[tail], &mut moved).row(0) == expected, "{family}, {kv_dtype:?} on {isa}: tail after fetched blocks");
    }
}

family_tests! { blocks_are_the_same_bytes_whoever_computes_them_and_serve_another_sequence: all }

#[test]
fn the_layout_commits_to_weights_settings_and_dtype() {
    let options = LoadOptions { kv_dtype: KvDtype::Bf16, quantize: None, threads: 1, isa: None };
    let load = |dir: &Path, options: &LoadOptions| Model::load(dir, options, &mut |_, _| {}).unwrap().layout();
    let mut layouts: Vec<_> = families().map(|family| load(&fixture(family), &options)).collect();

    let dir = tempfile::tempdir().unwrap();
    let llama = fixture("llama");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(llama.join(file), dir.path().join(file)).unwrap();
    }
    assert_eq!(load(dir.path(), &options), layouts[0], "the directory's name and other files do not matter");
    let config = std::fs::read_to_string(llama.join("config.json")).unwrap();
    let write = |config: String| std::fs::write(dir.path().join("config.json"), config).unwrap();
    write(config.replace("\"max_position_embeddings\": 2048", "\"max_position_embeddings\": 1024"));
    assert_eq!(load(dir.path(), &options), layouts[0], "a shorter context is the same arithmetic");
    write(config.replace("10000.0", "10001.0"));
    layouts.push(load(dir.path(), &options));
    write(config);
    layouts.extend([KvDtype::F32, KvDtype::Int8].map(|kv_dtype| load(dir.path(), &LoadOptions { kv_dtype, ..options.clone() })));
    let mut weights = std::fs::read(llama.join("model.safetensors")).unwrap();
    *weights.last_mut().unwrap() ^= 1;
    std::fs::write(dir.path().join("model.safetensors"), weights).unwrap();
    layouts.push(load(dir.path(), &options));

    let count = layouts.len();
    let mut distinct: Vec<String> = layouts.iter().map(ToString::to_string).collect();
    distinct.sort();
    distinct.dedup();
    assert_eq!(distinct.len(), count);
}

#[test]
fn an_empty_batch_is_no_work() {
    for family in families() {
        let mut model = load(family, KvDtype::Bf16);
        let mut kv = model.new_kv(0);
        assert_eq!(model.forward(&[], &mut kv).rows(), 0);
    }
}

#[test]
fn progress_grows_to_the_size_of_the_weights() {
    let mut seen = Vec::new();
    let options = LoadOptions { kv_dtype: KvDtype::Bf16, quantize: None, threads: 2, isa: None };
    Model::load(&fixture("qwen3"), &options, &mut |done, total| seen.push((done, total))).unwrap();
    assert!(seen.is_sorted() && seen.iter().all(|(_, total)| *total == 427_168), "total_size of the fixture's index");
    assert_eq!(seen.last(), Some(&(427_168, 427_168)));
}

#[test]
fn rows_are_counted_by_expert() {
    let mut model = load("qwen3-moe", KvDtype::F32);
    all_logits(&mut model, &prompt_of("qwen3-moe", 100), 32);
    let rows = model.expert_rows();
    assert_eq!((rows.len(), rows.iter().sum::<u64>()), (6, 100 * 3 * 2), "three experts of a row in two of three layers: {rows:?}");
    assert!(load("llama", KvDtype::F32).expert_rows().is_empty());
}
