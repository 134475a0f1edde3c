//! A block's shared memory. It records, for every four bytes, whether they were written, the last writer and reader, and whether a copy to
//! them is in flight: so it detects results that a missing barrier, wait or fence leaves to chance.
//!
//! Barriers may join only some of the warps. So each warp has a clock of every other warp: the time up to which it knows the other's
//! actions, from meeting directly or through other warps (vector clocks: Mattern, "Virtual Time and Global States of Distributed Systems",
//! 1989).

use crate::{
    fault::{Fault, Kind},
    ptx::program::SHARED_START,
};

pub(crate) struct Shared {
    bytes: Vec<u8>,
    words: Vec<Word>,
    /// The time of each warp's last read of each word, words by warps; zero if there was none.
    reads: Vec<u32>,
    /// The current time, which advances with every access and barrier.
    now: u32,
    /// For each pair of warps, the time up to which the first knows the second's actions.
    seen: Vec<Vec<u32>>,
    /// The time at which each warp last made its writes visible to warpgroup products.
    fences: Vec<u32>,
}

#[derive(Clone, Copy, Default)]
struct Word {
    /// The time of the last write; zero if there was none.
    written: u32,
    /// The time of the last read by any warp.
    read: u32,
    /// The instruction of the last write.
    written_at: u32,
    read_at: u32,
    writer: u8,
    reader: u8,
    /// `pending - 1` is the warp whose copy to this word is in flight, if not zero.
    pending: u8,
    valid: bool,
}

/// The writer of atomic operations by several warps.
const ATOMIC: u8 = 255;

/// The origin of an access.
#[derive(Clone, Copy)]
pub(crate) struct Who {
    pub(crate) warp: u8,
    pub(crate) pc: u32,
}

/// A fault, and the instruction of the other access.
pub(crate) type Clash = (Fault, Option<u32>);

impl Shared {
    /// Creates the memory. `ranges`: the addresses of the variables.
    pub(crate) fn new(ranges: &[(u32, u32)], warps: usize) -> Self {
        let end = ranges.iter().map(|r| r.1).max().unwrap_or(SHARED_START);
        let mut words = vec![Word::default(); (end as usize).div_ceil(4)];
        for &(start, end) in ranges {
            words[start as usize / 4..(end as usize).div_ceil(4)].iter_mut().for_each(|word| word.valid = true);
        }
        Self {
            bytes: vec![0; words.len() * 4],
            reads: vec![0; words.len() * warps],
            words,
            now: 1,
            seen: vec![vec![0; warps]; warps],
            fences: vec![0; warps],
        }
    }

    /// Resets the memory for the next block.
    pub(crate) fn clear(&mut self) {
        for word in &mut self.words {
            *word = Word { valid: word.valid, ..Word::default() };
        }
        self.reads.fill(0);
        self.now = 1;
        self.seen.iter_mut().for_each(|seen| seen.fill(0));
        self.fences.fill(0);
    }

    /// Passes a barrier at which all warps meet.
    pub(crate) fn pass_barrier(&mut self) {
        let now = self.now;
        self.seen.iter_mut().for_each(|seen| seen.fill(now));
        self.now += 1;
    }

    /// The clock that a warp brings to a barrier: its knowledge, with its own actions.
    pub(crate) fn clock(&mut self, warp: usize) -> Vec<u32> {
        let mut clock = self.seen[warp].clone();
        clock[warp] = self.now;
        self.now += 1;
        clock
    }

    /// Merges the clocks that the other warps brought to a barrier into a warp's.
    pub(crate) fn learn(&mut self, warp: usize, clock: &[u32]) {
        for (seen, &then) in self.seen[warp].iter_mut().zip(clock) {
            *seen = (*seen).max(then);
        }
    }

    /// Whether the last write of a word is not ordered before an access by `who` now.
    fn write_races(&self, word: &Word, who: u8) -> bool {
        let seen = &self.seen[usize::from(who)];
        match word.writer {
            by if by == who => false,
            ATOMIC => seen.iter().any(|&seen| word.written > seen),
            by => word.written > seen[usize::from(by)],
        }
    }

    /// A warp whose read of a word is not ordered before an access by `who` now.
    fn racing_reader(&self, at: usize, who: u8) -> Option<u8> {
        let seen = &self.seen[usize::from(who)];
        let reads = &self.reads[at * seen.len()..][..seen.len()];
        let racing = |warp: &usize| *warp != usize::from(who) && reads[*warp] > seen[*warp];
        (0..reads.len()).find(racing).map(|warp| warp as u8)
    }

    pub(crate) fn fence(&mut self, warp: usize) {
        self.now += 1;
        self.fences[warp] = self.now;
        self.now += 1;
    }

    /// Advances the time for a new instruction.
    pub(crate) fn tick(&mut self) {
        self.now += 1;
    }

    fn words(&self, address: u64, len: usize, doing: &str) -> Result<std::ops::Range<usize>, Clash> {
        let range = (address / 4) as usize..(address as usize + len).div_ceil(4);
        if !(address as usize).is_multiple_of(len) {
            return Err((Fault::new(Kind::Alignment, format!("{doing} {len} bytes of shared memory at {address:#x}")), None));
        }
        if address > u64::from(u32::MAX) || range.end > self.words.len() || !self.words[range.clone()].iter().all(|word| word.valid) {
            let what = format!("{doing} {len} bytes of shared memory at {address:#x}, which are outside of its variables");
            return Err((Fault::new(Kind::Address, what), None));
        }
        Ok(range)
    }

    #[inline]
    pub(crate) fn read(&mut self, address: u64, len: usize, who: Who) -> Result<&[u8], Clash> {
        let range = self.words(address, len, "reads")?;
        for at in range {
            let word = self.words[at];
            if word.pending != 0 || word.written == 0 || self.write_races(&word, who.warp) {
                return Err(word.refuse(address, who, "reads"));
            }
            self.note_read(at, who);
        }
        Ok(&self.bytes[address as usize..address as usize + len])
    }

    #[inline]
    fn note_read(&mut self, at: usize, who: Who) {
        let warps = self.seen.len();
        self.reads[at * warps + usize::from(who.warp)] = self.now;
        let word = &mut self.words[at];
        (word.reader, word.read, word.read_at) = (who.warp, self.now, who.pc);
    }

    #[inline]
    pub(crate) fn write(&mut self, address: u64, from: &[u8], who: Who) -> Result<(), Clash> {
        let range = self.words(address, from.len(), "writes")?;
        self.may_write(range.clone(), address, who)?;
        for word in &mut self.words[range] {
            (word.written, word.writer, word.written_at) = (self.now, who.warp, who.pc);
        }
        self.bytes[address as usize..address as usize + from.len()].copy_from_slice(from);
        Ok(())
    }

    fn may_write(&self, range: std::ops::Range<usize>, address: u64, who: Who) -> Result<(), Clash> {
        for at in range {
            let mut word = self.words[at];
            let reader = self.racing_reader(at, who.warp);
            if let Some(reader) = reader {
                word.reader = reader;
            }
            if word.pending != 0 || reader.is_some() || self.write_races(&word, who.warp) {
                return Err(word.refuse(address, who, "writes"));
            }
        }
        Ok(())
    }

    /// Changes a number of `len` bytes by `change`, whose result may exceed them; returns the old number. Atomic accesses do not race with
    /// each other.
    pub(crate) fn update(&mut self, address: u64, len: usize, who: Who, change: impl FnOnce(u64) -> u64) -> Result<u64, Clash> {
        let range = self.words(address, len, "updates")?;
        for at in range {
            let word = self.words[at];
            let raced = word.writer != ATOMIC && self.write_races(&word, who.warp) || self.racing_reader(at, who.warp).is_some();
            if word.pending != 0 || word.written == 0 || raced {
                return Err(word.refuse(address, who, "updates"));
            }
            // A plain access in this interval races, even by this warp: it is not known to be the only one.
            let word = &mut self.words[at];
            word.writer = ATOMIC;
            (word.written, word.written_at) = (self.now, who.pc);
        }
        let at = address as usize;
        let mut old = [0; 8];
        old[..len].copy_from_slice(&self.bytes[at..at + len]);
        let old = u64::from_le_bytes(old);
        self.bytes[at..at + len].copy_from_slice(&change(old).to_le_bytes()[..len]);
        Ok(old)
    }

    /// Notes that a copy will arrive here: until then no access is allowed.
    pub(crate) fn expect_copy(&mut self, address: u64, len: usize, who: Who) -> Result<(), Clash> {
        let range = self.words(address, len, "copies to")?;
        self.may_write(range.clone(), address, who)?;
        for word in &mut self.words[range] {
            (word.pending, word.written_at) = (who.warp + 1, who.pc);
        }
        Ok(())
    }

    pub(crate) fn arrive(&mut self, address: u64, from: &[u8], warp: u8) {
        let range = (address / 4) as usize..(address as usize + from.len()).div_ceil(4);
        for word in &mut self.words[range] {
            (word.pending, word.written, word.writer) = (0, self.now, warp);
        }
        self.bytes[address as usize..address as usize + from.len()].copy_from_slice(from);
    }

    /// A product's read through the async proxy, which sees the writes before their writer's last fence.
    pub(crate) fn read_by_product(&mut self, address: u64, who: Who) -> Result<u16, Clash> {
        let range = (address / 4) as usize..(address / 4) as usize + 1;
        if range.end > self.words.len() || !self.words[range.start].valid {
            return Err((
                Fault::new(Kind::Address, format!("a product reads shared memory at {address:#x}, outside of its variables")),
                None,
            ));
        }
        let word = self.words[range.start];
        if word.pending != 0 || word.written == 0 || self.write_races(&word, who.warp) {
            return Err(word.refuse(address, who, "multiplies"));
        }
        if self.fences.get(usize::from(word.writer)).is_none_or(|&fence| fence < word.written) {
            let what = format!(
                "a product reads shared memory at {address:#x}, whose writer (warp {}) did not make it visible to products (fence.proxy.async)",
                word.writer
            );
            return Err((Fault::new(Kind::Race, what), Some(word.written_at)));
        }
        self.note_read(range.start, who);
        let at = address as usize;
        Ok(u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]))
    }
}

impl Word {
    #[cold]
    fn refuse(&self, address: u64, who: Who, doing: &str) -> Clash {
        let warp = |who: u8| match who {
            ATOMIC => "several warps' atomics".to_owned(),
            _ => format!("warp {who}"),
        };
        let own = warp(who.warp);
        if self.pending != 0 {
            let what = format!("{own} {doing} shared memory at {address:#x}, where a copy of warp {} has not arrived", self.pending - 1);
            return (Fault::new(Kind::InFlight, what), Some(self.written_at));
        }
        if self.written == 0 && doing != "writes" {
            return (
                Fault::new(Kind::Uninitialized, format!("{own} {doing} shared memory at {address:#x}, which was never written")),
                None,
            );
        }
        let (other, did, at) = if self.writer != who.warp && self.written >= self.read {
            (self.writer, "wrote", self.written_at)
        } else if self.read > self.written {
            (self.reader, "read", self.read_at)
        } else {
            (self.writer, "wrote", self.written_at)
        };
        let what = format!("{own} {doing} shared memory at {address:#x}, which {} {did}; no barrier is between them", warp(other));
        (Fault::new(Kind::Race, what), Some(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(warp: u8) -> Who {
        Who { warp, pc: u32::from(warp) }
    }

    fn kind<T: std::fmt::Debug>(outcome: Result<T, Clash>) -> Kind {
        outcome.unwrap_err().0.kind
    }

    #[test]
    fn accesses_that_no_barrier_orders_race() {
        let mut shared = Shared::new(&[(0x410, 0x420)], 2);
        assert_eq!(kind(shared.read(0x410, 4, who(0)).map(<[u8]>::to_vec)), Kind::Uninitialized);
        shared.write(0x410, &[1; 4], who(0)).unwrap();
        shared.read(0x410, 4, who(0)).unwrap();
        assert_eq!(kind(shared.read(0x410, 4, who(1)).map(<[u8]>::to_vec)), Kind::Race);
        shared.pass_barrier();
        shared.tick();
        shared.read(0x410, 4, who(1)).unwrap();
        assert_eq!(kind(shared.write(0x410, &[2; 4], who(0))), Kind::Race, "warp 1 may not have read it yet");
        shared.pass_barrier();
        shared.tick();
        shared.write(0x410, &[2; 4], who(0)).unwrap();
    }

    #[test]
    fn who_met_is_ordered_and_who_did_not_is_not() {
        let mut shared = Shared::new(&[(0x410, 0x420)], 3);
        shared.write(0x410, &[1; 4], who(0)).unwrap();
        let clock = shared.clock(0);
        shared.write(0x414, &[1; 4], who(0)).unwrap();
        shared.learn(1, &clock);
        shared.read(0x410, 4, who(1)).unwrap();
        assert_eq!(kind(shared.read(0x414, 4, who(1)).map(<[u8]>::to_vec)), Kind::Race, "written after warp 0 told");
        assert_eq!(kind(shared.read(0x410, 4, who(2)).map(<[u8]>::to_vec)), Kind::Race, "warp 2 met no one");
        // The warps meet through warp 1.
        let clock = shared.clock(1);
        shared.learn(2, &clock);
        shared.read(0x410, 4, who(2)).unwrap();
        assert_eq!(kind(shared.write(0x410, &[2; 4], who(0))), Kind::Race, "two have read it since");
        let clock = shared.clock(2);
        shared.learn(0, &clock);
        shared.write(0x410, &[2; 4], who(0)).unwrap();
    }

    #[test]
    fn variables_have_ends_and_alignment() {
        let mut shared = Shared::new(&[(0x410, 0x420), (0x470, 0x480)], 1);
        assert_eq!(kind(shared.write(0x420, &[0; 4], who(0))), Kind::Address);
        assert_eq!(kind(shared.write(0x414, &[0; 8], who(0))), Kind::Alignment);
        shared.write(0x470, &[0; 16], who(0)).unwrap();
        assert_eq!(kind(shared.write(0x480, &[0; 4], who(0))), Kind::Address);
    }

    #[test]
    fn a_copy_is_not_there_before_its_wait() {
        let mut shared = Shared::new(&[(0x410, 0x420)], 2);
        shared.expect_copy(0x410, 16, who(0)).unwrap();
        assert_eq!(kind(shared.read(0x410, 4, who(0)).map(<[u8]>::to_vec)), Kind::InFlight);
        shared.arrive(0x410, &[5; 16], 0);
        assert_eq!(shared.read(0x410, 4, who(0)).unwrap(), [5; 4]);
        assert_eq!(kind(shared.read(0x410, 4, who(1)).map(<[u8]>::to_vec)), Kind::Race);
        shared.pass_barrier();
        shared.tick();
        assert_eq!(kind(shared.read_by_product(0x410, who(1))), Kind::Race, "not fenced");
        shared.fence(0);
        shared.pass_barrier();
        shared.tick();
        assert_eq!(shared.read_by_product(0x410, who(1)).unwrap(), 0x0505);
    }

    #[test]
    fn atomics_race_with_plain_accesses_only() {
        let mut shared = Shared::new(&[(0x410, 0x420)], 3);
        shared.write(0x410, &[0; 8], who(0)).unwrap();
        shared.pass_barrier();
        shared.tick();
        for warp in 0..3 {
            shared.update(0x410, 8, who(warp), |x| x + 1).unwrap();
        }
        assert_eq!(kind(shared.read(0x410, 8, who(0)).map(<[u8]>::to_vec)), Kind::Race);
        shared.pass_barrier();
        shared.tick();
        assert_eq!(shared.read(0x410, 8, who(0)).unwrap(), 3u64.to_le_bytes());
    }
}
