//! Requests of a trace in Mooncake's format, with synthetic prompts: equal `hash_ids` give equal tokens, so a server finds the same
//! prefixes in its cache as the recorded one could.

use super::workload::{Ask, SPECIAL, WorkloadArgs};
use crate::replay::trace::{Request, TRACE_BLOCK_TOKENS};
use rand::{Rng, SeedableRng, rngs::SmallRng};
use std::collections::HashSet;

/// The conversion of a trace to prompts.
#[derive(Clone, Copy, Debug)]
pub struct Synthesis {
    /// The factor on all lengths.
    pub scale: f64,
    /// The seed of the prompts; a new one gives prompts that no cache has seen.
    pub seed: u64,
}

impl Synthesis {
    /// The number of tokens that one id stands for; at least one, or equal ids would have nothing in common.
    pub fn block_tokens(self) -> u64 {
        ((TRACE_BLOCK_TOKENS as f64 * self.scale).round() as u64).max(1)
    }

    pub fn ask(self, request: &Request, args: &WorkloadArgs) -> Ask {
        let scaled = |tokens: u64| ((tokens as f64 * self.scale).round() as u64).max(1);
        let length = scaled(request.input_tokens) as usize;
        let mut tokens = Vec::with_capacity(length);
        for id in &request.blocks {
            let left = length - tokens.len();
            let mut rng = SmallRng::seed_from_u64(self.seed.rotate_left(32) ^ id);
            let block = (0..self.block_tokens()).map(|_| rng.random_range(SPECIAL.min(args.vocab - 1)..args.vocab));
            tokens.extend(block.take(left));
        }
        Ask { prompt: args.prompt(tokens), output_tokens: scaled(request.output_tokens.unwrap_or(1)) as u32 }
    }
}

/// The share of each request's prompt that an unlimited cache would find, if each block is available at once.
pub fn cached_shares(requests: &[Request]) -> Vec<f64> {
    let mut seen: HashSet<u64> = HashSet::new();
    let share = |request: &Request| {
        let leading = request.blocks.iter().take_while(|id| seen.contains(*id)).count() as u64;
        seen.extend(&request.blocks);
        (leading * TRACE_BLOCK_TOKENS).min(request.input_tokens) as f64 / request.input_tokens as f64
    };
    requests.iter().map(share).collect()
}

#[cfg(test)]
mod tests {
    use super::{super::workload::Prompt, *};

    fn request(input_tokens: u64, blocks: &[u64]) -> Request {
        Request { timestamp: Some(0), output_tokens: Some(100), input_tokens, blocks: blocks.to_vec() }
    }

    fn tokens(ask: Ask) -> Vec<u32> {
        let Prompt::Tokens(tokens) = ask.prompt else { panic!("text") };
        tokens
    }

    #[test]
    fn equal_ids_give_equal_prefixes_and_others_do_not() {
        let synthesis = Synthesis { scale: 0.125, seed: 7 };
        let ask = |input, blocks: &[u64]| tokens(synthesis.ask(&request(input, blocks), &WorkloadArgs::default()));
        let (a, b) = (ask(1400, &[1, 2, 3]), ask(1536, &[1, 2, 9]));
        assert_eq!((a.len(), b.len(), synthesis.block_tokens()), (175, 192, 64));
        assert_eq!(a[..128], b[..128]);
        assert_ne!(a[128..136], b[128..136]);
        assert_eq!(synthesis.ask(&request(1400, &[1, 2, 3]), &WorkloadArgs::default()).output_tokens, 13);
        let other = Synthesis { seed: 8, ..synthesis };
        assert_ne!(tokens(other.ask(&request(1400, &[1, 2, 3]), &WorkloadArgs::default()))[..16], a[..16]);
        // Lengths that round down to nothing become one token.
        let tiny = Synthesis { scale: 1e-6, seed: 7 };
        assert_eq!(tokens(tiny.ask(&request(1400, &[1, 2, 3]), &WorkloadArgs::default())).len(), 1);
    }

    #[test]
    fn cached_shares_are_an_unlimited_caches() {
        let requests = [request(1400, &[1, 2, 3]), request(1400, &[1, 2, 9]), request(600, &[1, 2])];
        assert_eq!(cached_shares(&requests), [0.0, 1024.0 / 1400.0, 1.0]);
    }
}
