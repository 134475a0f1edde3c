//! The operator's automation, which starts and drains workers to match the number that the coordinators want.

use super::{Event, Process, State, WorkerIndex, World};
use crate::outcome::Workers;
use std::time::Duration;
use tidemill_cluster::autoscale::Wanted;

/// Workers by index, with the state of each.
pub(crate) struct Scaling {
    /// The time from the decision until the process runs.
    start: Duration,
    phases: Vec<Phase>,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Phase {
    /// The worker is off, and its device is free for others.
    Off,
    Starting,
    On,
    Draining,
}

/// The time after which a draining worker has ended its step and handed its work over.
const DRAIN: Duration = Duration::from_secs(5);

impl World {
    /// Sets up autoscaling, with the workers of the floor running.
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

    /// Whether a worker runs from the start.
    pub(super) fn runs_at_first(&self, worker: WorkerIndex) -> bool {
        self.scaling.as_ref().is_none_or(|scaling| scaling.phases[worker.0] == Phase::On)
    }

    /// The workers whose devices are occupied now.
    pub(super) fn held_workers(&self) -> Workers {
        let mut held = Workers::default();
        for (number, worker) in self.blueprint.workers.iter().enumerate() {
            let is_held = self.scaling.as_ref().is_none_or(|scaling| scaling.phases[number] != Phase::Off);
            *held.of_mut(worker.decodes) += u32::from(is_held);
        }
        held
    }

    /// Brings the number of workers nearer to the wanted one.
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

    /// Records that a worker's process runs, with its weights loaded.
    pub(super) fn started(&mut self, worker: WorkerIndex) {
        if let Some(scaling) = &mut self.scaling {
            scaling.phases[worker.0] = Phase::On;
        }
        self.restart(Process::Worker(worker));
    }
}
