//! Client connections: a bounded number, without Nagle's delay, none idle for ever, be it that the client sends nothing or
//! that it reads nothing. Over TLS, if there is a certificate (`tls`).

mod tls;

pub use tls::{Tls, TlsError};

use axum::Router;
use hyper::server::conn::http1;
use hyper_util::{
    rt::{TokioIo, TokioTimer},
    server::graceful::GracefulShutdown,
    service::TowerToHyperService,
};
use socket2::SockRef;
use std::{sync::Arc, time::Duration};
use tokio::{
    net::{TcpListener, TcpStream},
    sync::Semaphore,
    task::JoinSet,
    time,
};

/// The next request's head must be there within this time; so it is also how long a connection may rest between two.
const HEAD_READ_MAX: Duration = Duration::from_secs(75);
/// A client that reads nothing for this long is cut off (by the kernel, `TCP_USER_TIMEOUT`: the connection breaks).
const WRITE_STALL_MAX: Duration = Duration::from_secs(75);
/// Rest after an accept that failed: for want of file descriptors, most likely.
const ACCEPT_RETRY: Duration = Duration::from_millis(100);

/// Serves until `stop`, then lets running requests finish within `drain`. `false`: some were cut.
pub async fn serve(
    listener: TcpListener,
    tls: Option<Arc<Tls>>,
    router: Router,
    connections_max: usize,
    stop: impl Future<Output = ()>,
    drain: Duration,
) -> bool {
    let mut http = http1::Builder::new();
    http.timer(TokioTimer::new()).header_read_timeout(HEAD_READ_MAX);
    let service = TowerToHyperService::new(router);
    let connections = GracefulShutdown::new();
    let permits = Arc::new(Semaphore::new(connections_max));
    let mut tasks = JoinSet::new();
    let accept = async {
        loop {
            // Without a permit, clients wait in the kernel's backlog.
            let permit = Arc::clone(&permits).acquire_owned().await.expect("the semaphore is never closed");
            let stream = accept(&listener).await;
            while tasks.try_join_next().is_some() {}
            let (http, service) = (http.clone(), service.clone());
            let Some(tls) = tls.clone() else {
                let connection = connections.watch(http.serve_connection(TokioIo::new(stream), service));
                tasks.spawn(async move {
                    if let Err(error) = connection.await {
                        tracing::debug!(%error, "client connection ended");
                    }
                    drop(permit);
                });
                continue;
            };
            let watcher = connections.watcher();
            tasks.spawn(async move {
                let served = match tls.accept(stream).await {
                    Ok(stream) => {
                        watcher.watch(http.serve_connection(TokioIo::new(stream), service)).await.map_err(|error| error.to_string())
                    }
                    Err(error) => Err(error.to_string()),
                };
                if let Err(error) = served {
                    tracing::debug!(error, "client connection ended");
                }
                drop(permit);
            });
        }
    };
    tokio::select! {
        () = accept => {}
        () = stop => {}
    }
    drop(listener);
    time::timeout(drain, connections.shutdown()).await.is_ok()
}

async fn accept(listener: &TcpListener) -> TcpStream {
    loop {
        match listener.accept().await {
            Ok((stream, peer)) => {
                if let Err(error) = stream.set_nodelay(true) {
                    tracing::debug!(%peer, %error, "cannot turn Nagle's delay off");
                }
                if let Err(error) = SockRef::from(&stream).set_tcp_user_timeout(Some(WRITE_STALL_MAX)) {
                    tracing::debug!(%peer, %error, "cannot bound how long this client may read nothing");
                }
                return stream;
            }
            Err(error) => {
                tracing::warn!(%error, "cannot accept a client");
                time::sleep(ACCEPT_RETRY).await;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_client_that_reads_nothing_cannot_stay() {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let client = TcpStream::connect(listener.local_addr().unwrap());
        let (_client, stream) = tokio::join!(client, accept(&listener));
        assert_eq!(SockRef::from(&stream).tcp_user_timeout().unwrap(), Some(WRITE_STALL_MAX));
    }
}
