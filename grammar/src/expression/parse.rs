//! Finds look-around and anchors in an expression. Everything else in it stays text.

use std::ops::Range;

/// The most nested groups.
const DEPTH_MAX: usize = 64;

/// A part of an expression.
#[derive(Clone, Debug)]
pub(super) enum Node {
    /// Text without look-around and anchors, which is left as it is.
    Plain(String),
    Concat(Vec<Node>),
    Or(Vec<Node>),
    Repeat {
        inner: Box<Node>,
        least: u32,
        most: Option<u32>,
    },
    /// A look-ahead, `(?=inner)` or `(?!inner)`, with the places of the text of `inner` and of the look-ahead's end.
    Ahead {
        inner: Box<Node>,
        negative: bool,
        text: Range<usize>,
        end: usize,
    },
    Start,
    End,
}

impl Node {
    fn is_plain(&self) -> bool {
        match self {
            Self::Plain(_) => true,
            Self::Concat(parts) | Self::Or(parts) => parts.iter().all(Self::is_plain),
            Self::Repeat { inner, .. } => inner.is_plain(),
            Self::Ahead { .. } | Self::Start | Self::End => false,
        }
    }

    pub(super) fn looks_around(&self) -> bool {
        match self {
            Self::Plain(_) | Self::Start | Self::End => false,
            Self::Concat(parts) | Self::Or(parts) => parts.iter().any(Self::looks_around),
            Self::Repeat { inner, .. } => inner.looks_around(),
            Self::Ahead { .. } => true,
        }
    }

    /// Whether the part only ever matches the empty text.
    pub(super) fn is_empty(&self) -> bool {
        match self {
            Self::Plain(text) => text.is_empty(),
            Self::Concat(parts) | Self::Or(parts) => parts.iter().all(Self::is_empty),
            Self::Repeat { inner, .. } => inner.is_empty(),
            Self::Ahead { .. } | Self::Start | Self::End => true,
        }
    }

    /// Returns the fewest characters that the part matches, or 0 if that is not known.
    pub(super) fn least(&self) -> usize {
        match self {
            Self::Plain(text) => regex_syntax::parse(text).ok().and_then(|parsed| parsed.properties().minimum_len()).unwrap_or(0),
            Self::Concat(parts) => parts.iter().map(Self::least).sum(),
            Self::Or(options) => options.iter().map(Self::least).min().unwrap_or(0),
            Self::Repeat { inner, least, .. } => inner.least().saturating_mul(*least as usize),
            Self::Ahead { .. } | Self::Start | Self::End => 0,
        }
    }

    /// Collects the texts of all plain parts.
    pub(super) fn plain<'n>(&'n self, texts: &mut Vec<&'n str>) {
        match self {
            Self::Plain(text) => texts.push(text),
            Self::Concat(parts) | Self::Or(parts) => parts.iter().for_each(|part| part.plain(texts)),
            Self::Repeat { inner, .. } | Self::Ahead { inner, .. } => inner.plain(texts),
            Self::Start | Self::End => {}
        }
    }
}

/// Parses an expression, or returns `None` if it looks behind, refers back, has word boundaries or flags, or is invalid.
pub(super) fn parse(text: &str) -> Option<Node> {
    let mut parser = Parser { text, at: 0 };
    let node = parser.alternatives(DEPTH_MAX)?;
    parser.rest().is_empty().then_some(node)
}

struct Parser<'a> {
    text: &'a str,
    at: usize,
}

impl<'a> Parser<'a> {
    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    fn takes(&mut self, mark: &str) -> bool {
        let found = self.rest().starts_with(mark);
        self.at += if found { mark.len() } else { 0 };
        found
    }

    fn alternatives(&mut self, depth: usize) -> Option<Node> {
        let mut options = vec![self.sequence(depth)?];
        while self.takes("|") {
            options.push(self.sequence(depth)?);
        }
        Some(if options.len() == 1 { options.remove(0) } else { Node::Or(options) })
    }

    fn sequence(&mut self, depth: usize) -> Option<Node> {
        let mut parts: Vec<Node> = Vec::new();
        while !self.rest().is_empty() && !self.rest().starts_with(['|', ')']) {
            let start = self.at;
            let part = self.atom(depth)?;
            let quantifier = self.quantifier()?;
            match (part, quantifier) {
                (None, _) => match parts.last_mut() {
                    Some(Node::Plain(text)) => text.push_str(&self.text[start..self.at]),
                    _ => parts.push(Node::Plain(self.text[start..self.at].to_owned())),
                },
                (Some(part), None) => parts.push(part),
                (Some(Node::Ahead { .. } | Node::Start | Node::End), Some(_)) => return None,
                (Some(part), Some((least, most))) => parts.push(Node::Repeat { inner: Box::new(part), least, most }),
            }
        }
        Some(match parts.len() {
            0 => Node::Plain(String::new()),
            1 => parts.remove(0),
            _ => Node::Concat(parts),
        })
    }

    /// Parses one atom, and returns `Some(None)` for one that is plain.
    fn atom(&mut self, depth: usize) -> Option<Option<Node>> {
        let mut chars = self.rest().chars();
        match chars.next()? {
            '^' => {
                self.at += 1;
                Some(Some(Node::Start))
            }
            '$' => {
                self.at += 1;
                Some(Some(Node::End))
            }
            '(' => self.group(depth.checked_sub(1)?),
            '[' => self.class().map(|()| None),
            '\\' => {
                let escaped = chars.next()?;
                if matches!(escaped, 'b' | 'B' | 'A' | 'z' | 'k' | 'c' | '1'..='9') {
                    return None;
                }
                self.at += 1 + escaped.len_utf8();
                Some(None)
            }
            '*' | '+' | '?' => None,
            other => {
                self.at += other.len_utf8();
                Some(None)
            }
        }
    }

    fn group(&mut self, depth: usize) -> Option<Option<Node>> {
        let ahead = [("(?=", false), ("(?!", true)].into_iter().find(|(mark, _)| self.rest().starts_with(mark));
        if let Some((mark, negative)) = ahead {
            self.at += mark.len();
            let start = self.at;
            let inner = Box::new(self.alternatives(depth)?);
            let text = start..self.at;
            return self.takes(")").then_some(Some(Node::Ahead { inner, negative, text, end: self.at }));
        }
        if self.rest().starts_with("(?<=") || self.rest().starts_with("(?<!") {
            return None;
        }
        if self.takes("(?<") || self.takes("(?P<") {
            self.at += self.rest().find('>')? + 1;
        } else if !self.takes("(?:") {
            self.takes("(");
            if self.rest().starts_with('?') {
                return None;
            }
        }
        let inner = self.alternatives(depth)?;
        self.takes(")").then(|| Some(inner).filter(|inner| !inner.is_plain()))
    }

    fn class(&mut self) -> Option<()> {
        let mut escaped = false;
        for (i, c) in self.rest().char_indices().skip(1) {
            match c {
                _ if escaped => escaped = false,
                '\\' => escaped = true,
                ']' => {
                    self.at += i + 1;
                    return Some(());
                }
                _ => {}
            }
        }
        None
    }

    /// Parses a quantifier if there is one, and returns `None` for one that is malformed.
    #[allow(clippy::type_complexity)]
    fn quantifier(&mut self) -> Option<Option<(u32, Option<u32>)>> {
        let range = match self.rest().chars().next() {
            Some('*') => (0, None),
            Some('+') => (1, None),
            Some('?') => (0, Some(1)),
            Some('{') if self.rest()[1..].starts_with(|c: char| c.is_ascii_digit()) => {
                let inner = &self.rest()[1..self.rest().find('}')?];
                let (least, most) = inner.split_once(',').unwrap_or((inner, inner));
                let most = if most.is_empty() { None } else { Some(most.parse().ok()?) };
                self.at += inner.len() + 1;
                (least.parse().ok()?, most)
            }
            _ => return Some(None),
        };
        self.at += 1;
        // The whole match is the same, greedy or not.
        self.takes("?");
        (!self.rest().starts_with(['*', '+', '?'])).then_some(Some(range))
    }
}
