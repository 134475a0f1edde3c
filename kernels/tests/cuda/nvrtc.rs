//! Checks of the CUDA kernels that need no GPU: each compiles for the oldest and the newest supported device, and none
//! spills registers.

use std::collections::BTreeMap;
use tidemill_kernels::{
    KvStorage,
    cuda::{
        CudaError,
        compile::{self, Arch, Heads, SOURCES},
    },
};

const ARCHS: [Arch; 2] = [Arch::SM_80, Arch::SM_90A];
/// The smallest and the largest head sizes, and those of real models.
const HEAD_DIMS: [usize; 8] = [16, 32, 64, 80, 96, 112, 128, 256];
/// Head sizes of models whose attention has a cap or sinks.
const HEAD_DIMS_OF_FORMS: [usize; 3] = [64, 128, 256];

/// The assembler's report on a kernel.
#[derive(Debug)]
struct Resources {
    kernel: String,
    registers: u32,
    spill_bytes: u32,
    stack_bytes: u32,
}

/// Reads the assembler's report (`ptxas -v`).
fn resources(log: &str) -> Vec<Resources> {
    let number_before =
        |line: &str, what: &str| -> Option<u32> { line.split(what).next()?.rsplit([' ', ',']).find(|word| !word.is_empty())?.parse().ok() };
    log.split("Compiling entry function '")
        .skip(1)
        .map(|report| {
            let kernel = report.split('\'').next().unwrap().to_owned();
            let line = |with: &str| report.lines().find(|line| line.contains(with)).unwrap_or_else(|| panic!("no {with} in {report}"));
            let stack = line(" bytes stack frame");
            Resources {
                kernel,
                registers: line("Used ").split("Used ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok()).expect("registers"),
                spill_bytes: number_before(stack, " bytes spill stores").unwrap() + number_before(stack, " bytes spill loads").unwrap(),
                stack_bytes: number_before(stack, " bytes stack frame").unwrap(),
            }
        })
        .collect()
}

/// The reports on all kernels that suit a device, with their definitions, and the heads of those that are compiled for them.
fn reports(arch: Arch) -> Vec<(String, Resources)> {
    let mut reports = Vec::new();
    for source in SOURCES {
        let heads = HEAD_DIMS.into_iter().flat_map(|dim| [Heads::bf16(dim), Heads { dim, kv: KvStorage::Int8 }]);
        for heads in heads.take(if source.by_heads { usize::MAX } else { 1 }) {
            let is_form = !source.defines.is_empty();
            if !source.suits(arch, heads.dim) || is_form && !HEAD_DIMS_OF_FORMS.contains(&heads.dim) {
                continue;
            }
            let compiled = compile::compile(source, arch, heads).unwrap_or_else(|error| panic!("{error}"));
            assert!(compiled.cubin.starts_with(b"\x7fELF"), "{} for {arch} is machine code", source.file);
            for trouble in ["warning", "Performance Loss"] {
                assert!(!compiled.log.contains(trouble), "{} for {arch}: {}", source.file, compiled.log);
            }
            let int8 = (heads.kv == KvStorage::Int8).then_some("int8");
            let of_heads =
                source.by_heads.then(|| [Some(&*heads.dim.to_string()), int8].into_iter().flatten().collect::<Vec<_>>().join(" "));
            let form = of_heads.iter().map(String::as_str).chain(source.defines.iter().copied()).collect::<Vec<_>>().join(" ");
            reports.extend(resources(&compiled.log).into_iter().map(|report| (form.clone(), report)));
        }
    }
    reports
}

#[test]
fn every_kernel_compiles_and_none_spills() {
    match compile::version() {
        Ok((major, minor)) => println!("NVRTC {major}.{minor}"),
        Err(CudaError::NoLibrary { .. }) => panic!(
            "NVRTC is not here. `make test` fetches it; otherwise `pip install -r kernels/tests/requirements.txt`, and name the folder \
             of libnvrtc.so.13 (site-packages/nvidia/cu13/lib) in LD_LIBRARY_PATH. No GPU is needed."
        ),
        Err(error) => panic!("{error}"),
    }
    println!("{:24}{:>20}{:>9}{:>11}{:>13}{:>13}", "kernel", "heads", "device", "registers", "spill bytes", "stack bytes");
    let mut kernels: BTreeMap<String, u32> = BTreeMap::new();
    // The compiler is slow: one thread per device.
    let reports = std::thread::scope(|scope| {
        let threads = ARCHS.map(|arch| scope.spawn(move || reports(arch)));
        threads.map(|thread| thread.join().expect("every kernel compiles"))
    });
    for (arch, reports) in ARCHS.iter().zip(reports) {
        for (form, Resources { kernel, registers, spill_bytes, stack_bytes }) in reports {
            println!("{kernel:24}{form:>20}{:>9}{registers:>11}{spill_bytes:>13}{stack_bytes:>13}", arch.to_string());
            *kernels.entry(kernel).or_default() += spill_bytes + stack_bytes;
        }
    }
    let spilling: Vec<_> = kernels.iter().filter(|(_, bytes)| **bytes > 0).collect();
    assert!(spilling.is_empty(), "kernels whose numbers do not fit into registers: {spilling:?}");
    let expected = [
        "activate",
        "add_and_norm",
        "add_to_logits",
        "attention_combine",
        "attention_decode",
        "attention_prefill",
        "attention_prefill_hopper",
        "ban",
        "cap_logits",
        "embedding",
        "experts_combine",
        "experts_down_of_few",
        "experts_down_of_many",
        "experts_down_of_some",
        "experts_gate_up_of_few",
        "experts_gate_up_of_many",
        "experts_gate_up_of_some",
        "experts_route",
        "experts_sort",
        "gather",
        "kv_gather",
        "kv_scatter",
        "mask_logits",
        "penalize",
        "qk_scales",
        "quantize_fp8_rows",
        "quantize_fp8_tensor",
        "rms_norm",
        "rope_kv_write",
        "router_logits_of_few",
        "router_logits_of_many",
        "sample",
        "swiglu",
    ];
    assert!(kernels.keys().eq(&expected), "every kernel was compiled: {:?}", kernels.keys());
}

#[test]
fn the_report_of_the_assembler_is_read() {
    let log = "ptxas info    : 0 bytes gmem\n\
               ptxas info    : Compiling entry function 'a' for 'sm_80'\n\
               ptxas info    : Function properties for a\n\
               ptxas         .     8 bytes stack frame, 16 bytes spill stores, 24 bytes spill loads\n\
               ptxas info    : Used 255 registers, used 1 barriers, 8 bytes cumulative stack size\n";
    let [a] = &resources(log)[..] else { panic!("one kernel") };
    assert_eq!((a.kernel.as_str(), a.registers, a.spill_bytes, a.stack_bytes), ("a", 255, 40, 8));
}
