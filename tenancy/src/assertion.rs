//! Assertions by which one region tells another whose request it relays: a JWT (RFC 7519) that lasts a minute, is for one audience, and is
//! signed with a secret that these two regions alone share. No client's credential leaves the region that it was presented to, and a
//! region that is broken into speaks to others only in its own name.

use crate::{directory::Principal, limits::Overrides, records::check_name};
use jsonwebtoken::{Algorithm, DecodingKey, EncodingKey, Header, Validation, decode, encode};
use serde::{Deserialize, Serialize};
use std::{fmt, io, path::Path};

/// The lifetime of an assertion, in seconds.
const LASTS_S: u64 = 60;
/// The difference of clocks that is allowed for, in seconds.
const LEEWAY_S: u64 = 30;
/// The least size of a secret, in bytes: that of the hash (RFC 7518, 3.2).
const SECRET_BYTES_MIN: usize = 32;

/// A secret that two regions share.
#[derive(Clone)]
pub struct Secret {
    signs: EncodingKey,
    verifies: DecodingKey,
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret")
    }
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Claims {
    iss: String,
    aud: String,
    iat: u64,
    exp: u64,
    /// The tenant.
    sub: String,
    tier: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    user: Option<String>,
    /// The id of the key, which is no secret, and the limits of the key alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    key: Option<String>,
    #[serde(default)]
    key_limits: Overrides,
}

impl Secret {
    /// Reads a secret from a file. White space at its ends does not count.
    pub fn read(path: &Path) -> io::Result<Self> {
        let content = std::fs::read(path)?;
        let secret = content.trim_ascii();
        if secret.len() < SECRET_BYTES_MIN {
            return Err(io::Error::other(format!(
                "the secret has {} bytes, and must have at least {SECRET_BYTES_MIN}: `openssl rand -hex 32` makes one",
                secret.len()
            )));
        }
        Ok(Self { signs: EncodingKey::from_secret(secret), verifies: DecodingKey::from_secret(secret) })
    }

    /// Asserts that a request of this principal is relayed from one region to another. `now` is in Unix seconds.
    pub fn assert(&self, from: &str, to: &str, now: u64, principal: &Principal) -> String {
        let claims = Claims {
            iss: from.to_owned(),
            aud: to.to_owned(),
            iat: now,
            exp: now.saturating_add(LASTS_S),
            sub: principal.tenant.as_ref().to_owned(),
            tier: principal.tier.as_ref().to_owned(),
            user: principal.user.as_deref().map(str::to_owned),
            key: principal.key.as_deref().map(str::to_owned),
            key_limits: principal.key_limits,
        };
        encode(&Header::new(Algorithm::HS256), &claims, &self.signs).expect("its claims are JSON")
    }

    /// Verifies an assertion from one region to another, by this machine's clock. The principal has no limits of its tenant. The error is
    /// the reason.
    pub fn verify(&self, from: &str, to: &str, assertion: &str) -> Result<Principal, String> {
        let mut validation = Validation::new(Algorithm::HS256);
        validation.set_required_spec_claims(&["exp", "iss", "aud", "sub"]);
        validation.set_issuer(&[from]);
        validation.set_audience(&[to]);
        validation.leeway = LEEWAY_S;
        let claims = decode::<Claims>(assertion, &self.verifies, &validation).map_err(|error| error.to_string())?.claims;
        if claims.exp.saturating_sub(claims.iat) > LASTS_S {
            return Err("it lasts too long".into());
        }
        let names =
            [("tenant", Some(&claims.sub)), ("tier", Some(&claims.tier)), ("user", claims.user.as_ref()), ("key", claims.key.as_ref())];
        names.into_iter().try_for_each(|(what, name)| name.map_or(Ok(()), |name| check_name(what, name)))?;
        Ok(Principal {
            tenant: claims.sub.into(),
            tier: claims.tier.into(),
            user: claims.user.map(Into::into),
            key: claims.key.map(Into::into),
            tenant_limits: Overrides::default(),
            key_limits: claims.key_limits,
            until: Some(claims.exp),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{SystemTime, UNIX_EPOCH};

    fn secret(text: &str) -> io::Result<Secret> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        Secret::read(file.path())
    }

    fn now() -> u64 {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs()
    }

    fn ann() -> Principal {
        Principal {
            tenant: "shop".into(),
            tier: "paid".into(),
            user: Some("ann".into()),
            key: Some("key_1".into()),
            tenant_limits: Overrides::default(),
            key_limits: Overrides { requests_per_minute: Some(crate::limits::Limit(Some(7))), ..Overrides::default() },
            until: None,
        }
    }

    #[test]
    fn an_assertion_is_for_one_region_from_one_region_for_a_minute() {
        let shared = secret("0123456789abcdef0123456789abcdef\n").unwrap();
        let good = shared.assert("eu", "us", now(), &ann());
        let found = shared.verify("eu", "us", &good).unwrap();
        assert_eq!(Principal { until: None, ..found }, ann());
        for (from, to) in [("eu", "asia"), ("asia", "us"), ("us", "eu")] {
            assert!(shared.verify(from, to, &good).is_err(), "{from} {to}");
        }
        let other = secret("another secret of thirty-two bytes").unwrap();
        assert!(other.verify("eu", "us", &good).is_err());
        assert!(shared.verify("eu", "us", &shared.assert("eu", "us", now() - 2 * LASTS_S, &ann())).is_err(), "it is over");
        let forever = Claims { exp: now() + 999, ..decoded(&shared, &good) };
        let forever = encode(&Header::new(Algorithm::HS256), &forever, &shared.signs).unwrap();
        assert!(shared.verify("eu", "us", &forever).unwrap_err().contains("too long"));
        let odd = Principal { tenant: "a/b".into(), ..ann() };
        assert!(shared.verify("eu", "us", &shared.assert("eu", "us", now(), &odd)).is_err(), "no tenant is called so");
        let unsigned = format!("eyJhbGciOiJub25lIn0.{}.", good.split('.').nth(1).unwrap());
        assert!(shared.verify("eu", "us", &unsigned).is_err());
        assert!(secret("short").unwrap_err().to_string().contains("openssl rand"));
    }

    fn decoded(secret: &Secret, assertion: &str) -> Claims {
        let mut validation = Validation::new(Algorithm::HS256);
        validation.validate_aud = false;
        decode(assertion, &secret.verifies, &validation).unwrap().claims
    }
}
