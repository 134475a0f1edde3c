//! Faults that may happen to processes: each is one small change of the world.

use super::{CoordinatorIndex, Event, Process, State, Timer, World, disk::Health, network::SERVER};
use crate::{
    faults::{
        mutation::Mutation,
        plan::{Change, Cut},
    },
    random::Random,
};
use std::time::Duration;

impl World {
    /// Applies a change of the plan.
    pub(super) fn trouble(&mut self, number: usize) {
        let change = self.plan[number].change.clone();
        self.io.note(|| format!("*** {change:?}"));
        match change {
            Change::Crash { process, silently } => self.crash(process, silently),
            Change::Restart { process } => self.restart(process),
            Change::Pause { process } => self.pause(process),
            Change::Resume { process } => self.resume(process),
            Change::Drain { process } => self.drain(process, super::EXIT),
            Change::Cut(Cut { from, to }) => {
                self.io.network.cuts.insert((from, to));
                self.io.review();
            }
            Change::Heal(Cut { from, to }) => {
                self.io.network.cuts.remove(&(from, to));
                self.io.review();
            }
            Change::Break { process, control } => self.break_links(process, control),
            Change::Clock { process, ppm, jump } => {
                let now = self.io.now;
                self.io.life_mut(process).clock.change(now, ppm, jump);
            }
            Change::FlipSlot { pool } => {
                let (slots, arena) = (self.blueprint.pool.slots, self.pools[pool.0].arena);
                let (slot, bit) = (self.random().between(0, slots - 1), self.random().between(0, 1023));
                self.io.arena(arena).flip(slot, bit);
            }
            Change::FlipDisk { pool } => {
                let mut random = Random::new(self.random().draw());
                if let Some(disk) = &mut self.pools[pool.0].disk {
                    disk.flip(&mut random);
                }
            }
            Change::Disk { pool, health } => self.set_health(pool.0, health),
            Change::Confuse { process } => self.confuse(process),
        }
    }

    fn random(&mut self) -> &mut Random {
        &mut self.io.faulty.as_mut().expect("trouble comes to faulty worlds").random
    }

    fn set_health(&mut self, pool: usize, health: Health) {
        if let Some(disk) = &mut self.pools[pool].disk {
            disk.health = health;
        }
    }

    /// Ends the process. If `silently`, its host fails with it, so that no peer is notified.
    pub(super) fn crash(&mut self, process: Process, silently: bool) {
        let life = self.io.life_mut(process);
        if life.state == State::Down {
            return;
        }
        life.state = State::Down;
        life.incarnation += 1;
        let deferred = std::mem::take(&mut life.deferred);
        for (conn, end) in self.io.network.open_ends(process) {
            self.io.close(conn, end, silently);
        }
        self.io.review();
        if let Process::Pool(pool) = process {
            let mut random = Random::new(self.random().draw());
            self.pools[pool.0].disk.iter_mut().for_each(|disk| disk.tear(&mut random));
        }
        if let Process::Coordinator(index) = process {
            let mut broken = self.readers_at(index);
            for event in deferred {
                match event {
                    Event::Arrive(number) => broken.push(number),
                    Event::Leave(_) => self.io.after(Duration::ZERO, event),
                    _ => {}
                }
            }
            broken.into_iter().for_each(|number| self.broken(number));
        }
    }

    /// Starts the process again: a new process with the same name and address.
    pub(super) fn restart(&mut self, process: Process) {
        let now = self.io.now;
        let life = self.io.life_mut(process);
        if life.state != State::Down {
            return;
        }
        life.state = State::Running;
        life.clock.restart(now);
        self.io.enter(process);
        let coordinators = self.coordinators.len();
        match process {
            Process::Coordinator(index) => self.restart_coordinator(index),
            Process::Worker(index) => {
                self.workers[index.0] = self.blueprint.worker(&self.io, index, coordinators);
                self.start_worker(index, super::HEARTBEAT);
            }
            Process::Pool(index) => {
                let disk = self.pools[index.0].disk.take();
                self.pools[index.0] = self.blueprint.pool_node(&mut self.io, index, coordinators, disk);
                self.start_pool(index);
            }
            Process::Stage(index) => self.stages[index.0] = self.blueprint.stage(index),
        }
    }

    fn restart_coordinator(&mut self, index: CoordinatorIndex) {
        let old = &self.coordinators[index.0];
        let again = self.io.has(Mutation::ReuseEpoch);
        // Production draws it at random.
        let id_base = if again { old.id_base } else { old.id_base + ((self.coordinators.len() as u64) << 32) };
        (self.closed, self.warnings) = (self.closed + old.closed, self.warnings + old.warnings);
        self.coordinators[index.0] = self.blueprint.coordinator(index, id_base);
        self.start_coordinator(index);
    }

    fn pause(&mut self, process: Process) {
        let life = self.io.life_mut(process);
        if life.state == State::Running {
            life.state = State::Paused;
            self.io.review();
        }
    }

    pub(super) fn resume(&mut self, process: Process) {
        let life = self.io.life_mut(process);
        if life.state == State::Paused {
            life.state = State::Running;
            for event in std::mem::take(&mut life.deferred) {
                self.io.after(Duration::ZERO, event);
            }
            self.io.review();
        }
    }

    /// SIGTERM: the process hands its work over, and ends within `exit`.
    pub(super) fn drain(&mut self, process: Process, exit: Duration) {
        if self.io.life(process).state != State::Running {
            return;
        }
        self.io.enter(process);
        match process {
            Process::Worker(worker) => self.workers[worker.0].drain(&mut self.io),
            Process::Pool(pool) => self.pools[pool.0].leave(&mut self.io),
            Process::Coordinator(_) | Process::Stage(_) => {}
        }
        self.io.timer(process, exit, Timer::Exit);
    }

    /// Breaks one of a process's connections, or all to coordinators; both ends notice.
    fn break_links(&mut self, process: Process, control: bool) {
        let mut ends = self.io.network.open_ends(process);
        if control {
            ends.retain(|&(conn, _)| matches!(self.io.network.end(conn, SERVER).process, Process::Coordinator(_)));
        } else if !ends.is_empty() {
            ends = vec![ends[self.random().between(0, ends.len() as u32 - 1) as usize]];
        }
        for (conn, end) in ends {
            for at in [end, 1 - end] {
                self.io.after(Duration::ZERO, Event::Ended { conn, at });
            }
        }
    }

    fn confuse(&mut self, process: Process) {
        if self.io.life(process).state != State::Running {
            return;
        }
        self.io.enter(process);
        if let Process::Worker(worker) = process {
            self.workers[worker.0].uplink().repeat_stale(&mut self.io);
        }
    }
}
