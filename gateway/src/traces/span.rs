//! Spans: the time of an operation, with attributes; and traces of them that have ended.

use std::time::{Instant, SystemTime};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpanId(u64);

impl SpanId {
    pub fn random() -> Self {
        // 0 stands for no span.
        Self(rand::random::<u64>().max(1))
    }

    pub fn from_bits(bits: u64) -> Self {
        Self(bits)
    }

    pub fn to_bits(self) -> u64 {
        self.0
    }
}

/// A span that has ended.
#[derive(Debug)]
pub struct Span {
    pub id: SpanId,
    /// The parent; `None` for the trace's root, unless the caller has one.
    pub parent: Option<SpanId>,
    pub name: String,
    pub kind: Kind,
    pub from: Instant,
    pub to: Instant,
    pub attributes: Attributes,
    pub failed: Option<String>,
}

/// A trace that has ended, in the form for the collector. Its first span is the root.
#[derive(Debug)]
pub struct EndedTrace {
    pub id: u128,
    /// The calendar time of `began`.
    pub began_at: SystemTime,
    pub began: Instant,
    pub spans: Vec<Span>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// An incoming request.
    Server,
    /// A part of its work.
    Internal,
}

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Text(String),
    Int(i64),
    Float(f64),
    Bool(bool),
}

impl From<&str> for Value {
    fn from(text: &str) -> Self {
        Self::Text(text.to_owned())
    }
}

impl From<i64> for Value {
    fn from(number: i64) -> Self {
        Self::Int(number)
    }
}

impl From<u64> for Value {
    fn from(number: u64) -> Self {
        Self::Int(number.try_into().unwrap_or(i64::MAX))
    }
}

impl From<u32> for Value {
    fn from(number: u32) -> Self {
        Self::Int(number.into())
    }
}

impl From<f64> for Value {
    fn from(number: f64) -> Self {
        Self::Float(number)
    }
}

impl From<bool> for Value {
    fn from(bit: bool) -> Self {
        Self::Bool(bit)
    }
}

/// Attributes by name. A later value replaces an earlier one.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attributes(Vec<(&'static str, Value)>);

impl Attributes {
    pub fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        let value = value.into();
        match self.0.iter_mut().find(|(known, _)| *known == name) {
            Some((_, earlier)) => *earlier = value,
            None => self.0.push((name, value)),
        }
    }

    pub fn with(mut self, name: &'static str, value: impl Into<Value>) -> Self {
        self.set(name, value);
        self
    }

    pub fn get(&self, name: &str) -> Option<&Value> {
        self.0.iter().find(|(known, _)| *known == name).map(|(_, value)| value)
    }

    pub fn iter(&self) -> impl Iterator<Item = (&'static str, &Value)> {
        self.0.iter().map(|(name, value)| (*name, value))
    }
}
