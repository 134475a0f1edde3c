//! The estimated difficulty of a request: a linear score over five signals, each from 0 to 1.
//!
//! | signal | 0 | 1 |
//! |---|---|---|
//! | `length` | no text | 8 KiB or more |
//! | `code` | none | a fenced block, or five lines that look like code |
//! | `math` | none | three signs of it: a symbol, a TeX command, a word such as `prove` |
//! | `tools` | none | eight or more |
//! | `history` | one message | eleven or more |
//!
//! The score is the weighted sum of the signals. It only considers form: it is cheap, and sometimes wrong.

/// The weights, and the threshold of difficulty.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Scale {
    pub length: f64,
    pub code: f64,
    pub math: f64,
    pub tools: f64,
    pub history: f64,
    /// The score from which a request counts as difficult.
    pub threshold: f64,
}

impl Default for Scale {
    /// One strong signal is enough, and so are two weak ones.
    fn default() -> Self {
        Self { length: 0.5, code: 0.4, math: 0.4, tools: 0.3, history: 0.2, threshold: 0.35 }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Signals {
    pub length: f64,
    pub code: f64,
    pub math: f64,
    pub tools: f64,
    pub history: f64,
}

const LONG_BYTES: f64 = 8192.0;
const CODE_LINES: f64 = 5.0;
const MATH_MARKS: f64 = 3.0;
const MANY_TOOLS: f64 = 8.0;
const MANY_TURNS: f64 = 10.0;

/// Characters at the end of lines of code.
const CODE_ENDS: [char; 3] = [';', '{', '}'];
/// The beginnings of lines of code.
const CODE_BEGINS: [&str; 14] = [
    "def ",
    "fn ",
    "class ",
    "import ",
    "from ",
    "#include",
    "SELECT ",
    "function ",
    "return ",
    "public ",
    "const ",
    "let ",
    "$ ",
    "diff --git",
];
const MATH_SIGNS: [char; 12] = ['∑', '∫', '√', '≤', '≥', '≠', '∞', '∂', '∈', '⇒', '≡', 'π'];
const MATH_WORDS: [&str; 14] = [
    "\\frac",
    "\\sum",
    "\\int",
    "\\sqrt",
    "$$",
    "prove",
    "theorem",
    "integral",
    "derivative",
    "equation",
    "polynomial",
    "probability",
    "matrix",
    "modulo",
];

impl Scale {
    pub fn score(&self, signals: &Signals) -> f64 {
        self.length * signals.length
            + self.code * signals.code
            + self.math * signals.math
            + self.tools * signals.tools
            + self.history * signals.history
    }
}

impl Signals {
    /// Reads the signals of `text`, the beginning of a prompt of `bytes` bytes.
    pub fn of(text: &str, bytes: u64, tools: usize, turns: usize) -> Self {
        let share = |count: f64, full: f64| (count / full).min(1.0);
        Self {
            length: share(bytes as f64, LONG_BYTES),
            code: if text.contains("```") { 1.0 } else { share(code_lines(text) as f64, CODE_LINES) },
            math: share(math_marks(text) as f64, MATH_MARKS),
            tools: share(tools as f64, MANY_TOOLS),
            history: share(turns.saturating_sub(1) as f64, MANY_TURNS),
        }
    }
}

fn code_lines(text: &str) -> usize {
    let is_code = |line: &str| line.ends_with(CODE_ENDS) || CODE_BEGINS.iter().any(|begin| line.starts_with(begin));
    text.lines().map(str::trim).filter(|line| is_code(line)).count()
}

fn math_marks(text: &str) -> usize {
    let text = text.to_lowercase();
    let words: usize = MATH_WORDS.iter().map(|word| text.matches(word).count()).sum();
    words + text.chars().filter(|c| MATH_SIGNS.contains(c)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_looks_hard_is_told_from_what_does_not() {
        let hard = |text: &str, tools, turns| {
            let score = Scale::default().score(&Signals::of(text, text.len() as u64, tools, turns));
            (score >= Scale::default().threshold, score)
        };
        for (text, tools, turns, expected) in [
            ("What is the capital of France?", 0, 1, false),
            ("Write a short poem about the sea; make it rhyme.", 0, 3, false),
            ("Please fix this:\n```python\nprint(1\n```", 0, 1, true),
            ("fn main() {\n    let x = 1;\n    let y = 2;\n    println!(\"{x}{y}\");\n}", 0, 1, true),
            ("Prove that the sum of two even numbers is even, and solve the equation x^2 = 4 with its derivative.", 0, 1, true),
            ("Where is my order?", 8, 1, false),
            ("Where is my order?", 8, 6, true),
            (&"A long report about nothing in particular. ".repeat(200), 0, 1, true),
        ] {
            let (got, score) = hard(text, tools, turns);
            assert_eq!(got, expected, "{score:.2} {}", &text[..30.min(text.len())]);
        }
    }

    #[test]
    fn the_score_is_linear_in_its_weights() {
        let signals = Signals { length: 0.5, code: 1.0, math: 0.25, tools: 0.0, history: 1.0 };
        let scale = Scale { length: 1.0, code: 2.0, math: 4.0, tools: 8.0, history: 16.0, threshold: 0.0 };
        assert_eq!(scale.score(&signals), 0.5 + 2.0 + 1.0 + 16.0);
        assert_eq!(Scale::default().score(&Signals::default()), 0.0);
    }
}
