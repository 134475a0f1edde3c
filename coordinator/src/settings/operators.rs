//! The settings of operators' sign-in: an identity provider, and who may do what.

use super::bounds::within;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeSet, net::IpAddr, path::PathBuf, time::Duration};
use tidemill_gateway::operators::OperatorSettings;
use tidemill_net::config::{ConfigError, invalid};
use tidemill_tenancy::{
    jwt::{self, ALGORITHMS, Jwks, remote, signed::Trust},
    operators::RoleClaim,
    sign_in,
    web::Target,
};

/// Operators who sign in, with roles: then reaching `admin` is not enough. Needs `admin` and `audit`, in which their changes are recorded.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OperatorsFlags {
    /// Issuer, an OpenID provider: the URL below which its `/.well-known/openid-configuration` is
    pub issuer: String,
    /// Id of this client at the provider
    pub client_id: String,
    /// Audiences of tokens (`aud`) besides the client's own [default: none]
    pub audience: Option<Vec<String>>,
    /// Algorithms that are accepted; only those with a public key [default: RS256 and ES256]
    pub algorithms: Option<Vec<String>>,
    /// Claim that names an operator's roles or groups: a claim, or its path, such as `realm_access.roles` [default: groups]
    pub roles_claim: Option<String>,
    /// Values of that claim that may look: at the cluster, records and what is spent [default: none]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub look: Vec<String>,
    /// Values that may operate: rollouts and appeals, and look [default: none]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub operate: Vec<String>,
    /// Values that may do everything: keys, tenants, erasures, backups [default: none]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub administer: Vec<String>,
    /// PEM file with the authorities that the provider's certificate may come from [default: those that browsers trust]
    pub ca: Option<PathBuf>,
    /// Seconds after which the provider's keys are fetched again; sooner when a token names a key that is not known [default: 3600]
    pub keys_max_age_s: Option<u64>,
    /// Seconds for which fetched keys are used while the provider cannot be reached; then no operator is let in [default: 86400]
    pub keys_kept_s: Option<u64>,
    /// Address of `admin` for browsers, such as `https://admin.example`; the provider sends them back to its /console/callback [default: none,
    /// browsers cannot sign in]
    pub url: Option<String>,
    /// File with the client's secret, for providers that ask for one [default: none]
    pub client_secret: Option<PathBuf>,
    /// Scopes that browsers ask for, besides `openid` [default: profile and email]
    pub scopes: Option<Vec<String>>,
    /// Seconds after which a browser has to sign in again [default: 28800]
    pub session_s: Option<u64>,
    /// File with a secret of 32 characters or more, for programs that may look: Prometheus, `tidemill up` [default: none]
    pub look_token: Option<PathBuf>,
}

/// A month: a key that is used for longer without its provider could have been withdrawn long ago.
const KEYS_KEPT_S_MAX: u64 = 30 * 86_400;
/// A week: an operator who lost a role keeps it until the session ends.
const SESSION_S_MAX: u64 = 7 * 86_400;

impl OperatorsFlags {
    /// `hosts` are the names that `admin` may be asked for by, and `tenants` the identity provider of clients.
    pub(super) fn check(self, hosts: &[String], tenants: Option<&jwt::Settings>) -> Result<OperatorSettings, ConfigError> {
        for (key, text) in [("operators.issuer", &self.issuer), ("operators.client_id", &self.client_id)] {
            if text.is_empty() {
                return Err(invalid(key, "", "must not be empty"));
            }
        }
        let target = Target { url: self.issuer.clone(), ca: None };
        target.check().map_err(|error| invalid("operators.issuer", &self.issuer, error.to_string()))?;
        let audience: Vec<String> = std::iter::once(self.client_id.clone()).chain(self.audience.unwrap_or_default()).collect();
        if audience.iter().any(String::is_empty) {
            return Err(invalid("operators.audience", audience.join(","), "an audience must not be empty"));
        }
        check_apart(&self.issuer, &audience, tenants)?;
        let max_age = within("operators.keys_max_age_s", self.keys_max_age_s.unwrap_or(3600), 1..=KEYS_KEPT_S_MAX)?;
        let kept = within("operators.keys_kept_s", self.keys_kept_s.unwrap_or(86_400), 1..=KEYS_KEPT_S_MAX)?;
        if kept <= max_age {
            return Err(invalid(
                "operators.keys_kept_s",
                kept,
                "must be more than keys_max_age_s, or keys would end before the next fetch",
            ));
        }
        let [max_age, kept] = [max_age, kept].map(Duration::from_secs);
        let jwks = Jwks::Url(remote::Settings::discovered(&self.issuer, self.ca.clone(), max_age, kept));
        let algorithms = self.algorithms.unwrap_or_else(|| ["RS256", "ES256"].map(str::to_owned).to_vec());
        let algorithms = algorithms.iter().map(|name| algorithm(name)).collect::<Result<Vec<_>, _>>()?;
        if algorithms.is_empty() {
            return Err(invalid("operators.algorithms", "", "must not be empty"));
        }
        let claim = self.roles_claim.unwrap_or_else(|| "groups".into());
        let session = within("operators.session_s", self.session_s.unwrap_or(28_800), 60..=SESSION_S_MAX)?;
        let scopes = self.scopes.unwrap_or_else(|| ["profile", "email"].map(str::to_owned).to_vec());
        let url = self.url.map(|url| check_url(url, hosts)).transpose()?;
        Ok(OperatorSettings {
            sign_in: url.map(|url| sign_in::Settings {
                client_id: self.client_id,
                client_secret: self.client_secret,
                ca: self.ca,
                url,
                scopes,
            }),
            trust: Trust { issuer: self.issuer, audience, algorithms, jwks },
            roles: check_roles(claim, [self.look, self.operate, self.administer])?,
            session: Duration::from_secs(session),
            look_token: self.look_token,
        })
    }
}

fn algorithm(name: &str) -> Result<jwt::signed::Algorithm, ConfigError> {
    let known = ALGORITHMS.iter().find(|(known, _)| *known == name).map(|(_, algorithm)| *algorithm);
    let names = ALGORITHMS.map(|(name, _)| name).join(", ");
    known.ok_or_else(|| invalid("operators.algorithms", name, format!("must be some of {names}")))
}

/// Tokens that clients send to the front door must not be tokens for operators.
fn check_apart(issuer: &str, audience: &[String], tenants: Option<&jwt::Settings>) -> Result<(), ConfigError> {
    let Some(Trust { issuer: theirs, audience: of_clients, .. }) = tenants.map(|tenants| &tenants.trust) else { return Ok(()) };
    let both = audience.iter().find(|audience| theirs == issuer && of_clients.contains(audience));
    both.map_or(Ok(()), |both| {
        let reason = "clients' tokens have it, too (jwt.audience): make another client at the provider for operators";
        Err(invalid("operators.audience", both, reason))
    })
}

fn check_roles(claim: String, values: [Vec<String>; 3]) -> Result<RoleClaim, ConfigError> {
    if claim.is_empty() {
        return Err(invalid("operators.roles_claim", "", "must not be empty"));
    }
    if values.iter().all(Vec::is_empty) {
        return Err(invalid("operators.administer", "", "nobody could do anything: name values of roles_claim that may"));
    }
    let mut seen = BTreeSet::new();
    for (key, values) in ["operators.look", "operators.operate", "operators.administer"].into_iter().zip(&values) {
        for value in values {
            if value.is_empty() {
                return Err(invalid(key, "", "a value must not be empty"));
            }
            if !seen.insert(value) {
                return Err(invalid(key, value, "it is there for another role, too: each role may do what the ones before it may"));
            }
        }
    }
    Ok(RoleClaim { claim, values })
}

/// Returns the address of the page as browsers state it, without a slash at its end.
fn check_url(url: String, hosts: &[String]) -> Result<String, ConfigError> {
    let wrong = |reason: &str| invalid("operators.url", &url, reason);
    let target = Target { url: url.clone(), ca: None };
    target.check().map_err(|error| wrong(&error.to_string()))?;
    let base = url.trim_end_matches('/');
    let authority = base.split_once("://").map_or("", |(_, authority)| authority);
    if authority.contains(['/', '?', '#', '@']) || base.bytes().any(|byte| byte.is_ascii_uppercase()) {
        return Err(wrong("it is a scheme and a host in small letters, and perhaps a port: https://admin.example"));
    }
    let default_port = if base.starts_with("https:") { ":443" } else { ":80" };
    if authority.ends_with(default_port) {
        return Err(wrong("browsers leave a scheme's own port out: so must it"));
    }
    let host =
        authority.rsplit_once(':').filter(|(_, port)| port.bytes().all(|byte| byte.is_ascii_digit())).map_or(authority, |(host, _)| host);
    let is_address = host.trim_matches(['[', ']']).parse::<IpAddr>().is_ok();
    if !is_address && host != "localhost" && !hosts.iter().any(|name| name.eq_ignore_ascii_case(host)) {
        return Err(wrong("its host must be one of `hosts`, or the port does not answer to it"));
    }
    Ok(base.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_tenancy::operators::Role;

    const LEAST: &str = "issuer = 'https://id.example'\nclient_id = 'ops'\n";

    fn checked(more: &str, tenants: Option<&jwt::Settings>) -> Result<OperatorSettings, String> {
        let flags: OperatorsFlags = toml::from_str(&format!("{LEAST}{more}")).map_err(|error| error.to_string())?;
        flags.check(&["admin.example".into()], tenants).map_err(|error| error.to_string())
    }

    #[test]
    fn two_keys_and_a_role_are_enough() {
        let settings = checked("administer = ['admins']", None).unwrap();
        assert_eq!((settings.trust.audience, settings.roles.claim), (vec!["ops".to_owned()], "groups".into()));
        assert_eq!(settings.roles.values[Role::Administer as usize], ["admins"]);
        assert!(settings.sign_in.is_none() && settings.look_token.is_none());
        let Jwks::Url(url) = settings.trust.jwks else { panic!("the keys are discovered") };
        assert_eq!(url.target.url, "https://id.example/.well-known/openid-configuration");
        let with_browsers = checked("administer = ['admins']\nurl = 'https://admin.example/'", None).unwrap();
        assert_eq!(with_browsers.sign_in.unwrap().url, "https://admin.example");
    }

    #[test]
    fn wrong_sections_are_told_why() {
        for (more, words) in [
            ("", "nobody could do anything"),
            ("look = ['a']\nadminister = ['a']", "for another role"),
            ("look = ['']", "must not be empty"),
            ("look = ['a']\naudience = ['']", "must not be empty"),
            ("look = ['a']\nalgorithms = ['HS256']", "must be some of"),
            ("look = ['a']\nalgorithms = ['none']", "must be some of"),
            ("look = ['a']\nkeys_kept_s = 3600", "keys_max_age_s"),
            ("look = ['a']\nsession_s = 1", "session_s"),
            ("look = ['a']\nurl = 'http://admin.example'", "https"),
            ("look = ['a']\nurl = 'https://other.example'", "hosts"),
            ("look = ['a']\nurl = 'https://admin.example/console'", "perhaps a port"),
            ("look = ['a']\nurl = 'https://admin.example:443'", "own port"),
            ("look = ['a']\nurl = 'https://a@admin.example'", "perhaps a port"),
            ("look = ['a']\nroles = 'x'", "roles"),
        ] {
            let error = checked(more, None).unwrap_err();
            assert!(error.contains(words), "{more}: {error}");
        }
    }

    #[test]
    fn clients_tokens_are_no_tokens_for_operators() {
        let tenants = |issuer: &str, audience: &str| jwt::Settings {
            trust: Trust {
                issuer: issuer.into(),
                audience: vec![audience.into()],
                algorithms: Vec::new(),
                jwks: Jwks::File("keys.json".into()),
            },
            tenant_claim: "tenant".into(),
            user_claim: "sub".into(),
            user_required: false,
            tier_claim: "tier".into(),
            tier: "free".into(),
            background_s: 0,
        };
        let checked = |issuer, audience| checked("look = ['a']", Some(&tenants(issuer, audience)));
        assert!(checked("https://id.example", "api").is_ok() && checked("https://other.example", "ops").is_ok());
        assert!(checked("https://id.example", "ops").unwrap_err().contains("jwt.audience"));
    }
}
