//! People sign in at an identity provider with a browser: OAuth 2.0's authorization code flow with PKCE (RFC 6749, RFC 7636, and OpenID Connect
//! Core 1.0, 3.1).
//!
//! Nothing is kept between the two halves of a sign-in. A cookie has a random number and an end, and everything that must not be guessed
//! (`state`, `nonce`, PKCE's verifier) is a digest of it under a key of this process. So however many begin, there is nothing to fill; and
//! a code is taken only from the browser that began.

use crate::{
    jwt::remote::Document,
    operators::visible,
    web::{Target, TargetError, read_token},
};
use oauth2::{
    AuthUrl, AuthorizationCode, ClientId, ClientSecret, CsrfToken, EndpointNotSet, ExtraTokenFields, HttpRequest, HttpResponse,
    PkceCodeChallenge, PkceCodeVerifier, RedirectUrl, RequestTokenError, Scope, StandardRevocableToken, StandardTokenResponse, TokenUrl,
    basic::{BasicErrorResponse, BasicRevocationErrorResponse, BasicTokenIntrospectionResponse, BasicTokenType},
    http, url,
};
use serde::{Deserialize, Serialize};
use std::{
    io::{self, Read},
    path::PathBuf,
    time::Duration,
};
use subtle::ConstantTimeEq;

/// The time from the beginning of a sign-in to its end, in which a person types a password and finds a second factor.
const WITHIN_S: u64 = 600;
/// The longest wait for the provider's answer.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// The maximum size of that answer: tokens with many groups are long.
const ANSWER_BYTES_MAX: u64 = 256 << 10;
/// The longest error code of the provider that is shown.
const ERROR_CHARS_MAX: usize = 64;

#[derive(Clone, Debug)]
pub struct Settings {
    pub client_id: String,
    /// The file with the client's secret, for providers that ask for one.
    pub client_secret: Option<PathBuf>,
    /// The PEM file with the authorities of the provider's certificate; `None` for those that browsers trust.
    pub ca: Option<PathBuf>,
    /// The address of the operators' port for browsers, without a slash at its end.
    pub url: String,
    /// The scopes that are asked for, besides `openid`.
    pub scopes: Vec<String>,
}

#[derive(Debug)]
pub struct SignIn {
    settings: Settings,
    secret: Option<ClientSecret>,
    redirect: RedirectUrl,
    /// The key of this process, from which all that must not be guessed is derived.
    key: [u8; 32],
}

/// A sign-in that has begun.
#[derive(Debug)]
pub struct Begun {
    /// The provider's address to which the browser goes.
    pub location: String,
    /// The value of the cookie by which the browser is known when it comes back.
    pub cookie: String,
    pub lasts_s: u64,
}

/// The provider's answer to a code. Its ID token has not been verified yet.
#[derive(Debug)]
pub struct Redeemed {
    pub id_token: String,
    /// The value that the token's claim `nonce` must have.
    pub nonce: String,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error("cannot read {path}: {source}")]
    Secret { path: PathBuf, source: io::Error },
    #[error("`{url}` is not an address for browsers: {source}")]
    Url { url: String, source: url::ParseError },
}

/// The reason why a sign-in does not succeed.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    #[error("it began in another browser, or too long ago, or before this coordinator was started: begin it again")]
    NotBegun,
    #[error("the identity provider names no endpoints for people who sign in")]
    NoEndpoints,
    #[error("the identity provider's endpoint cannot be used: {0}")]
    Endpoint(String),
    #[error("the identity provider refused: {0}")]
    Refused(String),
    #[error("the identity provider does not answer: {0}")]
    Unreachable(String),
}

impl From<TargetError> for Failed {
    fn from(error: TargetError) -> Self {
        Self::Endpoint(error.to_string())
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct IdToken {
    id_token: String,
}

impl ExtraTokenFields for IdToken {}

type Client<Authorize, Token> = oauth2::Client<
    BasicErrorResponse,
    StandardTokenResponse<IdToken, BasicTokenType>,
    BasicTokenIntrospectionResponse,
    StandardRevocableToken,
    BasicRevocationErrorResponse,
    Authorize,
    EndpointNotSet,
    EndpointNotSet,
    EndpointNotSet,
    Token,
>;

impl SignIn {
    /// Reads the client's secret. `key` is random.
    pub fn new(settings: Settings, key: [u8; 32]) -> Result<Self, StartError> {
        let read = |path: &PathBuf| read_token(path).map_err(|source| StartError::Secret { path: path.clone(), source });
        let secret = settings.client_secret.as_ref().map(read).transpose()?.map(ClientSecret::new);
        let redirect = format!("{}/console/callback", settings.url);
        let redirect = RedirectUrl::new(redirect).map_err(|source| StartError::Url { url: settings.url.clone(), source })?;
        Ok(Self { settings, secret, redirect, key })
    }

    /// The address of the operators' port for browsers.
    pub fn url(&self) -> &str {
        &self.settings.url
    }

    /// Begins a sign-in. `random` is new each time; `now` is in Unix seconds.
    pub fn begin(&self, document: &Document, random: u128, now: u64) -> Result<Begun, Failed> {
        let endpoint = document.authorization_endpoint.clone().ok_or(Failed::NoEndpoints)?;
        let endpoint = AuthUrl::new(endpoint).map_err(|error| Failed::Endpoint(error.to_string()))?;
        let cookie = format!("{random:032x}.{}", now.saturating_add(WITHIN_S));
        let (state, nonce, verifier) = self.secrets(&cookie);
        let client = self.client().set_auth_uri(endpoint);
        let scopes = self.settings.scopes.iter().cloned().map(Scope::new);
        let (location, _) = client
            .authorize_url(|| CsrfToken::new(state))
            .add_scope(Scope::new("openid".into()))
            .add_scopes(scopes)
            .add_extra_param("nonce", nonce)
            .set_pkce_challenge(PkceCodeChallenge::from_code_verifier_sha256(&verifier))
            .url();
        Ok(Begun { location: location.into(), cookie, lasts_s: WITHIN_S })
    }

    /// Whether the browser with this cookie began the sign-in with this state. It costs nothing, and comes before any request.
    pub fn check(&self, cookie: &str, state: &str, now: u64) -> Result<(), Failed> {
        let until = cookie.split_once('.').and_then(|(_, until)| until.parse::<u64>().ok()).ok_or(Failed::NotBegun)?;
        let (expected, _, _) = self.secrets(cookie);
        let is_its_own = bool::from(expected.as_bytes().ct_eq(state.as_bytes()));
        if is_its_own && now < until { Ok(()) } else { Err(Failed::NotBegun) }
    }

    /// Gives the code to the provider, which answers with tokens. To be called after [`check`](Self::check). Blocks.
    pub fn redeem(&self, document: &Document, cookie: &str, code: &str) -> Result<Redeemed, Failed> {
        let endpoint = document.token_endpoint.clone().ok_or(Failed::NoEndpoints)?;
        let target = Target { url: endpoint.clone(), ca: self.settings.ca.clone() };
        let endpoint = TokenUrl::new(endpoint).map_err(|error| Failed::Endpoint(error.to_string()))?;
        let (_, nonce, verifier) = self.secrets(cookie);
        let client = self.client().set_token_uri(endpoint);
        // A redirect could take the code elsewhere.
        let http = target.client_without_redirects(ANSWER_MAX)?;
        let send = |request: HttpRequest| -> io::Result<HttpResponse> {
            let (head, body) = request.into_parts();
            let answer = http.send(head.method, None, head.headers, Some(&body)).map_err(io::Error::other)?;
            let mut response = http::Response::builder().status(answer.status());
            if let Some(kind) = answer.header("content-type") {
                response = response.header("content-type", kind);
            }
            let mut body = Vec::new();
            answer.into_reader().take(ANSWER_BYTES_MAX).read_to_end(&mut body)?;
            response.body(body).map_err(io::Error::other)
        };
        let exchange = client.exchange_code(AuthorizationCode::new(code.to_owned())).set_pkce_verifier(verifier);
        match exchange.request(&send) {
            Ok(answer) => Ok(Redeemed { id_token: answer.extra_fields().id_token.clone(), nonce }),
            Err(RequestTokenError::Request(error)) => Err(Failed::Unreachable(error.to_string())),
            Err(RequestTokenError::ServerResponse(refusal)) => Err(Failed::Refused(visible(refusal.error().as_ref(), ERROR_CHARS_MAX))),
            // The answer itself is not repeated: it may have secrets.
            Err(RequestTokenError::Parse(..) | RequestTokenError::Other(_)) => Err(Failed::Refused("its answer has no ID token".into())),
        }
    }

    fn client(&self) -> Client<EndpointNotSet, EndpointNotSet> {
        let client = Client::new(ClientId::new(self.settings.client_id.clone())).set_redirect_uri(self.redirect.clone());
        match &self.secret {
            Some(secret) => client.set_client_secret(secret.clone()),
            None => client,
        }
    }

    /// The state, the nonce and PKCE's verifier of a sign-in.
    fn secrets(&self, cookie: &str) -> (String, String, PkceCodeVerifier) {
        let derive = |what: &str| blake3::keyed_hash(&self.key, format!("{what} {cookie}").as_bytes()).to_hex().to_string();
        (derive("state"), derive("nonce"), PkceCodeVerifier::new(derive("verifier")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::web::tests::{Reply, Server};

    fn sign_in(key: u8) -> SignIn {
        let settings = Settings {
            client_id: "console".into(),
            client_secret: None,
            ca: None,
            url: "https://admin.example".into(),
            scopes: vec!["email".into()],
        };
        SignIn::new(settings, [key; 32]).unwrap()
    }

    fn document(server: &Server) -> Document {
        let url = server.target().url;
        Document {
            issuer: "https://id.example".into(),
            jwks_uri: url.clone(),
            authorization_endpoint: Some("https://id.example/authorize?tenant=a".into()),
            token_endpoint: Some(url),
        }
    }

    fn parameter(location: &str, name: &str) -> String {
        let url = url::Url::parse(location).unwrap();
        url.query_pairs().find(|(found, _)| found == name).unwrap().1.into_owned()
    }

    #[test]
    fn a_browser_is_sent_with_all_that_ties_the_answer_to_it() {
        let server = Server::start(Reply::status(500), None);
        let begun = sign_in(1).begin(&document(&server), 7, 1000).unwrap();
        let of = |name| parameter(&begun.location, name);
        assert!(begun.location.starts_with("https://id.example/authorize?tenant=a&"), "{}", begun.location);
        assert_eq!((of("response_type"), of("client_id"), of("scope")), ("code".into(), "console".into(), "openid email".into()));
        assert_eq!((of("code_challenge_method"), of("redirect_uri")), ("S256".into(), "https://admin.example/console/callback".into()));
        assert_ne!(of("state"), of("nonce"));
        let again = sign_in(1).begin(&document(&server), 8, 1000).unwrap();
        assert_ne!(parameter(&again.location, "state"), of("state"));
    }

    #[test]
    fn only_the_browser_that_began_comes_back_and_in_time() {
        let server = Server::start(Reply::status(500), None);
        let sign_in_here = sign_in(1);
        let begun = sign_in_here.begin(&document(&server), 7, 1000).unwrap();
        let state = parameter(&begun.location, "state");
        assert!(sign_in_here.check(&begun.cookie, &state, 1599).is_ok());
        assert!(sign_in_here.check(&begun.cookie, &state, 1600).is_err(), "too late");
        let longer = begun.cookie.replace("1600", "9999");
        for (cookie, state) in
            [("", &*state), ("x", &*state), (&*longer, &*state), (&*begun.cookie, ""), (&*begun.cookie, "0"), ("1.1600", &*state)]
        {
            assert!(sign_in_here.check(cookie, state, 1001).is_err(), "{cookie} {state}");
        }
        assert!(sign_in(2).check(&begun.cookie, &state, 1001).is_err(), "another process");
    }

    #[test]
    fn a_code_is_redeemed_with_its_verifier_and_refusals_tell_no_secrets() {
        let server = Server::start(Reply::ok(r#"{"access_token":"a","token_type":"Bearer","id_token":"x.y.z"}"#), None);
        let sign_in = sign_in(1);
        let document = document(&server);
        let begun = sign_in.begin(&document, 7, 1000).unwrap();
        let redeemed = sign_in.redeem(&document, &begun.cookie, "c0de").unwrap();
        assert_eq!((redeemed.id_token, redeemed.nonce), ("x.y.z".into(), parameter(&begun.location, "nonce")));
        let body = server.asked.lock().unwrap()[0].1.clone();
        assert!(body.contains("code=c0de") && body.contains("code_verifier=") && body.contains("client_id=console"), "{body}");

        server.set(Reply { body: r#"{"error":"invalid_grant"}"#.into(), ..Reply::status(400) });
        assert!(matches!(sign_in.redeem(&document, &begun.cookie, "c0de"), Err(Failed::Refused(why)) if why == "invalid_grant"));
        let forged = format!(r#"{{"error":"all is well\n{}"}}"#, "x".repeat(9000));
        server.set(Reply { body: forged, ..Reply::status(400) });
        let error = sign_in.redeem(&document, &begun.cookie, "c0de").unwrap_err().to_string();
        assert!(error.len() < 200 && !error.contains('\n'), "{error}");
        server.set(Reply::ok(r#"{"access_token":"s3cret","token_type":"Bearer"}"#));
        let error = sign_in.redeem(&document, &begun.cookie, "c0de").unwrap_err().to_string();
        assert!(!error.contains("s3cret"), "{error}");
        let nowhere = Document { token_endpoint: Some("http://127.0.0.1:1/".into()), ..document.clone() };
        assert!(matches!(sign_in.redeem(&nowhere, &begun.cookie, "c0de"), Err(Failed::Unreachable(_))));
        let plain = Document { token_endpoint: Some("http://id.example/".into()), ..document };
        assert!(matches!(sign_in.redeem(&plain, &begun.cookie, "c0de"), Err(Failed::Endpoint(_))));
    }
}
