//! A coordinator from start to end.

use crate::{
    agreed::{self, Agreed, Followers, keys::KeysAgreed},
    driver::Driver,
    events,
    links::{self, Links},
    loops::{self, LinkLoop},
    restored,
    revoked::{self, Revoked},
    settings::{Settings, TlsFiles, semantic::SemanticCache, tenants::KeptIn},
    tasks::Tasks,
};
use std::{collections::BTreeMap, future, io, net::SocketAddr, path::PathBuf, pin::Pin, sync::Arc, time::Duration};
use tidemill_gateway::{
    base::origins::Origins,
    batches::{self, Batches},
    features::{
        feedback::{self, Feedback},
        grammars::{Grammars, helper},
        server_tools::ServerTools,
        templates::Templates,
    },
    http::{
        routes,
        server::{self, Limits, Tls, TlsError},
    },
    metrics,
    operators::{self, Operators},
    safety::{
        audit::{self, Audit},
        moderator::{Moderator, ModeratorError},
    },
    serving::{
        encoder::EncoderSettings,
        gateway::{
            Gateway, ServedModel,
            settings::{GatewaySettings, RequestSettings, SemanticSettings},
        },
        regions::{RegionError, Regions},
    },
    store::{
        Store,
        postgres::Postgres,
        sqlite::{OpenError, Sqlite},
    },
    tenants::{MeterSettings, TenantSettings, Tenants, TenantsError},
    text::{TextModel, error::ModelError, template::Confinement},
    traces::{
        Traces,
        collector::{self, Collector},
    },
};
use tidemill_net::{
    identity::{Identity, IdentityError, PeerRole},
    link::{Endpoint, LinkError},
};
use tidemill_proto::message::ModelKind;
use tidemill_registry::{
    peers::Peers,
    registry::{Registry, StartError},
    replica,
};
use tidemill_tenancy::{
    archive,
    jwt::{JwksError, Verifier},
    keeper::{self, KeepError, Keeper},
    web::TargetError,
};
use tokio::{net::TcpListener, runtime::Handle};

#[derive(Debug, thiserror::Error)]
pub enum RunError {
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("the grammar helper cannot be started: {0}")]
    Grammars(io::Error),
    #[error("responses cannot be stored: {0}")]
    Store(#[from] OpenError),
    #[error(transparent)]
    Revoked(#[from] revoked::ReadError),
    #[error(transparent)]
    Batches(#[from] batches::OpenError),
    #[error("`pki` has a certificate for {found}, and this is coordinator/{name} (--name)")]
    OtherName { found: String, name: String },
    #[error("the registry cannot start: {0}")]
    Registry(#[from] StartError),
    #[error(transparent)]
    Tenants(#[from] TenantsError),
    #[error("`safety.judge` = {model}: {source}")]
    Judge { model: String, source: ModeratorError },
    #[error("`{key}` = {model}: it is a classifier, which has no embeddings: name an encoder such as all-MiniLM-L6-v2")]
    Classifier { key: &'static str, model: String },
    #[error("a tool cannot be reached: {0}")]
    ServerTool(#[from] TargetError),
    #[error(transparent)]
    Keep(#[from] KeepError),
    #[error("the identity provider's keys: {0}")]
    Jwks(#[from] JwksError),
    #[error(transparent)]
    Operators(#[from] operators::StartError),
    #[error(transparent)]
    Regions(#[from] RegionError),
    #[error(transparent)]
    Audit(#[from] audit::OpenError),
    #[error("traces cannot be sent: {0}")]
    Traces(#[from] collector::StartError),
    #[error(transparent)]
    Feedback(#[from] feedback::OpenError),
    #[error(transparent)]
    Events(#[from] events::StartError),
    #[error(transparent)]
    Tls(#[from] TlsError),
    #[error(
        "there is no key yet, so everybody who can reach {http} could use this cluster: give --admin 127.0.0.1:9100 and make one \
         (`tidemill keys create`), configure [jwt], or say --open"
    )]
    Open { http: SocketAddr },
    #[error(transparent)]
    Identity(#[from] IdentityError),
    #[error(transparent)]
    Link(#[from] LinkError),
    #[error("cannot listen for HTTP on {addr}: {source} (another process may have this port: choose one with {flag})")]
    Bind { flag: &'static str, addr: SocketAddr, source: io::Error },
    #[error("cannot start threads for links: {0}")]
    Threads(io::Error),
    #[error("the background task that {0} has ended, and requests go wrong without it: please report this as a bug, with the log")]
    Broken(&'static str),
}

/// Limits of operators' connections, on a port of their own.
const ADMIN_CONNECTIONS: Limits = Limits { connections: 64, per_address: Some(64), idle_max: Duration::from_secs(130) };

/// A coordinator that is bound to its addresses and does not serve yet.
#[derive(Debug)]
pub struct Coordinator {
    gateway: Arc<Gateway>,
    driver: Arc<Driver>,
    link_loop: LinkLoop,
    registry: Registry,
    revoked: Revoked,
    peers: Arc<[String]>,
    /// The aliases from flags or file.
    aliases: BTreeMap<String, String>,
    listener: TcpListener,
    admin_listener: Option<TcpListener>,
    endpoint: Endpoint,
    tls: Option<Arc<Tls>>,
    /// The place of records that came with a backup.
    restored: Option<PathBuf>,
    connections: Limits,
    drain_announce: Duration,
    drain: Duration,
    pub http: SocketAddr,
    /// The address of metrics and the cluster's state, if not `http`.
    pub admin: Option<SocketAddr>,
    /// The address to which workers connect.
    pub quic: SocketAddr,
}

/// A future behind a pointer. A plain one is compiled where it is awaited: the whole coordinator, once for its program and again for each
/// program of tests.
type Boxed<T> = Pin<Box<dyn Future<Output = T> + Send>>;

impl Coordinator {
    /// Reads the model directory and binds all addresses.
    pub fn bind(settings: Settings) -> Boxed<Result<Self, RunError>> {
        Box::pin(Self::bound(settings))
    }

    async fn bound(settings: Settings) -> Result<Self, RunError> {
        metrics::install();
        let store: Arc<dyn Store> = match (&settings.database, &settings.data) {
            (Some(address), _) => Arc::new(Postgres::new(address.clone(), settings.store)),
            (None, Some(dir)) => Arc::new(Sqlite::open(&dir.join("responses.sqlite"), settings.store)?),
            (None, None) => {
                tracing::info!("stored responses and conversations end with this process: --data keeps them");
                Arc::new(Sqlite::in_memory(settings.store)?)
            }
        };
        let batches = settings.data.as_ref().map(|dir| Batches::open(&dir.join("batches"), settings.batches)).transpose()?;
        let tls = settings.tls.map(|TlsFiles { cert, key }| Tls::load(cert, key)).transpose()?.map(Arc::new);
        let (mut models, mut vocabularies) = (Vec::new(), Vec::new());
        let templates: Arc<dyn Confinement> = Arc::new(Templates::new(settings.helper.clone()));
        for model in settings.models {
            let text = TextModel::load_within(&model.dir, &templates)?.with_forced_calls_max(settings.forced_calls_max);
            let width = text.config.identity.vocab_size as usize;
            vocabularies.push(helper::Model { tokenizer: model.dir.join("tokenizer.json"), width });
            models.push((model.name, if settings.clients_marks { text.with_clients_marks() } else { text }));
        }
        let identity = Identity::load(&settings.pki)?;
        if !identity.name().is(PeerRole::Coordinator, Some(&settings.name)) {
            return Err(RunError::OtherName { found: identity.name().to_string(), name: settings.name });
        }
        let link_loop = LinkLoop::start().map_err(RunError::Threads)?;
        let endpoint = {
            let _entered = link_loop.handle().enter();
            Endpoint::bind(settings.listen, &identity)?
        };
        let (listener, http) = listen("--http", settings.http).await?;
        let (admin_listener, admin) = match settings.admin {
            Some(addr) => listen("--admin", addr).await.map(|(listener, addr)| (Some(listener), Some(addr)))?,
            None => (None, None),
        };
        let quic = endpoint.local_addr();
        let names: Vec<&str> = models.iter().map(|(name, _)| name.as_str()).collect();
        tracing::info!(name = settings.name, models = names.join(", "), %http, ?admin, %quic, "coordinator is up");
        if settings.requests.cors == Origins::All {
            tracing::warn!("cors_origins is `*`: any web page that a client opens may use this front door");
        }
        let identities = models.iter().map(|(name, text)| (name.clone(), text.config.identity.clone()));
        let driver = Driver::new(&settings.cluster, identities.collect());
        let peers: Arc<[String]> = settings.peers.keys().cloned().collect();
        if !peers.is_empty() {
            driver.share_workers();
        }
        let replica = replica::Settings {
            name: settings.name.clone(),
            peers: peers.to_vec(),
            seed: rand::random(),
            group: rand::random(),
            first_epoch: settings.cluster.id_base,
        };
        let revoked = Revoked::read(settings.data.as_deref().map(|dir| dir.join("revoked.json")))?;
        let file = settings.data.as_deref().map(|dir| dir.join("registry.sqlite"));
        let registry = {
            let _entered = link_loop.handle().enter();
            Registry::start(file.as_deref(), replica, Peers::start(&endpoint, &settings.name, &settings.peers))?
        };
        let keeper: Arc<dyn Keeper> = match settings.tenants {
            KeptIn::Registry { earlier } => Arc::new(KeysAgreed::new(registry.clone(), earlier)),
            KeptIn::File(path) => Arc::new(keeper::sqlite::Sqlite::open(&path)?),
            KeptIn::Memory => Arc::new(keeper::memory::Memory::default()),
        };
        let pins = settings.regions.as_ref().map(|regions| Arc::clone(&regions.pins));
        let tenants = Arc::new(Tenants::open(TenantSettings {
            keeper,
            jwt: settings.jwt.map(Verifier::new).transpose()?,
            tiers: settings.tiers,
            share: settings.share,
            quota_server: settings.quota_server,
            prices: settings.prices,
            // Without a key, only this machine may send requests unless the operator allows others: the first key may not exist yet.
            // Where tenants are pinned to regions, each caller must be known.
            closed: !settings.open && !settings.http.ip().is_loopback() || pins.as_ref().is_some_and(|pins| !pins.regions.is_empty()),
            pins,
            shedding: settings.shedding,
            meter: settings.data.as_ref().map(|dir| MeterSettings {
                dir: dir.join("usage"),
                log: settings.usage,
                sink: settings.usage_sink,
            }),
            request_timeout: settings.requests.request_timeout,
        })?);
        let no_keys = tenants.are_known() && !tenants.has_keys();
        if !settings.open && !settings.http.ip().is_loopback() && settings.admin.is_none() && no_keys {
            return Err(RunError::Open { http: settings.http });
        }
        let mut safety = settings.safety;
        if let (Some(safety), Some(judge)) = (&mut safety, settings.judge) {
            let (name, text) = models.iter().find(|(name, _)| *name == judge.model).expect("the settings were checked");
            let judge = Moderator::new(judge, text).map_err(|source| RunError::Judge { model: name.clone(), source })?;
            safety.moderator = Some(Arc::new(judge));
        }
        let audit = settings.audit.map(Audit::open).transpose()?.map(Arc::new);
        let feedback = settings.feedback.map(Feedback::open).transpose()?.map(Arc::new);
        let kafka = match (settings.kafka, settings.data.as_deref()) {
            (Some(kafka), Some(data)) => events::start(kafka, data, feedback.as_ref())?,
            _ => Vec::new(),
        };
        let semantic_cache = semantic_cache(settings.semantic_cache, &models, &settings.aliases)?;
        if let Some(examples) = &settings.requests.examples {
            check_embeds("router.auto.model", &examples.encoder, &models, &settings.aliases)?;
        }
        if let Some(recall) = &settings.requests.recall {
            check_embeds("context.model", &recall.encoder, &models, &settings.aliases)?;
        }
        let served_names = models.iter().map(|(name, _)| name.clone()).collect();
        let served = driver.backends().into_iter().zip(models);
        let served = served.map(|(backend, (name, text))| ServedModel { name, text, backend });
        let traces =
            settings.traces.map(|traces| Collector::start(traces.collector).map(|collector| Traces::new(collector, traces.sampling)));
        let answer_max = settings.requests.request_timeout;
        let regions = settings.regions.map(|regions| Regions::new(regions, answer_max)).transpose()?.map(Arc::new);
        let gateway = GatewaySettings {
            regions,
            requests: RequestSettings { semantic_cache, ..settings.requests },
            classes: settings.cluster.classes,
            registry: Arc::new(Agreed::new(registry.clone(), settings.name, served_names)),
            store,
            data: settings.data.clone(),
            batches: batches.map(Arc::new),
            // The helper reads the vocabularies while this process starts, so that no request waits for it.
            grammars: Grammars::start(settings.helper, vocabularies).map_err(RunError::Grammars)?,
            tenants,
            safety,
            server_tools: settings.server_tools.map(ServerTools::new).transpose()?.map(Arc::new),
            feedback,
            kafka,
            traces: traces.transpose()?.map(Arc::new),
            audit,
            operators: settings.operators.map(Operators::start).transpose()?.map(Arc::new),
            requests_max: settings.connections.connections,
        };
        let gateway = Arc::new(Gateway::new(served.collect(), settings.aliases.clone(), routes::generating, gateway));
        Ok(Self {
            gateway,
            driver,
            link_loop,
            registry,
            revoked,
            peers,
            aliases: settings.aliases,
            listener,
            admin_listener,
            quic,
            endpoint,
            tls,
            restored: settings.data.map(|dir| dir.join(archive::RECORDS)),
            connections: settings.connections,
            drain_announce: settings.drain_announce,
            drain: settings.drain,
            http,
            admin,
        })
    }

    /// Serves until `shutdown`; then accepts no new requests, lets running ones finish within the drain time, and closes. An error means
    /// that a part of this process broke and the rest must not go on without it (deadlines and dead workers would go unnoticed).
    pub fn serve(self, shutdown: impl Future<Output = ()> + Send + 'static) -> Boxed<Result<(), RunError>> {
        Box::pin(self.serve_until(Box::pin(shutdown)))
    }

    async fn serve_until(self, shutdown: Boxed<()>) -> Result<(), RunError> {
        let links = Links { driver: Arc::clone(&self.driver), registry: self.registry.clone(), peers: self.peers };
        let (link_loop, front_door_loop) = (self.link_loop.handle(), &Handle::current());
        let mut tasks = Tasks::default();
        tasks.spawn("accepts workers", link_loop, links::accept(self.endpoint.clone(), links));
        if let Some(state) = self.registry.view().state {
            agreed::set_rollouts(&self.gateway, &state);
            agreed::distrust(&self.driver, &state);
            agreed::reset_caches(&self.driver, &state);
        }
        let followers = Followers {
            gateway: Arc::clone(&self.gateway),
            driver: Arc::clone(&self.driver),
            endpoint: self.endpoint.clone(),
            revoked: self.revoked,
        };
        tasks.spawn("follows the registry", link_loop, agreed::follow(self.registry.clone(), followers, self.aliases));
        tasks.spawn("reports unhealthy workers", link_loop, agreed::accuse(self.registry.clone(), Arc::clone(&self.driver)));
        tasks.spawn("removes workers that are gone", link_loop, agreed::forget(self.registry, Arc::clone(&self.driver)));
        let driver = Arc::clone(&self.driver);
        tasks.spawn("advances time", link_loop, async move { driver.tick().await });

        tasks.spawn("measures the event loop", front_door_loop, loops::measure("front_door"));
        let gateway = Arc::clone(&self.gateway);
        tasks.spawn("deletes what is too old", front_door_loop, async move { gateway.expire_stored().await });
        let gateway = Arc::clone(&self.gateway);
        tasks.spawn("maintains tenants", front_door_loop, async move { gateway.tend_tenants().await });
        let gateway = Arc::clone(&self.gateway);
        tasks.spawn("erases what operators order", front_door_loop, async move { gateway.tend_erasures().await });
        tasks.spawn("runs batches", front_door_loop, Arc::clone(&self.gateway).run_batches());
        tasks.spawn("summarizes conversations", front_door_loop, Arc::clone(&self.gateway).run_summaries());
        let gateway = Arc::clone(&self.gateway);
        tasks.spawn("deletes old audit records", front_door_loop, async move { gateway.expire_audit().await });
        let crossings = Arc::clone(&self.gateway);
        tasks.spawn("records crossed budgets", front_door_loop, async move { crossings.tend_crossings().await });
        let gateway = Arc::clone(&self.gateway);
        tasks.spawn("advances rollouts", front_door_loop, async move { gateway.tend_rollouts().await });
        // These two may end by themselves: one when it is told to, the other where signals cannot be handled.
        let gateway = Arc::clone(&self.gateway);
        let mut connecting = tokio::spawn(async move { gateway.tend_server_tools().await });
        let restoring = self.restored.map(|file| tokio::spawn(restored::bring_back(Arc::clone(&self.gateway), file)));
        let reloading = self.tls.clone().map(|tls| tokio::spawn(async move { tls.reload_on_hangup().await }));

        let gateway = Arc::clone(&self.gateway);
        let stop = async move {
            shutdown.await;
            gateway.announce_end();
            tokio::time::sleep(self.drain_announce).await;
            gateway.drain();
        };
        let front_door = routes::front_door(Arc::clone(&self.gateway), self.admin_listener.is_none());
        // Operators can watch until the last request has ended.
        let operators = async {
            match self.admin_listener {
                Some(listener) => {
                    let router = routes::admin(Arc::clone(&self.gateway));
                    server::serve(listener, None, router, ADMIN_CONNECTIONS, future::pending(), Duration::ZERO).await
                }
                None => future::pending().await,
            }
        };
        let served = tokio::select! {
            whole = server::serve(self.listener, self.tls, front_door, self.connections, stop, self.drain) => {
                if !whole {
                    tracing::warn!("requests still ran, or were being sent, after {:?}: they are cut", self.drain);
                }
                Ok(())
            }
            _ = operators => Err(RunError::Broken("serves operators")),
            duty = tasks.ended() => Err(RunError::Broken(duty)),
            _ = &mut connecting => Err(RunError::Broken("keeps connections to MCP servers")),
        };
        if let Some(tools) = self.gateway.server_tools().filter(|_| !connecting.is_finished()) {
            // Servers are notified of the end of their sessions.
            tools.end();
            let _ = connecting.await;
        } else {
            connecting.abort();
        }
        self.endpoint.close().await;
        tasks.stop().await;
        self.gateway.stop_batches();
        self.gateway.tenants().flush().await;
        reloading.into_iter().chain(restoring).for_each(|task| task.abort());
        served
    }
}

/// The settings of the semantic cache; `None` if it is off, as it is without a model that embeds questions.
fn semantic_cache(
    wanted: SemanticCache,
    models: &[(String, TextModel)],
    aliases: &BTreeMap<String, String>,
) -> Result<Option<SemanticSettings>, RunError> {
    match wanted {
        SemanticCache::Off => Ok(None),
        SemanticCache::NoModel => {
            tracing::warn!(
                "the semantic cache is off: semantic_cache.model is not set; serve an encoder such as all-MiniLM-L6-v2 as another --model, \
                 and name it there"
            );
            Ok(None)
        }
        SemanticCache::On(settings) => {
            check_embeds("semantic_cache.model", &settings.encoder, models, aliases)?;
            Ok(Some(settings))
        }
    }
}

/// Refuses an encoder that has no embeddings. `key` is the setting that names it.
fn check_embeds(
    key: &'static str,
    encoder: &EncoderSettings,
    models: &[(String, TextModel)],
    aliases: &BTreeMap<String, String>,
) -> Result<(), RunError> {
    let name = aliases.get(&encoder.model).unwrap_or(&encoder.model);
    let is_classifier = |(served, text): &(String, TextModel)| served == name && text.config.identity.kind == ModelKind::Classifier;
    match models.iter().any(is_classifier) {
        true => Err(RunError::Classifier { key, model: encoder.model.clone() }),
        false => Ok(()),
    }
}

async fn listen(flag: &'static str, addr: SocketAddr) -> Result<(TcpListener, SocketAddr), RunError> {
    let failed = |source| RunError::Bind { flag, addr, source };
    let listener = TcpListener::bind(addr).await.map_err(failed)?;
    let bound = listener.local_addr().map_err(failed)?;
    Ok((listener, bound))
}

/// Binds, prints the addresses on stdout, and serves until `shutdown`.
pub async fn run(settings: Settings, shutdown: impl Future<Output = ()> + Send + 'static) -> Result<(), RunError> {
    let coordinator = Coordinator::bind(settings).await?;
    let admin = coordinator.admin.map_or(String::new(), |addr| format!(" admin http://{addr}"));
    let scheme = if coordinator.tls.is_some() { "https" } else { "http" };
    println!("listening {scheme}://{} quic://{}{admin}", coordinator.http, coordinator.quic);
    coordinator.serve(shutdown).await
}
