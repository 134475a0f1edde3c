//! The choice of a model for a request, by the operator's rules. A core: the known facts of a request go in, a model and the reason come
//! out.
//!
//! The first match decides, in this order: the tenant's pin, the rules from top to bottom, `auto`. Without a match, the request gets the
//! model that it named.
//!
//! - [`text`]: the content of a request, in any protocol; `language`: its language
//! - [`complexity`]: the estimated difficulty by form, for `auto`; [`meaning`]: by examples
//! - [`sticky`]: a user's place among all users, which never moves

pub mod complexity;
pub mod language;
pub mod meaning;
pub mod sticky;
pub mod text;

use complexity::Scale;
use meaning::Meaning;
use std::{
    collections::{BTreeMap, BTreeSet},
    ops::RangeInclusive,
};
use sticky::{Model, Split};
use text::BodyText;

#[derive(Clone, Debug)]
pub struct Router {
    /// Tenants whose requests all go to one model, regardless of the name in them.
    pub pins: BTreeMap<String, Model>,
    pub rules: Vec<Rule>,
    pub auto: Option<Auto>,
    /// The header (in lower case) that names a request's region.
    pub region_header: Option<String>,
    /// The key of a request's `metadata` that names its region, as an alternative.
    pub region_metadata: Option<String>,
}

#[derive(Clone, Debug)]
pub struct Rule {
    /// A name for people, with which splits are hashed.
    pub name: String,
    pub when: When,
    pub to: Target,
    pub overflow: Option<Overflow>,
}

/// A rule's conditions: all must hold. An empty set allows everything.
#[derive(Clone, Debug)]
pub struct When {
    pub asked: BTreeSet<String>,
    pub tenants: BTreeSet<String>,
    pub tiers: BTreeSet<String>,
    pub regions: BTreeSet<String>,
    /// Languages, by their codes in ISO 639-3.
    pub languages: BTreeSet<String>,
    /// The length of the prompt's text in bytes.
    pub bytes: RangeInclusive<u64>,
    /// Whether tools are offered.
    pub tools: Option<bool>,
}

#[derive(Clone, Debug)]
pub enum Target {
    Model(Model),
    Split(Split),
    Auto,
}

/// A second model, for when the first would take too long.
#[derive(Clone, Debug, PartialEq)]
pub struct Overflow {
    pub model: Model,
    /// The longest predicted time to first token; `None` for the limit of the request's class.
    pub ttft_ms: Option<f64>,
}

/// A choice between two models, by the estimated difficulty of a request.
#[derive(Clone, Debug)]
pub struct Auto {
    /// The name that clients request.
    pub name: String,
    pub small: Model,
    pub large: Model,
    pub scale: Scale,
    /// The weight of a request's [meaning] beside its form; 0 without examples.
    pub meaning: f64,
}

/// The sender of a request, and the model that it names.
#[derive(Clone, Copy, Debug)]
pub struct Requester<'a> {
    /// The name in the request.
    pub asked: Option<&'a str>,
    /// The model of this name, or of which it is an alias.
    pub resolved: Option<&'a str>,
    pub tenant: Option<&'a str>,
    pub tier: Option<&'a str>,
    pub region: Option<&'a str>,
    /// A name that is the same for all requests of one user.
    pub user: &'a str,
    /// The side on which `auto`'s examples see the request.
    pub meaning: Meaning,
}

#[derive(Clone, Debug)]
pub struct Choice<'a> {
    pub model: &'a Model,
    pub by: By,
    /// The reason, in a few words of ASCII.
    pub why: String,
    pub overflow: Option<&'a Overflow>,
}

/// The rule by which a model was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum By {
    Pin,
    Rule,
    Auto,
}

impl Default for When {
    fn default() -> Self {
        Self {
            asked: BTreeSet::new(),
            tenants: BTreeSet::new(),
            tiers: BTreeSet::new(),
            regions: BTreeSet::new(),
            languages: BTreeSet::new(),
            bytes: 0..=u64::MAX,
            tools: None,
        }
    }
}

impl Router {
    /// Chooses a model; `None` for the one that the request named.
    pub fn route(&self, asker: &Requester<'_>, said: &BodyText<'_>) -> Option<Choice<'_>> {
        if let Some((tenant, model)) = asker.tenant.and_then(|tenant| self.pins.get_key_value(tenant)) {
            return Some(Choice { model, by: By::Pin, why: format!("pin of {tenant}"), overflow: None });
        }
        if let Some(rule) = self.rules.iter().find(|rule| rule.when.holds(asker, said)) {
            let (name, overflow) = (&rule.name, rule.overflow.as_ref());
            return Some(match (&rule.to, &self.auto) {
                (Target::Model(model), _) => Choice { model, by: By::Rule, why: format!("rule {name}"), overflow },
                (Target::Split(split), _) => {
                    Choice { model: split.pick(name, asker.user), by: By::Rule, why: format!("rule {name}, split"), overflow }
                }
                (Target::Auto, Some(auto)) => {
                    let (model, why) = auto.choose(said, asker.meaning);
                    Choice { model, by: By::Auto, why: format!("rule {name}, {why}"), overflow }
                }
                (Target::Auto, None) => unreachable!("settings with a rule to `auto` have an `auto`"),
            });
        }
        let auto = self.auto.as_ref().filter(|auto| asker.asked == Some(&auto.name))?;
        let (model, why) = auto.choose(said, asker.meaning);
        Some(Choice { model, by: By::Auto, why, overflow: None })
    }

    /// Names that clients can request although no model has them, each with the models that may answer.
    pub fn names(&self, is_model: impl Fn(&str) -> bool) -> BTreeMap<&str, BTreeSet<&Model>> {
        let mut names: BTreeMap<&str, BTreeSet<&Model>> = BTreeMap::new();
        for rule in &self.rules {
            let mut models = BTreeSet::new();
            match &rule.to {
                Target::Model(model) => drop(models.insert(model)),
                Target::Split(split) => models.extend(split.models()),
                Target::Auto => models.extend(self.auto.iter().flat_map(Auto::models)),
            }
            models.extend(rule.overflow.iter().map(|overflow| &overflow.model));
            for name in rule.when.asked.iter().filter(|name| !is_model(name)) {
                names.entry(name).or_default().extend(&models);
            }
        }
        if let Some(auto) = &self.auto {
            names.entry(&auto.name).or_default().extend(auto.models());
        }
        names
    }

    /// Whether `auto` may choose for a request that names this model, and its meaning counts.
    pub fn may_weigh(&self, asked: Option<&str>) -> bool {
        let Some(auto) = self.auto.as_ref().filter(|auto| auto.meaning > 0.0) else { return false };
        let leads_there = |rule: &Rule| {
            let names_it = rule.when.asked.is_empty() || asked.is_some_and(|asked| rule.when.asked.contains(asked));
            matches!(rule.to, Target::Auto) && names_it
        };
        asked == Some(&auto.name) || self.rules.iter().any(leads_there)
    }

    /// Whether the same request always gets the same model.
    pub fn is_repeatable(&self) -> bool {
        // An encoder that is slow once leaves a request to its form.
        let weighs = self.auto.as_ref().is_some_and(|auto| auto.meaning > 0.0);
        !weighs && self.rules.iter().all(|rule| rule.overflow.is_none() && !matches!(rule.to, Target::Split(_)))
    }
}

impl Auto {
    fn choose(&self, said: &BodyText<'_>, meaning: Meaning) -> (&Model, String) {
        let form = self.scale.score(&said.signals());
        let threshold = self.scale.threshold;
        let weight = if let Meaning::Side(side) = meaning { self.meaning * side } else { 0.0 };
        let score = form + weight;
        let (model, sign) = if score < threshold { (&self.small, "<") } else { (&self.large, ">=") };
        let parts = match meaning {
            Meaning::None => String::new(),
            Meaning::Side(_) => format!(" (form {form:.2}, meaning {weight:+.2})"),
            Meaning::Unread(reason) => format!(" (form alone: {reason})"),
        };
        (model, format!("auto: {score:.2} {sign} {threshold:.2}{parts}"))
    }

    fn models(&self) -> [&Model; 2] {
        [&self.small, &self.large]
    }
}

impl When {
    /// Whether the conditions hold. Those that need no text are checked first, since the text has to be extracted.
    fn holds(&self, asker: &Requester<'_>, said: &BodyText<'_>) -> bool {
        let has = |set: &BTreeSet<String>, value: Option<&str>| set.is_empty() || value.is_some_and(|value| set.contains(value));
        let asked = self.asked.is_empty() || [asker.asked, asker.resolved].into_iter().flatten().any(|name| self.asked.contains(name));
        asked
            && has(&self.tenants, asker.tenant)
            && has(&self.tiers, asker.tier)
            && has(&self.regions, asker.region)
            && self.tools.is_none_or(|tools| tools == (said.content().tools > 0))
            && (self.bytes == (0..=u64::MAX) || self.bytes.contains(&said.content().bytes))
            && (self.languages.is_empty() || has(&self.languages, said.language()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn names(all: &[&str]) -> BTreeSet<String> {
        all.iter().map(|name| (*name).to_owned()).collect()
    }

    fn rule(name: &str, when: When, to: &str) -> Rule {
        Rule { name: name.into(), when, to: Target::Model(to.into()), overflow: None }
    }

    fn router() -> Router {
        Router {
            pins: BTreeMap::from([("bank".into(), "old".into())]),
            rules: vec![
                rule("eu", When { regions: names(&["eu"]), ..When::default() }, "paris"),
                rule("german", When { asked: names(&["chat"]), languages: names(&["deu"]), ..When::default() }, "berlin"),
                rule("agents", When { tools: Some(true), tiers: names(&["paid"]), ..When::default() }, "agent"),
                rule("long", When { bytes: 1000..=u64::MAX, asked: names(&["chat", "tiny"]), ..When::default() }, "wide"),
                rule("rest", When { asked: names(&["chat"]), ..When::default() }, "tiny"),
            ],
            auto: Some(Auto { name: "auto".into(), small: "tiny".into(), large: "big".into(), scale: Scale::default(), meaning: 0.4 }),
            region_header: None,
            region_metadata: None,
        }
    }

    const NOBODY: Requester<'static> =
        Requester { asked: None, resolved: None, tenant: None, tier: None, region: None, user: "u", meaning: Meaning::None };

    fn routed(asker: Requester<'_>, body: &Value) -> Option<(String, String)> {
        let router = router();
        let choice = router.route(&asker, &BodyText::of(body.as_object().unwrap()))?;
        Some((choice.model.to_string(), choice.why))
    }

    #[test]
    fn the_first_that_fits_decides() {
        let asks = |asked| Requester { asked: Some(asked), ..NOBODY };
        let hello = json!({"messages": [{"role": "user", "content": "Hello there, how are you?"}]});
        let german = json!({"input": "Guten Tag, ich würde gerne wissen, wann der nächste Zug nach Hause fährt."});
        let long = json!({"prompt": "word ".repeat(300)});
        let tools = json!({"messages": [], "tools": [{"type": "function"}]});
        for (asker, body, model) in [
            (asks("chat"), &hello, Some("tiny")),
            (asks("tiny"), &hello, None),
            (Requester { region: Some("eu"), ..asks("tiny") }, &hello, Some("paris")),
            (Requester { region: Some("eu"), tenant: Some("bank"), ..asks("chat") }, &hello, Some("old")),
            (asks("chat"), &german, Some("berlin")),
            (asks("other"), &german, None),
            (asks("chat"), &tools, Some("tiny")),
            (Requester { tier: Some("paid"), ..asks("chat") }, &tools, Some("agent")),
            (asks("tiny"), &long, Some("wide")),
            (Requester { asked: Some("alias"), resolved: Some("tiny"), ..NOBODY }, &long, Some("wide")),
            (NOBODY, &long, None),
            (asks("auto"), &hello, Some("tiny")),
        ] {
            let got = routed(asker, body);
            assert_eq!(got.as_ref().map(|(model, _)| model.as_str()), model, "{asker:?} {got:?}");
            assert!(got.is_none_or(|(_, why)| why.is_ascii()));
        }
    }

    #[test]
    fn meaning_moves_what_form_leaves_open() {
        let hello = json!({"messages": [{"role": "user", "content": "Hello there, how are you?"}]});
        let of = |meaning| routed(Requester { asked: Some("auto"), meaning, ..NOBODY }, &hello).unwrap();
        for (meaning, model, why) in [
            (Meaning::None, "tiny", "auto: 0.00 < 0.35"),
            (Meaning::Side(1.0), "big", "auto: 0.40 >= 0.35 (form 0.00, meaning +0.40)"),
            (Meaning::Side(-1.0), "tiny", "auto: -0.40 < 0.35 (form 0.00, meaning -0.40)"),
            (Meaning::Unread("overdue"), "tiny", "auto: 0.00 < 0.35 (form alone: overdue)"),
        ] {
            let (chosen, reason) = of(meaning);
            assert_eq!((chosen.as_str(), &reason[..why.len()]), (model, why));
        }
        let router = router();
        assert!(router.may_weigh(Some("auto")) && !router.may_weigh(Some("tiny")) && !router.may_weigh(None));
        assert!(!router.is_repeatable());
    }

    #[test]
    fn a_body_that_nobody_understands_is_no_reason_to_fail() {
        for body in [json!({}), json!({"messages": 3, "tools": {}, "metadata": [], "user": 1}), json!({"messages": [null, [3]]})] {
            assert!(routed(Requester { asked: Some("chat"), ..NOBODY }, &body).is_some(), "{body}");
        }
    }

    #[test]
    fn names_of_rules_can_be_asked_for() {
        let router = router();
        let names = router.names(|name| name == "tiny");
        assert_eq!(names.keys().copied().collect::<Vec<_>>(), ["auto", "chat"]);
        let models: Vec<&str> = names["chat"].iter().map(|model| &***model).collect();
        assert_eq!(models, ["berlin", "tiny", "wide"]);
    }
}
