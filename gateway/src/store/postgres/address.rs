//! The address of a PostgreSQL server, and the encryption of connections to it: libpq's `sslmode` and `sslrootcert`, with one difference.
//! By default libpq accepts an unencrypted connection to a server that offers no TLS; here this is only the case on this machine: for any
//! other, the address must say `sslmode=disable`.

use std::{
    fmt, fs,
    io::Error,
    net::IpAddr,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};
use tokio_postgres::{
    Config,
    config::{Host, SslMode},
};
use tokio_rustls::rustls::{
    self, CertificateError, ClientConfig, DigitallySignedStruct, RootCertStore, SignatureScheme,
    client::{
        WebPkiServerVerifier,
        danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier},
    },
    crypto::{self, CryptoProvider, aws_lc_rs},
    pki_types::{CertificateDer, ServerName, UnixTime, pem::PemObject},
};

/// The address of a server with a user, as in `postgres://USER:PASSWORD@HOST/DATABASE`.
#[derive(Clone)]
pub struct Address {
    pub(super) config: Config,
    /// The TLS settings; `None` for unencrypted connections.
    pub(super) tls: Option<Arc<ClientConfig>>,
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Address").field("config", &self.config).field("tls", &self.tls.is_some()).finish()
    }
}

/// An error in a server's address.
#[derive(Debug, thiserror::Error)]
pub enum AddressError {
    /// The address itself may contain a password.
    #[error("it cannot be read: {0}")]
    Unreadable(tokio_postgres::Error),
    #[error("it names no host: add `host`, as in postgres:///tidemill?host=/run/postgresql")]
    NoHost,
    #[error("sslmode `{0}` is none: it must be disable, allow, prefer, require, verify-ca or verify-full")]
    Mode(String),
    #[error("sslmode `{0}` needs the authority that the server's certificate comes from: add sslrootcert=FILE, or sslrootcert=system")]
    NoRoot(String),
    #[error("sslrootcert=system would let in whoever has a certificate for any name: sslmode must be verify-full, and is `{0}`")]
    Weak(String),
    #[error("sslrootcert {path} cannot be used: {reason}")]
    Root { path: PathBuf, reason: String },
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Disable,
    /// Also `allow`, whose only use is to save a handshake.
    Prefer,
    Require,
    VerifyCa,
    VerifyFull,
}

/// The value of `sslrootcert` for the authorities that browsers trust.
const SYSTEM: &str = "system";

impl FromStr for Address {
    type Err = AddressError;

    fn from_str(address: &str) -> Result<Self, AddressError> {
        let (rest, Options { mode: named, root }) = without_tls_options(address);
        let mut config: Config = rest.parse().map_err(AddressError::Unreadable)?;
        if config.get_hosts().is_empty() && config.get_hostaddrs().is_empty() {
            return Err(AddressError::NoHost);
        }
        let is_system = root.as_deref() == Some(SYSTEM);
        let name = named.unwrap_or_else(|| if is_system { "verify-full" } else { "prefer" }.to_owned());
        let mode = match name.as_str() {
            "disable" => Mode::Disable,
            "allow" | "prefer" => Mode::Prefer,
            "require" => Mode::Require,
            "verify-ca" => Mode::VerifyCa,
            "verify-full" => Mode::VerifyFull,
            _ => return Err(AddressError::Mode(name)),
        };
        if is_system && mode != Mode::VerifyFull {
            return Err(AddressError::Weak(name));
        }
        // A socket cannot be eavesdropped on, and servers do not offer TLS on it.
        let is_plain = mode == Mode::Disable || uses_sockets(&config);
        if is_plain {
            config.ssl_mode(SslMode::Disable);
            return Ok(Self { config, tls: None });
        }
        let is_optional = mode == Mode::Prefer && stays_here(&config);
        config.ssl_mode(if is_optional { SslMode::Prefer } else { SslMode::Require });
        let root = root.filter(|_| !is_optional);
        let tls = match (mode, root) {
            (Mode::VerifyFull, Some(root)) => client(webpki(&root)?),
            // As in libpq: if the address names an authority, it is checked.
            (Mode::VerifyCa | Mode::Require | Mode::Prefer, Some(root)) => client(Arc::new(AnyName(webpki(&root)?))),
            (Mode::Require | Mode::Prefer, None) => client(Arc::new(Anyone(provider()))),
            (_, None) => return Err(AddressError::NoRoot(name)),
            (Mode::Disable, _) => unreachable!("without TLS it has returned"),
        };
        Ok(Self { config, tls: Some(Arc::new(tls)) })
    }
}

fn uses_sockets(config: &Config) -> bool {
    config.get_hostaddrs().is_empty() && config.get_hosts().iter().all(|host| matches!(host, Host::Unix(_)))
}

/// Whether connections do not leave this machine.
fn stays_here(config: &Config) -> bool {
    let is_here = |host: &Host| match host {
        Host::Unix(_) => true,
        Host::Tcp(name) => name == "localhost" || name.parse().is_ok_and(|addr: IpAddr| addr.is_loopback()),
    };
    // If there are addresses, connections use them regardless of the names.
    match config.get_hostaddrs() {
        [] => config.get_hosts().iter().all(is_here),
        addrs => addrs.iter().all(IpAddr::is_loopback),
    }
}

fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

fn client(verifier: Arc<dyn ServerCertVerifier>) -> ClientConfig {
    let builder = ClientConfig::builder_with_provider(provider()).with_safe_default_protocol_versions();
    let builder = builder.expect("the provider has what these versions need");
    builder.dangerous().with_custom_certificate_verifier(verifier).with_no_client_auth()
}

/// Checks that a server's certificate comes from these authorities, and that it has the server's name.
fn webpki(root: &str) -> Result<Arc<WebPkiServerVerifier>, AddressError> {
    let failed = |reason: String| AddressError::Root { path: root.into(), reason };
    let mut roots = RootCertStore::empty();
    if root == SYSTEM {
        roots.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned());
    } else {
        let pem = fs::read(Path::new(root)).map_err(|error: Error| failed(error.to_string()))?;
        for certificate in CertificateDer::pem_slice_iter(&pem) {
            let certificate = certificate.map_err(|error| failed(error.to_string()))?;
            roots.add(certificate).map_err(|error| failed(error.to_string()))?;
        }
        if roots.is_empty() {
            return Err(failed("it holds no certificate".into()));
        }
    }
    WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider()).build().map_err(|error| failed(error.to_string()))
}

/// For `verify-ca`: accepts a certificate with any name.
#[derive(Debug)]
struct AnyName(Arc<WebPkiServerVerifier>);

impl ServerCertVerifier for AnyName {
    fn verify_server_cert(
        &self,
        end_entity: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        server_name: &ServerName<'_>,
        ocsp_response: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        match self.0.verify_server_cert(end_entity, intermediates, server_name, ocsp_response, now) {
            // The name is checked last.
            Err(rustls::Error::InvalidCertificate(CertificateError::NotValidForName | CertificateError::NotValidForNameContext { .. })) => {
                Ok(ServerCertVerified::assertion())
            }
            verified => verified,
        }
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls12_signature(message, cert, dss)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        self.0.verify_tls13_signature(message, cert, dss)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.supported_verify_schemes()
    }
}

/// For `require`: encrypted, but with any certificate.
#[derive(Debug)]
struct Anyone(Arc<CryptoProvider>);

impl ServerCertVerifier for Anyone {
    fn verify_server_cert(
        &self,
        _end_entity: &CertificateDer<'_>,
        _intermediates: &[CertificateDer<'_>],
        _server_name: &ServerName<'_>,
        _ocsp_response: &[u8],
        _now: UnixTime,
    ) -> Result<ServerCertVerified, rustls::Error> {
        Ok(ServerCertVerified::assertion())
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        crypto::verify_tls12_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        cert: &CertificateDer<'_>,
        dss: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, rustls::Error> {
        crypto::verify_tls13_signature(message, cert, dss, &self.0.signature_verification_algorithms)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.0.signature_verification_algorithms.supported_schemes()
    }
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Options {
    mode: Option<String>,
    root: Option<String>,
}

impl Options {
    /// Applies a setting. Returns `false` if it is not one of these.
    fn take(&mut self, setting: &Setting<'_>) -> bool {
        match setting.name {
            "sslmode" => self.mode = Some(setting.value.clone()),
            "sslrootcert" => self.root = Some(setting.value.clone()),
            _ => return false,
        }
        true
    }
}

/// One setting of an address.
struct Setting<'a> {
    written: &'a str,
    name: &'a str,
    value: String,
}

/// An address without the settings that `tokio-postgres` lacks, or supports less fully than libpq.
fn without_tls_options(address: &str) -> (String, Options) {
    let is_url = address.starts_with("postgres://") || address.starts_with("postgresql://");
    let (base, settings, between) = if is_url {
        let (base, query) = address.split_once('?').unwrap_or((address, ""));
        (base, in_query(query), "&")
    } else {
        ("", in_words(address), " ")
    };
    let mut options = Options::default();
    let others = settings.iter().filter(|setting| !options.take(setting)).map(|setting| setting.written).collect::<Vec<_>>().join(between);
    let query_begins = if base.is_empty() || others.is_empty() { "" } else { "?" };
    (format!("{base}{query_begins}{others}"), options)
}

/// Splits `NAME=VALUE&…`.
fn in_query(query: &str) -> Vec<Setting<'_>> {
    let pairs = query.split('&').filter(|pair| !pair.is_empty());
    pairs
        .map(|written| {
            let (name, value) = written.split_once('=').unwrap_or((written, ""));
            Setting { written, name, value: percent_decoded(value) }
        })
        .collect()
}

/// Splits `NAME = VALUE …`, with any invalid rest as the last setting, for the library to refuse.
fn in_words(address: &str) -> Vec<Setting<'_>> {
    let mut settings = Vec::new();
    let mut rest = address.trim();
    while let Some((written, after)) = first_setting(rest) {
        let (name, value) = written.split_once('=').unwrap_or((written, ""));
        settings.push(Setting { written, name: name.trim_end(), value: unquoted(value.trim_start()) });
        rest = after.trim_start();
    }
    if !rest.is_empty() {
        settings.push(Setting { written: rest, name: "", value: String::new() });
    }
    settings
}

/// Splits off the first `NAME = VALUE`, whose value may be quoted.
fn first_setting(text: &str) -> Option<(&str, &str)> {
    let equals = text.find('=')?;
    let value = equals + 1 + text[equals + 1..].chars().take_while(|c| c.is_whitespace()).map(char::len_utf8).sum::<usize>();
    let (is_quoted, mut escaped) = (text[value..].starts_with('\''), false);
    let begin = value + usize::from(is_quoted);
    let end = text[begin..].char_indices().find(|(_, c)| {
        let ends = !escaped && if is_quoted { *c == '\'' } else { c.is_whitespace() };
        escaped = !escaped && *c == '\\';
        ends
    });
    let end = end.map_or(text.len(), |(at, _)| begin + at + usize::from(is_quoted));
    Some(text.split_at(end))
}

fn unquoted(value: &str) -> String {
    let inner = value.strip_prefix('\'').and_then(|value| value.strip_suffix('\'')).unwrap_or(value);
    let mut chars = inner.chars();
    let mut plain = String::new();
    while let Some(c) = chars.next() {
        plain.extend(if c == '\\' { chars.next() } else { Some(c) });
    }
    plain
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::new();
    let mut rest = text.as_bytes();
    while let [first, after @ ..] = rest {
        let code = match (first, after) {
            (b'%', [high, low, ..]) => std::str::from_utf8(&[*high, *low]).ok().and_then(|code| u8::from_str_radix(code, 16).ok()),
            _ => None,
        };
        bytes.push(code.unwrap_or(*first));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_says_where_and_never_what_the_password_is() {
        for good in ["postgres://me@localhost/tidemill", "postgresql:///tidemill?host=/run/postgresql", "postgres://me:secret@%2Frun%2Fx/y"]
        {
            assert!(!format!("{:?}", good.parse::<Address>().unwrap()).contains("secret"));
        }
        assert!(matches!("postgres:///tidemill".parse::<Address>(), Err(AddressError::NoHost)));
        let unreadable = "postgres://me:secret@localhost/x?port=many".parse::<Address>().unwrap_err().to_string();
        assert!(!unreadable.contains("secret"), "{unreadable}");
    }

    #[test]
    fn nothing_goes_to_another_machine_without_tls_unless_the_address_says_so() {
        let mode = |address: &str| address.parse::<Address>().map(|address| (address.config.get_ssl_mode(), address.tls.is_some()));
        for elsewhere in [
            "postgres://me@db.example/x",
            "postgres://me@db.example/x?sslmode=prefer",
            "postgres://me@db.example/x?sslmode=allow&connect_timeout=3",
            "postgres://me@db.example/x?sslmode=require",
            "postgres://me@localhost/x?hostaddr=192.0.2.7",
            "postgres://me@localhost,db.example/x",
            "host=db.example user=me sslmode=prefer",
            "host = 'db.example' sslmode = 'require' user=me",
        ] {
            assert_eq!(mode(elsewhere).unwrap(), (SslMode::Require, true), "{elsewhere}");
        }
        for plain in [
            "postgres://me@db.example/x?sslmode=disable",
            "host=db.example sslmode=disable",
            "postgres:///x?host=/run/postgresql",
            "postgres:///x?host=/run/postgresql&sslmode=require",
        ] {
            assert_eq!(mode(plain).unwrap(), (SslMode::Disable, false), "{plain}");
        }
        for here in ["postgres://me@localhost/x", "postgres://me@127.0.0.1/x?sslmode=prefer", "host=::1"] {
            assert_eq!(mode(here).unwrap(), (SslMode::Prefer, true), "{here}");
        }
        assert_eq!(mode("postgres://me@localhost/x?sslmode=require").unwrap(), (SslMode::Require, true));
        assert_eq!(mode("postgres://me@db.example/x?sslrootcert=system").unwrap(), (SslMode::Require, true));
    }

    #[test]
    fn what_cannot_be_meant_is_refused() {
        let refused = |address: &str| address.parse::<Address>().unwrap_err().to_string();
        for (address, says) in [
            ("postgres://me:secret@db.example/x?sslmode=verify-full", "sslrootcert=FILE"),
            ("postgres://me:secret@db.example/x?sslmode=verify-ca", "sslrootcert=FILE"),
            ("postgres://me:secret@db.example/x?sslmode=on", "sslmode `on`"),
            ("postgres://me:secret@db.example/x?sslmode=require&sslrootcert=system", "verify-full"),
            ("postgres://me:secret@db.example/x?sslmode=verify-full&sslrootcert=%2Fnot%2Fthere", "/not/there"),
            ("host=db.example password=secret sslmode='verify-full' sslrootcert='/dev/null'", "no certificate"),
        ] {
            let error = refused(address);
            assert!(error.contains(says) && !error.contains("secret"), "{address}: {error}");
        }
    }

    #[test]
    fn settings_are_told_apart_from_all_others() {
        let of = |address: &str| without_tls_options(address);
        let options = |mode: &str, root: &str| Options { mode: Some(mode.into()), root: Some(root.into()) };
        assert_eq!(
            of(r"password='a b\' sslmode=disable' sslmode = require host=x sslrootcert='/my certs\\x'"),
            (r"password='a b\' sslmode=disable' host=x".to_owned(), options("require", r"/my certs\x"))
        );
        assert_eq!(
            of("postgres://u:p%3Fsslmode=no@h/d?sslmode=require&options=-c%20x&sslrootcert=%2Fa%20b"),
            ("postgres://u:p%3Fsslmode=no@h/d?options=-c%20x".to_owned(), options("require", "/a b"))
        );
        assert_eq!(of("postgres://h/d"), ("postgres://h/d".to_owned(), Options::default()));
        assert_eq!(of("nonsense"), ("nonsense".to_owned(), Options::default()));
    }
}
