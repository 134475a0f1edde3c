//! Converts llama.cpp's grammars (GBNF) to Lark.
//!
//! ```text
//!   root  ::= "yes" | list          start: "yes" | list
//!   list  ::= [a-z]+ ("," list)?    list: /[a-z]/+ ("," list)?
//! ```
//!
//! A literal is one lexeme, and so is one character of a class. If two lexemes fit the same text, the longer one is read, so an ambiguous
//! grammar may allow less than it does in llama.cpp, and never more.

use crate::lark;
use std::{
    collections::{HashMap, HashSet},
    fmt::Write,
    iter::Peekable,
    str::CharIndices,
};

/// The most nested parentheses.
const DEPTH_MAX: usize = 200;
/// The most repetitions of one item, each applied to the previous one. Each encloses everything before it.
const REPEATED_MAX: usize = 16;

/// An error in a grammar, and its line.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("line {line}: {problem}")]
pub struct GbnfError {
    line: usize,
    problem: String,
}

/// Whether a grammar is GBNF: its rules are written with `::=`, which Lark does not have.
pub fn is_gbnf(grammar: &str) -> bool {
    grammar.lines().any(|line| {
        let name = line.split("::=").next().unwrap_or_default();
        line.contains("::=") && !name.trim().is_empty() && name.trim().chars().all(is_name)
    })
}

/// Returns the same language in Lark.
pub fn to_lark(grammar: &str) -> Result<String, GbnfError> {
    let tokens = tokens(grammar)?;
    let mut parser = Parser { tokens: &tokens, at: 0, names: HashMap::new(), defined: HashSet::new(), used: Vec::new() };
    let mut lark = String::new();
    while parser.at < tokens.len() {
        parser.rule(&mut lark)?;
    }
    if let Some((name, line)) = parser.used.iter().find(|(name, _)| !parser.defined.contains(name)) {
        return Err(GbnfError { line: *line, problem: format!("there is no rule `{name}`") });
    }
    match parser.defined.contains("root") {
        true => Ok(lark),
        false => Err(GbnfError { line: 1, problem: "there is no rule `root`".into() }),
    }
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Name(String),
    Defines,
    Literal(String),
    /// An expression for one character.
    Class(String),
    Mark(char),
    /// The least and the most repetitions.
    Times(u32, Option<u32>),
}

fn is_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '-' || c == '_'
}

fn tokens(grammar: &str) -> Result<Vec<(Token, usize)>, GbnfError> {
    let mut chars = grammar.char_indices().peekable();
    let mut line = 1;
    let mut tokens = Vec::new();
    while let Some((at, c)) = chars.next() {
        let fail = |problem: String| GbnfError { line, problem };
        let token = match c {
            '\n' => {
                line += 1;
                continue;
            }
            _ if c.is_whitespace() => continue,
            '#' => {
                while chars.next_if(|&(_, c)| c != '\n').is_some() {}
                continue;
            }
            ':' if grammar[at..].starts_with("::=") => {
                chars.nth(1);
                Token::Defines
            }
            '"' => Token::Literal(literal(&mut chars).map_err(fail)?),
            '[' => Token::Class(class(&mut chars).map_err(fail)?),
            '{' => times(&mut chars).map_err(fail)?,
            '.' => Token::Class(r"(?s:.)".into()),
            '|' | '(' | ')' | '*' | '+' | '?' => Token::Mark(c),
            _ if is_name(c) => {
                let mut name = c.to_string();
                while let Some((_, c)) = chars.next_if(|&(_, c)| is_name(c)) {
                    name.push(c);
                }
                Token::Name(name)
            }
            _ => return Err(fail(format!("`{c}` does not belong here"))),
        };
        tokens.push((token, line));
    }
    Ok(tokens)
}

type Chars<'a> = Peekable<CharIndices<'a>>;

fn literal(chars: &mut Chars<'_>) -> Result<String, String> {
    let mut text = String::new();
    loop {
        match chars.next() {
            None | Some((_, '\n')) => return Err("a literal does not end on its line".into()),
            Some((_, '"')) => return Ok(text),
            Some((_, '\\')) => text.push(escape(chars)?),
            Some((_, c)) => text.push(c),
        }
    }
}

fn class(chars: &mut Chars<'_>) -> Result<String, String> {
    let mut expression = "[".to_owned();
    if chars.next_if(|&(_, c)| c == '^').is_some() {
        expression.push('^');
    }
    let mut is_empty = true;
    loop {
        let first = match chars.next() {
            None => return Err("a class of characters does not end".into()),
            Some((_, ']')) if is_empty => return Err("a class of characters is empty".into()),
            Some((_, ']')) => return Ok(expression + "]"),
            Some((_, '\\')) => escape(chars)?,
            Some((_, c)) => c,
        };
        is_empty = false;
        let _ = write!(expression, "\\x{{{:X}}}", u32::from(first));
        let mut ahead = chars.clone();
        if ahead.next().is_some_and(|(_, c)| c == '-') && ahead.next().is_some_and(|(_, c)| c != ']') {
            chars.next();
            let last = match chars.next() {
                Some((_, '\\')) => escape(chars)?,
                Some((_, c)) => c,
                None => return Err("a class of characters does not end".into()),
            };
            if last < first {
                return Err(format!("the range `{first}-{last}` ends before it begins"));
            }
            let _ = write!(expression, "-\\x{{{:X}}}", u32::from(last));
        }
    }
}

fn escape(chars: &mut Chars<'_>) -> Result<char, String> {
    let (_, c) = chars.next().ok_or("an escape does not end")?;
    let digits = match c {
        'n' => return Ok('\n'),
        'r' => return Ok('\r'),
        't' => return Ok('\t'),
        'x' => 2,
        'u' => 4,
        'U' => 8,
        '\\' | '"' | '[' | ']' | '-' | '^' | '/' | '\'' => return Ok(c),
        _ => return Err(format!("`\\{c}` is no escape")),
    };
    let code: String = chars.by_ref().take(digits).map(|(_, c)| c).collect();
    let code = u32::from_str_radix(&code, 16).ok().filter(|_| code.len() == digits).and_then(char::from_u32);
    code.ok_or_else(|| format!("`\\{c}` needs {digits} hexadecimal digits of a character"))
}

/// Parses `3}`, `3,}` or `3,5}`.
fn times(chars: &mut Chars<'_>) -> Result<Token, String> {
    let inner: String = std::iter::from_fn(|| chars.next_if(|&(_, c)| c != '}' && c != '\n')).map(|(_, c)| c).collect();
    let wrong = || format!("`{{{inner}}}` is no number of times");
    if chars.next().is_none_or(|(_, c)| c != '}') {
        return Err(wrong());
    }
    let number = |text: &str| text.trim().parse::<u32>().map_err(|_| wrong());
    match inner.split_once(',') {
        None => number(&inner).map(|times| Token::Times(times, Some(times))),
        Some((least, "")) => Ok(Token::Times(number(least)?, None)),
        Some((least, most)) => {
            let (least, most) = (number(least)?, number(most)?);
            if least <= most { Ok(Token::Times(least, Some(most))) } else { Err(wrong()) }
        }
    }
}

struct Parser<'a> {
    tokens: &'a [(Token, usize)],
    at: usize,
    /// Lark's names of the rules.
    names: HashMap<String, String>,
    defined: HashSet<String>,
    used: Vec<(String, usize)>,
}

impl Parser<'_> {
    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.at).map(|(token, _)| token)
    }

    fn fail<T>(&self, problem: impl Into<String>) -> Result<T, GbnfError> {
        let line = self.tokens.get(self.at).or(self.tokens.last()).map_or(1, |(_, line)| *line);
        Err(GbnfError { line, problem: problem.into() })
    }

    /// Whether the next rule begins here, which ends this one.
    fn begins_rule(&self) -> bool {
        matches!(self.tokens.get(self.at..self.at + 2), Some([(Token::Name(_), _), (Token::Defines, _)]))
    }

    fn rule(&mut self, lark: &mut String) -> Result<(), GbnfError> {
        let (true, Some(Token::Name(name))) = (self.begins_rule(), self.peek().cloned()) else {
            return self.fail("a rule begins with its name and `::=`");
        };
        self.at += 2;
        let _ = write!(lark, "{}: ", self.name(&name));
        if let Some(twice) = self.defined.replace(name) {
            return self.fail(format!("there are two rules `{twice}`"));
        }
        self.alternatives(lark, 0)?;
        lark.push('\n');
        if self.peek().is_some() && !self.begins_rule() {
            return self.fail("this does not belong here");
        }
        Ok(())
    }

    fn alternatives(&mut self, lark: &mut String, depth: usize) -> Result<(), GbnfError> {
        if depth > DEPTH_MAX {
            return self.fail(format!("more than {DEPTH_MAX} parentheses lie in each other"));
        }
        loop {
            self.sequence(lark, depth)?;
            if self.peek() != Some(&Token::Mark('|')) {
                return Ok(());
            }
            self.at += 1;
            lark.push_str(" | ");
        }
    }

    fn sequence(&mut self, lark: &mut String, depth: usize) -> Result<(), GbnfError> {
        let start = lark.len();
        while let Some(token) = self.peek().cloned()
            && !self.begins_rule()
        {
            let item = match token {
                Token::Name(name) => {
                    self.used.push((name.clone(), self.tokens[self.at].1));
                    self.name(&name)
                }
                Token::Literal(text) => lark::literal(&text),
                Token::Class(expression) => format!("/{expression}/"),
                Token::Mark('(') => {
                    self.at += 1;
                    let mut inner = "(".to_owned();
                    self.alternatives(&mut inner, depth + 1)?;
                    if self.peek() != Some(&Token::Mark(')')) {
                        return self.fail("a parenthesis does not end");
                    }
                    inner + ")"
                }
                _ => break,
            };
            self.at += 1;
            let item = self.repeated(item)?;
            if lark.len() > start {
                lark.push(' ');
            }
            lark.push_str(&item);
        }
        if lark.len() == start {
            lark.push_str("\"\"");
        }
        Ok(())
    }

    fn repeated(&mut self, mut item: String) -> Result<String, GbnfError> {
        for _ in 0..REPEATED_MAX {
            let is_group = item.starts_with('(') && item.ends_with(')');
            let group = if is_group { item.clone() } else { format!("({item})") };
            item = match self.peek() {
                Some(Token::Mark(mark @ ('*' | '+' | '?'))) => format!("{group}{mark}"),
                Some(Token::Times(_, Some(0))) => "\"\"".into(),
                Some(Token::Times(least, None)) => format!("{group}{{{least},}}"),
                Some(Token::Times(least, Some(most))) => format!("{group}{{{least},{most}}}"),
                _ => return Ok(item),
            };
            self.at += 1;
        }
        self.fail(format!("more than {REPEATED_MAX} repetitions follow one item"))
    }

    /// The rule's name in Lark, where rules are in lower case, and the first is `start`.
    fn name(&mut self, name: &str) -> String {
        if name == "root" {
            return "start".into();
        }
        let number = self.names.len();
        let lower = || format!("r{number}-{}", name.to_ascii_lowercase());
        self.names.entry(name.to_owned()).or_insert_with(lower).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gbnf_becomes_lark() {
        for (gbnf, lark) in [
            (r#"root ::= "yes" | "no""#, "start: \"yes\" | \"no\"\n"),
            ("root ::= a-B [^\"\\n]* # rest\na-B ::= \"\\x41\\u00e9\"", "start: r0-a-b (/[^\\x{22}\\x{A}]/)*\nr0-a-b: \"Aé\"\n"),
            ("root ::= (\"a\" |\n  [a-z-]{2,3} .)+\n", "start: (\"a\" | (/[\\x{61}-\\x{7A}\\x{2D}]/){2,3} /(?s:.)/)+\n"),
            ("root ::= x{0} x{2} x{1,} |\nx ::= \"\"", "start: \"\" (r0-x){2,2} (r0-x){1,} | \"\"\nr0-x: \"\"\n"),
        ] {
            assert_eq!(to_lark(gbnf).as_deref(), Ok(lark), "{gbnf}");
        }
    }

    #[test]
    fn a_mistake_is_named_with_its_line() {
        for (gbnf, line, word) in [
            ("x ::= \"a\"", 1, "`root`"),
            ("root ::= x", 1, "`x`"),
            ("root ::= \"a\n", 1, "literal"),
            ("root ::= \"a\"\nroot ::= \"b\"", 2, "two rules"),
            ("\nroot ::= (\"a\"", 2, "parenthesis"),
            ("root ::= [z-a]", 1, "ends before"),
            ("root ::= [a", 1, "does not end"),
            ("root ::= \"\\q\"", 1, "no escape"),
            ("root ::= \"\\uD800\"", 1, "hexadecimal"),
            ("root ::= \"a\"{3,1}", 1, "number of times"),
            ("root ::= \"a\" ) \"b\"", 1, "does not belong"),
            ("root ::= %", 1, "does not belong"),
            ("root ::=\n\"a\"++++++++++++++++++++++++++", 2, "repetitions"),
        ] {
            let error = to_lark(gbnf).unwrap_err();
            assert!(error.line == line && error.problem.contains(word), "{gbnf}: {error}");
        }
        let deep = format!("root ::= {}\"a\"{}", "(".repeat(100_000), ")".repeat(100_000));
        assert!(to_lark(&deep).unwrap_err().problem.contains("lie in each other"));
    }

    /// Comparing with each rule before took seconds, and writing everything again for each mark took gigabytes.
    #[test]
    fn many_rules_are_taken_as_quickly_as_few() {
        let rules: String = (0..16_000).map(|i| format!("r{i} ::= \"a\" r{}\n", i + 1)).collect();
        let lark = to_lark(&format!("root ::= r0\n{rules}r16000 ::= \"b\"")).unwrap();
        assert_eq!(lark.lines().count(), 16_002);
        assert!(to_lark(&format!("root ::= \"a\"{}", "*".repeat(250_000))).unwrap_err().problem.contains("repetitions"));
    }

    #[test]
    fn gbnf_is_told_from_lark() {
        assert!(is_gbnf("# a comment\nroot ::= \"a\""));
        assert!(!is_gbnf("start: \"a ::= b\""));
        assert!(!is_gbnf("start: A\nA: /::=/"));
    }
}
