//! One kind of request in a mixed workload.

use super::length::Length;
use serde::Serialize;
use std::{fmt, str::FromStr};

/// A kind, written as `name:rate:input-len:output-len`, with `:service-tier` if it has one.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Kind {
    pub name: String,
    /// Requests per second.
    pub rate: f64,
    pub input: Length,
    pub output: Length,
    pub service_tier: Option<String>,
}

impl FromStr for Kind {
    type Err = String;

    fn from_str(text: &str) -> Result<Kind, String> {
        let form = || format!("`{text}` is not name:rate:input-len:output-len[:service-tier], such as chats:1.2:64:32-128");
        let parts: Vec<&str> = text.split(':').collect();
        let (name, rate, input, output, tier) = match parts[..] {
            [name, rate, input, output] => (name, rate, input, output, None),
            [name, rate, input, output, tier] => (name, rate, input, output, Some(tier.to_owned())),
            _ => return Err(form()),
        };
        let rate = rate.parse().ok().filter(|rate: &f64| rate.is_finite() && *rate > 0.0).ok_or_else(form)?;
        let (input, output) = (input.parse()?, output.parse()?);
        if name.is_empty() {
            return Err(form());
        }
        Ok(Kind { name: name.to_owned(), rate, input, output, service_tier: tier })
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Kind { name, rate, input, output, .. } = self;
        write!(f, "{name}: {rate}/s, {input} tokens in, {output} out")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_kind_is_one_word() {
        let kind: Kind = "chats:1.5:64:32-128:priority".parse().unwrap();
        assert_eq!((kind.name.as_str(), kind.rate), ("chats", 1.5));
        assert_eq!((kind.input.clone(), kind.output.clone()), (Length::fixed(64), Length::Even(32..=128)));
        assert_eq!(kind.service_tier.as_deref(), Some("priority"));
        assert_eq!(kind.to_string(), "chats: 1.5/s, 64 tokens in, 32-128 out");
        for wrong in ["", "chats", "chats:0:1:1", "chats:inf:1:1", "chats:1:0:1", ":1:1:1", "a:1:1:1:x:y"] {
            assert!(wrong.parse::<Kind>().is_err(), "{wrong}");
        }
    }
}
