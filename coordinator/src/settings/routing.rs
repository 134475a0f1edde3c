//! The settings that choose the model: `[router]` and `[[route]]`.

use super::{encoder::encoder, models::ModelSettings};
use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::PathBuf,
};
use tidemill_gateway::{
    routing::{
        Auto, Overflow, Router, Rule, Target, When,
        complexity::Scale,
        language,
        sticky::{Model, Split},
    },
    serving::examples::ExampleSettings,
};
use tidemill_net::config::{ConfigError, invalid, parse_bytes};
use tidemill_tenancy::tier::Tiers;

/// Settings common to all rules.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouterFlags {
    /// Header in which requests say their region [default: none]
    pub region_header: Option<String>,
    /// Key of `metadata` in which requests say their region otherwise [default: none]
    pub region_metadata: Option<String>,
    /// Tenants whose requests all go to one model, such as `{ bank = "large-2026-03" }`; no rule, rollout or overflow counts for them
    /// [default: none]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub pins: BTreeMap<String, String>,
    /// One of two models, by how hard a request looks: a section [default: none]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub auto: Option<AutoFlags>,
}

/// A choice between two models by the estimated difficulty of a request.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AutoFlags {
    /// Name that clients ask for [default: auto]
    pub name: Option<String>,
    /// Model for requests below the threshold
    pub small: String,
    /// Model for requests from the threshold on
    pub large: String,
    /// Score from which on the large model answers [default: 0.35]
    pub threshold: Option<f64>,
    /// Weight of the text's length [default: 0.5]
    pub length: Option<f64>,
    /// Weight of code [default: 0.4]
    pub code: Option<f64>,
    /// Weight of mathematics [default: 0.4]
    pub math: Option<f64>,
    /// Weight of the tools that are offered [default: 0.3]
    pub tools: Option<f64>,
    /// Weight of the messages before [default: 0.2]
    pub history: Option<f64>,
    /// Served encoder that compares a request's last message with the examples, such as all-MiniLM-L6-v2 [default: none, form alone]
    pub model: Option<String>,
    /// Milliseconds that a request waits at most for its embedding [default: 100]
    pub wait_ms: Option<u64>,
    /// Weight of the meaning: what a typical example adds for the large model, or takes away [default: 0.4]
    pub meaning: Option<f64>,
    /// Requests that the small model should answer: a list, or a file with one a line [default: none]
    pub small_examples: Option<ExampleTexts>,
    /// Requests that the large model should answer: a list, or a file with one a line [default: none]
    pub large_examples: Option<ExampleTexts>,
}

/// Examples of requests.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(untagged, expecting = "expected a list of texts, or a file's name")]
pub enum ExampleTexts {
    Texts(Vec<String>),
    File(PathBuf),
}

/// The default weight of meaning: alone it moves a request as a fenced block of code does.
const MEANING: f64 = 0.4;
/// The maximum number of examples of one side.
const EXAMPLES_MAX: usize = 1000;

impl ExampleTexts {
    fn read(self, key: &'static str) -> Result<Vec<String>, ConfigError> {
        let texts = match self {
            Self::Texts(texts) => texts,
            Self::File(file) => {
                let read = fs::read_to_string(&file).map_err(|error| invalid(key, file.display(), format!("cannot be read: {error}")))?;
                read.lines().map(str::to_owned).collect()
            }
        };
        let texts: Vec<_> = texts.into_iter().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty()).collect();
        match texts.len() {
            1..=EXAMPLES_MAX => Ok(texts),
            wrong => Err(invalid(key, wrong, format!("must have 1 to {EXAMPLES_MAX} examples"))),
        }
    }
}

/// A rule: all given conditions must hold.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct RouteFlags {
    /// Name in answers and metrics [default: the rule's number]
    pub name: Option<String>,
    /// Condition: the model that the request names. A name that no model has becomes one that clients can ask for [default: any]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub asked: Vec<String>,
    /// Condition: the tenant [default: any]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tenant: Vec<String>,
    /// Condition: the tenant's tier [default: any]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tier: Vec<String>,
    /// Condition: the region that the request says [default: any]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub region: Vec<String>,
    /// Condition: the language of what was said last, such as de or deu; short texts have none [default: any]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub language: Vec<String>,
    /// Condition: least text in the prompt, such as 8KiB [default: none]
    pub bytes_min: Option<String>,
    /// Condition: most text in the prompt [default: none]
    pub bytes_max: Option<String>,
    /// Condition: whether tools are offered [default: either]
    pub tools: Option<bool>,
    /// Model that answers, or `auto`; a rule has this or `split` [default: none]
    pub model: Option<String>,
    /// Models that answer, with their shares of users, such as `{ large = 95, large-next = 5 }` [default: none]
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    pub split: BTreeMap<String, f64>,
    /// Model that answers when the first would take too long, or has no worker [default: none]
    pub overflow: Option<String>,
    /// Predicted time to first token that is too long, in milliseconds [default: the limit of the request's class]
    pub overflow_ttft_ms: Option<f64>,
}

/// The names that rules may refer to.
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

/// Returns `None` for the router if every request gets the model that it names, and for the examples if `auto` goes by form alone.
pub(super) fn router(
    router: Option<RouterFlags>,
    routes: Vec<RouteFlags>,
    models: &[ModelSettings],
    aliases: &BTreeMap<String, String>,
    tiers: &Tiers,
) -> Result<(Option<Router>, Option<ExampleSettings>), ConfigError> {
    if router.is_none() && routes.is_empty() {
        return Ok((None, None));
    }
    let known = Known { models, aliases, tiers };
    let RouterFlags { region_header, region_metadata, pins, auto } = router.unwrap_or_default();
    let (auto, examples) = auto.map(|auto| auto.check(&known)).transpose()?.unzip();
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
    Ok((Some(Router { pins, rules, auto, region_header, region_metadata }), examples.flatten()))
}

impl AutoFlags {
    fn check(self, known: &Known<'_>) -> Result<(Auto, Option<ExampleSettings>), ConfigError> {
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
        let meaning = match self.meaning.unwrap_or(MEANING) {
            weight if weight.is_finite() && weight > 0.0 => weight,
            wrong => return Err(invalid("router.auto.meaning", wrong, "must be more than 0: without `model`, form alone counts")),
        };
        let encoder = encoder(("router.auto.model", self.model), ("router.auto.wait_ms", self.wait_ms), known.models, known.aliases)?;
        let examples = match (encoder, self.small_examples, self.large_examples) {
            (None, None, None) => None,
            (Some(encoder), Some(small), Some(large)) => Some(ExampleSettings {
                encoder,
                small: small.read("router.auto.small_examples")?,
                large: large.read("router.auto.large_examples")?,
            }),
            _ => {
                let reason = "`model`, `small_examples` and `large_examples` come together: an encoder compares a request with both";
                return Err(invalid("router.auto.model", "", reason));
            }
        };
        let small = known.model("router.auto.small", &self.small)?;
        let large = known.model("router.auto.large", &self.large)?;
        let meaning = if examples.is_some() { meaning } else { 0.0 };
        Ok((Auto { name, small, large, scale, meaning }, examples))
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
        checked(file).map(|(router, _)| router)
    }

    fn checked(file: &str) -> Result<(Option<Router>, Option<ExampleSettings>), String> {
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
    fn examples_are_a_list_or_a_file() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("large.txt");
        fs::write(&file, "Prove it.\n\n  Find the race.  \n").unwrap();
        let auto =
            format!("small = 'tiny'\nlarge = 'big'\nmodel = 'gpt'\nsmall_examples = ['Hello']\nlarge_examples = '{}'", file.display());
        let (router, examples) = checked(&format!("[router.auto]\n{auto}")).unwrap();
        let ExampleSettings { encoder, small, large } = examples.unwrap();
        assert_eq!((encoder.model.as_str(), encoder.wait.as_millis()), ("gpt", 100));
        assert_eq!((small, large), (vec!["Hello".to_owned()], vec!["Prove it.".to_owned(), "Find the race.".to_owned()]));
        assert_eq!(router.unwrap().auto.unwrap().meaning, MEANING);
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
            ("[router]\nauto = { small = 'tiny', large = 'big', model = 'big' }", "come together"),
            ("[router]\nauto = { small = 'tiny', large = 'big', small_examples = ['a'] }", "come together"),
            ("[router]\nauto = { small = 'tiny', large = 'big', model = 'huge' }", "router.auto.model"),
            ("[router]\nauto = { small = 'tiny', large = 'big', meaning = 0.0 }", "router.auto.meaning"),
            ("[router.auto]\nsmall = 'tiny'\nlarge = 'big'\nmodel = 'big'\nsmall_examples = []\nlarge_examples = ['a']", "small_examples"),
            (
                "[router.auto]\nsmall = 'tiny'\nlarge = 'big'\nmodel = 'big'\nsmall_examples = '/no/file'\nlarge_examples = ['a']",
                "/no/file",
            ),
        ] {
            let error = routed(file).map(drop).unwrap_err();
            assert!(error.contains(words), "{file}: {error}");
        }
    }
}
