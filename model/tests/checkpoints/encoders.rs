//! Tiny encoders, compared with Hugging Face transformers (`encoders/make.py`), and with themselves: the same bits in any batch, on any
//! number of threads and instruction set. An error names what a checkpoint lacks.

use serde::Deserialize;
use std::{
    collections::HashMap,
    fs,
    path::{Path, PathBuf},
};
use tidemill_model::{Encoder, EncoderExecutor, EncoderOptions, Executor, Isa, encoder::Text};
use tidemill_proto::{
    block::BLOCK_TOKENS,
    step::{Segment, StateBlocks, Wanted},
};

const ALL: [&str; 6] = ["bert-mean", "bert-classes", "xlm-roberta-rank", "modernbert-first", "modernbert-classes", "nomic"];

#[derive(Deserialize)]
struct Reference {
    texts: Vec<Case>,
}

#[derive(Deserialize)]
struct Case {
    ids: Vec<u32>,
    second: usize,
    row: Vec<f32>,
}

fn directory(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/encoders").join(name)
}

fn reference(name: &str) -> Vec<Case> {
    let bytes = fs::read(directory(name).join("reference.json")).unwrap();
    serde_json::from_slice::<Reference>(&bytes).unwrap().texts
}

fn load(name: &str, threads: usize, isa: Option<Isa>) -> Encoder {
    let options = EncoderOptions { quantize: None, threads, isa };
    Encoder::load(&directory(name), &options, &mut |_, _| ()).unwrap().expect("an encoder")
}

/// The rows of these cases in one batch.
fn encode(encoder: &mut Encoder, cases: &[&Case]) -> Vec<Vec<f32>> {
    let mut next = 0;
    let tables: Vec<Vec<u32>> = cases
        .iter()
        .map(|case| {
            let blocks = case.ids.len().div_ceil(BLOCK_TOKENS) as u32;
            next += blocks;
            (next - blocks..next).rev().collect()
        })
        .collect();
    let mut kv = encoder.new_kv(next as usize);
    // The memory's contents after an earlier step must not matter.
    kv.bytes_mut().fill(0xff);
    let texts: Vec<_> = cases.iter().zip(&tables).map(|(case, blocks)| Text { tokens: &case.ids, blocks, second: case.second }).collect();
    let width = encoder.width();
    encoder.encode(&texts, &mut kv).chunks_exact(width).map(<[f32]>::to_vec).collect()
}

#[test]
fn rows_are_those_of_transformers() {
    for name in ALL {
        let mut encoder = load(name, 2, None);
        for (at, case) in reference(name).iter().enumerate() {
            let [row] = &encode(&mut encoder, &[case])[..] else { panic!("one row") };
            assert_eq!(row.len(), case.row.len(), "{name}, text {at}");
            let size = case.row.iter().map(|x| x * x).sum::<f32>().sqrt();
            let distance = row.iter().zip(&case.row).map(|(a, b)| (a - b) * (a - b)).sum::<f32>().sqrt();
            // In bf16, activations are rounded before each product.
            let tolerance = if name == "modernbert-first" { 0.03 } else { 2e-5 };
            assert!(distance <= tolerance * size.max(1.0), "{name}, text {at}: {distance} apart, of {size}\n{row:?}\n{:?}", case.row);
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_batch_and_on_any_machine() {
    for name in ALL {
        let cases = reference(name);
        let mut found: HashMap<String, Vec<Vec<f32>>> = HashMap::new();
        for isa in Isa::testable() {
            for threads in [1, 3] {
                let mut encoder = load(name, threads, Some(isa));
                let alone: Vec<_> = cases.iter().flat_map(|case| encode(&mut encoder, &[case])).collect();
                let together = encode(&mut encoder, &cases.iter().collect::<Vec<_>>());
                let mut backwards = encode(&mut encoder, &cases.iter().rev().collect::<Vec<_>>());
                backwards.reverse();
                assert!(alone == together && alone == backwards, "{name} on {isa}");
                // AMX adds in a different order in bf16, which is in the layout.
                let first = found.entry(format!("{:?}", encoder.layout())).or_insert_with(|| alone.clone());
                assert_eq!(*first, alone, "{name} on {isa} with {threads} threads");
            }
        }
    }
}

#[test]
fn an_executor_gives_each_segment_its_row() {
    let cases = reference("bert-classes");
    let mut executor = EncoderExecutor::new(load("bert-classes", 1, None), 64);
    assert!(executor.reads_whole());
    assert_eq!((executor.vocab(), executor.context_tokens()), (384, 512));
    let tables = [[0u32, 1, 2, 3].as_slice(), &[4, 5, 6, 7]];
    let segments: Vec<_> = cases[..2]
        .iter()
        .zip(tables)
        .map(|(case, blocks)| Segment {
            tokens: &case.ids,
            start: 0,
            blocks,
            state: StateBlocks::default(),
            wanted: Wanted::Embedding { second_text: case.second },
        })
        .collect();
    let results = executor.step(&segments).unwrap();
    let mut encoder = load("bert-classes", 1, None);
    let expected = encode(&mut encoder, &[&cases[0], &cases[1]]);
    let rows: Vec<_> = results.into_iter().map(|result| result.embedding.unwrap()).collect();
    assert_eq!(rows, expected);
}

/// A copy of a checkpoint whose `config.json` is changed, and the error that loading it gives.
fn fault(name: &str, change: impl Fn(&mut serde_json::Value), pooling: Option<&str>) -> String {
    let copy = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "modules.json"] {
        let from = directory(name).join(file);
        if from.exists() {
            fs::copy(from, copy.path().join(file)).unwrap();
        }
    }
    fs::create_dir(copy.path().join("1_Pooling")).unwrap();
    let pooling = pooling.unwrap_or(r#"{"pooling_mode_mean_tokens": true}"#);
    fs::write(copy.path().join("1_Pooling/config.json"), pooling).unwrap();
    let path = copy.path().join("config.json");
    let mut config = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut config);
    fs::write(path, config.to_string()).unwrap();
    let options = EncoderOptions { quantize: None, threads: 1, isa: None };
    let loaded = Encoder::load(copy.path(), &options, &mut |_, _| ());
    loaded.err().map_or_else(|| panic!("{name} loads"), |error| error.to_string())
}

#[test]
fn what_does_not_fit_is_named() {
    let set = |key: &'static str, value: serde_json::Value| move |config: &mut serde_json::Value| config[key] = value.clone();
    for (key, value, expected) in [
        ("num_hidden_layers", 4.into(), "encoder.layer.3.attention.self.query.weight"),
        ("num_hidden_layers", 2.into(), "of one layer more than num_hidden_layers"),
        ("num_hidden_layers", 0.into(), "num_hidden_layers is 0"),
        ("hidden_size", 96.into(), "embeddings.word_embeddings.weight"),
        ("num_attention_heads", 5.into(), "hidden_size 48"),
        ("hidden_act", "relu".into(), "\"relu\" is not supported"),
        ("type_vocab_size", 3.into(), "token_type_embeddings"),
        ("max_position_embeddings", 40.into(), "position_embeddings"),
        ("position_embedding_type", "relative_key".into(), "relative_key"),
        ("is_decoder", true.into(), "is_decoder"),
        ("architectures", serde_json::json!(["ElectraModel"]), "ElectraModel"),
        ("layer_norm_eps", (-1.0).into(), "layer_norm_eps"),
    ] {
        let error = fault("bert-mean", set(key, value), None);
        assert!(error.contains(expected), "{key}: {error}");
    }
    let error = fault("bert-mean", |_| (), Some(r#"{"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true}"#));
    assert!(error.contains("several at once"), "{error}");
    let error = fault("bert-classes", set("id2label", serde_json::json!({"0": "a"})), None);
    assert!(error.contains("classifier.weight"), "{error}");
    let error = fault("xlm-roberta-rank", set("pad_token_id", 600.into()), None);
    assert!(error.contains("leaves no position"), "{error}");
}
