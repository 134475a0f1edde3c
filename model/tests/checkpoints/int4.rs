//! Checkpoints with weights in 4 bits, in the forms that are published: dequantized, their numbers are those of transformers, and products
//! that take them as they are differ only by rounding activations to 8 bits in groups of 32.

use crate::{
    corrupt::{copy, edit_config, edit_header, fails},
    fixtures::{INT4, all_logits, assert_same_bits, fixture, reference},
    fp8::{edit_tensor, rename, widen},
    reference::{assert_dequantized, largest_difference},
};
use serde_json::{Value, json};
use std::path::Path;
use tidemill_model::{Isa, LoadOptions, Model, Quantization};
use tidemill_proto::block::KvDtype;

fn load(dir: &Path, quantize: Option<Quantization>, threads: usize, isa: Option<Isa>) -> Model {
    Model::load(dir, &LoadOptions { kv_dtype: KvDtype::F32, quantize, threads, isa }, &mut |_, _| {}).unwrap()
}

/// Checkpoints whose groups are consecutive, so that products take them as they are.
fn in_order() -> impl Iterator<Item = &'static str> {
    INT4.into_iter().filter(|form| *form != "int4-gptq")
}

#[test]
fn dequantized_logits_and_greedy_tokens_are_those_of_the_reference() {
    for form in INT4 {
        let dir = copy(form);
        if form == "int4-packed" {
            // With one matrix in f32, all are multiplied in f32.
            widen(dir.path(), "model.embed_tokens.weight");
        }
        let mut model = load(dir.path(), Some(Quantization::Dequantize), 2, None);
        assert_dequantized(form, &mut model);
    }
}

#[test]
fn as_they_are_logits_differ_by_little_and_only_where_groups_are_consecutive() {
    for form in INT4 {
        let difference = largest_difference(form, &mut load(&fixture(form), None, 2, None), 64);
        println!("{form}: {difference:e}");
        match form {
            "int4-gptq" => assert!(difference < 1e-4, "dequantized: {difference}"),
            _ => assert!(difference > 1e-4 && difference < 0.1, "{form}: logits differ by {difference}"),
        }
    }
}

#[test]
fn as_they_are_the_bits_depend_on_no_cut_thread_or_instruction_set() {
    for form in in_order() {
        let tokens = reference(form).0.prompts.swap_remove(2).ids;
        // Nothing is in bf16 here, attention neither.
        assert_same_bits(form, false, &tokens, &[(1, &[1]), (3, &[7]), (2, &[64])], |threads, isa| {
            load(&fixture(form), None, threads, Some(isa))
        });
    }
}

#[test]
fn any_checkpoint_can_be_rounded_to_4_bits() {
    for family in ["llama3", "gemma3", "starcoder2", "glm4", "int4-gptq"] {
        let tokens = reference(family).0.prompts.swap_remove(2).ids;
        let mut int4 = load(&fixture(family), Some(Quantization::Int4), 2, None);
        let exact = all_logits(&mut load(&fixture(family), None, 2, None), &tokens, 64);
        let rounded = all_logits(&mut int4, &tokens, 64);
        let (mean, size) = exact.iter().zip(&rounded).fold((0.0, 0.0), |(a, b), (x, y)| (a + (x - y).abs(), b + x.abs()));
        println!("{family}: {}", mean / size);
        // Weights are random; a step is a fifteenth of a group's range.
        assert!(mean / size > 1e-3 && mean / size < 0.5, "{family}: {}", mean / size);
        assert!(
            rounded == all_logits(&mut load(&fixture(family), Some(Quantization::Int4), 1, Some(Isa::Portable)), &tokens, 5),
            "{family}"
        );
    }
}

#[test]
fn the_layout_commits_to_the_form_and_to_every_scale_and_zero() {
    let layout = |dir: &Path, quantize| load(dir, quantize, 1, None).layout().to_string();
    let mut layouts = Vec::new();
    for (form, tensor) in [
        ("int4-awq", "model.layers.0.self_attn.q_proj.scales"),
        ("int4-awq", "model.layers.1.mlp.up_proj.qzeros"),
        ("int4-gptq-v2", "model.layers.2.mlp.down_proj.qweight"),
        ("int4-packed", "model.layers.2.mlp.down_proj.weight_packed"),
    ] {
        let dir = copy(form);
        edit_tensor(dir.path(), tensor, |bytes| bytes[0] ^= 1);
        layouts.push(layout(dir.path(), None));
    }
    for form in INT4 {
        layouts.extend([None, Some(Quantization::Int8), Some(Quantization::Int4)].map(|quantize| layout(&fixture(form), quantize)));
    }
    layouts.push(layout(&fixture("int4-awq"), Some(Quantization::Dequantize)));
    let count = layouts.len();
    layouts.sort();
    layouts.dedup();
    assert_eq!(layouts.len(), count, "all are distinct");
}

#[test]
fn tensors_that_are_missing_misshapen_or_senseless_are_named() {
    type Edit = fn(&mut Value);
    let headers: [(&str, Edit, &[&str]); 5] = [
        ("int4-awq", |h| rename(h, "model.layers.1.mlp.up_proj.qzeros"), &["model.layers.1.mlp.up_proj.qzeros", "missing"]),
        ("int4-gptq", |h| rename(h, "model.layers.0.mlp.up_proj.scales"), &["model.layers.0.mlp.up_proj.scales", "missing"]),
        ("int4-awq", |h| rename(h, "model.layers.0.mlp.up_proj.qweight"), &["model.layers.0.mlp.up_proj.weight", "missing"]),
        (
            "int4-awq",
            |h| h["model.layers.0.self_attn.k_proj.qweight"]["shape"].as_array_mut().unwrap().reverse(),
            &["model.layers.0.self_attn.k_proj.qweight", "shape"],
        ),
        (
            "int4-gptq",
            |h| h["model.layers.0.self_attn.k_proj.qweight"]["dtype"] = json!("F32"),
            &["model.layers.0.self_attn.k_proj.qweight", "I32"],
        ),
    ];
    for (form, edit, words) in headers {
        let dir = copy(form);
        edit_header(&dir.path().join("model.safetensors"), edit);
        fails(dir.path(), words);
    }
    let dir = copy("int4-gptq");
    let order = "model.layers.1.mlp.down_proj.g_idx";
    edit_tensor(dir.path(), order, |bytes| bytes[8..12].copy_from_slice(&(-1i32).to_le_bytes()));
    fails(dir.path(), &[order, "input 2", "group -1"]);
    let dir = copy("int4-awq");
    let scales = "model.layers.1.mlp.down_proj.scales";
    edit_tensor(dir.path(), scales, |bytes| bytes[..2].copy_from_slice(&[0, 0x7c]));
    fails(dir.path(), &[scales, "infinite"]);
}

#[test]
fn what_tensors_and_config_say_must_not_contradict() {
    type Edit = fn(&mut Value);
    let configs: [(&str, Edit, &[&str]); 4] = [
        ("int4-awq", |c| c["quantization_config"] = json!(null), &["model.layers.0.self_attn.q_proj.weight", "missing"]),
        (
            "int4-awq",
            |c| c["quantization_config"]["modules_to_not_convert"] = json!(["gate_proj"]),
            &["model.layers.0.mlp.gate_proj", "as not quantized"],
        ),
        ("int4-awq", |c| c["quantization_config"]["group_size"] = json!(64), &["qzeros", "[2, "]),
        ("int4-gptq", |c| c["quantization_config"]["bits"] = json!(8), &["config.json", "8 bits"]),
    ];
    for (form, edit, words) in configs {
        let dir = copy(form);
        edit_config(dir.path(), edit);
        fails(dir.path(), words);
    }
}
