//! Text models inside multimodal checkpoints: the same logits as by themselves.

use crate::fixtures::{all_logits, fixture, load, load_dir, prompt_of};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use std::fs;
use tempfile::TempDir;
use tidemill_proto::block::KvDtype;

/// A family's checkpoint as the text model of another architecture, its tensors at `model` and `head` beside one of a vision tower.
fn inside(family: &str, architecture: &str, model: &str, head: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut text: Value = serde_json::from_slice(&fs::read(fixture(family).join("config.json")).unwrap()).unwrap();
    text.as_object_mut().unwrap().remove("architectures");
    let tie = text.as_object_mut().unwrap().remove("tie_word_embeddings").unwrap();
    let config = json!({
        "architectures": [architecture], "model_type": "multimodal", "text_config": text, "tie_word_embeddings": tie,
        "vision_config": {"hidden_size": 32},
    });
    fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    let bytes = fs::read(fixture(family).join("model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let renamed = file.tensors().into_iter().map(|(name, tensor)| match name.strip_prefix("model.") {
        Some(rest) => (format!("{model}.{rest}"), tensor),
        None => (name.replace("lm_head", head), tensor),
    });
    let mut tensors: Vec<_> = renamed.collect();
    tensors.push(("vision_tower.embeddings.weight".into(), tensors[0].1.clone()));
    fs::write(dir.path().join("model.safetensors"), safetensors::serialize(tensors, None).unwrap()).unwrap();
    dir
}

#[test]
fn a_text_model_inside_another_checkpoint_computes_the_same() {
    for (family, architecture) in [
        ("gemma3", "Gemma3ForConditionalGeneration"),
        ("ministral3", "Mistral3ForConditionalGeneration"),
        ("qwen3-5", "Qwen3_5ForConditionalGeneration"),
        ("qwen3-5-moe", "Qwen3_5MoeForConditionalGeneration"),
    ] {
        let tokens = prompt_of(family, 100);
        let expected = all_logits(&mut load(family, KvDtype::Bf16), &tokens, 100);
        for (model, head) in [("language_model.model", "language_model.lm_head"), ("model.language_model", "lm_head")] {
            let dir = inside(family, architecture, model, head);
            let logits = all_logits(&mut load_dir(dir.path(), KvDtype::Bf16, 2, None), &tokens, 100);
            assert!(logits == expected, "{family} as {model} of {architecture}");
        }
    }
}
