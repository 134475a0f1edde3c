//! The settings of tenants: tiers, prices, an identity provider, shedding.

use super::bounds::positive;
use serde::{Deserialize, Serialize};
use std::{collections::BTreeMap, path::PathBuf, time::Duration};
use tidemill_cluster::class::Classes;
use tidemill_net::config::{ConfigError, invalid};
use tidemill_tenancy::{
    jwt::{self, Jwks, remote, signed::Trust},
    limits::{Limit, Overrides},
    money::Amount,
    shedding::Watermarks,
    sink::http,
    tier::{ANSWER_TOKENS, Tier, Tiers},
    usage::price::{Price, Prices},
    web::Target,
};

/// The place where tenants and keys are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum KeptIn {
    /// In memory, until this process ends.
    Memory,
    File(PathBuf),
    /// In the registry. `earlier` is the file in which this coordinator keeps them while it is alone.
    Registry {
        earlier: PathBuf,
    },
}

/// One tier, which replaces a built-in one of this name or is added to them.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct TierFlags {
    /// Requests a minute: a number, or `"none"` [default: the built-in tier's, or none]
    pub requests_per_minute: Option<Limit>,
    /// Tokens a minute, of prompts and answers together: a number, or `"none"` [default: the built-in tier's, or none]
    pub tokens_per_minute: Option<Limit>,
    /// Tokens a day: a number, or `"none"` [default: none]
    pub tokens_per_day: Option<Limit>,
    /// Requests at a time: a number, or `"none"` [default: none]
    pub concurrent: Option<Limit>,
    /// Money that a tenant may spend in a day (UTC), by the prices of `[price.MODEL]`: a sum, or `"none"` [default: none]
    pub budget_day: Option<Amount>,
    /// Money from which answers say that the day's budget runs out: a sum, or `"none"` [default: none]
    pub budget_day_soft: Option<Amount>,
    /// Money that a tenant may spend in a month (UTC): a sum, or `"none"` [default: none]
    pub budget_month: Option<Amount>,
    /// Money from which answers say that the month's budget runs out: a sum, or `"none"` [default: none]
    pub budget_month_soft: Option<Amount>,
    /// Limits beside the others of requests for one model: `[tier.NAME.models.MODEL]` sections [default: none]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub models: BTreeMap<String, Overrides>,
    /// `service_tier` of requests that ask for none, or for one that the tier does not have [default: the built-in tier's, or default]
    pub class: Option<String>,
    /// `service_tier`s that requests may ask for [default: the built-in tier's, or that of `class`]
    pub classes: Option<Vec<String>>,
    /// Turn in which the tier is refused when there is too much to do: 1, first; 2, after that; 0, never [default: the built-in tier's, or 2]
    pub shed: Option<u8>,
    /// Most tokens of an answer whose length a client leaves open, where tokens are limited [default: 4096]
    pub answer_tokens: Option<u32>,
}

/// An identity provider whose tokens are accepted.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct JwtFlags {
    /// Issuer that tokens must have as `iss`
    pub issuer: String,
    /// Audiences of which tokens must have one in `aud`
    pub audience: Vec<String>,
    /// Algorithms that are accepted, such as ES256; only those with a public key
    pub algorithms: Vec<String>,
    /// File with the provider's public keys, read again when it changes; or else `jwks_url` [default: none]
    pub jwks: Option<PathBuf>,
    /// URL of the provider's public keys, fetched again by age, and when a token names a key that is not known [default: none]
    pub jwks_url: Option<String>,
    /// PEM file with the authorities that the URL's certificate may come from [default: those that browsers trust]
    pub jwks_ca: Option<PathBuf>,
    /// Seconds after which keys are fetched again [default: 3600]
    pub jwks_max_age_s: Option<u64>,
    /// Claim that names the tenant [default: tenant]
    pub tenant_claim: Option<String>,
    /// Claim that names the user [default: sub]
    pub user_claim: Option<String>,
    /// Refuses tokens without the user's claim; else they are for their whole tenant [default: false]
    pub user_required: Option<bool>,
    /// Claim that names the tier [default: tier]
    pub tier_claim: Option<String>,
    /// Tier of tokens without that claim [default: free]
    pub tier: Option<String>,
    /// Seconds for which batches go on after the token that made them has expired [default: 86400]
    pub background_s: Option<u64>,
}

/// An endpoint that collects usage events.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SinkFlags {
    /// Address that events are posted to
    pub url: String,
    /// File with a token that is sent as `Authorization: Bearer`; read before each request [default: none]
    pub token: Option<PathBuf>,
    /// PEM file with the authorities that the URL's certificate may come from [default: those that browsers trust]
    pub ca: Option<PathBuf>,
}

impl SinkFlags {
    /// `source` is this coordinator's name.
    pub(super) fn check(self, source: &str) -> Result<http::Settings, ConfigError> {
        let target = Target { url: self.url, ca: self.ca };
        target.check().map_err(|error| invalid("usage_sink.url", &target.url, error.to_string()))?;
        Ok(http::Settings { target, token: self.token, source: source.to_owned() })
    }
}

/// The load from which tiers are turned away.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct SheddingFlags {
    /// Whether tiers are turned away when there is too much to do [default: true]
    pub enabled: Option<bool>,
    /// Share of the decode workers' KV blocks in use [default: 0.9]
    pub kv_used: Option<f64>,
    /// Time to first token that 19 of 20 requests keep, in milliseconds [default: the limit of the class `default`, else 800]
    pub ttft_p95_ms: Option<u64>,
}

/// The deadline of background work: as long as a batch has.
const BACKGROUND_S: u64 = 86_400;
/// The maximum age of a key set: providers that withdraw a key expect it to be dropped within hours.
const JWKS_MAX_AGE_S: u64 = 3600;

pub(super) fn tiers(given: BTreeMap<String, TierFlags>, classes: &Classes) -> Result<Tiers, ConfigError> {
    let mut tiers = Tiers::default();
    // If the operator has defined other classes, the built-in tiers keep those of their classes that exist.
    let built_in: Vec<Tier> = tiers.iter().cloned().collect();
    for mut tier in built_in {
        tier.classes.retain(|class| classes.by_tier(Some(class)).is_some());
        if tier.classes.is_empty() {
            tier.classes.push("default".into());
        }
        tier.class = tier.classes[0].clone();
        tiers.put(tier);
    }
    for (name, flags) in given {
        tidemill_tenancy::records::check_name("tier", &name).map_err(|problem| invalid("tier", &name, problem))?;
        let earlier = tiers.get(&name).map(|tier| (**tier).clone());
        let earlier = earlier.unwrap_or_else(|| Tier {
            name: name.clone(),
            limits: Default::default(),
            models: BTreeMap::new(),
            class: "default".into(),
            classes: vec!["default".into()],
            shed: 2,
            answer_tokens: ANSWER_TOKENS,
        });
        tiers.put(flags.check(earlier, classes)?);
    }
    Ok(tiers)
}

impl TierFlags {
    fn check(self, earlier: Tier, classes: &Classes) -> Result<Tier, ConfigError> {
        let name = earlier.name;
        let limits = Overrides {
            requests_per_minute: self.requests_per_minute,
            tokens_per_minute: self.tokens_per_minute,
            tokens_per_day: self.tokens_per_day,
            concurrent: self.concurrent,
            budget_day: self.budget_day,
            budget_day_soft: self.budget_day_soft,
            budget_month: self.budget_month,
            budget_month_soft: self.budget_month_soft,
        };
        limits.check().map_err(|problem| invalid("tier", &name, problem))?;
        let class = match (&self.class, &self.classes) {
            (Some(class), _) => class.clone(),
            (None, Some(classes)) => classes.first().cloned().unwrap_or_default(),
            (None, None) => earlier.class,
        };
        let mut has = self.classes.unwrap_or(if self.class.is_some() { vec![class.clone()] } else { earlier.classes });
        if !has.contains(&class) {
            has.push(class.clone());
        }
        if let Some(unknown) = has.iter().find(|class| *class == "auto" || classes.by_tier(Some(class)).is_none()) {
            let all = classes.iter().map(|(_, class)| class.service_tier.as_str()).collect::<Vec<_>>().join(", ");
            return Err(invalid("tier.classes", unknown, format!("tier `{name}` may have the classes' service tiers: {all}")));
        }
        let shed = match self.shed.unwrap_or(earlier.shed) {
            shed @ 0..=2 => shed,
            other => return Err(invalid("tier.shed", other, "must be 0 (never), 1 (first) or 2 (then)")),
        };
        let answer_tokens = positive("tier.answer_tokens", self.answer_tokens.unwrap_or(earlier.answer_tokens))?;
        let models = self.models.into_iter().map(|(model, limits)| (model, limits.over(Default::default())));
        Ok(Tier { name, limits: limits.over(earlier.limits), models: models.collect(), class, classes: has, shed, answer_tokens })
    }
}

pub(super) fn prices(given: BTreeMap<String, Price>) -> Result<Prices, ConfigError> {
    match given.iter().find(|(_, price)| !price.is_sound()) {
        Some((model, _)) => Err(invalid("price", model, "prices are per million tokens, and not negative")),
        None => Ok(Prices(given)),
    }
}

impl JwtFlags {
    pub(super) fn check(self, tiers: &Tiers) -> Result<jwt::Settings, ConfigError> {
        let known = |name: &String| jwt::ALGORITHMS.iter().find(|(known, _)| known == name).map(|(_, algorithm)| *algorithm);
        let algorithm = |name: &String| {
            let names = jwt::ALGORITHMS.map(|(name, _)| name).join(", ");
            known(name).ok_or_else(|| invalid("jwt.algorithms", name, format!("must be some of {names}")))
        };
        let algorithms = self.algorithms.iter().map(algorithm).collect::<Result<Vec<_>, _>>()?;
        for (key, empty) in [
            ("jwt.algorithms", algorithms.is_empty()),
            ("jwt.audience", self.audience.iter().all(String::is_empty)),
            ("jwt.issuer", self.issuer.is_empty()),
        ] {
            if empty {
                return Err(invalid(key, "", "must not be empty"));
            }
        }
        let jwks = match (self.jwks, self.jwks_url) {
            (Some(path), None) => Jwks::File(path),
            (None, Some(url)) => {
                let target = Target { url, ca: self.jwks_ca };
                target.check().map_err(|error| invalid("jwt.jwks_url", &target.url, error.to_string()))?;
                let max_age_s = positive("jwt.jwks_max_age_s", self.jwks_max_age_s.unwrap_or(JWKS_MAX_AGE_S))?;
                Jwks::Url(remote::Settings::keys(target, Duration::from_secs(max_age_s)))
            }
            (None, None) => {
                return Err(invalid("jwt.jwks", "", "the provider's public keys are needed: in a file (jwks), or at a URL (jwks_url)"));
            }
            (Some(path), Some(_)) => return Err(invalid("jwt.jwks", path.display(), "there is jwks_url, too: give one of them")),
        };
        let tier = self.tier.unwrap_or_else(|| "free".into());
        if tiers.get(&tier).is_none() {
            return Err(invalid("jwt.tier", tier, format!("must be one of {}", tiers.names())));
        }
        Ok(jwt::Settings {
            trust: Trust { issuer: self.issuer, audience: self.audience, algorithms, jwks },
            tenant_claim: self.tenant_claim.unwrap_or_else(|| "tenant".into()),
            user_claim: self.user_claim.unwrap_or_else(|| "sub".into()),
            user_required: self.user_required.unwrap_or(false),
            tier_claim: self.tier_claim.unwrap_or_else(|| "tier".into()),
            tier,
            background_s: self.background_s.unwrap_or(BACKGROUND_S),
        })
    }
}

impl SheddingFlags {
    /// Returns `None` if shedding is off.
    pub(super) fn check(self, classes: &Classes) -> Result<Option<Watermarks>, ConfigError> {
        if self.enabled == Some(false) {
            return Ok(None);
        }
        let kv_used = self.kv_used.unwrap_or(0.9);
        if !(kv_used > 0.0 && kv_used <= 1.0) {
            return Err(invalid("shedding.kv_used", kv_used, "must be more than 0, and at most 1"));
        }
        let promised = classes.by_tier(None).and_then(|class| classes.get(class).ttft_ms);
        let ttft_p95 = match self.ttft_p95_ms {
            Some(ms) => Duration::from_millis(positive("shedding.ttft_p95_ms", ms)?),
            None => Duration::from_secs_f64(promised.unwrap_or(800.0) / 1e3),
        };
        Ok(Some(Watermarks { kv_used, ttft_p95 }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tidemill_tenancy::limits::Limits;

    fn tiers_of(file: &str) -> Result<Tiers, String> {
        #[derive(Deserialize)]
        struct File {
            tier: BTreeMap<String, TierFlags>,
        }
        let File { tier } = toml::from_str(file).map_err(|error| error.to_string())?;
        tiers(tier, &Classes::defaults(2000.0, 100.0)).map_err(|error| error.to_string())
    }

    #[test]
    fn a_section_changes_a_tier_or_makes_one() {
        let tiers = tiers_of(
            "[tier.free]\nrequests_per_minute = 5\n[tier.free.models.big]\nrequests_per_minute = 1\n\
             [tier.gold]\ntokens_per_day = 1000\nclass = 'priority'\nshed = 0",
        )
        .unwrap();
        let free = tiers.get("free").unwrap();
        assert_eq!((free.limits.requests_per_minute, free.limits.tokens_per_minute), (Some(5), Some(100_000)));
        assert_eq!(free.models["big"], Limits { requests_per_minute: Some(1), ..Limits::default() });
        let gold = tiers.get("gold").unwrap();
        assert_eq!((gold.service_tier(None), gold.service_tier(Some("flex")), gold.shed), ("priority", "priority", 0));
        assert!(tiers.get("premium").is_some());
    }

    #[test]
    fn wrong_tiers_are_told_why() {
        for (file, words) in [
            ("[tier.free]\nclass = 'gold'", "priority"),
            ("[tier.free]\nclasses = ['auto']", "auto"),
            ("[tier.free]\nshed = 3", "tier.shed"),
            ("[tier.free]\nrequests_per_minute = 0", "from 1 on"),
            ("[tier.free]\nrequests = 1", "requests"),
            ("[tier.'a b']\nshed = 1", "letters"),
            ("[tier.free]\nanswer_tokens = 0", "answer_tokens"),
            ("[tier.free]\nbudget_day = -1", "sum of money"),
            ("[tier.free]\nbudget_month = 5\nbudget_month_soft = '5.01'", "budget_month_soft"),
        ] {
            let error = tiers_of(file).unwrap_err();
            assert!(error.contains(words), "{file}: {error}");
        }
    }

    #[test]
    fn tokens_of_a_provider_need_pinned_algorithms() {
        let flags = JwtFlags {
            issuer: "https://id.example".into(),
            audience: vec!["tidemill".into()],
            algorithms: vec!["ES256".into()],
            jwks: Some("jwks.json".into()),
            jwks_url: None,
            jwks_ca: None,
            jwks_max_age_s: None,
            tenant_claim: None,
            user_claim: None,
            user_required: None,
            background_s: None,
            tier_claim: None,
            tier: None,
        };
        let check = |flags: JwtFlags| flags.check(&Tiers::default()).map(drop).map_err(|error| error.to_string());
        assert_eq!(check(flags.clone()), Ok(()));
        let at = |url: &str| JwtFlags { jwks: None, jwks_url: Some(url.into()), ..flags.clone() };
        assert_eq!(check(at("https://id.example/jwks.json")), Ok(()));
        for (flags, words) in [
            (JwtFlags { algorithms: vec!["HS256".into()], ..flags.clone() }, "HS256"),
            (JwtFlags { algorithms: vec![], ..flags.clone() }, "jwt.algorithms"),
            (JwtFlags { audience: vec![], ..flags.clone() }, "jwt.audience"),
            (JwtFlags { jwks: None, ..flags.clone() }, "jwks_url"),
            (JwtFlags { jwks_url: Some("https://id.example/".into()), ..flags.clone() }, "one of them"),
            (at("http://id.example/jwks.json"), "https"),
            (JwtFlags { jwks_max_age_s: Some(0), ..at("https://id.example/") }, "jwks_max_age_s"),
            (JwtFlags { tier: Some("gold".into()), ..flags.clone() }, "gold"),
        ] {
            let error = check(flags).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
    }
}
