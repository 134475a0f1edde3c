//! Members that send well-formed messages without sense: a decode worker, a prefill worker and a pool node of a real coordinator, while
//! clients ask it for answers.

use super::{endpoints::cluster::Cluster, frames, tree};
use crate::{
    dice::Dice,
    mutate::bytes,
    target::{Subject, Target},
};
use std::{
    net::SocketAddr,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tidemill_gateway::text::TextModel;
use tidemill_net::{
    identity::Identity,
    link::Endpoint,
    uplink::{HEARTBEAT, LinkEvent, Uplink},
};
use tidemill_proto::{
    block::LayoutFingerprint,
    frame,
    ids::{LinkId, RequestId, SequenceId},
    message::{EngineInfo, Host, Register, Report, RoleInfo, SequenceToken, ToWorker, WorkerEvent},
};
use tokio::time::{sleep, timeout};

pub(crate) const MEMBERS: Target = Target {
    name: "members",
    about: "well-formed messages of workers and pool nodes that make no sense, to a coordinator",
    open,
    cpu_max: Duration::from_secs(20),
    bytes_max: 1 << 30,
    short: 100,
};

/// The time after which a client of such a cluster goes away.
const PATIENCE: Duration = Duration::from_millis(300);
const KEPT_MAX: usize = 64;

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build()?;
    let cluster = runtime.block_on(Cluster::without_workers())?;
    let engine = EngineInfo {
        model: TextModel::load(&tree::path(super::endpoints::cluster::MODEL))?.config.identity,
        layout: LayoutFingerprint([7; 16]),
        block_bytes: 4096,
        device_blocks: 256,
        state_blocks: 0,
        context_tokens: 2048,
        work_max: 64,
    };
    let pool = RoleInfo::Kvpool { addr: ([127, 0, 0, 1], 9).into() };
    let members = runtime.block_on(async {
        let roles = [("decode-0", RoleInfo::Decode(engine.clone())), ("prefill-0", RoleInfo::Prefill(engine)), ("kvpool-0", pool)];
        roles.into_iter().map(|(name, role)| Member::join(&cluster.pki, cluster.quic, name, role)).collect::<anyhow::Result<Vec<_>>>()
    })?;
    runtime.block_on(cluster.is_ready())?;
    let events = frames::decodable::<WorkerEvent>();
    let client = reqwest::Client::new();
    Ok(Box::new(move |dice: &mut Dice| {
        // The closure captures the whole cluster, so that its data directory lives as long.
        let cluster = &cluster;
        runtime.block_on(async {
            for _ in 0..dice.below(4) {
                let body = format!(
                    r#"{{"prompt": {:?}, "n": {}, "max_tokens": {}}}"#,
                    "x ".repeat(1 + dice.below(60)),
                    1 + dice.below(3),
                    1 + dice.below(9)
                );
                let asked = client.post(format!("{}/v1/completions", cluster.url)).header("content-type", "application/json").body(body);
                tokio::spawn(timeout(PATIENCE, asked.send()));
            }
            sleep(Duration::from_millis(dice.below(10) as u64)).await;
            for _ in 0..dice.few(40) {
                let member = dice.pick(&members);
                let mut payload = dice.pick(&events).clone();
                if dice.one_in(2) {
                    bytes::mutate(dice, &mut payload);
                }
                let Ok(mut event) = frame::decode::<WorkerEvent>(&payload) else { continue };
                member.aim(dice, &mut event);
                dice.show("event", format!("{event:?}").as_bytes());
                member.say(event);
            }
            if dice.one_in(10) {
                let health =
                    client.get(format!("{}/cluster", cluster.admin)).send().await.map_err(|error| format!("/cluster: {error:?}"))?;
                if health.status() != 200 {
                    return Err(format!("/cluster answers with {}", health.status()));
                }
            }
            Ok(())
        })
    }))
}

struct Member {
    uplink: Uplink,
    known: Arc<Mutex<Known>>,
    _endpoint: Endpoint,
}

/// The data that the coordinator has sent to the member.
#[derive(Default)]
struct Known {
    /// The link to the coordinator; `None` if it is down.
    link: Option<LinkId>,
    sequences: Vec<SequenceId>,
    requests: Vec<RequestId>,
}

impl Member {
    fn join(pki: &Path, quic: SocketAddr, name: &str, role: RoleInfo) -> anyhow::Result<Self> {
        let endpoint = Endpoint::bind(([127, 0, 0, 1], 0).into(), &Identity::load(pki)?)?;
        let register = Register { name: name.into(), host: Host("here".into()), pid: std::process::id(), model: None, role };
        let (uplink, mut events) = Uplink::start(&endpoint, &[quic], register, (HEARTBEAT, Arc::new(Report::default)));
        let known = Arc::new(Mutex::new(Known::default()));
        let told = Arc::clone(&known);
        tokio::spawn(async move {
            while let Some((link, event)) = events.recv().await {
                let mut known = lock(&told);
                match event {
                    LinkEvent::Up => known.link = Some(link),
                    LinkEvent::Down => known.link = None,
                    LinkEvent::Message(message) => match *message {
                        ToWorker::Decode(job) | ToWorker::DecodeLimited { job, .. } => known.sequences.push(job.sequence),
                        ToWorker::Prefill(job) => known.requests.push(job.request),
                        _ => {}
                    },
                }
                let (sequences, requests) = (known.sequences.len(), known.requests.len());
                known.sequences.drain(..sequences.saturating_sub(KEPT_MAX));
                known.requests.drain(..requests.saturating_sub(KEPT_MAX));
            }
        });
        Ok(Self { uplink, known, _endpoint: endpoint })
    }

    /// Points an event at a sequence or a request that exists.
    fn aim(&self, dice: &mut Dice, event: &mut WorkerEvent) {
        let known = lock(&self.known);
        if !known.sequences.is_empty() && !dice.one_in(4) {
            let real = *dice.pick(&known.sequences);
            match event {
                WorkerEvent::Tokens(tokens) => {
                    let mut real = |_| SequenceToken {
                        sequence: *dice.pick(&known.sequences),
                        index: if dice.one_in(3) { dice.integer() as u32 } else { dice.below(3) as u32 },
                        token: dice.integer() as u32,
                        logprob: None,
                    };
                    tokens.extend((0..3).map(&mut real));
                }
                WorkerEvent::Finished { sequence, .. }
                | WorkerEvent::PromptLogprobs { sequence, .. }
                | WorkerEvent::Embedding { sequence, .. }
                | WorkerEvent::Sources { sequence, .. } => *sequence = real,
                _ => {}
            }
        }
        if let (WorkerEvent::Prefilled { request, .. }, false) = (event, known.requests.is_empty()) {
            *request = *dice.pick(&known.requests);
        }
    }

    fn say(&self, event: WorkerEvent) {
        // A member that drains gets nothing more, and there is no other.
        if let (Some(link), false) = (lock(&self.known).link, matches!(event, WorkerEvent::Leaving)) {
            self.uplink.send(link, event);
        }
    }
}

/// Locks the data. No holder of the lock panics.
fn lock(known: &Mutex<Known>) -> MutexGuard<'_, Known> {
    known.lock().unwrap_or_else(PoisonError::into_inner)
}
