//! Causal convolutions of channels, each with a few taps of its own, and the products around them. Products and sums are rounded one by
//! one, in one order for each number, so the bits are the same on every instruction set and for any set of rows that are computed together.

use crate::cpu::{
    Cpu,
    activation::Activation,
    element::load_up_to,
    simd::{Kernel, LANES, Simd},
};

/// `y[c] = f(taps[0][c] inputs[0][c] + taps[1][c] inputs[1][c] + … + bias[c])`, added from the left: one row of a convolution, from the
/// inputs of that row and the rows before it, the oldest first. `taps` is `[inputs, channels]`; without an activation `f` changes nothing.
pub fn convolve_row(cpu: &Cpu, inputs: &[&[f32]], taps: &[f32], bias: Option<&[f32]>, activation: Option<Activation>, y: &mut [f32]) {
    let channels = y.len();
    assert!(!inputs.is_empty() && taps.len() == inputs.len() * channels, "taps are [inputs, channels]");
    assert!(inputs.iter().all(|x| x.len() == channels), "inputs are rows of all channels");
    assert!(bias.is_none_or(|bias| bias.len() == channels), "a bias for each channel");
    cpu.isa().dispatch(Convolve { inputs, taps, bias, activation, y });
}

/// `x = x y`, number by number.
pub fn multiply(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "as many factors as numbers");
    x.iter_mut().zip(y).for_each(|(x, y)| *x *= y);
}

struct Convolve<'a> {
    inputs: &'a [&'a [f32]],
    taps: &'a [f32],
    bias: Option<&'a [f32]>,
    activation: Option<Activation>,
    y: &'a mut [f32],
}

impl Kernel for Convolve<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let channels = self.y.len();
        for first in (0..channels).step_by(LANES) {
            let mut sum = simd.zero();
            for (nth, input) in self.inputs.iter().enumerate() {
                let product = simd.mul(load_up_to(simd, &input[first..]), load_up_to(simd, &self.taps[nth * channels + first..]));
                sum = if nth == 0 { product } else { simd.add(sum, product) };
            }
            if let Some(bias) = self.bias {
                sum = simd.add(sum, load_up_to(simd, &bias[first..]));
            }
            if let Some(activation) = self.activation {
                sum = activation.apply(simd, sum);
            }
            let end = channels.min(first + LANES);
            simd.store_part(sum, &mut self.y[first..end], false);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{activated_number, cpus};

    #[test]
    fn a_row_is_the_sum_of_its_inputs_by_their_taps() {
        let rows: Vec<Vec<f32>> = (0..3).map(|row| (0..37).map(|c| ((row * 37 + c) as f32 * 0.37).sin()).collect()).collect();
        let taps: Vec<f32> = (0..3 * 37).map(|i| (i as f32 * 0.11).cos()).collect();
        let bias: Vec<f32> = (0..37).map(|i| i as f32 / 10.0).collect();
        let inputs: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        // The chain in f32, which every instruction set must reproduce to the bit.
        let chain: Vec<f32> =
            (0..37).map(|c| (1..3).fold(rows[0][c] * taps[c], |sum, t| sum + rows[t][c] * taps[t * 37 + c]) + bias[c]).collect();
        for cpu in cpus() {
            let mut y = vec![f32::NAN; 37];
            convolve_row(&cpu, &inputs, &taps, Some(&bias), None, &mut y);
            assert_eq!(y, chain, "{}", cpu.isa());
            let mut activated = vec![f32::NAN; 37];
            convolve_row(&cpu, &inputs, &taps, Some(&bias), Some(Activation::Silu), &mut activated);
            assert!(activated.iter().zip(&y).all(|(silu, y)| *silu == activated_number(&cpu, Activation::Silu, *y)), "{}", cpu.isa());
            multiply(&mut y, &rows[0]);
            assert!(y.iter().zip(&chain).zip(&rows[0]).all(|((y, before), x)| *y == before * x));
        }
    }
}
