//! The certificate that new links present: reloaded when its files change, or on SIGHUP. Existing links keep theirs.

use super::{CertName, load_key};
use parking_lot::RwLock;
use rustls::{
    SignatureScheme,
    client::ResolvesClientCert,
    server::{ClientHello, ResolvesServerCert},
    sign::CertifiedKey,
};
use std::{
    fs,
    os::unix::fs::MetadataExt,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
    time::{Duration, SystemTime},
};
use tokio::signal::unix::{SignalKind, signal};

/// The interval at which the files are checked.
const LOOK_EVERY: Duration = Duration::from_secs(2);

#[derive(Debug)]
pub(crate) struct Current {
    dir: PathBuf,
    name: CertName,
    key: RwLock<Arc<CertifiedKey>>,
    /// The versions of the files from which the first key was read.
    first: Versions,
}

/// The inode and modification time of certificate and key.
pub(super) type Versions = [Option<(u64, SystemTime)>; 2];

/// Returns the versions of the files. To be called before the files are read, so that a change in between is noticed later.
pub(super) fn versions(dir: &Path) -> Versions {
    ["node.pem", "node.key"].map(|file| {
        let metadata = fs::metadata(dir.join(file)).ok()?;
        Some((metadata.ino(), metadata.modified().ok()?))
    })
}

impl Current {
    pub(super) fn new(dir: PathBuf, name: CertName, key: Arc<CertifiedKey>, first: Versions) -> Self {
        Self { dir, name, key: RwLock::new(key), first }
    }

    fn get(&self) -> Arc<CertifiedKey> {
        Arc::clone(&self.key.read())
    }

    /// Reads the files again. The last certificate stays if they do not belong together, or name a different holder.
    fn reload(&self) {
        let Self { dir, name, .. } = self;
        match load_key(dir) {
            Ok((key, new)) if new.role == name.role && new.name == name.name => {
                *self.key.write() = key;
                tracing::info!(dir = %dir.display(), serial = new.serial, "certificate read again: new links present it");
            }
            Ok((_, new)) => tracing::warn!(dir = %dir.display(), "the new certificate is for {new}, this process is {name}: not taken"),
            Err(error) => tracing::warn!(%error, "the certificate cannot be read again: the last one stays"),
        }
    }
}

/// Reloads the certificate whenever its files change, until its endpoint is gone.
pub(crate) async fn follow(current: Weak<Current>) {
    let Ok(mut asked) = signal(SignalKind::hangup()) else { return };
    let Some(mut seen) = current.upgrade().map(|current| current.first) else { return };
    loop {
        let forced = tokio::select! {
            _ = asked.recv() => true,
            () = tokio::time::sleep(LOOK_EVERY) => false,
        };
        let Some(current) = current.upgrade() else { return };
        let now = versions(&current.dir);
        if forced || now != seen {
            seen = now;
            current.reload();
        }
    }
}

impl ResolvesServerCert for Current {
    fn resolve(&self, _: ClientHello<'_>) -> Option<Arc<CertifiedKey>> {
        Some(self.get())
    }
}

impl ResolvesClientCert for Current {
    fn resolve(&self, _: &[&[u8]], _: &[SignatureScheme]) -> Option<Arc<CertifiedKey>> {
        Some(self.get())
    }

    fn has_certs(&self) -> bool {
        true
    }
}
