//! Config files of all roles: reading and checking them gives settings, or an error that names the key.

use super::tree;
use crate::{
    dice::Dice,
    mutate::{json, text},
    target::{Subject, Target},
};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;
use std::{fs, path::Path, time::Duration};
use tidemill_net::{config, identity};

pub(crate) const SETTINGS: Target = Target {
    name: "settings",
    about: "config files of operators, and their checks",
    open,
    cpu_max: Duration::from_secs(10),
    bytes_max: 256 << 20,
    short: 300,
};

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let dir = tempfile::tempdir()?;
    identity::create(dir.path())?;
    let roles = [
        Role::new::<tidemill_coordinator::settings::Flags>("coordinator", |flags| flags.check().err().map(|error| error.to_string())),
        Role::new::<tidemill_kvpool::settings::Flags>("kvpool", |flags| flags.check().err().map(|error| error.to_string())),
        Role::new::<tidemill_prefill::settings::Flags>("prefill", |flags| flags.check().err().map(|error| error.to_string())),
        Role::new::<tidemill_decode::settings::Flags>("decode", |flags| flags.check().err().map(|error| error.to_string())),
    ];
    let seeds = examples(&roles)?;
    let keys = json::keys(seeds.iter().filter_map(|(_, text)| toml::from_str::<Value>(text).ok()).collect::<Vec<_>>().iter());
    let words: Vec<&'static str> = keys.iter().map(|key| &*key.clone().leak()).collect();
    let (pki, model) = (dir.path().display().to_string(), tree::path("model/tests/fixtures/llama3").display().to_string());
    Ok(Box::new(move |dice: &mut Dice| {
        let (role, seed) = dice.pick(&seeds);
        // These directories exist, so that checks get past them.
        let seed = seed.replace("/etc/tidemill/pki", &pki).replace("/models/llama-3.1-8b", &model);
        let made = match toml::from_str::<Value>(&seed) {
            Ok(mut tree) if dice.one_in(2) => {
                json::mutate(dice, &mut tree, &keys);
                toml::to_string(&tree).unwrap_or(seed)
            }
            _ => text::mutate(dice, &seed, &words),
        };
        dice.show(roles[*role].name, made.as_bytes());
        let file = dir.path().join("config.toml");
        fs::write(&file, made).map_err(|error| error.to_string())?;
        (roles[*role].check)(&file);
        Ok(())
    }))
}

struct Role {
    name: &'static str,
    reads: fn(&str) -> bool,
    check: Box<dyn Fn(&Path)>,
}

impl Role {
    fn new<F: Default + Serialize + DeserializeOwned + 'static>(name: &'static str, check: fn(F) -> Option<String>) -> Self {
        let check = move |file: &Path| {
            if let Ok(flags) = config::resolve(&F::default(), Some(file)) {
                check(flags);
            }
        };
        Self { name, reads: |text| toml::from_str::<F>(text).is_ok(), check: Box::new(check) }
    }
}

/// The examples in the operators' guides, each with the roles that the file is for.
fn examples(roles: &[Role]) -> anyhow::Result<Vec<(usize, String)>> {
    let mut seeds = Vec::new();
    for page in [tree::pages("docs/guides")?, tree::pages("docs/tutorials")?].concat() {
        for block in page.split("```toml\n").skip(1).filter_map(|rest| Some(rest.split_once("```")?.0)) {
            seeds.extend(roles.iter().enumerate().filter(|(_, role)| (role.reads)(block)).map(|(number, _)| (number, block.to_owned())));
        }
    }
    anyhow::ensure!(seeds.len() >= 10, "the guides have {} examples that are read", seeds.len());
    Ok(seeds)
}
