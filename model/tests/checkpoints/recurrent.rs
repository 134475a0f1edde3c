//! Layers that keep a state: what a state takes, that a missing one is never zeros, and what is wrong with settings and tensors.

use crate::{
    corrupt::{copy, edit_config, fails},
    fixtures::load,
};
use serde_json::{Value, json};
use tidemill_model::{Chunk, LogitRows};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype},
    step::StateBlocks,
};

const FAMILY: &str = "lfm2";

#[test]
fn a_state_takes_as_many_blocks_as_its_numbers_fill() {
    // Three convolutions keep two inputs of 64 channels; one layer attends.
    for (kv_dtype, bytes, blocks) in [(KvDtype::F32, 4, 1), (KvDtype::Bf16, 2, 2)] {
        let model = load(FAMILY, kv_dtype);
        assert_eq!(model.kv_shape().block_bytes(), BLOCK_TOKENS * 2 * 16 * bytes);
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
