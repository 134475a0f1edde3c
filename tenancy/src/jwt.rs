//! Tokens (JWT) signed by an identity provider: their claims identify the caller. Only configured public-key algorithms are accepted: a
//! token's header chooses among these and no others.
//!
//! - [`remote`]: the provider's keys from a URL

pub mod remote;

use crate::{directory::Principal, limits::Overrides, records::check_name, web::TargetError};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header, jwk::JwkSet};
use parking_lot::{Mutex, RwLock};
use remote::Remote;
use serde_json::{Map, Value};
use std::{
    collections::HashMap,
    fmt::{self, Display},
    path::{Path, PathBuf},
    sync::Arc,
    time::SystemTime,
};

/// The tolerated difference between clocks.
const LEEWAY_S: u64 = 30;
/// The time for which a valid token is not verified again.
const TRUSTED_S: u64 = 60;
/// The number of valid tokens that are remembered.
const TRUSTED_MAX: usize = 16_384;
/// The maximum length of a token.
const TOKEN_BYTES_MAX: usize = 16 << 10;

#[derive(Clone, Debug)]
pub struct Settings {
    pub issuer: String,
    /// A token must be for one of these.
    pub audience: Vec<String>,
    pub algorithms: Vec<Algorithm>,
    pub jwks: Jwks,
    /// The names of claims.
    pub tenant_claim: String,
    pub user_claim: String,
    /// Whether a token without the user claim is refused, rather than taken for its tenant as a whole.
    pub user_required: bool,
    pub tier_claim: String,
    /// The tier of tokens without the tier claim.
    pub tier: String,
    /// The number of seconds after a token's expiry for which its background work continues.
    pub background_s: u64,
}

/// The source of a provider's public keys.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Jwks {
    /// A file, which is read again when it changes.
    File(PathBuf),
    Url(remote::Settings),
}

/// The algorithms that may be configured.
pub const ALGORITHMS: [(&str, Algorithm); 9] = [
    ("RS256", Algorithm::RS256),
    ("RS384", Algorithm::RS384),
    ("RS512", Algorithm::RS512),
    ("PS256", Algorithm::PS256),
    ("PS384", Algorithm::PS384),
    ("PS512", Algorithm::PS512),
    ("ES256", Algorithm::ES256),
    ("ES384", Algorithm::ES384),
    ("EdDSA", Algorithm::EdDSA),
];

pub struct Verifier {
    settings: Settings,
    known: Arc<Known>,
    remote: Option<Remote>,
    /// The modification time of the keys' file when it was read.
    written: Mutex<Option<SystemTime>>,
}

/// The provider's keys, and tokens that were verified with them.
#[derive(Default)]
struct Known {
    keys: RwLock<Keys>,
    /// Verified tokens, by digest.
    trusted: Mutex<HashMap<[u8; 32], Trusted>>,
}

/// Keys, each with its id if it has one.
type Keys = Vec<(Option<String>, DecodingKey)>;

impl Known {
    /// Replaces the keys. Tokens of removed keys are no longer trusted.
    fn replace(&self, keys: Keys) {
        *self.keys.write() = keys;
        self.trusted.lock().clear();
    }
}

struct Trusted {
    principal: Principal,
    until: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum JwksError {
    #[error("cannot read {path}: {source}")]
    File { path: PathBuf, source: std::io::Error },
    #[error("cannot get {url}: {source}")]
    Fetch { url: String, source: ureq::Error },
    #[error(transparent)]
    Target(#[from] TargetError),
    #[error("{from} is not a set of JSON web keys: {source}")]
    Syntax { from: String, source: serde_json::Error },
    #[error("{from} has no key that can verify signatures")]
    Empty { from: String },
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
    #[error("{0}")]
    Claims(String),
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Verifier {
    /// Reads the keys' file, or starts to fetch the keys: an unreachable provider does not prevent the start.
    pub fn new(settings: Settings) -> Result<Self, JwksError> {
        let known = Arc::new(Known::default());
        let (remote, written) = match &settings.jwks {
            Jwks::File(path) => {
                let (keys, written) = read(path)?;
                known.replace(keys);
                (None, written)
            }
            Jwks::Url(url) => (Some(Remote::start(url.clone(), Arc::clone(&known))?), None),
        };
        Ok(Self { settings, known, remote, written: Mutex::new(written) })
    }

    /// Whether work that a token has requested may continue in the background. `until` is the token's expiry, if known.
    pub fn allows_background(&self, now: u64, until: Option<u64>) -> bool {
        until.is_none_or(|until| now < until.saturating_add(self.settings.background_s))
    }

    /// Whether the text can be a token at all, rather than a key.
    pub fn looks_like_one(sent: &str) -> bool {
        sent.len() <= TOKEN_BYTES_MAX && sent.bytes().filter(|&byte| byte == b'.').count() == 2
    }

    /// Verifies a token. `now` is in Unix seconds.
    pub fn verify(&self, now: u64, token: &str) -> Result<Principal, Invalid> {
        let digest = *blake3::hash(token.as_bytes()).as_bytes();
        let trusted = || self.known.trusted.lock();
        if let Some(known) = trusted().get(&digest).filter(|known| now < known.until) {
            return Ok(known.principal.clone());
        }
        let (principal, expires) = self.check(now, token)?;
        let mut trusted = trusted();
        if trusted.len() >= TRUSTED_MAX {
            trusted.clear();
        }
        trusted.insert(digest, Trusted { principal: principal.clone(), until: expires.min(now.saturating_add(TRUSTED_S)) });
        Ok(principal)
    }

    /// Reads the keys again if their file has changed. Returns whether it has.
    pub fn refresh(&self) -> Result<bool, JwksError> {
        let Jwks::File(path) = &self.settings.jwks else { return Ok(false) };
        let modified = std::fs::metadata(path).and_then(|metadata| metadata.modified()).ok();
        let mut written = self.written.lock();
        if modified == *written {
            return Ok(false);
        }
        let (keys, modified) = read(path)?;
        self.known.replace(keys);
        *written = modified;
        Ok(true)
    }

    /// To be called after [`Invalid::Key`], as the provider may have a new key: fetches the keys, and returns a future that waits for them.
    /// Returns `None` if they were fetched a moment ago, or are in a file.
    pub fn new_keys(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        self.remote.as_ref()?.ask()
    }

    /// The number of fetches of the provider's keys, and of failed ones.
    pub fn fetches(&self) -> (u64, u64) {
        self.remote.as_ref().map_or((0, 0), Remote::fetches)
    }

    fn check(&self, now: u64, token: &str) -> Result<(Principal, u64), Invalid> {
        let header = decode_header(token).map_err(|_| Invalid::Syntax)?;
        if !self.settings.algorithms.contains(&header.alg) {
            return Err(Invalid::Algorithm);
        }
        if header.crit.is_some() {
            return Err(Invalid::Critical);
        }
        let mut validation = Validation::new(header.alg);
        validation.leeway = LEEWAY_S;
        validation.set_issuer(&[&self.settings.issuer]);
        validation.set_audience(&self.settings.audience);
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        // Times are checked below, against `now`.
        validation.validate_exp = false;
        validation.validate_nbf = false;
        let keys = self.known.keys.read();
        let named = |id: &Option<String>| header.kid.is_none() || id.is_none() || *id == header.kid;
        let mut refusal = Invalid::Key;
        for (_, key) in keys.iter().filter(|(id, _)| named(id)) {
            match decode::<Map<String, Value>>(token, key, &validation) {
                Ok(data) => return self.principal(now, &data.claims),
                Err(error) => refusal = Invalid::Claims(error.to_string()),
            }
        }
        Err(refusal)
    }

    fn principal(&self, now: u64, claims: &Map<String, Value>) -> Result<(Principal, u64), Invalid> {
        let Settings { tenant_claim, user_claim, user_required, tier_claim, tier, .. } = &self.settings;
        let seconds = |name: &str| claims.get(name).and_then(Value::as_f64);
        let expires = seconds("exp").filter(|at| *at >= 0.0).ok_or_else(|| Invalid::Claims("`exp` is not a time".into()))? as u64;
        if expires.saturating_add(LEEWAY_S) <= now {
            return Err(Invalid::Claims("it has expired".into()));
        }
        if seconds("nbf").is_some_and(|from| from > now.saturating_add(LEEWAY_S) as f64) {
            return Err(Invalid::Claims("it is not valid yet".into()));
        }
        let named = |claim: &str, what: &str| match claims.get(claim) {
            Some(Value::String(name)) => check_name(what, name).map(|()| Some(name.as_str())).map_err(Invalid::Claims),
            Some(Value::Null) if claim != user_claim => Ok(None),
            // Treating a number as a missing claim would merge all users into one owner.
            Some(_) => Err(Invalid::Claims(format!("its claim `{claim}` is not a string"))),
            None => Ok(None),
        };
        let missing = |claim: &String| Invalid::Claims(format!("it has no claim `{claim}`"));
        let tenant = named(tenant_claim, "tenant")?.ok_or_else(|| missing(tenant_claim))?;
        let user = named(user_claim, "user")?;
        if *user_required && user.is_none() {
            return Err(missing(user_claim));
        }
        let principal = Principal {
            tenant: tenant.into(),
            tier: named(tier_claim, "tier")?.unwrap_or(tier).into(),
            user: user.map(Into::into),
            key: None,
            tenant_limits: Overrides::default(),
            key_limits: Overrides::default(),
            until: Some(expires),
        };
        Ok((principal, expires.saturating_add(LEEWAY_S)))
    }
}

fn read(path: &Path) -> Result<(Keys, Option<SystemTime>), JwksError> {
    let file = |source| JwksError::File { path: path.to_owned(), source };
    let written = std::fs::metadata(path).map_err(file)?.modified().ok();
    let text = std::fs::read(path).map_err(file)?;
    Ok((parse(&text, &path.display())?, written))
}

/// `from` names the source in errors.
fn parse(text: &[u8], from: &dyn Display) -> Result<Keys, JwksError> {
    let set: JwkSet = serde_json::from_slice(text).map_err(|source| JwksError::Syntax { from: from.to_string(), source })?;
    // Keys of unknown kinds are for other recipients.
    let all: Vec<_> = set.keys.iter().filter_map(|key| Some((key.common.key_id.clone(), DecodingKey::from_jwk(key).ok()?))).collect();
    if all.is_empty() {
        return Err(JwksError::Empty { from: from.to_string() });
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::web::tests::{Reply, Server, wait_until};
    use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
    use jsonwebtoken::{EncodingKey, Header, encode};
    use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
    use serde_json::json;
    use std::time::Duration;

    struct Provider {
        dir: tempfile::TempDir,
        signing: KeyPair,
    }

    impl Provider {
        fn new() -> Self {
            let provider = Self { dir: tempfile::tempdir().unwrap(), signing: KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap() };
            provider.publish(&provider.signing);
            provider
        }

        fn path(&self) -> PathBuf {
            self.dir.path().join("jwks.json")
        }

        fn publish(&self, pair: &KeyPair) {
            std::fs::write(self.path(), set("one", pair)).unwrap();
        }

        fn verifier(&self) -> Verifier {
            self.verifier_of(Jwks::File(self.path()))
        }

        fn verifier_of(&self, jwks: Jwks) -> Verifier {
            Verifier::new(Settings {
                issuer: "https://id.example".into(),
                audience: vec!["tidemill".into()],
                algorithms: vec![Algorithm::ES256],
                jwks,
                tenant_claim: "org".into(),
                user_claim: "sub".into(),
                user_required: false,
                tier_claim: "plan".into(),
                tier: "free".into(),
                background_s: 60,
            })
            .unwrap()
        }

        fn sign(&self, change: impl FnOnce(&mut Value)) -> String {
            self.sign_as("one", &self.signing, change)
        }

        fn sign_as(&self, kid: &str, pair: &KeyPair, change: impl FnOnce(&mut Value)) -> String {
            let mut claims =
                json!({"iss": "https://id.example", "aud": "tidemill", "exp": 1000, "org": "acme", "sub": "ann", "plan": "paid"});
            change(&mut claims);
            let header = Header { kid: Some(kid.into()), ..Header::new(Algorithm::ES256) };
            encode(&header, &claims, &EncodingKey::from_ec_der(pair.serialized_der())).unwrap()
        }
    }

    fn set(kid: &str, pair: &KeyPair) -> String {
        let point = pair.public_key_raw();
        let coordinate = |range: std::ops::Range<usize>| URL_SAFE_NO_PAD.encode(&point[range]);
        let key = json!({"kty": "EC", "crv": "P-256", "kid": kid, "use": "sig", "x": coordinate(1..33), "y": coordinate(33..65)});
        json!({"keys": [key]}).to_string()
    }

    /// The provider answers late or not at all, and changes its keys.
    #[tokio::test]
    async fn keys_come_from_a_url_and_stay_while_it_is_down() {
        let provider = Provider::new();
        let server = Server::start(Reply { after: Duration::from_millis(100), ..Reply::ok(set("one", &provider.signing)) }, None);
        let verifier = |max_age| provider.verifier_of(Jwks::Url(remote::Settings { target: server.target(), max_age }));
        let asked = || server.asked.lock().unwrap().len();

        let patient = verifier(Duration::from_secs(3600));
        let token = provider.sign(|_| ());
        assert_eq!(patient.verify(900, &token), Err(Invalid::Key), "not fetched yet");
        patient.new_keys().expect("the first fetch runs").await;
        assert!(patient.verify(900, &token).is_ok());
        assert_eq!((asked(), patient.fetches()), (1, (1, 0)));

        // Tokens of a stranger's keys cause no more requests.
        let stranger = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        for n in 0..100 {
            let forged = provider.sign_as(&n.to_string(), &stranger, |_| ());
            assert_eq!(patient.verify(900, &forged), Err(Invalid::Key));
            assert!(patient.new_keys().is_none());
        }
        assert_eq!(asked(), 1);

        // Repeatedly, by age; failures change nothing and are counted.
        let eager = verifier(Duration::from_millis(20));
        wait_until(|| eager.fetches().0 > 3);
        server.set(Reply::status(500));
        wait_until(|| eager.fetches().1 > 0);
        assert!(eager.verify(900, &token).is_ok());
        server.set(Reply::ok("<html>"));
        let failed = eager.fetches().1;
        wait_until(|| eager.fetches().1 > failed);
        assert!(eager.verify(900, &token).is_ok());

        // After a change of keys, tokens of the old one are refused.
        server.set(Reply::ok(set("two", &stranger)));
        let renewed = provider.sign_as("two", &stranger, |_| ());
        wait_until(|| eager.verify(900, &renewed).is_ok());
        assert_eq!(eager.verify(900, &token), Err(Invalid::Key));
    }

    #[tokio::test]
    async fn an_unknown_key_has_the_keys_fetched() {
        let provider = Provider::new();
        let server = Server::start(Reply::status(503), None);
        let settings = remote::Settings { target: server.target(), max_age: Duration::from_secs(3600) };
        let verifier = provider.verifier_of(Jwks::Url(settings));
        let token = provider.sign(|_| ());
        // It starts while the provider is down, and tries again by itself.
        wait_until(|| verifier.fetches().1 > 0);
        server.set(Reply::ok(set("one", &provider.signing)));
        wait_until(|| verifier.verify(900, &token).is_ok());
        let asked = || server.asked.lock().unwrap().len();
        let before = asked();
        let next = KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap();
        server.set(Reply::ok(set("two", &next)));
        let renewed = provider.sign_as("two", &next, |_| ());
        // Once enough time has passed since the last fetch, an unknown key causes a fetch at once.
        let arrived = loop {
            assert_eq!(verifier.verify(900, &renewed), Err(Invalid::Key));
            match verifier.new_keys() {
                Some(arrived) => break arrived,
                None => tokio::time::sleep(Duration::from_millis(100)).await,
            }
        };
        arrived.await;
        assert!(verifier.verify(900, &renewed).is_ok());
        assert_eq!(asked(), before + 1);
    }

    #[test]
    fn claims_say_who_asks() {
        let provider = Provider::new();
        let verifier = provider.verifier();
        let principal = verifier.verify(900, &provider.sign(|_| ())).unwrap();
        assert_eq!((&*principal.tenant, &*principal.tier, principal.user.as_deref()), ("acme", "paid", Some("ann")));
        let plain = provider.sign(|claims| claims["plan"] = Value::Null);
        assert_eq!(&*verifier.verify(900, &plain).unwrap().tier, "free");
    }

    #[test]
    fn a_token_is_for_us_from_them_and_in_time() {
        let provider = Provider::new();
        let verifier = provider.verifier();
        type Spoil<'a> = &'a dyn Fn(&mut Value);
        let refused: [(&str, Spoil<'_>); 9] = [
            ("Audience", &|claims| claims["aud"] = json!("another")),
            ("aud", &|claims| drop(claims.as_object_mut().unwrap().remove("aud"))),
            ("Issuer", &|claims| claims["iss"] = json!("https://evil.example")),
            ("iss", &|claims| drop(claims.as_object_mut().unwrap().remove("iss"))),
            ("exp", &|claims| drop(claims.as_object_mut().unwrap().remove("exp"))),
            ("expired", &|claims| claims["exp"] = json!(800)),
            ("not valid yet", &|claims| claims["nbf"] = json!(950)),
            ("org", &|claims| claims["org"] = Value::Null),
            ("the name of a tenant", &|claims| claims["org"] = json!("a b")),
        ];
        for (words, change) in refused {
            let error = verifier.verify(900, &provider.sign(change)).unwrap_err().to_string();
            assert!(error.contains(words), "{words}: {error}");
        }
        let token = provider.sign(|_| ());
        assert!(verifier.verify(1029, &token).is_ok());
        assert!(verifier.verify(1031, &token).is_err(), "trust ends with the token");
    }

    #[test]
    fn a_user_that_is_no_text_is_not_the_whole_tenant() {
        let provider = Provider::new();
        let verifier = provider.verifier();
        let of_user = |user: &Value| verifier.verify(900, &provider.sign(|claims| claims["sub"] = user.clone()));
        for user in [json!(5), json!(null), json!(true)] {
            let error = of_user(&user).unwrap_err().to_string();
            assert!(error.contains("`sub` is not a string"), "{user}: {error}");
        }
        for user in [json!(["ann"]), json!({"name": "ann"})] {
            assert!(of_user(&user).is_err(), "{user}: the library takes no such claim");
        }
        assert!(verifier.verify(900, &provider.sign(|claims| claims["plan"] = json!(7))).is_err());
        let without = provider.sign(|claims| drop(claims.as_object_mut().unwrap().remove("sub")));
        assert_eq!(verifier.verify(900, &without).unwrap().user, None);
        let strict = Verifier::new(Settings { user_required: true, ..verifier.settings.clone() }).unwrap();
        assert_eq!(strict.verify(900, &without), Err(Invalid::Claims("it has no claim `sub`".into())));
        assert!(strict.verify(900, &provider.sign(|_| ())).is_ok());
    }

    #[test]
    fn a_token_whose_header_demands_more_than_is_known_is_refused() {
        let provider = Provider::new();
        let claims = json!({"iss": "https://id.example", "aud": "tidemill", "exp": 1000, "org": "acme", "sub": "ann"});
        let header = Header { kid: Some("one".into()), crit: Some(vec!["x".into()]), ..Header::new(Algorithm::ES256) };
        let token = encode(&header, &claims, &EncodingKey::from_ec_der(provider.signing.serialized_der())).unwrap();
        assert_eq!(provider.verifier().verify(900, &token), Err(Invalid::Critical));
    }

    #[test]
    fn what_a_token_has_asked_for_ends_a_while_after_it() {
        let provider = Provider::new();
        let verifier = provider.verifier();
        let until = verifier.verify(900, &provider.sign(|_| ())).unwrap().until;
        assert_eq!(until, Some(1000));
        assert!(verifier.allows_background(1059, until) && !verifier.allows_background(1060, until));
        assert!(verifier.allows_background(u64::MAX - 1, Some(u64::MAX)) && verifier.allows_background(5000, None));
    }

    #[test]
    fn a_token_for_ever_is_good_now() {
        let provider = Provider::new();
        let token = provider.sign(|claims| claims["exp"] = json!(u64::MAX));
        assert!(provider.verifier().verify(900, &token).is_ok());
        assert!(provider.verifier().verify(u64::MAX - 1, &provider.sign(|claims| claims["nbf"] = json!(1))).is_err());
    }

    #[test]
    fn other_algorithms_and_keys_are_refused() {
        let provider = Provider::new();
        let verifier = provider.verifier();
        let claims = json!({"iss": "https://id.example", "aud": "tidemill", "exp": 1000, "org": "acme"});
        // The public key used as if it were a shared secret.
        let confused = encode(&Header::new(Algorithm::HS256), &claims, &EncodingKey::from_secret(provider.signing.public_key_raw()));
        assert_eq!(verifier.verify(900, &confused.unwrap()), Err(Invalid::Algorithm));
        let part = |value: Value| URL_SAFE_NO_PAD.encode(value.to_string());
        let unsigned = format!("{}.{}.", part(json!({"alg": "none"})), part(claims));
        assert_eq!(verifier.verify(900, &unsigned), Err(Invalid::Syntax));
        let token = provider.sign(|_| ());
        let (signed, signature) = token.rsplit_once('.').unwrap();
        assert!(verifier.verify(900, &format!("{signed}.{}", signature.chars().rev().collect::<String>())).is_err());
        assert!(verifier.verify(900, &token).is_ok());
    }

    #[test]
    fn a_key_that_is_published_no_more_opens_no_more() {
        let provider = Provider::new();
        let verifier = provider.verifier();
        let token = provider.sign(|_| ());
        assert!(verifier.verify(900, &token).is_ok());
        assert!(!verifier.refresh().unwrap());
        provider.publish(&KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).unwrap());
        let file = std::fs::File::options().write(true).open(provider.path()).unwrap();
        file.set_modified(SystemTime::now() + std::time::Duration::from_secs(5)).unwrap();
        assert!(verifier.refresh().unwrap());
        assert!(verifier.verify(900, &token).is_err());
        std::fs::write(provider.path(), "{}").unwrap();
        assert!(verifier.refresh().is_err());
    }
}
