//! A norm's weights, and its application.

use crate::{checkpoint::Checkpoint, config::ModelConfig, error::ModelError, family::NormKind};
use tidemill_kernels::{
    Cpu,
    cpu::{
        elementwise::rms_norm,
        layer_norm::{LayerNorm, layer_norm},
    },
};

#[derive(Clone)]
pub(crate) struct Norm {
    /// The factors of the normed numbers.
    pub(crate) weight: Vec<f32>,
    bias: Option<Vec<f32>>,
    /// Whether the mean is subtracted.
    is_centered: bool,
    epsilon: f32,
}

impl Norm {
    /// Takes the norm `name` over `len` numbers, of the family's kind.
    pub(crate) fn take(checkpoint: &mut Checkpoint, config: &ModelConfig, name: &str, len: usize) -> Result<Self, ModelError> {
        let mut weight = checkpoint.vector(&format!("{name}.weight"), len)?;
        let mut bias = None;
        match config.family.norm {
            NormKind::Rms => {}
            NormKind::RmsPlusOne => weight.iter_mut().for_each(|weight| *weight += 1.0),
            NormKind::Layer { has_bias } if has_bias => bias = Some(checkpoint.vector(&format!("{name}.bias"), len)?),
            NormKind::Layer { .. } => {}
        }
        Ok(Self { weight, bias, is_centered: matches!(config.family.norm, NormKind::Layer { .. }), epsilon: config.norm_epsilon })
    }

    /// Takes a norm that subtracts the mean.
    pub(crate) fn layer(checkpoint: &mut Checkpoint, name: &str, len: usize, epsilon: f32, has_bias: bool) -> Result<Self, ModelError> {
        let weight = checkpoint.vector(&format!("{name}.weight"), len)?;
        let bias = if has_bias { Some(checkpoint.vector(&format!("{name}.bias"), len)?) } else { None };
        Ok(Self { weight, bias, is_centered: true, epsilon })
    }

    /// Takes a norm by root mean square whose weights are its factors, regardless of the kind of the family's other norms.
    pub(crate) fn rms(checkpoint: &mut Checkpoint, name: &str, len: usize, epsilon: f32) -> Result<Self, ModelError> {
        let weight = checkpoint.vector(&format!("{name}.weight"), len)?;
        Ok(Self { weight, bias: None, is_centered: false, epsilon })
    }

    /// This norm with a different epsilon.
    pub(crate) fn with_epsilon(self, epsilon: f32) -> Self {
        Self { epsilon, ..self }
    }

    /// The parameters of a norm that subtracts the mean; `None` for other norms.
    pub(crate) fn centered(&self) -> Option<LayerNorm<'_>> {
        let Self { weight, bias, is_centered, epsilon } = self;
        is_centered.then_some(LayerNorm { weight, bias: bias.as_deref(), epsilon: *epsilon })
    }

    pub(crate) fn epsilon(&self) -> f32 {
        self.epsilon
    }

    /// Norms every row of `x`, which has as many numbers as there are weights.
    pub(crate) fn apply(&self, cpu: &Cpu, x: &mut [f32]) {
        match self.centered() {
            Some(norm) => layer_norm(cpu, x, norm),
            None => rms_norm(cpu, x, &self.weight, self.epsilon),
        }
    }
}
