//! Tokens (JWT) signed by an identity provider: their claims identify the tenant. Only configured public-key algorithms are accepted: a
//! token's header chooses among these and no others.
//!
//! - [`signed`]: what is the same for every token: its signature, its issuer, its audience, its times
//! - [`remote`]: the provider's keys from a URL

pub mod remote;
pub mod signed;

use crate::{directory::Principal, limits::Overrides, records::check_name};
use jsonwebtoken::Algorithm;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use signed::{Claims, Signed, Trust};
pub use signed::{Invalid, Jwks, JwksError, looks_like_one};
use std::{collections::HashMap, fmt};

/// The time for which a valid token is not verified again.
const TRUSTED_S: u64 = 60;
/// The number of valid tokens that are remembered.
const TRUSTED_MAX: usize = 16_384;

#[derive(Clone, Debug)]
pub struct Settings {
    pub trust: Trust,
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

/// Verifies tenants' tokens.
pub struct Verifier {
    settings: Settings,
    signed: Signed,
    /// Verified tokens, by digest.
    trusted: Mutex<HashMap<[u8; 32], Trusted>>,
}

struct Trusted {
    principal: Principal,
    until: u64,
    /// The set of keys that verified it: tokens of removed keys are no longer trusted.
    generation: u64,
}

impl fmt::Debug for Verifier {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Verifier").field("settings", &self.settings).finish_non_exhaustive()
    }
}

impl Verifier {
    /// Reads the keys' file, or starts to fetch the keys: an unreachable provider does not prevent the start.
    pub fn new(settings: Settings) -> Result<Self, JwksError> {
        Ok(Self { signed: Signed::new(settings.trust.clone())?, settings, trusted: Mutex::default() })
    }

    /// Whether work that a token has requested may continue in the background. `until` is the token's expiry, if known.
    pub fn allows_background(&self, now: u64, until: Option<u64>) -> bool {
        until.is_none_or(|until| now < until.saturating_add(self.settings.background_s))
    }

    /// Verifies a token. `now` is in Unix seconds.
    pub fn verify(&self, now: u64, token: &str) -> Result<Principal, Invalid> {
        let digest = *blake3::hash(token.as_bytes()).as_bytes();
        // Read before the check: keys that are replaced meanwhile make the token untrusted again.
        let generation = self.signed.generation();
        let is_trusted = |known: &&Trusted| now < known.until && known.generation == generation;
        if let Some(known) = self.trusted.lock().get(&digest).filter(is_trusted) {
            return Ok(known.principal.clone());
        }
        let claims = self.signed.verify(now, token)?;
        let principal = self.principal(&claims)?;
        let mut trusted = self.trusted.lock();
        if trusted.len() >= TRUSTED_MAX {
            trusted.clear();
        }
        let until = claims.good_until.min(now.saturating_add(TRUSTED_S));
        trusted.insert(digest, Trusted { principal: principal.clone(), until, generation });
        Ok(principal)
    }

    /// Reads the keys again if their file has changed. Returns whether it has.
    pub fn refresh(&self) -> Result<bool, JwksError> {
        self.signed.refresh()
    }

    /// To be called after [`Invalid::Key`], as the provider may have a new key: fetches the keys, and returns a future that waits for them.
    /// Returns `None` if they were fetched a moment ago, or are in a file.
    pub fn new_keys(&self) -> Option<impl Future<Output = ()> + Send + use<>> {
        self.signed.new_keys()
    }

    /// The number of fetches of the provider's keys, and of failed ones.
    pub fn fetches(&self) -> (u64, u64) {
        self.signed.fetches()
    }

    fn principal(&self, Claims { all: claims, expires, .. }: &Claims) -> Result<Principal, Invalid> {
        let Settings { tenant_claim, user_claim, user_required, tier_claim, tier, .. } = &self.settings;
        let named = |claim: &str, what: &str| self.named(claims, claim, what);
        let missing = |claim: &String| Invalid::Claims(format!("it has no claim `{claim}`"));
        let tenant = named(tenant_claim, "tenant")?.ok_or_else(|| missing(tenant_claim))?;
        let user = named(user_claim, "user")?;
        if *user_required && user.is_none() {
            return Err(missing(user_claim));
        }
        Ok(Principal {
            tenant: tenant.into(),
            tier: named(tier_claim, "tier")?.unwrap_or(tier).into(),
            user: user.map(Into::into),
            key: None,
            tenant_limits: Overrides::default(),
            key_limits: Overrides::default(),
            until: Some(*expires),
        })
    }

    fn named<'a>(&self, claims: &'a Map<String, Value>, claim: &str, what: &str) -> Result<Option<&'a str>, Invalid> {
        match claims.get(claim) {
            Some(Value::String(name)) => check_name(what, name).map(|()| Some(name.as_str())).map_err(Invalid::Claims),
            Some(Value::Null) if claim != self.settings.user_claim => Ok(None),
            // Treating a number as a missing claim would merge all users into one owner.
            Some(_) => Err(Invalid::Claims(format!("its claim `{claim}` is not a string"))),
            None => Ok(None),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::web::tests::{Reply, Server, wait_until};
    use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
    use jsonwebtoken::{EncodingKey, Header, encode};
    use rcgen::{KeyPair, PKCS_ECDSA_P256_SHA256};
    use serde_json::json;
    use std::{
        path::PathBuf,
        time::{Duration, SystemTime},
    };

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
                trust: Trust {
                    issuer: "https://id.example".into(),
                    audience: vec!["tidemill".into()],
                    algorithms: vec![Algorithm::ES256],
                    jwks,
                },
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
        let verifier = |max_age| provider.verifier_of(Jwks::Url(remote::Settings::keys(server.target(), max_age)));
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
        let settings = remote::Settings::keys(server.target(), Duration::from_secs(3600));
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
