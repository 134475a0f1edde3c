//! The requests: sessions of one or several turns. The same seed gives the same sessions; after a shared prefix, their prompts differ from
//! each other.

use super::{
    arrivals,
    chats::{self, Chat},
    length::Length,
    trace::Synthesis,
};
use crate::replay::trace::{self, Request};
use anyhow::ensure;
use rand::{Rng, SeedableRng, rngs::StdRng};
use serde::Serialize;
use std::{path::PathBuf, time::Duration};

/// Prompts and answers.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct WorkloadArgs {
    /// Prompt length in tokens: `512`, drawn evenly from `128-1024`, or `lognormal/MEDIAN/SIGMA[/MAX]`.
    #[arg(long, default_value = "512")]
    pub input_len: Length,
    /// Answer length in tokens, in the same forms.
    #[arg(long, default_value = "128")]
    pub output_len: Length,
    /// Draw both lengths, in pairs, from the requests of a trace in Mooncake's format.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["input_len", "output_len", "chats"])]
    pub lengths_from: Option<PathBuf>,
    /// Draw chats from a file: one JSON object per line with `conversations` (`from`, `value`: ShareGPT) or `messages` (`role`, `content`).
    /// Users' messages are those in the file; answers may be as long as those there, at four characters per token.
    #[arg(long, value_name = "FILE", requires = "chat", conflicts_with_all = ["input_len", "output_len", "prefix_len"])]
    pub chats: Option<PathBuf>,
    /// Use the requests of a trace in Mooncake's format, from its beginning, with synthetic prompts: equal `hash_ids` give equal prefixes.
    #[arg(long, value_name = "FILE", conflicts_with_all = ["input_len", "output_len", "prefix_len", "lengths_from", "chats", "turns"])]
    pub trace: Option<PathBuf>,
    /// Factor on the lengths of a trace's prompts and answers.
    #[arg(long, default_value_t = 1.0, value_parser = arrivals::positive)]
    pub trace_scale: f64,
    /// Leading tokens that all prompts have in common.
    #[arg(long, default_value_t = 0)]
    pub prefix_len: u32,
    /// Turns of a chat. Each repeats everything said before, with the server's own answers. --requests then counts chats.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub turns: u32,
    /// Seconds that a user thinks before the next turn or request: the mean of an exponential distribution.
    #[arg(long, default_value_t = 0.0)]
    pub think_s: f64,
    /// Prompts as token ids, or as words for servers that only accept text.
    #[arg(long, value_enum, default_value_t = PromptKind::Tokens)]
    pub prompt: PromptKind,
    /// Bound of the token ids that are drawn; the default fits every vocabulary.
    #[arg(long, default_value_t = 256, value_parser = clap::value_parser!(u32).range(16..))]
    pub vocab: u32,
}

/// The defaults of the flags.
impl Default for WorkloadArgs {
    fn default() -> Self {
        Self {
            input_len: Length::fixed(512),
            output_len: Length::fixed(128),
            lengths_from: None,
            chats: None,
            trace: None,
            trace_scale: 1.0,
            prefix_len: 0,
            turns: 1,
            think_s: 0.0,
            prompt: PromptKind::Tokens,
            vocab: 256,
        }
    }
}

/// The form of prompts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum PromptKind {
    /// Token ids, whose lengths are exact. The server must accept them.
    Tokens,
    /// Common words: about one token each, depending on the server's tokenizer.
    Text,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Prompt {
    Tokens(Vec<u32>),
    Text(String),
}

/// One request's prompt (in a later turn, the new part of it), and the answer's length.
#[derive(Clone, Debug, PartialEq)]
pub struct Ask {
    pub prompt: Prompt,
    pub output_tokens: u32,
}

/// Turns of one user, each sent when the one before is answered and the user has thought about it.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    pub turns: Vec<Turn>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// The time that the user thinks before the turn.
    pub think: Duration,
    pub ask: Ask,
}

/// A source of [`Session`]s.
#[derive(Clone, Debug)]
pub struct Workload {
    args: WorkloadArgs,
    /// The lengths of prompts and answers in a trace.
    lengths: Vec<(u32, u32)>,
    chats: Vec<Chat>,
    trace: Vec<Request>,
}

const THINK_S_MAX: f64 = 3600.0;

impl Workload {
    /// Reads the files that the workload names.
    pub fn new(args: &WorkloadArgs) -> anyhow::Result<Workload> {
        ensure!((0.0..=THINK_S_MAX).contains(&args.think_s), "--think-s: from 0 to {THINK_S_MAX}");
        let mut lengths = Vec::new();
        if let Some(path) = &args.lengths_from {
            let of = |request: trace::Request| {
                (request.input_tokens as u32, request.output_tokens.unwrap_or(1).clamp(1, u32::MAX.into()) as u32)
            };
            lengths.extend(trace::read(path)?.into_iter().map(of));
        }
        let chats = args.chats.as_deref().map(chats::read).transpose()?.unwrap_or_default();
        let trace = args.trace.as_deref().map(trace::read).transpose()?.unwrap_or_default();
        Ok(Workload { args: args.clone(), lengths, chats, trace })
    }

    pub fn draw(&self, sessions: usize, seed: u64) -> Vec<Session> {
        if !self.trace.is_empty() {
            // A trace that is too short is repeated; its prompts are then known.
            let requests = self.trace.iter().cycle().take(sessions);
            return requests.map(|request| self.of_trace(request, seed)).collect();
        }
        let mut rng = StdRng::seed_from_u64(seed);
        let prefix: Vec<u32> = (0..self.args.prefix_len).map(|_| self.token(&mut rng)).collect();
        (0..sessions).map(|_| self.session(&prefix, &mut rng)).collect()
    }

    pub fn of_trace(&self, request: &Request, seed: u64) -> Session {
        let ask = Synthesis { scale: self.args.trace_scale, seed }.ask(request, &self.args);
        Session { turns: vec![Turn { think: Duration::ZERO, ask }] }
    }

    fn session(&self, prefix: &[u32], rng: &mut StdRng) -> Session {
        if !self.chats.is_empty() {
            let chat = &self.chats[rng.random_range(0..self.chats.len())];
            let turn = |said: &chats::Turn| Turn {
                think: self.think(rng),
                ask: Ask { prompt: Prompt::Text(said.user.clone()), output_tokens: said.answer_tokens },
            };
            let most = if self.args.turns > 1 { self.args.turns as usize } else { usize::MAX };
            return Session { turns: chat.turns.iter().take(most).map(turn).collect() };
        }
        let turn = |number| {
            let (input, output) = match self.lengths.as_slice() {
                [] => (self.args.input_len.draw(rng), self.args.output_len.draw(rng)),
                lengths => lengths[rng.random_range(0..lengths.len())],
            };
            // The prefix is part of the first prompt's length; no prompt is shorter.
            let shared = if number == 0 { prefix } else { &[] };
            let own: Vec<u32> = (shared.len() as u32..input).map(|_| self.token(rng)).collect();
            let ask = Ask { prompt: self.args.prompt([shared, &own].concat()), output_tokens: output };
            Turn { think: self.think(rng), ask }
        };
        Session { turns: (0..self.args.turns).map(turn).collect() }
    }

    fn think(&self, rng: &mut StdRng) -> Duration {
        // `random` is below 1, so the logarithm is finite.
        Duration::from_secs_f64(-(1.0 - rng.random::<f64>()).ln() * self.args.think_s)
    }

    /// The lowest ids are left out, since models keep their special tokens there.
    fn token(&self, rng: &mut StdRng) -> u32 {
        rng.random_range(SPECIAL.min(self.args.vocab - 1)..self.args.vocab)
    }
}

impl WorkloadArgs {
    /// A prompt of `tokens` in this workload's form.
    pub fn prompt(&self, tokens: Vec<u32>) -> Prompt {
        match self.prompt {
            PromptKind::Tokens => Prompt::Tokens(tokens),
            PromptKind::Text => {
                let words: Vec<&str> = tokens.iter().map(|token| WORDS[*token as usize % WORDS.len()]).collect();
                Prompt::Text(words.join(" "))
            }
        }
    }
}

/// The ids below this are left to models' special tokens.
pub const SPECIAL: u32 = 8;

/// The most frequent English words: one token each in most tokenizers.
const WORDS: [&str; 64] = [
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with", "his", "they", "at", "be",
    "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what", "all", "were", "we", "when", "your", "can", "said",
    "there", "use", "an", "each", "which", "she", "do", "how", "their", "if", "will", "up", "other", "about", "out", "many", "then",
    "them", "these", "so", "some", "her", "would", "make", "like", "him",
];

#[cfg(test)]
mod tests {
    use super::*;

    fn args(prompt: PromptKind) -> WorkloadArgs {
        WorkloadArgs { input_len: Length::Even(20..=40), output_len: Length::fixed(5), prefix_len: 16, prompt, ..WorkloadArgs::default() }
    }

    fn draw(args: &WorkloadArgs, sessions: usize) -> Vec<Session> {
        Workload::new(args).unwrap().draw(sessions, 3)
    }

    fn tokens(session: &Session) -> &[u32] {
        match &session.turns[0].ask.prompt {
            Prompt::Tokens(tokens) => tokens,
            Prompt::Text(text) => panic!("text: {text}"),
        }
    }

    fn words(turn: &Turn) -> usize {
        let Prompt::Text(text) = &turn.ask.prompt else { panic!("tokens") };
        text.split(' ').count()
    }

    #[test]
    fn prompts_share_their_prefix_and_nothing_more() {
        let sessions = draw(&args(PromptKind::Tokens), 200);
        assert_eq!(sessions, draw(&args(PromptKind::Tokens), 200));
        let mut lengths: Vec<usize> = sessions.iter().map(|session| tokens(session).len()).collect();
        lengths.sort();
        lengths.dedup();
        assert_eq!(lengths, Vec::from_iter(20..=40), "every length of the range comes up");
        for pair in sessions.windows(2) {
            let (a, b) = (tokens(&pair[0]), tokens(&pair[1]));
            assert_eq!(a[..16], b[..16]);
            assert_ne!(a[16..20], b[16..20]);
            assert!(a.iter().all(|token| (SPECIAL..256).contains(token)));
        }
    }

    #[test]
    fn no_prompt_is_shorter_than_the_prefix() {
        let short = WorkloadArgs { input_len: Length::fixed(1), ..args(PromptKind::Tokens) };
        assert!(draw(&short, 3).iter().all(|session| tokens(session).len() == 16));
    }

    #[test]
    fn text_has_a_word_for_each_token_and_later_turns_have_no_prefix() {
        let chats = WorkloadArgs { turns: 3, think_s: 2.0, input_len: Length::fixed(20), ..args(PromptKind::Text) };
        let sessions = draw(&chats, 300);
        for session in &sessions {
            assert_eq!(session.turns.iter().map(words).collect::<Vec<_>>(), [20, 20, 20]);
        }
        let prefix = |turn: &Turn| match &turn.ask.prompt {
            Prompt::Text(text) => text.split(' ').take(16).collect::<Vec<_>>().join(" "),
            Prompt::Tokens(_) => panic!("tokens"),
        };
        assert_eq!(prefix(&sessions[0].turns[0]), prefix(&sessions[1].turns[0]));
        assert_ne!(prefix(&sessions[0].turns[1]), prefix(&sessions[1].turns[1]));
        let thought: f64 = sessions.iter().flat_map(|session| &session.turns).map(|turn| turn.think.as_secs_f64()).sum();
        assert!((thought / 900.0 - 2.0).abs() < 0.3, "{thought}");
    }

    #[test]
    fn lengths_come_in_the_pairs_of_a_trace() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("trace.jsonl");
        std::fs::write(
            &path,
            "{\"input_length\": 100, \"output_length\": 7, \"hash_ids\": [1]}\n{\"input_length\": 30, \"output_length\": 9, \"hash_ids\": [2]}\n",
        )
        .unwrap();
        let from = WorkloadArgs { lengths_from: Some(path), prefix_len: 0, ..args(PromptKind::Tokens) };
        let mut pairs: Vec<_> = draw(&from, 50).iter().map(|s| (tokens(s).len(), s.turns[0].ask.output_tokens)).collect();
        pairs.sort();
        pairs.dedup();
        assert_eq!(pairs, [(30, 9), (100, 7)]);
    }
}
