//! What the file says of which model answers: `[router]` and `[[route]]`.

use super::models::ModelSettings;
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};
use tidemill_gateway::routing::{
    Auto, Overflow, Router, Rule, Target, When,
    complexity::Scale,
    language,
    sticky::{Model, Split},
};
use tidemill_net::config::{ConfigError, invalid, parse_bytes};
use tidemill_tenancy::tier::Tiers;

/// What all rules have in common.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterFlags {
    /// The header in which requests say their region
    pub region_header: Option<String>,
    /// The key of `metadata` in which they say it otherwise
    pub region_metadata: Option<String>,
    /// Tenants whose requests all go to one model
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub pins: BTreeMap<String, String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto: Option<AutoFlags>,
}

/// One of two models, by how hard a request looks.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutoFlags {
    /// What clients ask for [default: auto]
    pub name: Option<String>,
    pub small: String,
    pub large: String,
    /// From this score on it is the large one [default: 0.35]
    pub threshold: Option<f64>,
    /// Weights of the signals [default: 0.5, 0.4, 0.4, 0.3, 0.2]
    pub length: Option<f64>,
    pub code: Option<f64>,
    pub math: Option<f64>,
    pub tools: Option<f64>,
    pub history: Option<f64>,
}

/// A rule: all conditions that are given must hold.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouteFlags {
    /// In answers and metrics [default: its number]
    pub name: Option<String>,
    /// Names that are asked for; a name that no model has becomes one that can be asked for
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub asked: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tenant: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tier: Vec<String>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub region: Vec<String>,
    /// Of what was said last, such as de or deu
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub language: Vec<String>,
    /// Of text in the prompt, such as 8KiB
    pub bytes_min: Option<String>,
    pub bytes_max: Option<String>,
    /// Whether tools are offered
    pub tools: Option<bool>,
    /// The model that answers, or `auto`
    pub model: Option<String>,
    /// Or several, with their shares of users
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub split: BTreeMap<String, f64>,
    /// The model that answers when the first would take too long
    pub overflow: Option<String>,
    /// Predicted time to first token that is too long, in milliseconds [default: the limit of the request's class]
    pub overflow_ttft_ms: Option<f64>,
}

/// What names are checked against.
struct Known<'a> {
    models: &'a [ModelSettings],
    aliases: &'a BTreeMap<String, String>,
    tiers: &'a Tiers,
}

impl Known<'_> {
    fn model(&self, key: &'static str, name: &str) -> Result<Model, ConfigError> {
        let meant = self.aliases.get(name).map_or(name, String::as_str);
        match self.models.iter().find(|model| model.name == meant) {
            Some(model) => Ok(model.name.as_str().into()),
            None => {
                let served = self.models.iter().map(|model| format!("`{}`", model.name)).collect::<Vec<_>>().join(", ");
                Err(invalid(key, name, format!("there is no such model: this coordinator serves {served}")))
            }
        }
    }

    fn is_model(&self, name: &str) -> bool {
        self.aliases.contains_key(name) || self.models.iter().any(|model| model.name == name)
    }
}

/// `None`: every request gets the model that it asks for.
pub(super) fn router(
    router: Option<RouterFlags>,
    routes: Vec<RouteFlags>,
    models: &[ModelSettings],
    aliases: &BTreeMap<String, String>,
    tiers: &Tiers,
) -> Result<Option<Router>, ConfigError> {
    if router.is_none() && routes.is_empty() {
        return Ok(None);
    }
    let known = Known { models, aliases, tiers };
    let RouterFlags { region_header, region_metadata, pins, auto } = router.unwrap_or_default();
    let auto = auto.map(|auto| auto.check(&known)).transpose()?;
    let pins = pins.into_iter().map(|(tenant, model)| Ok((tenant, known.model("router.pins", &model)?)));
    let auto_name = auto.as_ref().map(|auto| auto.name.clone());
    let rules = routes.into_iter().zip(1..).map(|(route, number): (_, usize)| route.check(number, &known, auto_name.as_deref()));
    let rules = rules.collect::<Result<Vec<_>, _>>()?;
    let mut names = BTreeSet::new();
    if let Some(twice) = rules.iter().find(|rule| !names.insert(&rule.name)) {
        return Err(invalid("route.name", &twice.name, "is the name of two rules: give each its own"));
    }
    let by_region = rules.iter().any(|rule| !rule.when.regions.is_empty());
    if by_region && region_header.is_none() && region_metadata.is_none() {
        return Err(invalid(
            "route.region",
            "",
            "nothing says a request's region: name it in router.region_header or router.region_metadata",
        ));
    }
    let pins = pins.collect::<Result<_, ConfigError>>()?;
    let region_header = region_header.map(|name| name.to_ascii_lowercase());
    Ok(Some(Router { pins, rules, auto, region_header, region_metadata }))
}

impl AutoFlags {
    fn check(self, known: &Known<'_>) -> Result<Auto, ConfigError> {
        let name = self.name.unwrap_or_else(|| "auto".into());
        if name.is_empty() || known.is_model(&name) {
            return Err(invalid("router.auto.name", name, "is the name of a model already: clients could not ask for both"));
        }
        let usual = Scale::default();
        let number = |key, given: Option<f64>, usual: f64| match given.unwrap_or(usual) {
            number if number.is_finite() => Ok(number),
            wrong => Err(invalid(key, wrong, "must be a number")),
        };
        let scale = Scale {
            length: number("router.auto.length", self.length, usual.length)?,
            code: number("router.auto.code", self.code, usual.code)?,
            math: number("router.auto.math", self.math, usual.math)?,
            tools: number("router.auto.tools", self.tools, usual.tools)?,
            history: number("router.auto.history", self.history, usual.history)?,
            threshold: number("router.auto.threshold", self.threshold, usual.threshold)?,
        };
        let small = known.model("router.auto.small", &self.small)?;
        Ok(Auto { name, small, large: known.model("router.auto.large", &self.large)?, scale })
    }
}

impl RouteFlags {
    fn check(self, number: usize, known: &Known<'_>, auto: Option<&str>) -> Result<Rule, ConfigError> {
        let name = self.name.unwrap_or_else(|| number.to_string());
        if !(1..=64).contains(&name.len()) || !name.bytes().all(|byte| byte.is_ascii_graphic() || byte == b' ') {
            return Err(invalid("route.name", name, "must have 1 to 64 ASCII characters: answers say it in a header"));
        }
        let to = match (self.model, self.split) {
            (Some(model), split) if split.is_empty() => match auto {
                Some(auto) if *auto == model => Target::Auto,
                None if model == "auto" && !known.is_model("auto") => {
                    return Err(invalid("route.model", model, "needs a section [router.auto] with `small` and `large`"));
                }
                _ => Target::Model(known.model("route.model", &model)?),
            },
            (None, split) if !split.is_empty() => {
                let weights = split.into_iter().map(|(model, share)| Ok((known.model("route.split", &model)?, share)));
                let split = Split::new(weights.collect::<Result<_, ConfigError>>()?);
                Target::Split(split.ok_or_else(|| invalid("route.split", &name, "shares must be more than 0"))?)
            }
            _ => return Err(invalid("route.model", &name, "a rule has either `model` or `split`")),
        };
        if let Some(unknown) = self.tier.iter().find(|tier| known.tiers.get(tier).is_none()) {
            return Err(invalid("route.tier", unknown, format!("must be some of {}", known.tiers.names())));
        }
        let language = |name: &String| {
            let code = language::code(name).ok_or_else(|| invalid("route.language", name, "must be a code such as de or deu"))?;
            Ok(code.to_owned())
        };
        let bytes = |key, given: Option<String>, usual| match given {
            None => Ok(usual),
            Some(text) => parse_bytes(&text).map_err(|reason| invalid(key, &text, reason)),
        };
        let (least, most) = (bytes("route.bytes_min", self.bytes_min, 0)?, bytes("route.bytes_max", self.bytes_max, u64::MAX)?);
        if least > most {
            return Err(invalid("route.bytes_max", most, format!("is less than bytes_min, {least}: no prompt would fit")));
        }
        let overflow = match (self.overflow, self.overflow_ttft_ms) {
            (None, None) => None,
            (None, Some(ms)) => return Err(invalid("route.overflow_ttft_ms", ms, "needs `overflow`, the model that takes over")),
            (Some(_), Some(ms)) if !(ms.is_finite() && ms > 0.0) => {
                return Err(invalid("route.overflow_ttft_ms", ms, "must be more than 0"));
            }
            (Some(model), ttft_ms) => Some(Overflow { model: known.model("route.overflow", &model)?, ttft_ms }),
        };
        let set = |names: Vec<String>| names.into_iter().collect::<BTreeSet<_>>();
        let when = When {
            asked: set(self.asked),
            tenants: set(self.tenant),
            tiers: set(self.tier),
            regions: set(self.region),
            languages: self.language.iter().map(language).collect::<Result<_, ConfigError>>()?,
            bytes: least..=most,
            tools: self.tools,
        };
        Ok(Rule { name, when, to, overflow })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn routed(file: &str) -> Result<Option<Router>, String> {
        #[derive(Deserialize)]
        struct File {
            router: Option<RouterFlags>,
            #[serde(default)]
            route: Vec<RouteFlags>,
        }
        let File { router: flags, route } = toml::from_str(file).map_err(|error| error.to_string())?;
        let model = |name: &str| ModelSettings { name: name.into(), dir: "/models".into() };
        let aliases = BTreeMap::from([("gpt".to_owned(), "tiny".to_owned())]);
        router(flags, route, &[model("tiny"), model("big")], &aliases, &Tiers::default()).map_err(|error| error.to_string())
    }

    #[test]
    fn no_rules_are_no_router() {
        assert!(routed("").unwrap().is_none());
    }

    #[test]
    fn rules_are_read_in_their_order() {
        let router = routed(
            "[router]\nregion_header = 'X-Region'\npins = { bank = 'gpt' }\nauto = { small = 'tiny', large = 'big', code = 1.0 }\n\
             [[route]]\nasked = ['chat']\nlanguage = ['de', 'fra']\nbytes_min = '1KiB'\nmodel = 'big'\noverflow = 'gpt'\n\
             [[route]]\nregion = ['eu']\nsplit = { tiny = 95, big = 5 }\n[[route]]\nasked = ['chat']\nmodel = 'auto'",
        )
        .unwrap()
        .unwrap();
        assert_eq!((router.region_header.as_deref(), &*router.pins["bank"]), (Some("x-region"), "tiny"));
        let [first, second, third] = &router.rules[..] else { panic!() };
        assert_eq!((first.name.as_str(), &first.when.bytes), ("1", &(1024..=u64::MAX)));
        assert_eq!(first.when.languages.iter().collect::<Vec<_>>(), ["deu", "fra"]);
        assert_eq!(first.overflow, Some(Overflow { model: "tiny".into(), ttft_ms: None }));
        assert!(matches!(second.to, Target::Split(_)) && matches!(third.to, Target::Auto));
        assert_eq!(router.auto.unwrap().scale.code, 1.0);
    }

    #[test]
    fn wrong_rules_are_told_why() {
        for (file, words) in [
            ("[[route]]\nmodel = 'huge'", "huge"),
            ("[[route]]\nsplit = { tiny = 1, huge = 1 }", "huge"),
            ("[[route]]\nsplit = { tiny = 0 }", "more than 0"),
            ("[[route]]\nmodel = 'tiny'\noverflow = 'huge'", "huge"),
            ("[[route]]\nmodel = 'tiny'\noverflow_ttft_ms = 5.0", "needs `overflow`"),
            ("[[route]]\nmodel = 'tiny'\noverflow = 'big'\noverflow_ttft_ms = -5.0", "overflow_ttft_ms"),
            ("[[route]]\nasked = ['chat']", "either"),
            ("[[route]]\nmodel = 'tiny'\nsplit = { big = 1 }", "either"),
            ("[[route]]\nmodel = 'auto'", "router.auto"),
            ("[[route]]\nmodel = 'tiny'\nlanguage = ['klingon']", "klingon"),
            ("[[route]]\nmodel = 'tiny'\ntier = ['gold']", "gold"),
            ("[[route]]\nmodel = 'tiny'\nregion = ['eu']", "region_header"),
            ("[[route]]\nmodel = 'tiny'\nbytes_min = '2KiB'\nbytes_max = '1KiB'", "bytes_max"),
            ("[[route]]\nmodel = 'tiny'\nbytes_min = 'much'", "bytes_min"),
            ("[[route]]\nmodel = 'tiny'\nname = 'ä'", "route.name"),
            ("[[route]]\nmodel = 'tiny'\nname = 'a'\n[[route]]\nmodel = 'tiny'\nname = 'a'", "two rules"),
            ("[[route]]\nmodle = 'tiny'", "modle"),
            ("[router]\npins = { bank = 'huge' }", "huge"),
            ("[router]\nauto = { small = 'tiny', large = 'huge' }", "huge"),
            ("[router]\nauto = { small = 'tiny', large = 'big', name = 'gpt' }", "already"),
            ("[router]\nauto = { small = 'tiny', large = 'big', code = nan }", "router.auto.code"),
        ] {
            let error = routed(file).map(drop).unwrap_err();
            assert!(error.contains(words), "{file}: {error}");
        }
    }
}
