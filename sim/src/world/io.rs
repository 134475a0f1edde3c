//! What every process reaches: time, messages to others, and bytes on links.

use super::{Event, PoolIndex, Transfer, WorkerIndex};
use crate::{
    flows::{Deadline, Flows, LinkIndex},
    queue::Queue,
    settings::NetworkSettings,
};
use std::{net::SocketAddr, time::Duration};
use tidemill_proto::{
    ids::Epoch,
    message::{ToWorker, WorkerEvent},
    pool::{FromPool, ToPool},
};

#[derive(Debug)]
pub(crate) struct Io {
    pub(crate) now: Duration,
    pub(crate) queue: Queue<Event>,
    flows: Flows<Transfer>,
    hosts: Vec<Nic>,
    /// By worker.
    buses: Vec<Bus>,
    /// By pool node: its host.
    pools: Vec<usize>,
    latency: Duration,
    local_latency: Duration,
    nic_bytes_per_s: f64,
}

#[derive(Debug)]
struct Nic {
    out: LinkIndex,
    into: LinkIndex,
}

/// Between a worker's devices and its host's memory and network.
#[derive(Debug)]
struct Bus {
    host: usize,
    out: LinkIndex,
    into: LinkIndex,
}

impl Io {
    pub(crate) fn new(settings: &NetworkSettings) -> Self {
        let micros = |us: f64| Duration::from_secs_f64(us.max(0.0) / 1e6);
        Self {
            now: Duration::ZERO,
            queue: Queue::default(),
            flows: Flows::default(),
            hosts: Vec::new(),
            buses: Vec::new(),
            pools: Vec::new(),
            latency: micros(settings.latency_us),
            local_latency: micros(settings.local_latency_us),
            nic_bytes_per_s: settings.nic_gb_per_s * 1e9,
        }
    }

    /// A host with a pool node.
    pub(crate) fn add_host(&mut self) -> PoolIndex {
        let (out, into) = (self.flows.add_link(self.nic_bytes_per_s), self.flows.add_link(self.nic_bytes_per_s));
        self.hosts.push(Nic { out, into });
        self.pools.push(self.hosts.len() - 1);
        PoolIndex(self.pools.len() - 1)
    }

    pub(crate) fn add_worker(&mut self, host: usize, bus_bytes_per_s: f64) -> WorkerIndex {
        let (out, into) = (self.flows.add_link(bus_bytes_per_s), self.flows.add_link(bus_bytes_per_s));
        self.buses.push(Bus { host, out, into });
        WorkerIndex(self.buses.len() - 1)
    }

    pub(crate) fn after(&mut self, delay: Duration, event: Event) {
        self.queue.push(self.now + delay, event);
    }

    pub(crate) fn tell_coordinator(&mut self, from: Epoch, event: WorkerEvent) {
        self.after(self.latency, Event::ToCoordinator { from, event: Box::new(event) });
    }

    pub(crate) fn tell_worker(&mut self, worker: WorkerIndex, message: ToWorker) {
        self.after(self.latency, Event::ToWorker { worker, message: Box::new(message) });
    }

    pub(crate) fn call_pool(&mut self, worker: WorkerIndex, pool: PoolIndex, message: ToPool) {
        self.after(self.between(worker, pool), Event::ToPool { worker, pool, message: Box::new(message) });
    }

    pub(crate) fn answer_worker(&mut self, pool: PoolIndex, worker: WorkerIndex, message: FromPool) {
        self.after(self.between(worker, pool), Event::FromPool { worker, pool, message: Box::new(message) });
    }

    pub(crate) fn is_near(&self, worker: WorkerIndex, pool: PoolIndex) -> bool {
        self.buses[worker.0].host == self.pools[pool.0]
    }

    fn between(&self, worker: WorkerIndex, pool: PoolIndex) -> Duration {
        if self.is_near(worker, pool) { self.local_latency } else { self.latency }
    }

    /// Sends a transfer's bytes on their way.
    pub(crate) fn transfer(&mut self, transfer: Transfer, bytes: u64) {
        let (worker, pool) = transfer.ends();
        let (bus, nic) = (&self.buses[worker.0], &self.hosts[self.pools[pool.0]]);
        let near = self.is_near(worker, pool);
        let links = match (&transfer, near) {
            (Transfer::Get { .. }, true) => vec![bus.into],
            (Transfer::Put { .. }, true) => vec![bus.out],
            (Transfer::Get { .. }, false) => vec![nic.out, self.hosts[bus.host].into, bus.into],
            (Transfer::Put { .. }, false) => vec![bus.out, self.hosts[bus.host].out, nic.into],
        };
        let deadlines = self.flows.start(self.now, links, bytes, transfer);
        self.await_all(deadlines);
    }

    /// A deadline has come: the transfer that has ended, if it still holds.
    pub(crate) fn transferred(&mut self, deadline: Deadline) -> Option<Transfer> {
        let (transfer, deadlines) = self.flows.end(self.now, deadline)?;
        self.await_all(deadlines);
        Some(transfer)
    }

    /// Bytes that left hosts over the network.
    pub(crate) fn network_bytes(&self) -> f64 {
        self.hosts.iter().map(|nic| self.flows.bytes(nic.out)).sum()
    }

    pub(crate) fn is_quiet(&self) -> bool {
        self.flows.is_idle()
    }

    fn await_all(&mut self, deadlines: Vec<Deadline>) {
        for deadline in deadlines {
            self.queue.push(deadline.at, Event::TransferDue(deadline));
        }
    }
}

/// Where a pool node's clients would connect: its number, as an address.
pub(crate) fn address(PoolIndex(pool): PoolIndex) -> SocketAddr {
    let [_, a, b, c] = (pool as u32).to_be_bytes();
    ([10, a, b, c], 1).into()
}

pub(crate) fn pool_at(address: SocketAddr) -> PoolIndex {
    let SocketAddr::V4(v4) = address else { unreachable!("pool nodes register the addresses above") };
    let [_, a, b, c] = v4.ip().octets();
    PoolIndex(u32::from_be_bytes([0, a, b, c]) as usize)
}
