//! Prices of tokens.

use super::Event;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The prices of one model per million tokens, in any currency.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Price {
    /// Price of prompt tokens, those aside that were cached [default: 0]
    pub prompt: f64,
    /// Price of cached prompt tokens [default: 0]
    pub cached: f64,
    /// Price of generated tokens [default: 0]
    pub output: f64,
}

/// Prices by model. A model without a price is free.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Prices(pub BTreeMap<String, Price>);

impl Prices {
    /// The cost in millionths: a price per million tokens is one in millionths per token.
    pub fn cost_micros(&self, event: &Event) -> u64 {
        let Some(price) = self.0.get(&event.model) else { return 0 };
        let cached = event.cached_tokens.min(event.prompt_tokens);
        let parts = [(event.prompt_tokens - cached, price.prompt), (cached, price.cached), (event.output_tokens, price.output)];
        parts.iter().map(|(tokens, price)| *tokens as f64 * price).sum::<f64>().round() as u64
    }
}

impl Price {
    pub fn is_sound(&self) -> bool {
        [self.prompt, self.cached, self.output].iter().all(|price| price.is_finite() && *price >= 0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cached_tokens_have_their_own_price() {
        let prices = Prices([("m".into(), Price { prompt: 2.0, cached: 0.5, output: 8.0 })].into());
        let event = Event { model: "m".into(), prompt_tokens: 1000, cached_tokens: 400, output_tokens: 10, ..Event::default() };
        assert_eq!(prices.cost_micros(&event), 1200 + 200 + 80);
        assert_eq!(prices.cost_micros(&Event { model: "other".into(), ..event }), 0);
    }
}
