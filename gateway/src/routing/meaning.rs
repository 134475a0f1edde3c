//! A request's meaning, compared with examples of what the small and the large model should answer.
//!
//! The examples of each side have a centroid, and a request lies on one side of the plane between the two (nearest centroid; Rocchio, 1971).
//! Its distance counts in the unit of the examples' own mean distance, so that a typical example has the full weight. It takes no training, no
//! order of examples, and no more than a handful of them.

use crate::vectors::vector::Vector;

/// The knowledge of a request's meaning.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub enum Meaning {
    /// It does not count.
    #[default]
    None,
    /// From -1, like the examples for the small model, to 1, like those for the large one.
    Side(f64),
    /// It should count, and could not be read in time, for this reason.
    Unread(&'static str),
}

/// The examples of both sides, as the plane between them.
#[derive(Clone, Debug, PartialEq)]
pub struct Examples {
    /// From the small side's centroid to the large side's.
    direction: Vec<f64>,
    /// The middle between the two, along the direction.
    middle: f64,
    /// The mean distance of examples from the plane.
    spread: f64,
}

impl Examples {
    /// Returns `None` if a side has no examples, both sides are the same, or vectors are of different encoders.
    pub fn new(small: &[Vector], large: &[Vector]) -> Option<Self> {
        let width = small.first()?.width();
        if small.iter().chain(large).any(|vector| vector.width() != width) || large.is_empty() {
            return None;
        }
        let (small_centroid, large_centroid) = (centroid(small, width), centroid(large, width));
        let direction: Vec<f64> = large_centroid.iter().zip(&small_centroid).map(|(large, small)| large - small).collect();
        let middle = (along(&direction, &small_centroid) + along(&direction, &large_centroid)) / 2.0;
        let distances = small.iter().chain(large).map(|vector| (along(&direction, &vector.unit()) - middle).abs());
        let spread = distances.sum::<f64>() / (small.len() + large.len()) as f64;
        (spread > f64::EPSILON).then_some(Self { direction, middle, spread })
    }

    /// The side on which a text lies, from -1 to 1; `None` for a vector of another encoder.
    pub fn side(&self, vector: &Vector) -> Option<f64> {
        let is_comparable = vector.width() == self.direction.len();
        is_comparable.then(|| ((along(&self.direction, &vector.unit()) - self.middle) / self.spread).clamp(-1.0, 1.0))
    }
}

fn centroid(vectors: &[Vector], width: usize) -> Vec<f64> {
    let mut sum = vec![0.0; width];
    for vector in vectors {
        sum.iter_mut().zip(vector.unit()).for_each(|(sum, number)| *sum += number);
    }
    sum.iter_mut().for_each(|sum| *sum /= vectors.len() as f64);
    sum
}

fn along(direction: &[f64], point: &[f64]) -> f64 {
    direction.iter().zip(point).map(|(a, b)| a * b).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vector(degrees: f32) -> Vector {
        let (sine, cosine) = degrees.to_radians().sin_cos();
        Vector::new(&[cosine, sine]).unwrap()
    }

    #[test]
    fn a_text_is_on_the_side_of_the_examples_that_it_is_like() {
        let examples = Examples::new(&[0.0, 20.0].map(vector), &[90.0, 70.0].map(vector)).unwrap();
        let side = |degrees| examples.side(&vector(degrees)).unwrap();
        assert!(side(10.0) < -0.9 && side(80.0) > 0.9 && side(45.0).abs() < 0.01);
        assert!(side(30.0) < side(40.0), "the nearer, the more");
        assert!((-1.0..=1.0).contains(&side(200.0)));
        assert_eq!(examples.side(&Vector::new(&[1.0, 0.0, 0.0]).unwrap()), None, "another encoder");
    }

    #[test]
    fn what_cannot_be_told_apart_is_no_example() {
        assert_eq!(Examples::new(&[], &[vector(0.0)]), None);
        assert_eq!(Examples::new(&[vector(0.0)], &[]), None);
        assert_eq!(Examples::new(&[vector(0.0)], &[vector(0.0)]), None);
        assert_eq!(Examples::new(&[vector(0.0)], &[Vector::new(&[1.0]).unwrap()]), None);
    }
}
