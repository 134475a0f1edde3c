//! The devices: streams of work, events, graphs.
//!
//! All devices have one queue of ids, one memory and one lock; a stream and an event belong to the device whose context created them.
//!
//! Nothing runs when it is launched. Work runs when the host waits for it, or for work that must come after it, and then only as much as
//! necessary: as late as events and dependencies allow. Sometimes, by chance, other streams run first. So a missing wait shows as old or
//! unwritten data.

use crate::{
    exec,
    fault::{Fault, Kind},
    gemm::Product,
    memory::Memory,
    options::{Random, options},
    ptx::program::Kernel,
};
use std::{
    collections::{BTreeMap, VecDeque},
    sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError},
};

pub(crate) struct Device {
    pub(crate) memory: Memory,
    streams: BTreeMap<u64, Stream>,
    events: BTreeMap<u64, Event>,
    graphs: BTreeMap<u64, Graph>,
    /// The device of the present call.
    pub(crate) current: u32,
    /// Waits of streams for other devices so far.
    pub(crate) waits_across: u64,
    next_id: u64,
    pub(crate) random: Random,
    launches: u64,
    /// By device: the status with which every call for it fails after a fault.
    pub(crate) failed: Vec<Option<u32>>,
    /// Bytes of pinned memory of other owners.
    pub(crate) registered_bytes: u64,
    /// Pinned memory allocated here: start and layout.
    pub(crate) host_allocations: BTreeMap<u64, std::alloc::Layout>,
}

#[derive(Default)]
struct Stream {
    device: u32,
    queue: VecDeque<Work>,
    /// The number of works queued, and done, so far.
    queued: u64,
    done: u64,
    /// The works recorded into a graph, if the stream is being captured.
    capture: Option<Capture>,
    /// Whether it is one of a graph's, which ends with its work.
    is_of_a_graph: bool,
}

/// A stream's part of a recording.
struct Capture {
    /// The stream with which the recording began.
    root: u64,
    works: Vec<Work>,
}

struct Event {
    device: u32,
    record: Option<Record>,
}

/// An event's last record: the stream, and the number of its works to complete.
#[derive(Clone, Copy)]
struct Record {
    stream: u64,
    done: u64,
    /// The number is of works of a recording that began with this stream.
    capture: Option<u64>,
}

/// Recorded works of one stream or of several, of which the first is the one with which the recording began.
#[derive(Clone)]
struct Graph {
    lanes: Vec<Lane>,
}

#[derive(Clone)]
struct Lane {
    /// The recorded stream, by which waits of the graph name it.
    stream: u64,
    device: u32,
    works: Vec<Work>,
}

/// Work on a stream.
#[derive(Clone)]
pub(crate) enum Work {
    Launch {
        kernel: Arc<Kernel>,
        grid: [u32; 3],
        threads: [u32; 3],
        shared_bytes: u32,
        params: Vec<u8>,
    },
    /// A copy between addresses of the device's space. `check`: the checksum of this process's own bytes when this was queued.
    Copy {
        to: u64,
        from: u64,
        bytes: u64,
        check: Option<u64>,
    },
    /// A copy from ordinary host memory, which the call has read.
    Send {
        to: u64,
        bytes: Vec<u8>,
    },
    Fill {
        to: u64,
        byte: u8,
        bytes: u64,
    },
    Free {
        address: u64,
    },
    Multiply(Box<Product>),
    /// A wait until a stream has done this many works; in a recording, of those that were recorded.
    Wait {
        stream: u64,
        done: u64,
    },
    Marker,
}

impl Stream {
    fn queue(&mut self, work: Work) {
        self.queue.push_back(work);
        self.queued += 1;
    }
}

/// The contents of host memory while the device may still write it.
const POISON: u8 = 0xa5;

pub(crate) fn device() -> MutexGuard<'static, Device> {
    static DEVICE: OnceLock<Mutex<Device>> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        Mutex::new(Device {
            memory: Memory::new(options().memory_bytes, options().devices),
            streams: BTreeMap::new(),
            events: BTreeMap::new(),
            graphs: BTreeMap::new(),
            current: 0,
            waits_across: 0,
            next_id: 1,
            random: Random::new(options().seed),
            launches: 0,
            failed: vec![None; options().devices as usize],
            registered_bytes: 0,
            host_allocations: BTreeMap::new(),
        })
    });
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

fn misuse(what: impl Into<String>) -> Fault {
    Fault::new(Kind::Address, what)
}

fn digest(bytes: &[u8]) -> u64 {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    let mut chunks = bytes.chunks_exact(8);
    for chunk in &mut chunks {
        hash = (hash ^ u64::from_le_bytes(chunk.try_into().expect("eight bytes"))).wrapping_mul(0x0100_0000_01b3).rotate_left(23);
    }
    chunks.remainder().iter().fold(hash, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0100_0000_01b3))
}

impl Device {
    fn new_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id * 16
    }

    pub(crate) fn new_stream(&mut self) -> u64 {
        let id = self.new_id();
        self.streams.insert(id, Stream { device: self.current, ..Stream::default() });
        id
    }

    /// Destroys a stream, whose work continues.
    pub(crate) fn destroy_stream(&mut self, stream: u64) -> Result<(), Fault> {
        self.synchronize_stream(stream)?;
        self.streams.remove(&stream);
        Ok(())
    }

    pub(crate) fn new_event(&mut self) -> u64 {
        let id = self.new_id();
        self.events.insert(id, Event { device: self.current, record: None });
        id
    }

    pub(crate) fn destroy_event(&mut self, event: u64) {
        self.events.remove(&event);
    }

    fn stream(&mut self, stream: u64) -> Result<&mut Stream, Fault> {
        if stream == 0 {
            self.streams.entry(0).or_default();
        }
        self.streams.get_mut(&stream).ok_or_else(|| misuse(format!("stream {stream} is not one, or was destroyed")))
    }

    pub(crate) fn is_capturing(&self, stream: u64) -> bool {
        self.streams.get(&stream).is_some_and(|stream| stream.capture.is_some())
    }

    pub(crate) fn captures(&self) -> bool {
        self.streams.values().any(|stream| stream.capture.is_some())
    }

    /// Queues work of a call on a stream, or records it.
    pub(crate) fn push(&mut self, stream: u64, mut work: Work) -> Result<(), Fault> {
        let (of, current) = (self.stream(stream)?.device, self.current);
        // Copies, waits and frees may be called with any device's context.
        if of != current && matches!(work, Work::Launch { .. } | Work::Multiply(_) | Work::Fill { .. }) {
            return Err(misuse(format!("a launch on a stream of device {of} while device {current} is current")));
        }
        self.memory.accessor = of;
        let captured = self.is_capturing(stream);
        if let Work::Copy { to, from, bytes, check } = &mut work
            && *bytes > 0
        {
            // Both ends must exist now, regardless of what follows.
            self.memory.read(*from, *bytes, false, "copies from")?;
            if !captured {
                if self.memory.is_pinned_of_ours(*from, *bytes) {
                    *check = Some(digest(self.memory.read(*from, *bytes, false, "copies from")?));
                }
                if self.memory.is_pinned(*to, *bytes) {
                    self.memory.write(*to, *bytes, "copies to")?.fill(POISON);
                }
            }
        }
        let stream = self.stream(stream)?;
        match &mut stream.capture {
            Some(_) if matches!(work, Work::Free { .. } | Work::Send { .. }) => {
                return Err(Fault::new(Kind::Unsupported, "only launches, pinned copies, fills and products can be recorded into a graph"));
            }
            Some(capture) => capture.works.push(work),
            None => stream.queue(work),
        }
        Ok(())
    }

    // --- Events.

    pub(crate) fn record(&mut self, event: u64, stream: u64) -> Result<(), Fault> {
        self.push(stream, Work::Marker)?;
        let Stream { device, queued, capture, .. } = self.stream(stream)?;
        let (done, capture) = capture.as_ref().map_or((*queued, None), |c| (c.works.len() as u64, Some(c.root)));
        let device = *device;
        let event = self.events.get_mut(&event).ok_or_else(|| misuse("an event that is none is recorded"))?;
        if event.device != device {
            return Err(misuse(format!("an event of device {} is recorded on a stream of device {device}", event.device)));
        }
        event.record = Some(Record { stream, done, capture });
        Ok(())
    }

    pub(crate) fn wait_event(&mut self, stream: u64, event: u64) -> Result<(), Fault> {
        let event = self.events.get(&event).ok_or_else(|| misuse("a stream waits for an event that is none"))?;
        let Some(Record { stream: of, done, capture }) = event.record else { return Ok(()) };
        if capture.is_some_and(|root| !self.is_capturing(root)) {
            return Err(misuse("a stream waits for an event of a recording that has ended"));
        }
        let own = &mut self.stream(stream)?.capture;
        match (capture, &own) {
            // The stream joins the recording.
            (Some(root), None) => *own = Some(Capture { root, works: Vec::new() }),
            (Some(root), Some(own)) if own.root != root => return Err(misuse("two recordings become one")),
            (None, Some(_)) => return Err(misuse("a recorded stream waits for an event from before the recording")),
            _ => {}
        }
        self.push(stream, Work::Wait { stream: of, done })
    }

    /// Whether a stream and an event are of different devices.
    pub(crate) fn is_across(&self, stream: u64, event: u64) -> bool {
        let (stream, event) = (self.streams.get(&stream), self.events.get(&event));
        stream.zip(event).is_some_and(|(stream, event)| stream.device != event.device)
    }

    /// The record of an event that the host waits for.
    fn recorded(&self, event: u64) -> Result<Option<(u64, u64)>, Fault> {
        match self.events.get(&event).ok_or_else(|| misuse("the host waits for an event that is none"))?.record {
            Some(Record { capture: Some(_), .. }) => Err(misuse("the host waits for an event of a recording")),
            record => Ok(record.map(|record| (record.stream, record.done))),
        }
    }

    /// Whether an event has happened. One that was not waited for happens by chance.
    pub(crate) fn query(&mut self, event: u64) -> Result<bool, Fault> {
        let Some((stream, done)) = self.recorded(event)? else { return Ok(true) };
        let happened = self.streams.get(&stream).is_none_or(|stream| stream.done >= done);
        if happened || self.random.below(3) > 0 {
            return Ok(happened);
        }
        self.run_until(stream, done)?;
        Ok(true)
    }

    pub(crate) fn synchronize_event(&mut self, event: u64) -> Result<(), Fault> {
        let Some((stream, done)) = self.recorded(event)? else { return Ok(()) };
        self.run_others_by_chance()?;
        self.run_until(stream, done)
    }

    pub(crate) fn synchronize_stream(&mut self, stream: u64) -> Result<(), Fault> {
        self.run_others_by_chance()?;
        let queued = self.stream(stream)?.queued;
        self.run_until(stream, queued)
    }

    /// Waits for all streams of all devices.
    pub(crate) fn synchronize(&mut self) -> Result<(), Fault> {
        self.synchronize_those(|_| true)
    }

    /// Waits for all streams of the present call's device.
    pub(crate) fn synchronize_current(&mut self) -> Result<(), Fault> {
        let current = self.current;
        self.synchronize_those(|stream| stream.device == current)
    }

    fn synchronize_those(&mut self, which: impl Fn(&Stream) -> bool) -> Result<(), Fault> {
        let those = self.streams.iter().filter(|(_, stream)| which(stream));
        let mut streams: Vec<(u64, u64)> = those.map(|(id, stream)| (*id, stream.queued)).collect();
        self.random.shuffle(&mut streams);
        streams.into_iter().try_for_each(|(stream, queued)| self.run_until(stream, queued))
    }

    /// Runs other streams ahead of time, by chance, one time in eight.
    fn run_others_by_chance(&mut self) -> Result<(), Fault> {
        if self.random.below(8) > 0 {
            return Ok(());
        }
        let mut streams: Vec<(u64, u64)> = self.streams.iter().map(|(id, stream)| (*id, stream.done + stream.queue.len() as u64)).collect();
        self.random.shuffle(&mut streams);
        let some = self.random.below(streams.len() as u64 + 1) as usize;
        for (stream, end) in streams.into_iter().take(some) {
            if let Err(fault) = self.run_until(stream, end) {
                let failing = std::mem::replace(&mut self.memory.accessor, self.current);
                // The failure of another device is for those to see who wait for it.
                if failing == self.current {
                    return Err(fault);
                }
                self.failed[failing as usize].get_or_insert_with(|| {
                    eprintln!("gpu-standin: {fault}\n    seed {}", options().seed);
                    fault.code()
                });
            }
        }
        Ok(())
    }

    // --- Graphs.

    pub(crate) fn begin_capture(&mut self, root: u64) -> Result<(), Fault> {
        let stream = self.stream(root)?;
        if stream.capture.is_some() {
            return Err(misuse("a stream that is recorded is to be recorded"));
        }
        stream.capture = Some(Capture { root, works: Vec::new() });
        Ok(())
    }

    /// Ends a recording. Each stream that joined it must have come back: the first one waits for its last work.
    pub(crate) fn end_capture(&mut self, root: u64) -> Result<u64, Fault> {
        let own = self.stream(root)?.capture.take().ok_or_else(|| misuse("a recording ends that did not begin"))?;
        if own.root != root {
            return Err(misuse("a recording ends with another stream than it began with"));
        }
        let mut lanes = vec![Lane { stream: root, device: self.stream(root)?.device, works: own.works }];
        for (&stream, joined) in &mut self.streams {
            let Some(Capture { works, .. }) = joined.capture.take_if(|capture| capture.root == root) else { continue };
            let last = works.iter().rposition(|work| !matches!(work, Work::Marker)).map_or(0, |at| at as u64 + 1);
            let waits = |work: &Work| matches!(work, Work::Wait { stream: of, done } if *of == stream && *done >= last);
            if !lanes[0].works.iter().any(waits) {
                return Err(misuse(format!("a recording ends, and a stream of device {} has not come back to it", joined.device)));
            }
            lanes.push(Lane { stream, device: joined.device, works });
        }
        let id = self.new_id();
        self.graphs.insert(id, Graph { lanes });
        Ok(id)
    }

    pub(crate) fn instantiate(&mut self, graph: u64) -> Result<u64, Fault> {
        let graph = self.graphs.get(&graph).ok_or_else(|| misuse("a graph that is none"))?.clone();
        let id = self.new_id();
        self.graphs.insert(id, graph);
        Ok(id)
    }

    pub(crate) fn destroy_graph(&mut self, graph: u64) {
        self.graphs.remove(&graph);
    }

    pub(crate) fn launch_graph(&mut self, graph: u64, stream: u64) -> Result<(), Fault> {
        let Graph { lanes } = self.graphs.get(&graph).ok_or_else(|| misuse("a graph that is none is launched"))?.clone();
        let begun = self.stream(stream)?.queued;
        // The stream of each lane, and the number of its works before the lane's. Other lanes than the first begin when the graph does.
        let mut places = BTreeMap::new();
        for (i, lane) in lanes.iter().enumerate() {
            let place = if i == 0 { (stream, begun) } else { (self.new_id(), 1) };
            if i > 0 {
                let mut own = Stream { device: lane.device, is_of_a_graph: true, ..Stream::default() };
                own.queue(Work::Wait { stream, done: begun });
                self.streams.insert(place.0, own);
            }
            places.insert(lane.stream, place);
        }
        for Lane { stream: lane, works, .. } in lanes {
            let stream = self.stream(places[&lane].0)?;
            for work in works {
                stream.queue(match work {
                    Work::Wait { stream, done } => Work::Wait { stream: places[&stream].0, done: places[&stream].1 + done },
                    work => work,
                });
            }
        }
        Ok(())
    }

    // --- Running.

    fn run_until(&mut self, stream: u64, done: u64) -> Result<(), Fault> {
        loop {
            let Some(found) = self.streams.get_mut(&stream) else { return Ok(()) };
            if found.done >= done {
                return Ok(());
            }
            let (work, device) = (found.queue.front().cloned().expect("as much is queued as is waited for"), found.device);
            if self.failed[device as usize].is_some() {
                self.memory.accessor = device;
                return Err(Fault::new(Kind::Injected, format!("device {device} has failed before")));
            }
            match work {
                Work::Wait { stream: of, done } => self.run_until(of, done)?,
                work => {
                    let before = std::mem::replace(&mut self.memory.accessor, device);
                    self.run(work)?;
                    self.memory.accessor = before;
                }
            }
            // The wait is for a different stream, so the front of this one is unchanged.
            let found = self.streams.get_mut(&stream).expect("it runs");
            found.queue.pop_front();
            found.done += 1;
            if found.is_of_a_graph && found.queue.is_empty() {
                self.streams.remove(&stream);
            }
        }
    }

    fn run(&mut self, work: Work) -> Result<(), Fault> {
        match work {
            Work::Launch { kernel, grid, threads, shared_bytes, params } => {
                self.launches += 1;
                if options().trace {
                    eprintln!("gpu-standin: launch {} of {} on {grid:?} × {threads:?}", self.launches, kernel.name);
                }
                let fails_now = options().fail_device == Some(self.memory.accessor)
                    && options().fail_when.as_ref().is_some_and(|file| std::path::Path::new(file).exists());
                if fails_now {
                    let what =
                        format!("a launch of {} on device {} fails, as TIDEMILL_GPU_STANDIN says", kernel.name, self.memory.accessor);
                    return Err(Fault::new(Kind::Injected, what));
                }
                let first = || options().fail_once.as_ref().is_none_or(|path| std::fs::File::create_new(path).is_ok());
                if options().fail_launch == Some(self.launches) && first() {
                    let what = format!("launch {} of {} fails, as TIDEMILL_GPU_STANDIN says", self.launches, kernel.name);
                    return Err(Fault::new(Kind::Injected, what));
                }
                let launch = exec::Launch { kernel: &kernel, grid, threads, shared_bytes, params: &params, number: self.launches };
                exec::run(&launch, &mut self.memory, &mut self.random)
            }
            Work::Copy { to, from, bytes, check } => {
                if options().trace {
                    eprintln!("gpu-standin: copy {bytes} bytes from {from:#x} to {to:#x}");
                }
                if let Some(check) = check
                    && digest(self.memory.read(from, bytes, false, "copies from")?) != check
                {
                    let what = format!("{bytes} bytes of host memory at {from:#x} were changed while a copy of them was pending");
                    return Err(Fault::new(Kind::InFlight, what));
                }
                if self.memory.is_pinned(to, bytes) && self.memory.read(to, bytes, false, "copies to")?.iter().any(|byte| *byte != POISON) {
                    let what = format!("{bytes} bytes of host memory at {to:#x} were changed while a copy to them was pending");
                    return Err(Fault::new(Kind::InFlight, what));
                }
                self.memory.copy(to, from, bytes)
            }
            Work::Send { to, bytes } => {
                self.memory.write(to, bytes.len() as u64, "copies to")?.copy_from_slice(&bytes);
                Ok(())
            }
            Work::Fill { to, byte, bytes } => {
                self.memory.write(to, bytes, "fills")?.fill(byte);
                Ok(())
            }
            Work::Free { address } => self.memory.free(address),
            Work::Multiply(product) => product.run(&mut self.memory),
            Work::Wait { .. } | Work::Marker => Ok(()),
        }
    }
}
