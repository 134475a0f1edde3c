//! The strings that a schema allows, as a terminal of llguidance's Lark: an expression for a text without quotation marks.

use crate::{compiler::has_top_level_choice, expression, lark, schema::formats};
use llguidance::regex_to_lark;
use std::collections::HashSet;

/// The strings that a schema allows.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Text {
    Any,
    Values(Vec<String>),
    Pattern(String),
    Format(String),
    Length {
        least: u64,
        most: Option<u64>,
    },
    All(Vec<Text>),
    AnyOf(Vec<Text>),
    /// A constraint that no expression keeps.
    Loose,
}

impl Text {
    pub(super) fn and(self, other: Self) -> Self {
        match (self, other) {
            (Self::Any, text) | (text, Self::Any) => text,
            (Self::Loose, _) | (_, Self::Loose) => Self::Loose,
            (Self::Values(a), Self::Values(b)) => {
                let b: HashSet<String> = b.into_iter().collect();
                Self::Values(a.into_iter().filter(|value| b.contains(value)).collect())
            }
            // As everywhere, values win over formats.
            (values @ Self::Values(_), Self::Format(_)) | (Self::Format(_), values @ Self::Values(_)) => values,
            (Self::Values(values), Self::Length { least, most }) | (Self::Length { least, most }, Self::Values(values)) => {
                let fits = |value: &String| {
                    let length = value.chars().count() as u64;
                    least <= length && most.is_none_or(|most| length <= most)
                };
                Self::Values(values.into_iter().filter(fits).collect())
            }
            (Self::All(mut all), Self::All(more)) => {
                all.extend(more);
                Self::All(all)
            }
            (Self::All(mut all), text) | (text, Self::All(mut all)) => {
                all.push(text);
                Self::All(all)
            }
            (a, b) => Self::All(vec![a, b]),
        }
    }

    pub(super) fn or(self, other: Self) -> Self {
        match (self, other) {
            (Self::Any, _) | (_, Self::Any) => Self::Any,
            (Self::Loose, _) | (_, Self::Loose) => Self::Loose,
            (Self::Values(mut values), Self::Values(more)) => {
                values.extend(more);
                Self::Values(values)
            }
            (Self::AnyOf(mut options), text) => {
                options.push(text);
                Self::AnyOf(options)
            }
            (a, b) => Self::AnyOf(vec![a, b]),
        }
    }

    /// The terminal for these strings, or `None` if there is none.
    pub(super) fn terminal(&self, work: &mut expression::Work) -> Option<String> {
        Some(match self {
            Self::Any => ANYTHING.to_owned(),
            Self::Loose => return None,
            Self::Values(values) if values.is_empty() => return None,
            Self::Values(values) => joined(values.iter().map(|value| lark::literal(value)).collect(), " | "),
            Self::Pattern(pattern) => searched(pattern, work)?,
            Self::Format(format) => searched(formats::text_pattern(format)?, work)?,
            Self::Length { least, most } => {
                format!("/(?s:.{{{least},{}}})/", most.map(|most| most.to_string()).unwrap_or_default())
            }
            Self::All(all) => {
                // So do patterns.
                let decided = all.iter().any(|text| matches!(text, Self::Pattern(_) | Self::Values(_)));
                let all = all.iter().filter(|text| !(decided && matches!(text, Self::Format(_))));
                joined(all.map(|text| text.terminal(work)).collect::<Option<_>>()?, " & ")
            }
            Self::AnyOf(options) => joined(options.iter().map(|text| text.terminal(work)).collect::<Option<_>>()?, " | "),
        })
    }
}

const ANYTHING: &str = "/(.|\\n)*/";

pub(super) fn joined(terminals: Vec<String>, by: &str) -> String {
    format!("({})", terminals.join(by))
}

/// The terminal for the texts in which a pattern matches somewhere.
fn searched(pattern: &str, work: &mut expression::Work) -> Option<String> {
    work.pay(pattern.len())?;
    let patterns = match expression::looks_around(pattern) {
        true => expression::without_look_around(pattern, work)?,
        false => vec![pattern.to_owned()],
    };
    let terminals = patterns.into_iter().map(|pattern| {
        // Each of its alternatives has anchors of its own.
        let pattern = if has_top_level_choice(&pattern) { expression::all_of(&[pattern], work)? } else { pattern };
        let rest = pattern.strip_prefix('^');
        let before = if rest.is_some() { "" } else { "(.|\\n)*" };
        let rest = rest.unwrap_or(&pattern);
        let inner = rest.strip_suffix('$').filter(|inner| inner.chars().rev().take_while(|&c| c == '\\').count() % 2 == 0);
        let after = if inner.is_some() { "" } else { "(.|\\n)*" };
        Some(format!("/{before}(?:{}){after}/", regex_to_lark(inner.unwrap_or(rest), "dw")))
    });
    Some(joined(terminals.collect::<Option<_>>()?, " & "))
}
