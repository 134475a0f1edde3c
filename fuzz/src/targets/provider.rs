//! Answers of an identity provider: its discovery document, its keys, and what it gives for a sign-in's code; and tokens and claims that it
//! never signed.

use super::answers::{Server, whole};
use crate::{
    dice::Dice,
    mutate::{bytes, json, text},
    target::{Subject, Target},
};
use serde_json::{Map, Value, json};
use std::{collections::BTreeSet, time::Duration};
use tidemill_tenancy::{
    jwt::{
        remote::{self, Document},
        signed::{Algorithm, Jwks, Signed, Trust},
    },
    operators::{Role, RoleClaim},
    sign_in::{self, SignIn},
    web::Target as Address,
};

pub(crate) const PROVIDER: Target = Target {
    name: "provider",
    about: "answers of an identity provider, and tokens that it never signed",
    open,
    cpu_max: Duration::from_secs(10),
    // Most of it is what is made up: an answer of a megabyte is refused.
    bytes_max: 512 << 20,
    short: 150,
};

const DOCUMENT: &str = "/.well-known/openid-configuration";
const KEYS: &str = "/keys";
const TOKEN: &str = "/token";
/// A text that only the provider and this client may know.
const SECRET: &str = "s3cret-of-the-provider";
/// The longest message about a provider's answer.
const MESSAGE_CHARS_MAX: usize = 1000;
const NOW: u64 = 1_300_819_000;

/// The keys of RFC 7515, A.2 and A.3, and of RFC 8037, A.2.
const RSA_N: &str = "ofgWCuLjybRlzo0tZWJjNiuSfb4p4fAkd_wWJcyQoTbji9k0l8W26mPddxHmfHQp-Vaw-4qPCJrcS2mJPMEzP1Pt0Bm4d4QlL-yRT-SFd2lZS-pCgNMsD1W_YpRPEwO\
     WvG6b32690r2jZ47soMZo9wGzjb_7OMg0LOL-bSf63kpaSHSXndS5z5rexMdbBYUsLA9e-KXBdQOS-UTo7WTBEMa2R2CapHg665xsmtdVMTBQY4uDZlxvb3qCo5ZwKh9kG4LT6_I5Ih\
     lJH7aGhyxXFvUK-DWNmoudF8NAco9_h9iaGNj8q2ethFkMLs91kzk2PAcDTW9gb54h4FRWyuXpoQ";
/// The token of RFC 7515, A.3, which is well signed and names no audience.
const SIGNED: &str = "eyJhbGciOiJFUzI1NiJ9.eyJpc3MiOiJqb2UiLA0KICJleHAiOjEzMDA4MTkzODAsDQogImh0dHA6Ly9leGFtcGxlLmNvbS9pc19yb290Ijp0cnVlfQ.\
     DtEhU3ljbEg8L38VWAfUAqOyKAM6-Xx-F4GawxaepmXFgfTjDxw5djxLa8ISlSApmWQxfKTTJqPP3-Kg6NU1Q";
/// {"alg":"none"}, {"alg":"HS256"}, {"alg":"RS256","kid":"r"}, {"alg":"EdDSA","kid":"o","crit":["x"]}
const HEADERS: [&str; 4] = [
    "eyJhbGciOiJub25lIn0",
    "eyJhbGciOiJIUzI1NiJ9",
    "eyJhbGciOiJSUzI1NiIsImtpZCI6InIifQ",
    "eyJhbGciOiJFZERTQSIsImtpZCI6Im8iLCJjcml0IjpbIngiXX0",
];

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let server = Server::start(&runtime)?;
    let seeds = Seeds::new(&server.url);
    let settings = sign_in::Settings {
        client_id: "console".into(),
        client_secret: None,
        ca: None,
        url: "http://127.0.0.1:9100".into(),
        scopes: vec!["email".into()],
    };
    let sign_in = SignIn::new(settings, [7; 32])?;
    let names = ["viewers", "operators", "admins"].map(str::to_owned);
    Ok(Box::new(move |dice: &mut Dice| {
        for (path, seed) in [(DOCUMENT, &seeds.document), (KEYS, &seeds.keys), (TOKEN, &seeds.answer)] {
            let answer = answer(dice, seed, &seeds.words);
            dice.show(path, &answer);
            server.set(path, answer);
        }
        let signed = Signed::new(trust(dice, &server.url)).map_err(|error| error.to_string())?;
        if let Some(arrived) = signed.new_keys() {
            runtime.block_on(arrived);
        }
        for _ in 0..dice.few(4) {
            let token = token(dice);
            dice.show("token", token.as_bytes());
            if let Ok(claims) = signed.verify(NOW, &token) {
                return Err(format!("a token that nobody signed is accepted: {claims:?}"));
            }
        }
        let known = Document {
            issuer: server.url.clone(),
            jwks_uri: format!("{}{KEYS}", server.url),
            authorization_endpoint: Some(format!("{}/authorize", server.url)),
            token_endpoint: Some(format!("{}{TOKEN}", server.url)),
        };
        let document = signed.document().filter(|_| dice.one_in(2)).map_or(known, |found| (*found).clone());
        sign_in_by(&sign_in, &document, dice.bits())?;
        claims(dice, &seeds, &names)
    }))
}

fn trust(dice: &mut Dice, url: &str) -> Trust {
    let keys = Address { url: format!("{url}{KEYS}"), ca: None };
    let settings = match dice.below(3) {
        0 => remote::Settings::keys(keys, Duration::from_secs(3600)),
        _ => remote::Settings::discovered(url, None, Duration::from_secs(3600), Duration::from_secs(86_400)),
    };
    let algorithms = vec![Algorithm::RS256, Algorithm::ES256, Algorithm::EdDSA, Algorithm::PS512];
    let issuer = (*dice.pick(&["joe", url])).to_owned();
    Trust { issuer, audience: vec!["tidemill".into()], algorithms, jwks: Jwks::Url(settings) }
}

fn sign_in_by(sign_in: &SignIn, document: &Document, random: u64) -> Result<(), String> {
    let told = |error: sign_in::Failed| {
        let said = error.to_string();
        match said.chars().find(|c| c.is_control()) {
            Some(c) => Err(format!("a message has the character {c:?}: {said:?}")),
            None if said.chars().count() > MESSAGE_CHARS_MAX => Err(format!("a message of {} bytes", said.len())),
            None if said.contains(SECRET) => Err(format!("a message tells a secret: {said}")),
            None => Ok(()),
        }
    };
    let begun = match sign_in.begin(document, random.into(), NOW) {
        Ok(begun) => begun,
        Err(error) => return told(error),
    };
    if !begun.location.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(format!("an address that is no header: {}", begun.location));
    }
    sign_in.redeem(document, &begun.cookie, "c0de").map_or_else(told, |_| Ok(()))
}

/// Reads claims of a token that was verified: names forge nothing, and a role is one that they say.
fn claims(dice: &mut Dice, seeds: &Seeds, names: &[String; 3]) -> Result<(), String> {
    let mut tree = seeds.claims.clone();
    json::mutate(dice, &mut tree, &seeds.words);
    let Value::Object(all) = tree else { return Ok(()) };
    dice.show("claims", Value::Object(all.clone()).to_string().as_bytes());
    let claim = (*dice.pick(&["groups", "realm_access.roles", "scope", "a.b.c"])).to_owned();
    let roles = RoleClaim { claim, values: names.clone().map(|name| vec![name]) };
    let Ok(operator) = roles.operator(&all, NOW) else { return Ok(()) };
    let shown = [Some(&operator.subject), operator.name.as_ref(), operator.email.as_ref()];
    if let Some(text) =
        shown.into_iter().flatten().find(|text| text.is_empty() || text.len() > 4 * 255 || text.chars().any(char::is_control))
    {
        return Err(format!("an operator is shown as {text:?}"));
    }
    match operator.role {
        Some(role) if !texts(&all).iter().any(|text| text.split(' ').any(|word| word == names[role as usize])) => {
            Err(format!("the claims do not say {}", Role::name(role)))
        }
        _ => Ok(()),
    }
}

/// All texts in claims.
fn texts(all: &Map<String, Value>) -> BTreeSet<String> {
    fn collect(tree: &Value, texts: &mut BTreeSet<String>) {
        match tree {
            Value::String(text) => drop(texts.insert(text.clone())),
            Value::Array(items) => items.iter().for_each(|item| collect(item, texts)),
            Value::Object(fields) => fields.values().for_each(|value| collect(value, texts)),
            _ => {}
        }
    }
    let mut texts = BTreeSet::new();
    all.values().for_each(|value| collect(value, &mut texts));
    texts
}

fn token(dice: &mut Dice) -> String {
    let [first, payload, signature] = [0, 1, 2].map(|part| SIGNED.split('.').nth(part).unwrap_or_default());
    let first = if dice.one_in(3) { *dice.pick(&HEADERS) } else { first };
    let token = format!("{first}.{payload}.{}", if dice.one_in(6) { "" } else { signature });
    if dice.one_in(3) { token } else { text::mutate(dice, &token, &HEADERS) }
}

fn answer(dice: &mut Dice, seed: &Value, words: &[String]) -> Vec<u8> {
    let mut tree = seed.clone();
    if dice.one_in(2) {
        json::mutate(dice, &mut tree, words);
    }
    let mut body = json::text(dice, &tree).into_bytes();
    if dice.one_in(10) {
        bytes::mutate(dice, &mut body);
    }
    let status = if dice.one_in(8) { *dice.pick(&["400 Bad Request", "500 x", "302 Found", "204 x", "401 x"]) } else { "200 OK" };
    let kind = if dice.one_in(10) { *dice.pick(&["text/html", "application/jwt", "text/plain", ""]) } else { "application/json" };
    let mut answer = whole(status, kind, &body);
    if dice.one_in(20) {
        bytes::mutate(dice, &mut answer);
    }
    answer
}

struct Seeds {
    document: Value,
    keys: Value,
    answer: Value,
    claims: Value,
    words: Vec<String>,
}

impl Seeds {
    fn new(url: &str) -> Self {
        let document = json!({
            "issuer": url, "jwks_uri": format!("{url}{KEYS}"), "authorization_endpoint": format!("{url}/authorize?a=b"),
            "token_endpoint": format!("{url}{TOKEN}"), "response_types_supported": ["code"],
            "id_token_signing_alg_values_supported": ["RS256"],
        });
        let keys = json!({"keys": [
            {"kty": "RSA", "kid": "r", "use": "sig", "alg": "RS256", "n": RSA_N, "e": "AQAB"},
            {"kty": "EC", "crv": "P-256", "x": "f83OJ3D2xF1Bg8vub9tLe1gHMzV76e8Tus9uPHvRVEU",
             "y": "x_FEzRu9m36HLN_tue659LNpXW6pCyStikYjKIWI5a0"},
            {"kty": "OKP", "crv": "Ed25519", "kid": "o", "x": "11qYAYKxCrfVS_7TyWQHOg7hcvPapiMlrwIaaPcHURo"},
            {"kty": "oct", "kid": "h", "k": "AyM1SysPpbyDfgZld3umj1qzKObwVMkoqQ-EstJQLr_T-1qS0gZH75aKtMN3Yj0iPS4hcgUuTwjAzZr1Z9CAow"},
            {"kty": "EC", "crv": "P-521", "x": "AA", "y": "AA", "x5c": ["MII"], "key_ops": ["verify"]},
        ]});
        let answer = json!({
            "access_token": SECRET, "token_type": "Bearer", "expires_in": 3600, "refresh_token": SECRET, "scope": "openid email",
            "id_token": SIGNED, "error": "invalid_grant", "error_description": SECRET,
        });
        let claims = json!({
            "sub": "u1", "name": "Ann", "preferred_username": "ann", "email": "ann@x.example", "email_verified": true,
            "groups": ["viewers", "admins", "x"], "realm_access": {"roles": ["operators"]}, "scope": "openid operators", "a": {"b": {"c": "admins"}},
        });
        let words = json::keys([&document, &keys, &answer, &claims]);
        Self { document, keys, answer, claims, words }
    }
}
