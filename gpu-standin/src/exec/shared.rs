//! A block's shared memory. It knows, for every four bytes, whether they were written, who wrote and who read them
//! last, and whether a copy is on its way there: so it finds what a missing barrier, wait or fence leaves to chance.

use crate::{
    fault::{Fault, Kind},
    ptx::program::SHARED_START,
};

pub(crate) struct Shared {
    bytes: Vec<u8>,
    words: Vec<Word>,
    /// Advances with every access and barrier.
    now: u32,
    /// When the last barrier of all warps was.
    barrier: u32,
    /// When each warp last made its writes visible to warpgroup products.
    fences: Vec<u32>,
}

#[derive(Clone, Copy, Default)]
struct Word {
    /// Zero: never.
    written: u32,
    read: u32,
    /// Where in the code.
    written_at: u32,
    read_at: u32,
    writer: u8,
    reader: u8,
    /// A copy by warp `pending - 1` is on its way here.
    pending: u8,
    valid: bool,
}

const ATOMIC: u8 = 254;
const SEVERAL: u8 = 255;

/// Who accesses.
#[derive(Clone, Copy)]
pub(crate) struct Who {
    pub(crate) warp: u8,
    pub(crate) pc: u32,
}

/// What is wrong, and where in the code the other side is.
pub(crate) type Clash = (Fault, Option<u32>);

impl Shared {
    /// `ranges`: addresses of the variables.
    pub(crate) fn new(ranges: &[(u32, u32)], warps: usize) -> Self {
        let end = ranges.iter().map(|r| r.1).max().unwrap_or(SHARED_START);
        let mut words = vec![Word::default(); (end as usize).div_ceil(4)];
        for &(start, end) in ranges {
            words[start as usize / 4..(end as usize).div_ceil(4)].iter_mut().for_each(|word| word.valid = true);
        }
        Self { bytes: vec![0; words.len() * 4], words, now: 1, barrier: 0, fences: vec![0; warps] }
    }

    /// For the next block.
    pub(crate) fn clear(&mut self) {
        for word in &mut self.words {
            *word = Word { valid: word.valid, ..Word::default() };
        }
        (self.now, self.barrier) = (1, 0);
        self.fences.fill(0);
    }

    pub(crate) fn pass_barrier(&mut self) {
        self.barrier = self.now;
        self.now += 1;
    }

    pub(crate) fn fence(&mut self, warp: usize) {
        self.now += 1;
        self.fences[warp] = self.now;
        self.now += 1;
    }

    /// A new instruction.
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
        for word in &mut self.words[range] {
            if word.pending != 0 || word.written == 0 || (word.written > self.barrier && word.writer != who.warp) {
                return Err(word.refuse(address, who, "reads"));
            }
            word.reader = if word.read > self.barrier && word.reader != who.warp { SEVERAL } else { who.warp };
            (word.read, word.read_at) = (self.now, who.pc);
        }
        Ok(&self.bytes[address as usize..address as usize + len])
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
        for word in &self.words[range] {
            let raced = (word.written > self.barrier && word.writer != who.warp) || (word.read > self.barrier && word.reader != who.warp);
            if word.pending != 0 || raced {
                return Err(word.refuse(address, who, "writes"));
            }
        }
        Ok(())
    }

    /// A number of `len` bytes, changed by `change`, which may exceed it; returns what it was. Atomic accesses do not race
    /// with each other.
    pub(crate) fn update(&mut self, address: u64, len: usize, who: Who, change: impl FnOnce(u64) -> u64) -> Result<u64, Clash> {
        let range = self.words(address, len, "updates")?;
        for word in &mut self.words[range] {
            let raced = |when: u32, by: u8| when > self.barrier && by != who.warp && by != ATOMIC;
            if word.pending != 0 || word.written == 0 || raced(word.written, word.writer) || raced(word.read, word.reader) {
                return Err(word.refuse(address, who, "updates"));
            }
            // A plain access in this interval races, even by this warp: that it was alone is not known.
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

    /// A copy will arrive here: until then nobody may look.
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

    /// A product's read, by another proxy: it sees what was written before its writer's last fence.
    pub(crate) fn read_by_product(&mut self, address: u64, who: Who) -> Result<u16, Clash> {
        let range = (address / 4) as usize..(address / 4) as usize + 1;
        if range.end > self.words.len() || !self.words[range.start].valid {
            return Err((
                Fault::new(Kind::Address, format!("a product reads shared memory at {address:#x}, outside of its variables")),
                None,
            ));
        }
        let word = &mut self.words[range.start];
        if word.pending != 0 || word.written == 0 || (word.written > self.barrier && word.writer != who.warp) {
            return Err(word.refuse(address, who, "multiplies"));
        }
        if self.fences.get(usize::from(word.writer)).is_none_or(|&fence| fence < word.written) {
            let what = format!(
                "a product reads shared memory at {address:#x}, whose writer (warp {}) did not make it visible to products (fence.proxy.async)",
                word.writer
            );
            return Err((Fault::new(Kind::Race, what), Some(word.written_at)));
        }
        word.reader = if word.read > self.barrier && word.reader != who.warp { SEVERAL } else { who.warp };
        (word.read, word.read_at) = (self.now, who.pc);
        let at = address as usize;
        Ok(u16::from_le_bytes([self.bytes[at], self.bytes[at + 1]]))
    }
}

impl Word {
    #[cold]
    fn refuse(&self, address: u64, who: Who, doing: &str) -> Clash {
        let warp = |who: u8| match who {
            ATOMIC => "several warps' atomics".to_owned(),
            SEVERAL => "several warps".to_owned(),
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
