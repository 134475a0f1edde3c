//! The section `[regions]`: this cluster as one of several, at different sites.

use serde::{Deserialize, Serialize};
use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    sync::Arc,
};
use tidemill_gateway::{
    base::pins::Pins,
    serving::regions::{OtherRegion, RegionSettings},
};
use tidemill_net::config::{ConfigError, invalid};
use tidemill_tenancy::web::Target;

/// Names and ways of regions. `pins` must be the same in all of them.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RegionsFlags {
    /// Name of this region, such as eu
    pub name: String,
    /// Milliseconds of predicted waiting from which a request is sent to another region; classes without a TTFT limit wait here
    /// [default: the TTFT limit of its class]
    pub wait_ms: Option<f64>,
    /// Tenants whose requests are answered, and whose data is stored, in some regions only, such as `{ bank = ["eu"] }`: a region that is
    /// not named refuses them, and a region with pins needs keys or tokens from the start [default: none]
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub pins: BTreeMap<String, Vec<String>>,
    /// The other regions, nearest first: `[[regions.others]]` sections [default: none]
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub others: Vec<OtherRegionFlags>,
}

/// Another region.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OtherRegionFlags {
    /// Its name, as it calls itself
    pub name: String,
    /// URL of its front door, such as `https://us.example`
    pub url: String,
    /// PEM file with the authorities that the URL's certificate may come from [default: this machine's]
    pub ca: Option<PathBuf>,
    /// File with a secret of at least 32 bytes that these two regions alone share, by which each believes the other whose request it relays;
    /// without it, only requests that need no key are relayed [default: none]
    pub secret: Option<PathBuf>,
}

impl RegionsFlags {
    /// `region_header` is the one of the routing rules.
    pub(super) fn check(self, region_header: Option<&str>) -> Result<RegionSettings, ConfigError> {
        if let Some(wait_ms) = self.wait_ms.filter(|wait_ms| !(wait_ms.is_finite() && *wait_ms > 0.0)) {
            return Err(invalid("regions.wait_ms", wait_ms, "must be a time above 0"));
        }
        // Names are parts of headers.
        let check_name = |key, name: &str| match name.is_empty() || !name.bytes().all(|c| c.is_ascii_alphanumeric() || b"-_.".contains(&c))
        {
            true => Err(invalid(key, name, "must be letters, digits, `-`, `_` or `.`")),
            false => Ok(()),
        };
        let mut known = BTreeSet::new();
        for name in [&self.name].into_iter().chain(self.others.iter().map(|other| &other.name)) {
            check_name("regions.name", name)?;
            if !known.insert(name.clone()) {
                return Err(invalid("regions.name", name, "is the name of two regions"));
            }
        }
        for (tenant, regions) in &self.pins {
            if regions.is_empty() {
                return Err(invalid("regions.pins", tenant, "must name a region: this tenant's requests would be refused everywhere"));
            }
            regions.iter().try_for_each(|name| check_name("regions.pins", name))?;
        }
        let others = self.others.into_iter().map(|OtherRegionFlags { name, url, ca, secret }| {
            let door = Target { url, ca };
            door.check().map_err(|error| invalid("regions.others.url", &door.url, error.to_string()))?;
            let after_scheme = door.url.split_once("://").map_or(&*door.url, |(_, rest)| rest);
            if after_scheme.trim_end_matches('/').contains(['/', '?', '#', '@']) {
                return Err(invalid("regions.others.url", &door.url, "must be a front door alone, such as https://us.example"));
            }
            Ok(OtherRegion { name, door, secret })
        });
        Ok(RegionSettings {
            others: others.collect::<Result<_, _>>()?,
            pins: Arc::new(Pins { here: self.name, regions: self.pins }),
            wait_ms: self.wait_ms,
            region_header: region_header.and_then(|name| name.parse().ok()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(file: &str) -> Result<RegionSettings, String> {
        let flags: RegionsFlags = toml::from_str(file).map_err(|error| error.to_string())?;
        flags.check(None).map_err(|error| error.to_string())
    }

    #[test]
    fn a_section_names_regions_that_exist() {
        let us = "[[others]]\nname = 'us'\nurl = 'https://us.example/'\n";
        assert!(check(&format!("name = 'eu'\nwait_ms = 500\npins = {{ bank = ['eu', 'us'] }}\n{us}")).is_ok());
        for (file, words) in [
            ("".to_owned(), "name"),
            ("name = ''".into(), "regions.name"),
            ("name = 'e u'".into(), "regions.name"),
            ("name = 'eu'\nwait_ms = 0".into(), "regions.wait_ms"),
            ("name = 'eu'\nwait_ms = nan".into(), "regions.wait_ms"),
            (format!("name = 'us'\n{us}"), "two regions"),
            (format!("name = 'eu'\n{us}{us}"), "two regions"),
            (format!("name = 'eu'\npins = {{ bank = [] }}\n{us}"), "must name a region"),
            (format!("name = 'eu'\npins = {{ bank = ['a sia'] }}\n{us}"), "regions.pins"),
            ("name = 'eu'\n[[others]]\nname = 'us'\nurl = 'http://us.example'".into(), "not encrypted"),
            ("name = 'eu'\n[[others]]\nname = 'us'\nurl = 'https://us.example/v1'".into(), "front door alone"),
            ("name = 'eu'\n[[others]]\nname = 'us'\nurl = 'us.example'".into(), "regions.others.url"),
        ] {
            let error = check(&file).unwrap_err();
            assert!(error.contains(words), "{file}: {error}");
        }
    }
}
