//! A coordinator, and a decode worker if wanted, both real, in this process.

use super::super::tree;
use std::{net::SocketAddr, path::PathBuf, thread, time::Duration};
use tempfile::TempDir;
use tidemill_coordinator::{
    run::Coordinator,
    settings::{Flags, Settings},
};
use tidemill_engine::{flags::EngineFlags, worker};
use tidemill_net::{identity, worker::WorkerFlags};

pub(in crate::targets) struct Cluster {
    pub(in crate::targets) url: String,
    /// The operators' URL.
    pub(in crate::targets) admin: String,
    /// The address to which workers connect.
    pub(in crate::targets) quic: SocketAddr,
    /// The directory of their certificate.
    pub(in crate::targets) pki: PathBuf,
    _data: TempDir,
}

pub(in crate::targets) const MODEL: &str = "deploy/demo-model";
/// Settings with as many features on as possible.
const SETTINGS: &str = r#"
response_cache_bytes_max = "4MiB"
store_bytes_max = "32MiB"
request_timeout_s = 120
local_tail_tokens = 0
[safety]
[audit]
days = 1
[feedback]
[memory]
[context]
strategy = "steps"
[semantic_cache]
model = "tiny"
"#;

impl Cluster {
    pub(in crate::targets) async fn without_workers() -> anyhow::Result<Self> {
        let data = tempfile::tempdir()?;
        let pki = data.path().join("pki");
        identity::create(&pki)?;
        let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let flags = Flags {
            http: any,
            admin: any,
            listen: any,
            pki: Some(pki.clone()),
            data: Some(data.path().join("coordinator")),
            model: vec![tree::path(MODEL).into()],
            served_model_name: vec!["tiny".into()],
            ..toml::from_str(SETTINGS)?
        };
        // This program is its own grammar helper.
        let settings = Settings { helper: std::env::current_exe()?, ..flags.check()? };
        let coordinator = Coordinator::bind(settings).await?;
        let url = format!("http://{}", coordinator.http);
        let admin = coordinator.admin.map(|addr| format!("http://{addr}")).unwrap_or_else(|| url.clone());
        let quic = coordinator.quic;
        tokio::spawn(coordinator.serve(std::future::pending()));
        Ok(Self { url, admin, quic, pki, _data: data })
    }

    pub(super) async fn start() -> anyhow::Result<Self> {
        let cluster = Self::without_workers().await?;
        let (quic, pki) = (cluster.quic, cluster.pki.clone());
        let flags = tidemill_decode::settings::Flags {
            worker: WorkerFlags { coordinators: Some(vec![quic]), pki: Some(pki), log: Some("off".into()), ..WorkerFlags::default() },
            engine: EngineFlags {
                model: Some(tree::path(MODEL)),
                engine: Some("echo".into()),
                kv_memory: Some("64MiB".into()),
                threads: Some(1),
                ..EngineFlags::default()
            },
            ..Default::default()
        };
        let settings = flags.check()?;
        thread::Builder::new().name("worker".into()).spawn(move || {
            let end = worker::run(settings);
            eprintln!("finding: the worker has ended: {end:?}");
            std::process::abort();
        })?;
        cluster.is_ready().await?;
        Ok(cluster)
    }

    pub(in crate::targets) async fn is_ready(&self) -> anyhow::Result<()> {
        for _ in 0..600 {
            if reqwest::get(format!("{}/ready", self.url)).await.is_ok_and(|answer| answer.status() == 200) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::bail!("the cluster does not become ready")
    }
}
