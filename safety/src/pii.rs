//! Personal data: found in texts, replaced, and restored.
//!
//! - [`find`]: the finders, and the checks that tell findings from look-alikes; the end of a text that may still become a finding
//! - [`redact`]: findings replaced, in a whole text or in one that still arrives
//! - [`vault`]: placeholders for one request's findings, and their restoration

pub mod find;
mod numbers;
pub mod redact;
#[cfg(test)]
mod tests;
pub mod vault;

use serde::{Deserialize, Serialize};
use std::{fmt, str::FromStr};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    Email,
    Phone,
    /// Payment cards: a network's prefix and length, and Luhn's digit.
    Card,
    /// IBANs, with the length of their country and a checksum modulo 97.
    Iban,
    /// US social security numbers.
    Ssn,
    Ip,
    /// Names of the operator's list.
    Name,
}

impl Kind {
    pub const ALL: [Self; 7] = [Self::Email, Self::Phone, Self::Card, Self::Iban, Self::Ssn, Self::Ip, Self::Name];

    pub fn name(self) -> &'static str {
        match self {
            Self::Email => "email",
            Self::Phone => "phone",
            Self::Card => "card",
            Self::Iban => "iban",
            Self::Ssn => "ssn",
            Self::Ip => "ip",
            Self::Name => "name",
        }
    }

    /// The label in placeholders.
    pub fn label(self) -> &'static str {
        match self {
            Self::Email => "EMAIL",
            Self::Phone => "PHONE",
            Self::Card => "CARD",
            Self::Iban => "IBAN",
            Self::Ssn => "SSN",
            Self::Ip => "IP",
            Self::Name => "NAME",
        }
    }
}

impl fmt::Display for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not one of `email`, `phone`, `card`, `iban`, `ssn`, `ip`, `name`")]
pub struct UnknownKind(String);

impl FromStr for Kind {
    type Err = UnknownKind;

    fn from_str(name: &str) -> Result<Self, UnknownKind> {
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| UnknownKind(name.to_owned()))
    }
}
