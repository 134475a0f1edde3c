//! A worker in pipeline stages: the processes of its later stages, and the head's links to them. What both sides decide is production's
//! ([`protocol`]); what a stage computes is modelled: it has its own part of every block, and passes a row on as it came if its part agrees.
//!
//! ```text
//!   head ──Hello──► stage     all are Ready ──Begin──► the head registers     a link ends ──► the head hands its work back, and ends
//! ```

use super::{
    Process, StageIndex, Timer,
    bytes::{Block, Bytes, Memory},
    io::{Io, Packet},
    network::{CLIENT, ConnId, SERVER},
};
use crate::{faults::mutation::Mutation, random::mix};
use std::{collections::VecDeque, time::Duration};
use tidemill_engine::stages::protocol::{self, Part};
use tidemill_proto::{
    block::{BLOCK_TOKENS, KvDtype, KvShape, LayoutFingerprint},
    stage::{Batch, Bytes as Encoded, FromStage, Hello, Stage, StageChunk, ToStage},
};

/// The pause between two attempts to reach a stage, as in production.
const RETRY: Duration = Duration::from_millis(500);
/// The time of a stage's part of a step.
const STEP: Duration = Duration::from_millis(1);
const PART_BYTES: usize = BLOCK_TOKENS * size_of::<u64>();

/// The greeting for a stage of a worker.
pub(crate) fn hello(stage: Stage, layout: LayoutFingerprint) -> Hello {
    Hello { stage, layout, shape: KvShape { layers: 30, kv_heads: 3, head_dim: 64, dtype: KvDtype::Bf16, latent: None } }
}

/// The process of a later stage.
#[derive(Debug)]
pub(crate) struct StageNode {
    process: Process,
    hello: Hello,
    blocks_max: u32,
    session: Option<Session>,
    /// The requests of a head that is gone, if a planted bug keeps them.
    kept: VecDeque<ToStage>,
}

/// The time with one head.
#[derive(Debug)]
struct Session {
    conn: ConnId,
    /// This stage's part of each block, once the head has begun.
    memory: Option<Memory>,
    requests: VecDeque<ToStage>,
    computing: Option<Batch>,
}

impl StageNode {
    pub(crate) fn new(index: StageIndex, hello: Hello, blocks_max: u32) -> Self {
        Self { process: Process::Stage(index), hello, blocks_max, session: None, kept: VecDeque::new() }
    }

    pub(crate) fn handle(&mut self, io: &mut Io, conn: ConnId, message: ToStage) {
        if let ToStage::Hello(theirs) = message {
            let answer = protocol::greeting(&self.hello, &theirs, self.session.is_some(), self.blocks_max);
            if matches!(answer, FromStage::Ready { .. }) {
                io.note(|| format!("{} takes part", self.process));
                self.session = Some(Session { conn, memory: None, requests: VecDeque::new(), computing: None });
            }
            return io.send(conn, CLIENT, Packet::FromStage(Box::new(answer)));
        }
        let Some(session) = self.session.as_mut().filter(|session| session.conn == conn) else { return };
        if session.memory.is_some() {
            session.requests.push_back(message);
            return self.advance(io);
        }
        match protocol::blocks_to_begin_with(&message, self.blocks_max as usize) {
            Some(blocks) => {
                session.memory = Some(Memory::new(blocks));
                session.requests.append(&mut self.kept);
                self.advance(io);
            }
            None => io.violated(|| format!("{} is not begun with, but asked for {message:?}", self.process)),
        }
    }

    /// Does what the head asks for, in order, up to the next step, which takes its time.
    fn advance(&mut self, io: &mut Io) {
        let key = key(self.hello.stage);
        let Some(Session { conn, memory: Some(memory), requests, computing }) = &mut self.session else { return };
        while computing.is_none() {
            match requests.pop_front() {
                Some(ToStage::Step(batch)) => {
                    *computing = Some(batch);
                    io.timer(self.process, STEP, Timer::Stage(*conn));
                }
                Some(ToStage::Write { block, bytes, .. }) => memory.write(block, decode(&bytes.0, key)),
                Some(ToStage::Read { block }) => {
                    let part = encode(memory.read(block), key);
                    io.send(*conn, CLIENT, Packet::FromStage(Box::new(FromStage::Part(Encoded(part)))));
                }
                Some(ToStage::Hello(_) | ToStage::Begin { .. }) => io.violated(|| format!("{} is begun with once more", self.process)),
                None => return,
            }
        }
    }

    /// Ends a step that was begun for the head at this connection.
    pub(crate) fn stepped(&mut self, io: &mut Io, at: ConnId) {
        let is_last = self.hello.stage.is_last();
        let Some(Session { conn, memory: Some(memory), computing, .. }) = self.session.as_mut().filter(|session| session.conn == at) else {
            return;
        };
        let Some(Batch { chunks, rows }) = computing.take() else { return };
        let mut rows = words(&rows.0).into_iter();
        let mut passed = Vec::new();
        for StageChunk { tokens, start, blocks, wanted } in chunks {
            let own = memory.states(&tokens, start as usize, &blocks);
            let all: Vec<u64> = own.into_iter().zip(rows.by_ref()).map(|(own, row)| agreed(row, own)).collect();
            let first = if is_last { all.len() - wanted as usize } else { 0 };
            passed.extend_from_slice(&all[first..]);
        }
        io.send(*conn, CLIENT, Packet::FromStage(Box::new(FromStage::Rows(Encoded(bytes_of(&passed))))));
        self.advance(io);
    }

    /// Handles the end of a head's connection: the place is free for the next head.
    pub(crate) fn ended(&mut self, io: &Io, conn: ConnId) {
        if let Some(session) = self.session.take_if(|session| session.conn == conn)
            && io.has(Mutation::AnswerOldHead)
        {
            self.kept = session.computing.map(ToStage::Step).into_iter().chain(session.requests).collect();
        }
    }

    /// A description of the stage's activity, or `None` if it has nothing to do.
    pub(crate) fn busy(&self) -> Option<String> {
        let session = self.session.as_ref().filter(|session| session.computing.is_some() || !session.requests.is_empty())?;
        Some(format!("{}: {} requests, computing: {}", self.process, session.requests.len(), session.computing.is_some()))
    }
}

/// The head's links to the later stages of its worker.
#[derive(Debug)]
pub(crate) struct Group {
    head: Process,
    layout: LayoutFingerprint,
    links: Vec<Link>,
    /// The chunks of the step on its way.
    batch: Vec<StageChunk>,
    blocks: u32,
    /// The blocks that are being read.
    reading: Vec<u32>,
    /// Their parts so far, `[stage][block]`.
    parts: Vec<Vec<Vec<u8>>>,
}

#[derive(Debug)]
struct Link {
    stage: Stage,
    process: Process,
    state: LinkState,
    /// Answers that nothing was asked for yet: they wait on the stream.
    answers: VecDeque<FromStage>,
    expected: VecDeque<Expected>,
    /// The rows that the stage got last.
    rows: Vec<u8>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum LinkState {
    Down,
    Connecting(ConnId),
    Greeting(ConnId),
    Ready(ConnId),
    Up(ConnId),
}

#[derive(Debug)]
enum Expected {
    Rows,
    Part(Part),
}

/// News of the stages for the head's engine.
pub(crate) enum Told {
    /// All take part.
    Together,
    /// The wanted rows of the step.
    Rows(Vec<u64>),
    /// All parts of the blocks that were asked for are there.
    Parts,
    /// The group is no more.
    Lost(String),
}

impl Group {
    pub(crate) fn new(head: Process, stages: &[StageIndex], layout: LayoutFingerprint, blocks: u32) -> Self {
        let link = |(index, stage): (u32, &StageIndex)| Link {
            stage: Stage { index, count: stages.len() as u32 + 1 },
            process: Process::Stage(*stage),
            state: LinkState::Down,
            answers: VecDeque::new(),
            expected: VecDeque::new(),
            rows: Vec::new(),
        };
        let links = (1..).zip(stages).map(link).collect();
        Self { head, layout, links, batch: Vec::new(), blocks, parts: Vec::new(), reading: Vec::new() }
    }

    pub(crate) fn start(&mut self, io: &mut Io) {
        (0..self.links.len()).for_each(|link| self.meet(io, link));
    }

    /// Connects to a stage, unless that is done.
    pub(crate) fn meet(&mut self, io: &mut Io, link: usize) {
        let link = &mut self.links[link];
        if link.state == LinkState::Down {
            link.state = LinkState::Connecting(io.connect(self.head, link.process));
        }
    }

    pub(crate) fn owns(&self, conn: ConnId) -> bool {
        self.find(conn).is_some()
    }

    pub(crate) fn connected(&mut self, io: &mut Io, conn: ConnId, established: bool) {
        let Some(link) = self.find(conn) else { return };
        if !established {
            return self.down(io, link);
        }
        self.links[link].state = LinkState::Greeting(conn);
        self.send(io, link, ToStage::Hello(hello(self.links[link].stage, self.layout)));
    }

    /// Handles the end of a connection.
    pub(crate) fn ended(&mut self, io: &mut Io, conn: ConnId) -> Option<Told> {
        let link = self.find(conn)?;
        let was_up = matches!(self.links[link].state, LinkState::Up(_));
        if was_up && !io.has(Mutation::RejoinStage) {
            return Some(Told::Lost(format!("{} is lost", self.links[link].stage)));
        }
        self.down(io, link);
        None
    }

    pub(crate) fn heard(&mut self, io: &mut Io, conn: ConnId, answer: FromStage) -> Option<Told> {
        let link = self.find(conn)?;
        match (self.links[link].state, answer) {
            (LinkState::Greeting(_), FromStage::Ready { .. }) => self.ready(io, link, conn),
            (LinkState::Greeting(_), FromStage::Busy { .. }) => {
                io.close(conn, CLIENT, false);
                self.down(io, link);
                None
            }
            (LinkState::Greeting(_), answer) => Some(Told::Lost(format!("a greeting is answered with {answer:?}"))),
            (_, answer) => {
                self.links[link].answers.push_back(answer);
                self.take(io, link)
            }
        }
    }

    fn ready(&mut self, io: &mut Io, link: usize, conn: ConnId) -> Option<Told> {
        self.links[link].state = LinkState::Ready(conn);
        if self.links.iter().any(|other| matches!(other.state, LinkState::Up(_))) {
            // Only a planted bug takes a stage into a group that is at work.
            self.links[link].state = LinkState::Up(conn);
            self.send(io, link, ToStage::Begin { blocks: self.blocks });
            self.ask_again(io, link);
            return None;
        }
        if !self.links.iter().all(|link| matches!(link.state, LinkState::Ready(_))) {
            return None;
        }
        for link in 0..self.links.len() {
            let LinkState::Ready(conn) = self.links[link].state else { unreachable!("all are ready") };
            self.links[link].state = LinkState::Up(conn);
            self.send(io, link, ToStage::Begin { blocks: self.blocks });
        }
        Some(Told::Together)
    }

    /// Sends a step, `rows` of which have gone through the head's layers.
    pub(crate) fn step(&mut self, io: &mut Io, chunks: Vec<StageChunk>, rows: &[u64]) -> Option<Told> {
        self.batch = chunks;
        self.pass(io, 0, bytes_of(rows))
    }

    fn pass(&mut self, io: &mut Io, link: usize, rows: Vec<u8>) -> Option<Told> {
        self.links[link].rows.clone_from(&rows);
        self.links[link].expected.push_back(Expected::Rows);
        self.send(io, link, ToStage::Step(Batch { chunks: self.batch.clone(), rows: Encoded(rows) }));
        self.take(io, link)
    }

    /// Gives each stage its part of a block.
    pub(crate) fn write(&mut self, io: &mut Io, block: u32, bytes: Bytes) {
        for link in 0..self.links.len() {
            let bytes = Encoded(encode(bytes, key(self.links[link].stage)));
            self.send(io, link, ToStage::Write { block, at: 0, bytes });
        }
    }

    /// Asks all stages for their parts of these blocks.
    pub(crate) fn read(&mut self, io: &mut Io, blocks: Vec<u32>) -> Option<Told> {
        self.parts = vec![Vec::new(); self.links.len()];
        self.reading = blocks;
        let mut told = None;
        for link in 0..self.links.len() {
            for at in 0..self.reading.len() {
                self.links[link].expected.push_back(Expected::Part(Part::new(PART_BYTES)));
                self.send(io, link, ToStage::Read { block: self.reading[at] });
            }
            told = told.or(self.take(io, link));
        }
        told
    }

    /// Whether steps or blocks are on their way.
    pub(crate) fn is_idle(&self) -> bool {
        self.links.iter().all(|link| link.expected.is_empty())
    }

    /// A block from the head's own contents and all stages' parts. Its numbers are wrong if a part is missing or another block's.
    pub(crate) fn whole(&self, nth: usize, own: Bytes) -> Bytes {
        let mut block = own?;
        for (link, parts) in self.links.iter().zip(&self.parts) {
            let part = parts.get(nth).and_then(|part| decode(part, key(link.stage)));
            for (at, word) in block.iter_mut().enumerate() {
                *word = agreed(*word, part.map_or(0, |part| part[at]));
            }
        }
        Some(block)
    }

    /// Takes a stage's answers to what it was asked.
    fn take(&mut self, io: &mut Io, link: usize) -> Option<Told> {
        while let Some(expected) = self.links[link].expected.pop_front() {
            let Some(answer) = self.links[link].answers.pop_front() else {
                self.links[link].expected.push_front(expected);
                return None;
            };
            match (expected, answer) {
                (Expected::Rows, FromStage::Rows(rows)) if link + 1 == self.links.len() => return Some(Told::Rows(words(&rows.0))),
                (Expected::Rows, FromStage::Rows(rows)) => return self.pass(io, link + 1, rows.0),
                (Expected::Rows, answer) => return Some(Told::Lost(format!("a step is answered with {answer:?}"))),
                (Expected::Part(mut part), answer) => {
                    if let Err(reason) = part.add(answer) {
                        return Some(Told::Lost(reason));
                    }
                    if !part.is_whole() {
                        self.links[link].expected.push_front(Expected::Part(part));
                        continue;
                    }
                    self.parts[link].push(part.into_bytes());
                    if self.has_all_parts(io) {
                        return Some(Told::Parts);
                    }
                }
            }
        }
        None
    }

    fn has_all_parts(&self, io: &Io) -> bool {
        let is_whole = |parts: &Vec<Vec<u8>>| parts.len() == self.reading.len();
        if io.has(Mutation::PublishHalfBlock) { self.parts.iter().any(is_whole) } else { self.parts.iter().all(is_whole) }
    }

    /// Asks for everything that a stage has not answered.
    fn ask_again(&mut self, io: &mut Io, link: usize) {
        let rows = self.links[link].rows.clone();
        let missing = self.links[link].expected.iter().filter(|expected| matches!(expected, Expected::Part(_))).count();
        if self.links[link].expected.iter().any(|expected| matches!(expected, Expected::Rows)) {
            self.send(io, link, ToStage::Step(Batch { chunks: self.batch.clone(), rows: Encoded(rows) }));
        }
        for at in self.reading.len().saturating_sub(missing)..self.reading.len() {
            self.send(io, link, ToStage::Read { block: self.reading[at] });
        }
    }

    fn send(&self, io: &mut Io, link: usize, message: ToStage) {
        if let LinkState::Greeting(conn) | LinkState::Up(conn) = self.links[link].state {
            io.send(conn, SERVER, Packet::ToStage(Box::new(message)));
        }
    }

    fn find(&self, conn: ConnId) -> Option<usize> {
        self.links.iter().position(|link| match link.state {
            LinkState::Connecting(at) | LinkState::Greeting(at) | LinkState::Ready(at) | LinkState::Up(at) => at == conn,
            LinkState::Down => false,
        })
    }

    fn down(&mut self, io: &mut Io, link: usize) {
        self.links[link].state = LinkState::Down;
        io.timer(self.head, RETRY, Timer::Meet(link));
    }
}

/// A stage's own key, without which its part of a block is another stage's.
fn key(stage: Stage) -> u64 {
    mix(u64::from(stage.index))
}

/// A number that went through a part that should have the same: another one if it has not.
fn agreed(number: u64, own: u64) -> u64 {
    if number == own { number } else { mix(number ^ mix(own)) }
}

fn encode(block: Bytes, key: u64) -> Vec<u8> {
    bytes_of(&block.unwrap_or_default().map(|word| word ^ key))
}

fn decode(bytes: &[u8], key: u64) -> Bytes {
    let block: Block = words(bytes).try_into().ok()?;
    Some(block.map(|word| word ^ key))
}

fn bytes_of(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn words(bytes: &[u8]) -> Vec<u64> {
    bytes.as_chunks().0.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_whole_only_with_every_stages_part() {
        let own: Block = std::array::from_fn(|at| mix(at as u64));
        let mut group = Group::new(Process::Stage(StageIndex(9)), &[StageIndex(0), StageIndex(1)], LayoutFingerprint([1; 16]), 4);
        let of = |stage: u32| encode(Some(own), key(Stage { index: stage, count: 3 }));
        group.parts = vec![vec![of(1)], vec![of(2)]];
        assert_eq!(group.whole(0, Some(own)), Some(own));
        for wrong in [vec![vec![of(1)], vec![]], vec![vec![of(2)], vec![of(1)]], vec![vec![of(1)], vec![of(1)]]] {
            group.parts = wrong;
            assert_ne!(group.whole(0, Some(own)), Some(own));
        }
    }
}
