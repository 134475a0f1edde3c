//! Detecting this machine's instruction sets, and running a kernel on one of them.

#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
use crate::cpu::gemm::amx;
#[cfg(target_arch = "aarch64")]
use crate::cpu::simd::neon;
#[cfg(target_arch = "x86_64")]
use crate::cpu::simd::{avx2, avx512, proof};
use crate::cpu::{
    gemm::panel::PanelFormat,
    isa::Isa,
    simd::{Kernel, Simd, portable},
};

impl Isa {
    /// Whether this machine has it.
    #[cfg(target_arch = "x86_64")]
    pub fn is_available(self) -> bool {
        match self {
            #[cfg(target_os = "linux")]
            Isa::Amx => proof::bf16_products_are_exact() && amx::is_available(),
            #[cfg(not(target_os = "linux"))]
            Isa::Amx => false,
            Isa::Avx512Bf16 => proof::bf16_products_are_exact(),
            Isa::Avx512 => avx512::is_available(),
            Isa::Avx2 => avx2::is_available(),
            Isa::Neon => false,
            Isa::Portable => true,
            #[cfg(target_os = "linux")]
            Isa::EmulatedAmx => avx2::is_available() && amx::is_emulated(),
            #[cfg(not(target_os = "linux"))]
            Isa::EmulatedAmx => false,
        }
    }

    #[cfg(not(target_arch = "x86_64"))]
    pub fn is_available(self) -> bool {
        self == Isa::Portable || self == Isa::Neon && cfg!(target_arch = "aarch64")
    }

    /// The best instruction set that this machine has.
    pub fn best() -> Isa {
        Isa::ALL.into_iter().find(|isa| isa.is_available()).expect("portable code is always available")
    }

    /// The instruction set whose vectors are used beside tiles, if these are emulated: all of AMX's if they are there.
    #[cfg(target_arch = "x86_64")]
    fn beside_emulated_tiles() -> Isa {
        if proof::bf16_products_are_exact() { Isa::Avx512Bf16 } else { Isa::Avx2 }
    }

    /// The instruction set's [`Simd::TILE_ROWS`].
    pub(crate) fn tile_rows(self) -> usize {
        struct TileRows;
        impl Kernel for TileRows {
            type Output = usize;
            #[inline(always)]
            fn run<S: Simd>(self, _: S) -> usize {
                S::TILE_ROWS
            }
        }
        self.dispatch(TileRows)
    }

    /// Runs `kernel` on this instruction set, which must be available: a [`Cpu`](crate::Cpu) has checked its own, and
    /// [`Isa::best`] is. No public function passes on an unchecked one.
    pub(crate) fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        debug_assert!(self.is_available());
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: callers dispatch only on an available instruction set.
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 => unsafe { avx512::run(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Avx2 => unsafe { avx2::run(kernel) },
            #[cfg(target_arch = "x86_64")]
            Isa::EmulatedAmx => Isa::beside_emulated_tiles().dispatch(kernel),
            #[cfg(not(target_arch = "x86_64"))]
            Isa::Amx | Isa::Avx512Bf16 | Isa::Avx512 | Isa::Avx2 | Isa::EmulatedAmx => unreachable!("not available on this architecture"),
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => kernel.run(neon::Neon),
            #[cfg(not(target_arch = "aarch64"))]
            Isa::Neon => unreachable!("not available on this architecture"),
            Isa::Portable => kernel.run(portable::Portable),
        }
    }

    /// As [`dispatch`](Self::dispatch), for kernels that multiply pairs of 16 bits: uses the instructions for that if there are any. Other
    /// kernels are not compiled for them.
    pub(crate) fn dispatch_pairs<K: Kernel>(self, kernel: K) -> K::Output {
        debug_assert!(self.is_available());
        match self {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Isa::Amx | Isa::Avx512Bf16 => unsafe { avx512::run_pairs(kernel) },
            #[cfg(target_arch = "x86_64")]
            Isa::EmulatedAmx => Isa::beside_emulated_tiles().dispatch_pairs(kernel),
            _ => self.dispatch(kernel),
        }
    }

    /// Runs a kernel that multiplies panels in format `L`.
    pub(crate) fn dispatch_panel<L: PanelFormat, K: Kernel>(self, kernel: K) -> K::Output {
        if const { L::MULTIPLIES_PAIRS } { self.dispatch_pairs(kernel) } else { self.dispatch(kernel) }
    }
}
