//! A kernel ready to run: instructions whose operands are slots of a warp's registers, decoded once.

use super::parse::Loc;
use crate::exec::warp::Registers;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// One instruction. The meaning of the fields depends on the operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Instr {
    pub(crate) op: Op,
    /// The slot of the guarding predicate, and the value that skips the instruction; `NO_GUARD` if it always runs.
    pub(crate) guard: u16,
    pub(crate) negated: bool,
    pub(crate) d: u16,
    pub(crate) a: u16,
    pub(crate) b: u16,
    pub(crate) c: u16,
    /// The offset of an address, the target of a branch, or an immediate.
    pub(crate) imm: i64,
    /// Further slots: `lists[list..list + count]`.
    pub(crate) list: u32,
    pub(crate) count: u16,
    pub(crate) place: u32,
}

pub(crate) const NO_GUARD: u16 = u16::MAX;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Space {
    Global,
    Shared,
    Param,
    /// Global memory, as in our kernels; shared memory has no generic addresses here.
    Generic,
}

/// A number's size in an access.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Access {
    pub(crate) space: Space,
    /// Bytes of one element.
    pub(crate) element: u8,
    /// Whether the registers have 64 bits.
    pub(crate) wide: bool,
    /// Whether the address is in a 64-bit register.
    pub(crate) wide_address: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Shuffle {
    Bfly,
    Up,
    Down,
    Idx,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Atomic {
    Add,
    Max,
    Min,
}

/// Operations: `d` from `a`, `b`, `c`. The names end in the type of their operands.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[rustfmt::skip]
pub(crate) enum Op {
    // 32-bit registers.
    Mov32, Add32, Sub32, Mul32, Mad32, And32, Or32, Xor32, Not32, Neg32, Shl32, ShrU32, ShrS32,
    MinU32, MaxU32, MinS32, MaxS32, DivU32, RemU32, Prmt, Brev32, BfindShift32, Bfi32, Sel32, Popc32,
    Sub16, Add16, Shl16, Shr16, Mul16, MulWide16, CvtU16U32,
    AddF32, SubF32, MulF32, DivF32, FmaF32, MaxF32, MinF32, AbsF32, NegF32, RcpF32, RsqrtF32, SqrtF32, Ex2F32, Ex2FtzF32,
    TruncF32, CopysignF32,
    CvtF32U32, CvtF32S32, CvtU32F32Rz, CvtS32F32Rn, CvtBf16x2, FmaBf16x2,
    // 64-bit registers.
    Mov64, Add64, Sub64, Mul64, MulHi64, And64, Or64, Xor64, Not64, Shl64, ShrU64, MinU64, MaxU64, DivU64, RemU64, Bfi64, Sel64,
    MulF64, CeilF64, CvtU64F64Rz,
    // Between the two.
    MulWideU32, MulWideS32, CvtU64U32, CvtS64S32, CvtU32U64, CvtU64U16, CvtF64F32, CvtF64U64, CvtU64F32Rn, Pack64, Unpack64,
    // Predicates.
    EqU32, NeU32, LtU32, LeU32, GtU32, GeU32, LtS32, LeS32, GtS32, GeS32,
    EqU64, NeU64, LtU64, LeU64, GtU64, GeU64, LtS64, LeS64, GtS64, GeS64,
    EqF32, NeF32, LtF32, LeF32, GtF32, GeF32, EquF32, NeuF32, LtuF32, LeuF32, GtuF32, GeuF32,
    AndP, OrP, XorP, NotP, MovP,
    // Control.
    Bra, Ret, Bar, Arrive, Meet, SetRegisters,
    // Memory.
    Load(Access), Store(Access), AtomShared { what: Atomic, wide: bool },
    CopyAsync, CopyCommit, CopyWait, FenceProxy,
    // Warps.
    Shfl(Shuffle), Ballot, VoteAny, VoteAll, SyncWarp,
    LoadMatrix { transposed: bool }, MoveMatrix, Mma,
    Wgmma { columns: u16, a_shared: bool, b_transposed: bool }, WgmmaFence, WgmmaCommit, WgmmaWait,
}

/// The values that a warp's registers are initialized with.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Special {
    TidX,
    TidY,
    TidZ,
    NtidX,
    NtidY,
    NtidZ,
    CtaX,
    CtaY,
    CtaZ,
    NctaX,
    NctaY,
    NctaZ,
    Lane,
}

#[derive(Debug)]
pub(crate) struct Kernel {
    pub(crate) name: String,
    pub(crate) code: Vec<Instr>,
    pub(crate) lists: Vec<u16>,
    /// Whether control can reach each instruction other than from the one before it.
    pub(crate) leaders: Vec<bool>,
    pub(crate) places: Vec<Loc>,
    /// Offset and size of every parameter.
    pub(crate) params: Vec<(usize, usize)>,
    pub(crate) param_bytes: usize,
    /// The numbers of registers: 32 bits, 64 bits, predicates.
    pub(crate) slots: [usize; 3],
    pub(crate) constants32: Vec<(u16, u32)>,
    pub(crate) constants64: Vec<(u16, u64)>,
    pub(crate) constant_predicates: Vec<(u16, bool)>,
    pub(crate) specials: Vec<(u16, Special)>,
    /// Statically allocated shared memory: the ranges in use, and the start of the dynamic part.
    pub(crate) shared: Vec<(u32, u32)>,
    pub(crate) dynamic_at: u32,
    pub(crate) threads_max: u32,
    /// The registers of warps that have ended, for those of later launches: to allocate and clear them took longer than many a launch.
    pub(crate) spare: Mutex<Vec<Registers>>,
}

impl Kernel {
    pub(crate) fn spare_registers(&self) -> MutexGuard<'_, Vec<Registers>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The source line of an instruction, for messages.
    pub(crate) fn place(&self, pc: usize) -> String {
        self.places[self.code[pc].place as usize].to_string()
    }
}

/// The start of shared memory: zero is no address, and nothing is aligned by accident.
pub(crate) const SHARED_START: u32 = 0x410;
/// The unused gap between variables.
pub(crate) const SHARED_GAP: u32 = 64;
