//! The simulated device, and the failures to inject: `TIDEMILL_GPU_STANDIN`, a comma-separated list of `key=value`.
//!
//! | key | meaning | default |
//! |---|---|---|
//! | `arch` | `80` or `90` | `90` |
//! | `devices` | the number of devices | 1 |
//! | `peers` | `0`: no device may access another's memory | `1` |
//! | `memory` | MiB of each device's memory | 4096 |
//! | `pinned` | MiB of other owners' memory that may be pinned | no limit |
//! | `register` | MiB of other owners' memory that one call may pin | no limit |
//! | `seed` | the seed of every random choice: the order of warps, blocks and streams | 1 |
//! | `fail_launch` | the number of the kernel launch that fails | none |
//! | `fail_device` | the device whose next launch fails once the file `fail_when` exists | none |
//! | `fail_when` | that file | none |
//! | `fail_once` | a file: of all processes with this option, only the one that creates it fails | none |
//! | `drop` | a driver call that does nothing: `cuStreamWaitEvent`, `cuEventSynchronize`, `cuEventQuery`; or does so between devices: `waits_across`, `pool_access` | none |
//! | `every` | of the calls that `drop` names, only every so many-th does nothing; for `waits_across` | 1 |
//! | `driver` | the version of CUDA that the driver supports, as its function reports it | 13000 |
//! | `cublaslt` | the version of cuBLASLt, as its function reports it | 130000 |
//! | `refuse` | products for which cuBLASLt has no algorithm: `rows` (FP8 with a scale for each row), `rows+bias` | none |
//! | `plant` | a file of edits to kernel sources, see `api/nvrtc.rs` | none |
//! | `trace` | `1`: report every launch and copy on stderr | off |

use std::sync::OnceLock;

#[derive(Clone, Debug)]
pub(crate) struct Options {
    pub(crate) arch: (i32, i32),
    pub(crate) devices: u32,
    pub(crate) peers: bool,
    pub(crate) memory_bytes: u64,
    pub(crate) pinned_bytes_max: u64,
    pub(crate) registered_bytes_max: u64,
    pub(crate) seed: u64,
    pub(crate) fail_launch: Option<u64>,
    pub(crate) fail_device: Option<u32>,
    pub(crate) fail_when: Option<String>,
    pub(crate) fail_once: Option<String>,
    pub(crate) drop: Option<String>,
    pub(crate) every: u64,
    pub(crate) driver: i32,
    pub(crate) cublaslt: usize,
    pub(crate) refuse: Option<String>,
    pub(crate) plant: Option<String>,
    pub(crate) trace: bool,
}

const VARIABLE: &str = "TIDEMILL_GPU_STANDIN";

/// The process's options.
///
/// # Panics
/// On an invalid value: this is for tests, which should not continue.
pub(crate) fn options() -> &'static Options {
    static OPTIONS: OnceLock<Options> = OnceLock::new();
    OPTIONS.get_or_init(|| parse(&std::env::var(VARIABLE).unwrap_or_default()))
}

fn parse(text: &str) -> Options {
    let mut options = Options {
        arch: (9, 0),
        devices: 1,
        peers: true,
        memory_bytes: 4 << 30,
        pinned_bytes_max: u64::MAX,
        registered_bytes_max: u64::MAX,
        seed: 1,
        fail_launch: None,
        fail_device: None,
        fail_when: None,
        fail_once: None,
        drop: None,
        every: 1,
        driver: 13_000,
        cublaslt: 130_000,
        refuse: None,
        plant: None,
        trace: false,
    };
    for pair in text.split(',').filter(|pair| !pair.is_empty()) {
        let (key, value) = pair.split_once('=').unwrap_or_else(|| panic!("{VARIABLE}: `{pair}` is not key=value"));
        let number = || value.parse::<u64>().unwrap_or_else(|_| panic!("{VARIABLE}: {key} is a number, not `{value}`"));
        match key {
            "arch" => options.arch = (number() as i32 / 10, number() as i32 % 10),
            "devices" => options.devices = number() as u32,
            "peers" => options.peers = number() != 0,
            "memory" => options.memory_bytes = number() << 20,
            "pinned" => options.pinned_bytes_max = number() << 20,
            "register" => options.registered_bytes_max = number() << 20,
            "seed" => options.seed = number(),
            "fail_launch" => options.fail_launch = Some(number()),
            "fail_device" => options.fail_device = Some(number() as u32),
            "fail_when" => options.fail_when = Some(value.to_owned()),
            "fail_once" => options.fail_once = Some(value.to_owned()),
            "every" => options.every = number(),
            "drop" => options.drop = Some(value.to_owned()),
            "driver" => options.driver = number() as i32,
            "cublaslt" => options.cublaslt = number() as usize,
            "refuse" if ["rows", "rows+bias"].contains(&value) => options.refuse = Some(value.to_owned()),
            "plant" => options.plant = Some(value.to_owned()),
            "trace" => options.trace = number() != 0,
            _ => panic!("{VARIABLE} has no `{key}={value}`"),
        }
    }
    options
}

/// SplitMix64 (Steele et al., OOPSLA 2014).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    pub(crate) fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    pub(crate) fn shuffle<T>(&mut self, all: &mut [T]) {
        for i in (1..all.len()).rev() {
            all.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_read() {
        let options = parse("arch=80,memory=64,seed=7,fail_launch=3,drop=cuStreamWaitEvent");
        assert_eq!((options.arch, options.memory_bytes, options.seed), ((8, 0), 64 << 20, 7));
        assert_eq!((options.fail_launch, options.drop.as_deref()), (Some(3), Some("cuStreamWaitEvent")));
    }
}
