//! The identity of a process: one CA per cluster, one certificate per process or host, mTLS on every link.
//!
//! A PKI directory holds `ca.pem`, `node.pem` and `node.key` (PEM). [`create`] makes them, and the CA's key `ca.key`, which no
//! process reads: keep it offline, and give each host a directory without it.

use rcgen::{BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose};
use rustls::{
    CipherSuite, RootCertStore,
    pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    server::WebPkiClientVerifier,
};
use std::{
    fs, io,
    io::Write,
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

/// The name in every certificate. A certificate proves membership of the cluster, not an address: addresses change.
pub const SERVER_NAME: &str = "tidemill";

#[derive(Debug, thiserror::Error)]
pub enum IdentityError {
    #[error("cannot access {path}: {source} (make a PKI directory with `tidemill certs DIR`)")]
    File { path: PathBuf, source: io::Error },
    #[error("cannot make {path}: {source} (existing certificates are not replaced)")]
    Create { path: PathBuf, source: io::Error },
    #[error("{path} is not usable PEM: {reason}")]
    Pem { path: PathBuf, reason: String },
    #[error("certificates cannot be used together: {0}")]
    Mismatch(String),
    #[error("cannot make certificates: {0}")]
    Generate(#[from] rcgen::Error),
}

/// A loaded PKI directory.
#[derive(Debug)]
pub struct Identity {
    ca: CertificateDer<'static>,
    cert: CertificateDer<'static>,
    key: PrivateKeyDer<'static>,
}

impl Identity {
    pub fn load(dir: &Path) -> Result<Self, IdentityError> {
        let pem = |name: &str| {
            let path = dir.join(name);
            match fs::read(&path) {
                Ok(bytes) => Ok((path, bytes)),
                Err(source) => Err(IdentityError::File { path, source }),
            }
        };
        let cert = |name: &str| {
            let (path, bytes) = pem(name)?;
            CertificateDer::from_pem_slice(&bytes).map_err(|e| IdentityError::Pem { path, reason: e.to_string() })
        };
        let (path, key) = pem("node.key")?;
        let key = PrivateKeyDer::from_pem_slice(&key).map_err(|e| IdentityError::Pem { path, reason: e.to_string() })?;
        Ok(Self { ca: cert("ca.pem")?, cert: cert("node.pem")?, key })
    }

    /// TLS for accepting: the peer must present a certificate of this CA.
    pub(crate) fn server(&self) -> Result<rustls::ServerConfig, IdentityError> {
        let verifier = WebPkiClientVerifier::builder_with_provider(Arc::new(self.roots()?), provider()).build().map_err(mismatch)?;
        rustls::ServerConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(mismatch)?
            .with_client_cert_verifier(verifier)
            .with_single_cert(vec![self.cert.clone()], self.key.clone_key())
            .map_err(mismatch)
    }

    /// TLS for connecting: presents this certificate and accepts only this CA.
    pub(crate) fn client(&self) -> Result<rustls::ClientConfig, IdentityError> {
        rustls::ClientConfig::builder_with_provider(provider())
            .with_protocol_versions(&[&rustls::version::TLS13])
            .map_err(mismatch)?
            .with_root_certificates(self.roots()?)
            .with_client_auth_cert(vec![self.cert.clone()], self.key.clone_key())
            .map_err(mismatch)
    }

    fn roots(&self) -> Result<RootCertStore, IdentityError> {
        let mut roots = RootCertStore::empty();
        roots.add(self.ca.clone()).map_err(mismatch)?;
        Ok(roots)
    }
}

/// Makes a CA and one certificate, which several processes may share. Only the owner can read the keys. Existing files are never
/// replaced: a new CA would cut a running cluster apart.
pub fn create(dir: &Path) -> Result<(), IdentityError> {
    let file_error = |path: &Path| {
        let path = path.to_owned();
        move |source| IdentityError::Create { path, source }
    };
    fs::create_dir_all(dir).map_err(file_error(dir))?;
    let ca_key = KeyPair::generate()?;
    let mut ca_params = CertificateParams::new(Vec::new())?;
    ca_params.distinguished_name.push(DnType::CommonName, "Tidemill cluster CA");
    ca_params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    ca_params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    let ca = ca_params.self_signed(&ca_key)?;
    let issuer = Issuer::new(ca_params, &ca_key);

    let node_key = KeyPair::generate()?;
    let mut node_params = CertificateParams::new(vec![SERVER_NAME.to_owned()])?;
    node_params.distinguished_name.push(DnType::CommonName, "Tidemill process");
    node_params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let node = node_params.signed_by(&node_key, &issuer)?;

    for (name, pem, mode) in [
        ("ca.key", ca_key.serialize_pem(), 0o600),
        ("ca.pem", ca.pem(), 0o644),
        ("node.key", node_key.serialize_pem(), 0o600),
        ("node.pem", node.pem(), 0o644),
    ] {
        let path = dir.join(name);
        let written = fs::OpenOptions::new().write(true).create_new(true).mode(mode).open(&path);
        written.and_then(|mut file| file.write_all(pem.as_bytes())).map_err(file_error(&path))?;
    }
    Ok(())
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
