//! Service classes: the limits promised to a request, its weight, and what happens when the promise cannot be kept.

use serde::Serialize;

/// The maximum number of classes in one cluster.
pub const CLASSES_MAX: usize = 16;
const NAME_BYTES_MAX: usize = 64;
/// The largest limit in milliseconds: eleven days.
const LIMIT_MAX: f64 = 1e9;

/// The treatment of a request whose predicted times exceed its limits.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OnMiss {
    /// Refused at once, with a time after which to retry.
    Reject,
    /// Waits until it can be served without making other requests miss their limits.
    Queue,
    /// Served as soon as there is room.
    #[default]
    Late,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Class {
    pub name: String,
    /// The value of a request's `service_tier` that selects the class.
    pub service_tier: String,
    /// The limit for the time to the first token, if any.
    pub ttft_ms: Option<f64>,
    /// The limit for the mean time per further token, if any.
    pub tpot_ms: Option<f64>,
    /// The priority; higher goes first.
    pub priority: u8,
    /// The worth of one request that keeps its limits.
    pub weight: f32,
    pub on_miss: OnMiss,
}

/// A class, by its index among the cluster's classes. An index out of range means the default class.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct ClassId(pub u8);

/// The classes of a cluster: at least one. The first is the default.
#[derive(Clone, Debug, PartialEq)]
pub struct Classes(Vec<Class>);

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ClassError {
    #[error("there are none")]
    None,
    #[error("there are {0}, more than {CLASSES_MAX}")]
    TooMany(usize),
    #[error("two classes have {key} = \"{value}\"")]
    Twice { key: &'static str, value: String },
    #[error("no class has service_tier = \"default\", which requests without a service tier get")]
    NoDefault,
    #[error("class `{class}`: {key} must be more than 0, and at most {LIMIT_MAX}")]
    NotPositive { class: String, key: &'static str },
    #[error("class `{0}`: name and service_tier are letters, digits, `-`, `_` and `.`, at most {NAME_BYTES_MAX} of them")]
    Name(String),
    #[error("class `{0}`: service_tier = \"auto\" is for clients, and means \"default\"")]
    Auto(String),
}

impl Classes {
    pub fn new(mut classes: Vec<Class>) -> Result<Self, ClassError> {
        if classes.is_empty() {
            return Err(ClassError::None);
        }
        if classes.len() > CLASSES_MAX {
            return Err(ClassError::TooMany(classes.len()));
        }
        for (i, class) in classes.iter().enumerate() {
            let positive = |key, value: Option<f64>| match value {
                Some(value) if !(value > 0.0 && value <= LIMIT_MAX) => Err(ClassError::NotPositive { class: class.name.clone(), key }),
                _ => Ok(()),
            };
            let is_name = |name: &str| {
                (1..=NAME_BYTES_MAX).contains(&name.len())
                    && name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte))
            };
            if !(is_name(&class.name) && is_name(&class.service_tier)) {
                return Err(ClassError::Name(class.name.clone()));
            }
            positive("ttft_ms", class.ttft_ms)?;
            positive("tpot_ms", class.tpot_ms)?;
            positive("weight", Some(class.weight.into()))?;
            if class.service_tier == "auto" {
                return Err(ClassError::Auto(class.name.clone()));
            }
            for other in &classes[..i] {
                for (key, value, theirs) in [("name", &class.name, &other.name), ("service_tier", &class.service_tier, &other.service_tier)]
                {
                    if value == theirs {
                        return Err(ClassError::Twice { key, value: value.clone() });
                    }
                }
            }
        }
        let default = classes.iter().position(|class| class.service_tier == "default").ok_or(ClassError::NoDefault)?;
        classes[..=default].rotate_right(1);
        Ok(Self(classes))
    }

    /// The three classes of a cluster without configuration. None of them refuses requests: an operator who sets no limits wants answers,
    /// even late ones.
    ///
    /// - `standard`, the default: the operator's limits, else what users of a chat tolerate
    /// - `interactive`: half of these limits, double the weight, and goes first
    /// - `batch`: no limits; waits for room that no other class needs
    pub fn defaults(ttft_ms: f64, tpot_ms: f64) -> Self {
        let standard = Class {
            name: "standard".into(),
            service_tier: "default".into(),
            ttft_ms: Some(ttft_ms),
            tpot_ms: Some(tpot_ms),
            priority: 1,
            weight: 1.0,
            on_miss: OnMiss::Late,
        };
        let interactive = Class {
            name: "interactive".into(),
            service_tier: "priority".into(),
            ttft_ms: Some(ttft_ms / 2.0),
            tpot_ms: Some(tpot_ms / 2.0),
            priority: 2,
            weight: 2.0,
            ..standard.clone()
        };
        let batch = Class {
            name: "batch".into(),
            service_tier: "flex".into(),
            ttft_ms: None,
            tpot_ms: None,
            priority: 0,
            weight: 0.25,
            on_miss: OnMiss::Queue,
        };
        Self(vec![standard, interactive, batch])
    }

    pub fn get(&self, id: ClassId) -> &Class {
        self.0.get(usize::from(id.0)).unwrap_or(&self.0[0])
    }

    pub fn iter(&self) -> impl Iterator<Item = (ClassId, &Class)> {
        self.0.iter().enumerate().map(|(place, class)| (ClassId(place as u8), class))
    }

    /// The classes that give up their places to the first class.
    pub fn yielding_to_first(&self) -> impl Iterator<Item = ClassId> {
        let first = self.0.iter().map(|class| class.priority).max().unwrap_or_default();
        self.iter().filter(move |(_, class)| class.priority < first).map(|(id, _)| id)
    }

    /// The class for requests that no client waits for: it goes last and has the least weight.
    pub fn background(&self) -> &Class {
        let last = self.0.iter().min_by(|a, b| a.priority.cmp(&b.priority).then(a.weight.total_cmp(&b.weight)));
        last.expect("a cluster has classes")
    }

    /// The class that a client selects. A missing tier and `auto` select the default.
    pub fn by_tier(&self, tier: Option<&str>) -> Option<ClassId> {
        let tier = tier.filter(|&tier| tier != "auto").unwrap_or("default");
        self.iter().find(|(_, class)| class.service_tier == tier).map(|(id, _)| id)
    }
}

impl Default for Classes {
    fn default() -> Self {
        Self::defaults(2000.0, 100.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tier_chooses_a_class_and_silence_the_default() {
        let classes = Classes::default();
        let name = |tier| classes.by_tier(tier).map(|id| classes.get(id).name.as_str());
        let expected = [
            (None, Some("standard")),
            (Some("auto"), Some("standard")),
            (Some("default"), Some("standard")),
            (Some("priority"), Some("interactive")),
            (Some("flex"), Some("batch")),
            (Some("standard"), None),
            (Some(""), None),
        ];
        for (tier, class) in expected {
            assert_eq!(name(tier), class, "{tier:?}");
        }
        assert!(classes.iter().all(|(_, class)| class.on_miss != OnMiss::Reject), "nothing is refused unless somebody says so");
    }

    #[test]
    fn classes_that_contradict_each_other_are_refused_with_what_is_wrong() {
        let class = |name: &str, tier: &str| Class { name: name.into(), service_tier: tier.into(), ..Classes::default().0[0].clone() };
        let gold = Classes::new(vec![class("gold", "priority"), class("rest", "default")]).unwrap();
        assert_eq!((gold.get(ClassId(0)).name.as_str(), gold.get(ClassId(9)).name.as_str()), ("rest", "rest"), "the default comes first");
        for (classes, words) in [
            (vec![], "none"),
            (vec![class("a", "priority")], "no class has service_tier"),
            (vec![class("a", "default"), class("a", "flex")], "name = \"a\""),
            (vec![class("a", "default"), class("b", "default")], "service_tier = \"default\""),
            (vec![class("a b", "default")], "letters"),
            (vec![class("a", "")], "letters"),
            (vec![class("a", "default"), class("b", "auto")], "\"auto\""),
            (vec![Class { tpot_ms: Some(0.0), ..class("a", "default") }], "tpot_ms must be more than 0"),
            (vec![Class { weight: f32::NAN, ..class("a", "default") }], "weight must be more than 0"),
            ((0..17).map(|i| class(&i.to_string(), &i.to_string())).collect(), "17"),
        ] {
            let error = Classes::new(classes).unwrap_err().to_string();
            assert!(error.contains(words), "{error}");
        }
    }
}
