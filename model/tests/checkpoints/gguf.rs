//! Models of every family that llama.cpp's converter has written as GGUF files (`gguf/tests/fixtures/make_families.py`): unpacked, their
//! logits are those of transformers for the original models.

use crate::{
    fixtures::{all_logits, load_dir},
    fp8::widen,
};
use serde::Deserialize;
use std::path::Path;
use tidemill_gguf::{directory, file::Gguf};
use tidemill_model::{LoadOptions, Model, Quantization};
use tidemill_proto::block::{KvDtype, Token};

#[derive(Deserialize)]
struct Expected {
    tokens: Vec<Token>,
    /// The logits of the last token.
    logits: Vec<f32>,
}

const FAMILIES: usize = 18;

#[test]
fn every_family_has_the_logits_of_the_model_it_was_made_of() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../gguf/tests/fixtures/families");
    let mut seen = 0;
    for path in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        if path.extension().is_none_or(|extension| extension != "gguf") {
            continue;
        }
        seen += 1;
        let name = path.file_stem().unwrap().to_str().unwrap();
        let expected: Expected = serde_json::from_slice(&std::fs::read(path.with_extension("json")).unwrap()).unwrap();
        let temporary = tempfile::tempdir().unwrap();
        let dir = temporary.path().join(name);
        directory::write(&Gguf::open(&path).unwrap(), &dir, &|_, _| ()).unwrap();
        // With one matrix in f32, all are multiplied in f32.
        widen(&dir, "model.embed_tokens.weight");
        let mut model = if name.ends_with("mxfp4") { dequantized(&dir) } else { load_dir(&dir, KvDtype::F32, 2, None) };
        let logits = all_logits(&mut model, &expected.tokens, 16);
        let last = &logits[logits.len() - expected.logits.len()..];
        let difference = last.iter().zip(&expected.logits).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
        println!("{name}: {difference:e}");
        assert!(difference < 2e-4, "{name}: logits differ by {difference}");
    }
    assert_eq!(seen, FAMILIES);
}

fn dequantized(dir: &Path) -> Model {
    let options = LoadOptions { kv_dtype: KvDtype::F32, quantize: Some(Quantization::Dequantize), threads: 2, isa: None };
    Model::load(dir, &options, &mut |_, _| {}).unwrap()
}
