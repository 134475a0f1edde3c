//! Checkpoints with weights in FP8, in every form that is published. On a CPU they equal the bf16 checkpoints that they dequantize to, bit
//! for bit, and these match transformers.

use crate::{
    corrupt::{copy, edit_config, edit_header, fails},
    fixtures::{FP8, all_logits, fixture, load, load_dir, load_f32, reference, restored},
    reference::{assert_dequantized, largest_difference},
};
use serde_json::{Value, json};
use std::{fs, path::Path};
use tidemill_kernels::Dtype;
use tidemill_model::{LoadOptions, Model, Quantization};
use tidemill_proto::block::KvDtype;

#[test]
fn dequantized_logits_and_greedy_tokens_are_those_of_the_reference() {
    for form in FP8 {
        let mut model = load_f32(form, KvDtype::F32);
        assert_dequantized(form, &mut model);
    }
}

#[test]
fn fp8_is_the_bf16_that_it_dequantizes_to_bit_for_bit() {
    for form in FP8 {
        let tokens = reference(form).0.prompts.swap_remove(2).ids;
        let bf16 = restored(form, |_| Dtype::Bf16);
        for quantize in [None, Some(Quantization::Int8)] {
            let load = |dir: &Path, threads| {
                Model::load(dir, &LoadOptions { kv_dtype: KvDtype::Bf16, quantize, threads, isa: None }, &mut |_, _| {}).unwrap()
            };
            let expected = all_logits(&mut load(bf16.path(), 2), &tokens, 64);
            for threads in [1, 3] {
                let logits = all_logits(&mut load(&fixture(form), threads), &tokens, 32);
                assert!(logits == expected, "{form} with {quantize:?} on {threads} threads");
            }
        }
    }
}

/// The bound is that of other checkpoints in bf16 (`bf16`).
#[test]
fn logits_differ_from_the_reference_by_no_more_than_bf16_does() {
    for form in FP8 {
        let difference = largest_difference(form, &mut load(form, KvDtype::F32), 64);
        println!("{form}: {difference:e}");
        assert!(difference < 0.25 && difference > 1e-4, "{form}: logits differ by {difference}");
    }
}

#[test]
fn beside_f32_the_dequantized_numbers_are_multiplied_in_f32() {
    for form in FP8 {
        let tokens = reference(form).0.prompts.swap_remove(1).ids;
        let dir = copy(form);
        let kept = "model.embed_tokens.weight";
        widen(dir.path(), kept);
        let mut model = load_dir(dir.path(), KvDtype::F32, 2, None);
        assert!(all_logits(&mut model, &tokens, 32) == all_logits(&mut load_f32(form, KvDtype::F32), &tokens, 32), "{form}");
    }
}

#[test]
fn the_layout_commits_to_every_scale_and_to_the_bound_of_activations() {
    let layout = |dir: &Path| load_dir(dir, KvDtype::Bf16, 1, None).layout().to_string();
    let mut layouts: Vec<String> = Vec::new();
    for (form, scale) in [
        ("fp8-channel", "model.layers.2.mlp.down_proj.weight_scale"),
        ("fp8-tensor", "model.layers.0.self_attn.q_proj.weight_scale"),
        ("fp8-tensor", "model.layers.0.self_attn.q_proj.input_scale"),
        ("fp8-fbgemm", "model.layers.1.mlp.up_proj.weight_scale"),
        ("fp8-blocks", "model.layers.1.mlp.gate_proj.weight_scale_inv"),
    ] {
        let dir = copy(form);
        let sound = layout(dir.path());
        // The last byte of bf16 and of f32 holds the sign and most of the exponent, so flipping one bit of it changes the scale.
        edit_tensor(dir.path(), scale, |bytes| *bytes.last_mut().unwrap() ^= 1);
        let changed = layout(dir.path());
        assert_ne!(sound, changed, "{form}");
        layouts.extend([sound, changed]);
    }
    let dir = copy("fp8-fbgemm");
    edit_config(dir.path(), |c| c["quantization_config"]["activation_scale_ub"] = json!(600.0));
    layouts.push(layout(dir.path()));
    layouts.extend(FP8.map(|form| layout(restored(form, |_| Dtype::Bf16).path())));
    let count = layouts.len();
    layouts.sort();
    layouts.dedup();
    assert_eq!(layouts.len(), count - 1, "all are distinct but one form, which is there twice");
}

#[test]
fn scales_that_are_missing_misshapen_or_not_positive_are_named() {
    type Edit = fn(&mut Value);
    let headers: [(&str, Edit, &[&str]); 6] = [
        ("fp8-channel", |h| rename(h, "model.layers.1.mlp.up_proj.weight_scale"), &["model.layers.1.mlp.up_proj.weight_scale", "missing"]),
        ("fp8-tensor", |h| rename(h, "model.layers.0.mlp.up_proj.input_scale"), &["model.layers.0.mlp.up_proj.input_scale", "missing"]),
        (
            "fp8-channel",
            |h| h["model.layers.0.self_attn.k_proj.weight_scale"]["shape"] = json!([2, 16]),
            &["model.layers.0.self_attn.k_proj.weight_scale", "[2, 16]", "[32, 1]"],
        ),
        (
            "fp8-fbgemm",
            |h| h["model.layers.2.mlp.gate_proj.weight_scale"]["shape"] = json!([1, 128]),
            &["model.layers.2.mlp.gate_proj.weight_scale", "[1, 128]", "[128, 1]"],
        ),
        (
            "fp8-tensor",
            |h| h["model.layers.0.mlp.up_proj.weight_scale"]["dtype"] = json!("I16"),
            &["model.layers.0.mlp.up_proj.weight_scale", "I16"],
        ),
        (
            "fp8-channel",
            |h| h["model.layers.0.mlp.up_proj.weight"]["dtype"] = json!("F8_E5M2"),
            &["model.layers.0.mlp.up_proj.weight", "F8_E5M2"],
        ),
    ];
    for (form, edit, words) in headers {
        let dir = copy(form);
        edit_header(&dir.path().join("model.safetensors"), edit);
        fails(dir.path(), words);
    }
    let scale = "model.layers.1.mlp.down_proj.weight_scale_inv";
    for (value, word) in [(0.0, "is 0"), (-1.5, "is -1.5"), (f32::INFINITY, "is inf"), (f32::NAN, "is NaN"), (f32::MAX, "is 34028")] {
        let dir = copy("fp8-blocks");
        edit_tensor(dir.path(), scale, |bytes| bytes[4..].copy_from_slice(&f32::to_le_bytes(value)));
        fails(dir.path(), &[scale, "scale 1", word, "positive"]);
    }
    for byte in [0x7f, 0xff] {
        let dir = copy("fp8-fbgemm");
        let weight = "model.layers.2.mlp.up_proj.weight";
        edit_tensor(dir.path(), weight, |bytes| bytes[77] = byte);
        fails(dir.path(), &[weight, "number 77", &format!("{byte:#04x}")]);
    }
}

#[test]
fn what_tensors_and_config_say_must_not_contradict() {
    type Edit = fn(&mut Value);
    let configs: [(&str, Edit, &[&str]); 6] = [
        ("fp8-channel", |c| c["quantization_config"] = json!(null), &["model.layers.0.self_attn.q_proj.weight", "no quantization_config"]),
        (
            "fp8-channel",
            |c| c["quantization_config"]["ignore"] = json!(["lm_head", "re:.*layers\\.1\\.mlp.*"]),
            &["model.layers.1.mlp.gate_proj.weight", "lists model.layers.1.mlp.gate_proj as not quantized"],
        ),
        (
            "fp8-fbgemm",
            |c| c["quantization_config"]["modules_to_not_convert"] = json!(["model.layers.2"]),
            &["model.layers.2.mlp.gate_proj.weight", "as not quantized"],
        ),
        (
            "fp8-blocks",
            |c| c["quantization_config"]["modules_to_not_convert"] = json!(["v_proj"]),
            &["model.layers.0.self_attn.v_proj.weight", "as not quantized"],
        ),
        ("fp8-blocks", |c| c["quantization_config"]["weight_block_size"] = json!([64, 64]), &["weight_scale_inv", "[1, 1]", "[2, 2]"]),
        ("fp8-channel", |c| c["quantization_config"]["quant_method"] = json!("fbgemm"), &["config.json", "fbgemm", "unquantized"]),
    ];
    for (form, edit, words) in configs {
        let dir = copy(form);
        edit_config(dir.path(), edit);
        fails(dir.path(), words);
    }
    // A weight that was not quantized, and scales (here none) for it.
    let dir = copy("fp8-tensor");
    edit_header(&dir.path().join("model.safetensors"), |h| {
        let end = h.as_object().unwrap().values().filter_map(|tensor| tensor["data_offsets"][1].as_u64()).max();
        h["model.layers.2.mlp.down_proj.weight_scale"] = json!({"dtype": "F32", "shape": [0], "data_offsets": [end, end]});
    });
    fails(dir.path(), &["model.layers.2.mlp.down_proj.weight", "has scales", "contradict"]);
    let surplus: [(&str, &[&str]); 2] = [
        ("model.layers.1.self_attn.v_proj.weight_zero_point", &["v_proj.weight_zero_point", "symmetric"]),
        ("model.layers.1.self_attn.k_scale", &["model.layers.1.self_attn.k_scale", "K and V"]),
    ];
    for (name, words) in surplus {
        let dir = copy("fp8-channel");
        edit_header(&dir.path().join("model.safetensors"), |header| {
            let tensor = header.as_object_mut().unwrap().remove("model.norm.weight").unwrap();
            header[name] = tensor;
        });
        fails(dir.path(), words);
    }
    // Scales of a different form count as missing.
    let dir = copy("fp8-channel");
    edit_config(dir.path(), |c| c["quantization_config"] = json!({"quant_method": "fp8", "weight_block_size": [128, 128]}));
    fails(dir.path(), &["model.layers.0.self_attn.q_proj.weight_scale_inv", "missing"]);
    let dir = copy("fp8-channel");
    let embedding = "model.embed_tokens.weight";
    edit_header(&dir.path().join("model.safetensors"), |h| {
        h[embedding]["dtype"] = json!("F8_E4M3");
        h[embedding]["shape"] = json!([512, 128]);
    });
    edit_config(dir.path(), |c| c["hidden_size"] = json!(128));
    fails(dir.path(), &[embedding, "F8_E4M3", "projections"]);
}

pub(crate) fn rename(header: &mut Value, name: &str) {
    let tensor = header.as_object_mut().unwrap().remove(name).unwrap();
    header["another"] = tensor;
}

/// The file that holds a tensor: its path, contents and header, and the end of the header.
fn file_of(dir: &Path, name: &str) -> (std::path::PathBuf, Vec<u8>, Value, usize) {
    let files = fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    let mut files = files.filter(|path| path.extension().is_some_and(|end| end == "safetensors")).map(|path| {
        let file = fs::read(&path).unwrap();
        let end = 8 + u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
        let header: Value = serde_json::from_slice(&file[8..end]).unwrap();
        (path, file, header, end)
    });
    files.find(|(_, _, header, _)| header.get(name).is_some()).expect("a file holds it")
}

pub(crate) fn edit_tensor(dir: &Path, name: &str, edit: impl FnOnce(&mut [u8])) {
    let (path, mut file, header, end) = file_of(dir, name);
    let at = |i: usize| end + header[name]["data_offsets"][i].as_u64().unwrap() as usize;
    edit(&mut file[at(0)..at(1)]);
    fs::write(path, file).unwrap();
}

/// Stores a bf16 tensor in f32, at the end of its file.
pub(crate) fn widen(dir: &Path, name: &str) {
    let (path, mut file, mut header, end) = file_of(dir, name);
    let offsets = |i: usize| header[name]["data_offsets"][i].as_u64().unwrap() as usize;
    let (start, stop) = (offsets(0), offsets(1));
    let wide: Vec<u8> = file[end + start..end + stop].chunks(2).flat_map(|bf16| [0, 0, bf16[0], bf16[1]]).collect();
    file.drain(end + start..end + stop);
    file.extend(&wide);
    let data = file.split_off(end);
    for (other, info) in header.as_object_mut().unwrap().iter_mut().filter(|(other, _)| *other != "__metadata__") {
        let offset = |i: usize| info["data_offsets"][i].as_u64().unwrap() as usize;
        let (from, to) = (offset(0), offset(1));
        if other == name {
            info["dtype"] = json!("F32");
            info["data_offsets"] = json!([data.len() - wide.len(), data.len()]);
        } else if from >= stop {
            info["data_offsets"] = json!([from - (stop - start), to - (stop - start)]);
        }
    }
    let header = header.to_string().into_bytes();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat()).unwrap();
}
