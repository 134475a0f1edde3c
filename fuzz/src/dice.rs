//! The choices of one case, all derived from its seed.

use rand::{Rng, SeedableRng, rngs::SmallRng};

/// The most bytes of an input that are kept for display.
const SHOWN_BYTES_MAX: usize = 2000;

pub(crate) struct Dice {
    rng: SmallRng,
    /// Whether inputs are printed at once, and in full.
    aloud: bool,
    shown: Vec<String>,
}

impl Dice {
    pub(crate) fn new(seed: u64, aloud: bool) -> Self {
        Self { rng: SmallRng::seed_from_u64(seed), aloud, shown: Vec::new() }
    }

    /// Notes an input before the code under test gets it.
    pub(crate) fn show(&mut self, what: &str, input: &[u8]) {
        let printable = |bytes: &[u8]| match std::str::from_utf8(bytes) {
            Ok(text) => text.to_owned(),
            Err(_) => bytes.escape_ascii().to_string(),
        };
        if self.aloud {
            println!("{what}: {}", printable(input));
        } else {
            let cut = if input.len() > SHOWN_BYTES_MAX { " …" } else { "" };
            self.shown.push(format!("{what}: {}{cut}", printable(&input[..input.len().min(SHOWN_BYTES_MAX)])));
        }
    }

    pub(crate) fn shown(&self) -> String {
        self.shown.join("\n")
    }

    /// A number below `n`, which is at least 1.
    pub(crate) fn below(&mut self, n: usize) -> usize {
        self.rng.random_range(0..n.max(1))
    }

    pub(crate) fn one_in(&mut self, n: usize) -> bool {
        self.below(n) == 0
    }

    pub(crate) fn pick<'a, T>(&mut self, of: &'a [T]) -> &'a T {
        &of[self.below(of.len())]
    }

    /// Usually 1, rarely many, at most `most`.
    pub(crate) fn few(&mut self, most: usize) -> usize {
        let mut n = 1;
        while n < most && self.one_in(2) {
            n += 1 + n / 2;
        }
        n.min(most)
    }

    pub(crate) fn byte(&mut self) -> u8 {
        self.rng.random()
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.rng.random()
    }

    /// An integer at the edges of types and of limits, or near zero.
    pub(crate) fn integer(&mut self) -> i128 {
        let edge = 1i128 << self.below(66);
        match self.below(6) {
            0 => edge,
            1 => -edge,
            2 => edge - 1,
            3 => edge + 1,
            4 => i128::from(self.rng.random::<i64>()),
            _ => self.below(40) as i128 - 3,
        }
    }

    /// A text that is often too unusual for some reader.
    pub(crate) fn odd_text(&mut self) -> String {
        let piece = (*self.pick(ODD)).to_owned();
        match self.below(8) {
            0 => piece.repeat(self.below(200)),
            1 => piece.repeat(self.below(20_000)),
            2 => format!("{piece}{}", self.pick(ODD)),
            3 => (0..self.below(40)).map(|_| char::from_u32(self.bits() as u32 & 0x1f_ffff).unwrap_or('\u{fffd}')).collect(),
            _ => piece,
        }
    }
}

/// Characters that are invisible, wide, combining, reserved, quoting, or special to some reader.
const ODD: &[&str] = &[
    "",
    " ",
    "a",
    "\0",
    "\n",
    "\r\n",
    "\u{feff}",
    "\u{200d}",
    "\u{202e}",
    "é",
    "e\u{301}",
    "\u{301}",
    "ﷺ",
    "𝔘",
    "👩‍👩‍👧",
    "\u{10ffff}",
    "\u{fffd}",
    "\\",
    "\"",
    "'",
    "`",
    "{{",
    "}}",
    "{%",
    "<",
    ">",
    "&",
    "<|user|>",
    "<|end|>",
    "<|im_start|>",
    "<s>",
    "</s>",
    "<tool_call>",
    "</think>",
    "<think>",
    "[INST]",
    "../",
    "..%2f",
    "%00",
    "%",
    "?",
    "#",
    "null",
    "true",
    "-1",
    "1e999",
    "NaN",
    "$ref",
    "#/$defs/x",
    "__proto__",
    "^",
    "$",
    "(",
    ")",
    "[",
    "]",
    "{",
    "}",
    "(?=",
    ".*",
    "\\d+",
    "\\p{L}",
    "::=",
    "data: ",
    "[DONE]",
    "user",
    "assistant",
    "system",
    "tool",
    "function",
];
