//! `--model org/name` against a local server that speaks the hub's layout: the revision's listing, `resolve` with its
//! headers and byte ranges, and large files behind a redirect.

use axum::{
    Router,
    body::{Body, Bytes},
    extract::{Path as UrlPath, State},
    http::{HeaderMap, StatusCode, header},
    response::{IntoResponse, Response},
    routing::get,
};
use futures_util::{StreamExt, stream};
use std::{
    collections::BTreeMap,
    fs,
    io::{Error, ErrorKind},
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
    time::Duration,
};
use tidemill_net::model_dir::{Download, Hub, ModelDirError, resolve};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";
const WEIGHTS: &str = "model.safetensors";

/// The server's treatment of the body of the weights.
#[derive(Clone, Copy, Default)]
enum Fault {
    #[default]
    None,
    /// Breaks the connection halfway through the first full read.
    Cut,
    /// Sends half, without a length.
    Short,
    /// Never sends a byte.
    Silent,
}

#[derive(Default)]
struct Server {
    files: BTreeMap<&'static str, Vec<u8>>,
    fault: Fault,
    /// The token that the hub requires; `None` for public models.
    token: Option<&'static str>,
    downloads: AtomicUsize,
}

impl Server {
    fn new(files: &[&'static str]) -> Server {
        let content = |name: &str| (0..if name == WEIGHTS { 300_000 } else { 50 }).map(|i| (i % 251) as u8).collect();
        Server { files: files.iter().map(|name| (*name, content(name))).collect(), ..Server::default() }
    }

    /// Serves until the runtime ends; returns the hub that reaches it.
    async fn start(self: Arc<Self>, cache: &Path) -> Hub {
        let app = Router::new()
            .route("/api/models/org/tiny/revision/{revision}", get(listing))
            .route("/org/tiny/resolve/{revision}/{*file}", get(resolved))
            .route("/cdn/{*file}", get(content))
            .with_state(self);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Some(format!("http://{}", listener.local_addr().unwrap()));
        tokio::spawn(async move { axum::serve(listener, app).await });
        Hub { cache: cache.to_owned(), endpoint, token: None, stall: Duration::from_secs(20) }
    }

    fn denies(&self, headers: &HeaderMap) -> bool {
        let given = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
        self.token.is_some_and(|token| given != Some(&format!("Bearer {token}")))
    }
}

async fn listing(State(server): State<Arc<Server>>, UrlPath(revision): UrlPath<String>, headers: HeaderMap) -> Response {
    if server.denies(&headers) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    if revision != "main" && revision != "v1/2" && revision != COMMIT {
        return StatusCode::NOT_FOUND.into_response();
    }
    let siblings: Vec<String> = server.files.keys().map(|name| format!(r#"{{"rfilename":"{name}"}}"#)).collect();
    format!(r#"{{"id":"org/tiny","sha":"{COMMIT}","siblings":[{}]}}"#, siblings.join(",")).into_response()
}

/// Sends small files at once, and weights by a redirect that already has commit and tag, as the hub does for large files.
async fn resolved(State(server): State<Arc<Server>>, UrlPath((revision, file)): UrlPath<(String, String)>, headers: HeaderMap) -> Response {
    assert_eq!(revision, COMMIT, "files are asked for by commit");
    if server.denies(&headers) {
        return StatusCode::UNAUTHORIZED.into_response();
    }
    let mut response = match file == WEIGHTS {
        true => {
            (StatusCode::FOUND, [(header::LOCATION, format!("http://{}/cdn/{file}", headers["host"].to_str().unwrap()))]).into_response()
        }
        false => content(State(server), UrlPath(file.clone()), headers).await,
    };
    response.headers_mut().insert("x-repo-commit", COMMIT.parse().unwrap());
    response.headers_mut().insert("x-linked-etag", format!("\"tag-of-{file}\"").parse().unwrap());
    response
}

async fn content(State(server): State<Arc<Server>>, UrlPath(file): UrlPath<String>, headers: HeaderMap) -> Response {
    let Some(bytes) = server.files.get(file.as_str()) else {
        return StatusCode::NOT_FOUND.into_response();
    };
    let range = headers[header::RANGE].to_str().unwrap().strip_prefix("bytes=").unwrap();
    let (start, end) = range.split_once('-').unwrap();
    let start: usize = start.parse().unwrap();
    let end = end.parse().map_or(bytes.len(), |last: usize| last + 1);
    let is_probe = end - start == 1;
    let part = Bytes::copy_from_slice(&bytes[start..end]);
    let half = part.slice(..part.len() / 2);
    if !is_probe {
        server.downloads.fetch_add(1, Relaxed);
    }
    let faulty = file == WEIGHTS && !is_probe;
    // Late enough for the first half to be on its way.
    let broken = stream::once(async {
        tokio::time::sleep(Duration::from_millis(50)).await;
        Err(Error::from(ErrorKind::ConnectionReset))
    });
    let (length, body) = match server.fault {
        Fault::Cut if faulty && start == 0 => (part.len(), Body::from_stream(stream::iter([Ok(half)]).chain(broken))),
        Fault::Short if faulty => (half.len(), Body::from(half)),
        Fault::Silent if faulty => (part.len(), Body::from_stream(stream::pending::<Result<Bytes, Error>>())),
        _ => (part.len(), Body::from(part)),
    };
    let range = format!("bytes {start}-{}/{}", end - 1, bytes.len());
    let headers = [(header::CONTENT_RANGE, range), (header::CONTENT_LENGTH, length.to_string()), (header::ETAG, format!("\"{file}\""))];
    (StatusCode::PARTIAL_CONTENT, headers, body).into_response()
}

const REPO: [&str; 8] = [
    "README.md",
    "config.json",
    "generation_config.json",
    WEIGHTS,
    "original/consolidated.pth",
    "pytorch_model.bin",
    "tokenizer.json",
    "tokenizer_config.json",
];

#[tokio::test]
async fn a_directory_is_itself() {
    let dir = tempfile::tempdir().unwrap();
    let hub = Hub { endpoint: Some("http://127.0.0.1:1".into()), ..Hub::from_env(dir.path().join("cache")) };
    let path = dir.path().to_str().unwrap();
    assert_eq!(resolve(path, &hub, |_| ()).await.unwrap(), dir.path().canonicalize().unwrap());
    for wrong in ["/no/such/dir", "tiny", "a/b/c", "../org/tiny", "org/tiny@../x", "org/tiny@", ""] {
        let error = resolve(wrong, &hub, |_| ()).await.unwrap_err();
        assert!(matches!(error, ModelDirError::NotAModel(_)), "{wrong}: {error}");
    }
    let file = dir.path().join("model.bin");
    fs::write(&file, b"anything").unwrap();
    let error = resolve(file.to_str().unwrap(), &hub, |_| ()).await.unwrap_err();
    assert!(matches!(error, ModelDirError::NotADirectory(_)), "{error}");
}

#[tokio::test]
async fn a_hub_model_is_fetched_once_and_then_served_without_the_hub() {
    let cache = tempfile::tempdir().unwrap();
    let server = Arc::new(Server::new(&REPO));
    let hub = server.clone().start(cache.path()).await;
    let mut seen: Vec<Download> = Vec::new();
    let dir = resolve("org/tiny", &hub, |download| seen.push(download.clone())).await.unwrap();

    let mut names: Vec<_> = fs::read_dir(&dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, ["config.json", "generation_config.json", WEIGHTS, "tokenizer.json", "tokenizer_config.json"]);
    assert_eq!(fs::read(dir.join(WEIGHTS)).unwrap(), server.files[WEIGHTS]);
    assert!(seen.iter().all(|download| download.count == names.len() && download.bytes <= download.bytes_total));

    let downloads = server.downloads.load(Relaxed);
    assert_eq!(downloads, names.len());
    assert_eq!(resolve("org/tiny", &hub, |_| ()).await.unwrap(), dir);
    assert_eq!(resolve("org/tiny@v1/2", &hub, |_| ()).await.unwrap(), dir, "another name of the same commit");
    assert_eq!(server.downloads.load(Relaxed), downloads, "nothing is fetched twice");

    let away = Hub { endpoint: Some("http://127.0.0.1:1".into()), ..hub };
    assert_eq!(resolve("org/tiny", &away, |_| ()).await.unwrap(), dir);
    let error = resolve("org/other", &away, |_| ()).await.unwrap_err();
    assert!(matches!(error, ModelDirError::Fetch { .. }), "{error}");
}

#[tokio::test]
async fn shards_are_taken_and_the_single_file_beside_them_is_not() {
    let cache = tempfile::tempdir().unwrap();
    let shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    let others = ["config.json", "tokenizer.json", "model.safetensors.index.json", "consolidated.safetensors", WEIGHTS];
    let hub = Arc::new(Server::new(&[&shards[..], &others[..]].concat())).start(cache.path()).await;
    let dir = resolve("org/tiny", &hub, |_| ()).await.unwrap();
    assert!(shards.iter().all(|shard| dir.join(shard).exists()));
    assert!(!dir.join(WEIGHTS).exists() && !dir.join("consolidated.safetensors").exists());
}

#[tokio::test]
async fn a_broken_download_says_so_and_goes_on_where_it_broke() {
    let cache = tempfile::tempdir().unwrap();
    let mut server = Server::new(&REPO);
    server.fault = Fault::Cut;
    let hub = Arc::new(server).start(cache.path()).await;
    let error = resolve("org/tiny", &hub, |_| ()).await.unwrap_err();
    assert!(matches!(error, ModelDirError::Truncated { bytes: 150_000, bytes_total: 300_000, .. }), "{error}");
    assert!(resolve("org/tiny", &Hub { endpoint: Some("http://127.0.0.1:1".into()), ..hub.clone() }, |_| ()).await.is_err());

    // The server breaks only reads from the start, so a resumed read succeeds.
    let dir = resolve("org/tiny", &hub, |_| ()).await.unwrap();
    assert_eq!(fs::read(dir.join(WEIGHTS)).unwrap(), Server::new(&REPO).files[WEIGHTS]);
}

#[tokio::test]
async fn a_short_body_is_not_taken_for_the_file() {
    let cache = tempfile::tempdir().unwrap();
    let mut server = Server::new(&REPO);
    server.fault = Fault::Short;
    let hub = Arc::new(server).start(cache.path()).await;
    let error = resolve("org/tiny", &hub, |_| ()).await.unwrap_err();
    assert!(matches!(error, ModelDirError::Truncated { bytes: 150_000, bytes_total: 300_000, .. }), "{error}");
}

#[tokio::test]
async fn a_silent_hub_is_given_up() {
    let cache = tempfile::tempdir().unwrap();
    let mut server = Server::new(&REPO);
    server.fault = Fault::Silent;
    let hub = Arc::new(server).start(cache.path()).await;
    let error = resolve("org/tiny", &Hub { stall: Duration::from_millis(500), ..hub }, |_| ()).await.unwrap_err();
    assert!(matches!(error, ModelDirError::Stalled { .. }), "{error}");
}

#[tokio::test]
async fn refusals_say_what_to_do() {
    let cache = tempfile::tempdir().unwrap();
    let mut server = Server::new(&REPO);
    server.token = Some("secret");
    let hub = Arc::new(server).start(cache.path()).await;
    let error = resolve("org/tiny", &hub, |_| ()).await.unwrap_err();
    assert!(matches!(error, ModelDirError::Denied { .. }) && error.to_string().contains("HF_TOKEN"), "{error}");
    let hub = Hub { token: Some("secret".into()), ..hub };
    let error = resolve("org/tiny@v9", &hub, |_| ()).await.unwrap_err();
    assert!(matches!(error, ModelDirError::NotFound { .. }) && error.to_string().contains("org/tiny@v9"), "{error}");
    resolve("org/tiny", &hub, |_| ()).await.unwrap();

    let empty = tempfile::tempdir().unwrap();
    let hub = Arc::new(Server::new(&["config.json", "pytorch_model.bin", "tokenizer.json"])).start(empty.path()).await;
    let error = resolve("org/tiny", &hub, |_| ()).await.unwrap_err();
    assert!(matches!(error, ModelDirError::Incomplete { missing: WEIGHTS, .. }), "{error}");
}
