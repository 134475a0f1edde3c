//! The part of a layout fingerprint that is not the shape of a block.

use crate::config::ModelConfig;

/// The version in the fingerprint, which changes whenever the same weights and tokens would give different KV bytes.
const ARITHMETIC_VERSION: u32 = 8;

/// Digest of weights, settings and arithmetic. Each backend numbers its arithmetics differently.
pub(crate) fn fingerprint(weights: &[u8; 32], config: &ModelConfig, arithmetic: u8) -> [u8; 32] {
    let mut hasher = blake3::Hasher::new_derive_key("tidemill model v1");
    hasher.update(&ARITHMETIC_VERSION.to_le_bytes());
    hasher.update(weights);
    hasher.update(&[arithmetic]);
    hasher.update(&serde_json::to_vec(config).expect("names and finite numbers serialize"));
    *hasher.finalize().as_bytes()
}
