//! The verification of a token, whatever its claims mean: its signature by a key of the provider, its issuer, its audience, its times.

use super::remote::{self, Document, Remote};
use crate::web::{RequestError, TargetError};
pub use jsonwebtoken::Algorithm;
use jsonwebtoken::{DecodingKey, Validation, decode, decode_header, jwk::JwkSet};
use parking_lot::{Mutex, RwLock};
use serde_json::{Map, Value};
use std::{
    fmt::{self, Display},
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::SystemTime,
};

/// The tolerated difference between clocks.
const LEEWAY_S: u64 = 30;
/// The maximum length of a token.
const TOKEN_BYTES_MAX: usize = 16 << 10;

/// The issuer whose tokens are accepted, and their audience.
#[derive(Clone, Debug)]
pub struct Trust {
    pub issuer: String,
    /// A token must be for one of these.
    pub audience: Vec<String>,
    pub algorithms: Vec<Algorithm>,
    pub jwks: Jwks,
}

/// The source of a provider's public keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Jwks {
    /// A file, which is read again when it changes.
    File(PathBuf),
    Url(remote::Settings),
}

#[derive(Debug, thiserror::Error)]
pub enum JwksError {
    #[error("cannot read {path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("cannot get {url}: {source}")]
    Fetch { url: String, source: RequestError },
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("{from} is not a set of JSON web keys: {source}")]
    Syntax { from: String, source: serde_json::Error },
    #[error("{from} has no key that can verify signatures")]
    Empty { from: String },
    #[error("{url} is not the document of an OpenID provider: {source}")]
    Document { url: String, source: serde_json::Error },
    /// OpenID Connect Discovery 1.0, 4.3: the issuer must be the one that was asked for, to the letter.
    #[error("{url} is the document of the issuer `{found}`, and not of `{issuer}`")]
    Issuer { url: String, found: String, issuer: String },
}

/// The reason why a token is not accepted. No part of it is shown.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("it is not a JSON web token")]
    Syntax,
    #[error("its algorithm is not accepted here")]
    Algorithm,
    /// RFC 7515, 4.1.11: a recipient that does not understand critical extensions must refuse the token.
    #[error("its header has critical extensions (`crit`), and none is understood here")]
    Critical,
    #[error("its key is not known here")]
    Key,
    #[error("the identity provider's keys could not be fetched for too long")]
    Stale,
    #[error("{0}")]
    Claims(String),
}

/// The claims of a verified token.
#[derive(Debug)]
pub struct Claims {
    pub all: Map<String, Value>,
    /// The claim `exp`, in Unix seconds.
    pub expires: u64,
    /// The time at which the token stops being accepted: a tolerated moment later.
    pub good_until: u64,
}

/// Keys, each with its id if it has one.
pub(super) type Keys = Vec<(Option<String>, DecodingKey)>;

/// The provider's current keys.
#[derive(Default)]
pub(super) struct Keyring {
    keys: RwLock<Keys>,
    /// The number of times that the keys were replaced.
    generation: AtomicU64,
}

impl Keyring {
    pub(super) fn replace(&self, keys: Keys) {
        *self.keys.write() = keys;
        self.generation.fetch_add(1, Ordering::Release);
    }
}

/// Verifies tokens of one provider.
pub struct Signed {
    trust: Trust,
    keyring: Arc<Keyring>,
    remote: Option<Remote>,
    /// The modification time of the keys' file when it was read.
    written: Mutex<Option<SystemTime>>,
}

impl fmt::Debug for Signed {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Signed").field("trust", &self.trust).finish_non_exhaustive()
    }
}

/// Whether the text can be a token at all, rather than a key.
pub fn looks_like_one(sent: &str) -> bool {
    sent.len() <= TOKEN_BYTES_MAX && sent.bytes().filter(|&byte| byte == b'.').count() == 2
}

impl Signed {
    /// Reads the keys' file, or starts to fetch the keys: an unreachable provider does not prevent the start.
    pub fn new(trust: Trust) -> Result<Self, JwksError> {
        let keyring = Arc::new(Keyring::default());
        let (remote, written) = match &trust.jwks {
            Jwks::File(path) => {
                let (keys, written) = read(path)?;
                keyring.replace(keys);
                (None, written)
            }
            Jwks::Url(url) => (Some(Remote::start(url.clone(), Arc::clone(&keyring))?), None),
        };
        Ok(Self { trust, keyring, remote, written: Mutex::new(written) })
    }

    /// The number of times that the keys were replaced.
    pub fn generation(&self) -> u64 {
        self.keyring.generation.load(Ordering::Acquire)
    }

    /// The provider's discovery document, if its keys are found that way and it has answered.
    pub fn document(&self) -> Option<Arc<Document>> {
        self.remote.as_ref()?.document()
    }

    /// Reads the keys again if their file has changed. Returns whether it has.
    pub fn refresh(&self) -> Result<bool, JwksError> {
        let Jwks::File(path) = &self.trust.jwks else { return Ok(false) };
        let modified = std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
        let mut written = self.written.lock();
        if modified == *written {
            return Ok(false);
        }
        let (keys, modified) = read(path)?;
        self.keyring.replace(keys);
        *written = modified;
        Ok(true)
    }

    /// To be called after [`Invalid::Key`] or [`Invalid::Stale`]: fetches the keys, and returns a future that waits for them. Returns `None`
    /// if they were fetched a moment ago, or are in a file.
    pub fn new_keys(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        self.remote.as_ref()?.ask()
    }

    /// The number of fetches of the provider's keys, and of failed ones.
    pub fn fetches(&self) -> (u64, u64) {
        self.remote.as_ref().map_or((0, 0), Remote::fetches)
    }

    /// Verifies a token. `now` is in Unix seconds.
    pub fn verify(&self, now: u64, token: &str) -> Result<Claims, Invalid> {
        if !looks_like_one(token) {
            return Err(Invalid::Syntax);
        }
        let header = decode_header(token).map_err(|_| Invalid::Syntax)?;
        if !self.trust.algorithms.contains(&header.alg) {
            return Err(Invalid::Algorithm);
        }
        if header.crit.is_some() {
            return Err(Invalid::Critical);
        }
        if self.remote.as_ref().is_some_and(Remote::is_stale) {
            return Err(Invalid::Stale);
        }
        let mut validation = Validation::new(header.alg);
        validation.leeway = LEEWAY_S;
        validation.set_issuer(&[&self.trust.issuer]);
        validation.set_audience(&self.trust.audience);
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        // Times are checked below, against `now`.
        validation.validate_exp = false;
        validation.validate_nbf = false;
        let keys = self.keyring.keys.read();
        let named = |id: &Option<String>| header.kid.is_none() || id.is_none() || *id == header.kid;
        let mut refusal = Invalid::Key;
        for (_, key) in keys.iter().filter(|(id, _)| named(id)) {
            match decode::<Map<String, Value>>(token, key, &validation) {
                Ok(data) => return in_time(now, data.claims),
                Err(error) => refusal = Invalid::Claims(error.to_string()),
            }
        }
        Err(refusal)
    }
}

fn in_time(now: u64, all: Map<String, Value>) -> Result<Claims, Invalid> {
    let seconds = |name: &str| all.get(name).and_then(Value::as_f64);
    let expires = seconds("exp").filter(|at| *at >= 0.0).ok_or_else(|| Invalid::Claims("`exp` is not a time".into()))? as u64;
    let good_until = expires.saturating_add(LEEWAY_S);
    if good_until <= now {
        return Err(Invalid::Claims("it has expired".into()));
    }
    if seconds("nbf").is_some_and(|from| from > now.saturating_add(LEEWAY_S) as f64) {
        return Err(Invalid::Claims("it is not valid yet".into()));
    }
    Ok(Claims { all, expires, good_until })
}

fn read(path: &Path) -> Result<(Keys, Option<SystemTime>), JwksError> {
    let file = |source| JwksError::File { path: path.to_owned(), source };
    let written = std::fs::metadata(path).map_err(file)?.modified().ok();
    let text = std::fs::read(path).map_err(file)?;
    Ok((parse(&text, &path.display())?, written))
}

/// `from` names the source in errors.
pub(super) fn parse(text: &[u8], from: &dyn Display) -> Result<Keys, JwksError> {
    let set: JwkSet = serde_json::from_slice(text).map_err(|source| JwksError::Syntax { from: from.to_string(), source })?;
    // Keys of unknown kinds are for other recipients.
    let all: Vec<_> = set.keys.iter().filter_map(|key| Some((key.common.key_id.clone(), DecodingKey::from_jwk(key).ok()?))).collect();
    if all.is_empty() {
        return Err(JwksError::Empty { from: from.to_string() });
    }
    Ok(all)
}
