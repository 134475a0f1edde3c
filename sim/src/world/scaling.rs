//! What an operator's machinery does about the number of workers that the coordinators want: it starts some, or drains and ends some.

use super::{Event, Process, State, WorkerIndex, World};
use crate::outcome::Workers;
use std::time::Duration;
use tidemill_cluster::autoscale::Wanted;

/// Workers by index, and what was done about each.
pub(crate) struct Scaling {
    /// From the decision until the process runs.
    start: Duration,
    phases: Vec<Phase>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// Its device is free for others.
    Off,
    Starting,
    On,
    Draining,
}

/// A worker that drains has ended its step and handed its work over by then.
const DRAIN: Duration = Duration::from_secs(5);

impl World {
    /// At the start those of the floor run.
    pub(super) fn begin_scaling(&mut self) {
        let Some(settings) = &self.blueprint.settings.cluster.autoscale else { return };
        let start = Duration::from_secs_f64(settings.start_s.max(0.0));
        let mut left = Workers { prefill: settings.prefill_floor, decode: settings.decode_floor.max(1) };
        let mut phase = |decodes: bool| {
            let left = left.of_mut(decodes);
            *left = left.checked_sub(1)?;
            Some(Phase::On)
        };
        let phases = self.blueprint.workers.iter().map(|worker| phase(worker.decodes).unwrap_or(Phase::Off)).collect();
        self.scaling = Some(Scaling { start, phases });
    }

    /// Whether a worker runs from the start on.
    pub(super) fn runs_at_first(&self, worker: WorkerIndex) -> bool {
        self.scaling.as_ref().is_none_or(|scaling| scaling.phases[worker.0] == Phase::On)
    }

    /// Workers whose devices nobody else can use now.
    pub(super) fn held_workers(&self) -> Workers {
        let mut held = Workers::default();
        for (number, worker) in self.blueprint.workers.iter().enumerate() {
            let is_held = self.scaling.as_ref().is_none_or(|scaling| scaling.phases[number] != Phase::Off);
            *held.of_mut(worker.decodes) += u32::from(is_held);
        }
        held
    }

    /// Brings the number of workers nearer to what is wanted.
    pub(super) fn scale(&mut self) {
        let Some(scaling) = &mut self.scaling else { return };
        for (number, phase) in scaling.phases.iter_mut().enumerate() {
            if *phase == Phase::Draining && self.io.life(Process::Worker(WorkerIndex(number))).state == State::Down {
                *phase = Phase::Off;
            }
        }
        let all = self.coordinators.iter().filter_map(|coordinator| coordinator.cluster.wanted());
        let largest = |a: Wanted, b: Wanted| Wanted { prefill: a.prefill.max(b.prefill), decode: a.decode.max(b.decode) };
        if let Some(wanted) = all.reduce(largest) {
            self.scale_role(false, wanted.prefill);
            self.scale_role(true, wanted.decode);
        }
    }

    fn scale_role(&mut self, decodes: bool, wanted: u32) {
        let Some(scaling) = &mut self.scaling else { return };
        let blueprint = &self.blueprint;
        let workers = || (0..blueprint.workers.len()).filter(move |&number| blueprint.workers[number].decodes == decodes);
        let there = workers().filter(|&number| matches!(scaling.phases[number], Phase::Starting | Phase::On)).count() as u32;
        let (more, fewer) = (wanted.saturating_sub(there) as usize, there.saturating_sub(wanted) as usize);
        let starting: Vec<usize> = workers().filter(|&number| scaling.phases[number] == Phase::Off).take(more).collect();
        let leaving: Vec<usize> = workers().rev().filter(|&number| scaling.phases[number] == Phase::On).take(fewer).collect();
        for &number in &starting {
            scaling.phases[number] = Phase::Starting;
            self.io.after(scaling.start, Event::Started(WorkerIndex(number)));
        }
        for &number in &leaving {
            scaling.phases[number] = Phase::Draining;
        }
        for number in leaving {
            self.drain(Process::Worker(WorkerIndex(number)), DRAIN);
        }
    }

    /// A worker's process runs, with its weights loaded.
    pub(super) fn started(&mut self, worker: WorkerIndex) {
        if let Some(scaling) = &mut self.scaling {
            scaling.phases[worker.0] = Phase::On;
        }
        self.restart(Process::Worker(worker));
    }
}
