//! The lengths of prompts and answers: distributions, as written on a command line.

use rand::{Rng, rngs::StdRng};
use serde::{Serialize, Serializer};
use std::{f64::consts::TAU, fmt, ops::RangeInclusive, str::FromStr};

/// A number of tokens: fixed (`512`), drawn evenly from a range (`128-1024`), or lognormal (`lognormal/512/0.8`).
#[derive(Clone, Debug, PartialEq)]
pub enum Length {
    Even(RangeInclusive<u32>),
    /// The logarithm is normal around that of `median` with deviation `sigma`; longer ones are cut to `max`.
    Lognormal {
        median: f64,
        sigma: f64,
        max: u32,
    },
}

/// The default maximum of a lognormal length.
const MAX: u32 = 131_072;

impl Length {
    pub fn fixed(tokens: u32) -> Length {
        Length::Even(tokens..=tokens)
    }

    /// Draws a length, at least 1.
    pub fn draw(&self, rng: &mut StdRng) -> u32 {
        match self {
            Length::Even(range) => rng.random_range(range.clone()),
            Length::Lognormal { median, sigma, max } => {
                // The method is that of Box and Muller; `random` is below 1, so the logarithm is finite.
                let normal = (-2.0 * (1.0 - rng.random::<f64>()).ln()).sqrt() * (TAU * rng.random::<f64>()).cos();
                (median * (sigma * normal).exp()).round().clamp(1.0, f64::from(*max)) as u32
            }
        }
    }
}

impl FromStr for Length {
    type Err = String;

    fn from_str(text: &str) -> Result<Length, String> {
        let wrong = || "a length is a number of tokens (512), a range (128-1024), or lognormal/MEDIAN/SIGMA[/MAX]".to_owned();
        if let Some(parameters) = text.strip_prefix("lognormal/") {
            let parameters: Vec<&str> = parameters.split('/').collect();
            let [median, sigma, max @ ..] = &parameters[..] else { return Err(wrong()) };
            let (Ok(median), Ok(sigma)) = (median.parse::<f64>(), sigma.parse::<f64>()) else { return Err(wrong()) };
            let max = match max {
                [] => MAX,
                [max] => max.parse().map_err(|_| wrong())?,
                _ => return Err(wrong()),
            };
            let sensible = (1.0..=f64::from(max)).contains(&median) && (0.0..=4.0).contains(&sigma);
            return if sensible { Ok(Length::Lognormal { median, sigma, max }) } else { Err(wrong()) };
        }
        let (least, most) = text.split_once('-').unwrap_or((text, text));
        match (least.parse(), most.parse()) {
            (Ok(least), Ok(most)) if 1 <= least && least <= most => Ok(Length::Even(least..=most)),
            _ => Err(wrong()),
        }
    }
}

impl fmt::Display for Length {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Length::Even(range) if range.start() == range.end() => write!(f, "{}", range.start()),
            Length::Even(range) => write!(f, "{}-{}", range.start(), range.end()),
            Length::Lognormal { median, sigma, max } => write!(f, "lognormal/{median}/{sigma}/{max}"),
        }
    }
}

impl Serialize for Length {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rand::SeedableRng;

    #[test]
    fn lengths_are_checked_and_written_as_they_are_read() {
        assert_eq!("512".parse(), Ok(Length::fixed(512)));
        assert_eq!("1-9".parse(), Ok(Length::Even(1..=9)));
        for text in ["512", "1-9", "lognormal/500/0.8/4096"] {
            assert_eq!(text.parse::<Length>().unwrap().to_string(), text);
        }
        for wrong in
            ["", "0", "9-1", "a", "1-2-3", "-5", "lognormal/5", "lognormal/0/1", "lognormal/9/1/8", "lognormal/9/NaN", "lognormal/9/1/20/3"]
        {
            assert!(wrong.parse::<Length>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_lognormal_has_its_median_and_spread() {
        let length: Length = "lognormal/500/0.5/2000".parse().unwrap();
        let mut rng = StdRng::seed_from_u64(1);
        let mut drawn: Vec<u32> = (0..40_001).map(|_| length.draw(&mut rng)).collect();
        drawn.sort();
        let at = |share: f64| f64::from(drawn[(share * 40_000.0) as usize]);
        assert!((at(0.5) / 500.0 - 1.0).abs() < 0.02, "{}", at(0.5));
        // This is one deviation above the median.
        assert!((at(0.8413) / (500.0 * 0.5f64.exp()) - 1.0).abs() < 0.02, "{}", at(0.8413));
        assert_eq!(drawn.last(), Some(&2000));
    }
}
