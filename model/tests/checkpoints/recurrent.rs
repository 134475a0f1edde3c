//! Layers that keep a state: its size, the check that a missing one is never taken as zeros, and errors in settings and tensors.

use crate::{
    corrupt::{copy, edit_config, fails},
    fixtures::{fixture, load, load_dir},
};
use safetensors::SafeTensors;
use serde_json::{Value, json};
use tidemill_model::{Chunk, LogitRows};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype},
    step::StateBlocks,
};

const FAMILY: &str = "lfm2";
const DELTA_RULE: &str = "qwen3-next";

#[test]
fn a_state_takes_as_many_blocks_as_its_numbers_fill() {
    // Three convolutions keep two inputs of 64 channels; one layer attends.
    for (kv_dtype, bytes, blocks) in [(KvDtype::F32, 4, 1), (KvDtype::Bf16, 2, 2)] {
        let model = load(FAMILY, kv_dtype);
        assert_eq!(model.kv_shape().block_bytes(), BLOCK_TOKENS * 2 * 16 * bytes);
        assert_eq!(model.state_blocks(), blocks);
    }
    // Three delta rules keep three inputs of 128 channels, and four matrices of 12 by 20 numbers.
    for (kv_dtype, bytes, blocks) in [(KvDtype::F32, 4, 6), (KvDtype::Bf16, 2, 11)] {
        let model = load(DELTA_RULE, kv_dtype);
        assert_eq!(model.kv_shape().block_bytes(), BLOCK_TOKENS * 2 * 24 * bytes);
        assert_eq!(model.state_blocks(), blocks);
    }
    assert_eq!(load("llama3", KvDtype::Bf16).state_blocks(), 0);
}

#[test]
#[should_panic(expected = "a state is zeros before the first token, and nowhere else")]
fn a_missing_state_is_never_zeros() {
    let mut model = load(FAMILY, KvDtype::Bf16);
    let mut kv = model.new_kv(4);
    let state = StateBlocks { from: None, to: &[2, 3] };
    model.forward(&[Chunk { tokens: &[1], start: BLOCK_TOKENS, blocks: &[0, 1], state, logits: LogitRows::Last }], &mut kv);
}

#[test]
fn wrong_settings_are_named() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &[&str]); 7] = [
        (|c| c["conv_L_cache"] = json!(4), &["conv.conv.weight", "[64, 1, 3]", "[64, 1, 4]"]),
        (|c| c["conv_L_cache"] = json!(0), &["conv_L_cache", "0"]),
        (|c| c["layer_types"] = json!(["conv"]), &["layer_types", "1 entries for 4 layers"]),
        (|c| c["layer_types"] = json!(["conv", "conv", "conv", "conv"]), &["layer_types", "no layer attends"]),
        (|c| c["layer_types"][0] = json!("full_attention"), &["model.layers.0.self_attn.q_proj.weight", "missing"]),
        (|c| c["block_auto_adjust_ff_dim"] = json!(false), &["feed_forward.w1.weight", "[192, 64]"]),
        (|c| c["block_multiple_of"] = json!(0), &["block_multiple_of"]),
    ];
    for (edit, words) in cases {
        let dir = copy(FAMILY);
        edit_config(dir.path(), edit);
        fails(dir.path(), words);
    }
}

#[test]
fn wrong_settings_of_delta_rules_are_named() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &[&str]); 8] = [
        (|c| c["linear_conv_kernel_dim"] = json!(3), &["linear_attn.conv1d.weight", "[128, 1, 4]", "[128, 1, 3]"]),
        (|c| c["linear_num_value_heads"] = json!(3), &["linear_num_value_heads 3", "not a multiple"]),
        (|c| c["linear_num_value_heads"] = json!(6), &["linear_attn.in_proj_qkvz.weight", "[208, 64]", "[288, 64]"]),
        (|c| c["linear_key_head_dim"] = json!("12"), &["linear_key_head_dim"]),
        (|c| c["layer_types"] = json!(null), &["model.layers.1.linear_attn.in_proj_qkvz.weight", "missing"]),
        (|c| c["layer_types"][0] = json!("conv"), &["layer_types", "linear_attention"]),
        (|c| c["layer_types"][0] = json!("full_attention"), &["model.layers.0.self_attn.q_proj.weight", "missing"]),
        (|c| c["shared_expert_intermediate_size"] = json!(0), &["shared_expert_intermediate_size"]),
    ];
    for (edit, words) in cases {
        let dir = copy(DELTA_RULE);
        edit_config(dir.path(), edit);
        fails(dir.path(), words);
    }
}

#[test]
fn layers_that_draft_tokens_stay_in_the_file() {
    let dir = tempfile::tempdir().unwrap();
    let from = fixture(DELTA_RULE);
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let mut tensors = SafeTensors::deserialize(&bytes).unwrap().tensors();
    tensors.push(("mtp.layers.0.input_layernorm.weight".into(), tensors[0].1.clone()));
    std::fs::write(dir.path().join("model.safetensors"), safetensors::serialize(tensors, None).unwrap()).unwrap();
    let layout = load_dir(dir.path(), KvDtype::Bf16, 1, None).layout();
    assert_eq!(layout, load(DELTA_RULE, KvDtype::Bf16).layout());
}
