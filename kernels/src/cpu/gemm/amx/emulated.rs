//! An emulation of AMX for tests ([`Isa::EmulatedAmx`](crate::Isa::EmulatedAmx)), so that kernels on tiles, and whole models, are tested
//! on any processor: where the instructions are
//! missing, the system signals each one (`SIGILL`), and the handler does what the manual says (Intel 64 and IA-32
//! Architectures Software Developer's Manual, volume 2; volume 1, section 18.2, for tiles) and skips it.
//!
//! It emulates valid programs, and ends the process at anything invalid.

use nix::libc;
use std::{cell::UnsafeCell, mem::MaybeUninit, ptr, sync::LazyLock};

/// Bytes of a row.
const ROW: usize = 64;
/// Rows of a tile.
const ROWS: usize = 16;
const TILES: usize = 8;

type Row = [u8; ROW];

/// A thread's tiles.
struct Tiles {
    /// The shapes of the tiles; `None` if they are not configured.
    shapes: Option<[Shape; TILES]>,
    tiles: [[Row; ROWS]; TILES],
}

#[derive(Clone, Copy, Debug)]
struct Shape {
    rows: usize,
    row_bytes: usize,
}

thread_local! {
    static THREAD: UnsafeCell<Tiles> = const { UnsafeCell::new(Tiles { shapes: None, tiles: [[[0; ROW]; ROWS]; TILES] }) };
}

/// Installs the handler. Returns `false` without AVX2, where it would be too slow to be useful.
pub(super) fn stand_in() -> bool {
    static IN_PLACE: LazyLock<bool> = LazyLock::new(|| {
        if !is_x86_feature_detected!("avx2") || !is_x86_feature_detected!("fma") {
            return false;
        }
        // SAFETY: all zeros are a valid set of signals and no flags; the handler has the signature that `SA_SIGINFO`
        // asks for.
        unsafe {
            let mut action = MaybeUninit::<libc::sigaction>::zeroed().assume_init();
            action.sa_sigaction = handle as *const () as usize;
            action.sa_flags = libc::SA_SIGINFO;
            libc::sigaction(libc::SIGILL, &action, ptr::null_mut()) == 0
        }
    });
    *IN_PLACE
}

/// Emulates the instruction at which the thread was stopped. If it is not an AMX instruction, the next attempt ends the process.
extern "C" fn handle(_: libc::c_int, _: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the system passes the registers, and nothing else refers to them. The instruction can be read: the
    // processor has just done so. The signal comes from the instruction itself, so it interrupts none of the functions
    // called here.
    unsafe {
        let registers = &mut (*context.cast::<libc::ucontext_t>()).uc_mcontext.gregs;
        let instruction = registers[libc::REG_RIP as usize] as *const u8;
        match Instruction::at(instruction, registers) {
            Some((operation, len)) => {
                THREAD.with(|tiles| operation.run(&mut *tiles.get()));
                registers[libc::REG_RIP as usize] += len as i64;
            }
            None => _ = libc::signal(libc::SIGILL, libc::SIG_DFL),
        }
    }
}

#[derive(Clone, Copy)]
enum Instruction {
    LoadConfig(*const u8),
    Release,
    Zero(usize),
    Load(usize, Memory),
    Store(usize, Memory),
    /// `sums += a * b`
    Bf16 {
        sums: usize,
        a: usize,
        b: usize,
    },
    /// Signed `a`, unsigned `b`.
    Int8 {
        sums: usize,
        a: usize,
        b: usize,
    },
}

/// Rows `stride` bytes apart.
#[derive(Clone, Copy)]
struct Memory {
    start: *mut u8,
    stride: usize,
}

impl Instruction {
    /// The instruction at `code` and its length; `None` if it is not emulated.
    ///
    /// # Safety
    /// `code` points to an instruction.
    unsafe fn at(code: *const u8, registers: &[i64; 23]) -> Option<(Self, usize)> {
        // SAFETY: an instruction with this opcode has these bytes, read one after the other.
        let byte = |i: usize| unsafe { code.add(i).read() };
        // Three bytes of VEX with the opcodes of 0F 38, and a vector length of 128.
        if byte(0) != 0xc4 || byte(1) & 0x1f != 2 || byte(2) & 0x84 != 0 {
            return None;
        }
        let (extend_index, extend_base) = (usize::from(!byte(1) >> 6 & 1) << 3, usize::from(!byte(1) >> 5 & 1) << 3);
        let (prefix, third) = (byte(2) & 3, usize::from(!byte(2) >> 3 & 15));
        let (opcode, modrm) = (byte(3), byte(4));
        let (reg, rm) = (usize::from(modrm >> 3 & 7), usize::from(modrm & 7));
        if modrm >> 6 == 3 {
            let instruction = match (opcode, prefix) {
                (0x49, 0) => Self::Release,
                (0x49, 3) => Self::Zero(reg),
                (0x5c, 2) => Self::Bf16 { sums: reg, a: rm, b: third },
                (0x5e, 2) => Self::Int8 { sums: reg, a: rm, b: third },
                _ => return None,
            };
            return Some((instruction, 5));
        }
        let register = |number: usize| registers[REGISTERS[number] as usize] as usize;
        let has_index = rm == 4;
        let (base, stride) = if has_index {
            let sib = byte(5);
            let index = usize::from(sib >> 3 & 7) | extend_index;
            let stride = if index == 4 { 0 } else { register(index) << (sib >> 6) };
            (usize::from(sib & 7) | extend_base, stride)
        } else {
            (rm | extend_base, 0)
        };
        let first = 5 + usize::from(has_index);
        let (displacement, len) = match modrm >> 6 {
            // Relative to the instruction, or absolute: not used.
            0 if base & 7 == 5 => return None,
            0 => (0, first),
            1 => (byte(first) as i8 as isize, first + 1),
            _ => (i32::from_le_bytes(std::array::from_fn(|i| byte(first + i))) as isize, first + 4),
        };
        let start = (register(base) as *mut u8).wrapping_offset(displacement);
        let instruction = match (opcode, prefix) {
            (0x49, 0) => Self::LoadConfig(start),
            (0x4b, 3) if has_index => Self::Load(reg, Memory { start, stride }),
            (0x4b, 2) if has_index => Self::Store(reg, Memory { start, stride }),
            _ => return None,
        };
        Some((instruction, len))
    }

    /// # Safety
    /// The instruction's operands can be read and written.
    unsafe fn run(self, Tiles { shapes, tiles }: &mut Tiles) {
        let shape = |tile: usize| {
            let shape = shapes.and_then(|shapes| shapes.get(tile).copied()).filter(|shape| shape.rows > 0);
            shape.unwrap_or_else(|| refuse("a tile that is not configured"))
        };
        match self {
            Self::LoadConfig(from) => {
                // SAFETY: the operand has 64 bytes.
                let config = unsafe { from.cast::<[u8; 64]>().read_unaligned() };
                let shape = |tile: usize| Shape {
                    row_bytes: u16::from_le_bytes([config[16 + 2 * tile], config[17 + 2 * tile]]).into(),
                    rows: config[48 + tile].into(),
                };
                let all: [Shape; TILES] = std::array::from_fn(shape);
                let is_valid = |shape: &Shape| shape.rows <= ROWS && shape.row_bytes <= ROW && (shape.rows == 0) == (shape.row_bytes == 0);
                if config[0] != 1 || config[1..16].iter().any(|byte| *byte != 0) || !all.iter().all(is_valid) {
                    refuse("a configuration that is not valid");
                }
                *shapes = Some(all);
                *tiles = [[[0; ROW]; ROWS]; TILES];
            }
            Self::Release => *shapes = None,
            Self::Zero(tile) => {
                shape(tile);
                tiles[tile] = [[0; ROW]; ROWS];
            }
            Self::Load(tile, memory) => {
                let Shape { rows, row_bytes } = shape(tile);
                tiles[tile] = [[0; ROW]; ROWS];
                for (i, row) in tiles[tile][..rows].iter_mut().enumerate() {
                    // SAFETY: the caller vouches for these rows and bytes.
                    unsafe { ptr::copy_nonoverlapping(memory.row(i), row.as_mut_ptr(), row_bytes) };
                }
            }
            Self::Store(tile, memory) => {
                let Shape { rows, row_bytes } = shape(tile);
                for (i, row) in tiles[tile][..rows].iter().enumerate() {
                    // SAFETY: the caller vouches for these rows and bytes.
                    unsafe { ptr::copy_nonoverlapping(row.as_ptr(), memory.row(i), row_bytes) };
                }
            }
            Self::Bf16 { sums, a, b } | Self::Int8 { sums, a, b } => {
                let [of_sums, of_a, of_b] = [sums, a, b].map(shape);
                let fits = of_sums.rows == of_a.rows && of_sums.row_bytes == of_b.row_bytes && of_a.row_bytes == 4 * of_b.rows;
                if !fits || sums == a || sums == b || a == b {
                    refuse("tiles that do not fit each other");
                }
                let (a, b) = (tiles[a], tiles[b]);
                let rows = a[..of_a.rows].iter().zip(&mut tiles[sums]);
                for (a, sums) in rows {
                    // SAFETY: the handler is installed only with AVX2 and FMA.
                    unsafe {
                        match self {
                            Self::Bf16 { .. } => multiply_bf16(a, &b[..of_b.rows], sums),
                            _ => multiply_int8(a, &b[..of_b.rows], sums),
                        }
                    }
                }
                tiles[sums][of_sums.rows..].fill([0; ROW]);
            }
        }
    }
}

impl Memory {
    fn row(self, i: usize) -> *mut u8 {
        self.start.wrapping_add(i.wrapping_mul(self.stride))
    }
}

/// Registers 0 to 15 in the system's numbering.
const REGISTERS: [libc::c_int; 16] = [
    libc::REG_RAX,
    libc::REG_RCX,
    libc::REG_RDX,
    libc::REG_RBX,
    libc::REG_RSP,
    libc::REG_RBP,
    libc::REG_RSI,
    libc::REG_RDI,
    libc::REG_R8,
    libc::REG_R9,
    libc::REG_R10,
    libc::REG_R11,
    libc::REG_R12,
    libc::REG_R13,
    libc::REG_R14,
    libc::REG_R15,
];

/// Nothing unwinds from a signal handler.
fn refuse(what: &str) -> ! {
    eprintln!("AMX, emulated: {what}");
    std::process::abort()
}

#[target_feature(enable = "avx2,fma")]
fn multiply_bf16(a: &Row, b: &[Row], sums: &mut Row) {
    let halves = |word: u32| [word << 16, word & 0xffff_0000].map(|bits| flush(f32::from_bits(bits)));
    let (mut even, mut odd) = ([0.0f32; ROWS], [0.0f32; ROWS]);
    for (a, b) in words(a).into_iter().zip(b) {
        let (a, b) = (halves(a), words(b).map(halves));
        for j in 0..ROWS {
            even[j] = flush(a[0].mul_add(b[j][0], even[j]));
            odd[j] = flush(a[1].mul_add(b[j][1], odd[j]));
        }
    }
    for (j, sum) in sums.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        *sum = flush(flush(f32::from_le_bytes(*sum)) + flush(even[j] + odd[j])).to_le_bytes();
    }
}

#[target_feature(enable = "avx2")]
fn multiply_int8(a: &Row, b: &[Row], sums: &mut Row) {
    let mut all = words(sums);
    for (a, b) in words(a).into_iter().zip(b) {
        for (sum, b) in all.iter_mut().zip(words(b)) {
            for (a, b) in a.to_le_bytes().into_iter().zip(b.to_le_bytes()) {
                *sum = sum.wrapping_add((i32::from(a as i8) * i32::from(b)) as u32);
            }
        }
    }
    sums.as_chunks_mut().0.iter_mut().zip(all).for_each(|(to, sum)| *to = sum.to_le_bytes());
}

fn words(row: &Row) -> [u32; ROWS] {
    std::array::from_fn(|i| u32::from_le_bytes(row.as_chunks().0[i]))
}

/// Flushes denormals to zero.
fn flush(x: f32) -> f32 {
    if x.abs() < f32::MIN_POSITIVE { 0.0f32.copysign(x) } else { x }
}
