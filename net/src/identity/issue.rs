//! Creates a cluster's CA, and certificates for its processes.

use super::{
    CertName, IdentityError, PeerRole, SERVER_NAME, certificate,
    name::{parse, uri},
};
use rcgen::{
    BasicConstraints, CertificateParams, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, KeyPair, KeyUsagePurpose, SanType, SerialNumber,
};
use std::{
    fs,
    io::{self, Write},
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};
use time::{Duration, OffsetDateTime};

/// The default validity of a certificate, in days.
pub const DAYS: u32 = 365;
/// The mode of all files, including those that are not secret.
const PRIVATE: u32 = 0o600;
/// Certificates are valid from this long before they are issued, since clocks differ.
const EARLIER: Duration = Duration::hours(1);

/// Creates a CA, unless `dir` has one, and one certificate that may act in any role: for experiments on one machine. Only the owner can
/// read the keys.
pub fn create(dir: &Path) -> Result<(), IdentityError> {
    create_ca(dir)?;
    issue_into(dir, dir, PeerRole::Any, "node", DAYS).map(drop)
}

/// Creates a CA. An existing one is not replaced: a new CA would split a running cluster.
pub fn create_ca(dir: &Path) -> Result<(), IdentityError> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(dir)
        .map_err(|source| IdentityError::Create { path: dir.to_owned(), source })?;
    let key = KeyPair::generate()?;
    let ca = ca_params()?.self_signed(&key)?;
    for (name, pem) in [("ca.key", key.serialize_pem()), ("ca.pem", ca.pem())] {
        let path = dir.join(name);
        let written = fs::OpenOptions::new().write(true).create_new(true).mode(PRIVATE).open(&path);
        let written = written.and_then(|mut file| file.write_all(pem.as_bytes()));
        written.map_err(|source| IdentityError::Create { path, source })?;
    }
    Ok(())
}

/// Issues a certificate for `ROLE/NAME`, replacing the last one, in a directory of its own below the CA's, `ROLE/NAME`, whose path is
/// returned. A running process picks it up by itself.
pub fn issue(ca: &Path, role_and_name: &str, days: u32) -> Result<(PathBuf, CertName), IdentityError> {
    let (role, name) = parse(role_and_name).map_err(|reason| IdentityError::Name { path: ca.to_owned(), reason })?;
    let dir = ca.join(role.to_string()).join(&name);
    fs::DirBuilder::new().recursive(true).mode(0o700).create(&dir).map_err(|source| IdentityError::Create { path: dir.clone(), source })?;
    let pem = fs::read(ca.join("ca.pem")).map_err(|source| IdentityError::File { path: ca.join("ca.pem"), source })?;
    replace(&dir.join("ca.pem"), &pem)?;
    let name = issue_into(ca, &dir, role, &name, days)?;
    Ok((dir, name))
}

fn issue_into(ca: &Path, dir: &Path, role: PeerRole, name: &str, days: u32) -> Result<CertName, IdentityError> {
    let path = ca.join("ca.key");
    let ca_key = fs::read_to_string(&path).map_err(|source| IdentityError::File { path: path.clone(), source })?;
    let ca_key = KeyPair::from_pem(&ca_key).map_err(|e| IdentityError::Pem { path, reason: e.to_string() })?;
    // All CAs have the same parameters, so the key is all that is needed to issue.
    let issuer = Issuer::new(ca_params()?, &ca_key);

    let key = KeyPair::generate()?;
    let mut params = CertificateParams::new(vec![SERVER_NAME.to_owned()])?;
    params.subject_alt_names.push(SanType::URI(uri(role, name).try_into()?));
    params.distinguished_name.push(DnType::CommonName, format!("Tidemill {role} {name}"));
    params.extended_key_usages = vec![ExtendedKeyUsagePurpose::ServerAuth, ExtendedKeyUsagePurpose::ClientAuth];
    let now = OffsetDateTime::now_utc();
    (params.not_before, params.not_after) = (now - EARLIER, now + Duration::days(days.into()));
    // The first bit makes it positive, the second keeps its length.
    let mut serial: [u8; 16] = rand::random();
    serial[0] = serial[0] & 0x3f | 0x40;
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    let cert = params.signed_by(&key, &issuer)?;
    // The key goes first: a process that reads in between finds that the two do not belong together, and tries again later.
    replace(&dir.join("node.key"), key.serialize_pem().as_bytes())?;
    replace(&dir.join("node.pem"), cert.pem().as_bytes())?;
    let path = dir.join("node.pem");
    CertName::of(&certificate(&path)?).map_err(|reason| IdentityError::Name { path, reason })
}

/// Replaces a file atomically: a reader finds the old contents or the new.
fn replace(path: &Path, bytes: &[u8]) -> Result<(), IdentityError> {
    let new = path.with_extension("new");
    let write = || -> io::Result<()> {
        let _ = fs::remove_file(&new);
        let mut file = fs::OpenOptions::new().write(true).create_new(true).mode(PRIVATE).open(&new)?;
        file.write_all(bytes)?;
        file.sync_all()?;
        fs::rename(&new, path)
    };
    write().map_err(|source| IdentityError::Create { path: path.to_owned(), source })
}

fn ca_params() -> Result<CertificateParams, IdentityError> {
    let mut params = CertificateParams::new(Vec::new())?;
    params.distinguished_name.push(DnType::CommonName, "Tidemill cluster CA");
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    Ok(params)
}
