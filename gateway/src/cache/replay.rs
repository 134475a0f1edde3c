//! Answers recorded as they are made, so that a repeated request gets them from the beginning, or from the point where its stream broke
//! off, instead of computing them again.
//!
//! A [`Recordings`] holds the frames; each listener has a [`Seat`]. It knows no clock and no socket: time is an argument, and frames are
//! whatever the shell sends. Bounded by [`Limits`], which tenants [share](crate::base::room): the oldest recordings that have ended go
//! first. If even that makes no room, a recording *passes*: it can no longer be joined, it keeps only what its listeners have not read yet,
//! and its maker waits for them.

use crate::base::room::Shares;
use serde::Serialize;
use std::{
    collections::{BTreeMap, BTreeSet, HashMap, VecDeque, hash_map::Entry},
    time::Duration,
};

#[cfg(test)]
mod tests;

/// A digest of a key with its scope, of a body, of an answer's name with its scope, or of a tenant.
pub type Digest = [u8; 32];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The maximum size of all frames together; 0 turns recording off.
    pub bytes: u64,
    pub recordings: usize,
    /// The time for which a completed recording is kept.
    pub keep: Duration,
    /// The time for which a recording continues without a listener.
    pub grace: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self { bytes: 64 << 20, recordings: 4096, keep: Duration::from_secs(600), grace: Duration::from_secs(30) }
    }
}

/// A listener's place in a recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Seat {
    pub recording: u64,
    listener: u64,
}

/// The result of looking a request up.
#[derive(Debug, PartialEq, Eq)]
pub enum Lookup<T> {
    /// A new recording, which the caller has to make.
    Begun(Seat),
    Joined {
        seat: Seat,
        tag: T,
        ended: bool,
    },
    /// The key belongs to a different body.
    OtherBody,
    /// The request must be computed without a recording.
    NoRoom,
}

#[derive(Debug, PartialEq, Eq)]
pub enum Read<F> {
    Frame(F),
    /// More frames will come.
    Wait,
    End,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Append {
    Taken,
    /// The frame was not accepted: listeners have to read first.
    Full,
}

/// Counters for operators.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Counts {
    pub recordings: usize,
    pub running: usize,
    pub listeners: usize,
    pub bytes: u64,
    /// Recordings evicted before their time to make room.
    pub evicted: u64,
    /// Recordings whose time was over.
    pub expired: u64,
    /// Running recordings that were given up, since no listener returned.
    pub abandoned: u64,
    /// Running recordings that can no longer be joined, for want of room.
    pub passed: u64,
}

/// All recordings. `T` is the shell's data for each, `F` is a frame.
#[derive(Debug)]
pub struct Recordings<T, F> {
    limits: Limits,
    recordings: HashMap<u64, Recording<T, F>>,
    by_key: HashMap<Digest, u64>,
    by_name: HashMap<Digest, u64>,
    /// Completed recordings, oldest first.
    ended: BTreeSet<(Duration, u64)>,
    /// Running recordings without a listener, by the time when they are given up.
    abandoned: BTreeSet<(Duration, u64)>,
    /// Bytes of each tenant's recordings.
    bytes: Shares<Digest>,
    places: Shares<Digest>,
    next: u64,
    counts: Counts,
}

#[derive(Debug)]
struct Recording<T, F> {
    tenant: Digest,
    key: Digest,
    name: Option<Digest>,
    body: Digest,
    tag: T,
    /// Whether it can be joined.
    listed: bool,
    /// Whether its key came with another body.
    is_misused: bool,
    /// The number of dropped frames before the first that is kept: all listeners have read them, and no new one can join.
    dropped: usize,
    frames: VecDeque<Frame<F>>,
    bytes: u64,
    /// The number of events so far.
    events: u64,
    listeners: BTreeMap<u64, Listener>,
    ended: Option<Duration>,
    /// The time at which it is given up, unless a listener joins.
    given_up_at: Option<Duration>,
}

#[derive(Debug)]
struct Frame<F> {
    frame: F,
    bytes: u64,
    /// The number of the event; for other frames, that of the event before.
    number: Option<u64>,
}

#[derive(Debug)]
struct Listener {
    /// The number of frames read.
    read: usize,
    /// Events up to this one are skipped.
    after: Option<u64>,
}

impl<T: Clone, F: Clone> Recordings<T, F> {
    pub fn new(limits: Limits) -> Self {
        Self {
            limits,
            recordings: HashMap::new(),
            by_key: HashMap::new(),
            by_name: HashMap::new(),
            ended: BTreeSet::new(),
            abandoned: BTreeSet::new(),
            bytes: Shares::default(),
            places: Shares::default(),
            next: 0,
            counts: Counts::default(),
        }
    }

    /// Joins the recording of a key, or starts one, for which `tenant` has to make room. The listener has all events up to `after`.
    pub fn ask(&mut self, tenant: Digest, key: Digest, body: Digest, after: Option<u64>, tag: impl FnOnce() -> T) -> Lookup<T> {
        if let Some(&id) = self.by_key.get(&key) {
            let recording = self.recordings.get_mut(&id).expect("a listed recording exists");
            if recording.body != body {
                recording.is_misused = true;
                return Lookup::OtherBody;
            }
            return self.sit(id, after);
        }
        while self.recordings.len() >= self.limits.recordings {
            if !self.evict(&self.places.losers(self.limits.recordings as u64, &tenant, 1)) {
                return Lookup::NoRoom;
            }
        }
        while self.bytes.total() >= self.limits.bytes {
            if !self.evict(&self.bytes.losers(self.limits.bytes, &tenant, 1)) {
                return Lookup::NoRoom;
            }
        }
        let id = self.take_number();
        let recording = Recording {
            tenant,
            key,
            name: None,
            body,
            tag: tag(),
            listed: true,
            is_misused: false,
            dropped: 0,
            frames: VecDeque::new(),
            bytes: 0,
            events: 0,
            listeners: BTreeMap::new(),
            ended: None,
            given_up_at: None,
        };
        self.recordings.insert(id, recording);
        self.places.add(&tenant, 1);
        self.by_key.insert(key, id);
        match self.sit(id, after) {
            Lookup::Joined { seat, .. } => Lookup::Begun(seat),
            other => other,
        }
    }

    /// Whether a key has a recording that can be joined.
    pub fn has(&self, key: &Digest) -> bool {
        self.by_key.contains_key(key)
    }

    /// Whether a key has a recording, and has come with no other body so far. Then a request with it is probably a repeat.
    pub fn repeats(&self, key: &Digest) -> bool {
        self.by_key.get(key).is_some_and(|id| !self.recordings[id].is_misused)
    }

    /// Joins the recording of an answer with this name.
    pub fn find(&mut self, name: &Digest, after: Option<u64>) -> Option<Lookup<T>> {
        let id = *self.by_name.get(name)?;
        Some(self.sit(id, after))
    }

    /// Sets the answer's name once it is known.
    pub fn name(&mut self, id: u64, name: Digest) {
        let Some(recording) = self.recordings.get_mut(&id).filter(|recording| recording.listed && recording.name.is_none()) else { return };
        if let Entry::Vacant(entry) = self.by_name.entry(name) {
            entry.insert(id);
            recording.name = Some(name);
        }
    }

    /// The number of a recording's next event.
    pub fn next_event(&self, id: u64) -> u64 {
        self.recordings.get(&id).map_or(0, |recording| recording.events)
    }

    /// Adds a frame of this size. Frames that are not events have no number.
    pub fn append(&mut self, id: u64, frame: F, bytes: u64, event: bool) -> Append {
        let Some(tenant) = self.recordings.get(&id).map(|recording| recording.tenant) else { return Append::Taken };
        while self.bytes.total() + bytes > self.limits.bytes {
            if self.evict(&self.bytes.losers(self.limits.bytes, &tenant, bytes)) {
                continue;
            }
            self.unlist(id, true);
            self.trim(id);
            match self.recordings.get(&id) {
                Some(recording) if !recording.frames.is_empty() => return Append::Full,
                _ => break,
            }
        }
        let Some(recording) = self.recordings.get_mut(&id).filter(|recording| recording.ended.is_none()) else { return Append::Taken };
        recording.events += u64::from(event);
        recording.frames.push_back(Frame { frame, bytes, number: recording.events.checked_sub(1) });
        recording.bytes += bytes;
        self.bytes.add(&tenant, bytes);
        Append::Taken
    }

    /// Ends a recording. A `whole` answer can be repeated; any other is dropped once its listeners have read it.
    pub fn end(&mut self, now: Duration, id: u64, whole: bool) {
        let Some(recording) = self.recordings.get_mut(&id).filter(|recording| recording.ended.is_none()) else { return };
        recording.ended = Some(now);
        if let Some(at) = recording.given_up_at.take() {
            self.abandoned.remove(&(at, id));
        }
        self.ended.insert((now, id));
        if !whole {
            self.unlist(id, false);
        }
        self.trim(id);
    }

    /// The next frame for a listener.
    pub fn read(&mut self, seat: Seat) -> Read<F> {
        let Some(recording) = self.recordings.get_mut(&seat.recording) else { return Read::End };
        let Some(listener) = recording.listeners.get_mut(&seat.listener) else { return Read::End };
        let read = loop {
            let Some(frame) = recording.frames.get(listener.read - recording.dropped) else {
                break if recording.ended.is_some() { Read::End } else { Read::Wait };
            };
            listener.read += 1;
            if listener.after.is_none() || frame.number > listener.after {
                break Read::Frame(frame.frame.clone());
            }
        };
        self.trim(seat.recording);
        read
    }

    /// Removes a listener. After the last one, a running recording waits a while for one to return.
    pub fn leave(&mut self, now: Duration, seat: Seat) {
        let id = seat.recording;
        let Some(recording) = self.recordings.get_mut(&id) else { return };
        if recording.listeners.remove(&seat.listener).is_some() && recording.listeners.is_empty() && recording.ended.is_none() {
            // A recording that cannot be joined need not wait.
            let at = if recording.listed { now + self.limits.grace } else { now };
            recording.given_up_at = Some(at);
            self.abandoned.insert((at, id));
        }
        self.trim(id);
    }

    /// Drops expired recordings. Returns running ones to which no listener returned: their makers must stop.
    pub fn expire(&mut self, now: Duration) -> Vec<T> {
        let mut given_up = Vec::new();
        while let Some(&(at, id)) = self.abandoned.first().filter(|(at, _)| *at <= now) {
            self.abandoned.remove(&(at, id));
            if let Some(recording) = self.recordings.get_mut(&id) {
                recording.given_up_at = None;
                given_up.push(recording.tag.clone());
            }
            self.unlist(id, false);
            self.counts.abandoned += 1;
        }
        let old: Vec<u64> = self.ended.iter().take_while(|(at, _)| *at + self.limits.keep <= now).map(|(_, id)| *id).collect();
        for id in old {
            if self.unlist(id, false) {
                self.counts.expired += 1;
            }
            self.trim(id);
        }
        given_up
    }

    pub fn counts(&self) -> Counts {
        Counts {
            recordings: self.recordings.len(),
            running: self.recordings.len() - self.ended.len(),
            listeners: self.recordings.values().map(|recording| recording.listeners.len()).sum(),
            bytes: self.bytes.total(),
            ..self.counts
        }
    }

    pub fn bytes(&self) -> u64 {
        self.bytes.total()
    }

    fn sit(&mut self, id: u64, after: Option<u64>) -> Lookup<T> {
        let listener = self.take_number();
        let recording = self.recordings.get_mut(&id).expect("what is listed is here");
        if let Some(at) = recording.given_up_at.take() {
            self.abandoned.remove(&(at, id));
        }
        recording.listeners.insert(listener, Listener { read: recording.dropped, after });
        Lookup::Joined { seat: Seat { recording: id, listener }, tag: recording.tag.clone(), ended: recording.ended.is_some() }
    }

    fn take_number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    /// Closes all recordings of a tenant to new listeners, and returns their number. A recording that still runs goes on for the listeners that
    /// it has.
    pub fn forget(&mut self, tenant: &Digest) -> u64 {
        let ids: Vec<_> = self.listed_of(tenant).collect();
        for id in &ids {
            self.unlist(*id, false);
            self.trim(*id);
        }
        ids.len() as u64
    }

    /// The number of a tenant's recordings that can be joined.
    pub fn held(&self, tenant: &Digest) -> u64 {
        self.listed_of(tenant).count() as u64
    }

    fn listed_of<'a>(&'a self, tenant: &'a Digest) -> impl Iterator<Item = u64> + 'a {
        self.recordings.iter().filter(move |(_, recording)| recording.listed && recording.tenant == *tenant).map(|(id, _)| *id)
    }

    /// Drops the oldest completed recording without a listener, from the first of these tenants that has one. Returns `false` if none has.
    fn evict(&mut self, losers: &[Digest]) -> bool {
        let oldest = |loser: &Digest| {
            let mut ended = self.ended.iter().map(|(_, id)| (*id, &self.recordings[id]));
            ended.find(|(_, recording)| recording.tenant == *loser && recording.listeners.is_empty()).map(|(id, _)| id)
        };
        let Some(id) = losers.iter().find_map(oldest) else { return false };
        self.unlist(id, false);
        self.trim(id);
        self.counts.evicted += 1;
        true
    }

    /// Closes the recording to new listeners. Returns `false` if it was closed before.
    fn unlist(&mut self, id: u64, for_room: bool) -> bool {
        let Some(recording) = self.recordings.get_mut(&id).filter(|recording| recording.listed) else { return false };
        recording.listed = false;
        self.by_key.remove(&recording.key);
        if let Some(name) = recording.name {
            self.by_name.remove(&name);
        }
        // Its grace time is over as well.
        if let Some(at) = &mut recording.given_up_at {
            self.abandoned.remove(&(*at, id));
            *at = Duration::ZERO;
            self.abandoned.insert((*at, id));
        }
        self.counts.passed += u64::from(for_room);
        true
    }

    /// Frees the frames that no listener can read any more.
    fn trim(&mut self, id: u64) {
        let Some(recording) = self.recordings.get_mut(&id).filter(|recording| !recording.listed) else { return };
        let end = recording.dropped + recording.frames.len();
        let read = recording.listeners.values().map(|listener| listener.read).min().unwrap_or(end);
        while recording.dropped < read {
            let frame = recording.frames.pop_front().expect("read frames were here");
            recording.dropped += 1;
            recording.bytes -= frame.bytes;
            self.bytes.take(&recording.tenant, frame.bytes);
        }
        if let (Some(at), true) = (recording.ended, recording.listeners.is_empty()) {
            self.places.take(&recording.tenant, 1);
            self.ended.remove(&(at, id));
            self.recordings.remove(&id);
        }
    }

    /// Panics if the parts contradict each other. For tests.
    pub fn check_integrity(&self) {
        let all = self.recordings.values();
        assert_eq!(self.bytes.total(), all.clone().map(|recording| recording.bytes).sum::<u64>());
        assert_eq!(self.places.total(), all.len() as u64);
        for tenant in all.clone().map(|recording| &recording.tenant) {
            let of_tenant = || all.clone().filter(|recording| recording.tenant == *tenant);
            assert_eq!(self.places.held(tenant), of_tenant().count() as u64);
            assert_eq!(self.bytes.held(tenant), of_tenant().map(|recording| recording.bytes).sum::<u64>());
        }
        assert_eq!(self.by_key.len(), all.clone().filter(|recording| recording.listed).count());
        assert_eq!(self.ended.len(), all.clone().filter(|recording| recording.ended.is_some()).count());
        assert_eq!(self.abandoned.len(), all.filter(|recording| recording.given_up_at.is_some()).count());
        assert!(self.recordings.len() <= self.limits.recordings);
        for (key, id) in &self.by_key {
            assert_eq!(self.recordings[id].key, *key);
        }
        for (name, id) in &self.by_name {
            assert!(self.recordings[id].listed && self.recordings[id].name == Some(*name));
        }
        for (id, recording) in &self.recordings {
            assert_eq!(recording.bytes, recording.frames.iter().map(|frame| frame.bytes).sum::<u64>());
            assert!(recording.listed || recording.ended.is_none() || !recording.listeners.is_empty(), "{id} is nobody's");
            assert!(recording.given_up_at.is_none_or(|at| recording.listeners.is_empty() && self.abandoned.contains(&(at, *id))));
            assert!(recording.listeners.values().all(|listener| listener.read >= recording.dropped));
        }
    }
}
