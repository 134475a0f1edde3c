//! This repository's files, as seeds.

use anyhow::Context;
use std::{
    fs,
    path::{Path, PathBuf},
};

pub(super) fn path(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(relative)
}

/// The pages in a directory of the documentation, by name.
pub(super) fn pages(dir: &str) -> anyhow::Result<Vec<String>> {
    let entries = fs::read_dir(path(dir)).with_context(|| dir.to_owned())?;
    let mut files = entries.map(|entry| Ok(entry?.path())).collect::<anyhow::Result<Vec<_>>>()?;
    files.retain(|file| file.extension().is_some_and(|kind| kind == "md"));
    files.sort();
    files.iter().map(|file| fs::read_to_string(file).with_context(|| file.display().to_string())).collect()
}

/// Directories of small models, one of each family.
pub(super) fn models() -> anyhow::Result<Vec<PathBuf>> {
    checkpoints("model/tests/fixtures")
}

/// Directories of small encoders.
pub(super) fn encoders() -> anyhow::Result<Vec<PathBuf>> {
    checkpoints("model/tests/encoders")
}

fn checkpoints(place: &str) -> anyhow::Result<Vec<PathBuf>> {
    let mut models = Vec::new();
    for entry in fs::read_dir(path(place))? {
        let dir = entry?.path();
        if dir.join("config.json").is_file() {
            models.push(dir);
        }
    }
    models.sort();
    anyhow::ensure!(!models.is_empty(), "{place} has no models");
    Ok(models)
}

/// The texts of this file in each directory that has it.
pub(super) fn texts_of(dirs: &[PathBuf], name: &str) -> Vec<String> {
    dirs.iter().filter_map(|dir| fs::read_to_string(dir.join(name)).ok()).collect()
}
