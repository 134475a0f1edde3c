//! Operators, who look after the cluster: what each may do, and which claims of an identity provider's token say so.

use serde_json::{Map, Value};

/// The extent of an operator's rights. Each role may do all that the ones before it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Role {
    /// Sees the cluster, its records and what is spent; no text.
    Look,
    /// Changes what runs: rollouts, appeals.
    Operate,
    /// Everything else: keys, tenants, erasures, backups, and what has secrets or personal data.
    Administer,
}

impl Role {
    pub const ALL: [Self; 3] = [Self::Look, Self::Operate, Self::Administer];

    pub fn name(self) -> &'static str {
        match self {
            Self::Look => "look",
            Self::Operate => "operate",
            Self::Administer => "administer",
        }
    }
}

/// The claim that names an operator's roles or groups, and those of its values that are roles here.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RoleClaim {
    /// The name of a claim, or the path to a claim within objects, such as `realm_access.roles`.
    pub claim: String,
    /// The values for each of [`Role::ALL`].
    pub values: [Vec<String>; 3],
}

/// Claims whose text is a list of words (RFC 8693, 4.2). The text of any other claim is one value: it may have spaces.
const WORDS: [&str; 2] = ["scope", "scp"];
/// The longest subject (OpenID Connect Core 1.0, 2).
const SUBJECT_BYTES_MAX: usize = 255;
/// The longest name that is shown.
const NAME_CHARS_MAX: usize = 128;

/// A person or a program that an identity provider knows.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operator {
    /// The name that never changes. It is unique at its issuer.
    pub subject: String,
    pub name: Option<String>,
    pub email: Option<String>,
    /// The highest role; `None` for those who may do nothing here.
    pub role: Option<Role>,
    /// The time at which the claims expire, in Unix seconds.
    pub until: u64,
}

impl Operator {
    pub fn may(&self, needed: Role) -> bool {
        self.role.is_some_and(|role| role >= needed)
    }

    /// The name for people.
    pub fn shown(&self) -> &str {
        self.email.as_deref().or(self.name.as_deref()).unwrap_or(&self.subject)
    }
}

impl RoleClaim {
    /// Reads the claims of a verified token.
    pub fn operator(&self, claims: &Map<String, Value>, until: u64) -> Result<Operator, String> {
        let subject = claims.get("sub").and_then(Value::as_str).ok_or("it has no claim `sub`")?;
        if subject.is_empty() || subject.len() > SUBJECT_BYTES_MAX || subject.chars().any(is_odd) {
            return Err(format!("its claim `sub` must be 1 to {SUBJECT_BYTES_MAX} bytes of visible text"));
        }
        let text = |claim: &str| {
            claims.get(claim).and_then(Value::as_str).map(|text| visible(text, NAME_CHARS_MAX)).filter(|text| !text.is_empty())
        };
        // An address that the provider has not verified may be another person's.
        let email = text("email").filter(|_| claims.get("email_verified") != Some(&Value::Bool(false)));
        let name = text("name").or_else(|| text("preferred_username"));
        Ok(Operator { subject: subject.to_owned(), name, email, role: self.role(claims), until })
    }

    /// The highest role of the claim's values.
    fn role(&self, claims: &Map<String, Value>) -> Option<Role> {
        let found = find(claims, &self.claim)?;
        let values: Vec<&str> = match found {
            Value::String(text) if WORDS.contains(&self.claim.as_str()) => text.split(' ').collect(),
            Value::String(text) => vec![text],
            Value::Array(values) => values.iter().filter_map(Value::as_str).collect(),
            _ => return None,
        };
        let has = |role: &Role| self.values[*role as usize].iter().any(|wanted| values.contains(&wanted.as_str()));
        Role::ALL.into_iter().rev().find(has)
    }
}

/// Finds a claim by its name, which may itself have dots, or else by its path.
fn find<'a>(claims: &'a Map<String, Value>, name: &str) -> Option<&'a Value> {
    claims.get(name).or_else(|| {
        let (first, rest) = name.split_once('.')?;
        find(claims.get(first)?.as_object()?, rest)
    })
}

/// Whether a character could forge a line, move the cursor, or turn the direction of the text around it.
fn is_odd(c: char) -> bool {
    c.is_control() || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}')
}

/// A text from elsewhere for a line of a log: bounded, and without characters that are more than text.
pub fn visible(text: &str, chars_max: usize) -> String {
    text.chars().take(chars_max).map(|c| if is_odd(c) { '?' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn by(claim: &str) -> RoleClaim {
        let of = |name: &str| vec![name.to_owned()];
        RoleClaim { claim: claim.into(), values: [of("viewers"), vec!["on call".into(), "sre".into()], of("admins")] }
    }

    fn role(claim: &str, claims: Value) -> Option<Role> {
        let mut claims = claims.as_object().unwrap().clone();
        claims.entry("sub").or_insert(json!("u1"));
        by(claim).operator(&claims, 9).unwrap().role
    }

    #[test]
    fn the_highest_of_the_claims_values_counts() {
        assert_eq!(role("groups", json!({"groups": ["viewers", "x", "sre"]})), Some(Role::Operate));
        assert_eq!(role("groups", json!({"groups": ["admins"]})), Some(Role::Administer));
        assert_eq!(role("groups", json!({"groups": "on call"})), Some(Role::Operate));
        for none in [json!({}), json!({"groups": []}), json!({"groups": ["Admins", "admin"]}), json!({"groups": null})] {
            assert_eq!(role("groups", none.clone()), None, "{none}");
        }
        for odd in
            [json!({"groups": [["admins"]]}), json!({"groups": {"admins": true}}), json!({"groups": "x admins"}), json!({"groups": 1})]
        {
            assert_eq!(role("groups", odd.clone()), None, "{odd}");
        }
    }

    #[test]
    fn a_claim_is_named_or_lies_within_objects_and_a_scope_is_a_list_of_words() {
        assert_eq!(role("realm_access.roles", json!({"realm_access": {"roles": ["admins"]}})), Some(Role::Administer));
        assert_eq!(role("https://acme.example/roles", json!({"https://acme.example/roles": ["viewers"]})), Some(Role::Look));
        assert_eq!(role("a.b", json!({"a.b": ["viewers"], "a": {"b": ["admins"]}})), Some(Role::Look), "the name comes first");
        assert_eq!(role("scope", json!({"scope": "openid sre"})), Some(Role::Operate));
    }

    #[test]
    fn each_role_may_do_what_the_ones_before_it_may() {
        let of = |role| Operator { subject: "u".into(), name: None, email: None, role, until: 0 };
        for needed in Role::ALL {
            let may = Role::ALL.map(|role| of(Some(role)).may(needed));
            assert_eq!(may, [Role::Look, Role::Operate, Role::Administer].map(|role| role >= needed), "{needed:?}");
            assert!(!of(None).may(needed));
        }
    }

    #[test]
    fn names_forge_no_lines_and_subjects_must_not_try() {
        let claims = |value: Value| value.as_object().unwrap().clone();
        let operator = by("groups")
            .operator(&claims(json!({"sub": "u1", "name": "ann\r\n2026 INFO all is \u{1b}[2Jwell\u{202e}", "email": "ann@x.example"})), 9);
        let operator = operator.unwrap();
        assert_eq!(operator.name.as_deref(), Some("ann??2026 INFO all is ?[2Jwell?"));
        assert_eq!((operator.shown(), operator.until), ("ann@x.example", 9));
        let unverified = json!({"sub": "u1", "email": "boss@x.example", "email_verified": false, "preferred_username": "x".repeat(999)});
        let unverified = by("groups").operator(&claims(unverified), 9).unwrap();
        assert_eq!((unverified.email, unverified.name.unwrap().len()), (None, NAME_CHARS_MAX));
        for wrong in [json!({}), json!({"sub": 7}), json!({"sub": ""}), json!({"sub": "a\nb"}), json!({"sub": "x".repeat(256)})] {
            assert!(by("groups").operator(&claims(wrong.clone()), 9).is_err(), "{wrong}");
        }
    }
}
