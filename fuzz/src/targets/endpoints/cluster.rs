//! A coordinator and a decode worker, both real, in this process.

use super::super::tree;
use std::{net::SocketAddr, thread, time::Duration};
use tempfile::TempDir;
use tidemill_coordinator::{
    run::Coordinator,
    settings::{Flags, Settings},
};
use tidemill_engine::{flags::EngineFlags, worker};
use tidemill_net::{identity, worker::WorkerFlags};

pub(super) struct Cluster {
    pub(super) url: String,
    /// Of operators.
    pub(super) admin: String,
    _data: TempDir,
}

const MODEL: &str = "deploy/demo-model";
/// With as much as can be on.
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
"#;

impl Cluster {
    pub(super) async fn start() -> anyhow::Result<Self> {
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
        // This program is its own helper.
        let settings = Settings { grammar_helper: std::env::current_exe()?, ..flags.check()? };
        let coordinator = Coordinator::bind(settings).await?;
        let url = format!("http://{}", coordinator.http);
        let admin = coordinator.admin.map(|addr| format!("http://{addr}")).unwrap_or_else(|| url.clone());
        let quic = coordinator.quic;
        tokio::spawn(coordinator.serve(std::future::pending()));
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
        let cluster = Self { url, admin, _data: data };
        cluster.is_ready().await?;
        Ok(cluster)
    }

    async fn is_ready(&self) -> anyhow::Result<()> {
        for _ in 0..600 {
            if reqwest::get(format!("{}/ready", self.url)).await.is_ok_and(|answer| answer.status() == 200) {
                return Ok(());
            }
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
        anyhow::bail!("the cluster does not become ready")
    }
}
