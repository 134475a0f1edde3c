//! Causal convolutions of channels, each with its own few taps, and the products around them. Products and sums are rounded one by one, in
//! one order for each number: the same bits on every instruction set, and whichever rows are computed together.

/// `y[c] = taps[0][c] inputs[0][c] + taps[1][c] inputs[1][c] + … + bias[c]`, added from the left: one row of a convolution, from the inputs
/// of that row and the rows before it, the oldest first. `taps` is `[inputs, channels]`.
pub fn convolve_row(inputs: &[&[f32]], taps: &[f32], bias: Option<&[f32]>, y: &mut [f32]) {
    let channels = y.len();
    assert!(!inputs.is_empty() && taps.len() == inputs.len() * channels, "taps are [inputs, channels]");
    for (nth, (x, taps)) in inputs.iter().zip(taps.chunks_exact(channels.max(1))).enumerate() {
        assert_eq!(x.len(), channels, "inputs are rows of all channels");
        for ((y, x), tap) in y.iter_mut().zip(*x).zip(taps) {
            *y = if nth == 0 { x * tap } else { *y + x * tap };
        }
    }
    if let Some(bias) = bias {
        assert_eq!(bias.len(), channels, "a bias for each channel");
        y.iter_mut().zip(bias).for_each(|(y, bias)| *y += bias);
    }
}

/// `x = x y`, number by number.
pub fn multiply(x: &mut [f32], y: &[f32]) {
    assert_eq!(x.len(), y.len(), "as many factors as numbers");
    x.iter_mut().zip(y).for_each(|(x, y)| *x *= y);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_row_is_the_sum_of_its_inputs_by_their_taps() {
        let rows: Vec<Vec<f32>> = (0..3).map(|row| (0..37).map(|c| ((row * 37 + c) as f32 * 0.37).sin()).collect()).collect();
        let taps: Vec<f32> = (0..3 * 37).map(|i| (i as f32 * 0.11).cos()).collect();
        let bias: Vec<f32> = (0..37).map(|i| i as f32 / 10.0).collect();
        let inputs: Vec<&[f32]> = rows.iter().map(Vec::as_slice).collect();
        let mut y = vec![f32::NAN; 37];
        convolve_row(&inputs, &taps, Some(&bias), &mut y);
        for (c, y) in y.iter().enumerate() {
            let expected: f64 = (0..3).map(|t| f64::from(rows[t][c]) * f64::from(taps[t * 37 + c])).sum::<f64>() + f64::from(bias[c]);
            assert!((f64::from(*y) - expected).abs() < 1e-5, "{y} is not {expected}");
        }
        let before = y.clone();
        multiply(&mut y, &rows[0]);
        assert!(y.iter().zip(&before).zip(&rows[0]).all(|((y, before), x)| *y == before * x));
    }
}
