//! The requests: conversations with a secret word each, and short questions between them.

use rand::{Rng, SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// A request whose answer must not depend on the content of any cache.
#[derive(Clone, Debug)]
pub struct Ask {
    pub name: String,
    pub messages: Value,
    /// The secret word; `None` for a short question.
    pub secret: Option<String>,
    pub output_tokens: u32,
}

/// The number of parts in which a conversation's user sends the filler.
const TURNS: usize = 4;
const SYSTEM: &str = "You are a careful assistant. You remember what this conversation says, and you know of no other conversation.";
const QUESTION: &str = "What is the secret word of this conversation? Answer with that word alone.";
const SHORT_TOKENS: u32 = 8;
const WORDS: [&str; 24] = [
    "the", "river", "turns", "a", "wheel", "and", "grain", "falls", "between", "two", "stones", "while", "water", "rises", "slowly",
    "past", "old", "gates", "until", "evening", "comes", "with", "wind", "again",
];
const CONSONANTS: &[u8] = b"bdfgklmnprstvz";
const VOWELS: &[u8] = b"aeiou";
const SYLLABLES: usize = 5;

/// The conversations, each with this many words of filler, followed by the short questions.
pub fn all(seed: u64, conversations: usize, filler_words: usize, short: usize, output_tokens: u32) -> Vec<Ask> {
    let mut rng = StdRng::seed_from_u64(seed);
    let secrets = secrets(&mut rng, conversations);
    let chats = secrets.into_iter().enumerate().map(|(n, secret)| {
        let messages = conversation(&secret, filler_words, &mut StdRng::seed_from_u64(seed ^ ((n as u64 + 1) << 32)));
        Ask { name: format!("conversation {n}"), messages, secret: Some(secret), output_tokens }
    });
    let mut asks: Vec<Ask> = chats.collect();
    asks.extend((0..short).map(|n| {
        let (a, b) = (rng.random_range(10..100), rng.random_range(10..100));
        let messages = json!([{"role": "user", "content": format!("Question {n}: what is {a} plus {b}?")}]);
        Ask { name: format!("short question {n}"), messages, secret: None, output_tokens: SHORT_TOKENS.min(output_tokens) }
    }));
    asks
}

/// The order of a pass.
pub fn shuffled(seed: u64, pass: usize, asks: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..asks).collect();
    order.shuffle(&mut StdRng::seed_from_u64(seed.wrapping_add(pass as u64)));
    order
}

/// The messages of a conversation with this secret and this many words of filler.
pub fn conversation(secret: &str, filler_words: usize, rng: &mut StdRng) -> Value {
    let said = |role: &str, content: String| json!({"role": role, "content": content});
    let mut messages = vec![said("system", SYSTEM.into())];
    for turn in 0..TURNS {
        let words = filler_words / TURNS + usize::from(turn < filler_words % TURNS);
        let filler: Vec<&str> = (0..words).map(|_| WORDS[rng.random_range(0..WORDS.len())]).collect();
        let filler = filler.join(" ");
        let content = if turn == 0 { format!("The secret word of this conversation is {secret}. Remember it.\n{filler}") } else { filler };
        messages.extend([said("user", content), said("assistant", "Noted.".into())]);
    }
    messages.push(said("user", QUESTION.into()));
    messages.into()
}

/// Different made-up words of equal length, so that none is part of another.
fn secrets(rng: &mut StdRng, count: usize) -> BTreeSet<String> {
    let mut words = BTreeSet::new();
    while words.len() < count {
        let letters = (0..2 * SYLLABLES).map(|n| {
            let from = if n % 2 == 0 { CONSONANTS } else { VOWELS };
            char::from(from[rng.random_range(0..from.len())])
        });
        words.insert(letters.collect());
    }
    words
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_conversation_holds_its_own_secret_and_no_other() {
        let asks = all(7, 5, 100, 3, 16);
        assert_eq!((asks.len(), asks.iter().filter(|ask| ask.secret.is_none()).count()), (8, 3));
        let secrets: Vec<&String> = asks.iter().filter_map(|ask| ask.secret.as_ref()).collect();
        for ask in &asks {
            let text = ask.messages.to_string();
            let held: Vec<&&String> = secrets.iter().filter(|secret| text.contains(secret.as_str())).collect();
            assert_eq!(held.into_iter().copied().collect::<Vec<_>>(), ask.secret.iter().collect::<Vec<_>>());
        }
        let words = |ask: &Ask| ask.messages.to_string().split(' ').count();
        assert_eq!(words(&all(7, 1, 140, 0, 16)[0]), words(&asks[0]) + 40);
    }

    #[test]
    fn a_seed_gives_the_same_requests_and_orders() {
        let texts = |seed| all(seed, 3, 50, 2, 16).into_iter().map(|ask| ask.messages.to_string()).collect::<Vec<_>>();
        assert_eq!(texts(1), texts(1));
        assert_ne!(texts(1), texts(2));
        assert_ne!(shuffled(1, 1, 50), shuffled(1, 2, 50));
        let mut order = shuffled(1, 1, 50);
        order.sort_unstable();
        assert!(order.into_iter().eq(0..50));
    }
}
