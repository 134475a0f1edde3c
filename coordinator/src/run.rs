//! A coordinator from start to end.

use crate::{driver::Driver, links, settings::Settings};
use std::{io, net::SocketAddr, sync::Arc, time::Duration};
use tidemill_gateway::{
    http::{FrontDoor, server},
    metrics,
    text::{ModelError, TextModel},
};
use tidemill_net::{
    identity::{Identity, IdentityError},
    link::{Endpoint, LinkError},
};
use tokio::net::TcpListener;

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("cannot listen for HTTP on {addr}: {source} (another process may have this port: choose one with --http)")]
    Bind { addr: SocketAddr, source: io::Error },
    #[error("the task that {0} has ended, without which no request is served rightly: please report this as a bug, with the log")]
    Broken(&'static str),
}

/// Bound to its addresses, not serving yet.
#[derive(Debug)]
pub struct Coordinator {
    front: Arc<FrontDoor>,
    driver: Arc<Driver>,
    listener: TcpListener,
    endpoint: Endpoint,
    connections_max: usize,
    drain: Duration,
    pub http: SocketAddr,
    /// Where workers connect.
    pub quic: SocketAddr,
}

impl Coordinator {
    /// Reads the model directory and binds both addresses.
    pub async fn bind(settings: Settings) -> Result<Self, RunError> {
        metrics::install();
        let text = TextModel::load(&settings.model)?;
        let endpoint = Endpoint::bind(settings.listen, &Identity::load(&settings.pki)?)?;
        let bind_error = |source| RunError::Bind { addr: settings.http, source };
        let listener = TcpListener::bind(settings.http).await.map_err(bind_error)?;
        let http = listener.local_addr().map_err(bind_error)?;
        tracing::info!(name = settings.name, model = settings.served_model_name, %http, quic = %endpoint.local_addr(), "coordinator is up");
        let driver = Driver::new(settings.cluster, text.config.identity.clone());
        let front = FrontDoor::new(
            Arc::<Driver>::clone(&driver),
            text,
            settings.served_model_name,
            settings.objectives,
            settings.request_timeout,
            settings.body_bytes_max,
        );
        Ok(Self {
            front: Arc::new(front),
            driver,
            listener,
            quic: endpoint.local_addr(),
            endpoint,
            connections_max: settings.connections_max,
            drain: settings.drain,
            http,
        })
    }

    /// Serves until `shutdown`; then takes nothing new, lets running requests finish within the drain time, and closes.
    /// An error: a part of this process broke, and the rest must not go on without it (deadlines and dead workers would
    /// go unnoticed).
    pub async fn serve(self, shutdown: impl Future<Output = ()>) -> Result<(), RunError> {
        let mut accepting = tokio::spawn(links::accept(self.endpoint.clone(), Arc::clone(&self.driver)));
        let driver = Arc::clone(&self.driver);
        let mut ticking = tokio::spawn(async move { driver.tick().await });

        let front = Arc::clone(&self.front);
        let stop = async move {
            shutdown.await;
            front.drain();
        };
        let served = tokio::select! {
            whole = server::serve(self.listener, self.front.router(), self.connections_max, stop, self.drain) => {
                if !whole {
                    tracing::warn!("requests still ran, or were being sent, after {:?}: they are cut", self.drain);
                }
                Ok(())
            }
            _ = &mut ticking => Err(RunError::Broken("lets time pass")),
            _ = &mut accepting => Err(RunError::Broken("accepts workers")),
        };
        self.endpoint.close().await;
        ticking.abort();
        accepting.abort();
        served
    }
}

/// Binds, says on stdout where it listens, and serves until `shutdown`.
pub async fn run(settings: Settings, shutdown: impl Future<Output = ()>) -> Result<(), RunError> {
    let coordinator = Coordinator::bind(settings).await?;
    println!("listening http://{} quic://{}", coordinator.http, coordinator.quic);
    coordinator.serve(shutdown).await
}
