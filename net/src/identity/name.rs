//! The name in a certificate: `tidemill://ROLE/NAME`, a URI among its alternative names.

use rustls::pki_types::CertificateDer;
use std::{fmt, str::FromStr};
use tidemill_proto::message::Role;

const SCHEME: &str = "tidemill://";
/// The maximum length of a name.
const NAME_BYTES_MAX: usize = 200;

/// The role in which a process may act.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum PeerRole {
    Coordinator,
    Prefill,
    Decode,
    Kvpool,
    /// Any role, under any name: for experiments, where one certificate is enough.
    Any,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CertName {
    pub role: PeerRole,
    pub name: String,
    /// The certificate's serial number in hexadecimal, by which it is revoked.
    pub serial: String,
}

impl PeerRole {
    pub const ALL: [(PeerRole, &str); 5] = [
        (PeerRole::Coordinator, "coordinator"),
        (PeerRole::Prefill, "prefill"),
        (PeerRole::Decode, "decode"),
        (PeerRole::Kvpool, "kvpool"),
        (PeerRole::Any, "any"),
    ];

    /// Whether a certificate of this role is valid for `wanted`.
    pub fn is(self, wanted: PeerRole) -> bool {
        self == wanted || self == PeerRole::Any
    }
}

impl From<Role> for PeerRole {
    fn from(role: Role) -> Self {
        match role {
            Role::Prefill => Self::Prefill,
            Role::Decode => Self::Decode,
            Role::Kvpool => Self::Kvpool,
        }
    }
}

impl fmt::Display for PeerRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let found = Self::ALL.iter().find(|(role, _)| role == self);
        f.write_str(found.map_or("", |(_, name)| name))
    }
}

impl FromStr for PeerRole {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let names = || Self::ALL.map(|(_, name)| name).join(", ");
        let found = Self::ALL.iter().find(|(_, name)| *name == text);
        found.map(|(role, _)| *role).ok_or_else(|| format!("`{text}` is not a role: roles are {}", names()))
    }
}

impl fmt::Display for CertName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}/{}", self.role, self.name)
    }
}

impl CertName {
    /// Reads the name from a certificate. The error says what is wrong with it.
    pub fn of(der: &CertificateDer<'_>) -> Result<Self, String> {
        let cert = webpki::EndEntityCert::try_from(der).map_err(|error| format!("it is not a certificate: {error}"))?;
        let serial = cert.serial().iter().map(|byte| format!("{byte:02x}")).collect();
        let mut names = cert.valid_uri_names().filter_map(|uri| uri.strip_prefix(SCHEME));
        match (names.next(), names.next()) {
            (Some(path), None) => {
                let (role, name) = parse(path)?;
                Ok(Self { role, name, serial })
            }
            (None, _) => Err("its certificate has no role: make one with `tidemill certs DIR ROLE/NAME`".into()),
            (Some(_), Some(_)) => Err("its certificate has several roles".into()),
        }
    }

    /// Whether the holder may act as `role`, and under `name` if one is given.
    pub fn is(&self, role: PeerRole, name: Option<&str>) -> bool {
        self.role == PeerRole::Any || (self.role == role && name.is_none_or(|name| name == self.name))
    }
}

/// Parses `ROLE/NAME`.
pub fn parse(text: &str) -> Result<(PeerRole, String), String> {
    let (role, name) = text.split_once('/').ok_or_else(|| format!("`{text}` is not ROLE/NAME"))?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
    // A name is also part of a path.
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(plain) || name.starts_with('.') {
        return Err(format!("`{name}` is not a name: 1 to {NAME_BYTES_MAX} letters, digits, `-`, `_` and `.`, not a `.` first"));
    }
    Ok((role.parse()?, name.to_owned()))
}

/// The URI of a certificate with this role and name.
pub(super) fn uri(role: PeerRole, name: &str) -> String {
    format!("{SCHEME}{role}/{name}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_a_role_and_plain_letters() {
        assert_eq!(parse("kvpool/node-3.rack_1"), Ok((PeerRole::Kvpool, "node-3.rack_1".into())));
        for wrong in ["kvpool", "kvpool/", "king/a", "decode/a/b", "decode/..", "decode/ä", "/a"] {
            assert!(parse(wrong).is_err(), "{wrong}");
        }
        assert!(CertName::of(&CertificateDer::from(vec![1, 2, 3])).is_err());
    }
}
