//! The head's side: it meets the other stages, and passes rows and blocks on.

use super::{StagesError, protocol::Part};
use crate::flags::EngineSettings;
use parking_lot::Mutex;
use std::{
    net::SocketAddr,
    sync::{Arc, mpsc as blocking},
    time::Duration,
};
use tidemill_model::{ExecutorError, IN_FLIGHT_PER_STAGE, LaterStages};
use tidemill_net::{
    identity::PeerRole,
    link::{CONNECT_MAX, Connection, Endpoint, LinkError, Receiver, Sender},
    process,
    worker::WorkerSettings,
};
use tidemill_proto::{
    frame::Preamble,
    stage::{Batch, Bytes, FromStage, Hello, PART_BYTES_MAX, Stage, ToStage},
};
use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, timeout, timeout_at},
};

/// The pause between two attempts to reach a stage.
const RETRY: Duration = Duration::from_millis(500);
/// The most blocks that wait for a stage, beside the batches.
const BLOCKS_WAITING_MAX: usize = 4;

/// The other stages, ready to compute.
pub struct Met {
    pub later: Box<dyn LaterStages>,
    /// The number of blocks for which all stages have room.
    pub blocks: usize,
    /// Resolves with the failure of a stage, or with an error once the stages are not used any more.
    pub lost: oneshot::Receiver<ExecutorError>,
}

/// Connects to the other stages and waits until they take part. `hello` is the head's own, and `blocks` the number for which it has room. Must
/// be called inside a runtime with several threads.
pub(crate) fn meet(worker: &WorkerSettings, engine: &EngineSettings, hello: &Hello, blocks: usize) -> Result<Met, StagesError> {
    let endpoint = Endpoint::bind_client(SocketAddr::new(worker.bind.ip(), 0), &worker.identity)?;
    let meeting = Meeting { endpoint, role: worker.role, hello: hello.clone(), within: engine.stage_wait };
    let addrs = engine.stages.clone();
    let (send, outcome) = blocking::sync_channel(1);
    tokio::spawn(async move {
        let met = tokio::select! {
            met = meeting.all(addrs, blocks) => met,
            () = process::terminated() => Err(StagesError::Told),
        };
        // The receiver waits below.
        let _ = send.send(met);
    });
    outcome.recv().expect("the task answers before it ends")
}

struct Meeting {
    endpoint: Endpoint,
    /// The role of the worker, which its stages have in their certificates, too.
    role: PeerRole,
    hello: Hello,
    /// The most time until all take part, and for each later answer.
    within: Duration,
}

/// A stage that takes part.
struct Joined {
    stage: Stage,
    connection: Connection,
    sender: Sender<ToStage>,
    receiver: Receiver<FromStage>,
    blocks_max: usize,
}

enum Failure {
    Refused(String),
    NotYet(String),
}

impl From<LinkError> for Failure {
    fn from(error: LinkError) -> Self {
        match error {
            LinkError::Role { .. } => Self::Refused(error.to_string()),
            _ => Self::NotYet(error.to_string()),
        }
    }
}

impl Meeting {
    async fn all(self, addrs: Vec<SocketAddr>, own_blocks: usize) -> Result<Met, StagesError> {
        let deadline = Instant::now() + self.within;
        let mut stages = Vec::new();
        for (addr, index) in addrs.into_iter().zip(1..) {
            stages.push(self.join(Stage { index, ..self.hello.stage }, addr, deadline).await?);
        }
        let blocks = stages.iter().map(|joined| joined.blocks_max).fold(own_blocks, usize::min);
        for joined in &mut stages {
            joined.sender.send(&ToStage::Begin { blocks: blocks as u32 }).await?;
        }
        let (later, lost) = Links::start(self, stages);
        Ok(Met { later: Box::new(later), blocks, lost })
    }

    /// Asks a stage again and again, until it takes part, refuses, or the deadline has passed.
    async fn join(&self, stage: Stage, addr: SocketAddr, deadline: Instant) -> Result<Joined, StagesError> {
        let mut reason = "it was not asked yet".to_owned();
        loop {
            match timeout_at(deadline, self.greet(stage, addr)).await {
                Ok(Ok(joined)) => {
                    tracing::info!(%addr, blocks = joined.blocks_max, "{stage} has joined the pipeline");
                    return Ok(joined);
                }
                Ok(Err(Failure::Refused(reason))) => return Err(StagesError::Refused { stage, addr, reason }),
                Ok(Err(Failure::NotYet(now))) => {
                    if now != reason {
                        tracing::warn!(%addr, reason = now, "waiting for {stage}");
                    }
                    reason = now;
                }
                Err(_) => return Err(StagesError::Late { stage, addr, within: self.within, reason }),
            }
            sleep(RETRY).await;
        }
    }

    async fn greet(&self, stage: Stage, addr: SocketAddr) -> Result<Joined, Failure> {
        let connection = self.endpoint.connect(addr).await?;
        connection.expect(&[self.role])?;
        let (mut sender, mut receiver) = connection.open(Preamble::Stage).await?;
        sender.send(&ToStage::Hello(Hello { stage, ..self.hello.clone() })).await?;
        let answer = timeout(CONNECT_MAX, receiver.recv()).await;
        match answer.map_err(|_| Failure::NotYet(format!("no answer within {CONNECT_MAX:?}")))?? {
            Some(FromStage::Ready { blocks_max }) => Ok(Joined { stage, connection, sender, receiver, blocks_max: blocks_max as usize }),
            Some(FromStage::Busy { reason }) => Err(Failure::NotYet(reason)),
            Some(FromStage::Refused { reason }) => Err(Failure::Refused(reason)),
            other => Err(Failure::NotYet(format!("its answer was {other:?}"))),
        }
    }
}

/// The links to the other stages, as the engine's thread uses them.
struct Links {
    queues: Vec<mpsc::Sender<Request>>,
    /// The bytes of a block that each of these stages has.
    parts: Vec<usize>,
    /// The rows that came back, or `None` when a stage has failed.
    rows: blocking::Receiver<Option<Bytes>>,
    failing: Arc<Failing>,
    /// The most time for an answer of all stages together.
    within: Duration,
}

enum Request {
    Step(Batch),
    Write { block: u32, bytes: Vec<u8> },
    Read { block: u32, answer: blocking::SyncSender<Vec<u8>> },
}

/// The first failure of a stage.
struct Failing {
    first: Mutex<Option<(Stage, String)>>,
    lost: Mutex<Option<oneshot::Sender<ExecutorError>>>,
}

impl Failing {
    fn fail(&self, stage: Stage, message: String) {
        tracing::error!(reason = message, "{stage} is lost");
        self.first.lock().get_or_insert((stage, message));
        if let Some(lost) = self.lost.lock().take() {
            // The receiver is gone if the engine has ended.
            let _ = lost.send(self.error());
        }
    }

    fn error(&self) -> ExecutorError {
        let first = self.first.lock().clone();
        let (stage, message) = first.unwrap_or_else(|| (Stage::WHOLE, "the links to its stages have ended".into()));
        ExecutorError::Stage { stage, message }
    }
}

impl Links {
    /// Starts a task for each stage.
    fn start(Meeting { endpoint, hello, within, .. }: Meeting, stages: Vec<Joined>) -> (Self, oneshot::Receiver<ExecutorError>) {
        let batches = IN_FLIGHT_PER_STAGE * stages.len();
        let (head, rows) = blocking::sync_channel(batches + stages.len());
        let (send_lost, lost) = oneshot::channel();
        let failing = Arc::new(Failing { first: Mutex::default(), lost: Mutex::new(Some(send_lost)) });
        let mut queues: Vec<mpsc::Sender<Request>> = Vec::new();
        let mut parts = Vec::new();
        let layer_bytes = hello.shape.layer_bytes();
        // From the last to the first: each task passes rows on to the one after it.
        for Joined { stage, connection, sender, receiver, .. } in stages.into_iter().rev() {
            let (queue, requests) = mpsc::channel(batches + BLOCKS_WAITING_MAX);
            let (next, head) = (queues.last().cloned(), head.clone());
            let part = stage.layers(hello.shape.layers).len() * layer_bytes;
            let link = Link {
                stage,
                endpoint: endpoint.clone(),
                connection,
                sender,
                receiver,
                next,
                head,
                part,
                failing: Arc::clone(&failing),
                within,
            };
            tokio::spawn(link.run(requests));
            queues.push(queue);
            parts.push(part);
        }
        queues.reverse();
        parts.reverse();
        let within = within * (queues.len() as u32 + 1);
        (Self { queues, parts, rows, failing, within }, lost)
    }

    fn queue(&self, stage: usize, request: Request) -> Result<(), ExecutorError> {
        self.queues[stage].blocking_send(request).map_err(|_| self.failing.error())
    }
}

impl LaterStages for Links {
    fn count(&self) -> usize {
        self.queues.len()
    }

    fn send(&mut self, batch: Batch) -> Result<(), ExecutorError> {
        self.queue(0, Request::Step(batch))
    }

    fn receive(&mut self) -> Result<Vec<f32>, ExecutorError> {
        let rows = self.rows.recv_timeout(self.within).ok().flatten().ok_or_else(|| self.failing.error())?;
        let last = Stage { index: self.queues.len() as u32, count: self.queues.len() as u32 + 1 };
        rows.numbers().ok_or_else(|| ExecutorError::Stage { stage: last, message: "it gave back no whole numbers".into() })
    }

    fn write_block(&mut self, block: u32, mut bytes: &[u8]) -> Result<(), ExecutorError> {
        for (stage, part) in self.parts.iter().enumerate() {
            let (own, others) = bytes.split_at(*part);
            self.queue(stage, Request::Write { block, bytes: own.to_vec() })?;
            bytes = others;
        }
        Ok(())
    }

    fn read_block(&mut self, block: u32, mut bytes: &mut [u8]) -> Result<(), ExecutorError> {
        let mut answers = Vec::new();
        for stage in 0..self.queues.len() {
            let (answer, part) = blocking::sync_channel(1);
            self.queue(stage, Request::Read { block, answer })?;
            answers.push(part);
        }
        for (answer, part) in answers.into_iter().zip(&self.parts) {
            let (own, others) = bytes.split_at_mut(*part);
            own.copy_from_slice(&answer.recv_timeout(self.within).map_err(|_| self.failing.error())?);
            bytes = others;
        }
        Ok(())
    }
}

/// The link to one stage, which does one thing after the other.
struct Link {
    stage: Stage,
    /// Keeps the socket as long as the link.
    endpoint: Endpoint,
    connection: Connection,
    sender: Sender<ToStage>,
    receiver: Receiver<FromStage>,
    /// The queue of the next stage; the rows of the last one go to the head.
    next: Option<mpsc::Sender<Request>>,
    /// The head's queue, with room for all batches on their way, and for a failure of each stage.
    head: blocking::SyncSender<Option<Bytes>>,
    /// The bytes of a block that the stage has.
    part: usize,
    failing: Arc<Failing>,
    /// The most time for each answer.
    within: Duration,
}

impl Link {
    async fn run(mut self, mut requests: mpsc::Receiver<Request>) {
        let reason = loop {
            let request = tokio::select! {
                request = requests.recv() => request,
                reason = self.connection.closed() => break reason,
            };
            let Some(request) = request else {
                self.sender.finish().await;
                drop(self.endpoint);
                return;
            };
            match timeout(self.within, self.perform(request)).await {
                Ok(Ok(())) => {}
                Ok(Err(reason)) => break reason,
                Err(_) => break format!("no answer within {:?} (`stage_wait_s`)", self.within),
            }
        };
        let peer = self.connection.peer();
        self.connection.close(&reason);
        // The failure must be known before the queue closes, and before the head stops waiting for rows.
        self.failing.fail(self.stage, format!("at {peer}: {reason}"));
        let _ = self.head.try_send(None);
    }

    async fn perform(&mut self, request: Request) -> Result<(), String> {
        match request {
            Request::Step(Batch { chunks, rows }) => {
                let step = ToStage::Step(Batch { chunks, rows });
                self.send(&step).await?;
                let FromStage::Rows(rows) = self.answer().await? else { return Err("it answered a step with something else".into()) };
                let ToStage::Step(Batch { chunks, .. }) = step else { unreachable!("made above") };
                match &self.next {
                    // A queue that is closed belongs to a stage that has failed, and has said so.
                    Some(next) => drop(next.send(Request::Step(Batch { chunks, rows })).await),
                    None => self.head.try_send(Some(rows)).map_err(|error| error.to_string())?,
                }
            }
            Request::Write { block, bytes } => {
                for (at, bytes) in (0..).step_by(PART_BYTES_MAX).zip(bytes.chunks(PART_BYTES_MAX)) {
                    self.send(&ToStage::Write { block, at, bytes: Bytes(bytes.to_vec()) }).await?;
                }
            }
            Request::Read { block, answer } => {
                self.send(&ToStage::Read { block }).await?;
                let mut part = Part::new(self.part);
                while !part.is_whole() {
                    part.add(self.answer().await?)?;
                }
                // The engine waits for this, unless it has ended.
                let _ = answer.try_send(part.into_bytes());
            }
        }
        Ok(())
    }

    async fn send(&mut self, message: &ToStage) -> Result<(), String> {
        self.sender.send(message).await.map_err(|error| error.to_string())
    }

    async fn answer(&mut self) -> Result<FromStage, String> {
        match self.receiver.recv().await {
            Ok(Some(answer)) => Ok(answer),
            Ok(None) => Err("it has ended".into()),
            Err(error) => Err(error.to_string()),
        }
    }
}
