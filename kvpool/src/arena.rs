//! The DRAM tier's memory: one memory file, which processes of the same host map, and in it the slots of each layout.
//!
//! ```text
//!   0           magic, nonce                     one page: proves that this is the announced arena
//!   4096        generations (u64)                one for each SLOT_BYTES_MIN bytes behind, to whole pages
//!   slots_at    slot 0 │ slot 1 │ …              each on a cache line
//! ```
//!
//! Every layout has its slots from `slots_at` on, as if all memory were its own; its slots overlap those of others, and the
//! [division](crate::core::division) says which of them it may use. A slot's generation is at the place for the slot's first bytes.
//! Generations of two layouts differ always, so what one layout does with memory that was another's shows there.
//!
//! The file has no name, so nothing is left behind however its owner ends; it lives as long as it is mapped. A client opens it
//! through `/proc/<pid>/fd/<fd>`, which the kernel allows to the same user in the same PID namespace. Its size is sealed, so no peer
//! can shrink it under another.
//!
//! Only this module and its copies in `hashed_copy` touch shared bytes, through raw pointers: no code holds a reference into a slot,
//! because another process may be writing it. [`validate`](crate::core::validate::validate) says whether a copy is good.

pub(crate) mod hashed_copy;
pub mod pin;

use crate::core::validate::Copied;
use hashed_copy::{copy_hashed, hash_shared};
use memmap2::{Advice, MmapOptions, MmapRaw};
use nix::{
    fcntl::{FcntlArg, SealFlag, fcntl},
    sys::memfd::{MFdFlags, memfd_create},
};
use pin::{Pin, Pinned};
use std::{
    fs::{self, File, OpenOptions},
    hash::Hasher,
    io,
    os::fd::AsRawFd,
    path::PathBuf,
    ptr::NonNull,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicU64, Ordering, fence},
    },
};
use tidemill_proto::pool::{ArenaInfo, SLOT_ALIGN, SLOT_BYTES_MIN, slot_stride};
use twox_hash::XxHash3_64;

#[derive(Debug, thiserror::Error)]
pub enum ArenaError {
    #[error("a block of {block_bytes} bytes does not fit {capacity_bytes} bytes of DRAM: give the pool node a larger --dram")]
    TooSmall { block_bytes: u64, capacity_bytes: u64 },
    #[error("cannot make a shared memory file of {bytes} bytes: {source}")]
    Create { bytes: u64, source: io::Error },
    #[error("RDMA cannot be used: {0}")]
    Rails(String),
    #[error("{path} is not a pool node's arena that this process may map: {reason}")]
    NotShared { path: PathBuf, reason: String },
}

/// A mapped memory file. Its creator and all processes that opened it see the same bytes.
#[derive(Debug)]
pub struct Memory {
    map: MmapRaw,
    capacity_bytes: u64,
    nonce: [u8; 16],
    pid: u32,
    /// The number of the memory file in the process that created it.
    fd: i32,
    /// The memory file, kept open so that others can map it.
    _file: File,
}

/// The slots of one layout.
#[derive(Debug)]
pub struct Arena {
    /// The slots in pieces, each set once a device has pinned it. Declared before the mapping, which must outlive them.
    pinned: Box<[OnceLock<Box<dyn Pinned>>]>,
    memory: Arc<Memory>,
    layout: Layout,
}

/// The positions of everything in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Layout {
    slots: u32,
    pub(crate) block_bytes: usize,
    stride: usize,
    pub(crate) slots_at: usize,
    pub(crate) file_bytes: usize,
}

const NAME: &str = "tidemill-kvpool";
const MAGIC: [u8; 8] = *b"TIDEPOOL";
const PAGE: usize = 4096;
/// Approximate bytes that are pinned at a time: meanwhile the driver may delay all its other work on the machine, and some drivers and
/// kernels refuse more than 2 GiB.
const PIECE_BYTES: usize = 1 << 30;
/// The number of slots that fill whole pages, however large a slot is.
const SLOTS_OF_WHOLE_PAGES: usize = PAGE / SLOT_ALIGN as usize;
/// Bytes taken from the system at a time, so that a large arena does not lock the process's memory map for long.
const PREFAULT_BYTES: usize = 16 << 20;

/// Length of the proof at the start of the file: the magic and the nonce.
pub(crate) const PROOF_BYTES: usize = MAGIC.len() + 16;

/// The bytes at the start of an arena with this nonce.
pub(crate) fn proof(nonce: [u8; 16]) -> [u8; PROOF_BYTES] {
    let mut proof = [0; PROOF_BYTES];
    proof[..MAGIC.len()].copy_from_slice(&MAGIC);
    proof[MAGIC.len()..].copy_from_slice(&nonce);
    proof
}

/// The offset of the first slot, and the size of the file; `None` if they overflow.
fn extent_of(capacity_bytes: u64) -> Option<(usize, usize)> {
    let capacity = usize::try_from(capacity_bytes).ok()?;
    let generations = capacity.div_ceil(SLOT_BYTES_MIN as usize).checked_mul(size_of::<AtomicU64>())?;
    let slots_at = generations.checked_next_multiple_of(PAGE)?.checked_add(PAGE)?;
    let file_bytes = slots_at.checked_add(capacity)?;
    isize::try_from(file_bytes).ok()?;
    Some((slots_at, file_bytes))
}

impl Layout {
    /// The layout of blocks of this size, or `None` if sizes overflow.
    pub(crate) fn new(capacity_bytes: u64, block_bytes: u64) -> Option<Self> {
        let (slots_at, file_bytes) = extent_of(capacity_bytes)?;
        let stride = slot_stride(block_bytes)?;
        let slots = (capacity_bytes / stride).min(u64::from(u32::MAX - 1)) as u32;
        let (block_bytes, stride) = (usize::try_from(block_bytes).ok()?, usize::try_from(stride).ok()?);
        Some(Self { slots, block_bytes, stride, slots_at, file_bytes })
    }

    /// The offset of a slot. Panics if there is no such slot.
    pub(crate) fn slot_at(&self, slot: u32) -> usize {
        assert!(slot < self.slots, "slot {slot} is outside the arena");
        self.slots_at + slot as usize * self.stride
    }

    /// The number of slots in a piece; the last one may have fewer.
    fn piece_slots(&self) -> usize {
        let whole_pages = SLOTS_OF_WHOLE_PAGES * self.stride;
        (PIECE_BYTES / whole_pages).max(1) * SLOTS_OF_WHOLE_PAGES
    }

    fn pieces(&self) -> usize {
        (self.slots as usize).div_ceil(self.piece_slots())
    }

    /// The offset of a slot's generation. Panics if there is no such slot.
    pub(crate) fn generation_at(&self, slot: u32) -> usize {
        assert!(slot < self.slots, "slot {slot} is outside the arena");
        PAGE + slot as usize * self.stride / SLOT_BYTES_MIN as usize * size_of::<AtomicU64>()
    }

    /// The end of the last slot.
    fn end(&self) -> usize {
        self.slots_at + self.slots as usize * self.stride
    }
}

/// Empty places for all pieces, none of which is pinned yet.
fn unpinned(layout: Layout) -> Box<[OnceLock<Box<dyn Pinned>>]> {
    (0..layout.pieces()).map(|_| OnceLock::new()).collect()
}

impl Memory {
    /// Creates memory of this size. The system provides it as it is first written.
    pub fn create(capacity_bytes: u64, nonce: [u8; 16]) -> Result<Arc<Self>, ArenaError> {
        let failed = |source| ArenaError::Create { bytes: capacity_bytes, source };
        let (_, file_bytes) = extent_of(capacity_bytes).ok_or_else(|| failed(io::ErrorKind::FileTooLarge.into()))?;
        let create = || -> io::Result<(File, MmapRaw)> {
            let file = File::from(memfd_create(NAME, MFdFlags::MFD_CLOEXEC | MFdFlags::MFD_ALLOW_SEALING)?);
            file.set_len(file_bytes as u64)?;
            fcntl(&file, FcntlArg::F_ADD_SEALS(SealFlag::F_SEAL_SHRINK | SealFlag::F_SEAL_GROW | SealFlag::F_SEAL_SEAL))?;
            let map = MmapOptions::new().len(file_bytes).map_raw(&file)?;
            Ok((file, map))
        };
        let (file, map) = create().map_err(failed)?;
        let memory = Self { map, capacity_bytes, nonce, pid: std::process::id(), fd: file.as_raw_fd(), _file: file };
        memory.copy_to(0, &proof(nonce));
        Ok(Arc::new(memory))
    }

    /// Maps the memory of another process on this host.
    fn open(info: &ArenaInfo) -> Result<Self, ArenaError> {
        let path = PathBuf::from(format!("/proc/{}/fd/{}", info.pid, info.fd));
        let not_shared = |reason: String| ArenaError::NotShared { path: path.clone(), reason };
        let failed = |error: io::Error| not_shared(error.to_string());
        let (_, announced) = extent_of(info.capacity_bytes).ok_or_else(|| not_shared("its announced size is absurd".into()))?;
        // On another host the path may name anything. Opening a device can have effects; reading a link has none.
        let target = fs::read_link(&path).map_err(failed)?;
        if !target.to_string_lossy().starts_with(&format!("/memfd:{NAME}")) {
            return Err(not_shared(format!("it is {}", target.display())));
        }
        let file = OpenOptions::new().read(true).write(true).open(&path).map_err(failed)?;
        let file_bytes = file.metadata().map_err(failed)?.len();
        if file_bytes != announced as u64 {
            return Err(not_shared(format!("it has {file_bytes} bytes, announced were {announced}")));
        }
        let map = MmapOptions::new().len(announced).map_raw(&file).map_err(failed)?;
        let ArenaInfo { pid, fd, nonce, capacity_bytes, .. } = *info;
        let memory = Self { map, capacity_bytes, nonce, pid, fd, _file: file };
        let mut start = [0; PROOF_BYTES];
        memory.copy_from(0, &mut start);
        if start != proof(nonce) {
            return Err(not_shared("it belongs to another pool node".into()));
        }
        Ok(memory)
    }

    /// The size of all slots of a layout together, at most.
    pub fn capacity_bytes(&self) -> u64 {
        self.capacity_bytes
    }

    /// The slots of blocks of this size.
    pub fn arena(self: &Arc<Self>, block_bytes: u64) -> Result<Arena, ArenaError> {
        let capacity_bytes = self.capacity_bytes;
        let layout = Layout::new(capacity_bytes, block_bytes).filter(|layout| layout.slots > 0 && block_bytes > 0);
        let layout = layout.ok_or(ArenaError::TooSmall { block_bytes, capacity_bytes })?;
        Ok(Arena { pinned: unpinned(layout), memory: Arc::clone(self), layout })
    }

    /// Takes all memory from the system now, instead of page by page as slots are first written, which is several times slower than
    /// copying. Call it on a dedicated thread: it takes about 0.2 s per GiB. Contents do not change. If the system refuses, the rest is
    /// taken page by page.
    pub fn prefault(&self) -> io::Result<()> {
        for at in (0..self.map.len()).step_by(PREFAULT_BYTES) {
            let len = PREFAULT_BYTES.min(self.map.len() - at);
            self.map.advise_range(Advice::PopulateWrite, at, len)?;
        }
        Ok(())
    }

    /// The whole mapping, for devices that access it, and its length. It does not move as long as the memory lives, and no code holds a
    /// reference into it except to atomics.
    pub(crate) fn mapping(&self) -> (*mut u8, usize) {
        (self.map.as_mut_ptr(), self.map.len())
    }

    /// The offset of the first slot of every layout.
    pub(crate) fn slots_at(&self) -> usize {
        extent_of(self.capacity_bytes).expect("it was mapped").0
    }

    fn copy_to(&self, at: usize, bytes: &[u8]) {
        assert!(at + bytes.len() <= self.map.len(), "write beyond the arena");
        // SAFETY: the range lies inside the mapping; `bytes` is memory of this process only, so the two do not overlap.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), self.map.as_mut_ptr().add(at), bytes.len()) }
    }

    fn copy_from(&self, at: usize, bytes: &mut [u8]) {
        assert!(at + bytes.len() <= self.map.len(), "read beyond the arena");
        // SAFETY: as in copy_to, the other way round.
        unsafe { std::ptr::copy_nonoverlapping(self.map.as_ptr().add(at), bytes.as_mut_ptr(), bytes.len()) }
    }
}

impl Arena {
    /// Creates memory for one layout only: as many slots of `block_bytes` as `capacity_bytes` hold.
    pub fn create(capacity_bytes: u64, block_bytes: u64, nonce: [u8; 16]) -> Result<Self, ArenaError> {
        let fits = |layout: &Layout| layout.slots > 0 && block_bytes > 0;
        if !Layout::new(capacity_bytes, block_bytes).is_some_and(|layout| fits(&layout)) {
            return Err(ArenaError::TooSmall { block_bytes, capacity_bytes });
        }
        Memory::create(capacity_bytes, nonce)?.arena(block_bytes)
    }

    /// Maps the slots of another process on this host.
    pub fn open(info: &ArenaInfo) -> Result<Self, ArenaError> {
        let path = || PathBuf::from(format!("/proc/{}/fd/{}", info.pid, info.fd));
        let absurd = |_| ArenaError::NotShared { path: path(), reason: "its announced size is absurd".into() };
        Arc::new(Memory::open(info)?).arena(info.block_bytes).map_err(absurd)
    }

    /// The description with which another process can map the arena.
    pub fn info(&self) -> ArenaInfo {
        let Memory { pid, fd, nonce, capacity_bytes, .. } = *self.memory;
        ArenaInfo { pid, fd, nonce, capacity_bytes, block_bytes: self.layout.block_bytes as u64 }
    }

    pub fn memory(&self) -> &Arc<Memory> {
        &self.memory
    }

    pub fn slots(&self) -> u32 {
        self.layout.slots
    }

    pub fn block_bytes(&self) -> usize {
        self.layout.block_bytes
    }

    /// Announces that the slot's content is about to change. Call it before a writer is told to write.
    pub fn set_generation(&self, slot: u32, generation: u64) {
        self.generation_cell(slot).store(generation, Ordering::Release);
    }

    /// Copies `bytes` to `offset` in the slot and adds them to the checksum. Panics if they do not fit: callers check sizes from peers.
    pub fn write(&self, slot: u32, offset: usize, bytes: &[u8], hasher: &mut XxHash3_64) {
        let to = self.part(slot, offset, bytes.len());
        // SAFETY: part() is inside the mapping; `bytes` is memory of this process only, so the two do not overlap.
        unsafe { copy_hashed(bytes.as_ptr(), to, bytes.len(), hasher) }
    }

    /// Writes a whole block and returns the checksum of the bytes written.
    pub fn write_block(&self, slot: u32, bytes: &[u8]) -> u64 {
        assert_eq!(bytes.len(), self.layout.block_bytes, "a slot holds one block");
        let mut hasher = XxHash3_64::new();
        self.write(slot, 0, bytes, &mut hasher);
        hasher.finish()
    }

    /// Copies a whole block into newly allocated memory.
    pub fn read_block(&self, slot: u32) -> (Vec<u8>, Copied) {
        let mut bytes = vec![0; self.layout.block_bytes];
        let copied = self.read_into(slot, &mut bytes);
        (bytes, copied)
    }

    /// Copies a whole block to `to`, which must have exactly its length.
    pub fn read_into(&self, slot: u32, to: &mut [u8]) -> Copied {
        assert_eq!(to.len(), self.layout.block_bytes, "a slot holds one block");
        let mut hasher = XxHash3_64::new();
        let from = self.part(slot, 0, to.len());
        // SAFETY: part() is inside the mapping, which does not overlap this process's own memory. Another process may write the
        // slot meanwhile; any bytes are valid bytes, and the copy is validated before use.
        unsafe { copy_hashed(from, to.as_mut_ptr(), to.len(), &mut hasher) };
        Copied { checksum: hasher.finish(), generation_after: self.generation_after(slot) }
    }

    /// The number of pieces in which devices pin the slots. Pieces end where both slots and pages do, so that no slot lies in two.
    pub fn pieces(&self) -> usize {
        self.pinned.len()
    }

    /// Pins a piece of the slots for a device, for as long as they are mapped here. Has no effect if the piece is pinned already. Call it
    /// on a dedicated thread: memory that the system has not provided yet is provided now, and all of it is locked.
    pub fn pin_piece(&self, piece: usize, pin: &dyn Pin) -> Result<(), String> {
        if self.pinned[piece].get().is_some() {
            return Ok(());
        }
        let bytes = self.layout.piece_slots() * self.layout.stride;
        let at = self.layout.slots_at + piece * bytes;
        let bytes = bytes.min(self.layout.end() - at);
        // SAFETY: every existing piece begins inside the mapping.
        let start = NonNull::new(unsafe { self.memory.map.as_mut_ptr().add(at) }).expect("a mapping is not at 0");
        // SAFETY: the mapping is dropped after `pinned`, and neither moves nor shrinks before.
        let pinned = unsafe { pin.pin(start, bytes) }?;
        let _ = self.pinned[piece].set(pinned);
        Ok(())
    }

    /// The address of this slot for the device that pinned it, or `None` if none did. Panics if there is no such slot.
    pub fn device_address(&self, slot: u32) -> Option<u64> {
        let (piece, slot_of_piece) = (slot as usize / self.layout.piece_slots(), slot as usize % self.layout.piece_slots());
        assert!(slot < self.layout.slots, "slot {slot} is outside the arena");
        Some(self.pinned[piece].get()?.address(slot_of_piece * self.layout.stride))
    }

    /// Judges a copy of the slot that a device made and completed, by the slot's present content. This is as safe as
    /// [`read_into`](Self::read_into), which hashes the copy itself: suppose that the device read a byte that is not the published one.
    ///
    /// - If the node had told the writer of that byte to write, it had changed the generation before that. The writer wrote before the
    ///   device read, and the end of the device's copy was seen before the generation is loaded here: the load sees the change.
    /// - If the generation is unchanged, the writer was not allowed to write: it was late beyond its deadline and the following quarantine,
    ///   or broken. No writer restores the published byte, so the wrong one is still there, and is hashed here. (If it were hashed *while*
    ///   the device reads, the byte could still be right here and wrong there.)
    pub fn read_by_device(&self, slot: u32) -> Copied {
        let mut hasher = XxHash3_64::new();
        let bytes = self.layout.block_bytes;
        // SAFETY: part() is inside the mapping. Another process may write the slot meanwhile, as in read_into().
        unsafe { hash_shared(self.part(slot, 0, bytes), bytes, &mut hasher) };
        Copied { checksum: hasher.finish(), generation_after: self.generation_after(slot) }
    }

    /// Copies part of a block. Panics if the slot has no such part.
    pub fn read(&self, slot: u32, offset: usize, len: usize) -> Vec<u8> {
        let from = self.part(slot, offset, len);
        let mut bytes = Vec::with_capacity(len);
        // SAFETY: as in read_into(); the copy initializes `len` bytes.
        unsafe {
            std::ptr::copy_nonoverlapping(from, bytes.as_mut_ptr(), len);
            bytes.set_len(len);
        }
        bytes
    }

    /// The slot's generation, read after everything that was copied from it before this call.
    pub fn generation_after(&self, slot: u32) -> u64 {
        // If a copy saw a byte of a later writer, this load sees the generation that was stored before that writer began.
        fence(Ordering::Acquire);
        self.generation_cell(slot).load(Ordering::Relaxed)
    }

    fn generation_cell(&self, slot: u32) -> &AtomicU64 {
        // SAFETY: generations are 8 bytes each from PAGE on and end before slots_at, inside the mapping, which is page
        // aligned; every process accesses them as atomics only.
        unsafe { &*self.memory.map.as_ptr().add(self.layout.generation_at(slot)).cast::<AtomicU64>() }
    }

    /// A pointer to part of a slot, all of it inside the mapping. Panics if the slot has no such part.
    fn part(&self, slot: u32, offset: usize, len: usize) -> *mut u8 {
        assert!(offset.checked_add(len).is_some_and(|end| end <= self.layout.block_bytes), "outside the slot");
        // SAFETY: slot_at() keeps whole slots inside the mapping.
        unsafe { self.memory.map.as_mut_ptr().add(self.layout.slot_at(slot) + offset) }
    }

    pub(crate) fn layout(&self) -> Layout {
        self.layout
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::core::validate::checksum;

    const NONCE: [u8; 16] = [9; 16];

    fn block(n: u8, bytes: usize) -> Vec<u8> {
        (0..bytes).map(|i| (i as u8).wrapping_mul(31).wrapping_add(n)).collect()
    }

    #[test]
    fn two_mappings_see_the_same_slots() {
        let bytes = 50_000;
        let node = Arena::create(10 * bytes as u64, bytes as u64, NONCE).unwrap();
        let client = Arena::open(&node.info()).unwrap();
        assert_eq!((client.slots(), client.block_bytes()), (node.slots(), bytes));
        for slot in 0..node.slots() {
            node.set_generation(slot, u64::from(slot) + 7);
            assert_eq!(client.write_block(slot, &block(slot as u8, bytes)), checksum(&block(slot as u8, bytes)));
        }
        for slot in 0..node.slots() {
            let expected = block(slot as u8, bytes);
            let copied = Copied { checksum: checksum(&expected), generation_after: u64::from(slot) + 7 };
            let mut copy = vec![0; bytes];
            assert_eq!((node.read_into(slot, &mut copy), copy), (copied, expected.clone()));
            assert_eq!(node.read_block(slot), (expected, copied));
        }
    }

    #[test]
    fn capacity_is_whole_slots_on_cache_lines() {
        let arena = Arena::create(11_000, 1100, NONCE).unwrap();
        assert_eq!(arena.slots(), 9);
        assert!((0..9).all(|slot| arena.layout.slot_at(slot).is_multiple_of(SLOT_ALIGN as usize)));
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        for (capacity, block) in [(100, 101), (0, 1), (100, 0), (u64::MAX, u64::MAX), (u64::MAX, u64::MAX / 2)] {
            assert!(matches!(Arena::create(capacity, block, NONCE), Err(ArenaError::TooSmall { .. })), "{capacity} {block}");
        }
        assert!(matches!(Arena::create(1 << 62, 1 << 20, NONCE), Err(ArenaError::Create { .. })));
    }

    #[test]
    fn another_file_is_not_taken_for_the_arena() {
        let node = Arena::create(1 << 20, 1000, NONCE).unwrap();
        let other = File::open("/dev/null").unwrap();
        let info = node.info();
        for wrong in [
            ArenaInfo { nonce: [8; 16], ..info },
            ArenaInfo { capacity_bytes: info.capacity_bytes - 1, ..info },
            ArenaInfo { fd: other.as_raw_fd(), ..info },
            ArenaInfo { fd: i32::MAX, ..info },
            ArenaInfo { pid: u32::MAX, ..info },
            ArenaInfo { block_bytes: u64::MAX, ..info },
        ] {
            assert!(matches!(Arena::open(&wrong), Err(ArenaError::NotShared { .. })), "{wrong:?}");
        }
    }

    #[test]
    fn prefaulting_changes_no_byte() {
        let node = Arena::create(PREFAULT_BYTES as u64 + 5000, 1000, NONCE).unwrap();
        let client = Arena::open(&node.info()).unwrap();
        client.write_block(3, &block(1, 1000));
        node.memory().prefault().unwrap();
        assert_eq!(client.read_block(3).0, block(1, 1000));
    }

    /// A device that pins everything and records each range.
    #[derive(Debug, Default)]
    struct Taking(std::sync::Mutex<Vec<(usize, usize)>>);

    #[derive(Debug)]
    struct Taken(usize);

    impl Pin for Taking {
        unsafe fn pin(&self, start: NonNull<u8>, bytes: usize) -> Result<Box<dyn Pinned>, String> {
            self.0.lock().unwrap().push((start.addr().get(), bytes));
            Ok(Box::new(Taken(start.addr().get())))
        }
    }

    impl Pinned for Taken {
        fn address(&self, offset: usize) -> u64 {
            (self.0 + offset) as u64
        }
    }

    #[test]
    fn pieces_end_on_pages_and_no_slot_lies_in_two() {
        // Nothing of these files is written, so the system provides no memory.
        for (capacity, block) in [(5 << 30, 1 << 20), (3 << 30, 1_000_003), ((2 << 30) + 1, 4160), (1 << 20, 1000), (9 << 30, 100 << 20)] {
            let arena = Arena::create(capacity, block, NONCE).unwrap();
            let (device, start) = (Taking::default(), arena.memory.mapping().0 as usize + arena.layout.slots_at);
            assert_eq!(arena.device_address(0), None);
            for piece in 0..arena.pieces() {
                arena.pin_piece(piece, &device).unwrap();
            }
            arena.pin_piece(0, &device).unwrap();
            let pieces = device.0.into_inner().unwrap();
            assert_eq!(pieces.len(), arena.pieces(), "each once");
            let mut next = start;
            for &(at, bytes) in &pieces {
                assert!(
                    at == next && at % PAGE == 0 && bytes <= PIECE_BYTES.max(SLOTS_OF_WHOLE_PAGES * arena.layout.stride),
                    "{at} {bytes}"
                );
                next += bytes;
            }
            assert_eq!(next, arena.memory.mapping().0 as usize + arena.layout.end());
            for slot in 0..arena.slots() {
                let (at, end) = (start + slot as usize * arena.layout.stride, start + (slot as usize + 1) * arena.layout.stride);
                assert_eq!(arena.device_address(slot), Some(at as u64));
                assert!(pieces.iter().any(|&(piece, bytes)| piece <= at && end <= piece + bytes), "slot {slot} lies in one");
            }
        }
    }

    #[test]
    fn slots_of_two_layouts_share_memory_and_their_generations_never_meet_by_accident() {
        let memory = Memory::create(1 << 20, NONCE).unwrap();
        let (small, large) = (memory.arena(1500).unwrap(), memory.arena(40_000).unwrap());
        for arena in [&small, &large] {
            let places: std::collections::BTreeSet<usize> = (0..arena.slots()).map(|slot| arena.layout.generation_at(slot)).collect();
            assert_eq!(places.len(), arena.slots() as usize, "a place each");
            assert!(*places.last().unwrap() + 8 <= memory.slots_at());
        }
        large.write_block(1, &block(5, 40_000));
        let first = 40_000_usize.next_multiple_of(64) / 1536;
        small.write_block(first as u32, &block(6, 1500));
        assert_ne!(large.read_block(1).0, block(5, 40_000), "they are the same bytes");
    }

    #[test]
    fn its_size_is_sealed() {
        let node = Arena::create(1 << 20, 1000, NONCE).unwrap();
        let path = format!("/proc/{}/fd/{}", node.info().pid, node.info().fd);
        let file = OpenOptions::new().write(true).open(path).unwrap();
        assert!(file.set_len(0).is_err());
    }
}
