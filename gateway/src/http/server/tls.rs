//! The gateway's certificate, reloaded on SIGHUP: open connections keep the one with which they started.

use parking_lot::RwLock;
use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};
use tokio::{
    net::TcpStream,
    signal::unix::{SignalKind, signal},
    time,
};
use tokio_rustls::{
    TlsAcceptor,
    rustls::{
        self, ServerConfig,
        crypto::aws_lc_rs,
        pki_types::{CertificateDer, PrivateKeyDer, pem::PemObject},
    },
    server::TlsStream,
};

/// The longest handshake: a client that does not finish it holds a connection.
const HANDSHAKE_MAX: Duration = Duration::from_secs(10);

#[derive(Debug)]
pub struct Tls {
    cert: PathBuf,
    key: PathBuf,
    config: RwLock<Arc<ServerConfig>>,
}

#[derive(Debug, thiserror::Error)]
pub enum TlsError {
    #[error("cannot read {path}: {source}")]
    File { path: PathBuf, source: io::Error },
    #[error("{path} has no {what} in PEM: {reason}")]
    Pem { path: PathBuf, what: &'static str, reason: String },
    #[error("{cert} and {key} do not make a server: {source}")]
    Config { cert: PathBuf, key: PathBuf, source: rustls::Error },
}

impl Tls {
    pub fn load(cert: PathBuf, key: PathBuf) -> Result<Self, TlsError> {
        let config = config(&cert, &key)?;
        Ok(Self { cert, key, config: RwLock::new(config) })
    }

    /// Background loop: reloads the certificate on SIGHUP. Never returns.
    pub async fn reload_on_hangup(&self) {
        let mut hangups = match signal(SignalKind::hangup()) {
            Ok(hangups) => hangups,
            Err(error) => {
                tracing::warn!(%error, "could not handle SIGHUP: certificates are read at start only");
                return;
            }
        };
        while hangups.recv().await.is_some() {
            match config(&self.cert, &self.key) {
                Ok(config) => {
                    *self.config.write() = config;
                    tracing::info!("certificate reloaded");
                }
                Err(error) => tracing::error!(%error, "could not reload the certificate; keeping the previous one"),
            }
        }
    }

    pub(super) async fn accept(&self, stream: TcpStream) -> io::Result<TlsStream<TcpStream>> {
        let config = Arc::clone(&self.config.read());
        let accepted = time::timeout(HANDSHAKE_MAX, TlsAcceptor::from(config).accept(stream)).await;
        accepted.unwrap_or_else(|_| Err(io::Error::new(ErrorKind::TimedOut, "the handshake did not end in time")))
    }
}

fn config(cert: &Path, key: &Path) -> Result<Arc<ServerConfig>, TlsError> {
    let read = |path: &Path| fs::read(path).map_err(|source| TlsError::File { path: path.to_owned(), source });
    let pem = |path: &Path, what: &'static str, reason: String| TlsError::Pem { path: path.to_owned(), what, reason };
    let chain = CertificateDer::pem_slice_iter(&read(cert)?).collect::<Result<Vec<_>, _>>();
    let chain = chain.map_err(|error| pem(cert, "certificate", error.to_string()))?;
    if chain.is_empty() {
        return Err(pem(cert, "certificate", "it holds none".into()));
    }
    let secret = PrivateKeyDer::from_pem_slice(&read(key)?).map_err(|error| pem(key, "private key", error.to_string()))?;
    let failed = |source| TlsError::Config { cert: cert.to_owned(), key: key.to_owned(), source };
    let builder = ServerConfig::builder_with_provider(Arc::new(aws_lc_rs::default_provider()));
    let builder = builder.with_safe_default_protocol_versions().map_err(failed)?;
    let mut config = builder.with_no_client_auth().with_single_cert(chain, secret).map_err(failed)?;
    config.alpn_protocols = vec![b"h2".to_vec(), b"http/1.1".to_vec()];
    Ok(Arc::new(config))
}
