//! Seeded draws: the same seed gives the same numbers on every machine and with every compiler.

/// SplitMix64 (Steele, Lea, Flood 2014), which passes the usual tests, and whose entire state is a seed.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }

    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(GOLDEN);
        finish(self.0)
    }

    /// A number drawn evenly from 0 to below 1.
    pub fn unit(&mut self) -> f64 {
        (self.draw() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// An integer drawn evenly from `least` to `most`, both included.
    pub fn between(&mut self, least: u32, most: u32) -> u32 {
        let span = u64::from(most.saturating_sub(least)) + 1;
        least + (self.draw() % span) as u32
    }

    /// The time to the next event of a Poisson process with this rate per unit of time.
    pub fn exponential(&mut self, rate: f64) -> f64 {
        -(1.0 - self.unit()).ln() / rate
    }

    /// A standard normal number, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let (radius, angle) = ((-2.0 * (1.0 - self.unit()).ln()).sqrt(), std::f64::consts::TAU * self.unit());
        radius * angle.cos()
    }
}

/// A number that depends on all bits of `n` and does not resemble it.
pub fn mix(n: u64) -> u64 {
    finish(n.wrapping_add(GOLDEN))
}

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

fn finish(mut n: u64) -> u64 {
    n = (n ^ (n >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    n = (n ^ (n >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    n ^ (n >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn draws_have_the_moments_they_should() {
        let mut random = Random::new(7);
        let n = 100_000;
        let mean = |draw: &mut dyn FnMut() -> f64| (0..n).map(|_| draw()).sum::<f64>() / f64::from(n);
        let near = |value: f64, expected: f64| assert!((value - expected).abs() < 0.02, "{value} for {expected}");
        near(mean(&mut || random.unit()), 0.5);
        near(mean(&mut || random.exponential(2.0)), 0.5);
        near(mean(&mut || random.normal()), 0.0);
        near(mean(&mut || random.normal().powi(2)), 1.0);
        near(mean(&mut || f64::from(random.between(3, 5))), 4.0);
    }
}
