//! Prices of tokens.

use super::Event;
use crate::money::MICROS_MAX;
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
        cost(parts).round() as u64
    }

    /// The most that a request can cost: no less than [`cost_micros`](Self::cost_micros) of its event.
    pub fn most_micros(&self, model: &str, prompt_tokens: u64, answer_tokens: u64) -> u64 {
        let Some(price) = self.0.get(model) else { return 0 };
        let most = cost([(prompt_tokens, price.prompt.max(price.cached)), (0, 0.0), (answer_tokens, price.output)]).ceil();
        (most as u64).min(MICROS_MAX)
    }

    /// The most tokens of answers that a sum pays for after a prompt; `None` if they cost nothing.
    pub fn answer_tokens(&self, model: &str, prompt_tokens: u64, micros: u64) -> Option<u64> {
        let price = self.0.get(model).filter(|price| price.output > 0.0)?;
        let left = micros.saturating_sub(self.most_micros(model, prompt_tokens, 0));
        Some((left as f64 / price.output) as u64)
    }
}

fn cost(parts: [(u64, f64); 3]) -> f64 {
    parts.iter().map(|(tokens, price)| *tokens as f64 * price).sum()
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

    #[test]
    fn no_request_costs_more_than_it_could() {
        for (prompt, cached, output) in [(2.0, 0.5, 8.0), (0.1, 0.3, 0.7), (0.0, 0.0, 1e-3), (1.0 / 3.0, 0.0, 2.0 / 3.0)] {
            let prices = Prices([("m".into(), Price { prompt, cached, output })].into());
            for (tokens, of_cache, answer) in [(0, 0, 0), (1, 0, 1), (7, 7, 3), (1000, 400, 999), (1 << 30, 1, 1 << 30)] {
                let event =
                    Event { model: "m".into(), prompt_tokens: tokens, cached_tokens: of_cache, output_tokens: answer, ..Event::default() };
                let most = prices.most_micros("m", tokens, answer);
                assert!(prices.cost_micros(&event) <= most, "{event:?}");
                let paid = prices.answer_tokens("m", tokens, most).unwrap();
                assert!(prices.most_micros("m", tokens, paid) <= most + 1, "{paid}");
            }
        }
        let dear = Prices([("m".into(), Price { output: f64::MAX, ..Price::default() })].into());
        assert_eq!((dear.most_micros("m", 1, 1), dear.most_micros("other", 1, 1)), (MICROS_MAX, 0));
    }
}
