//! The models that `tidemill up` serves: their directories, and their names.

use super::UpArgs;
use crate::{demo_model, gguf};
use anyhow::{Context, bail};
use std::path::{Path, PathBuf};
use tidemill_net::model_dir::{self, Download, Hub};
use tidemill_proto::message::ModelKind;
use tokio::task::spawn_blocking;

/// The names by which clients know the models, and the models' directories.
pub(super) async fn resolve_models(args: &UpArgs, data: &Path) -> anyhow::Result<Vec<(String, PathBuf)>> {
    if args.model.is_empty() {
        let dir = data.join("demo-model");
        demo_model::unpack(&dir).with_context(|| format!("cannot write {}", dir.display()))?;
        let [name] = &named(args, vec!["tidemill-demo".to_owned()])?[..] else { bail!("the built-in model has one name") };
        return Ok(vec![(name.clone(), dir)]);
    }
    let (mut names, mut dirs) = (Vec::new(), Vec::new());
    for model in &args.model {
        let dir = resolve_model(model, data).await?;
        names.push(match Path::new(model) {
            path if path.is_dir() => directory_name(if gguf::meant(model)?.is_some() { path } else { &dir }),
            file if gguf::meant(model)?.is_some() => gguf::name(file),
            _ => model.clone(),
        });
        dirs.push(dir);
    }
    Ok(named(args, names)?.into_iter().zip(dirs).collect())
}

/// The directories of the draft models.
pub(super) async fn resolve_drafts(args: &UpArgs, data: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let (drafts, models) = (args.draft_model.len(), args.model.len().max(1));
    if drafts > 0 && drafts != models {
        bail!("--draft-model is given {drafts} times for {models} models: give each model one, in the order of --model");
    }
    let mut dirs = Vec::new();
    for model in &args.draft_model {
        dirs.push(resolve_model(model, data).await?);
    }
    Ok(dirs)
}

/// The directory of a model, which is given as a directory, as a GGUF file or a directory with one, or by its name at the hub.
async fn resolve_model(model: &str, data: &Path) -> anyhow::Result<PathBuf> {
    let kept = data.join("models");
    if let Some(file) = gguf::meant(model)? {
        return spawn_blocking(move || gguf::resolve(&file, &kept)).await.context("unpacking a GGUF file")?;
    }
    let progress = |d: &Download| {
        eprint!("\rtidemill: fetching {} ({} of {}), {} of {} MiB  ", d.file, d.index + 1, d.count, d.bytes >> 20, d.bytes_total >> 20);
    };
    Ok(model_dir::resolve(model, &Hub::from_env(kept), progress).await?)
}

/// The names given with `--served-model-name`, or else `names`.
fn named(args: &UpArgs, names: Vec<String>) -> anyhow::Result<Vec<String>> {
    match args.served_model_name.len() {
        0 => Ok(names),
        given if given == names.len() => Ok(args.served_model_name.clone()),
        given => {
            bail!("--served-model-name is given {given} times for {} models: give each model a name, in the order of --model", names.len())
        }
    }
}

fn directory_name(dir: &Path) -> String {
    let absolute = dir.canonicalize().unwrap_or_else(|_| dir.to_owned());
    absolute.file_name().map_or_else(|| "model".to_owned(), |name| name.to_string_lossy().into_owned())
}

/// Whether a directory's model is an encoder, which generates no tokens.
pub(super) fn is_encoder(dir: &Path) -> anyhow::Result<bool> {
    #[derive(serde::Deserialize)]
    struct Config {
        #[serde(default)]
        architectures: Vec<String>,
    }
    let path = dir.join("config.json");
    // The workers report what is wrong with the directory.
    let Ok(bytes) = std::fs::read(&path) else { return Ok(false) };
    let config: Config = serde_json::from_slice(&bytes).with_context(|| format!("cannot read {}", path.display()))?;
    Ok(config.architectures.first().is_some_and(|name| ModelKind::of_architecture(name) != ModelKind::Decoder))
}
