//! Operators: who may use their port, where an identity provider says so. By a token of it, by a session of a browser that signed in there,
//! or, to look only, by a secret for programs.
//!
//! - [`sessions`]: browsers that have signed in

pub mod sessions;

use crate::{
    base::{
        places::{Place, Places},
        shares::{Party, Shares},
        stamp::unix_seconds,
    },
    metrics,
    requests::error::ApiError,
};
use axum::http::{HeaderMap, HeaderValue, StatusCode, header};
use parking_lot::Mutex;
use serde_json::{Value, json};
use sessions::Sessions;
use std::{io, net::IpAddr, path::PathBuf, sync::Arc, time::Duration};
use tidemill_tenancy::{
    jwt::{
        Invalid, JwksError,
        remote::Document,
        signed::{Claims, Signed, Trust},
    },
    operators::{Operator, Role, RoleClaim},
    sign_in::{self, SignIn},
    web::read_token,
};
use tokio::time::timeout;

/// The shortest secret for programs, in bytes.
const SECRET_BYTES_MIN: usize = 32;
/// The maximum number of sign-ins that wait for the provider at a time.
const REDEEMING_MAX: u64 = 8;
/// The longest wait for a place among them.
const REDEEMING_WAIT_MAX: Duration = Duration::from_secs(5);
/// The maximum number of refused changes that are recorded in a minute: the rest are only counted, so that they do not fill the audit log.
const REFUSALS_NOTED_MAX: u32 = 60;

#[derive(Clone, Debug)]
pub struct OperatorSettings {
    pub trust: Trust,
    pub roles: RoleClaim,
    /// The way in for browsers, if there is one.
    pub sign_in: Option<sign_in::Settings>,
    /// The length of a browser's session.
    pub session: Duration,
    /// The file with the secret of programs that may look, if there is one.
    pub look_token: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("the operators' identity provider: {0}")]
    Jwks(#[from] JwksError),
    #[error("operators cannot sign in: {0}")]
    SignIn(#[from] sign_in::StartError),
    #[error("`operators.look_token`: cannot read {path}: {source}")]
    LookToken { path: PathBuf, source: io::Error },
    #[error("`operators.look_token`: {path} has fewer than {SECRET_BYTES_MIN} characters: a secret such as `openssl rand -hex 32` has 64")]
    ShortLookToken { path: PathBuf },
}

#[derive(Debug)]
pub struct Operators {
    issuer: String,
    roles: RoleClaim,
    signed: Signed,
    sign_in: Option<Browsers>,
    look_token: Option<blake3::Hash>,
    refusals: Mutex<Refusals>,
}

/// The state of browsers that sign in.
#[derive(Debug)]
pub struct Browsers {
    pub flow: Arc<SignIn>,
    client_id: String,
    session: Duration,
    sessions: Mutex<Sessions>,
    /// Places to wait for the provider, of which one address has a quarter at most.
    redeeming: Places,
    /// The origin of the page, to which changes must belong.
    origin: HeaderValue,
    is_secure: bool,
    /// The end of the cookies' names: cookies do not tell ports of one host apart.
    port: u16,
}

/// The refused changes that were recorded in the current minute.
#[derive(Debug, Default)]
struct Refusals {
    minute: u64,
    noted: u32,
}

/// The sender of a request to the operators' port.
#[derive(Clone, Debug)]
pub struct SignedIn {
    pub operator: Arc<Operator>,
    pub by: Way,
}

/// The credential of an operator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Token,
    Session,
    LookToken,
}

impl Way {
    fn name(self) -> &'static str {
        match self {
            Self::Token => "token",
            Self::Session => "session",
            Self::LookToken => "look_token",
        }
    }
}

impl Operators {
    /// Reads the files with secrets, and starts to fetch the provider's keys: an unreachable provider does not prevent the start.
    pub fn start(settings: OperatorSettings) -> Result<Self, StartError> {
        let OperatorSettings { trust, roles, sign_in, session, look_token } = settings;
        Ok(Self {
            issuer: trust.issuer.clone(),
            roles,
            signed: Signed::new(trust)?,
            sign_in: sign_in.map(|settings| Browsers::new(settings, session)).transpose()?,
            look_token: look_token.map(read_secret).transpose()?,
            refusals: Mutex::default(),
        })
    }

    /// The way in for browsers, if there is one.
    pub fn browsers(&self) -> Option<&Browsers> {
        self.sign_in.as_ref()
    }

    /// Finds the sender of a request; `None` if it has no credential. A wrong one is never passed over for another.
    pub async fn identify(&self, headers: &HeaderMap) -> Result<Option<SignedIn>, ApiError> {
        let Some(authorization) = headers.get(header::AUTHORIZATION) else {
            let session = self.sign_in.as_ref().and_then(|browsers| browsers.find(headers));
            return Ok(session.map(|operator| SignedIn { operator, by: Way::Session }));
        };
        let bearer = authorization.to_str().ok().and_then(|value| value.split_once(' '));
        let bearer = bearer.filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer")).map(|(_, token)| token.trim());
        let token = bearer.ok_or_else(|| wrong_token("it is not sent as `Authorization: Bearer TOKEN`"))?;
        // Digests are compared in constant time.
        if self.look_token.is_some_and(|secret| secret == blake3::hash(token.as_bytes())) {
            return Ok(Some(SignedIn { operator: Arc::new(program()), by: Way::LookToken }));
        }
        let claims = self.verify(token).await?;
        let operator = self.operator(&claims)?;
        Ok(Some(SignedIn { operator: Arc::new(operator), by: Way::Token }))
    }

    /// Verifies a token of the provider, for which the provider's keys may have to be fetched first.
    async fn verify(&self, token: &str) -> Result<Claims, ApiError> {
        let mut verified = self.signed.verify(unix_seconds(), token);
        if matches!(verified, Err(Invalid::Key | Invalid::Stale))
            && let Some(arrived) = self.signed.new_keys()
        {
            arrived.await;
            verified = self.signed.verify(unix_seconds(), token);
        }
        verified.map_err(|invalid| match invalid {
            Invalid::Stale => unreachable(&invalid.to_string()),
            invalid => wrong_token(&invalid.to_string()),
        })
    }

    fn operator(&self, claims: &Claims) -> Result<Operator, ApiError> {
        self.roles.operator(&claims.all, claims.expires).map_err(|problem| wrong_token(&problem))
    }

    /// The provider's discovery document. Waits for it, if it has not come yet.
    pub async fn document(&self) -> Result<Arc<Document>, ApiError> {
        if let Some(document) = self.signed.document() {
            return Ok(document);
        }
        if let Some(arrived) = self.signed.new_keys() {
            arrived.await;
        }
        self.signed.document().ok_or_else(|| unreachable("it has not said yet where people sign in"))
    }

    /// Verifies the ID token of a browser that came back from the provider: it must be for this client, and an answer to this sign-in.
    pub async fn verify_sign_in(&self, browsers: &Browsers, token: &str, nonce: &str) -> Result<Operator, ApiError> {
        let claims = self.verify(token).await?;
        let is_us = |name: &Value| name.as_str() == Some(browsers.client_id.as_str());
        let is_for_us = match claims.all.get("aud") {
            Some(Value::Array(all)) if all.len() > 1 => {
                // OpenID Connect Core 1.0, 3.1.3.7: of several, the one that asked is the authorized party.
                all.iter().any(is_us) && claims.all.get("azp").is_some_and(is_us)
            }
            Some(Value::Array(all)) => all.iter().all(is_us),
            Some(audience) => is_us(audience),
            None => false,
        };
        if !is_for_us {
            return Err(wrong_token("it was made for another client"));
        }
        if claims.all.get("nonce").and_then(Value::as_str) != Some(nonce) {
            return Err(wrong_token("it is not the answer to this sign-in"));
        }
        self.operator(&claims)
    }

    /// The claim that names roles, for those who have none.
    pub fn role_claim(&self) -> &str {
        &self.roles.claim
    }

    /// Writes an operator for the audit log.
    pub fn written(&self, SignedIn { operator, by }: &SignedIn) -> Value {
        json!({
            "issuer": (*by != Way::LookToken).then_some(&self.issuer), "subject": operator.subject, "name": operator.name,
            "email": operator.email, "role": operator.role.map(Role::name), "by": by.name(),
        })
    }

    /// Whether another refusal is recorded in this minute.
    pub fn notes_refusal(&self, now: u64) -> bool {
        let mut refusals = self.refusals.lock();
        if refusals.minute != now / 60 {
            *refusals = Refusals { minute: now / 60, noted: 0 };
        }
        refusals.noted += u32::from(refusals.noted < REFUSALS_NOTED_MAX + 1);
        refusals.noted <= REFUSALS_NOTED_MAX
    }

    /// Updates the metrics of fetched keys.
    pub fn show(&self) {
        metrics::show_operator_keys(self.signed.fetches());
    }
}

impl Browsers {
    fn new(settings: sign_in::Settings, session: Duration) -> Result<Self, sign_in::StartError> {
        let client_id = settings.client_id.clone();
        let flow = Arc::new(SignIn::new(settings, rand::random())?);
        let is_secure = flow.url().starts_with("https:");
        let authority = flow.url().split_once("://").map_or("", |(_, authority)| authority);
        let port = authority.rsplit_once(':').and_then(|(_, port)| port.parse().ok()).unwrap_or(if is_secure { 443 } else { 80 });
        Ok(Self {
            // The settings were checked: it is a URL without a path.
            origin: HeaderValue::from_str(flow.url()).expect("a URL is visible ASCII"),
            flow,
            client_id,
            session,
            sessions: Mutex::default(),
            redeeming: Places::new(Shares::quarters(REDEEMING_MAX, 1)),
            is_secure,
            port,
        })
    }

    /// A place to wait for the provider; `None` if there is none for too long. So made-up codes hold up those who make them up.
    pub async fn redeeming(&self, address: Option<IpAddr>) -> Option<Place> {
        let party = address.map_or(Party::Server, Party::of_address);
        timeout(REDEEMING_WAIT_MAX, self.redeeming.wait_for(party)).await.ok()
    }

    /// Begins a session, always with a name of its own. Returns its cookie.
    pub fn begin(&self, operator: Operator) -> HeaderValue {
        let secret = format!("{:032x}{:032x}", rand::random::<u128>(), rand::random::<u128>());
        let (now, lasts) = (unix_seconds(), self.session.as_secs());
        self.sessions.lock().begin(now, blake3::hash(secret.as_bytes()), Operator { until: now.saturating_add(lasts), ..operator });
        // A page of another site never sends it, not even by a link.
        self.cookie(Cookie::Session, &secret, lasts, "Strict")
    }

    /// Ends the session of a request, if it has one. Returns its operator, and the cookie that removes the browser's.
    pub fn end(&self, headers: &HeaderMap) -> (Option<Arc<Operator>>, HeaderValue) {
        let secret = self.sent(headers, Cookie::Session);
        let ended = secret.and_then(|secret| self.sessions.lock().end(unix_seconds(), &blake3::hash(secret.as_bytes())));
        (ended, self.cookie(Cookie::Session, "", 0, "Strict"))
    }

    fn find(&self, headers: &HeaderMap) -> Option<Arc<Operator>> {
        let secret = self.sent(headers, Cookie::Session)?;
        self.sessions.lock().find(unix_seconds(), &blake3::hash(secret.as_bytes()))
    }

    /// The cookie of a sign-in that has begun. The provider's page sends the browser back with it.
    pub fn begun(&self, value: &str, lasts_s: u64) -> HeaderValue {
        self.cookie(Cookie::SignIn, value, lasts_s, "Lax")
    }

    /// The value of a request's cookie. Two of one name are none: another page may have set one of them.
    pub fn sent<'a>(&self, headers: &'a HeaderMap, cookie: Cookie) -> Option<&'a str> {
        let name = self.name(cookie);
        let cookies =
            headers.get_all(header::COOKIE).into_iter().filter_map(|value| value.to_str().ok()).flat_map(|value| value.split(';'));
        let mut values = cookies.filter_map(|pair| pair.trim().split_once('=')).filter(|(found, _)| *found == name).map(|(_, value)| value);
        values.next().filter(|_| values.next().is_none())
    }

    fn cookie(&self, cookie: Cookie, value: &str, lasts_s: u64, same_site: &str) -> HeaderValue {
        let secure = if self.is_secure { "; Secure" } else { "" };
        let text = format!("{}={value}; Path=/; Max-Age={lasts_s}; HttpOnly; SameSite={same_site}{secure}", self.name(cookie));
        HeaderValue::from_str(&text).expect("its parts are visible ASCII")
    }

    fn name(&self, cookie: Cookie) -> String {
        // Browsers take a cookie with this prefix only from this host itself, encrypted.
        let prefix = if self.is_secure { "__Host-" } else { "" };
        let what = match cookie {
            Cookie::Session => "session",
            Cookie::SignIn => "sign-in",
        };
        format!("{prefix}tidemill-{what}-{}", self.port)
    }

    /// Refuses a change that a page of another origin may have made the browser send.
    pub fn check_origin(&self, headers: &HeaderMap) -> Result<(), ApiError> {
        let is_own = headers.get(header::ORIGIN) == Some(&self.origin);
        let message = "A change that is made with a browser's session must come from this port's own page.";
        if is_own { Ok(()) } else { Err(ApiError::wrong_door(message)) }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cookie {
    Session,
    SignIn,
}

/// A program that may look.
fn program() -> Operator {
    Operator { subject: "look_token".into(), name: None, email: None, role: Some(Role::Look), until: u64::MAX }
}

fn read_secret(path: PathBuf) -> Result<blake3::Hash, StartError> {
    let secret = read_token(&path).map_err(|source| StartError::LookToken { path: path.clone(), source })?;
    if secret.len() < SECRET_BYTES_MIN {
        return Err(StartError::ShortLookToken { path });
    }
    Ok(blake3::hash(secret.as_bytes()))
}

/// Refuses a request without a credential.
pub fn no_credential(sign_in: Option<&str>) -> ApiError {
    let browser = sign_in.map_or_else(String::new, |url| format!(", or sign in with a browser at {url}/console/sign-in"));
    let message = format!("This port is for operators: send a token of your identity provider as `Authorization: Bearer TOKEN`{browser}.");
    ApiError::new(StatusCode::UNAUTHORIZED, message).with_code("sign_in_required")
}

fn wrong_token(problem: &str) -> ApiError {
    ApiError::new(StatusCode::UNAUTHORIZED, format!("The token is not accepted: {problem}.")).with_code("invalid_token")
}

/// Refuses a request while it cannot be known who sends it.
fn unreachable(problem: &str) -> ApiError {
    let message = format!("The operators' identity provider cannot be reached, so no operator is let in: {problem}.");
    ApiError::new(StatusCode::SERVICE_UNAVAILABLE, message).with_code("provider_unreachable").retry_after(10)
}

/// Refuses an operator whose role does not suffice for `what`.
pub fn role_needed(what: &str, needed: Role, operator: &Operator, claim: &str) -> ApiError {
    let has = match operator.role {
        Some(role) => format!("{} has `{}`", operator.shown(), role.name()),
        None => format!("{} has none: its claim `{claim}` names no role that is known here", operator.shown()),
    };
    let message = format!("{what} needs the role `{}`, and {has}.", needed.name());
    ApiError::new(StatusCode::FORBIDDEN, message).with_code("role_required")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn browsers(url: &str) -> Browsers {
        let settings = sign_in::Settings { client_id: "c".into(), client_secret: None, ca: None, url: url.into(), scopes: Vec::new() };
        Browsers::new(settings, Duration::from_secs(60)).unwrap()
    }

    fn headers(of: &[(&'static str, &str)]) -> HeaderMap {
        of.iter().map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap())).collect()
    }

    fn ann() -> Operator {
        Operator { subject: "ann".into(), name: None, email: None, role: Some(Role::Operate), until: 0 }
    }

    #[test]
    fn a_session_is_a_cookie_that_scripts_and_other_sites_do_not_have() {
        let browsers = browsers("https://admin.example");
        let cookie = browsers.begin(ann());
        let cookie = cookie.to_str().unwrap();
        assert!(cookie.starts_with("__Host-tidemill-session-443="), "{cookie}");
        assert!(cookie.ends_with("; Path=/; Max-Age=60; HttpOnly; SameSite=Strict; Secure"), "{cookie}");
        let pair = cookie.split(';').next().unwrap();
        assert_eq!(browsers.find(&headers(&[("cookie", pair)])).unwrap().subject, "ann");
        let twice = format!("{pair}; {pair}");
        let other = pair.replace("443", "444");
        for wrong in [&*twice, &*other, "", "__Host-tidemill-session-443=", &pair[..pair.len() - 1]] {
            assert!(browsers.find(&headers(&[("cookie", wrong)])).is_none(), "{wrong}");
        }
        assert_ne!(browsers.begin(ann()).to_str().unwrap().split(';').next().unwrap(), pair, "each sign-in has a session of its own");
        let (ended, removed) = browsers.end(&headers(&[("cookie", pair)]));
        assert!(ended.is_some() && removed.to_str().unwrap().contains("Max-Age=0"));
        assert!(browsers.find(&headers(&[("cookie", pair)])).is_none());
        assert!(self::browsers("http://127.0.0.1:9100").begin(ann()).to_str().unwrap().starts_with("tidemill-session-9100="));
    }

    #[test]
    fn a_change_with_a_session_comes_from_the_very_same_origin() {
        let browsers = browsers("https://admin.example:8443");
        let own = ("origin", "https://admin.example:8443");
        assert!(browsers.check_origin(&headers(&[own])).is_ok());
        for wrong in ["https://admin.example", "http://admin.example:8443", "https://evil.example", "null", "https://admin.example:8443/"] {
            assert!(browsers.check_origin(&headers(&[("origin", wrong)])).is_err(), "{wrong}");
        }
        assert!(browsers.check_origin(&headers(&[])).is_err(), "browsers always say it");
    }
}
