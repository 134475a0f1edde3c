//! The columns of a model that the device's kernels lack.

use super::experts::can_choose;
use crate::{
    config::ModelConfig,
    family::{Mlp, NormKind, QkNorm},
};
use tidemill_kernels::cpu::activation::Activation;

/// Named in the error that refuses the model; empty if the device has all that it needs.
pub(super) fn lacks(config: &ModelConfig) -> Vec<&'static str> {
    let family = config.family;
    let norms = family.norms;
    let rotated = config.rope.rotated(config.head_dim);
    let usual_score_factor = 1.0 / (config.head_dim as f32).sqrt();
    let columns = [
        (matches!(family.norm, NormKind::Layer { .. }), "norms that take out the mean"),
        (!family.is_parallel && (norms.before_attention.is_none() || norms.before_mlp.is_none()), "layers without norms on their input"),
        (norms.after_attention.is_some() || norms.after_mlp.is_some(), "norms after the attention and the feed-forward layer"),
        (family.is_parallel, "attention and feed-forward side by side"),
        (family.qk_norm == QkNorm::All, "norms over all heads"),
        (family.mlp == Mlp::Plain, "feed-forward layers without a gate"),
        (family.has_output_gate, "gates of the attention's output"),
        (family.experts.is_some_and(|rule| rule.has_biases), "experts with biases"),
        (config.experts.as_ref().is_some_and(|experts| !can_choose(experts)), "as many experts, of a layer, of a row or in groups"),
        (config.latent.is_some(), "latent attention"),
        (config.recurrent.is_some(), "layers that keep a state"),
        (config.activation != Activation::Silu, "activations other than silu"),
        (family.is_interleaved, "the rotation of neighbouring numbers"),
        (rotated != config.head_dim, "the rotation of parts of heads"),
        (config.windowed_rope.is_some(), "rotary settings per layer type"),
        (!config.unrotated.is_empty(), "layers without rotation"),
        (config.score_factor.is_some_and(|factor| factor != usual_score_factor), "a factor of scores"),
        (config.score_cap.is_some(), "a soft cap of scores"),
        (family.has_sinks, "attention sinks"),
        (config.query_growth.is_some(), "queries that grow with their position"),
        (config.embedding_factor.is_some_and(|factor| factor != 1.0), "a factor of the embedding"),
        (config.residual_factor.is_some(), "a factor of what layers add"),
        (config.logit_factor.is_some() || config.logit_cap.is_some(), "a factor or a soft cap of logits"),
    ];
    columns.into_iter().filter_map(|(needed, name)| needed.then_some(name)).collect()
}
