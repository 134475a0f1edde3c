//! The registry of one coordinator: a thread that owns replica and disk, and a handle to it for the rest of the process.
//!
//! Reads use the local copy, without waiting. Writes wait for a majority, with a deadline. Serving a request needs neither.

use crate::{
    command::{Command, NewMember, Outcome, Refusal, ReplicaId},
    peers::Peers,
    replica::{Action, CannotRemove, NotTaken, OpenError, Part, Replica, Settings, Status, Ticket, Unconfirmed},
    sqlite::{FileError, Sqlite},
    state::State,
};
use std::{
    collections::HashMap,
    io,
    path::Path,
    sync::{
        Arc,
        mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel},
    },
    thread::JoinHandle,
    time::{Duration, Instant},
};
use tidemill_proto::ids::Epoch;
use tokio::sync::{oneshot, watch};

/// The length of a tick. An election starts after 10 to 20 ticks without a leader.
pub const TICK: Duration = Duration::from_millis(50);
/// The maximum number of messages and changes that wait for the thread. Further messages are lost, which raft expects; further changes are
/// refused.
const INPUTS_MAX: usize = 1024;
/// The number of inputs that are handled together, so that one sync of the disk serves them all.
const BATCH_MAX: usize = 128;

/// A handle to the registry. Clones share it; when the last one is dropped, its thread ends and releases the file.
#[derive(Clone, Debug)]
pub struct Registry {
    running: Arc<Running>,
    view: watch::Receiver<View>,
}

#[derive(Debug)]
struct Running {
    /// `None` only while it is dropped.
    inputs: Option<SyncSender<Input>>,
    thread: Option<JoinHandle<()>>,
}

impl Running {
    /// Queues an input. Returns `false` if there is no room.
    fn give(&self, input: Input) -> bool {
        self.inputs.as_ref().is_some_and(|inputs| inputs.try_send(input).is_ok())
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.inputs = None;
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

/// The state as known to this coordinator.
#[derive(Clone, Debug, Default)]
pub struct View {
    /// `None` if it belongs to no group yet.
    pub state: Option<Arc<State>>,
    pub status: Status,
}

#[derive(Debug)]
enum Input {
    Message { from: String, bytes: Vec<u8> },
    Propose { command: Command, ticks: u64, answer: oneshot::Sender<Result<Outcome, Failed>> },
    Remove { name: String, answer: oneshot::Sender<Result<(), CannotRemove>> },
}

/// The error of a change that was refused, or whose outcome is unknown.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Unconfirmed(#[from] Unconfirmed),
    #[error(transparent)]
    NotTaken(#[from] NotTaken),
    #[error("this coordinator's registry has ended")]
    Ended,
}

#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    File(#[from] FileError),
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error("cannot start the registry's thread: {0}")]
    Thread(#[from] io::Error),
}

impl Registry {
    /// Opens the file (in memory if there is none) and starts the thread, which ends with the last clone of the handle.
    pub fn start(file: Option<&Path>, settings: Settings, peers: Peers) -> Result<Self, StartError> {
        // Even a replica without a file has an id of its own.
        let (disk, found) = Sqlite::open(file, ReplicaId(rand::random::<u64>() | 1))?;
        let replica = Replica::open(settings, &found)?;
        let (inputs, taken) = sync_channel(INPUTS_MAX);
        let (publish, view) = watch::channel(View::default());
        let mut thread = Thread { replica, disk, peers, answers: HashMap::new(), publish, changed: true };
        thread.carry_out();
        let thread = std::thread::Builder::new().name("registry".into()).spawn(move || thread.run(&taken))?;
        Ok(Self { running: Arc::new(Running { inputs: Some(inputs), thread: Some(thread) }), view })
    }

    pub fn view(&self) -> View {
        self.view.borrow().clone()
    }

    /// Follows the view as it changes.
    pub fn watch(&self) -> watch::Receiver<View> {
        self.view.clone()
    }

    /// Passes on a message of a peer.
    pub fn message(&self, from: &str, bytes: Vec<u8>) {
        self.running.give(Input::Message { from: from.to_owned(), bytes });
    }

    /// Makes a change, and waits until a majority has it.
    pub async fn change(&self, command: Command, within: Duration) -> Result<Outcome, Failed> {
        let (answer, answered) = oneshot::channel();
        let ticks = (within.as_millis() / TICK.as_millis()) as u64;
        if !self.running.give(Input::Propose { command, ticks, answer }) {
            return Err(NotTaken::Full.into());
        }
        match answered.await.map_err(|_| Failed::Ended)?? {
            Outcome::Refused(refusal) => Err(refusal.into()),
            outcome => Ok(outcome),
        }
    }

    /// Returns the epoch of a worker: at once if it is known, else when a majority knows it.
    pub async fn register(&self, member: NewMember, within: Duration) -> Result<Epoch, Failed> {
        let known = self.view.borrow().state.as_ref().and_then(|state| state.member(member.instance)).map(|member| member.epoch);
        match known {
            Some(epoch) => Ok(epoch),
            None => match self.change(Command::Register(member), within).await? {
                Outcome::Registered(epoch) => Ok(epoch),
                other => unreachable!("a registration ends with an epoch or a refusal, and not with {other:?}"),
            },
        }
    }

    /// Removes a coordinator that will not return from the group.
    pub async fn remove(&self, name: String) -> Result<(), CannotRemove> {
        let (answer, answered) = oneshot::channel();
        if !self.running.give(Input::Remove { name, answer }) {
            return Err(CannotRemove::Busy);
        }
        answered.await.unwrap_or(Err(CannotRemove::Busy))
    }
}

impl View {
    /// Explains to operators why no change can be confirmed now.
    pub fn why_waiting(&self) -> String {
        let Status { part, leader, voters, halted, .. } = &self.status;
        match (part, leader) {
            _ if halted.is_some() => format!("this coordinator's registry has stopped: {}", halted.as_deref().unwrap_or_default()),
            (Part::Outside, _) => "this coordinator is in no group yet: at the first start, all of --peers must be up".into(),
            (Part::Removed, _) => "this coordinator was taken out of the group".into(),
            (_, None) => format!("the registry has no leader: a majority of {} must be up", voters.join(", ")),
            (_, Some(leader)) => format!("the registry's leader `{leader}` does not confirm"),
        }
    }
}

struct Thread {
    replica: Replica,
    disk: Sqlite,
    peers: Peers,
    answers: HashMap<Ticket, oneshot::Sender<Result<Outcome, Failed>>>,
    publish: watch::Sender<View>,
    changed: bool,
}

impl Thread {
    fn run(mut self, inputs: &Receiver<Input>) {
        let mut next = Instant::now() + TICK;
        loop {
            match inputs.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(first) => {
                    self.take(first);
                    inputs.try_iter().take(BATCH_MAX).for_each(|input| self.take(input));
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return,
            }
            if Instant::now() >= next {
                self.replica.tick();
                // After a pause, missed ticks are not made up for: peers may have sent messages meanwhile.
                next = Instant::now() + TICK;
            }
            self.carry_out();
        }
    }

    fn take(&mut self, input: Input) {
        match input {
            Input::Message { from, bytes } => {
                if let Err(error) = self.replica.message(&from, &bytes) {
                    tracing::warn!(peer = from, %error, "a message about the registry is refused");
                }
            }
            Input::Propose { command, ticks, answer } => match self.replica.propose(command, ticks) {
                Ok(ticket) => drop(self.answers.insert(ticket, answer)),
                Err(error) => drop(answer.send(Err(error.into()))),
            },
            Input::Remove { name, answer } => drop(answer.send(self.replica.remove(&name))),
        }
    }

    fn carry_out(&mut self) {
        while let Some(action) = self.replica.poll() {
            match action {
                Action::Write(writes) => match self.disk.write(&writes) {
                    Ok(()) => self.replica.written(),
                    Err(error) => self.replica.halt(format!("its file cannot be written: {error}")),
                },
                Action::Send { to, bytes } => self.peers.send(&to, bytes),
                Action::Done { ticket, outcome } => {
                    if let Some(answer) = self.answers.remove(&ticket) {
                        let _ = answer.send(outcome.map_err(Failed::from));
                    }
                }
                Action::Changed => self.changed = true,
                Action::Warn(warning) => tracing::warn!("{warning}"),
                Action::Halted(reason) => {
                    tracing::error!(reason, "the registry of this coordinator stops; requests continue with its last state");
                    self.answers.clear();
                }
            }
        }
        let status = self.replica.status();
        let before = self.publish.borrow().status.clone();
        if status.leader != before.leader || status.part != before.part {
            tracing::info!(leader = status.leader, part = ?status.part, term = status.term, voters = status.voters.join(", "), "registry");
        }
        if std::mem::take(&mut self.changed) {
            let state = self.replica.state().cloned().map(Arc::new);
            self.publish.send_replace(View { state, status });
        } else if status != before {
            self.publish.send_modify(|view| view.status = status);
        }
    }
}
