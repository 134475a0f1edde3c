//! The registry: messages of other coordinators, damaged, doubled, late, or to the wrong one; and the contents of a replica's disk.

use crate::{
    dice::Dice,
    mutate::bytes,
    target::{Subject, Target},
};
use std::{collections::BTreeMap, time::Duration};
use tidemill_proto::ids::{Epoch, Instance};
use tidemill_proto::message::Role;
use tidemill_registry::{
    command::{Command, NewMember, ReplicaId},
    disk::{Found, Write},
    replica::{Action, Replica, Settings},
    state::State,
};

pub(crate) const REGISTRY: Target = Target {
    name: "registry",
    about: "messages between coordinators' replicas, and a replica's storage",
    open,
    cpu_max: Duration::from_secs(5),
    bytes_max: 256 << 20,
    short: 300,
};

const NAMES: [&str; 3] = ["a", "b", "c"];

fn open() -> anyhow::Result<Box<dyn Subject>> {
    Ok(Box::new(|dice: &mut Dice| {
        let mut group = Group::new(dice);
        for _ in 0..dice.below(300) {
            group.step(dice)?;
        }
        Ok(())
    }))
}

/// Three coordinators, and all messages that were ever sent between them.
struct Group {
    disks: Vec<Disk>,
    /// The running replicas; `None` for one that did not start from its disk.
    replicas: Vec<Option<Replica>>,
    said: Vec<(usize, usize, Vec<u8>)>,
    queued: Vec<(usize, usize, Vec<u8>)>,
    /// The percentage of messages that are damaged.
    damage: usize,
}

struct Disk {
    found: Found,
    entries: BTreeMap<u64, Vec<u8>>,
}

impl Group {
    fn new(dice: &mut Dice) -> Self {
        let disk = |number: usize| Disk {
            found: Found { id: ReplicaId(10 + number as u64), boot: 1, hard_state: None, snapshot: None, entries: Vec::new() },
            entries: BTreeMap::new(),
        };
        let mut group = Self {
            disks: (0..NAMES.len()).map(disk).collect(),
            replicas: Vec::new(),
            said: Vec::new(),
            queued: Vec::new(),
            damage: *dice.pick(&[0, 2, 10, 50]),
        };
        group.replicas = (0..NAMES.len()).map(|number| group.opened(number)).collect();
        // Usually, they find each other first.
        for _ in 0..dice.below(400) {
            for number in 0..NAMES.len() {
                group.tick(number);
            }
            while let Some((from, to, bytes)) = group.queued.pop() {
                group.deliver(from, to, &bytes);
            }
        }
        group
    }

    fn opened(&self, number: usize) -> Option<Replica> {
        let peers = NAMES.iter().enumerate().filter(|(other, _)| *other != number).map(|(_, name)| (*name).to_owned()).collect();
        let settings = Settings { name: NAMES[number].to_owned(), peers, seed: number as u64, group: 77, first_epoch: 1 };
        Replica::open(settings, &self.disks[number].found).ok()
    }

    fn step(&mut self, dice: &mut Dice) -> Result<(), String> {
        let number = dice.below(NAMES.len());
        match dice.below(20) {
            0..=7 => self.tick(number),
            8..=14 => {
                if !self.queued.is_empty() {
                    let (from, to, mut bytes) = self.queued.swap_remove(dice.below(self.queued.len()));
                    if dice.below(100) < self.damage {
                        bytes::mutate(dice, &mut bytes);
                    }
                    let from = if dice.one_in(50) { number } else { from };
                    let to = if dice.one_in(50) { dice.below(NAMES.len()) } else { to };
                    dice.show(&format!("{from} to {to}"), bytes.escape_ascii().to_string().as_bytes());
                    self.deliver(from, to, &bytes);
                }
            }
            15 => {
                if !self.said.is_empty() {
                    let (from, to, bytes) = self.said[dice.below(self.said.len())].clone();
                    self.deliver(from, to, &bytes);
                }
            }
            16 | 17 => {
                let command = command(dice);
                if let Some(replica) = &mut self.replicas[number] {
                    let _ = replica.propose(command, 20);
                }
                self.act(number);
            }
            18 => {
                // It crashes, and restarts from its disk, or from a part of it.
                let disk = &mut self.disks[number];
                disk.found.boot += 1;
                disk.found.entries = disk.entries.values().cloned().collect();
                if dice.below(100) < self.damage {
                    let found = &mut disk.found;
                    match dice.below(4) {
                        0 => found.hard_state.iter_mut().for_each(|bytes| bytes::mutate(dice, bytes)),
                        1 => found.snapshot.iter_mut().for_each(|bytes| bytes::mutate(dice, bytes)),
                        2 => drop(found.entries.pop()),
                        _ => {
                            if !found.entries.is_empty() {
                                let at = dice.below(found.entries.len());
                                bytes::mutate(dice, &mut found.entries[at]);
                            }
                        }
                    }
                }
                dice.show(&format!("{number} comes back to"), format!("{:?}", self.disks[number].found).as_bytes());
                self.replicas[number] = self.opened(number);
                self.act(number);
            }
            _ => {
                let mut state = self.disks[number].found.snapshot.clone().unwrap_or_default();
                bytes::mutate(dice, &mut state);
                if let Ok(state) = State::decode(&state) {
                    let _ = state.encode();
                }
            }
        }
        Ok(())
    }

    fn tick(&mut self, number: usize) {
        if let Some(replica) = &mut self.replicas[number] {
            replica.tick();
        }
        self.act(number);
    }

    fn deliver(&mut self, from: usize, to: usize, bytes: &[u8]) {
        if let Some(replica) = &mut self.replicas[to] {
            let _ = replica.message(NAMES[from], bytes);
        }
        self.act(to);
    }

    fn act(&mut self, number: usize) {
        let Some(replica) = &mut self.replicas[number] else { return };
        while let Some(action) = replica.poll() {
            match action {
                Action::Write(writes) => {
                    self.disks[number].write(writes);
                    replica.written();
                }
                Action::Send { to, bytes } => {
                    let to = NAMES.iter().position(|name| *name == to).unwrap_or(number);
                    if self.said.len() < 500 {
                        self.said.push((number, to, bytes.clone()));
                    }
                    if self.queued.len() < 500 {
                        self.queued.push((number, to, bytes));
                    }
                }
                Action::Done { .. } | Action::Changed | Action::Warn(_) | Action::Halted(_) => {}
            }
        }
        replica.check_integrity();
    }
}

impl Disk {
    fn write(&mut self, writes: Vec<Write>) {
        for write in writes {
            match write {
                Write::HardState(bytes) => self.found.hard_state = Some(bytes),
                Write::Entries { from, entries } => {
                    self.entries.split_off(&from);
                    self.entries.extend((from..).zip(entries));
                }
                Write::Snapshot { bytes, entries_from } => {
                    self.found.snapshot = Some(bytes);
                    self.entries = self.entries.split_off(&entries_from);
                }
            }
        }
    }
}

fn command(dice: &mut Dice) -> Command {
    let kind = (*dice.pick(&["alias", "rollout", "denied", ""])).to_owned();
    let key = if dice.one_in(4) { dice.odd_text() } else { "x".to_owned() };
    let expected = dice.one_in(3).then(|| dice.below(5) as u64);
    match dice.below(4) {
        0 => {
            let name = dice.odd_text();
            Command::Register(NewMember { instance: Instance(dice.below(5) as u64), name, role: Role::Decode })
        }
        1 => Command::Forget { epoch: Epoch(dice.below(5) as u64) },
        2 => Command::Put { kind, key, value: dice.odd_text().into_bytes(), expected },
        _ => Command::Delete { kind, key, expected },
    }
}
