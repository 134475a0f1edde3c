//! Turns `--model` into a directory. A directory is used as it is; anything else is a hub id, `org/name` or `org/name@revision`,
//! and is fetched once into a cache.
//!
//! ```text
//! cache/models--org--name/blobs/<etag>                each file's content, `.part` while it arrives
//!                         snapshots/<commit>/<file>   links into blobs; `resolve` returns this folder
//!                         refs/complete/<revision>    the commit of a complete snapshot; written last
//! ```

use reqwest::{
    Client, Response, StatusCode,
    header::{CONTENT_RANGE, ETAG, HeaderMap, LOCATION, RANGE},
    redirect::Policy,
};
use rustls::{ClientConfig, RootCertStore, crypto::aws_lc_rs};
use serde::Deserialize;
use std::{
    error::Error,
    fs::{self, File, OpenOptions, TryLockError},
    io::{self, Write},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::time::{sleep, timeout};

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
    #[error("model `{0}` is a file, and none of GGUF: name a directory in Hugging Face's layout, a GGUF file, or a hub id")]
    NotADirectory(String),
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
    if Path::new(model).is_file() {
        return Err(ModelDirError::NotADirectory(model.to_owned()));
    }
    Fetch::new(model, hub)?.run(&mut progress).await
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
struct Fetch {
    model: String,
    repo: String,
    revision: String,
    hub: Hub,
    following: Client,
    /// Does not follow redirects: the answer that redirects has the file's tag.
    staying: Client,
}

/// A revision's files.
#[derive(Deserialize)]
struct Listing {
    sha: String,
    siblings: Vec<Sibling>,
}

#[derive(Deserialize)]
struct Sibling {
    rfilename: String,
}

impl Fetch {
    fn new(model: &str, hub: &Hub) -> Result<Fetch, ModelDirError> {
        let (repo, revision) = model.split_once('@').unwrap_or((model, "main"));
        let is_id = repo.split_once('/').is_some_and(|(org, name)| is_name(org) && is_name(name));
        // A revision becomes a path in the cache and in the URL.
        if !is_id || !revision.split('/').all(is_name) {
            return Err(ModelDirError::NotAModel(model.to_owned()));
        }
        let client = |redirects| client(redirects).map_err(|e| fetch_error(model, hub, in_full(&e)));
        let (following, staying) = (client(Policy::default())?, client(Policy::none())?);
        Ok(Fetch { model: model.to_owned(), repo: repo.to_owned(), revision: revision.to_owned(), hub: hub.clone(), following, staying })
    }

    async fn run(&self, progress: &mut impl FnMut(&Download)) -> Result<PathBuf, ModelDirError> {
        let complete = self.folder().join("refs/complete").join(&self.revision);
        let listing = match self.listing().await {
            Ok(listing) => listing,
            Err(error) => {
                let commit = fs::read_to_string(&complete).ok().filter(|commit| is_name(commit));
                let cached = commit.map(|commit| self.snapshot(&commit)).filter(|directory| directory.join("config.json").exists());
                return cached.filter(|_| matches!(error, ModelDirError::Fetch { .. })).ok_or(error);
            }
        };
        let listed: Vec<&str> = listing.siblings.iter().map(|sibling| sibling.rfilename.as_str()).collect();
        let sharded = listed.contains(&INDEX);
        let wanted: Vec<&str> = listed.into_iter().filter(|file| is_wanted(file, sharded)).collect();
        self.check_complete(&wanted)?;

        // By commit, not by branch: all files come from one snapshot even if the branch moves meanwhile.
        let snapshot = self.snapshot(&listing.sha);
        for (index, file) in wanted.iter().enumerate() {
            let link = snapshot.join(file);
            if link.exists() {
                continue;
            }
            let mut download = Download { file: file.to_string(), index: index + 1, count: wanted.len(), bytes: 0, bytes_total: 0 };
            progress(&download);
            let tag = self.download(&listing.sha, &mut download, progress).await?;
            self.link(&tag, &link).map_err(|e| self.disk_error(&link, &e))?;
        }
        write_ref(&complete, &listing.sha).map_err(|e| self.disk_error(&complete, &e))?;
        Ok(snapshot)
    }

    fn folder(&self) -> PathBuf {
        self.hub.cache.join(format!("models--{}", self.repo.replace('/', "--")))
    }

    fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder().join("snapshots").join(commit)
    }

    async fn listing(&self) -> Result<Listing, ModelDirError> {
        let revision = self.revision.replace('/', "%2F");
        let url = format!("{}/api/models/{}/revision/{revision}", self.hub.endpoint(), self.repo);
        let mut response = self.accepted(self.get(&self.following, &url, None).await?)?;
        let mut json = Vec::new();
        while let Some(chunk) = self.in_time(response.chunk()).await?.map_err(|e| self.request_error(e))? {
            json.extend_from_slice(&chunk);
            if json.len() > LISTING_BYTES_MAX {
                return Err(self.error(format!("its list of files is longer than {LISTING_BYTES_MAX} bytes")));
            }
        }
        let listing: Listing = serde_json::from_slice(&json).map_err(|e| self.error(format!("its list of files is not one: {e}")))?;
        // It becomes a path in the cache and in URLs.
        if is_name(&listing.sha) { Ok(listing) } else { Err(self.error(format!("`{}` is not a commit", listing.sha))) }
    }

    /// Fetches a file into the blob that its tag names, from where the last attempt broke off. Returns the tag.
    async fn download(&self, commit: &str, download: &mut Download, progress: &mut impl FnMut(&Download)) -> Result<String, ModelDirError> {
        let url = format!("{}/{}/resolve/{commit}/{}", self.hub.endpoint(), self.repo, download.file);
        let tag = self.tag(&url).await?;
        let blob = self.folder().join("blobs").join(&tag);
        if blob.exists() {
            return Ok(tag);
        }
        let failed = |e: io::Error| self.disk_error(&blob, &e);
        fs::create_dir_all(self.folder().join("blobs")).map_err(failed)?;
        // Until it is closed.
        let _lock = self.lock(&blob.with_added_extension("lock")).await?;
        if blob.exists() {
            // Another process fetched it meanwhile.
            return Ok(tag);
        }
        let part = blob.with_added_extension("part");
        let mut file = OpenOptions::new().create(true).append(true).open(&part).map_err(failed)?;
        download.bytes = file.metadata().map_err(failed)?.len();
        let mut response = self.get(&self.following, &url, Some(download.bytes)).await?;
        let total = length(response.headers());
        if response.status() == StatusCode::RANGE_NOT_SATISFIABLE && total == Some(download.bytes) {
            // All of it had arrived.
        } else {
            if response.status() == StatusCode::RANGE_NOT_SATISFIABLE {
                fs::remove_file(&part).map_err(failed)?;
                return Err(self.error(format!("what had arrived of {} is not a part of it: start again", download.file)));
            }
            response = self.accepted(response)?;
            if response.status() != StatusCode::PARTIAL_CONTENT {
                // The whole file, from its start.
                file.set_len(0).map_err(failed)?;
                download.bytes = 0;
            }
            let total = if response.status() == StatusCode::PARTIAL_CONTENT { total } else { response.content_length() };
            download.bytes_total = total.ok_or_else(|| self.error(format!("it does not tell the length of {}", download.file)))?;
            progress(download);
            loop {
                match self.in_time(response.chunk()).await? {
                    Ok(None) => break,
                    Ok(Some(chunk)) => {
                        file.write_all(&chunk).map_err(failed)?;
                        download.bytes += chunk.len() as u64;
                        progress(download);
                    }
                    Err(_) if download.bytes < download.bytes_total => return Err(self.truncated(download)),
                    Err(error) => return Err(self.request_error(error)),
                }
            }
            if download.bytes < download.bytes_total {
                return Err(self.truncated(download));
            }
            if download.bytes > download.bytes_total {
                fs::remove_file(&part).map_err(failed)?;
                return Err(self.error(format!("{} is longer than the {} bytes announced", download.file, download.bytes_total)));
            }
        }
        fs::rename(&part, &blob).map_err(failed)?;
        Ok(tag)
    }

    /// The tag of a file: of its content where the hub keeps that elsewhere.
    async fn tag(&self, url: &str) -> Result<String, ModelDirError> {
        let mut url = reqwest::Url::parse(url).map_err(|e| self.error(e.to_string()))?;
        for _ in 0..REDIRECTS_MAX {
            let request = self.staying.get(url.clone()).header(RANGE, "bytes=0-0");
            let response = self.send(request).await?;
            let location = response.headers().get(LOCATION).filter(|_| response.status().is_redirection()).and_then(|to| to.to_str().ok());
            // Within the hub, as after a repository was renamed. Elsewhere lies the content alone.
            if let Some(path) = location.filter(|to| to.starts_with('/') && !to.starts_with("//")) {
                url = url.join(path).map_err(|e| self.error(e.to_string()))?;
                continue;
            }
            let response = if response.status().is_redirection() { response } else { self.accepted(response)? };
            let headers = response.headers();
            let tag = headers.get("x-linked-etag").or_else(|| headers.get(ETAG)).and_then(|tag| tag.to_str().ok()).unwrap_or_default();
            let tag = tag.trim_start_matches("W/").trim_matches('"');
            // It becomes a path in the cache.
            return if is_name(tag) { Ok(tag.to_owned()) } else { Err(self.error(format!("{url} has no tag that can name a file"))) };
        }
        Err(self.error(format!("{url} redirects too often")))
    }

    async fn get(&self, client: &Client, url: &str, from: Option<u64>) -> Result<Response, ModelDirError> {
        let request = client.get(url);
        self.send(if let Some(from) = from { request.header(RANGE, format!("bytes={from}-")) } else { request }).await
    }

    async fn send(&self, request: reqwest::RequestBuilder) -> Result<Response, ModelDirError> {
        // The token stays behind where a redirect leaves the host.
        let request = if let Some(token) = &self.hub.token { request.bearer_auth(token) } else { request };
        self.in_time(request.send()).await?.map_err(|e| self.request_error(e))
    }

    async fn in_time<T>(&self, next: impl Future<Output = T>) -> Result<T, ModelDirError> {
        let (model, endpoint, stall) = (&self.model, self.hub.endpoint(), self.hub.stall);
        let stalled = |_| ModelDirError::Stalled { model: model.clone(), endpoint: endpoint.to_owned(), stall };
        timeout(stall, next).await.map_err(stalled)
    }

    fn accepted(&self, response: Response) -> Result<Response, ModelDirError> {
        let (model, endpoint) = (self.model.clone(), self.hub.endpoint().to_owned());
        match response.status() {
            status if status.is_success() => Ok(response),
            StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => Err(ModelDirError::Denied { model, endpoint }),
            StatusCode::NOT_FOUND => Err(ModelDirError::NotFound { model, endpoint }),
            status => Err(self.error(format!("it answered with status {status}"))),
        }
    }

    /// Takes the lock of a blob, which other tools for the hub take as well.
    async fn lock(&self, path: &Path) -> Result<File, ModelDirError> {
        let file = File::create(path).map_err(|e| self.disk_error(path, &e))?;
        for _ in 0..LOCK_TRIES {
            match file.try_lock() {
                Ok(()) => return Ok(file),
                Err(TryLockError::WouldBlock) => sleep(LOCK_EVERY).await,
                Err(TryLockError::Error(e)) => return Err(self.disk_error(path, &e)),
            }
        }
        Err(self.error("another process is fetching it; start again when that one is done".into()))
    }

    /// Links a snapshot's file to its blob.
    fn link(&self, tag: &str, link: &Path) -> io::Result<()> {
        fs::create_dir_all(link.parent().expect("a snapshot's file is in its folder"))?;
        match symlink(Path::new("../../blobs").join(tag), link) {
            // Another process was faster, or the blob that it led to was lost.
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists && !link.exists() => {
                fs::remove_file(link)?;
                symlink(Path::new("../../blobs").join(tag), link)
            }
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            linked => linked,
        }
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

    fn truncated(&self, download: &Download) -> ModelDirError {
        let Download { file, bytes, bytes_total, .. } = download.clone();
        ModelDirError::Truncated { model: self.model.clone(), file, bytes, bytes_total }
    }

    fn request_error(&self, error: reqwest::Error) -> ModelDirError {
        self.error(in_full(&error.without_url()))
    }

    fn disk_error(&self, path: &Path, error: &io::Error) -> ModelDirError {
        self.error(format!("the cache's {} cannot be written: {error}", path.display()))
    }

    fn error(&self, reason: String) -> ModelDirError {
        fetch_error(&self.model, &self.hub, reason)
    }
}

fn fetch_error(model: &str, hub: &Hub, reason: String) -> ModelDirError {
    ModelDirError::Fetch { model: model.to_owned(), endpoint: hub.endpoint().to_owned(), reason }
}

/// Whether a name can be a part of a path.
fn is_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !name.is_empty() && !name.starts_with('.') && name.chars().all(allowed)
}

/// A client that trusts the authorities that browsers trust: a container may have none of its own. Proxies are the environment's.
fn client(redirects: Policy) -> reqwest::Result<Client> {
    let roots = RootCertStore { roots: webpki_roots::TLS_SERVER_ROOTS.to_vec() };
    let tls = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider())).with_safe_default_protocol_versions();
    let tls = tls.expect("the provider has what the versions need").with_root_certificates(roots).with_no_client_auth();
    let agent = concat!("tidemill/", env!("CARGO_PKG_VERSION"));
    Client::builder().tls_backend_preconfigured(tls).redirect(redirects).user_agent(agent).build()
}

/// The length of a whole file of which a part was sent.
fn length(headers: &HeaderMap) -> Option<u64> {
    headers.get(CONTENT_RANGE)?.to_str().ok()?.rsplit('/').next()?.parse().ok()
}

fn write_ref(path: &Path, commit: &str) -> io::Result<()> {
    // A revision may have slashes.
    fs::create_dir_all(path.parent().expect("a reference is in a folder"))?;
    fs::write(path, commit)
}

/// An error with its causes, which reqwest's own `Display` leaves out.
fn in_full(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text += &format!(": {error}");
        cause = error.source();
    }
    text
}

const INDEX: &str = "model.safetensors.index.json";
const STALL: Duration = Duration::from_secs(60);
/// Far more than the list of the largest repository.
const LISTING_BYTES_MAX: usize = 10 << 20;
/// As many as browsers follow, about.
const REDIRECTS_MAX: usize = 10;
const LOCK_TRIES: usize = 6;
const LOCK_EVERY: Duration = Duration::from_secs(1);
