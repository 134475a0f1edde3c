//! Rules of the driver and of cuBLASLt that the stand-in keeps.

use crate::standin::{Standin, cache, told};
use std::{fs, path::Path, thread};
use tempfile::TempDir;
use tidemill_kernels::cuda::{
    Bf16, Device, Gemm,
    checks::{TestGpu, blocks::HostMemory},
    gemm::{Operands, Output},
    pinned::Pinned,
};

#[test]
fn a_thread_that_was_not_given_the_context_is_refused() {
    let output = Standin::new("").run("rules::without_a_context");
    let text = told(&output);
    assert!(output.status.success() && text.contains("cuMemGetInfo: this thread has no context"), "{text}");
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn without_a_context() {
    let gpu = TestGpu::open(&cache(), 1).unwrap();
    let bare = || cudarc::driver::result::mem_get_info().map_err(|error| error.0 as u32);
    assert!(bare().is_ok(), "this thread opened the device");
    let other = thread::scope(|scope| scope.spawn(bare).join().unwrap());
    assert_eq!(other.map(|_| ()), Err(201));
    let bound = thread::scope(|scope| scope.spawn(|| gpu.device.memory().is_ok()).join().unwrap());
    assert!(bound, "the device's own calls bind it");
}

#[test]
fn memory_is_registered_once() {
    Standin::new("").passes("rules::registered_twice");
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn registered_twice() {
    let gpu = TestGpu::open(&cache(), 1).unwrap();
    let mut memory = HostMemory::new(&gpu, 3 << 12).unwrap();
    let start = std::ptr::NonNull::from_mut(memory.as_slice_mut()).cast::<u8>();
    // SAFETY: the memory outlives what is registered, which is nothing.
    let again = unsafe { Pinned::register(gpu.device.context(), start, 4096) };
    assert!(again.unwrap_err().to_string().contains("ALREADY_REGISTERED"));
}

#[test]
fn chosen_algorithms_are_kept_and_checked_before_they_are_used_again() {
    Standin::new("").passes("rules::choices");
}

/// Multiplies as in a process of its own, and returns the choices then on disk.
fn chosen(folder: &Path) -> String {
    let device = Device::open(0, folder).unwrap();
    let mut gemm = Gemm::new(&device).unwrap();
    let (x, weight) = (device.upload(&[0u16; 4 * 64]).unwrap(), device.upload(&[0u16; 32 * 64]).unwrap());
    let mut y = device.alloc::<Bf16>(4 * 32).unwrap();
    let operands = Operands::Bf16 { x: &x.as_view(), weight: &weight.as_view() };
    gemm.multiply(device.stream(), Output::Bf16(&mut y.as_view_mut()), operands, None, 64).unwrap();
    gemm.keep_choices();
    device.synchronize().unwrap();
    let files: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    fs::read_to_string(&files[0]).unwrap()
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn choices() {
    let folder = TempDir::new().unwrap();
    let first = chosen(folder.path());
    let line = first.lines().find(|line| line.starts_with("4 64 32 ")).unwrap_or_else(|| panic!("{first}"));
    let file = fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    // The stand-in counts its second algorithm as no faster.
    let (problem, words) = line.split_once(':').unwrap();
    let mut words: Vec<u64> = words.split_whitespace().map(|word| u64::from_str_radix(word, 16).unwrap()).collect();
    let written = |words: &[u64]| format!("{problem}:{}\n", words.iter().map(|word| format!(" {word:016x}")).collect::<String>());
    words[6] |= 1 << 8;
    let second = written(&words);
    fs::write(&file, &second).unwrap();
    assert!(chosen(folder.path()).contains(&second), "what was chosen stays chosen");
    words[1] += 1;
    fs::write(&file, written(&words)).unwrap();
    assert!(chosen(folder.path()).contains(line), "an algorithm for another product is chosen anew");
}
