//! The columns of a model that the device's kernels lack.

use super::experts::can_choose;
use crate::{
    config::ModelConfig,
    family::{NormKind, QkNorm},
};
use tidemill_kernels::cpu::activation::Activation;

/// The features that several devices lack although one has them.
pub(super) fn lacks_on_several(config: &ModelConfig) -> Vec<&'static str> {
    let norms_all_heads = config.qk_norm && config.family.qk_norm == QkNorm::All;
    norms_all_heads.then_some("norms over the heads of all devices together").into_iter().collect()
}

/// The missing features, which the error that refuses the model names; empty if the kernels support the model.
pub(super) fn lacks(config: &ModelConfig) -> Vec<&'static str> {
    let family = config.family;
    let norms = family.norms;
    let rotated = config.rope.rotated(config.head_dim);
    let is_centered = matches!(family.norm, NormKind::Layer { .. });
    let columns = [
        (is_centered && config.qk_norm, "norms over queries and keys that take out the mean"),
        (
            family.is_parallel && (norms.after_attention.is_some() || norms.after_mlp.is_some()),
            "norms after attention and feed-forward side by side",
        ),
        (family.has_output_gate, "gates of the attention's output"),
        (family.experts.is_some_and(|rule| rule.has_biases), "experts with biases"),
        (config.experts.as_ref().is_some_and(|experts| !can_choose(experts)), "as many experts, of a layer, of a row or in groups"),
        (
            config.experts.is_some() && (is_centered || norms.before_mlp.is_none() || config.activation != Activation::Silu),
            "experts behind other norms, or with other activations than silu",
        ),
        (config.latent.is_some(), "latent attention"),
        (config.recurrent.is_some(), "layers that keep a state"),
        (matches!(config.activation, Activation::Clamped { .. }), "clamped gates"),
        (
            config.windowed_rope.as_ref().is_some_and(|rope| rope.rotated(config.head_dim) != rotated),
            "rotation of different parts of heads in layers with a window",
        ),
        (config.score_cap.is_some() && family.has_sinks, "a soft cap of scores beside attention sinks"),
    ];
    columns.into_iter().filter_map(|(needed, name)| needed.then_some(name)).collect()
}
