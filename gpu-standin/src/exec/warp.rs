//! A warp: 32 lanes that run together where possible.
//!
//! Lanes that have diverged form groups. The group that is furthest behind runs until it catches up with another: so they reconverge where
//! the paths meet, in the order in which compilers lay out code. An instruction for named lanes (`.sync`) waits for them; if they cannot
//! arrive, that is an error.

use super::{
    Block,
    alu::compute,
    shared::{Clash, Who},
    special, tensor,
};
use crate::{
    fault::{Fault, Kind},
    memory::Writer,
    ptx::program::{Access, Atomic, Instr, Kernel, NO_GUARD, Op, Shuffle, Space, Special},
};

pub(crate) type Lanes = [u32; 32];
pub(crate) type LongLanes = [u64; 32];

/// A warp's registers, 32 lanes side by side.
#[derive(Debug)]
pub(crate) struct Registers {
    r32: Vec<Lanes>,
    r64: Vec<LongLanes>,
    predicates: Vec<u32>,
}

impl Registers {
    /// Creates the registers of a kernel's warp, with its constants in place.
    fn new(kernel: &Kernel) -> Self {
        let [r32, r64, predicates] = kernel.slots;
        let mut registers = Self { r32: vec![[0; 32]; r32], r64: vec![[0; 32]; r64], predicates: vec![0; predicates] };
        for &(slot, value) in &kernel.constants32 {
            registers.r32[slot as usize] = [value; 32];
        }
        for &(slot, value) in &kernel.constants64 {
            registers.r64[slot as usize] = [value; 32];
        }
        for &(slot, value) in &kernel.constant_predicates {
            registers.predicates[slot as usize] = if value { u32::MAX } else { 0 };
        }
        registers
    }

    #[inline(always)]
    pub(crate) fn r32(&self, slot: u16) -> &Lanes {
        &self.r32[slot as usize]
    }

    #[inline(always)]
    pub(crate) fn r64(&self, slot: u16) -> &LongLanes {
        &self.r64[slot as usize]
    }

    #[inline(always)]
    pub(crate) fn predicate(&self, slot: u16) -> u32 {
        self.predicates[slot as usize]
    }

    #[inline(always)]
    pub(crate) fn set32(&mut self, slot: u16, values: Lanes, mask: u32) {
        let to = &mut self.r32[slot as usize];
        if mask == u32::MAX {
            *to = values;
        } else {
            for i in 0..32 {
                to[i] = if mask >> i & 1 == 1 { values[i] } else { to[i] };
            }
        }
    }

    #[inline(always)]
    pub(crate) fn set64(&mut self, slot: u16, values: LongLanes, mask: u32) {
        let to = &mut self.r64[slot as usize];
        if mask == u32::MAX {
            *to = values;
        } else {
            for i in 0..32 {
                to[i] = if mask >> i & 1 == 1 { values[i] } else { to[i] };
            }
        }
    }

    #[inline(always)]
    pub(crate) fn set_predicate(&mut self, slot: u16, bits: u32, mask: u32) {
        let to = &mut self.predicates[slot as usize];
        *to = *to & !mask | bits & mask;
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    Ready,
    /// Waiting at the barrier of this instruction.
    AtBarrier(usize),
    Ended,
}

/// Lanes at one instruction.
#[derive(Clone, Copy)]
struct Group {
    pc: usize,
    mask: u32,
    /// Whether the group waits for other lanes.
    waits: bool,
}

/// A lane's copy of 16 bytes that has not arrived.
struct Copy {
    to: u32,
    from: u64,
    /// The number of bytes read; the rest is zeros.
    bytes: u32,
    pc: usize,
}

/// A product that has not been computed.
struct Product {
    pc: usize,
    instr: Instr,
    /// The first operand, if it comes from registers.
    a: Vec<Lanes>,
    a_descriptor: u64,
    b_descriptor: u64,
    accumulate: bool,
}

pub(crate) struct Warp {
    index: usize,
    pub(crate) state: State,
    pub(crate) registers: Registers,
    groups: Vec<Group>,
    all_lanes: u32,
    threads: [u32; 3],
    grid: [u32; 3],
    copies: Vec<Copy>,
    copy_groups: Vec<Vec<Copy>>,
    products: Vec<Product>,
    product_groups: Vec<Vec<Product>>,
    /// The accumulators of products in flight, with their earlier contents.
    busy: Vec<u16>,
    held: Vec<Lanes>,
    /// Whether registers were fenced for products since the last wait.
    fenced: bool,
}

/// The contents of an accumulator whose product is in flight: a NaN.
const IN_FLIGHT: u32 = 0x7fff_dead;

impl Warp {
    pub(crate) fn new(kernel: &Kernel, index: usize, count: u32, threads: [u32; 3], grid: [u32; 3]) -> Self {
        let registers = kernel.spare_registers().pop().unwrap_or_else(|| Registers::new(kernel));
        let lanes = (count - 32 * index as u32).min(32);
        Self {
            index,
            state: State::Ready,
            registers,
            groups: Vec::new(),
            all_lanes: if lanes == 32 { u32::MAX } else { (1 << lanes) - 1 },
            threads,
            grid,
            copies: Vec::new(),
            copy_groups: Vec::new(),
            products: Vec::new(),
            product_groups: Vec::new(),
            busy: Vec::new(),
            held: Vec::new(),
            fenced: false,
        }
    }

    /// Starts on a block.
    pub(crate) fn begin(&mut self, kernel: &Kernel, at: [u32; 3]) {
        for &(slot, which) in &kernel.specials {
            self.registers.r32[slot as usize] = special(which, 32 * self.index as u32, self.threads, self.grid, at);
        }
        debug_assert!(kernel.specials.iter().all(|(_, which)| *which != Special::Lane || self.threads[0] > 0));
        self.state = State::Ready;
        self.groups.clear();
        self.groups.push(Group { pc: 0, mask: self.all_lanes, waits: false });
        self.copies.clear();
        self.copy_groups.clear();
        self.products.clear();
        self.product_groups.clear();
        self.busy.clear();
        self.held.clear();
    }

    pub(crate) fn pass_barrier(&mut self) {
        if let State::AtBarrier(pc) = self.state {
            self.state = State::Ready;
            self.groups[0] = Group { pc: pc + 1, mask: self.groups[0].mask, waits: false };
        }
    }

    /// Runs to the next barrier, or to the end.
    pub(crate) fn run(&mut self, block: &mut Block<'_>) -> Result<(), Fault> {
        if self.state != State::Ready {
            return Ok(());
        }
        #[cfg(target_arch = "x86_64")]
        if std::arch::is_x86_feature_detected!("avx2") && std::arch::is_x86_feature_detected!("fma") {
            // SAFETY: the processor has both.
            return unsafe { self.run_avx2(block) };
        }
        self.run_any(block)
    }

    #[cfg(target_arch = "x86_64")]
    #[target_feature(enable = "avx2,fma,bmi2,lzcnt,popcnt")]
    fn run_avx2(&mut self, block: &mut Block<'_>) -> Result<(), Fault> {
        self.run_any(block)
    }

    #[inline(always)]
    fn run_any(&mut self, block: &mut Block<'_>) -> Result<(), Fault> {
        let kernel = block.kernel;
        while let Some(at) = self.next_group(kernel)? {
            let Group { mut pc, mask, .. } = self.groups[at];
            let alone = self.groups.len() == 1;
            loop {
                let instr = &kernel.code[pc];
                let mut active = mask;
                if instr.guard != NO_GUARD {
                    let guard = self.registers.predicate(instr.guard);
                    active &= if instr.negated { !guard } else { guard };
                }
                if !self.busy.is_empty() {
                    self.check_busy(kernel, pc, active)?;
                }
                match instr.op {
                    Op::Bra => {
                        let target = instr.imm as usize;
                        if active == mask {
                            pc = target;
                        } else if active == 0 {
                            pc += 1;
                        } else {
                            self.groups[at] = Group { pc: pc + 1, mask: mask & !active, waits: false };
                            self.groups.push(Group { pc: target, mask: active, waits: false });
                            break;
                        }
                        if !alone {
                            self.groups[at].pc = pc;
                            break;
                        }
                        continue;
                    }
                    Op::Ret => {
                        if active == mask {
                            self.groups.swap_remove(at);
                            break;
                        }
                        if active != 0 {
                            self.groups[at] = Group { pc: pc + 1, mask: mask & !active, waits: false };
                            break;
                        }
                    }
                    Op::Arrive | Op::Meet => {
                        if active == 0 {
                        } else if active != self.all_lanes {
                            self.groups[at] = Group { pc, mask, waits: true };
                            break;
                        } else {
                            let [id, threads] = [instr.a, instr.b].map(|slot| self.registers.r32(slot)[0]);
                            let waits = instr.op == Op::Meet;
                            let goes_on = block.barriers.arrive(id, threads, self.index, waits, &mut block.shared);
                            if !goes_on.map_err(|fault| self.fault(kernel, pc, fault))? {
                                self.groups[at].pc = pc;
                                self.state = State::AtBarrier(pc);
                                return Ok(());
                            }
                        }
                    }
                    Op::Bar => {
                        if active == 0 {
                        } else if active != self.all_lanes {
                            self.groups[at] = Group { pc, mask, waits: true };
                            break;
                        } else {
                            self.groups[at].pc = pc;
                            self.state = State::AtBarrier(pc);
                            return Ok(());
                        }
                    }
                    _ if active == 0 => {}
                    _ => {
                        let done = compute(&mut self.registers, &kernel.lists, instr, active);
                        let done = match done {
                            Ok(done) => done,
                            Err(what) => return Err(self.fault(kernel, pc, Fault::new(Kind::Unsupported, what))),
                        };
                        if !done && !self.other(block, pc, instr, active, mask).map_err(|fault| self.fault(kernel, pc, fault))? {
                            self.groups[at] = Group { pc, mask, waits: true };
                            break;
                        }
                    }
                }
                pc += 1;
                if !alone && kernel.leaders[pc] {
                    self.groups[at].pc = pc;
                    break;
                }
            }
        }
        self.state = State::Ended;
        Ok(())
    }

    #[cold]
    fn fault(&self, kernel: &Kernel, pc: usize, fault: Fault) -> Fault {
        fault.at(format!("warp {}, {}", self.index, kernel.place(pc)))
    }

    /// Chooses the group that is furthest behind; groups at the same instruction are merged.
    fn next_group(&mut self, kernel: &Kernel) -> Result<Option<usize>, Fault> {
        if self.groups.len() > 1 {
            self.groups.sort_by_key(|group| group.pc);
            self.groups.dedup_by(|later, earlier| {
                let same = later.pc == earlier.pc;
                if same {
                    earlier.mask |= later.mask;
                    earlier.waits = false;
                }
                same
            });
        }
        if let Some(at) = self.groups.iter().position(|group| !group.waits) {
            return Ok(Some(at));
        }
        let Some(first) = self.groups.first() else { return Ok(None) };
        let ended = self.all_lanes & !self.groups.iter().fold(0, |all, group| all | group.mask);
        let what = format!("lanes {:#010x} wait for others that do not come; {ended:#010x} have ended", first.mask);
        let fault = self.groups[1..].iter().fold(Fault::new(Kind::Divergence, what), |fault, group| {
            fault.at(format!("lanes {:#010x} are at {}", group.mask, kernel.place(group.pc)))
        });
        Err(self.fault(kernel, first.pc, fault))
    }

    fn who(&self, pc: usize) -> Who {
        Who { warp: self.index as u8, pc: pc as u32 }
    }

    fn writer(&self, block: &Block<'_>) -> Writer {
        Writer::new(block.launch, block.index, block.interval, self.index as u32)
    }

    /// Executes an instruction that is not arithmetic. Returns false if it waits for other lanes and must be tried again.
    #[inline(always)]
    fn other(&mut self, block: &mut Block<'_>, pc: usize, instr: &Instr, active: u32, mask: u32) -> Result<bool, Fault> {
        let list = &block.kernel.lists[instr.list as usize..][..instr.count as usize];
        match instr.op {
            Op::Load(access) => self.load(block, pc, instr, list, access, active)?,
            Op::Store(access) => self.store(block, pc, instr, list, access, active)?,
            Op::AtomShared { what, wide } => {
                let who = self.who(pc);
                let addresses = *self.registers.r64(instr.a);
                let values = if wide { *self.registers.r64(instr.b) } else { self.registers.r32(instr.b).map(u64::from) };
                let mut old = [0; 32];
                block.shared.tick();
                for i in lanes(active) {
                    let change = |x: u64| match what {
                        Atomic::Add => x.wrapping_add(values[i]),
                        Atomic::Max => x.max(values[i]),
                        Atomic::Min => x.min(values[i]),
                    };
                    let address = addresses[i].wrapping_add_signed(instr.imm);
                    let len = if wide { 8 } else { 4 };
                    old[i] = block.shared.update(address, len, who, change).map_err(|clash| placed(block.kernel, clash, i))?;
                }
                if wide {
                    self.registers.set64(instr.d, old, active);
                } else {
                    self.registers.set32(instr.d, old.map(|x| x as u32), active);
                }
            }
            Op::CopyAsync => {
                let who = self.who(pc);
                let (to, from, bytes) = (*self.registers.r32(instr.a), *self.registers.r64(instr.b), *self.registers.r32(instr.c));
                block.shared.tick();
                for i in lanes(active) {
                    if bytes[i] > 16 {
                        return Err(Fault::new(Kind::Address, format!("lane {i} copies {} of 16 bytes", bytes[i])));
                    }
                    if from[i] % 16 != 0 {
                        return Err(Fault::new(Kind::Alignment, format!("lane {i} copies 16 bytes from {:#x}", from[i])));
                    }
                    block.shared.expect_copy(u64::from(to[i]), 16, who).map_err(|clash| placed(block.kernel, clash, i))?;
                    // The source must exist from now on.
                    if bytes[i] > 0 {
                        block.memory.load(from[i], bytes[i] as usize, self.writer(block)).map_err(|fault| fault.at(format!("lane {i}")))?;
                    }
                    self.copies.push(Copy { to: to[i], from: from[i], bytes: bytes[i], pc });
                }
            }
            Op::CopyCommit => {
                if active != self.all_lanes {
                    return Ok(false);
                }
                self.copy_groups.push(std::mem::take(&mut self.copies));
            }
            Op::CopyWait => {
                if active != self.all_lanes {
                    return Ok(false);
                }
                let done = self.copy_groups.len().saturating_sub(instr.imm as usize);
                let writer = self.writer(block);
                block.shared.tick();
                for copy in self.copy_groups.drain(..done).flatten() {
                    let mut bytes = [0; 16];
                    if copy.bytes > 0 {
                        let loaded = block.memory.load(copy.from, copy.bytes as usize, writer);
                        bytes = loaded.map_err(|fault| fault.at(format!("a copy begun at {}", block.kernel.place(copy.pc))))?;
                    }
                    block.shared.arrive(u64::from(copy.to), &bytes, self.index as u8);
                }
            }
            Op::FenceProxy => block.shared.fence(self.index),
            Op::Shfl(kind) => return self.shuffle(instr, list, kind, active),
            Op::Ballot | Op::VoteAny | Op::VoteAll => {
                let members = self.members(instr.b, active)?;
                if members != active {
                    return Ok(false);
                }
                let from = self.registers.predicate(instr.a);
                let votes = if instr.imm == 1 { !from } else { from } & active;
                match instr.op {
                    Op::Ballot => self.registers.set32(instr.d, [votes; 32], active),
                    Op::VoteAny => self.registers.set_predicate(instr.d, if votes != 0 { u32::MAX } else { 0 }, active),
                    _ => self.registers.set_predicate(instr.d, if votes == active { u32::MAX } else { 0 }, active),
                }
            }
            Op::SetRegisters => {
                if active != self.all_lanes {
                    return Ok(false);
                }
                block.registers[self.index] = Some(instr.imm as u32);
            }
            Op::SyncWarp => {
                let members = self.members(instr.a, active)?;
                if members != active {
                    return Ok(false);
                }
            }
            Op::LoadMatrix { transposed } => {
                if active != u32::MAX {
                    return Ok(false);
                }
                self.load_matrix(block, pc, instr, list, transposed)?;
            }
            Op::MoveMatrix => {
                if active != u32::MAX {
                    return Ok(false);
                }
                let turned = tensor::transpose(self.registers.r32(instr.a));
                self.registers.set32(instr.d, turned, active);
            }
            Op::Mma => {
                if active != u32::MAX {
                    return Ok(false);
                }
                let r = |i: usize| self.registers.r32(list[i]);
                let out = tensor::mma([r(4), r(5), r(6), r(7)], [r(8), r(9)], [r(10), r(11), r(12), r(13)]);
                for (slot, values) in list[..4].iter().zip(out) {
                    self.registers.set32(*slot, values, u32::MAX);
                }
            }
            Op::Wgmma { .. } | Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait => {
                if active != u32::MAX {
                    return Ok(false);
                }
                self.product(block, pc, instr, list)?;
            }
            _ => return Err(Fault::new(Kind::Unsupported, format!("{:?} in lanes {mask:#x}", instr.op))),
        }
        Ok(true)
    }

    /// The lanes that an instruction names, which must be the same for all lanes that run it, and include these.
    fn members(&self, slot: u16, active: u32) -> Result<u32, Fault> {
        let named = self.registers.r32(slot);
        let members = named[active.trailing_zeros() as usize];
        if lanes(active).any(|i| named[i] != members) || members & active != active {
            return Err(Fault::new(Kind::Divergence, format!("lanes {active:#010x} name other lanes: {members:#010x}")));
        }
        Ok(members & self.all_lanes)
    }

    fn shuffle(&mut self, instr: &Instr, list: &[u16], kind: Shuffle, active: u32) -> Result<bool, Fault> {
        let [valid_slot, members_slot] = [list[0], list[1]];
        let members = self.members(members_slot, active)?;
        if members != active {
            return Ok(false);
        }
        let (values, by, control) = (*self.registers.r32(instr.a), *self.registers.r32(instr.b), *self.registers.r32(instr.c));
        let (mut out, mut valid) = ([0; 32], 0);
        for lane in lanes(active) {
            let (clamp, segment) = (control[lane] & 31, control[lane] >> 8 & 31);
            let (own, first, last) = (lane as u32, lane as u32 & segment, lane as u32 & segment | clamp & !segment);
            let by = by[lane] & 31;
            let (from, is_valid) = match kind {
                Shuffle::Up => (own.wrapping_sub(by), own as i32 - by as i32 >= last as i32),
                Shuffle::Down => (own + by, own + by <= last),
                Shuffle::Bfly => (own ^ by, own ^ by <= last),
                Shuffle::Idx => (first | by & !segment, (first | by & !segment) <= last),
            };
            let from = if is_valid { from } else { own };
            if active >> from & 1 == 0 {
                return Err(Fault::new(Kind::Divergence, format!("lane {lane} asks lane {from}, which does not take part")));
            }
            out[lane] = values[from as usize];
            valid |= u32::from(is_valid) << lane;
        }
        self.registers.set32(instr.d, out, active);
        if valid_slot != NO_GUARD {
            self.registers.set_predicate(valid_slot, valid, active);
        }
        Ok(true)
    }

    #[inline(always)]
    fn address(&self, instr: &Instr, access: Access, lane: usize) -> u64 {
        let base = if access.wide_address { self.registers.r64(instr.a)[lane] } else { u64::from(self.registers.r32(instr.a)[lane]) };
        base.wrapping_add_signed(instr.imm)
    }

    #[inline(always)]
    fn load(&mut self, block: &mut Block<'_>, pc: usize, instr: &Instr, list: &[u16], access: Access, active: u32) -> Result<(), Fault> {
        let element = usize::from(access.element);
        let len = element * list.len();
        let (who, reader) = (self.who(pc), self.writer(block));
        if access.space == Space::Shared {
            block.shared.tick();
        }
        for lane in lanes(active) {
            let address = self.address(instr, access, lane);
            let mut bytes = [0; 16];
            match access.space {
                Space::Shared => {
                    let read = block.shared.read(address, len, who).map_err(|clash| placed(block.kernel, clash, lane))?;
                    bytes[..len].copy_from_slice(read);
                }
                Space::Param => {
                    let at = address as usize;
                    let read = block.params.get(at..at.wrapping_add(len));
                    let read = read.ok_or_else(|| Fault::new(Kind::Address, format!("lane {lane} reads parameters at {at}")))?;
                    bytes[..len].copy_from_slice(read);
                }
                Space::Global | Space::Generic => {
                    if !address.is_multiple_of(len as u64) {
                        return Err(Fault::new(Kind::Alignment, format!("lane {lane} reads {len} bytes at {address:#x}")));
                    }
                    bytes = block.memory.load(address, len, reader).map_err(|fault| fault.at(format!("lane {lane}")))?;
                }
            }
            for (i, &slot) in list.iter().enumerate() {
                let mut number = [0; 8];
                number[..element].copy_from_slice(&bytes[i * element..][..element]);
                let number = u64::from_le_bytes(number);
                if access.wide {
                    self.registers.r64[slot as usize][lane] = number;
                } else {
                    self.registers.r32[slot as usize][lane] = number as u32;
                }
            }
        }
        Ok(())
    }

    #[inline(always)]
    fn store(&mut self, block: &mut Block<'_>, pc: usize, instr: &Instr, list: &[u16], access: Access, active: u32) -> Result<(), Fault> {
        let element = usize::from(access.element);
        let len = element * list.len();
        let (who, writer) = (self.who(pc), self.writer(block));
        if access.space == Space::Shared {
            block.shared.tick();
        }
        for lane in lanes(active) {
            let address = self.address(instr, access, lane);
            let mut bytes = [0; 16];
            for (i, &slot) in list.iter().enumerate() {
                let number =
                    if access.wide { self.registers.r64[slot as usize][lane] } else { u64::from(self.registers.r32[slot as usize][lane]) };
                bytes[i * element..][..element].copy_from_slice(&number.to_le_bytes()[..element]);
            }
            match access.space {
                Space::Shared => block.shared.write(address, &bytes[..len], who).map_err(|clash| placed(block.kernel, clash, lane))?,
                Space::Param => return Err(Fault::new(Kind::Address, "writes to parameters")),
                Space::Global | Space::Generic => {
                    if !address.is_multiple_of(len as u64) {
                        return Err(Fault::new(Kind::Alignment, format!("lane {lane} writes {len} bytes at {address:#x}")));
                    }
                    block.memory.store(address, &bytes[..len], writer).map_err(|fault| fault.at(format!("lane {lane}")))?;
                }
            }
        }
        Ok(())
    }

    fn load_matrix(&mut self, block: &mut Block<'_>, pc: usize, instr: &Instr, list: &[u16], transposed: bool) -> Result<(), Fault> {
        let (who, addresses) = (self.who(pc), *self.registers.r32(instr.a));
        block.shared.tick();
        for (matrix, &slot) in list.iter().enumerate() {
            let mut values: Lanes = [0; 32];
            for row in 0..8 {
                let lane = matrix * 8 + row;
                let address = u64::from(addresses[lane]).wrapping_add_signed(instr.imm);
                let read = block.shared.read(address, 16, who).map_err(|clash| placed(block.kernel, clash, lane))?;
                for pair in 0..4 {
                    values[row * 4 + pair] = u32::from_le_bytes(read[pair * 4..pair * 4 + 4].try_into().expect("four bytes"));
                }
            }
            self.registers.set32(slot, if transposed { tensor::transpose(&values) } else { values }, u32::MAX);
        }
        Ok(())
    }

    // --- Warpgroup products: computed at their wait, not before.

    /// An instruction must not touch the accumulators of products in flight.
    #[cold]
    #[inline(never)]
    fn check_busy(&self, kernel: &Kernel, pc: usize, active: u32) -> Result<(), Fault> {
        let instr = &kernel.code[pc];
        let control = matches!(
            instr.op,
            Op::Bra | Op::Ret | Op::Bar | Op::Arrive | Op::Meet | Op::Wgmma { .. } | Op::WgmmaFence | Op::WgmmaCommit | Op::WgmmaWait
        );
        if active == 0 || control {
            return Ok(());
        }
        let list = &kernel.lists[instr.list as usize..][..instr.count as usize];
        if !list.is_empty() && matches!(instr.op, Op::Mma | Op::LoadMatrix { .. }) && list.iter().any(|slot| self.busy.contains(slot)) {
            return Err(self.busy_fault(kernel, pc));
        }
        let narrow_list = match instr.op {
            Op::Load(access) | Op::Store(access) => !access.wide,
            Op::Unpack64 => true,
            _ => false,
        };
        if narrow_list && list.iter().any(|slot| self.busy.contains(slot)) {
            return Err(self.busy_fault(kernel, pc));
        }
        let operands = used32(instr);
        if operands.iter().flatten().any(|slot| self.busy.contains(slot)) {
            return Err(self.busy_fault(kernel, pc));
        }
        Ok(())
    }

    fn busy_fault(&self, kernel: &Kernel, pc: usize) -> Fault {
        self.fault(kernel, pc, Fault::new(Kind::InFlight, "uses an accumulator whose product is in flight (wgmma.wait_group)"))
    }

    fn product(&mut self, block: &mut Block<'_>, pc: usize, instr: &Instr, list: &[u16]) -> Result<(), Fault> {
        match instr.op {
            Op::WgmmaFence => self.fenced = true,
            Op::WgmmaCommit => self.product_groups.push(std::mem::take(&mut self.products)),
            Op::WgmmaWait => {
                let done = self.product_groups.len().saturating_sub(instr.imm as usize);
                let ready: Vec<Product> = self.product_groups.drain(..done).flatten().collect();
                block.shared.tick();
                for product in ready {
                    self.multiply(block, &product)
                        .map_err(|fault| fault.at(format!("a product begun at {}", block.kernel.place(product.pc))))?;
                }
                // The accumulators of later products stay busy.
                let later: Vec<u16> =
                    self.products.iter().chain(self.product_groups.iter().flatten()).flat_map(accumulators(block.kernel)).collect();
                let mut kept = (Vec::new(), Vec::new());
                for (slot, held) in std::mem::take(&mut self.busy).into_iter().zip(std::mem::take(&mut self.held)) {
                    if later.contains(&slot) {
                        kept.0.push(slot);
                        kept.1.push(held);
                    } else {
                        self.registers.r32[slot as usize] = held;
                    }
                }
                (self.busy, self.held) = kept;
                self.fenced = self.fenced && !self.busy.is_empty();
            }
            Op::Wgmma { columns, a_shared, .. } => {
                if !self.fenced {
                    return Err(Fault::new(Kind::InFlight, "a product without wgmma.fence before it"));
                }
                let (d, a) = list.split_at(usize::from(columns) / 2);
                if let Some(slot) = a.iter().find(|slot| self.busy.contains(slot)) {
                    return Err(Fault::new(Kind::InFlight, format!("a product's operand, slot {slot}, is the result of one in flight")));
                }
                for &slot in d {
                    if !self.busy.contains(&slot) {
                        self.busy.push(slot);
                        self.held.push(self.registers.r32[slot as usize]);
                        self.registers.r32[slot as usize] = [IN_FLIGHT; 32];
                    }
                }
                let uniform = |slot: u16| {
                    let values = self.registers.r64(slot);
                    values.iter().all(|v| *v == values[0]).then_some(values[0])
                };
                let diverged = || Fault::new(Kind::Divergence, "the lanes' descriptors differ");
                self.products.push(Product {
                    pc,
                    instr: *instr,
                    a: a.iter().map(|&slot| *self.registers.r32(slot)).collect(),
                    a_descriptor: if a_shared { uniform(instr.a).ok_or_else(diverged)? } else { 0 },
                    b_descriptor: uniform(instr.b).ok_or_else(diverged)?,
                    accumulate: self.registers.predicate(instr.c) != 0,
                });
            }
            _ => unreachable!("only products come here"),
        }
        Ok(())
    }

    /// Computes this warp's 16 rows of a product.
    fn multiply(&mut self, block: &mut Block<'_>, product: &Product) -> Result<(), Fault> {
        let Op::Wgmma { columns, a_shared, b_transposed } = product.instr.op else { unreachable!("a product") };
        let columns = usize::from(columns);
        let who = self.who(product.pc);
        let strange = || Fault::new(Kind::Unsupported, "a product's descriptor without a swizzle of 128 bytes");
        let fragment = |lane: usize, i: usize| (lane / 4 + i % 2 * 8, lane % 4 * 2 + i / 2 * 8);
        let mut left = [[0.0f32; 16]; 16];
        if a_shared {
            let operand = tensor::Operand::new(product.a_descriptor, false).ok_or_else(strange)?;
            let first = self.index % 4 * 16;
            for (row, numbers) in left.iter_mut().enumerate() {
                for (k, number) in numbers.iter_mut().enumerate() {
                    let address = operand.address((first + row) as u64, k as u64);
                    *number = tensor::widen(u32::from(
                        block.shared.read_by_product(address, who).map_err(|clash| placed(block.kernel, clash, 0))?,
                    ));
                }
            }
        } else {
            for (i, register) in product.a.iter().enumerate() {
                for (lane, pair) in register.iter().enumerate() {
                    let (row, k) = fragment(lane, i);
                    left[row][k] = tensor::widen(pair & 0xffff);
                    left[row][k + 1] = tensor::widen(pair >> 16);
                }
            }
        }
        let operand = tensor::Operand::new(product.b_descriptor, b_transposed).ok_or_else(strange)?;
        let mut right = vec![0.0f32; 16 * columns];
        for k in 0..16 {
            for column in 0..columns {
                let address = operand.address(column as u64, k as u64);
                let bits = block.shared.read_by_product(address, who).map_err(|clash| placed(block.kernel, clash, 0))?;
                right[k * columns + column] = tensor::widen(u32::from(bits));
            }
        }
        let list = &block.kernel.lists[product.instr.list as usize..][..columns / 2];
        let held: Vec<usize> =
            list.iter().map(|slot| self.busy.iter().position(|busy| busy == slot).expect("marked when it began")).collect();
        let mut sums = vec![0.0f32; 16 * columns];
        if product.accumulate {
            for (j, &at) in held.iter().enumerate() {
                for lane in 0..32 {
                    sums[(lane / 4 + j % 4 / 2 * 8) * columns + j / 4 * 8 + lane % 4 * 2 + j % 2] = f32::from_bits(self.held[at][lane]);
                }
            }
        }
        for (row, numbers) in left.iter().enumerate() {
            for (k, x) in numbers.iter().enumerate() {
                let to = &mut sums[row * columns..(row + 1) * columns];
                to.iter_mut().zip(&right[k * columns..(k + 1) * columns]).for_each(|(sum, y)| *sum += x * y);
            }
        }
        for (j, &at) in held.iter().enumerate() {
            for lane in 0..32 {
                self.held[at][lane] = sums[(lane / 4 + j % 4 / 2 * 8) * columns + j / 4 * 8 + lane % 4 * 2 + j % 2].to_bits();
            }
        }
        Ok(())
    }
}

/// The slots of a product's accumulators.
fn accumulators(kernel: &Kernel) -> impl Fn(&Product) -> Vec<u16> + '_ {
    |product| {
        let Op::Wgmma { columns, .. } = product.instr.op else { unreachable!("a product") };
        kernel.lists[product.instr.list as usize..][..usize::from(columns) / 2].to_vec()
    }
}

/// The 32-bit registers among the plain operands.
fn used32(instr: &Instr) -> [Option<u16>; 4] {
    use Op::*;
    let Instr { op, d, a, b, c, .. } = *instr;
    match op {
        Mov32 | Not32 | Neg32 | Brev32 | BfindShift32 | Popc32 | CvtU16U32 | AbsF32 | NegF32 | RcpF32 | RsqrtF32 | SqrtF32 | Ex2F32
        | Ex2FtzF32 | TruncF32 | CvtF32U32 | CvtF32S32 | CvtU32F32Rz | CvtS32F32Rn | MoveMatrix => [Some(d), Some(a), None, None],
        Mad32 | Prmt | FmaF32 | FmaBf16x2 | Bfi32 => [Some(d), Some(a), Some(b), Some(c)],
        Add32 | Sub32 | Mul32 | And32 | Or32 | Xor32 | Shl32 | ShrU32 | ShrS32 | MinU32 | MaxU32 | MinS32 | MaxS32 | DivU32 | RemU32
        | Sel32 | Sub16 | Add16 | Shl16 | Shr16 | Mul16 | MulWide16 | AddF32 | SubF32 | MulF32 | DivF32 | MaxF32 | MinF32 | CopysignF32
        | CvtBf16x2 | Shfl(_) => [Some(d), Some(a), Some(b), None],
        CvtU32U64 => [Some(d), None, None, None],
        MulWideU32 | MulWideS32 | Pack64 | EqU32 | NeU32 | LtU32 | LeU32 | GtU32 | GeU32 | LtS32 | LeS32 | GtS32 | GeS32 | EqF32
        | NeF32 | LtF32 | LeF32 | GtF32 | GeF32 | EquF32 | NeuF32 | LtuF32 | LeuF32 | GtuF32 | GeuF32 => [Some(a), Some(b), None, None],
        CvtU64U32 | CvtS64S32 | CvtU64U16 | CvtF64F32 | CvtU64F32Rn => [Some(a), None, None, None],
        _ => [None; 4],
    }
}

#[inline(always)]
fn lanes(mask: u32) -> impl Iterator<Item = usize> {
    let mut left = mask;
    std::iter::from_fn(move || {
        let lane = left.trailing_zeros();
        left &= left.wrapping_sub(1);
        (lane < 32).then_some(lane as usize)
    })
}

#[cold]
fn placed(kernel: &Kernel, (fault, other): Clash, lane: usize) -> Fault {
    let fault = fault.at(format!("lane {lane}"));
    match other {
        Some(pc) => fault.at(format!("the other side: {}", kernel.place(pc as usize))),
        None => fault,
    }
}
