//! The address of the quota server, and connections to it.

use redis::{
    AsyncConnectionConfig, Client, Cmd, ConnectionAddr, ConnectionInfo, IntoConnectionInfo, Pipeline, RedisError, RedisFuture,
    TlsCertificates, TlsMode, Value,
    aio::{ConnectionLike, MultiplexedConnection},
    cluster::ClusterClientBuilder,
    cluster_async::ClusterConnection,
    io::tcp::TcpSettings,
    sentinel::{SentinelClientBuilder, SentinelServerType},
};
use rustls::{
    crypto::aws_lc_rs,
    pki_types::{CertificateDer, pem::PemObject},
};
use std::{fmt, fs, net::IpAddr, path::PathBuf, time::Duration};

const CONNECT_MAX: Duration = Duration::from_secs(1);
/// The time after which a call fails of which no request waits.
pub(crate) const ANSWER_MAX: Duration = Duration::from_secs(1);

/// The addresses of a server or of several that belong together, which may contain a password.
#[derive(Clone)]
pub struct Server {
    nodes: Vec<ConnectionInfo>,
    kind: ServerKind,
    certificates: Option<TlsCertificates>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServerKind {
    /// One server.
    Single,
    /// Sentinels, which know the server of this name.
    Sentinel { master: String },
    /// Nodes of a cluster, by which the others are found.
    Cluster,
}

/// The operator's settings of the server.
#[derive(Clone, Debug)]
pub struct Address {
    pub urls: Vec<String>,
    pub kind: ServerKind,
    /// A PEM file with the authorities that certificates may come from; `None` for this machine's.
    pub ca: Option<PathBuf>,
    /// Whether connections to other machines may be unencrypted.
    pub plain: bool,
}

/// An error in a server's address. None repeats the address.
#[derive(Debug, thiserror::Error)]
pub enum ServerError {
    #[error("there must be at least one, such as rediss://HOST:6379")]
    NoUrl,
    #[error("number {number} cannot be read: {reason}. They look like rediss://[USER:PASSWORD@]HOST[:PORT][/DATABASE]")]
    Unreadable { number: usize, reason: String },
    #[error("one server has one address: for several, say kind = \"sentinel\" or \"cluster\"")]
    Several,
    #[error("number {number} is another machine's, and unencrypted: make it rediss://, or say plain = true")]
    Plain { number: usize },
    #[error("all must be redis:// or all rediss://")]
    Mixed,
    #[error("sentinels and nodes of a cluster are found by host and port: a socket serves kind = \"single\" only")]
    Socket,
    #[error("ca is for encrypted connections: the addresses must be rediss://")]
    UnusedCa,
    #[error("ca {path} cannot be used: {reason}")]
    Ca { path: PathBuf, reason: String },
}

impl fmt::Debug for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes: Vec<_> = self.nodes.iter().map(|node| node.addr().to_string()).collect();
        f.debug_struct("Server").field("nodes", &nodes).field("kind", &self.kind).finish_non_exhaustive()
    }
}

impl fmt::Display for Server {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nodes: Vec<_> = self.nodes.iter().map(|node| node.addr().to_string()).collect();
        f.write_str(&nodes.join(", "))
    }
}

impl Address {
    pub fn check(self) -> Result<Server, ServerError> {
        let read = |(at, url): (usize, &String)| {
            let info = url.as_str().into_connection_info();
            info.map_err(|error| ServerError::Unreadable { number: at + 1, reason: error.to_string() })
        };
        let nodes = self.urls.iter().enumerate().map(read).collect::<Result<Vec<_>, _>>()?;
        let first = nodes.first().ok_or(ServerError::NoUrl)?;
        if self.kind == ServerKind::Single && nodes.len() > 1 {
            return Err(ServerError::Several);
        }
        if self.kind != ServerKind::Single && nodes.iter().any(|node| matches!(node.addr(), ConnectionAddr::Unix(_))) {
            return Err(ServerError::Socket);
        }
        let has_tls = is_encrypted(first);
        if nodes.iter().any(|node| is_encrypted(node) != has_tls) {
            return Err(ServerError::Mixed);
        }
        if let Some(at) = nodes.iter().position(|node| !self.plain && !has_tls && !stays_here(node)) {
            return Err(ServerError::Plain { number: at + 1 });
        }
        let certificates = match self.ca {
            Some(_) if !has_tls => return Err(ServerError::UnusedCa),
            Some(path) => {
                let root = fs::read(&path).map_err(|error| ServerError::Ca { path: path.clone(), reason: error.to_string() })?;
                if CertificateDer::pem_slice_iter(&root).next().is_none() {
                    return Err(ServerError::Ca { path, reason: "it holds no certificate".into() });
                }
                Some((path, TlsCertificates { client_tls: None, root_cert: Some(root) }))
            }
            None => has_tls.then(|| (PathBuf::new(), TlsCertificates { client_tls: None, root_cert: None })),
        };
        if let Some((path, certificates)) = &certificates {
            // The client library takes the process's provider, and panics where there are two and none was chosen.
            let _ = aws_lc_rs::default_provider().install_default();
            let built = Client::build_with_tls(first.clone(), certificates.clone());
            built.map_err(|error| ServerError::Ca { path: path.clone(), reason: error.to_string() })?;
        }
        Ok(Server { nodes, kind: self.kind, certificates: certificates.map(|(_, certificates)| certificates) })
    }
}

fn is_encrypted(node: &ConnectionInfo) -> bool {
    matches!(node.addr(), ConnectionAddr::TcpTls { .. })
}

fn stays_here(node: &ConnectionInfo) -> bool {
    match node.addr() {
        ConnectionAddr::Tcp(host, _) => {
            host == "localhost" || host.trim_matches(['[', ']']).parse().is_ok_and(|ip: IpAddr| ip.is_loopback())
        }
        ConnectionAddr::Unix(_) => true,
        _ => false,
    }
}

/// An open connection. Clones share it.
#[derive(Clone)]
pub(super) enum Connection {
    Single(MultiplexedConnection),
    Cluster(ClusterConnection),
}

impl Server {
    pub(super) async fn connect(&self) -> Result<Connection, RedisError> {
        let tcp = TcpSettings::default().set_nodelay(true);
        let config = AsyncConnectionConfig::new().set_connection_timeout(Some(CONNECT_MAX)).set_response_timeout(Some(ANSWER_MAX));
        let first = &self.nodes[0];
        match &self.kind {
            ServerKind::Single => {
                let info = first.clone().set_tcp_settings(tcp);
                let client = match &self.certificates {
                    Some(certificates) => Client::build_with_tls(info, certificates.clone())?,
                    None => Client::open(info)?,
                };
                client.get_multiplexed_async_connection_with_config(&config).await.map(Connection::Single)
            }
            ServerKind::Sentinel { master } => {
                let addresses = self.nodes.iter().map(|node| node.addr().clone());
                let mut builder = SentinelClientBuilder::new(addresses, master, SentinelServerType::Master)?
                    .set_client_to_redis_tcp_settings(tcp)
                    .set_client_to_redis_db(first.redis_settings().db());
                if let Some(name) = first.redis_settings().username() {
                    builder = builder.set_client_to_redis_username(name);
                }
                if let Some(password) = first.redis_settings().password() {
                    builder = builder.set_client_to_redis_password(password);
                }
                if let Some(certificates) = &self.certificates {
                    builder = builder
                        .set_client_to_redis_tls_mode(TlsMode::Secure)
                        .set_client_to_redis_certificates(certificates.clone())
                        .set_client_to_sentinel_certificates(certificates.clone());
                }
                builder.build()?.get_async_connection_with_config(&config).await.map(Connection::Single)
            }
            ServerKind::Cluster => {
                let mut builder = ClusterClientBuilder::new(self.nodes.clone())
                    .connection_timeout(CONNECT_MAX)
                    .response_timeout(ANSWER_MAX)
                    .retries(1)
                    .tcp_settings(tcp);
                if let Some(certificates) = &self.certificates {
                    builder = builder.certs(certificates.clone());
                }
                builder.build()?.get_async_connection().await.map(Connection::Cluster)
            }
        }
    }
}

impl ConnectionLike for Connection {
    fn req_packed_command<'a>(&'a mut self, cmd: &'a Cmd) -> RedisFuture<'a, Value> {
        match self {
            Self::Single(connection) => connection.req_packed_command(cmd),
            Self::Cluster(connection) => connection.req_packed_command(cmd),
        }
    }

    fn req_packed_commands<'a>(&'a mut self, pipeline: &'a Pipeline, offset: usize, count: usize) -> RedisFuture<'a, Vec<Value>> {
        match self {
            Self::Single(connection) => connection.req_packed_commands(pipeline, offset, count),
            Self::Cluster(connection) => connection.req_packed_commands(pipeline, offset, count),
        }
    }

    fn get_db(&self) -> i64 {
        match self {
            Self::Single(connection) => connection.get_db(),
            Self::Cluster(connection) => connection.get_db(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(urls: &[&str], kind: ServerKind, ca: Option<&str>, plain: bool) -> Result<String, String> {
        let address = Address { urls: urls.iter().map(|&url| url.to_owned()).collect(), kind, ca: ca.map(Into::into), plain };
        address.check().map(|server| format!("{server} {server:?}")).map_err(|error| error.to_string())
    }

    #[test]
    fn an_address_is_checked_and_its_password_stays_in_it() {
        for url in
            ["redis://u:secret@127.0.0.1:7000/2", "redis://:secret@localhost", "rediss://u:secret@quota.example", "redis+unix:///r.sock"]
        {
            assert!(!check(&[url], ServerKind::Single, None, false).unwrap().contains("secret"), "{url}");
        }
        assert!(check(&["redis://quota.example"], ServerKind::Single, None, true).is_ok());
        assert!(check(&["rediss://a.example", "rediss://b.example"], ServerKind::Cluster, None, false).is_ok());
        let sentinel = || ServerKind::Sentinel { master: "quota".into() };
        for (urls, kind, ca, words) in [
            (&[][..], ServerKind::Single, None, "at least one"),
            (&["redis://u:secret@h:port"][..], ServerKind::Single, None, "number 1"),
            (&["postgres://u:secret@h"][..], ServerKind::Single, None, "rediss://"),
            (&["rediss://a", "rediss://b"][..], ServerKind::Single, None, "cluster"),
            (&["rediss://a", "redis://localhost"][..], sentinel(), None, "all"),
            (&["redis://localhost", "redis://u:secret@b"][..], sentinel(), None, "number 2"),
            (&["redis+unix:///r.sock"][..], ServerKind::Cluster, None, "socket"),
            (&["redis://localhost"][..], ServerKind::Single, Some("/ca.pem"), "rediss://"),
            (&["rediss://u:secret@a"][..], ServerKind::Single, Some("/not/there"), "/not/there"),
            (&["rediss://u:secret@a"][..], ServerKind::Single, Some("/dev/null"), "/dev/null"),
        ] {
            let error = check(urls, kind, ca, false).unwrap_err();
            assert!(error.contains(words) && !error.contains("secret"), "{urls:?}: {error}");
        }
    }
}
