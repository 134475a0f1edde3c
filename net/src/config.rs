//! Configuration: each setting is stated once. One struct of `Option`s is both the schema of a role's TOML file and its command-line flags.
//!
//! A role derives `clap::Args`, `Serialize` and `Deserialize` (with `deny_unknown_fields`) on that struct and uses it in its [`Cli`]. Flags
//! override the file. The role then checks the result once and turns it into its settings.

use clap::{CommandFactory, FromArgMatches};
use serde::{Serialize, de::DeserializeOwned};
use std::{
    fs, io,
    path::{Path, PathBuf},
};

#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    #[error("cannot read config file {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("config file {path}: {reason}")]
    Toml { path: PathBuf, reason: String },
    #[error("flags cannot be merged: {0}")]
    Flags(String),
    #[error("`{key}` is not set: give --{} or put `{key} = …` into {}", key.replace('_', "-"), place(section))]
    Missing { section: Option<&'static str>, key: &'static str },
    #[error("`{key}` = {value}: {reason}")]
    Invalid { key: &'static str, value: String, reason: String },
}

/// The command line of a role: a config file, and flags `F` that override it.
#[derive(Debug, clap::Parser)]
#[command(version)]
pub struct Cli<F: clap::Args> {
    /// TOML file with the same keys as the flags, `_` for `-`; headings in brackets below are its sections
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    #[command(flatten)]
    flags: F,
}

impl<F: clap::Args + Serialize + DeserializeOwned> Cli<F> {
    /// Parses this process's command line. `name` and `about` go into the help text. `--help` and invalid flags end the process.
    pub fn of_process(name: &'static str, about: &'static str) -> Self {
        let matches = Self::command().name(name).about(about).get_matches();
        Self::from_arg_matches(&matches).unwrap_or_else(|error| error.exit())
    }

    pub fn resolve(self) -> Result<F, ConfigError> {
        resolve(&self.flags, self.config.as_deref())
    }
}

/// Merges `flags` over the contents of `file`. Errors name the key and the line.
pub fn resolve<T: Serialize + DeserializeOwned>(flags: &T, file: Option<&Path>) -> Result<T, ConfigError> {
    let mut table = match file {
        None => toml::Table::new(),
        Some(path) => {
            let text = fs::read_to_string(path).map_err(|source| ConfigError::File { path: path.to_owned(), source })?;
            let invalid = |e: toml::de::Error| ConfigError::Toml { path: path.to_owned(), reason: e.to_string() };
            // The file is first checked alone, while the error still knows its line.
            toml::from_str::<T>(&text).map_err(invalid)?;
            text.parse::<toml::Table>().map_err(invalid)?
        }
    };
    overlay(&mut table, toml::Table::try_from(flags).map_err(|e| ConfigError::Flags(e.to_string()))?);
    table.try_into().map_err(|e| ConfigError::Flags(e.to_string()))
}

/// Puts `over` on top of `base`. Sections are merged key by key.
fn overlay(base: &mut toml::Table, over: toml::Table) {
    for (key, value) in over {
        match (base.get_mut(&key), value) {
            (Some(toml::Value::Table(base)), toml::Value::Table(over)) => overlay(base, over),
            (_, value) => {
                base.insert(key, value);
            }
        }
    }
}

/// The value of a key that has no default, or an error that names the flag and the key.
pub fn required<T>(section: Option<&'static str>, key: &'static str, value: Option<T>) -> Result<T, ConfigError> {
    value.ok_or(ConfigError::Missing { section, key })
}

fn place(section: &Option<&'static str>) -> String {
    section.map_or("the config file".into(), |section| format!("section [{section}] of the config file"))
}

/// An error that names the key and its value, and states what is allowed.
pub fn invalid(key: &'static str, value: impl ToString, reason: impl Into<String>) -> ConfigError {
    ConfigError::Invalid { key, value: value.to_string(), reason: reason.into() }
}

/// Parses bytes from `"512MiB"`, `"2GiB"`, `"64KiB"` or a plain number.
pub fn parse_bytes(text: &str) -> Result<u64, String> {
    let digits = text.trim_end_matches(|c: char| c.is_ascii_alphabetic() || c == ' ');
    let unit = match text[digits.len()..].trim() {
        "" | "B" => 1,
        "KiB" => 1 << 10,
        "MiB" => 1 << 20,
        "GiB" => 1 << 30,
        other => return Err(format!("unit `{other}` is not one of B, KiB, MiB, GiB")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("`{text}` is not a size such as 512MiB"))?;
    number.checked_mul(unit).ok_or_else(|| format!("`{text}` is too large"))
}

/// Returns `bytes`, or an error for `key` if this machine has less memory.
pub fn within_memory(key: &'static str, bytes: u64) -> Result<u64, ConfigError> {
    #[cfg(target_os = "linux")]
    if let Ok(system) = nix::sys::sysinfo::sysinfo()
        && bytes > system.ram_total() + system.swap_total()
    {
        return Err(invalid(key, bytes, format!("this machine has {} bytes of memory", system.ram_total())));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde::Deserialize;
    use std::io::Write;

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    #[serde(deny_unknown_fields)]
    struct Flags {
        name: Option<String>,
        threads: Option<usize>,
    }

    fn file(text: &str) -> tempfile::NamedTempFile {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text.as_bytes()).unwrap();
        file
    }

    #[test]
    fn flags_overlay_the_file() {
        let file = file("name = \"a\"\nthreads = 2\n");
        let flags = Flags { name: None, threads: Some(8) };
        assert_eq!(resolve(&flags, Some(file.path())).unwrap(), Flags { name: Some("a".into()), threads: Some(8) });
        assert_eq!(resolve(&flags, None).unwrap(), flags);
    }

    #[test]
    fn an_unknown_key_is_named_with_its_line() {
        let file = file("name = \"a\"\nthread = 2\n");
        let error = resolve(&Flags { name: None, threads: None }, Some(file.path())).unwrap_err().to_string();
        assert!(error.contains("thread") && error.contains("line 2"), "{error}");
    }

    proptest::proptest! {
        #[test]
        fn whatever_a_file_holds_the_answer_is_settings_or_an_error(text in "[ -~\\n]{0,200}", size in ".{0,20}") {
            let _ = resolve(&Flags { name: None, threads: None }, Some(file(&text).path()));
            let _ = parse_bytes(&size);
        }
    }

    #[test]
    fn no_more_memory_is_promised_than_there_is() {
        assert_eq!(within_memory("dram", 1 << 20).unwrap(), 1 << 20);
        let error = within_memory("dram", 1 << 60).unwrap_err().to_string();
        assert!(error.contains("`dram`") && error.contains("memory"), "{error}");
    }

    #[test]
    fn sizes_have_units() {
        assert_eq!(parse_bytes("2GiB"), Ok(2 << 30));
        assert_eq!(parse_bytes("17"), Ok(17));
        for wrong in ["", "GiB", "2GB", "-1", "99999999999GiB"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
    }
}
