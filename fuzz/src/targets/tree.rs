//! This repository's files, as seeds.

use anyhow::Context;
use std::{
    fs,
    path::{Path, PathBuf},
};

pub(super) fn path(relative: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").join(relative)
}

pub(super) fn text(relative: &str) -> anyhow::Result<String> {
    fs::read_to_string(path(relative)).with_context(|| relative.to_owned())
}

/// Directories of small models, one of each family.
pub(super) fn models() -> anyhow::Result<Vec<PathBuf>> {
    let mut models = Vec::new();
    for entry in fs::read_dir(path("model/tests/fixtures"))? {
        let dir = entry?.path();
        if dir.join("config.json").is_file() {
            models.push(dir);
        }
    }
    models.sort();
    anyhow::ensure!(!models.is_empty(), "model/tests/fixtures has no models");
    Ok(models)
}

/// A file in each of these directories that has it.
pub(super) fn texts_of(dirs: &[PathBuf], name: &str) -> Vec<String> {
    dirs.iter().filter_map(|dir| fs::read_to_string(dir.join(name)).ok()).collect()
}
