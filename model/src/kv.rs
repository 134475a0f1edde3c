//! The shape of KV blocks in the protocol's terms and in the kernels'. They are converted here and nowhere else, as neither of the two
//! crates depends on the other.

use tidemill_kernels::{BLOCK_POSITIONS, Dtype, KvLayout, KvStorage};
use tidemill_proto::block::{BLOCK_TOKENS, KvDtype, KvShape};

const _: () = assert!(BLOCK_TOKENS == BLOCK_POSITIONS, "the KV kernels and the block keys must agree on a block");

pub(crate) fn layout(shape: KvShape) -> KvLayout {
    let KvShape { layers, kv_heads, head_dim, dtype, latent } = shape;
    let dtype = match dtype {
        KvDtype::F32 => KvStorage::Float(Dtype::F32),
        KvDtype::F16 => KvStorage::Float(Dtype::F16),
        KvDtype::Bf16 => KvStorage::Float(Dtype::Bf16),
        KvDtype::Int8 => KvStorage::Int8,
    };
    KvLayout { layers, kv_heads, head_dim, dtype, latent }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn protocol_and_kernels_agree_on_the_size_of_a_block() {
        for (dtype, head_dim) in KvDtype::ALL.into_iter().flat_map(|dtype| [2, 6, 64, 80, 128].map(|head_dim| (dtype, head_dim))) {
            for (kv_heads, latent) in [(2, None), (1, Some(head_dim / 2))] {
                let shape = KvShape { layers: 3, kv_heads, head_dim, dtype, latent };
                assert_eq!(layout(shape).block_bytes(), shape.block_bytes(), "{shape:?}");
            }
        }
    }
}
