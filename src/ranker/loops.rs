//! What an encoder does between matrix products, as loops that the compiler vectorises: none has a call, a branch or a sum in one chain.
//!
//! All are inlined, so that they become as wide as the function that uses them may be.

use super::model::Activation;

/// Partial sums side by side.
const LANES: usize = 16;

#[inline(always)]
pub(crate) fn add(to: &mut [f32], from: &[f32]) {
    to.iter_mut().zip(from).for_each(|(to, from)| *to += from);
}

#[inline(always)]
pub(crate) fn sum(x: &[f32]) -> f32 {
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    chunks.iter().for_each(|chunk| lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane += value));
    lanes.iter().sum::<f32>() + rest.iter().sum::<f32>()
}

#[inline(always)]
pub(crate) fn dot(x: &[f32], y: &[f32]) -> f32 {
    let (x_chunks, x_rest) = x.as_chunks::<LANES>();
    let (y_chunks, y_rest) = y.as_chunks::<LANES>();
    let mut lanes = [0.0; LANES];
    for (x, y) in x_chunks.iter().zip(y_chunks) {
        lanes.iter_mut().zip(x).zip(y).for_each(|((lane, x), y)| *lane += x * y);
    }
    lanes.iter().sum::<f32>() + x_rest.iter().zip(y_rest).map(|(x, y)| x * y).sum::<f32>()
}

#[inline(always)]
fn largest(x: &[f32]) -> f32 {
    // Not `f32::max`, which takes more than one instruction because of numbers that are none.
    let larger = |x: f32, y: f32| if x > y { x } else { y };
    let (chunks, rest) = x.as_chunks::<LANES>();
    let mut lanes = [f32::MIN; LANES];
    chunks.iter().for_each(|chunk| lanes.iter_mut().zip(chunk).for_each(|(lane, value)| *lane = larger(*lane, *value)));
    lanes.iter().chain(rest).fold(f32::MIN, |most, value| larger(most, *value))
}

/// Softmax of `scale` times the values.
#[inline(always)]
pub(crate) fn softmax(row: &mut [f32], scale: f32) {
    let most = largest(row);
    row.iter_mut().for_each(|value| *value = exp((*value - most) * scale));
    let inverse = 1.0 / sum(row);
    row.iter_mut().for_each(|value| *value *= inverse);
}

/// Takes a row's mean from it and divides it by its deviation. Returns one over that.
#[inline(always)]
pub(crate) fn normalise(row: &mut [f32], epsilon: f32) -> f32 {
    let mean = sum(row) / row.len() as f32;
    row.iter_mut().for_each(|value| *value -= mean);
    let inverse = 1.0 / (dot(row, row) / row.len() as f32 + epsilon).sqrt();
    row.iter_mut().for_each(|value| *value *= inverse);
    inverse
}

#[inline(always)]
pub(crate) fn scale_and_shift(row: &mut [f32], weight: &[f32], bias: &[f32]) {
    row.iter_mut().zip(weight).zip(bias).for_each(|((value, weight), bias)| *value = *value * weight + bias);
}

/// The activation of every value, in place.
#[inline(always)]
pub(super) fn activate(x: &mut [f32], activation: Activation) {
    // x times the logistic function of y.
    let gate = |x: f32, y: f32| x / (1.0 + exp(-y));
    match activation {
        Activation::Gelu => x.iter_mut().for_each(|x| *x = gelu(*x).0),
        // 0.5 (1 + tanh y) is the logistic function of 2 y.
        Activation::GeluNew => x.iter_mut().for_each(|x| *x = gate(*x, 1.595_769 * (*x + 0.044_715 * *x * *x * *x))),
        Activation::Relu => x.iter_mut().for_each(|x| *x = x.max(0.0)),
        Activation::Silu => x.iter_mut().for_each(|x| *x = gate(*x, *x)),
    }
}

/// GELU with the error function, and its derivative.
#[inline(always)]
pub(crate) fn gelu(x: f32) -> (f32, f32) {
    let bell = exp(-0.5 * x * x);
    // Abramowitz and Stegun, 7.1.26: the normal distribution's tail within 1e-7.
    let t = 1.0 / (1.0 + 0.327_591_1 * std::f32::consts::FRAC_1_SQRT_2 * x.abs());
    let tail = 0.5 * bell * t * (0.254_829_6 + t * (-0.284_496_74 + t * (1.421_413_7 + t * (-1.453_152 + t * 1.061_405_4))));
    let share = if x > 0.0 { 1.0 - tail } else { tail };
    (x * share, share + x * bell * 0.398_942_3)
}

/// e to the x within 2e-7 of its value, zero below -87.
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    let x = x.clamp(-87.0, 88.0);
    // Adding 1.5 * 2^23 rounds to a whole number, which then stands in the lowest bits.
    let shifted = x * std::f32::consts::LOG2_E + 12_582_912.0;
    let whole = shifted - 12_582_912.0;
    let rest = x - whole * 0.693_359_4;
    let rest = rest + whole * 2.121_944_4e-4;
    let power = 1.0 + rest * (1.0 + rest * (0.5 + rest * (0.166_666_57 + rest * (0.041_665_8 + rest * (0.008_363_2 + rest * 0.001_381_4)))));
    f32::from_bits((shifted.to_bits() << 23).wrapping_add(1.0f32.to_bits())) * power
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_and_the_activations_are_those_of_the_mathematics() {
        let tanh = |x: f64| x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044_715 * x * x * x)).tanh()) / 2.0;
        for step in -4000..4000 {
            let x = step as f32 / 200.0;
            let wide = f64::from(x);
            assert!((f64::from(exp(x)) / wide.exp() - 1.0).abs() < 3e-7, "exp {x}");
            for (activation, expected) in
                [(Activation::GeluNew, tanh(wide)), (Activation::Relu, wide.max(0.0)), (Activation::Silu, wide / (1.0 + (-wide).exp()))]
            {
                let mut found = [x];
                activate(&mut found, activation);
                assert!((f64::from(found[0]) - expected).abs() < 2e-6 * wide.abs().max(1.0), "{activation:?} {x}: {} and {expected}", found[0]);
            }
        }
        assert_eq!(exp(f32::MIN), exp(-87.0));
    }

    #[test]
    fn the_largest_and_the_sum_are_found_wherever_they_stand() {
        for size in 1..40 {
            for at in 0..size {
                let mut row = vec![-2.0; size];
                row[at] = 3.0;
                assert_eq!((largest(&row), sum(&row)), (3.0, 5.0 - 2.0 * size as f32));
                softmax(&mut row, 0.5);
                let rest = (-2.5f32).exp();
                assert!((row[at] - 1.0 / (1.0 + rest * (size - 1) as f32)).abs() < 1e-6, "{size} {at}");
            }
        }
    }
}
