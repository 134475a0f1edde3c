//! Outgoing HTTP requests: to an identity provider, to a collector of usage events, to tools. They block, each with a deadline, so they are
//! made by threads other than the event loop.

use std::{
    fs::File,
    io::{self, Read},
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use ureq::{
    Agent, Body,
    config::ConfigBuilder,
    http::{
        HeaderMap, HeaderValue, Method, Request, Response, Uri,
        header::{AUTHORIZATION, CONTENT_TYPE},
    },
    tls::{Certificate, PemItem, RootCerts, TlsConfig, parse_pem},
    typestate::AgentScope,
};

/// The default deadline: more than a working server needs.
const REQUEST_MAX: Duration = Duration::from_secs(10);
const REDIRECTS_MAX: u32 = 3;
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
}

impl Target {
    /// The host, with its port if the URL has one.
    pub fn host(&self) -> Option<String> {
        let uri: Uri = self.url.parse().ok()?;
        uri.authority().map(|authority| authority.as_str().rsplit('@').next().unwrap_or_default().to_owned())
    }

    pub fn check(&self) -> Result<(), TargetError> {
        let uri: Uri = self.url.parse().map_err(|_| TargetError::Url(self.url.clone()))?;
        let host = uri.host().ok_or_else(|| TargetError::Url(self.url.clone()))?;
        let address: Option<IpAddr> = host.trim_matches(['[', ']']).parse().ok();
        let is_here = host == "localhost" || address.is_some_and(|address| address.is_loopback());
        match uri.scheme_str() {
            Some("https") => Ok(()),
            Some("http") if is_here => Ok(()),
            Some("http") => Err(TargetError::Plain(self.url.clone())),
            _ => Err(TargetError::Url(self.url.clone())),
        }
    }

    /// A client that keeps connections between requests. Reads the file of authorities.
    pub fn client(&self) -> Result<Agent, TargetError> {
        Ok(self.configured(REQUEST_MAX)?.max_redirects(REDIRECTS_MAX).build().new_agent())
    }

    /// A client for requests that must not be redirected elsewhere.
    pub fn client_without_redirects(&self, timeout: Duration) -> Result<Client, TargetError> {
        let config = self.configured(timeout)?.max_redirects(0).max_redirects_will_error(false).http_status_as_error(false);
        Ok(Client { agent: config.build().new_agent(), url: self.url.clone() })
    }

    fn configured(&self, timeout: Duration) -> Result<ConfigBuilder<AgentScope>, TargetError> {
        self.check()?;
        // The provider that all of Tidemill uses.
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let mut tls = TlsConfig::builder().unversioned_rustls_crypto_provider(provider);
        if let Some(path) = &self.ca {
            let pem = std::fs::read(path).map_err(|source| TargetError::Ca { path: path.clone(), source })?;
            tls = tls.root_certs(RootCerts::from(certificates(&pem).map_err(|reason| TargetError::Pem { path: path.clone(), reason })?));
        }
        let config = Agent::config_builder()
            .tls_config(tls.build())
            .timeout_global(Some(timeout))
            .https_only(self.url.starts_with("https:"))
            // Settings come from files and flags, not from the environment.
            .proxy(None)
            .user_agent("tidemill");
        Ok(config)
    }
}

/// A client for one URL.
#[derive(Debug)]
pub struct Client {
    agent: Agent,
    url: String,
}

/// The head of an answer; the body has not been read yet.
#[derive(Debug)]
pub struct Answer(Response<Body>);

impl Client {
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
        let mut request = Request::builder().method(method).uri(&self.url);
        if let Some(token) = token {
            request = request.header(AUTHORIZATION, format!("Bearer {token}"));
        }
        for (name, value) in &headers {
            request = request.header(name, value);
        }
        let answer = match body {
            Some(body) => request.body(body).map(|request| self.agent.run(request)),
            None => request.body(()).map(|request| self.agent.run(request)),
        };
        answer.map_err(|error| error.to_string())?.map(Answer).map_err(|error| error.to_string())
    }
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
        self.0.into_body().into_reader()
    }
}

/// Reads a token from its file.
pub fn read_token(path: &Path) -> io::Result<String> {
    let mut token = String::new();
    File::open(path)?.take(TOKEN_BYTES_MAX).read_to_string(&mut token)?;
    Ok(token.trim().to_owned())
}

fn certificates(pem: &[u8]) -> Result<Vec<Certificate<'static>>, String> {
    let mut found = Vec::new();
    for item in parse_pem(pem) {
        if let PemItem::Certificate(certificate) = item.map_err(|error| error.to_string())? {
            found.push(certificate);
        }
    }
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
            let mut answer = target.client().unwrap().get(&url).call()?;
            answer.body_mut().read_to_string()
        };
        assert_eq!(get(Some(ca.clone())).unwrap(), "hello");
        assert!(get(None).is_err(), "browsers do not trust it");
        std::fs::write(&ca, "nonsense").unwrap();
        assert!(matches!(Target { url, ca: Some(ca) }.client(), Err(TargetError::Pem { .. })));
    }
}
