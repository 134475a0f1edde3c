//! A stage's process: it loads its layers, waits for a head, and computes for it until the head is gone; then it waits for the next.

use super::protocol;
use crate::{
    flags::EngineSettings,
    load::{EngineError, load_stage},
    worker::WorkerEnd,
};
use std::{sync::Arc, time::Duration};
use tidemill_model::{StageError, StageExecutor};
use tidemill_net::{
    identity::PeerRole,
    link::{CONNECT_MAX, Connection, Endpoint, LinkError, Receiver, Sender},
    process,
    worker::WorkerSettings,
};
use tidemill_proto::{
    frame::Preamble,
    stage::{Bytes, FromStage, Hello, PART_BYTES_MAX, Stage, ToStage},
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc},
    task::{JoinSet, spawn_blocking},
    time::timeout,
};

/// The most peers that are asked who they are at the same time; others wait.
const GREETINGS_MAX: usize = 8;
/// The most requests, and the most answers, that wait within this process.
const QUEUE_MAX: usize = 4;
/// The most time that a stage which is told to end waits for its head to end first.
const DRAIN_MAX: Duration = Duration::from_secs(8);

/// Runs the process of a later stage until it is told to end.
pub(crate) async fn serve(worker: WorkerSettings, engine: EngineSettings, stage: Stage) -> Result<(), WorkerEnd> {
    worker.log.start();
    process::keep_freed_memory();
    let shutdown = worker.shutdown();
    tokio::pin!(shutdown);
    let model = load_stage(&engine, stage)?;
    let blocks_max = engine.cpu_blocks(model.block_memory()).map_err(EngineError::from)?;
    let endpoint = Endpoint::bind(worker.bind, &worker.identity)?;
    tracing::info!(addr = %endpoint.local_addr(), blocks_max, "{stage} waits for its head");
    println!("listening quic://{}", endpoint.local_addr());
    let (send_heads, mut heads) = mpsc::channel(1);
    let door = Door { hello: model.hello(stage), role: worker.role, blocks_max: blocks_max as u32, place: Arc::new(Semaphore::new(1)) };
    let accepting = tokio::spawn(accept(endpoint.clone(), Arc::new(door), send_heads));
    let (mut executor, mut outcome) = (model.into_later(), Ok(()));
    loop {
        let head = tokio::select! {
            Some(head) = heads.recv() => head,
            () = &mut shutdown => break,
        };
        let name = head.connection.name().to_string();
        tracing::info!(head = name, "computing for a head");
        let session = run(head, executor, blocks_max, engine.stage_wait);
        tokio::pin!(session);
        let ended = tokio::select! {
            ended = &mut session => ended,
            () = &mut shutdown => {
                // The head of a worker that ends as a whole still hands its work back.
                let _ = timeout(DRAIN_MAX, session).await;
                break;
            }
        };
        match ended {
            Ok((back, reason)) => {
                tracing::warn!(head = name, reason, "the head is gone: waiting for the next");
                executor = back;
            }
            Err(error) => {
                outcome = Err(error);
                break;
            }
        }
    }
    accepting.abort();
    endpoint.close().await;
    outcome
}

/// A head that takes this stage.
struct Head {
    connection: Connection,
    sender: Sender<FromStage>,
    receiver: Receiver<ToStage>,
    /// Kept as long as the stage is this head's.
    _place: OwnedSemaphorePermit,
}

/// The conditions for becoming this stage's head.
struct Door {
    hello: Hello,
    role: PeerRole,
    blocks_max: u32,
    /// The place of the one head.
    place: Arc<Semaphore>,
}

/// Lets heads in. Each peer is greeted by a task of its own, so that none holds up another.
async fn accept(endpoint: Endpoint, door: Arc<Door>, heads: mpsc::Sender<Head>) {
    let mut listener = endpoint.listen();
    let mut greetings = JoinSet::new();
    loop {
        tokio::select! {
            connection = listener.accept(), if greetings.len() < GREETINGS_MAX => {
                let Some(connection) = connection else { return };
                let (door, heads) = (Arc::clone(&door), heads.clone());
                greetings.spawn(async move {
                    match timeout(CONNECT_MAX, door.greet(connection)).await {
                        // Without a receiver, the process ends.
                        Ok(Ok(Some(head))) => drop(heads.send(head).await),
                        Ok(Ok(None)) => {}
                        Ok(Err(error)) => tracing::warn!(%error, "a peer is no head of this stage"),
                        Err(_) => tracing::warn!("a peer did not say who it is within {CONNECT_MAX:?}"),
                    }
                });
            }
            Some(_) = greetings.join_next() => {}
        }
    }
}

impl Door {
    /// Takes a peer's greeting. `None` if it was told why it cannot be the head.
    async fn greet(&self, connection: Connection) -> Result<Option<Head>, LinkError> {
        connection.expect(&[self.role])?;
        let greeted = async {
            let (sender, mut receiver) = connection.accept::<FromStage, ToStage>(Preamble::Stage).await?;
            Ok::<_, LinkError>((sender, receiver.recv().await?, receiver))
        };
        let (mut sender, hello, receiver) = greeted.await.inspect_err(|error| connection.close(&error.to_string()))?;
        let Some(ToStage::Hello(theirs)) = hello else {
            connection.close("a head begins with its greeting");
            return Ok(None);
        };
        let place = Arc::clone(&self.place).try_acquire_owned().ok();
        let answer = protocol::greeting(&self.hello, &theirs, place.is_none(), self.blocks_max);
        sender.send(&answer).await?;
        match place.filter(|_| matches!(answer, FromStage::Ready { .. })) {
            Some(place) => Ok(Some(Head { connection, sender, receiver, _place: place })),
            None => {
                tracing::warn!(peer = %connection.name(), ?answer, "a head was turned away");
                sender.finish().await;
                Ok(None)
            }
        }
    }
}

/// Computes for a head until its link ends. Returns the executor and the reason, or the error after which it cannot compute any more.
async fn run(
    Head { connection, sender, mut receiver, _place }: Head,
    executor: StageExecutor,
    blocks_max: usize,
    begin_within: Duration,
) -> Result<(StageExecutor, String), WorkerEnd> {
    let blocks = match timeout(begin_within, receiver.recv()).await {
        Ok(Ok(None)) => return Ok((executor, "it ended before it began".into())),
        Ok(Err(error)) => return Ok((executor, error.to_string())),
        Ok(Ok(Some(message))) => protocol::blocks_to_begin_with(&message, blocks_max),
        Err(_) => None,
    };
    let Some(blocks) = blocks else {
        let reason = format!("it did not begin with at most {blocks_max} blocks within {begin_within:?}");
        connection.close(&reason);
        return Ok((executor, reason));
    };
    let (requests, queued) = mpsc::channel(QUEUE_MAX);
    let (answers, outgoing) = mpsc::channel(QUEUE_MAX);
    let computing = spawn_blocking(move || {
        let mut executor = executor;
        executor.begin(blocks);
        let outcome = compute(&mut executor, queued, &answers);
        (executor, outcome)
    });
    let reason = tokio::select! {
        reason = read(receiver, requests) => reason,
        reason = write(sender, outgoing) => reason,
    };
    // Both queues are closed now, so the thread ends after what it is doing.
    let (executor, outcome) = computing.await.map_err(|panic| EngineError::StageThread(panic.to_string()))?;
    let reason = match &outcome {
        Ok(()) => reason,
        Err(error) => error.to_string(),
    };
    connection.close(&reason);
    match outcome {
        Err(StageError::Executor(error)) => Err(EngineError::Device(error).into()),
        Ok(()) | Err(StageError::Request(_)) => Ok((executor, reason)),
    }
}

/// Does what the head asks for, in order, until there is nothing more, or something cannot be done.
fn compute(
    executor: &mut StageExecutor,
    mut requests: mpsc::Receiver<ToStage>,
    answers: &mpsc::Sender<FromStage>,
) -> Result<(), StageError> {
    // Once the link has ended, answers have no reader, and no more requests come.
    let answer = |answer| drop(answers.blocking_send(answer));
    while let Some(request) = requests.blocking_recv() {
        match request {
            ToStage::Step(batch) => answer(FromStage::Rows(executor.step(&batch)?)),
            ToStage::Write { block, at, bytes } => executor.write(block, at as usize, &bytes.0)?,
            ToStage::Read { block } => {
                let pieces = executor.read(block)?.chunks(PART_BYTES_MAX);
                pieces.for_each(|piece| answer(FromStage::Part(Bytes(piece.to_vec()))));
            }
            ToStage::Hello(_) | ToStage::Begin { .. } => return Err(StageError::Request("to begin once more".into())),
        }
    }
    Ok(())
}

/// Passes requests on until the link ends, and returns the reason.
async fn read(mut receiver: Receiver<ToStage>, requests: mpsc::Sender<ToStage>) -> String {
    loop {
        match receiver.recv().await {
            Ok(Some(request)) => {
                if requests.send(request).await.is_err() {
                    return "the thread that computes has ended".into();
                }
            }
            Ok(None) => return "it has ended".into(),
            Err(error) => return error.to_string(),
        }
    }
}

/// Sends answers until there are none any more or the link ends, and returns the reason.
async fn write(mut sender: Sender<FromStage>, mut answers: mpsc::Receiver<FromStage>) -> String {
    while let Some(answer) = answers.recv().await {
        if let Err(error) = sender.send(&answer).await {
            return error.to_string();
        }
    }
    "the thread that computes has ended".into()
}
