//! A real coordinator in this process (HTTP and QUIC on port 0) and scripted workers: peers that speak the real protocol and follow a
//! test's script.

use std::{
    collections::HashMap,
    env,
    net::SocketAddr,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};
use tidemill_coordinator::{
    run::Coordinator,
    settings::{Flags, Settings},
};
use tidemill_gateway::text::TextModel;
use tidemill_net::{
    config::ConfigError,
    identity::{self, Identity},
    link::Endpoint,
    uplink::{HEARTBEAT, LinkEvent, Uplink},
};
use tidemill_proto::{
    block::{LayoutFingerprint, Token},
    ids::{LinkId, SequenceId},
    message::{
        DecodeJob, EngineInfo, Finish, Host, PrefillOutcome, Provenance, Register, Report, RoleInfo, SequenceToken, ToWorker,
        TokensBySource, WorkerEvent,
    },
    sampling::TokenLogprob,
};
use tokio::sync::{mpsc, oneshot};

pub struct Cluster {
    pub url: String,
    /// The operators' port, if it is separate.
    pub admin: Option<String>,
    pub quic: SocketAddr,
    pki: tempfile::TempDir,
    stop: Option<oneshot::Sender<()>>,
    served: tokio::task::JoinHandle<()>,
}

/// The coordinator's program as it is shipped, whatever the tests are built with: `make programs` builds it.
pub fn program() -> PathBuf {
    let test = env::current_exe().expect("a running program has a path");
    let target = test.ancestors().nth(3).expect("tests lie in PROFILE/deps of the target directory");
    let program = target.join("release/tidemill-coordinator");
    assert!(program.is_file(), "{} is not there: `make programs` builds it", program.display());
    program
}

/// Checks flags for this process, which is a test and not the program that is its own helper.
pub fn checked(flags: Flags) -> Result<Settings, ConfigError> {
    Ok(Settings { helper: program(), ..flags.check()? })
}

pub fn fixture(family: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../model/tests/fixtures").join(family)
}

impl Cluster {
    pub async fn start(change: impl FnOnce(&mut Flags)) -> Self {
        let pki = tempfile::tempdir().unwrap();
        identity::create(pki.path()).unwrap();
        let any = Some(SocketAddr::from(([127, 0, 0, 1], 0)));
        let mut flags = Flags {
            http: any,
            listen: any,
            pki: Some(pki.path().to_owned()),
            model: vec![fixture("llama3").into()],
            served_model_name: vec!["tiny".into()],
            local_tail_tokens: Some(0),
            drain_s: Some(2),
            ..Flags::default()
        };
        change(&mut flags);
        let coordinator = Coordinator::bind(checked(flags).unwrap()).await.unwrap();
        let (stop, stopped) = oneshot::channel();
        let (url, quic) = (format!("http://{}", coordinator.http), coordinator.quic);
        let admin = coordinator.admin.map(|addr| format!("http://{addr}"));
        let served = tokio::spawn(async move {
            let shutdown = async move {
                let _ = stopped.await;
            };
            coordinator.serve(shutdown).await.unwrap();
        });
        Self { url, admin, quic, pki, stop: Some(stop), served }
    }

    /// Joins the cluster and waits until the coordinator has registered the worker.
    pub async fn join(&self, name: &str, role: RoleInfo, script: Script) -> Worker {
        Worker::join(self.pki.path(), self.quic, name, role, script).await
    }

    pub async fn get(&self, path: &str) -> reqwest::Response {
        reqwest::get(format!("{}{path}", self.url)).await.unwrap()
    }
    pub async fn post(&self, path: &str, body: serde_json::Value) -> reqwest::Response {
        reqwest::Client::new().post(format!("{}{path}", self.url)).json(&body).send().await.unwrap()
    }

    /// Posts a body. Returns the status and the answer's JSON.
    pub async fn ask(&self, path: &str, body: serde_json::Value) -> (u16, serde_json::Value) {
        let response = self.post(path, body).await;
        (response.status().as_u16(), response.json().await.unwrap())
    }

    /// Ends the coordinator like a killed process: connections break without notice.
    pub async fn kill(self) {
        self.served.abort();
        let _ = self.served.await;
    }

    pub async fn stop(mut self) {
        let _ = self.stop.take().unwrap().send(());
        tokio::time::timeout(Duration::from_secs(10), self.served).await.expect("ends within the drain time").unwrap();
    }
}

pub type ReplyTo = Arc<dyn Fn(&[Token]) -> Vec<Token> + Send + Sync>;

/// A scripted worker's treatment of its jobs.
#[derive(Clone)]
pub struct Script {
    /// The reply to every prompt.
    pub reply: Vec<Token>,
    /// Computes the reply from the prompt, in place of `reply`.
    pub reply_to: Option<ReplyTo>,
    /// Tokens after which a decode worker falls silent (but stays connected).
    pub stall_after: usize,
    pub prefill: PrefillOutcome,
}

impl Script {
    pub fn reply(reply: &[Token]) -> Self {
        let prefill = PrefillOutcome::Done { cached_tokens: 0, computed_tokens: 16, queue_ms: 1.0, compute_ms: 2.0 };
        Self { reply: reply.to_vec(), reply_to: None, stall_after: usize::MAX, prefill }
    }
}

/// A handle on a scripted worker.
pub struct Worker {
    /// The coordinator's messages to the worker.
    pub messages: mpsc::UnboundedReceiver<ToWorker>,
    /// Messages that the worker sends besides its script.
    pub say: mpsc::UnboundedSender<WorkerEvent>,
    task: tokio::task::JoinHandle<()>,
    endpoint: Endpoint,
}

impl Worker {
    /// Joins the cluster of the coordinator at `quic`, and waits until the coordinator has registered the worker.
    pub async fn join(pki: &Path, quic: SocketAddr, name: &str, role: RoleInfo, script: Script) -> Self {
        let endpoint = Endpoint::bind(([127, 0, 0, 1], 0).into(), &Identity::load(pki).unwrap()).unwrap();
        let register = Register { name: name.into(), host: Host("here".into()), pid: std::process::id(), model: None, role };
        let reports = (HEARTBEAT, Arc::new(Report::default) as _);
        let (uplink, mut events) = Uplink::start(&endpoint, &[quic], register, reports);
        let (seen, messages) = mpsc::unbounded_channel();
        let (say, mut said) = mpsc::unbounded_channel();
        let mut peer = Peer { uplink, script, running: HashMap::new(), seen };
        let up = tokio::time::timeout(Duration::from_secs(10), events.recv()).await;
        assert!(matches!(up, Ok(Some((_, LinkEvent::Up)))), "the coordinator takes {name} in: {up:?}");
        let task = tokio::spawn(async move {
            let mut step = tokio::time::interval(Duration::from_millis(1));
            loop {
                tokio::select! {
                    event = events.recv() => match event {
                        Some((_, LinkEvent::Message(message))) => peer.take(*message),
                        Some(_) => {}
                        None => return,
                    },
                    Some(event) = said.recv() => assert!(peer.uplink.send(LINK, event)),
                    _ = step.tick() => peer.step(),
                }
            }
        });
        Worker { messages, say, task, endpoint }
    }

    /// Ends the worker like a killed process: its link breaks without notice.
    pub async fn kill(self) {
        self.task.abort();
        self.endpoint.close().await;
    }

    /// The next message that `pick` accepts; others are skipped.
    pub async fn expect<T>(&mut self, pick: impl Fn(ToWorker) -> Option<T>) -> T {
        let deadline = Instant::now() + Duration::from_secs(10);
        loop {
            let message = tokio::time::timeout_at(deadline.into(), self.messages.recv()).await;
            let message = message.expect("the message comes").expect("the worker lives");
            if let Some(found) = pick(message) {
                return found;
            }
        }
    }

    pub async fn decode_job(&mut self) -> DecodeJob {
        self.expect(|message| match message {
            ToWorker::Decode(job) | ToWorker::DecodeLimited { job, .. } => Some(job),
            _ => None,
        })
        .await
    }
}

/// The link of a scripted worker, which has one coordinator and connects once.
const LINK: LinkId = LinkId { coordinator: 0, session: 0 };

struct Peer {
    uplink: Uplink,
    script: Script,
    /// Decode jobs, with the tokens to generate for them.
    running: HashMap<SequenceId, (DecodeJob, Vec<Token>)>,
    seen: mpsc::UnboundedSender<ToWorker>,
}

impl Peer {
    fn take(&mut self, message: ToWorker) {
        match &message {
            ToWorker::Decode(job) | ToWorker::DecodeLimited { job, .. } => {
                let tokens = TokensBySource {
                    hbm: 16,
                    local: u64::from(job.prompt_tokens) - 16.min(u64::from(job.prompt_tokens)),
                    ..TokensBySource::default()
                };
                self.uplink.send(LINK, WorkerEvent::Sources { sequence: job.sequence, tokens });
                if job.embeds.is_some() {
                    // As many threes and fours as the prompt has tokens.
                    let values = [3.0, 4.0].repeat(job.tokens.len());
                    self.uplink.send(LINK, WorkerEvent::Embedding { sequence: job.sequence, values });
                    let provenance = Provenance { tokens, ..Provenance::default() };
                    self.uplink.send(LINK, WorkerEvent::Finished { sequence: job.sequence, reason: Finish::Length, provenance });
                    let _ = self.seen.send(message);
                    return;
                }
                if let Some(n) = job.prompt_logprobs {
                    let logprob = |&token: &Token| Some(logprob(token, n));
                    let logprobs = std::iter::once(None).chain(job.tokens[1..].iter().map(logprob)).collect();
                    self.uplink.send(LINK, WorkerEvent::PromptLogprobs { sequence: job.sequence, logprobs });
                }
                let reply = match &self.script.reply_to {
                    Some(reply_to) => reply_to(&job.tokens[..job.prompt_tokens as usize]),
                    None => self.script.reply.clone(),
                };
                self.running.insert(job.sequence, (job.clone(), reply));
            }
            ToWorker::Prefill(job) => {
                self.uplink.send(LINK, WorkerEvent::Prefilled { request: job.request, outcome: self.script.prefill.clone() });
            }
            ToWorker::CancelSequence { sequence } => {
                self.running.remove(sequence);
            }
            _ => {}
        }
        let _ = self.seen.send(message);
    }

    /// Sends one token of every sequence.
    fn step(&mut self) {
        let mut ended = Vec::new();
        let mut tokens = Vec::new();
        for (&sequence, (job, reply)) in &mut self.running {
            let index = job.tokens.len() - job.prompt_tokens as usize;
            let Some(&token) = reply.get(index) else {
                ended.push((sequence, Finish::Length, job.prompt_tokens));
                continue;
            };
            if index >= self.script.stall_after {
                continue;
            }
            let logprob = job.sampling.logprobs.map(|n| logprob(token, n));
            tokens.push(SequenceToken { sequence, index: index as u32, token, logprob });
            job.tokens.push(token);
            if job.stop.stop_tokens.contains(&token) {
                ended.push((sequence, Finish::Stop { token }, job.prompt_tokens));
            } else if index + 1 == job.stop.max_tokens as usize {
                ended.push((sequence, Finish::Length, job.prompt_tokens));
            }
        }
        if !tokens.is_empty() {
            self.uplink.send(LINK, WorkerEvent::Tokens(tokens));
        }
        for (sequence, reason, prompt_tokens) in ended {
            self.running.remove(&sequence);
            let tokens =
                TokensBySource { hbm: 16, local: u64::from(prompt_tokens) - 16.min(u64::from(prompt_tokens)), ..TokensBySource::default() };
            let provenance = Provenance { tokens, tail_ms: 3.0, ..Provenance::default() };
            self.uplink.send(LINK, WorkerEvent::Finished { sequence, reason, provenance });
        }
    }
}

fn logprob(token: Token, n: u32) -> TokenLogprob {
    TokenLogprob { logprob: -0.5, top: (0..n).map(|i| (token + i, -0.5 - i as f32)).collect() }
}

pub fn engine() -> EngineInfo {
    engine_of(&fixture("llama3"))
}

/// The engine of the model in this directory.
pub fn engine_of(dir: &Path) -> EngineInfo {
    EngineInfo {
        model: TextModel::load(dir).unwrap().config.identity,
        layout: LayoutFingerprint([7; 16]),
        block_bytes: 4096,
        device_blocks: 256,
        state_blocks: 0,
        context_tokens: 2048,
        work_max: 256,
    }
}

pub fn decode() -> RoleInfo {
    RoleInfo::Decode(engine())
}

pub fn prefill() -> RoleInfo {
    RoleInfo::Prefill(engine())
}

pub fn pool() -> RoleInfo {
    RoleInfo::Kvpool { addr: ([127, 0, 0, 1], 9).into() }
}
