//! Damaged checkpoints: loading ends in an error that names the fault, never in a panic.

use crate::fixtures::fixture;
use proptest::prelude::*;
use serde_json::{Value, json};
use std::{fs, path::Path};
use tidemill_model::{LoadOptions, Model};
use tidemill_proto::block::KvDtype;

/// A copy of a fixture's model files.
pub(crate) fn copy(family: &str) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(fixture(family)).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if name.ends_with("config.json") || name.starts_with("model") {
            fs::copy(fixture(family).join(&name), dir.path().join(&name)).unwrap();
        }
    }
    dir
}

fn load(dir: &Path) -> Result<(), String> {
    load_with(dir, KvDtype::Bf16)
}

fn load_with(dir: &Path, kv_dtype: KvDtype) -> Result<(), String> {
    let options = LoadOptions { kv_dtype, quantize: None, threads: 1, isa: None };
    Model::load(dir, &options, &mut |_, _| {}).map(|_| ()).map_err(|e| e.to_string())
}

/// Asserts that loading fails with an error that contains all of `words`.
#[track_caller]
pub(crate) fn fails(dir: &Path, words: &[&str]) {
    let error = load(dir).expect_err("the checkpoint is broken");
    assert!(words.iter().all(|word| error.contains(word)), "{error:?} does not name {words:?}");
}

pub(crate) fn edit_config(dir: &Path, edit: impl FnOnce(&mut Value)) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    fs::write(path, config.to_string()).unwrap();
}

/// Rewrites the header of a safetensors file.
pub(crate) fn edit_header(path: &Path, edit: impl FnOnce(&mut Value)) {
    let file = fs::read(path).unwrap();
    let length = u64::from_le_bytes(*file.first_chunk().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&file[8..8 + length]).unwrap();
    edit(&mut header);
    let header = header.to_string().into_bytes();
    fs::write(path, [&(header.len() as u64).to_le_bytes()[..], &header, &file[8 + length..]].concat()).unwrap();
}

fn rename(header: &mut Value, from: &str, to: &str) {
    let tensor = header.as_object_mut().unwrap().remove(from).unwrap();
    header[to] = tensor;
}

#[test]
fn the_copies_are_sound_until_they_are_broken() {
    for family in crate::fixtures::families() {
        let dir = copy(family);
        load(dir.path()).unwrap();
        // Headers may be padded to any length, so tensors need not be aligned.
        let single = dir.path().join("model.safetensors");
        if single.exists() {
            edit_header(&single, |header| header["__metadata__"] = json!({"odd": "length"}));
            load(dir.path()).unwrap();
        }
    }
}

#[test]
fn wrong_settings_are_named() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &[&str]); 19] = [
        (|c| c["architectures"] = json!(["GPT2LMHeadModel"]), &["GPT2LMHeadModel", "LlamaForCausalLM", "Qwen3ForCausalLM"]),
        (|c| c["architectures"] = json!(["Olmo4ForCausalLM"]), &["Olmo4ForCausalLM", "the nearest that is: Olmo"]),
        (|c| c["architectures"] = json!(["Gemma3ForConditionalGeneration"]), &["config.json", "text_config", "gemma3_text"]),
        (|c| c["architectures"] = json!(null), &["architecture", "MistralForCausalLM"]),
        (|c| _ = c.as_object_mut().unwrap().remove("hidden_size"), &["config.json", "hidden_size"]),
        (|c| c["hidden_size"] = json!("64"), &["config.json", "string"]),
        (|c| c["hidden_size"] = json!(-64), &["config.json", "-64"]),
        (|c| c["hidden_size"] = json!(u64::MAX), &["config.json", "hidden_size"]),
        (|c| c["num_hidden_layers"] = json!(0), &["num_hidden_layers"]),
        (|c| c["num_attention_heads"] = json!(0), &["num_attention_heads"]),
        (|c| c["num_key_value_heads"] = json!(3), &["num_key_value_heads", "multiple"]),
        (|c| c["head_dim"] = json!(15), &["head_dim", "odd"]),
        (|c| c["hidden_act"] = json!("relu2"), &["hidden_act", "relu2", "silu"]),
        (|c| c["rms_norm_eps"] = json!(-1), &["rms_norm_eps"]),
        (|c| c["quantization_config"] = json!({"quant_method": "aqlm"}), &["quantized"]),
        (|c| c["rope_scaling"] = json!({"rope_type": "axial", "factor": 4.0}), &["unsupported rope type", "axial"]),
        (|c| c["intermediate_size"] = json!(128), &["mlp.gate_proj.weight", "[172, 64]", "[128, 64]", "model.safetensors"]),
        (|c| c["num_hidden_layers"] = json!(2), &["model.layers.2.input_layernorm.weight", "num_hidden_layers"]),
        (|c| c["num_hidden_layers"] = json!(4), &["model.layers.3.self_attn.q_proj.weight", "missing"]),
    ];
    for (edit, words) in cases {
        let dir = copy("llama");
        edit_config(dir.path(), edit);
        fails(dir.path(), words);
    }
    let dir = copy("llama3");
    edit_config(dir.path(), |c| c["attention_bias"] = json!(true));
    fails(dir.path(), &["model.layers.0.self_attn.q_proj.bias", "missing"]);
    let dir = copy("mistral");
    edit_config(dir.path(), |c| c["sliding_window"] = json!(0));
    fails(dir.path(), &["sliding_window"]);
    let dir = copy("qwen3");
    edit_config(dir.path(), |c| {
        c["use_sliding_window"] = json!(true);
        c["sliding_window"] = json!(24);
        c["layer_types"] = json!(["full_attention", "chunked_attention", "full_attention"]);
    });
    fails(dir.path(), &["layer_types", "chunked_attention"]);
}

#[test]
fn wrong_settings_of_experts_are_named() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &[&str]); 10] = [
        (|c| c["scoring_func"] = json!("softmax"), &["config.json", "scoring_func", "softmax", "sigmoid"]),
        (|c| c["topk_method"] = json!("group_limited_greedy"), &["topk_method", "group_limited_greedy", "noaux_tc"]),
        (|c| c["n_group"] = json!(3), &["n_group", "3", "8 experts"]),
        (|c| c["n_group"] = json!(8), &["n_group", "two or more"]),
        (|c| c["topk_group"] = json!(1), &["topk_group", "3"]),
        (|c| c["topk_group"] = json!(5), &["topk_group", "1..=4"]),
        (|c| c["num_experts_per_tok"] = json!(9), &["num_experts_per_tok", "1..=8"]),
        (|c| c["routed_scaling_factor"] = json!(0), &["routed_scaling_factor"]),
        (|c| c["n_shared_experts"] = json!(3), &["mlp.shared_experts.gate_proj.weight", "[72, 64]", "[48, 64]"]),
        (|c| c["first_k_dense_replace"] = json!(2), &["model.layers.1.mlp.gate_proj.weight", "missing"]),
    ];
    for (edit, words) in cases {
        let dir = copy("glm4-moe");
        edit_config(dir.path(), edit);
        fails(dir.path(), words);
    }
    let tensors = [
        ("glm4-moe", "model.layers.1.mlp.gate.e_score_correction_bias"),
        ("minimax-m2", "model.layers.0.block_sparse_moe.e_score_correction_bias"),
        ("qwen2-moe", "model.layers.1.mlp.shared_expert_gate.weight"),
        ("qwen2-moe", "model.layers.1.mlp.shared_expert.down_proj.weight"),
    ];
    for (family, tensor) in tensors {
        let dir = copy(family);
        edit_header(&dir.path().join("model.safetensors"), |header| rename(header, tensor, "x"));
        fails(dir.path(), &[tensor, "missing"]);
    }
}

#[test]
fn wrong_settings_and_tensors_of_stacked_experts_are_named() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &[&str]); 7] = [
        (|c| c["hidden_act"] = json!("gelu"), &["config.json", "hidden_act", "silu"]),
        (|c| c["swiglu_limit"] = json!(0), &["swiglu_limit", "0"]),
        (|c| c["swiglu_alpha"] = json!("x"), &["swiglu_alpha", "x"]),
        (|c| c["num_experts_per_tok"] = json!(7), &["num_experts_per_tok", "1..=6"]),
        (|c| c["num_local_experts"] = json!(5), &["model.layers.0.mlp.router.weight", "[6, 64]", "[5, 64]"]),
        (|c| c["intermediate_size"] = json!(16), &["model.layers.0.mlp.experts.gate_up_proj", "[6, 64, 64]", "[6, 64, 32]"]),
        (|c| c["num_attention_heads"] = json!(2), &["self_attn.q_proj.weight", "[96, 64]", "[48, 64]"]),
    ];
    for (edit, words) in cases {
        let dir = copy("gpt-oss");
        edit_config(dir.path(), edit);
        fails(dir.path(), words);
    }
    let of_layer = |part: &str| format!("model.layers.1.{part}");
    for part in ["self_attn.sinks", "mlp.router.bias", "mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj"].map(of_layer) {
        let dir = copy("gpt-oss");
        edit_header(&dir.path().join("model.safetensors"), |header| rename(header, &part, "x"));
        fails(dir.path(), &[&part, "missing"]);
    }
    for (part, shape) in
        [("self_attn.sinks", json!([2, 2])), ("mlp.experts.down_proj_bias", json!([64, 6])), ("mlp.experts.down_proj", json!([6, 64, 32]))]
    {
        let dir = copy("gpt-oss");
        edit_header(&dir.path().join("model.safetensors"), |header| header[of_layer(part)]["shape"] = shape.clone());
        fails(dir.path(), &[&of_layer(part), "shape"]);
    }
}

#[test]
fn layers_that_draft_tokens_are_left_in_the_file() {
    let dir = copy("glm4-moe");
    edit_config(dir.path(), |c| c["num_hidden_layers"] = json!(2));
    load(dir.path()).unwrap();
    edit_config(dir.path(), |c| c["num_nextn_predict_layers"] = json!(0));
    fails(dir.path(), &["model.layers.2.input_layernorm.weight", "num_hidden_layers"]);
    edit_config(dir.path(), |c| c["num_nextn_predict_layers"] = json!(u64::MAX));
    _ = load(dir.path());
}

#[test]
fn heads_that_are_too_wide_for_k_and_v_in_8_bits_are_named() {
    let dir = copy("llama");
    edit_config(dir.path(), |c| c["head_dim"] = json!(518));
    let error = load_with(dir.path(), KvDtype::Int8).unwrap_err();
    assert!(["518", "516", "--kv-dtype int8"].iter().all(|word| error.contains(word)), "{error}");
    fails(dir.path(), &["2072", "self_attn.q_proj.weight"]);
}

#[test]
fn wrong_tensors_are_named() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &[&str]); 4] = [
        (|h| rename(h, "model.layers.1.mlp.up_proj.weight", "x"), &["model.layers.1.mlp.up_proj.weight", "missing", "model.safetensors"]),
        (|h| rename(h, "lm_head.weight", "x"), &["lm_head.weight", "missing"]),
        (|h| h["model.norm.weight"]["shape"] = json!([32, 2]), &["model.norm.weight", "[32, 2]", "[64]"]),
        (
            |h| {
                h["model.layers.0.self_attn.o_proj.weight"]["dtype"] = json!("F8_E4M3");
                h["model.layers.0.self_attn.o_proj.weight"]["shape"] = json!([256, 64]);
            },
            &["model.layers.0.self_attn.o_proj.weight", "F8_E4M3", "quantization_config"],
        ),
    ];
    for (edit, words) in cases {
        let dir = copy("llama");
        edit_header(&dir.path().join("model.safetensors"), edit);
        fails(dir.path(), words);
    }
    let dir = copy("llama");
    edit_header(&dir.path().join("model.safetensors"), |h| h["model.norm.weight"]["dtype"] = json!("I32"));
    fails(dir.path(), &["model.norm.weight", "I32", "BF16"]);
}

#[test]
fn wrong_files_are_named() {
    let dir = copy("llama");
    let single = dir.path().join("model.safetensors");
    let file = fs::read(&single).unwrap();
    fs::write(&single, &file[..file.len() - 1]).unwrap();
    fails(dir.path(), &["model.safetensors", "cut off within tensor"]);
    fs::write(&single, [&file[..], b"x"].concat()).unwrap();
    fails(dir.path(), &["model.safetensors", "after its last tensor"]);
    fs::write(&single, [&u64::MAX.to_le_bytes()[..], b"{}"].concat()).unwrap();
    fails(dir.path(), &["model.safetensors", "header"]);
    fs::write(&single, b"").unwrap();
    fails(dir.path(), &["model.safetensors"]);
    fs::remove_file(&single).unwrap();
    fails(dir.path(), &["model.safetensors.index.json", "convert"]);
    fs::remove_file(dir.path().join("config.json")).unwrap();
    fails(dir.path(), &["cannot read", "config.json"]);
    fails(Path::new("/nonexistent"), &["cannot read", "/nonexistent"]);
    let packed = dir.path().join("sha256-0123");
    fs::write(&packed, b"GGUF").unwrap();
    for path in [dir.path(), &packed] {
        fails(path, &["sha256-0123", "is a GGUF file", "tidemill unpack"]);
    }

    let dir = copy("qwen3");
    fs::remove_file(dir.path().join("model-00003-of-00004.safetensors")).unwrap();
    fails(dir.path(), &["model-00003-of-00004.safetensors", "index.json", "incomplete"]);
    let index = dir.path().join("model.safetensors.index.json");
    for (text, word) in [
        (r#"{"weight_map": {"lm_head.weight": "../../etc/passwd"}}"#, "not the name of a file beside it"),
        (r#"{"weight_map": {"lm_head.weight": ".."}}"#, "not the name of a file beside it"),
        (r#"{"weight_map": {}}"#, "is missing: "),
        (r#"{"weight_map": []}"#, "index.json"),
        ("{}", "weight_map"),
        ("\0\u{1f}", "index.json"),
    ] {
        fs::write(&index, text).unwrap();
        fails(dir.path(), &[word]);
    }
}

#[test]
fn parts_that_no_index_names_are_left_out_and_files_that_stand_for_others_are_named() {
    let dir = copy("qwen3");
    fs::write(dir.path().join("model-00005-of-00005.safetensors"), b"of another download").unwrap();
    load(dir.path()).unwrap();
    let part = dir.path().join("model-00002-of-00004.safetensors");
    let whole = fs::read(&part).unwrap();
    fs::write(&part, &whole[..whole.len() - 1]).unwrap();
    fails(dir.path(), &["model-00002-of-00004.safetensors", "cut off within tensor"]);
    for name in ["model-00002-of-00004.safetensors", "model.safetensors.index.json", "config.json"] {
        fs::write(dir.path().join(name), "version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n").unwrap();
        fails(dir.path(), &[name, "git lfs pull"]);
    }

    let dir = copy("llama");
    fs::rename(dir.path().join("model.safetensors"), dir.path().join("consolidated.safetensors")).unwrap();
    fails(dir.path(), &["consolidated.safetensors", "Mistral", "model.safetensors"]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(200))]

    /// Random damage to the header gives an error or, if the damage does not matter, a model. Never a panic.
    #[test]
    fn a_damaged_header_never_panics(damage in proptest::collection::vec((0usize..4000, any::<u8>()), 1..8)) {
        let dir = copy("llama3");
        let path = dir.path().join("model.safetensors");
        let mut file = fs::read(&path).unwrap();
        for (at, byte) in damage {
            file[at] = byte;
        }
        fs::write(&path, file).unwrap();
        _ = load(dir.path());
    }

    #[test]
    fn garbage_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200), header in any::<bool>()) {
        let dir = copy("llama3");
        let name = if header { "model.safetensors" } else { "config.json" };
        let length = (bytes.len() as u64).to_le_bytes();
        fs::write(dir.path().join(name), if header { [&length[..], &bytes].concat() } else { bytes }).unwrap();
        prop_assert!(load(dir.path()).is_err());
    }

    /// One setting replaced by any number.
    #[test]
    fn any_setting_may_be_any_number(key in 0usize..30, number in prop_oneof![any::<i64>().prop_map(Value::from), any::<f64>().prop_map(Value::from)]) {
        let dir = copy("llama3");
        edit_config(dir.path(), |config| {
            let keys: Vec<String> = config.as_object().unwrap().keys().cloned().collect();
            config[&keys[key % keys.len()]] = number;
        });
        _ = load(dir.path());
    }
}
