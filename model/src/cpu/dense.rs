//! A dense feed-forward layer, and each expert of a layer that has several.

use super::{
    projection::{Activations, Arithmetic, Projection, project},
    ranks::{Columns, Rank},
};
use crate::{error::ModelError, tensors::Linear};
use tidemill_kernels::{
    Cpu,
    cpu::{
        activation::Activation,
        gemm::{Output, Product},
    },
};

pub(crate) struct Dense {
    /// The gate with the projection that it multiplies; without a gate, that projection alone.
    gate_up: Projection,
    pub(crate) down: Projection,
    /// Activated numbers of a row, on ranks those of all.
    width: usize,
}

impl Dense {
    pub(crate) fn pack(gate: Option<&Linear>, up: &Linear, down: &Linear, cpu: &Cpu, arithmetic: Arithmetic) -> Result<Self, ModelError> {
        let gate_up = match gate {
            Some(gate) => gate.pack_gated(up, cpu, arithmetic)?,
            None => up.pack(cpu, arithmetic)?,
        };
        Ok(Self { gate_up, down: down.pack(cpu, arithmetic)?, width: down.weight.cols() })
    }

    pub(crate) fn bytes(&self) -> usize {
        self.gate_up.bytes() + self.down.bytes()
    }

    /// Sets `activated` to the activated numbers for `input`. A rank computes its own, and gets those of the others.
    pub(super) fn activate(
        &self,
        cpu: &Cpu,
        rank: Option<(&Rank, &mut Columns)>,
        activation: Activation,
        input: &Activations,
        activated: &mut Activations,
    ) {
        let weights = &self.gate_up;
        let Some((rank, Columns { own, all })) = rank else {
            return project(cpu, input, [Product { weights, output: Output::Activated(activation, activated) }]);
        };
        own.resize(input.rows() * rank.own(self.width).len(), 0.0);
        project(cpu, input, [Product { weights, output: Output::ActivatedNumbers(activation, own) }]);
        rank.gather(cpu, input.rows(), own, all);
        activated.copy_from(cpu, all, self.width);
    }

    /// Sets `outputs` to the outputs for what is `activated`; a rank has its own columns.
    pub(super) fn project_down(&self, cpu: &Cpu, activated: &Activations, outputs: &mut [f32]) {
        project(cpu, activated, [Product { weights: &self.down, output: Output::Set(outputs) }]);
    }
}
