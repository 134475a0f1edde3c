//! `tidemill-bench model` creates a directory that other programs can read.

use clap::Parser;
use safetensors::{Dtype, SafeTensors};
use serde_json::Value;
use std::{fs, path::Path};
use tidemill_bench::model::{ModelArgs, make};
use tokenizers::Tokenizer;

#[derive(Parser)]
struct Cli {
    #[command(flatten)]
    model: ModelArgs,
}

fn made(out: &Path, flags: &[&str]) -> anyhow::Result<()> {
    let fixed = ["model", "--like", "smollm-135m", "--layers", "1", "--out", out.to_str().unwrap()];
    make(&Cli::parse_from(fixed.iter().chain(flags)).model)
}

#[test]
fn the_directory_is_a_hugging_face_model() {
    let dir = tempfile::tempdir().unwrap();
    let out = dir.path().join("model");
    made(&out, &[]).unwrap();

    let json = |name: &str| serde_json::from_slice::<Value>(&fs::read(out.join(name)).unwrap()).unwrap();
    let config = json("config.json");
    assert_eq!((&config["num_hidden_layers"], &config["torch_dtype"]), (&1.into(), &"bfloat16".into()));
    let bytes = fs::read(out.join("model.safetensors")).unwrap();
    let weights = SafeTensors::deserialize(&bytes).unwrap();
    assert_eq!(weights.len(), 2 + 9);
    let embedding = weights.tensor("model.embed_tokens.weight").unwrap();
    assert_eq!((embedding.shape(), embedding.dtype()), (&[49_152, 576][..], Dtype::BF16));
    let numbers = |name: &str| -> Vec<f32> {
        let data = weights.tensor(name).unwrap().data();
        data.chunks_exact(2).map(|bytes| half::bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32()).collect()
    };
    assert!(numbers("model.layers.0.input_layernorm.weight").iter().all(|weight| *weight == 1.0));
    let query = numbers("model.layers.0.self_attn.q_proj.weight");
    let deviation = (query.iter().map(|weight| weight * weight).sum::<f32>() / query.len() as f32).sqrt();
    assert!((deviation - 0.02).abs() < 0.0005, "{deviation}");
    assert_ne!(query, numbers("model.layers.0.self_attn.o_proj.weight"), "every tensor is drawn on its own");

    let tokenizer = Tokenizer::from_file(out.join("tokenizer.json")).unwrap();
    assert_eq!(tokenizer.get_vocab_size(true), 49_152);
    let ends = config["eos_token_id"].as_u64().unwrap() as u32;
    assert_eq!(tokenizer.id_to_token(ends).as_deref(), json("tokenizer_config.json")["eos_token"].as_str());
    assert_eq!(json("generation_config.json")["eos_token_id"][0], ends);
}

#[test]
fn a_seed_fixes_every_byte_and_weights_are_not_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let bytes = |name: &str, flags: &[&str]| {
        made(&dir.path().join(name), flags).unwrap();
        fs::read(dir.path().join(name).join("model.safetensors")).unwrap()
    };
    let first = bytes("a", &["--dtype", "f16"]);
    assert!(first == bytes("b", &["--dtype", "f16"]));
    assert!(first != bytes("c", &["--dtype", "f16", "--seed", "1"]));
    let error = made(&dir.path().join("a"), &[]).unwrap_err().to_string();
    assert!(error.contains("exists"), "{error}");
}
