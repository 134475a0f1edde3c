//! Memory that the device can address: allocations in an address space of its own, with gaps between them that are never used, and
//! addresses that are never reused; and pinned host memory, at the host's addresses. Memory shared with other processes may change at any
//! time.
//!
//! All devices share the address space. Memory of another device is accessible only while access to it is enabled.
//!
//! Device memory records which of its bytes were written, and the last writer of every two bytes, so that races between blocks and warps
//! are detected.

use crate::fault::{Fault, Kind};
use std::collections::BTreeSet;

/// The start of device memory, where no host memory lies.
const START: u64 = 0x7000_0000_0000_0000;
const GAP: u64 = 1 << 20;
const PAGE: u64 = 4096;
/// The alignment that the driver promises, and no more: an allocation starts at an odd multiple of it.
const ALIGNMENT: u64 = 256;

pub(crate) struct Memory {
    /// All allocations, by start.
    all: Vec<Allocation>,
    next: u64,
    numbers: u64,
    /// Bytes of each device.
    pub(crate) total: u64,
    /// Bytes that are allocated, by device.
    used: Vec<u64>,
    /// The device that accesses the memory.
    pub(crate) accessor: u32,
    /// The pairs of an accessor and a device whose memory it may access, except what came from a pool.
    pub(crate) peers: BTreeSet<(u32, u32)>,
    /// The same of memory from pools, which is enabled by itself.
    pub(crate) pool_peers: BTreeSet<(u32, u32)>,
    last: usize,
}

pub(crate) struct Allocation {
    pub(crate) start: u64,
    pub(crate) len: u64,
    number: u64,
    content: Content,
}

enum Content {
    Device {
        device: u32,
        /// Whether it came from the device's pool.
        is_pooled: bool,
        bytes: Vec<u8>,
        /// One bit per byte, set once it is written.
        written: Vec<u8>,
        /// The last writer (`Writer`) of every two bytes; empty until a kernel writes.
        writers: Vec<u64>,
    },
    /// Memory owned by the host.
    Host {
        start: *mut u8,
        /// Whether it is shared with other processes.
        shared: bool,
    },
    Freed,
}

// SAFETY: host memory does not move until it is unpinned; all use is behind the driver's lock.
unsafe impl Send for Allocation {}

/// A warp that writes: launch (24 bits), block (18), barrier interval (16), warp (6).
#[derive(Clone, Copy)]
pub(crate) struct Writer(pub(crate) u64);

impl Writer {
    pub(crate) fn new(launch: u64, block: u64, interval: u32, warp: u32) -> Self {
        Self((launch & 0xff_ffff) << 40 | (block & 0x3_ffff) << 22 | u64::from(interval.min(0xffff)) << 6 | u64::from(warp & 63))
    }

    /// Whether the actions of `earlier` are not ordered before those of this writer.
    fn races(self, earlier: u64) -> bool {
        let (own, launch) = (self.0, self.0 >> 40);
        launch == earlier >> 40 && (own >> 22 != earlier >> 22 || (own >> 6 == earlier >> 6 && own != earlier))
    }
}

impl Memory {
    pub(crate) fn new(total: u64, devices: u32) -> Self {
        Self {
            all: Vec::new(),
            next: START + ALIGNMENT,
            numbers: 0,
            total,
            used: vec![0; devices as usize],
            accessor: 0,
            peers: BTreeSet::new(),
            pool_peers: BTreeSet::new(),
            last: 0,
        }
    }

    /// Bytes of the accessor's own memory that are not allocated.
    pub(crate) fn free_bytes(&self) -> u64 {
        self.total - self.used[self.accessor as usize]
    }

    /// Allocates memory of the accessor, from its pool or not; `None` if it is full.
    pub(crate) fn allocate(&mut self, len: u64, is_pooled: bool) -> Option<u64> {
        if len > self.free_bytes() {
            return None;
        }
        let device = self.accessor;
        let start = self.next;
        self.next = (start + len + GAP).next_multiple_of(2 * ALIGNMENT) + ALIGNMENT;
        self.used[device as usize] += len;
        self.numbers += 1;
        let bytes = len as usize;
        let content =
            Content::Device { device, is_pooled, bytes: vec![0; bytes], written: vec![0; bytes.div_ceil(8) + 2], writers: Vec::new() };
        // Device addresses ascend, and are above all of the host's.
        self.all.push(Allocation { start, len, number: self.numbers, content });
        Some(start)
    }

    /// Frees device memory, keeping the addresses so that later uses are detected.
    pub(crate) fn free(&mut self, start: u64) -> Result<(), Fault> {
        let found = self.all.iter_mut().find(|a| a.start == start);
        let Some((found, device)) = found.and_then(|a| a.content.device().map(|device| (a, device))) else {
            return Err(Fault::new(Kind::Address, format!("{start:#x} is freed, and is not the start of live device memory")));
        };
        found.content = Content::Freed;
        self.used[device as usize] -= found.len;
        Ok(())
    }

    pub(crate) fn pin(&mut self, start: *mut u8, len: u64, shared: bool) {
        self.numbers += 1;
        let at = self.all.partition_point(|a| a.start < start.addr() as u64);
        self.all.insert(at, Allocation { start: start.addr() as u64, len, number: self.numbers, content: Content::Host { start, shared } });
        self.last = 0;
    }

    /// Unpins memory, and returns its length.
    pub(crate) fn unpin(&mut self, start: u64) -> Option<u64> {
        let at = self.all.iter().position(|a| a.start == start && matches!(a.content, Content::Host { .. }))?;
        self.last = 0;
        Some(self.all.remove(at).len)
    }

    pub(crate) fn is_pinned(&self, address: u64, len: u64) -> bool {
        self.pinned(address, len).is_some()
    }

    /// Whether a page of these bytes is pinned.
    pub(crate) fn has_pinned_pages(&self, address: u64, len: u64) -> bool {
        let pages = |start: u64, len: u64| (start / PAGE, (start + len).div_ceil(PAGE));
        let (first, end) = pages(address, len);
        self.all.iter().filter(|a| matches!(a.content, Content::Host { .. })).any(|a| {
            let (other_first, other_end) = pages(a.start, a.len);
            first < other_end && other_first < end
        })
    }

    /// Whether these bytes are pinned and changed by this process only.
    pub(crate) fn is_pinned_of_ours(&self, address: u64, len: u64) -> bool {
        self.pinned(address, len).is_some_and(|a| matches!(a.content, Content::Host { shared: false, .. }))
    }

    fn pinned(&self, address: u64, len: u64) -> Option<&Allocation> {
        self.all.iter().find(|a| matches!(a.content, Content::Host { .. }) && a.start <= address && address + len <= a.start + a.len)
    }

    /// The allocation that holds the bytes.
    fn find(&mut self, address: u64, len: u64, doing: &str) -> Result<usize, Fault> {
        let holds = |a: &Allocation| a.start <= address && address - a.start <= a.len && a.len - (address - a.start) >= len;
        let at = if self.all.get(self.last).is_some_and(holds) {
            self.last
        } else {
            self.all.partition_point(|a| a.start <= address).wrapping_sub(1)
        };
        match self.all.get(at) {
            Some(found) if holds(found) => match found.content {
                Content::Freed => {
                    Err(Fault::new(Kind::Address, format!("{doing} {len} bytes at {address:#x}, in freed {}", self.name(at))))
                }
                Content::Device { device, is_pooled, .. } if !self.may_access(device, is_pooled) => {
                    let (whose, who) = (self.name(at), self.accessor);
                    Err(Fault::new(Kind::Address, format!("device {who} {doing} {len} bytes of {whose}, and access is not enabled")))
                }
                _ => {
                    self.last = at;
                    Ok(at)
                }
            },
            _ => Err(Fault::new(Kind::Address, format!("{doing} {len} bytes at {address:#x}, {}", self.nearest(address)))),
        }
    }

    fn may_access(&self, device: u32, is_pooled: bool) -> bool {
        let peers = if is_pooled { &self.pool_peers } else { &self.peers };
        device == self.accessor || peers.contains(&(self.accessor, device))
    }

    fn name(&self, at: usize) -> String {
        let Allocation { start, len, number, content } = &self.all[at];
        let whose = match content {
            Content::Host { .. } => "pinned host memory".to_owned(),
            Content::Device { device: 1.., .. } => format!("the memory of device {}", content.device().unwrap_or_default()),
            _ => "device memory".to_owned(),
        };
        format!("{whose} no. {number} ({len} bytes at {start:#x})")
    }

    fn nearest(&self, address: u64) -> String {
        let at = self.all.partition_point(|a| a.start <= address);
        match at.checked_sub(1).map(|at| (at, &self.all[at])) {
            Some((at, a)) if address < a.start + a.len => format!("which end beyond {}", self.name(at)),
            Some((at, a)) if address - a.start - a.len <= GAP => format!("{} bytes behind {}", address - a.start - a.len, self.name(at)),
            _ => match self.all.get(at) {
                Some(a) if a.start - address <= GAP => format!("{} bytes before {}", a.start - address, self.name(at)),
                _ => "where nothing was ever allocated".to_owned(),
            },
        }
    }

    /// The bytes at an address, for copies and products. `written`: whether they must have been written.
    pub(crate) fn read(&mut self, address: u64, len: u64, written: bool, doing: &str) -> Result<&[u8], Fault> {
        let at = self.find(address, len, doing)?;
        let offset = (address - self.all[at].start) as usize;
        let unwritten = match &self.all[at].content {
            Content::Device { written: bits, .. } if written => first_unset(bits, offset, len as usize),
            _ => None,
        };
        if let Some(byte) = unwritten {
            return Err(Fault::new(Kind::Uninitialized, format!("{doing} byte {byte} of {}, which was never written", self.name(at))));
        }
        Ok(self.all[at].slice(offset, len as usize))
    }

    /// The bytes at an address, which count as written from now on.
    pub(crate) fn write(&mut self, address: u64, len: u64, doing: &str) -> Result<&mut [u8], Fault> {
        let at = self.find(address, len, doing)?;
        let found = &mut self.all[at];
        let offset = (address - found.start) as usize;
        found.mark_written(offset, len as usize);
        Ok(found.slice_mut(offset, len as usize))
    }

    /// Copies bytes together with whether each was ever written.
    pub(crate) fn copy(&mut self, to: u64, from: u64, len: u64) -> Result<(), Fault> {
        if len == 0 {
            return Ok(());
        }
        let source = self.find(from, len, "copies from")?;
        let target = self.find(to, len, "copies to")?;
        let offset = (from - self.all[source].start) as usize;
        let bytes = self.all[source].slice(offset, len as usize).to_vec();
        let bits: Option<Vec<bool>> = match &self.all[source].content {
            Content::Device { written, .. } => Some((offset..offset + len as usize).map(|i| written[i / 8] >> (i % 8) & 1 == 1).collect()),
            _ => None,
        };
        let offset = (to - self.all[target].start) as usize;
        match (&mut self.all[target].content, bits) {
            (Content::Device { written, .. }, Some(bits)) => {
                for (i, bit) in (offset..).zip(bits) {
                    written[i / 8] = written[i / 8] & !(1 << (i % 8)) | u8::from(bit) << (i % 8);
                }
            }
            (Content::Host { .. }, Some(bits)) if bits.contains(&false) => {
                let name = self.name(source);
                return Err(Fault::new(Kind::Uninitialized, format!("copies bytes that were never written from {name} to the host")));
            }
            _ => self.all[target].mark_written(offset, len as usize),
        }
        self.all[target].slice_mut(offset, len as usize).copy_from_slice(&bytes);
        Ok(())
    }

    /// A lane's read of 1 to 16 bytes, an aligned power of two.
    #[inline]
    pub(crate) fn load(&mut self, address: u64, len: usize, reader: Writer) -> Result<[u8; 16], Fault> {
        let at = self.find(address, len as u64, "reads")?;
        let found = &self.all[at];
        let offset = (address - found.start) as usize;
        let mut bytes = [0; 16];
        match &found.content {
            Content::Device { bytes: content, written, writers, .. } => {
                if !all_set(written, offset, len) {
                    return Err(Fault::new(
                        Kind::Uninitialized,
                        format!("reads byte {offset} of {}, which was never written", self.name(at)),
                    ));
                }
                if let Some(writers) = writers.get(offset / 2..(offset + len).div_ceil(2))
                    && let Some(&other) = writers.iter().find(|&&other| reader.races(other))
                {
                    return Err(self.race(at, offset, reader, other, "reads"));
                }
                bytes[..len].copy_from_slice(&content[offset..offset + len]);
            }
            _ => bytes[..len].copy_from_slice(found.slice(offset, len)),
        }
        Ok(bytes)
    }

    /// A lane's write of as many bytes.
    #[inline]
    pub(crate) fn store(&mut self, address: u64, from: &[u8], writer: Writer) -> Result<(), Fault> {
        let len = from.len();
        let at = self.find(address, len as u64, "writes")?;
        let found = &mut self.all[at];
        let offset = (address - found.start) as usize;
        if let Content::Device { writers, bytes, .. } = &mut found.content {
            if writers.is_empty() {
                *writers = vec![0; bytes.len().div_ceil(2)];
            }
            let writers = &mut writers[offset / 2..(offset + len).div_ceil(2)];
            // Single bytes share an entry: only writers of the same byte race, which cannot be detected here. Writers of equal bytes are
            // harmless.
            if len > 1
                && bytes[offset..offset + len] != *from
                && let Some(&other) = writers.iter().find(|&&other| writer.races(other))
            {
                return Err(self.race(at, offset, writer, other, "writes"));
            }
            writers.fill(writer.0);
        }
        found.mark_written(offset, len);
        found.slice_mut(offset, len).copy_from_slice(from);
        Ok(())
    }

    #[cold]
    fn race(&self, at: usize, offset: usize, own: Writer, other: u64, doing: &str) -> Fault {
        let name = |x: u64| format!("block {} warp {}", x >> 22 & 0x3_ffff, x & 63);
        let what =
            format!("{} {doing} byte {offset} of {}, which {} wrote; nothing orders the two", name(own.0), self.name(at), name(other));
        Fault::new(Kind::Race, what)
    }
}

fn all_set(bits: &[u8], offset: usize, len: usize) -> bool {
    let window = u32::from_le_bytes([bits[offset / 8], bits[offset / 8 + 1], *bits.get(offset / 8 + 2).unwrap_or(&0), 0]);
    let wanted = ((1u32 << len) - 1) << (offset % 8);
    window & wanted == wanted
}

/// The first bit of a range that is not set.
fn first_unset(bits: &[u8], offset: usize, len: usize) -> Option<usize> {
    let (mut i, end) = (offset, offset + len);
    while i < end {
        if i.is_multiple_of(8) && end - i >= 8 && bits[i / 8] == 0xff {
            i += 8;
        } else if bits[i / 8] >> (i % 8) & 1 == 1 {
            i += 1;
        } else {
            return Some(i);
        }
    }
    None
}

impl Content {
    fn device(&self) -> Option<u32> {
        if let Self::Device { device, .. } = self { Some(*device) } else { None }
    }
}

impl Allocation {
    fn slice(&self, offset: usize, len: usize) -> &[u8] {
        match &self.content {
            Content::Device { bytes, .. } => &bytes[offset..offset + len],
            // SAFETY: pinned by its owner with at least this length, and not unpinned yet; the caller of the driver may not change it now.
            Content::Host { start, .. } => unsafe { std::slice::from_raw_parts(start.add(offset), len) },
            Content::Freed => unreachable!("freed memory is not found"),
        }
    }

    fn slice_mut(&mut self, offset: usize, len: usize) -> &mut [u8] {
        match &mut self.content {
            Content::Device { bytes, .. } => &mut bytes[offset..offset + len],
            // SAFETY: as above.
            Content::Host { start, .. } => unsafe { std::slice::from_raw_parts_mut(start.add(offset), len) },
            Content::Freed => unreachable!("freed memory is not found"),
        }
    }

    fn mark_written(&mut self, offset: usize, len: usize) {
        let Content::Device { written, .. } = &mut self.content else { return };
        let (mut i, end) = (offset, offset + len);
        while i < end {
            if i.is_multiple_of(8) && end - i >= 8 {
                let whole = (end - i) / 8;
                written[i / 8..i / 8 + whole].fill(0xff);
                i += whole * 8;
            } else {
                written[i / 8] |= 1 << (i % 8);
                i += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: Writer = Writer(1 << 40);

    #[test]
    fn what_is_not_there_is_named() {
        let mut memory = Memory::new(1 << 20, 1);
        let start = memory.allocate(100, false).unwrap();
        assert!(start.is_multiple_of(256) && !start.is_multiple_of(512), "no more alignment than is promised");
        memory.write(start, 100, "fills").unwrap().fill(7);
        assert_eq!(memory.load(start + 96, 4, ONE).unwrap()[..4], [7; 4]);
        assert!(memory.load(start + 100, 4, ONE).unwrap_err().what.contains("0 bytes behind device memory no. 1 (100 bytes"));
        assert!(memory.load(start + 98, 4, ONE).unwrap_err().what.contains("end beyond"));
        assert!(memory.load(start - 8, 4, ONE).unwrap_err().what.contains("8 bytes before"));
        memory.free(start).unwrap();
        assert!(memory.load(start, 4, ONE).unwrap_err().what.contains("freed"));
        assert!(memory.free(start).is_err());
        assert_eq!(memory.allocate(2 << 20, false), None, "no more than there is");
    }

    #[test]
    fn bytes_are_written_before_they_are_read() {
        let mut memory = Memory::new(1 << 20, 1);
        let (a, b) = (memory.allocate(64, false).unwrap(), memory.allocate(64, false).unwrap());
        assert_eq!(memory.load(a, 4, ONE).unwrap_err().kind, Kind::Uninitialized);
        memory.store(a, &[1; 4], ONE).unwrap();
        memory.load(a, 4, ONE).unwrap();
        assert!(memory.load(a, 8, ONE).is_err());
        memory.copy(b, a, 8).unwrap();
        memory.load(b, 4, ONE).unwrap();
        assert!(memory.load(b + 4, 1, ONE).is_err(), "a copy knows what it copied");
    }

    #[test]
    fn another_devices_memory_is_accessible_once_that_is_enabled() {
        let mut memory = Memory::new(1 << 20, 2);
        memory.accessor = 1;
        let a = memory.allocate(1 << 19, false).unwrap();
        let b = memory.allocate(1 << 19, true).unwrap();
        memory.write(a, 64, "fills").unwrap();
        memory.write(b, 64, "fills").unwrap();
        assert_eq!(memory.allocate(64, true), None, "it is full");
        memory.accessor = 0;
        memory.allocate(64, true).expect("the other is not");
        let refused = memory.load(a, 4, ONE).unwrap_err().what;
        assert!(refused.contains("device 0 reads 4 bytes of the memory of device 1"), "{refused}");
        memory.peers.insert((0, 1));
        memory.load(a, 4, ONE).unwrap();
        assert!(memory.load(b, 4, ONE).is_err(), "a pool's memory is apart");
        memory.pool_peers.insert((0, 1));
        memory.load(b, 4, ONE).unwrap();
    }

    #[test]
    fn blocks_and_warps_that_nothing_orders_race() {
        let mut memory = Memory::new(1 << 20, 1);
        let a = memory.allocate(64, false).unwrap();
        let writer = |launch, block, interval, warp| Writer::new(launch, block, interval, warp);
        memory.store(a, &[1; 4], writer(1, 0, 0, 0)).unwrap();
        assert_eq!(memory.load(a, 4, writer(1, 1, 0, 0)).unwrap_err().kind, Kind::Race);
        assert!(memory.load(a, 4, writer(1, 0, 0, 1)).is_err(), "another warp before a barrier");
        memory.load(a, 4, writer(1, 0, 1, 1)).unwrap();
        memory.load(a, 4, writer(2, 1, 0, 0)).unwrap();
        assert_eq!(memory.store(a + 2, &[2; 2], writer(1, 3, 0, 0)).unwrap_err().kind, Kind::Race);
        memory.store(a + 2, &[1; 2], writer(1, 3, 0, 0)).expect("writers of the same bytes do no harm");
    }
}
