//! Turns `--model` into a directory. A directory is used as it is; anything else is a hub id, `org/name` or `org/name@revision`,
//! and is fetched once into a cache.
//!
//! ```text
//! cache/models--org--name/blobs/<etag>                each file's content, `.part` while it arrives
//!                         snapshots/<commit>/<file>   links into blobs; `resolve` returns this folder
//!                         refs/complete/<revision>    the commit of a complete snapshot; written last
//! ```

use hf_hub::{
    Cache, Repo, RepoType,
    api::sync::{Api, ApiBuilder, ApiError},
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    thread,
    time::Duration,
};
use tokio::{
    sync::{oneshot, watch},
    time::timeout,
};

/// The hub where ids are looked up, and the cache where models are kept.
#[derive(Clone, Debug)]
pub struct Hub {
    pub cache: PathBuf,
    /// The hub's address, for example `https://huggingface.co`.
    pub endpoint: Option<String>,
    /// The access token for private and gated models; sent only to the endpoint.
    pub token: Option<String>,
    /// The longest wait for the next byte.
    pub stall: Duration,
}

/// Progress of one file.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Download {
    pub file: String,
    /// The number of this file (from 1), and the number of files.
    pub index: usize,
    pub count: usize,
    pub bytes: u64,
    pub bytes_total: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum ModelDirError {
    #[error("model `{0}`: there is no such directory, and a hub id looks like org/name or org/name@revision")]
    NotAModel(String),
    #[error("model directory {path}: {source}")]
    Directory { path: PathBuf, source: io::Error },
    #[error("model `{model}` is neither a directory here nor a model (with that revision) at {endpoint}: check the spelling")]
    NotFound { model: String, endpoint: String },
    #[error(
        "{endpoint} does not give `{model}` to us: either it does not exist, or it wants its terms accepted on its page and HF_TOKEN set \
         to a token that may read it"
    )]
    Denied { model: String, endpoint: String },
    #[error("model `{model}` at {endpoint} has no {missing}: Tidemill loads Hugging Face directories with safetensors weights")]
    Incomplete { model: String, endpoint: String, missing: &'static str },
    #[error("{file} of `{model}` arrived with {bytes} of {bytes_total} bytes; the rest is fetched when you start again")]
    Truncated { model: String, file: String, bytes: u64, bytes_total: u64 },
    #[error("nothing came from {endpoint} for {} s while fetching `{model}`: try again, the bytes that arrived are kept", stall.as_secs())]
    Stalled { model: String, endpoint: String, stall: Duration },
    #[error("there is no directory `{model}`, and it cannot be fetched from {endpoint}: {reason}")]
    Fetch { model: String, endpoint: String, reason: String },
}

impl Hub {
    /// The hub that `HF_ENDPOINT` and `HF_TOKEN` specify, as in other tools for the hub.
    pub fn from_env(cache: PathBuf) -> Hub {
        let set = |name| std::env::var(name).ok().filter(|value: &String| !value.is_empty());
        Hub { cache, endpoint: set("HF_ENDPOINT"), token: set("HF_TOKEN"), stall: STALL }
    }

    fn endpoint(&self) -> &str {
        self.endpoint.as_deref().unwrap_or("https://huggingface.co").trim_end_matches('/')
    }
}

/// Returns the directory that `model` names, fetched from `hub` if needed. `progress` is called for every file, and repeatedly as its bytes
/// arrive.
///
/// While the hub is unreachable, a completely fetched model is served from the cache.
pub async fn resolve(model: &str, hub: &Hub, mut progress: impl FnMut(&Download)) -> Result<PathBuf, ModelDirError> {
    if Path::new(model).is_dir() {
        return fs::canonicalize(model).map_err(|source| ModelDirError::Directory { path: model.into(), source });
    }
    let fetch = Fetch::new(model, hub)?;
    let (arrived, mut arriving) = watch::channel(Download::default());
    let (done, mut result) = oneshot::channel();
    // A thread of its own, not the runtime's: the hub client blocks without a deadline, and a stalled one must not keep the process alive.
    let spawned = thread::Builder::new().name("hub".into()).spawn({
        let fetch = fetch.clone();
        move || _ = done.send(fetch.run(&arrived))
    });
    spawned.map_err(|e| fetch.error(e.to_string()))?;
    loop {
        tokio::select! {
            biased;
            result = &mut result => return result.unwrap_or_else(|_| Err(fetch.error("the hub client gave up".into()))),
            changed = timeout(hub.stall, arriving.changed()) => match changed {
                Ok(Ok(())) => progress(&arriving.borrow_and_update()),
                // The thread has ended; its result follows.
                Ok(Err(_)) => return (&mut result).await.unwrap_or_else(|_| Err(fetch.error("the hub client gave up".into()))),
                Err(_) => {
                    let (model, endpoint) = (fetch.model.clone(), hub.endpoint().to_owned());
                    return Err(ModelDirError::Stalled { model, endpoint, stall: hub.stall });
                }
            },
        }
    }
}

/// Whether a file of a repository belongs in a model directory. The others (other formats, pictures) can be many gigabytes.
fn is_wanted(file: &str, sharded: bool) -> bool {
    match file {
        "config.json" | "generation_config.json" | "chat_template.jinja" | "special_tokens_map.json" => true,
        "model.safetensors" => !sharded,
        INDEX => true,
        _ if file.contains('/') => false,
        _ if file.starts_with("tokenizer") => file.ends_with(".json"),
        _ => sharded && file.starts_with("model-") && file.ends_with(".safetensors"),
    }
}

/// One model to fetch.
#[derive(Clone)]
struct Fetch {
    model: String,
    repo: String,
    revision: String,
    hub: Hub,
}

impl Fetch {
    fn new(model: &str, hub: &Hub) -> Result<Fetch, ModelDirError> {
        let (repo, revision) = model.split_once('@').unwrap_or((model, "main"));
        let is_name = |name: &str| {
            let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
            !name.is_empty() && !name.starts_with('.') && name.chars().all(allowed)
        };
        let is_id = repo.split_once('/').is_some_and(|(org, name)| is_name(org) && is_name(name));
        // A revision becomes a path in the cache and in the URL.
        if !is_id || !revision.split('/').all(is_name) {
            return Err(ModelDirError::NotAModel(model.to_owned()));
        }
        Ok(Fetch { model: model.to_owned(), repo: repo.to_owned(), revision: revision.to_owned(), hub: hub.clone() })
    }

    fn run(&self, arrived: &watch::Sender<Download>) -> Result<PathBuf, ModelDirError> {
        let api = self.api().map_err(|e| self.api_error(e))?;
        let repo = |revision: &str| Repo::with_revision(self.repo.clone(), RepoType::Model, revision.to_owned());
        let cache = Cache::new(self.hub.cache.clone());
        let complete = cache.repo(repo(&format!("complete/{}", self.revision)));
        let info = match api.repo(repo(&self.revision)).info() {
            Ok(info) => info,
            Err(e) => {
                let error = self.api_error(e);
                let cached = complete.get("config.json").and_then(|config| Some(config.parent()?.to_owned()));
                return cached.filter(|_| matches!(error, ModelDirError::Fetch { .. })).ok_or(error);
            }
        };
        let listed: Vec<&str> = info.siblings.iter().map(|sibling| sibling.rfilename.as_str()).collect();
        let sharded = listed.contains(&INDEX);
        let wanted: Vec<&str> = listed.into_iter().filter(|file| is_wanted(file, sharded)).collect();
        self.check_complete(&wanted)?;

        // By commit, not by branch: all files come from one snapshot even if the branch moves meanwhile.
        let snapshot = api.repo(repo(&info.sha));
        let cached = cache.repo(repo(&info.sha));
        for (index, file) in wanted.iter().enumerate() {
            if cached.get(file).is_some() {
                continue;
            }
            let download = Download { file: file.to_string(), index: index + 1, count: wanted.len(), bytes: 0, bytes_total: 0 };
            arrived.send_replace(download);
            let path = snapshot.download_with_progress(file, Arriving(arrived)).map_err(|e| self.broken_off(e, &arrived.borrow()))?;
            self.check_length(&path, &arrived.borrow())?;
        }
        complete.create_ref(&info.sha).map_err(|e| self.error(e.to_string()))?;
        let directory = cached.get("config.json").and_then(|config| Some(config.parent()?.to_owned()));
        directory.ok_or_else(|| self.error(format!("the cache {} has lost a file", self.hub.cache.display())))
    }

    fn api(&self) -> Result<Api, ApiError> {
        let builder = ApiBuilder::from_cache(Cache::new(self.hub.cache.clone()));
        let builder = builder.with_endpoint(self.hub.endpoint().to_owned()).with_token(self.hub.token.clone());
        builder.build()
    }

    fn check_complete(&self, wanted: &[&str]) -> Result<(), ModelDirError> {
        let missing = if !wanted.contains(&"config.json") {
            "config.json"
        } else if !wanted.iter().any(|file| file.ends_with(".safetensors")) {
            "model.safetensors"
        } else if !wanted.contains(&"tokenizer.json") {
            "tokenizer.json"
        } else {
            return Ok(());
        };
        Err(ModelDirError::Incomplete { model: self.model.clone(), endpoint: self.hub.endpoint().to_owned(), missing })
    }

    /// Checks the length of a file. If the server sends no length, the hub client accepts a body that ends early.
    fn check_length(&self, path: &Path, expected: &Download) -> Result<(), ModelDirError> {
        let bytes = fs::metadata(path).map_err(|e| self.error(e.to_string()))?.len();
        if bytes == expected.bytes_total {
            return Ok(());
        }
        let blob = fs::canonicalize(path).map_err(|e| self.error(e.to_string()))?;
        for path in [path, &blob] {
            fs::remove_file(path).map_err(|e| self.error(e.to_string()))?;
        }
        Err(self.truncated(&Download { bytes, ..expected.clone() }))
    }

    fn broken_off(&self, error: ApiError, download: &Download) -> ModelDirError {
        match error {
            ApiError::IoError(_) if download.bytes < download.bytes_total => self.truncated(download),
            error => self.api_error(error),
        }
    }

    fn truncated(&self, download: &Download) -> ModelDirError {
        let Download { file, bytes, bytes_total, .. } = download.clone();
        ModelDirError::Truncated { model: self.model.clone(), file, bytes, bytes_total }
    }

    fn api_error(&self, error: ApiError) -> ModelDirError {
        let (model, endpoint) = (self.model.clone(), self.hub.endpoint().to_owned());
        match &error {
            ApiError::RequestError(request) => match **request {
                ureq::Error::StatusCode(401 | 403) => ModelDirError::Denied { model, endpoint },
                ureq::Error::StatusCode(404) => ModelDirError::NotFound { model, endpoint },
                _ => self.error(error.to_string()),
            },
            ApiError::LockAcquisition(_) => self.error("another process is fetching it; start again when that one is done".into()),
            _ => self.error(error.to_string()),
        }
    }

    fn error(&self, reason: String) -> ModelDirError {
        ModelDirError::Fetch { model: self.model.clone(), endpoint: self.hub.endpoint().to_owned(), reason }
    }
}

/// The hub client's progress, as the latest value of a channel.
struct Arriving<'a>(&'a watch::Sender<Download>);

impl hf_hub::api::Progress for Arriving<'_> {
    fn init(&mut self, size: usize, _filename: &str) {
        self.0.send_modify(|download| (download.bytes, download.bytes_total) = (0, size as u64));
    }

    fn update(&mut self, size: usize) {
        self.0.send_modify(|download| download.bytes += size as u64);
    }

    fn finish(&mut self) {}
}

const INDEX: &str = "model.safetensors.index.json";
const STALL: Duration = Duration::from_secs(60);
