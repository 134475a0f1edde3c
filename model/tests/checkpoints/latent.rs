//! Latent attention: the contents of a block, and errors in settings and tensors.

use crate::{
    corrupt::{copy, edit_config, edit_header, fails},
    fixtures::load,
};
use serde_json::{Value, json};
use tidemill_model::{LoadOptions, Model};
use tidemill_proto::block::{BLOCK_TOKENS, KvDtype};

const FAMILY: &str = "deepseek-v3";

#[test]
fn a_block_holds_the_latent_and_the_rotated_part_of_each_token_and_layer() {
    for (kv_dtype, bytes) in [(KvDtype::F32, 4), (KvDtype::F16, 2), (KvDtype::Bf16, 2)] {
        let model = load(FAMILY, kv_dtype);
        assert_eq!(model.kv_shape().block_bytes(), BLOCK_TOKENS * 3 * (32 + 8) * bytes);
        assert_eq!(model.new_kv(1).block(0).len(), model.kv_shape().block_bytes());
    }
}

#[test]
fn a_latent_in_8_bits_is_refused() {
    let options = LoadOptions { kv_dtype: KvDtype::Int8, quantize: None, threads: 1, isa: None };
    let error = Model::load(copy(FAMILY).path(), &options, &mut |_, _| {}).err().expect("it is refused").to_string();
    assert!(error.contains("--kv-dtype int8"), "{error}");
}

#[test]
fn wrong_settings_are_named() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &[&str]); 11] = [
        (|c| c["qk_nope_head_dim"] = json!(0), &["qk_nope_head_dim", "0"]),
        (|c| c["qk_rope_head_dim"] = json!(0), &["qk_rope_head_dim", "0"]),
        (|c| c["qk_rope_head_dim"] = json!(7), &["qk_rope_head_dim", "odd"]),
        (|c| c["v_head_dim"] = json!(0), &["v_head_dim", "0"]),
        (|c| c["kv_lora_rank"] = json!(33), &["kv_lora_rank", "odd"]),
        (|c| c["kv_lora_rank"] = json!(34), &["kv_a_proj_with_mqa.weight", "[40, 64]", "[42, 64]"]),
        (|c| c["q_lora_rank"] = json!(38), &["q_a_proj.weight", "[40, 64]", "[38, 64]"]),
        (|c| c["q_lora_rank"] = json!(null), &["self_attn.q_proj.weight", "missing"]),
        (|c| c["qk_nope_head_dim"] = json!(18), &["q_b_proj.weight", "[96, 40]", "[104, 40]"]),
        (|c| c["num_key_value_heads"] = json!(2), &["num_key_value_heads", "num_attention_heads"]),
        (|c| c["rope_interleave"] = json!("yes"), &["rope_interleave", "yes"]),
    ];
    for (edit, words) in cases {
        let dir = copy(FAMILY);
        edit_config(dir.path(), edit);
        fails(dir.path(), words);
    }
}

#[test]
fn experts_of_another_router_are_refused() {
    let dir = copy("deepseek-v2");
    edit_config(dir.path(), |c| c["topk_method"] = json!("noaux_tc"));
    fails(dir.path(), &["topk_method", "noaux_tc", "group_limited_greedy"]);
    edit_config(dir.path(), |c| {
        c["topk_method"] = json!("greedy");
        c["norm_topk_prob"] = json!(true);
    });
    fails(dir.path(), &["norm_topk_prob"]);
}

#[test]
fn wrong_tensors_are_named() {
    for (tensor, shape) in [("kv_b_proj.weight", [80, 64]), ("o_proj.weight", [96, 64])] {
        let dir = copy(FAMILY);
        let tensor = format!("model.layers.1.self_attn.{tensor}");
        edit_header(&dir.path().join("model.safetensors"), |header| header[&tensor]["shape"] = json!(shape));
        fails(dir.path(), &[&tensor, &format!("{shape:?}")]);
    }
}

/// DeepSeek-V3 is published so: its last layer predicts a second token.
#[test]
fn layers_that_predict_further_tokens_are_left_alone() {
    let dir = copy(FAMILY);
    edit_config(dir.path(), |c| c["num_hidden_layers"] = json!(2));
    fails(dir.path(), &["model.layers.2.input_layernorm.weight", "num_hidden_layers"]);
    edit_config(dir.path(), |c| c["num_nextn_predict_layers"] = json!(1));
    let options = LoadOptions { kv_dtype: KvDtype::Bf16, quantize: None, threads: 1, isa: None };
    Model::load(dir.path(), &options, &mut |_, _| {}).expect("two layers and one more");
}
