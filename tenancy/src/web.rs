//! Outgoing HTTP requests: to an identity provider, to a collector of usage events, to tools. They block, each with a deadline, so they are
//! made by threads other than the event loop. One thread of their own moves the bytes of all of them.

use bytes::{Buf, Bytes};
use reqwest::{
    Method, RequestBuilder, Response, Url,
    header::{CONTENT_TYPE, HeaderMap, HeaderValue},
    redirect::Policy,
};
use rustls::{
    ClientConfig, RootCertStore,
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, pem::PemObject},
};
use std::{
    error::Error,
    fs::File,
    io::{self, Read},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::{Arc, OnceLock},
    time::Duration,
};
use tokio::runtime::{self, Runtime};

/// The default deadline: more than a working server needs.
const REQUEST_MAX: Duration = Duration::from_secs(10);
const REDIRECTS_MAX: usize = 3;
const TOKEN_BYTES_MAX: u64 = 16 << 10;

/// A server to send requests to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Target {
    pub url: String,
    /// The PEM file with the authorities of its certificate; `None` for those that browsers trust.
    pub ca: Option<PathBuf>,
}

#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    #[error("`{0}` is not a URL with a host, such as https://id.example/jwks.json")]
    Url(String),
    #[error("`{0}` is not encrypted, and its answers could be changed on the way: use https (http is for this machine only)")]
    Plain(String),
    #[error("cannot read {path}: {source}")]
    Ca { path: PathBuf, source: io::Error },
    #[error("{path} has no certificate in PEM: {reason}")]
    Pem { path: PathBuf, reason: String },
    #[error("requests to {url} cannot be made: {source}")]
    Client { url: String, source: reqwest::Error },
}

#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// No answer, or none that ends. The URL is not repeated: it may have secrets.
    #[error("{}", in_full(.0))]
    Failed(reqwest::Error),
    #[error("it answered with status {0}")]
    Status(u16),
    #[error("its answer is longer than {0} bytes")]
    TooLong(u64),
}

impl From<reqwest::Error> for RequestError {
    fn from(error: reqwest::Error) -> Self {
        Self::Failed(error.without_url())
    }
}

impl Target {
    /// The host, with its port if the URL has one.
    pub fn host(&self) -> Option<String> {
        let url = Url::parse(&self.url).ok()?;
        let host = url.host_str()?;
        Some(url.port().map_or_else(|| host.to_owned(), |port| format!("{host}:{port}")))
    }

    pub fn check(&self) -> Result<(), TargetError> {
        let url = Url::parse(&self.url).map_err(|_| TargetError::Url(self.url.clone()))?;
        let host = url.host_str().ok_or_else(|| TargetError::Url(self.url.clone()))?;
        let address: Option<IpAddr> = host.trim_matches(['[', ']']).parse().ok();
        let is_here = host == "localhost" || address.is_some_and(|address| address.is_loopback());
        match url.scheme() {
            "https" => Ok(()),
            "http" if is_here => Ok(()),
            "http" => Err(TargetError::Plain(self.url.clone())),
            _ => Err(TargetError::Url(self.url.clone())),
        }
    }

    /// A client that keeps connections between requests. Reads the file of authorities.
    pub fn client(&self) -> Result<Client, TargetError> {
        self.configured(REQUEST_MAX, Policy::limited(REDIRECTS_MAX))
    }

    /// A client for requests that must not be redirected elsewhere.
    pub fn client_without_redirects(&self, timeout: Duration) -> Result<Client, TargetError> {
        self.configured(timeout, Policy::none())
    }

    fn configured(&self, timeout: Duration, redirects: Policy) -> Result<Client, TargetError> {
        self.check()?;
        let http = reqwest::Client::builder()
            .tls_backend_preconfigured(self.tls()?)
            // From the first byte of the request to the last one of the answer.
            .timeout(timeout)
            .https_only(self.url.starts_with("https:"))
            // Settings come from files and flags, not from the environment.
            .no_proxy()
            .redirect(redirects)
            .user_agent("tidemill")
            .build();
        let http = http.map_err(|source| TargetError::Client { url: self.url.clone(), source })?;
        Ok(Client { http, url: self.url.clone() })
    }

    fn tls(&self) -> Result<ClientConfig, TargetError> {
        let mut roots = RootCertStore::empty();
        match &self.ca {
            None => roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
            Some(path) => {
                let pem = std::fs::read(path).map_err(|source| TargetError::Ca { path: path.clone(), source })?;
                let wrong = |reason| TargetError::Pem { path: path.clone(), reason };
                for certificate in certificates(&pem).map_err(wrong)? {
                    roots.add(certificate).map_err(|error| wrong(error.to_string()))?;
                }
            }
        }
        // The provider that all of Tidemill uses.
        let tls = ClientConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider())).with_safe_default_protocol_versions();
        Ok(tls.expect("the provider has what the versions need").with_root_certificates(roots).with_no_client_auth())
    }
}

/// A client for one URL, and for those that its answers name.
#[derive(Clone, Debug)]
pub struct Client {
    http: reqwest::Client,
    url: String,
}

/// The head of an answer; the body has not been read yet.
#[derive(Debug)]
pub struct Answer(Response);

impl Client {
    /// Gets the body from `url`. Any status but success is an error, and so is a body of more than `bytes_max`.
    pub fn get(&self, url: &str, bytes_max: u64) -> Result<Vec<u8>, RequestError> {
        accepted(self.http.get(url))?.read(bytes_max)
    }

    /// Posts JSON, where only the status matters: any but success is an error.
    pub fn deliver_json(&self, token: Option<&str>, body: String) -> Result<(), RequestError> {
        let mut request = self.http.post(&self.url).header(CONTENT_TYPE, "application/json").body(body);
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        accepted(request).map(drop)
    }

    /// Posts JSON, as [`post`](Self::post) does.
    pub fn post_json(&self, token: Option<&str>, body: &str, bytes_max: u64) -> Result<(u16, String), String> {
        self.post(token, "application/json", body.as_bytes(), bytes_max)
    }

    /// Posts a body. Returns status and body of the answer for any status; the body is cut after `bytes_max`. An error means that there was
    /// no answer.
    pub fn post(&self, token: Option<&str>, content_type: &'static str, body: &[u8], bytes_max: u64) -> Result<(u16, String), String> {
        let headers = HeaderMap::from_iter([(CONTENT_TYPE, HeaderValue::from_static(content_type))]);
        let answer = self.send(Method::POST, token, headers, Some(body))?;
        let status = answer.status();
        let mut bytes = Vec::new();
        answer.into_reader().take(bytes_max).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
        Ok((status, String::from_utf8_lossy(&bytes).into_owned()))
    }

    /// Sends a request. Returns the answer for any status; its body must also arrive within the client's time. An error means that there
    /// was no answer.
    pub fn send(&self, method: Method, token: Option<&str>, headers: HeaderMap, body: Option<&[u8]>) -> Result<Answer, String> {
        let mut request = self.http.request(method, &self.url);
        if let Some(token) = token {
            request = request.bearer_auth(token);
        }
        request = request.headers(headers);
        if let Some(body) = body {
            request = request.body(body.to_vec());
        }
        send(request).map_err(|error| error.to_string())
    }
}

fn send(request: RequestBuilder) -> Result<Answer, RequestError> {
    // In an async block, since its timer begins with the call.
    Ok(Answer(requests().block_on(async { request.send().await })?))
}

fn accepted(request: RequestBuilder) -> Result<Answer, RequestError> {
    let answer = send(request)?;
    if (200..300).contains(&answer.status()) { Ok(answer) } else { Err(RequestError::Status(answer.status())) }
}

/// The thread of all requests. Who makes one waits on a thread of its own.
fn requests() -> &'static Runtime {
    static REQUESTS: OnceLock<Runtime> = OnceLock::new();
    REQUESTS.get_or_init(|| {
        let runtime = runtime::Builder::new_multi_thread().worker_threads(1).thread_name("requests").enable_all().build();
        runtime.expect("the system has room for a thread")
    })
}

impl Answer {
    pub fn status(&self) -> u16 {
        self.0.status().as_u16()
    }

    /// A header of the answer; `None` if it is missing or not text.
    pub fn header(&self, name: &str) -> Option<&str> {
        self.0.headers().get(name).and_then(|value| value.to_str().ok())
    }

    /// Reads the body, which the caller must bound.
    pub fn into_reader(self) -> impl Read + Send + 'static {
        Body { answer: self.0, chunk: Bytes::new() }
    }

    fn read(mut self, bytes_max: u64) -> Result<Vec<u8>, RequestError> {
        let mut body = Vec::new();
        while let Some(chunk) = requests().block_on(self.0.chunk())? {
            body.extend_from_slice(&chunk);
            if body.len() as u64 > bytes_max {
                return Err(RequestError::TooLong(bytes_max));
            }
        }
        Ok(body)
    }
}

/// A body as it arrives.
struct Body {
    answer: Response,
    chunk: Bytes,
}

impl Read for Body {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        while self.chunk.is_empty() {
            match requests().block_on(self.answer.chunk()) {
                Ok(Some(chunk)) => self.chunk = chunk,
                Ok(None) => return Ok(0),
                Err(error) => return Err(io::Error::other(RequestError::from(error))),
            }
        }
        self.chunk.as_ref().read(into).inspect(|&read| self.chunk.advance(read))
    }
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

/// Reads a token from its file.
pub fn read_token(path: &Path) -> io::Result<String> {
    let mut token = String::new();
    File::open(path)?.take(TOKEN_BYTES_MAX).read_to_string(&mut token)?;
    Ok(token.trim().to_owned())
}

fn certificates(pem: &[u8]) -> Result<Vec<CertificateDer<'static>>, String> {
    let found: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(pem).collect();
    let found = found.map_err(|error| error.to_string())?;
    if found.is_empty() { Err("it is empty, or holds something else".into()) } else { Ok(found) }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use rcgen::{CertificateParams, KeyPair};
    use rustls::pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
    use std::{
        io::{BufRead, BufReader, Read, Write},
        net::{SocketAddr, TcpListener},
        sync::{
            Mutex,
            atomic::{AtomicUsize, Ordering},
        },
        thread,
    };

    /// The answer of a server: a status and a body, after a delay.
    #[derive(Clone, Debug)]
    pub(crate) struct Reply {
        pub(crate) status: u16,
        /// Lines of the head, each with its end.
        pub(crate) head: String,
        pub(crate) body: String,
        pub(crate) after: Duration,
    }

    impl Reply {
        pub(crate) fn ok(body: impl Into<String>) -> Self {
            Self { body: body.into(), ..Self::status(200) }
        }

        pub(crate) fn status(status: u16) -> Self {
            Self { status, head: String::new(), body: String::new(), after: Duration::ZERO }
        }
    }

    /// A request as it arrived: the head and the body.
    pub(crate) type Asked = (String, String);

    /// A small HTTP server, which runs until the test ends.
    pub(crate) struct Server {
        pub(crate) address: SocketAddr,
        pub(crate) reply: Arc<Mutex<Reply>>,
        pub(crate) asked: Arc<Mutex<Vec<Asked>>>,
        pub(crate) connections: Arc<AtomicUsize>,
    }

    impl Server {
        pub(crate) fn start(reply: Reply, tls: Option<Arc<rustls::ServerConfig>>) -> Self {
            Self::at("127.0.0.1:0".parse().unwrap(), reply, tls)
        }

        pub(crate) fn at(address: SocketAddr, reply: Reply, tls: Option<Arc<rustls::ServerConfig>>) -> Self {
            let listener = TcpListener::bind(address).unwrap();
            let server = Self {
                address: listener.local_addr().unwrap(),
                reply: Arc::new(Mutex::new(reply)),
                asked: Arc::default(),
                connections: Arc::default(),
            };
            let (reply, asked, connections) = (Arc::clone(&server.reply), Arc::clone(&server.asked), Arc::clone(&server.connections));
            thread::spawn(move || {
                for stream in listener.incoming() {
                    connections.fetch_add(1, Ordering::Relaxed);
                    let (reply, asked, tls) = (Arc::clone(&reply), Arc::clone(&asked), tls.clone());
                    thread::spawn(move || {
                        let stream = stream.unwrap();
                        match tls {
                            None => answer(stream, &reply, &asked),
                            Some(tls) => {
                                let connection = rustls::ServerConnection::new(tls).unwrap();
                                answer(rustls::StreamOwned::new(connection, stream), &reply, &asked);
                            }
                        }
                    });
                }
            });
            server
        }

        pub(crate) fn set(&self, reply: Reply) {
            *self.reply.lock().unwrap() = reply;
        }

        pub(crate) fn target(&self) -> Target {
            Target { url: format!("http://{}/", self.address), ca: None }
        }
    }

    /// Answers one request per connection. A client that breaks off does not count.
    fn answer(mut stream: impl Read + Write, reply: &Mutex<Reply>, asked: &Mutex<Vec<Asked>>) {
        let mut reader = BufReader::new(&mut stream);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            if reader.read_line(&mut head).is_ok_and(|bytes| bytes > 0) {
                continue;
            }
            return;
        }
        let length = head.lines().find_map(|line| line.to_lowercase().strip_prefix("content-length:")?.trim().parse().ok());
        let mut body = vec![0; length.unwrap_or(0)];
        if reader.read_exact(&mut body).is_err() {
            return;
        }
        asked.lock().unwrap().push((head, String::from_utf8(body).unwrap()));
        let Reply { status, head, body, after } = reply.lock().unwrap().clone();
        thread::sleep(after);
        let answer = format!("HTTP/1.1 {status} X\r\n{head}content-length: {}\r\nconnection: close\r\n\r\n{body}", body.len());
        let _ = stream.write_all(answer.as_bytes()).and_then(|()| stream.flush());
    }

    pub(crate) fn wait_until(holds: impl Fn() -> bool) {
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while !holds() {
            assert!(std::time::Instant::now() < deadline, "it takes too long");
            thread::sleep(Duration::from_millis(5));
        }
    }

    #[test]
    fn what_comes_from_elsewhere_is_encrypted() {
        let check = |url: &str| Target { url: url.into(), ca: None }.check().map_err(|error| error.to_string());
        for good in ["https://id.example/keys", "http://127.0.0.1:9/keys", "http://[::1]:9/", "http://localhost/"] {
            assert_eq!(check(good), Ok(()), "{good}");
        }
        for (wrong, words) in [("http://id.example/", "https"), ("ftp://id.example/", "URL"), ("keys.json", "URL"), ("", "URL")] {
            assert!(check(wrong).unwrap_err().contains(words), "{wrong}");
        }
    }

    #[test]
    fn a_redirect_is_an_answer_like_any_other_and_a_long_one_is_cut() {
        let elsewhere = Server::start(Reply::ok("secret"), None);
        let server = Server::start(Reply::status(302), None);
        let client = server.target().client_without_redirects(Duration::from_secs(10)).unwrap();
        server.set(Reply { head: format!("location: http://{}/\r\n", elsewhere.address), ..Reply::status(302) });
        assert_eq!(client.post_json(Some("t"), "{}", 100).unwrap().0, 302);
        assert!(server.asked.lock().unwrap()[0].0.to_lowercase().contains("authorization: bearer t"));
        assert_eq!(elsewhere.connections.load(Ordering::Relaxed), 0);
        server.set(Reply::ok("0123456789"));
        assert_eq!(client.post_json(None, "{}", 4).unwrap(), (200, "0123".into()));
    }

    #[test]
    fn a_certificate_must_come_from_whom_the_operator_names() {
        let key = KeyPair::generate().unwrap();
        let certificate = CertificateParams::new(vec!["localhost".into()]).unwrap().self_signed(&key).unwrap();
        let chain = vec![certificate.der().clone()];
        let private = PrivateKeyDer::from(PrivatePkcs8KeyDer::from(key.serialized_der().to_vec()));
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let tls = rustls::ServerConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
        let tls = tls.with_no_client_auth().with_single_cert(chain, private).unwrap();
        let server = Server::start(Reply::ok("hello"), Some(Arc::new(tls)));
        let dir = tempfile::tempdir().unwrap();
        let ca = dir.path().join("ca.pem");
        std::fs::write(&ca, certificate.pem()).unwrap();
        let url = format!("https://localhost:{}/", server.address.port());
        let get = |ca| {
            let target = Target { url: url.clone(), ca };
            target.client().unwrap().get(&url, 5)
        };
        assert_eq!(get(Some(ca.clone())).unwrap(), b"hello");
        assert!(get(None).is_err(), "browsers do not trust it");
        std::fs::write(&ca, "nonsense").unwrap();
        assert!(matches!(Target { url, ca: Some(ca) }.client(), Err(TargetError::Pem { .. })));
    }
}
