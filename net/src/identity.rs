//! The identity of a process: one CA per cluster, one certificate per process, mTLS on every link.
//!
//! A process's PKI directory holds `ca.pem`, `node.pem` and `node.key` (PEM). A certificate names its holder by a URI,
//! `tidemill://ROLE/NAME`, and each end of a link checks the other's role: a worker's key does not make a coordinator. No process reads the
//! CA's key `ca.key`: keep it offline, and give each host only the directories of its own processes.
//!
//! - [`name`]: role and name
//! - [`issue`]: creates a CA and certificates, for `tidemill certs` and `tidemill up`
//! - `current`: the certificate that new links present, read again when its files change

mod current;
pub mod issue;
pub mod name;

pub(crate) use current::{Current, follow};
pub use issue::create;
pub use name::{CertName, PeerRole};
use rustls::{
    CipherSuite, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
    sign::CertifiedKey,
};
use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tidemill_proto::frame::Version;
use x509_cert::{Certificate, der::Decode};

/// The DNS name in every certificate. A certificate proves a role in the cluster, not an address: addresses change.
pub const SERVER_NAME: &str = "tidemill";

#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("cannot access {path}: {source} (make a PKI directory with `tidemill certs DIR`)")]
    File { path: PathBuf, source: io::Error },
    #[error("cannot make {path}: {source} (an existing CA is not replaced)")]
    Create { path: PathBuf, source: io::Error },
    #[error("{path} is not usable PEM: {reason}")]
    Pem { path: PathBuf, reason: String },
    #[error("{path}: {reason}")]
    Name { path: PathBuf, reason: String },
    #[error("certificates cannot be used together: {0}")]
    Mismatch(String),
    #[error("cannot make certificates: {0}")]
    Generate(#[from] rcgen::Error),
}

/// A loaded PKI directory.
#[derive(Debug)]
pub struct Identity {
    dir: PathBuf,
    ca: CertificateDer<'static>,
    key: Arc<CertifiedKey>,
    name: CertName,
    /// The versions of the files before they were read.
    versions: current::Versions,
}

impl Identity {
    pub fn load(dir: &Path) -> Result<Self, IdentityError> {
        let ca = certificate(&dir.join("ca.pem"))?;
        let versions = current::versions(dir);
        let (key, name) = load_key(dir)?;
        Ok(Self { dir: dir.to_owned(), ca, key, name, versions })
    }

    /// The role and name in the certificate.
    pub fn name(&self) -> &CertName {
        &self.name
    }

    /// The certificate that new links present. It may be renewed; its role and name stay the same.
    pub(crate) fn current(&self) -> Arc<Current> {
        Arc::new(Current::new(self.dir.clone(), self.name.clone(), Arc::clone(&self.key), self.versions))
    }

    /// TLS settings for accepting: the peer must present a certificate of this CA.
    pub(crate) fn server(&self, current: Arc<Current>) -> Result<rustls::ServerConfig, IdentityError> {
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(self.roots()?), provider()).build().map_err(mismatch)?;
        let mut config = rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(mismatch)?
            .with_client_cert_verifier(verifier)
            .with_cert_resolver(current);
        config.alpn_protocols = Version::names();
        // Clients may not resume a session either.
        config.send_tls13_tickets = 0;
        Ok(config)
    }

    /// TLS settings for connecting: presents this certificate and accepts only this CA.
    pub(crate) fn client(&self, current: Arc<Current>) -> Result<rustls::ClientConfig, IdentityError> {
        let mut config = rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(mismatch)?
            .with_root_certificates(self.roots()?)
            .with_client_cert_resolver(current);
        config.alpn_protocols = Version::names();
        // A resumed session presents no certificate: a renewed or revoked one would go unnoticed.
        config.resumption = rustls::client::Resumption::disabled();
        Ok(config)
    }

    fn roots(&self) -> Result<RootCertStore, IdentityError> {
        let mut roots = RootCertStore::empty();
        roots.add(self.ca.clone()).map_err(mismatch)?;
        Ok(roots)
    }
}

/// Returns the end of validity of the first certificate in a PEM file, as time since 1970.
pub fn end(path: &Path) -> Result<Duration, IdentityError> {
    let unreadable = |reason: String| IdentityError::Pem { path: path.to_owned(), reason };
    let certificate = Certificate::from_der(&certificate(path)?).map_err(|error| unreadable(error.to_string()))?;
    Ok(certificate.tbs_certificate.validity.not_after.to_unix_duration())
}

/// Loads the certificate and key of a PKI directory, which must belong together, and the name in the certificate.
fn load_key(dir: &Path) -> Result<(Arc<CertifiedKey>, CertName), IdentityError> {
    let (path, cert) = (dir.join("node.key"), dir.join("node.pem"));
    let key = PrivateKeyDer::from_pem_slice(&read(&path)?).map_err(|e| IdentityError::Pem { path, reason: e.to_string() })?;
    let der = certificate(&cert)?;
    let name = CertName::of(&der).map_err(|reason| IdentityError::Name { path: cert, reason })?;
    let key = CertifiedKey::from_der(vec![der], key, &provider()).map_err(mismatch)?;
    Ok((Arc::new(key), name))
}

fn certificate(path: &Path) -> Result<CertificateDer<'static>, IdentityError> {
    CertificateDer::from_pem_slice(&read(path)?).map_err(|e| IdentityError::Pem { path: path.to_owned(), reason: e.to_string() })
}

fn read(path: &Path) -> Result<Vec<u8>, IdentityError> {
    fs::read(path).map_err(|source| IdentityError::File { path: path.to_owned(), source })
}

fn provider() -> Arc<rustls::crypto::CryptoProvider> {
    let mut provider = rustls::crypto::aws_lc_rs::default_provider();
    // Prefer AES-128, which satisfies TLS 1.3: it has ten rounds where AES-256 has fourteen, and gigabytes of blocks go through it.
    provider.cipher_suites.sort_by_key(|suite| suite.suite() != CipherSuite::TLS13_AES_128_GCM_SHA256);
    Arc::new(provider)
}

fn mismatch(error: impl std::fmt::Display) -> IdentityError {
    IdentityError::Mismatch(error.to_string())
}
