//! A trace's prompts and answers as chains of the pool's blocks of 16 tokens.
//!
//! A trace has one id for 512 tokens of a prompt, and none for answers. Its ids become chains of finer blocks, each with its own key;
//! prompts that share ids share the blocks.
//!
//! **Chats.** Ids never show that a prompt continues an answer, since a turn's last id usually stands for a block that was not full. So a
//! prompt is taken to be the next turn of an earlier request if its known ids end exactly with that request's last full one (which is not
//! the trace's first block, a system prompt that all share), the request came before, and the prompt is at least as long as that request's
//! prompt and answer together. If there are several such requests, the longest counts. The prompt then shares that request's blocks to the
//! end of its answer.

use super::trace::{Request, TRACE_BLOCK_TOKENS};
use std::collections::HashMap;
use tidemill_proto::block::{BLOCK_TOKENS, BlockKey};

/// The blocks of a request.
pub struct Chain {
    /// All full blocks of the prompt and of the answer, without the answer's last token, which is sampled but never computed.
    pub keys: Vec<BlockKey>,
    /// The number of full blocks of the prompt.
    pub prompt_blocks: usize,
    /// The number of the prompt's blocks that can be reused: its last token is always computed.
    pub usable_blocks: usize,
    pub is_next_turn: bool,
}

/// Turns requests into chains, in the order of the trace.
#[derive(Default)]
pub struct Chains {
    /// The blocks of each of the trace's ids.
    blocks: HashMap<u64, Vec<BlockKey>>,
    /// Requests by the id of their last full block.
    turns: HashMap<u64, Vec<Turn>>,
    named: u64,
}

struct Turn {
    timestamp: Option<u64>,
    tokens: u64,
    /// The full blocks after those of the last full id.
    rest: Vec<BlockKey>,
}

/// The number of the pool's blocks in one of the trace.
const FINER: usize = TRACE_BLOCK_TOKENS as usize / BLOCK_TOKENS;

impl Chains {
    pub fn next(&mut self, request: &Request) -> Chain {
        let prompt_blocks = full_blocks(request.input_tokens);
        let known = request.blocks.iter().take_while(|id| self.blocks.contains_key(id)).count();
        let continued = self.continued(request, known).map(|turn| turn.rest.clone());
        let is_next_turn = continued.is_some();
        let mut continued = continued.unwrap_or_default().into_iter();
        let mut keys = Vec::new();
        for (index, id) in request.blocks.iter().enumerate() {
            let full = (prompt_blocks - index * FINER).min(FINER);
            let blocks = self.blocks.entry(*id).or_default();
            while blocks.len() < full {
                blocks.push(continued.next().unwrap_or_else(|| name(&mut self.named)));
            }
            keys.extend_from_slice(&blocks[..full]);
        }
        let tokens = request.input_tokens + request.output_tokens.unwrap_or(0);
        let full_ids = prompt_blocks / FINER;
        keys.extend((prompt_blocks..full_blocks(tokens - 1)).map(|_| name(&mut self.named)));
        if full_ids > 1 {
            let turn = Turn { timestamp: request.timestamp, tokens, rest: keys[full_ids * FINER..].to_vec() };
            self.turns.entry(request.blocks[full_ids - 1]).or_default().push(turn);
        }
        Chain { keys, prompt_blocks, usable_blocks: full_blocks(request.input_tokens - 1), is_next_turn }
    }

    /// The earlier request of which this one, with `known` leading ids known, is the next turn.
    fn continued(&self, request: &Request, known: usize) -> Option<&Turn> {
        let turns = self.turns.get(request.blocks.get(known.checked_sub(1)?)?)?;
        let could_be = |turn: &&Turn| turn.timestamp < request.timestamp && turn.tokens <= request.input_tokens;
        turns.iter().filter(could_be).max_by_key(|turn| turn.tokens)
    }
}

fn full_blocks(tokens: u64) -> usize {
    tokens as usize / BLOCK_TOKENS
}

fn name(named: &mut u64) -> BlockKey {
    *named += 1;
    let mut key = [0; 16];
    key[..8].copy_from_slice(&named.to_le_bytes());
    BlockKey(key)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn request(timestamp: u64, input_tokens: u64, output_tokens: u64, blocks: &[u64]) -> Request {
        Request { timestamp: Some(timestamp), output_tokens: Some(output_tokens), input_tokens, blocks: blocks.to_vec() }
    }

    fn shared(a: &Chain, b: &Chain) -> usize {
        a.keys.iter().zip(&b.keys).take_while(|(a, b)| a == b).count()
    }

    #[test]
    fn a_next_turn_shares_the_answer_and_others_the_ids() {
        let mut chains = Chains::default();
        let first = chains.next(&request(0, 1100, 101, &[1, 2, 3]));
        assert_eq!((first.prompt_blocks, first.usable_blocks, first.keys.len()), (68, 68, 75), "1,200 tokens are computed");
        let next = chains.next(&request(1, 1400, 10, &[1, 2, 4]));
        assert!(next.is_next_turn && shared(&first, &next) == 75);
        let another = chains.next(&request(2, 1150, 10, &[1, 2, 5]));
        assert!(!another.is_next_turn && shared(&first, &another) == 64, "too short to have the answer in it");
        let after = chains.next(&request(2, 1800, 10, &[1, 2, 4, 6]));
        assert!(shared(&next, &after) == 87 && shared(&first, &after) == 75, "an id stands for the same blocks again");
        let at_once = chains.next(&request(0, 1400, 10, &[1, 2, 7]));
        assert_eq!(shared(&first, &at_once), 64, "both came at the same time");
        let stranger = chains.next(&request(3, 1400, 10, &[1, 8, 9]));
        assert!(!stranger.is_next_turn && shared(&first, &stranger) == 32);
    }

    #[test]
    fn a_prompt_computes_its_last_token() {
        let chain = Chains::default().next(&request(0, 512, 0, &[1]));
        assert_eq!((chain.prompt_blocks, chain.usable_blocks, chain.keys.len()), (32, 31, 32));
    }
}
