//! The models that are served, and their names.

use serde::{Deserialize, Deserializer, Serialize, de::DeserializeOwned};
use std::{collections::BTreeMap, path::PathBuf};
use tidemill_net::config::{ConfigError, invalid, required};

/// One of the models: its directory, as a flag or a key's value; or a section of its own.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelFlag {
    /// Directory of the model
    pub dir: PathBuf,
    /// Name in the API, and for workers [default: the directory's name]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

impl<P: Into<PathBuf>> From<P> for ModelFlag {
    fn from(dir: P) -> Self {
        Self { dir: dir.into(), name: None }
    }
}

/// A model that is served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelSettings {
    /// The name in the API, and for workers.
    pub name: String,
    pub dir: PathBuf,
}

/// Deserializes one value or a list.
pub(super) fn one_or_several<'de, D: Deserializer<'de>, T: DeserializeOwned + From<String>>(value: D) -> Result<Vec<T>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Item<T> {
        Text(String),
        Whole(T),
    }
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "expected one value or several; a [[model]] section has `dir` and `name`, and nothing else")]
    enum Value<T> {
        One(Item<T>),
        Several(Vec<Item<T>>),
    }
    let item = |item| match item {
        Item::Text(text) => T::from(text),
        Item::Whole(whole) => whole,
    };
    Ok(match Value::<T>::deserialize(value)? {
        Value::One(one) => vec![item(one)],
        Value::Several(several) => several.into_iter().map(item).collect(),
    })
}

pub(super) fn check_models(models: Vec<ModelFlag>, names: Vec<String>) -> Result<Vec<ModelSettings>, ConfigError> {
    if models.is_empty() {
        return required(None, "model", None);
    }
    if !names.is_empty() && names.len() != models.len() {
        let reason = format!("must name each of the {} models, in the order of --model", models.len());
        return Err(invalid("served_model_name", names.join(", "), reason));
    }
    let mut checked: Vec<ModelSettings> = Vec::new();
    let mut names = names.into_iter();
    for ModelFlag { dir, name } in models {
        let name = match names.next().or(name) {
            Some(name) => name,
            None => {
                let whole = dir.canonicalize().map_err(|error| invalid("model", dir.display(), error.to_string()))?;
                let name = whole.file_name().and_then(|name| name.to_str()).map(str::to_owned);
                required(None, "served_model_name", name)?
            }
        };
        if checked.iter().any(|other| other.name == name) {
            return Err(invalid("served_model_name", name, "is the name of two models: give each its own"));
        }
        checked.push(ModelSettings { name, dir });
    }
    Ok(checked)
}

/// Parses `a=b,c=d` as a map.
pub(super) fn parse_aliases(text: &str) -> Result<BTreeMap<String, String>, String> {
    let pair = |pair: &str| {
        let (name, model) = pair.split_once('=').ok_or_else(|| format!("`{pair}` is not NAME=MODEL"))?;
        Ok((name.trim().to_owned(), model.trim().to_owned()))
    };
    text.split(',').map(pair).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::settings::{Flags, tests::flags};

    #[test]
    fn aliases_are_a_map() {
        let aliases = parse_aliases("gpt-5=tiny, o3 = tiny").unwrap();
        assert_eq!(aliases.into_iter().collect::<Vec<_>>(), [("gpt-5".into(), "tiny".into()), ("o3".into(), "tiny".into())]);
        assert!(parse_aliases("gpt-5").unwrap_err().contains("NAME=MODEL"));
    }

    #[test]
    fn one_model_is_a_key_and_several_are_sections() {
        let of = |file: &str| {
            let Flags { model, served_model_name, .. } = toml::from_str(file).unwrap();
            Flags { model, served_model_name, ..flags() }.check().map(|settings| settings.models).map_err(|error| error.to_string())
        };
        let model = |name: &str, dir: &str| ModelSettings { name: name.into(), dir: dir.into() };
        assert_eq!(of("model = '/m/a'\nserved_model_name = 'a'"), Ok(vec![model("a", "/m/a")]));
        let two = "[[model]]\nname = 'a'\ndir = '/m/a'\n[[model]]\nname = 'b'\ndir = '/m/b'";
        assert_eq!(of(two), Ok(vec![model("a", "/m/a"), model("b", "/m/b")]));
        for (file, words) in [
            (two.replace("'b'", "'a'"), "two models"),
            (format!("served_model_name = 'a'\n{two}"), "each of the 2 models"),
            (two.replace("name = 'b'", ""), "`model` = /m/b"),
        ] {
            let error = of(&file).unwrap_err();
            assert!(error.contains(words), "{error}");
        }
        let error = toml::from_str::<Flags>(&two.replace("dir", "path")).unwrap_err().to_string();
        assert!(error.contains("[[model]] section has `dir`"), "{error}");
    }
}
