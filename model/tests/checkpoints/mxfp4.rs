//! Experts in MXFP4, as GPT-OSS is published: dequantized they equal the bf16 checkpoint of the same numbers, bit for bit, and match
//! transformers. Taken as they are, products differ by rounding activations to 8 bits in groups of 32.

use crate::{
    corrupt::{copy, edit_config, edit_header, fails},
    fixtures::{all_logits, assert_same_bits, fixture, prompt_of, restored},
    fp8::{edit_tensor, rename, widen},
    reference::assert_dequantized,
};
use serde_json::{Value, json};
use std::path::Path;
use tidemill_kernels::Dtype;
use tidemill_model::{Isa, LoadOptions, Model, Quantization};
use tidemill_proto::block::KvDtype;

const FORM: &str = "gpt-oss-mxfp4";

fn load(dir: &Path, quantize: Option<Quantization>, threads: usize, isa: Option<Isa>) -> Model {
    Model::load(dir, &LoadOptions { kv_dtype: KvDtype::F32, quantize, threads, isa }, &mut |_, _| {}).unwrap()
}

fn experts(layer: usize, part: &str) -> String {
    format!("model.layers.{layer}.mlp.experts.{part}")
}

#[test]
fn dequantized_logits_and_greedy_tokens_are_those_of_the_reference() {
    let dir = copy(FORM);
    // With one matrix in f32, all are multiplied in f32.
    widen(dir.path(), "model.embed_tokens.weight");
    assert_dequantized(FORM, &mut load(dir.path(), Some(Quantization::Dequantize), 2, None));
}

#[test]
fn dequantized_it_is_the_bf16_checkpoint_of_the_same_numbers_bit_for_bit() {
    let tokens = prompt_of(FORM, 100);
    let bf16 = restored(FORM, |_| Dtype::Bf16);
    for quantize in [Quantization::Dequantize, Quantization::Int8] {
        let expected = all_logits(&mut load(bf16.path(), Some(quantize), 2, None), &tokens, 64);
        for threads in [1, 3] {
            let logits = all_logits(&mut load(&fixture(FORM), Some(quantize), threads, None), &tokens, 32);
            assert!(logits == expected, "{quantize:?} on {threads} threads");
        }
    }
}

#[test]
fn as_they_are_the_bits_depend_on_no_cut_thread_or_instruction_set() {
    let tokens = prompt_of(FORM, 100);
    // Nothing is in bf16 here, attention neither.
    assert_same_bits(FORM, false, &tokens, &[(1, &[1]), (3, &[7]), (2, &[64])], |threads, isa| {
        load(&fixture(FORM), None, threads, Some(isa))
    });
}

/// Each row has all experts here: if it had some of them, the slightest rounding might change the choice, and then logits differ by any
/// amount. Measured: 0.054 of their size on average, as with `--quantize int8`.
#[test]
fn as_they_are_logits_differ_by_little() {
    let (dir, tokens) = (copy(FORM), prompt_of(FORM, 100));
    edit_config(dir.path(), |c| c["num_experts_per_tok"] = json!(6));
    let [exact, ours] =
        [Some(Quantization::Dequantize), None].map(|quantize| all_logits(&mut load(dir.path(), quantize, 2, None), &tokens, 64));
    let (sum, size) = exact.iter().zip(&ours).fold((0.0, 0.0), |(sum, size), (x, y)| (sum + (x - y).abs(), size + x.abs()));
    println!("{FORM}: {}", sum / size);
    assert!(sum / size > 1e-3 && sum / size < 0.08, "{}", sum / size);
}

#[test]
fn the_layout_commits_to_every_number_and_scale() {
    let layout = |dir: &Path| load(dir, None, 1, None).layout().to_string();
    let mut layouts = vec![layout(&fixture(FORM)), layout(restored(FORM, |_| Dtype::Bf16).path())];
    layouts.push(load(&fixture(FORM), Some(Quantization::Dequantize), 1, None).layout().to_string());
    for part in ["gate_up_proj_blocks", "gate_up_proj_scales", "down_proj_blocks", "down_proj_scales"] {
        let dir = copy(FORM);
        edit_tensor(dir.path(), &experts(2, part), |bytes| *bytes.last_mut().unwrap() ^= 1);
        layouts.push(layout(dir.path()));
    }
    let count = layouts.len();
    layouts.sort();
    layouts.dedup();
    assert_eq!(layouts.len(), count, "all are distinct");
}

#[test]
fn tensors_that_are_missing_misshapen_or_senseless_are_named() {
    for part in ["gate_up_proj_scales", "down_proj_bias"].map(|part| experts(1, part)) {
        let dir = copy(FORM);
        edit_header(&dir.path().join("model.safetensors"), |header| rename(header, &part));
        fails(dir.path(), &[&part, "missing"]);
    }
    let dir = copy(FORM);
    edit_header(&dir.path().join("model.safetensors"), |header| rename(header, &experts(1, "down_proj_blocks")));
    fails(dir.path(), &["model.layers.1.mlp.experts.down_proj", "missing"]);
    type Edit = fn(&mut Value);
    let cases: [(&str, Edit, &str); 4] = [
        ("gate_up_proj_blocks", |tensor| tensor["shape"] = json!([6, 64, 1, 32]), "[6, 64, 2, 16]"),
        ("down_proj_scales", |tensor| tensor["shape"] = json!([64, 6, 1]), "[6, 64, 1]"),
        ("down_proj_blocks", |tensor| tensor["dtype"] = json!("I8"), "I8"),
        ("down_proj_scales", |tensor| tensor["dtype"] = json!("F8_E4M3"), "U8"),
    ];
    for (part, edit, word) in cases {
        let (dir, name) = (copy(FORM), experts(0, part));
        edit_header(&dir.path().join("model.safetensors"), |header| edit(&mut header[&name]));
        fails(dir.path(), &[&name, word]);
    }
    for scale in [0xfd, 0xff] {
        let (dir, name) = (copy(FORM), experts(2, "gate_up_proj_scales"));
        edit_tensor(dir.path(), &name, |bytes| bytes[11] = scale);
        fails(dir.path(), &[&name, "number 11", &format!("{scale:#04x}")]);
    }
}

#[test]
fn what_tensors_and_config_say_must_not_contradict() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &[&str]); 4] = [
        (|c| c["quantization_config"] = json!(null), &["model.layers.0.mlp.experts.gate_up_proj_blocks", "quant_method mxfp4"]),
        (
            |c| c["quantization_config"]["modules_to_not_convert"] = json!(["model.layers.*.mlp"]),
            &["model.layers.0.mlp.experts", "as not quantized"],
        ),
        (|c| c["quantization_config"]["modules_to_not_convert"] = json!("lm_head"), &["config.json", "quantization_config"]),
        (|c| c["intermediate_size"] = json!(48), &["gate_up_proj_blocks", "[6, 96, 2, 16]"]),
    ];
    for (edit, words) in cases {
        let dir = copy(FORM);
        edit_config(dir.path(), edit);
        fails(dir.path(), words);
    }
}
