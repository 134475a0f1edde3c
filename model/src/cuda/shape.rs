//! A model's sizes, padded for the device's kernels: heads with zeros to a multiple of 16 numbers (and feed-forward layers to a multiple of
//! 16: `weights`). Neither changes the result.

use super::{
    lacks::{lacks, lacks_on_several},
    layers::UNIT,
};
use crate::{config::ModelConfig, error::ModelError, kv};
use std::ops::Range;
use tidemill_kernels::{
    KvLayout,
    cuda::{
        compile::{Heads, Scoring},
        peers::{RANKS_MAX, own_width},
    },
};
use tidemill_proto::block::{KvDtype, KvShape};

#[derive(Clone, Copy, Debug)]
pub(super) struct DeviceShape {
    pub(super) vocab: usize,
    pub(super) hidden: usize,
    pub(super) layers: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    /// The padded dimension of a head.
    pub(super) head_dim: usize,
    /// The dimension of a head before padding.
    pub(super) head_dim_used: usize,
    /// The count of a head's numbers that rotate, which come first.
    pub(super) rotated: usize,
    /// The additions to attention's softmax of scaled scores.
    pub(super) scoring: Scoring,
    /// bf16 or int8.
    pub(super) kv_dtype: KvDtype,
}

const HEAD_DIM_MAX: usize = 256;
/// The limit of the sampling kernel.
const VOCAB_MAX: usize = 1 << 18;

impl DeviceShape {
    pub(super) fn of(config: &ModelConfig, kv_dtype: KvDtype) -> Result<Self, ModelError> {
        let head_dim = config.head_dim.next_multiple_of(16);
        let unfit = |problem: String| Err(ModelError::NotOnDevice { problem });
        let lacks = lacks(config);
        if !lacks.is_empty() {
            return unfit(format!("{} needs {}", config.architecture, lacks.join(", ")));
        }
        if head_dim > HEAD_DIM_MAX {
            return unfit(format!("heads of {} numbers are larger than {HEAD_DIM_MAX}", config.head_dim));
        }
        if !config.hidden.is_multiple_of(8) {
            return unfit(format!("hidden_size {} is not a multiple of 8", config.hidden));
        }
        if !config.vocab.is_multiple_of(8) || config.vocab > VOCAB_MAX {
            return unfit(format!("vocab_size {} is not a multiple of 8 up to {VOCAB_MAX}", config.vocab));
        }
        if !matches!(kv_dtype, KvDtype::Bf16 | KvDtype::Int8) {
            return unfit(format!("K and V are bf16 or int8 there, not {} (--kv-dtype)", kv_dtype.name()));
        }
        Ok(Self {
            vocab: config.vocab,
            hidden: config.hidden,
            layers: config.layers,
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim,
            head_dim_used: config.head_dim,
            rotated: config.rope.rotated(config.head_dim),
            scoring: match (config.score_cap, config.family.has_sinks) {
                (Some(_), _) => Scoring::Capped,
                (None, true) => Scoring::Sinks,
                (None, false) => Scoring::Plain,
            },
            kv_dtype,
        })
    }

    /// Numbers of a row of queries.
    pub(super) fn q(&self) -> usize {
        self.heads * self.head_dim
    }

    /// Numbers of a row of queries, keys and values.
    pub(super) fn qkv(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// The runs of a head's numbers, and the place at which each begins. The kernels rotate the first half's numbers with the second
    /// half's, so each half has half of those that rotate, then half of those that do not (with angles of zero), and then padding.
    pub(super) fn runs(&self) -> [(Range<usize>, usize); 4] {
        let (pairs, half) = (self.rotated / 2, self.head_dim / 2);
        let middle = self.rotated + (self.head_dim_used - self.rotated).div_ceil(2);
        [(0..pairs, 0), (pairs..self.rotated, half), (self.rotated..middle, pairs), (middle..self.head_dim_used, half + pairs)]
    }

    /// The place of number `i` of a head.
    pub(super) fn place(&self, i: usize) -> usize {
        let (run, at) = self.runs().into_iter().find(|(run, _)| run.contains(&i)).expect("a number of a head");
        at + i - run.start
    }

    pub(super) fn kernel_heads(&self) -> Heads {
        Heads { dim: self.head_dim, kv: self.kv_layout().dtype }
    }

    pub(super) fn kv_layout(&self) -> KvLayout {
        kv::layout(self.kv_shape())
    }

    pub(super) fn kv_shape(&self) -> KvShape {
        KvShape { layers: self.layers, kv_heads: self.kv_heads, head_dim: self.head_dim, dtype: self.kv_dtype, latent: None }
    }
}

/// The part of a model on one of `ranks` devices: an equal part of the heads, and of the outputs of every other product.
#[derive(Clone, Copy, Debug)]
pub(super) struct RankShape {
    pub(super) whole: DeviceShape,
    /// The model with the device's heads alone.
    pub(super) own: DeviceShape,
    pub(super) rank: usize,
    pub(super) ranks: usize,
}

impl RankShape {
    /// The parts of a model on `ranks` devices. An error names what cannot be shared out.
    pub(super) fn all(config: &ModelConfig, whole: DeviceShape, ranks: usize) -> Result<Vec<Self>, ModelError> {
        let unfit = |problem: String| Err(ModelError::NotOnDevice { problem });
        if !(1..=RANKS_MAX).contains(&ranks) {
            return unfit(format!("a model is on 1 to {RANKS_MAX} devices, not on {ranks} (--tensor-parallel)"));
        }
        if ranks > 1 {
            let lacks = lacks_on_several(config);
            if !lacks.is_empty() {
                return unfit(format!("{} on several devices needs {}", config.architecture, lacks.join(", ")));
            }
        }
        let counts = [("key-value heads", whole.kv_heads, 1), ("numbers of hidden_size", whole.hidden, UNIT)];
        for (what, count, unit) in counts {
            if !count.is_multiple_of(unit * ranks) {
                return unfit(format!("{count} {what} are not shared out over {ranks} devices (--tensor-parallel)"));
            }
        }
        if own_width(whole.vocab, ranks, UNIT) * (ranks - 1) >= whole.vocab {
            return unfit(format!("a vocabulary of {} is too small for {ranks} devices (--tensor-parallel)", whole.vocab));
        }
        let own = DeviceShape { heads: whole.heads / ranks, kv_heads: whole.kv_heads / ranks, ..whole };
        Ok((0..ranks).map(|rank| Self { whole, own, rank, ranks }).collect())
    }

    fn part(&self, count: usize) -> Range<usize> {
        let own = count / self.ranks;
        self.rank * own..(self.rank + 1) * own
    }

    /// The device's key-value heads.
    pub(super) fn kv_heads(&self) -> Range<usize> {
        self.part(self.whole.kv_heads)
    }

    /// The device's query heads.
    pub(super) fn heads(&self) -> Range<usize> {
        self.part(self.whole.heads)
    }

    /// The device's columns of the residual stream, where they are outputs.
    pub(super) fn hidden(&self) -> Range<usize> {
        self.part(self.whole.hidden)
    }

    /// The device's part of a feed-forward layer's width, which is padded for it.
    pub(super) fn inner(&self, padded: usize) -> Range<usize> {
        self.part(padded)
    }

    /// The device's part of the vocabulary; the last one may be smaller.
    pub(super) fn vocab(&self) -> Range<usize> {
        let own = own_width(self.whole.vocab, self.ranks, UNIT);
        self.rank * own..((self.rank + 1) * own).min(self.whole.vocab)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_type_of_k_and_v_without_kernels_is_refused_by_its_flag() {
        let config = ModelConfig::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama3")).unwrap();
        assert!([KvDtype::Bf16, KvDtype::Int8].into_iter().all(|dtype| DeviceShape::of(&config, dtype).is_ok()));
        for dtype in [KvDtype::F16, KvDtype::F32] {
            let error = DeviceShape::of(&config, dtype).unwrap_err().to_string();
            assert!(error.contains(dtype.name()) && error.contains("--kv-dtype"), "{error}");
        }
    }

    #[test]
    fn a_model_is_shared_out_whole_or_not_at_all() {
        let config = ModelConfig::load(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/llama3")).unwrap();
        let whole = DeviceShape::of(&config, KvDtype::Bf16).unwrap();
        let all = RankShape::all(&config, whole, 2).unwrap();
        let covered = |of: &dyn Fn(&RankShape) -> Range<usize>| all.iter().flat_map(of).collect::<Vec<_>>();
        assert_eq!(covered(&|rank| rank.heads()), (0..whole.heads).collect::<Vec<_>>());
        assert_eq!(covered(&|rank| rank.kv_heads()), (0..whole.kv_heads).collect::<Vec<_>>());
        assert_eq!(covered(&|rank| rank.hidden()), (0..whole.hidden).collect::<Vec<_>>());
        assert_eq!(covered(&|rank| rank.vocab()), (0..whole.vocab).collect::<Vec<_>>());
        let refused = |shape, ranks| RankShape::all(&config, shape, ranks).unwrap_err().to_string();
        assert!(refused(whole, 3).contains("key-value heads are not shared out over 3 devices"), "{}", refused(whole, 3));
        assert!(refused(whole, 17).contains("1 to 16 devices") && refused(whole, 0).contains("not on 0"));
        let small = DeviceShape { vocab: 16, ..whole };
        assert!(RankShape::all(&config, small, 2).is_ok() && refused(DeviceShape { vocab: 8, ..whole }, 2).contains("vocabulary of 8"));
    }

    #[test]
    fn each_half_of_a_head_is_filled_up_by_itself() {
        let rotating = |head_dim_used: usize, rotated: usize| DeviceShape {
            vocab: 8,
            hidden: 8,
            layers: 1,
            heads: 6,
            kv_heads: 2,
            head_dim: head_dim_used.next_multiple_of(16),
            head_dim_used,
            rotated,
            scoring: Scoring::Plain,
            kv_dtype: KvDtype::Bf16,
        };
        let shape = |head_dim: usize| rotating(head_dim, head_dim);
        let places = |shape: DeviceShape| (0..shape.head_dim_used).map(|i| shape.place(i)).collect::<Vec<_>>();
        assert_eq!(places(shape(8)), [0, 1, 2, 3, 8, 9, 10, 11]);
        assert_eq!(places(shape(16)), (0..16).collect::<Vec<_>>());
        // Numbers 0 and 2 rotate together, and 1 and 3.
        assert_eq!(places(rotating(8, 4)), [0, 1, 8, 9, 2, 3, 10, 11]);
        assert_eq!(places(rotating(16, 12)), [0, 1, 2, 3, 4, 5, 8, 9, 10, 11, 12, 13, 6, 7, 14, 15]);
        assert_eq!(places(rotating(7, 2)), [0, 8, 1, 2, 3, 9, 10]);
        assert_eq!((shape(24).q(), shape(24).qkv()), (6 * 32, 10 * 32));
        for shape in [shape(24), DeviceShape { kv_dtype: KvDtype::Int8, ..shape(24) }] {
            assert_eq!(shape.kv_layout().block_bytes(), shape.kv_shape().block_bytes());
        }
    }
}
