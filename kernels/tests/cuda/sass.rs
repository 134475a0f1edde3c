//! Checks of the CUDA kernels' machine code, which can be read without a GPU. The assembler reorders the sources: a kernel with correct
//! results may have lost its speed, which no interpreter of PTX can detect.

use std::{
    collections::BTreeMap,
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};
use tidemill_kernels::{
    KvStorage,
    cuda::compile::{self, Arch, Heads, Source},
};

/// The disassembler: in the folder of programs beside NVRTC's, or in the search path.
fn disassembler() -> PathBuf {
    let folders = |variable: &str| env::var_os(variable).map(|paths| env::split_paths(&paths).collect::<Vec<_>>()).unwrap_or_default();
    let beside_libraries = folders("LD_LIBRARY_PATH").into_iter().map(|folder| folder.join("../bin"));
    let found = beside_libraries.chain(folders("PATH")).map(|folder| folder.join("nvdisasm")).find(|program| program.exists());
    found.expect(
        "nvdisasm is not here. `make test` fetches it; otherwise `pip install -r kernels/tests/requirements.txt`, and name the folder of \
         libnvrtc.so.13 (site-packages/nvidia/cu13/lib) in LD_LIBRARY_PATH",
    )
}

/// A kernel's instructions in the order of their addresses.
#[derive(Default, Debug)]
struct Code {
    instructions: Vec<String>,
    /// The index of the instruction that follows each label.
    labels: BTreeMap<String, usize>,
}

impl Code {
    /// Reads all kernels of a listing, by name.
    fn read(listing: &str) -> BTreeMap<String, Code> {
        let mut kernels: BTreeMap<String, Code> = BTreeMap::new();
        let mut current: Option<&mut Code> = None;
        for line in listing.lines() {
            let text = line.trim();
            if let Some(name) = text.strip_prefix(".section\t.text.").and_then(|rest| rest.split(',').next()) {
                current = Some(kernels.entry(name.to_owned()).or_default());
            } else if text.starts_with(".section\t") {
                current = None;
            } else if let Some(code) = current.as_mut() {
                if let Some(label) = text.strip_suffix(':').filter(|label| label.starts_with(".L_x_")) {
                    code.labels.insert(label.to_owned(), code.instructions.len());
                } else if let Some((_, instruction)) = text.strip_prefix("/*").and_then(|text| text.split_once("*/")) {
                    code.instructions.push(instruction.trim().trim_end_matches([';', ' ']).to_owned());
                }
            }
        }
        kernels
    }

    /// The indices of the instructions that contain `what`.
    fn all(&self, what: &str) -> Vec<usize> {
        (0..self.instructions.len()).filter(|&i| self.instructions[i].contains(what)).collect()
    }

    fn count(&self, what: &str, within: &std::ops::Range<usize>) -> usize {
        self.all(what).iter().filter(|i| within.contains(i)).count()
    }

    /// The loops: from the target of each backward branch to the branch itself.
    fn loops(&self) -> Vec<std::ops::Range<usize>> {
        let target = |instruction: &str| self.labels.get(instruction.split_once("`(")?.1.split(')').next()?).copied();
        let branches = self.all("BRA").into_iter().filter_map(|i| Some(target(&self.instructions[i])?..i + 1));
        // The trap after a kernel's end branches to itself.
        branches.filter(|within| within.len() > 1).collect()
    }

    /// The smallest loop around an instruction that contains `what`.
    fn loop_with(&self, what: &str) -> std::ops::Range<usize> {
        let places = self.all(what);
        let around = self.loops().into_iter().filter(|within| places.iter().any(|i| within.contains(i)));
        around.min_by_key(|within| within.len()).unwrap_or_else(|| panic!("{what} in a loop"))
    }
}

/// A kernel's machine code, and the number of registers per thread.
fn code(source: &Source, kernel: &str, arch: Arch, heads: Heads) -> (Code, usize) {
    let compiled = compile::compile(source, arch, heads).unwrap_or_else(|error| panic!("{error}"));
    let report =
        compiled.log.split("Compiling entry function '").find(|report| report.starts_with(&format!("{kernel}'"))).expect("a report");
    let registers = report.split("Used ").nth(1).and_then(|rest| rest.split(' ').next()?.parse().ok()).expect("registers");
    let int8 = if heads.kv == KvStorage::Int8 { "-int8" } else { "" };
    let file = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("{kernel}-{arch}-{}{int8}.cubin", heads.dim));
    fs::write(&file, &compiled.cubin).expect("a file");
    let output = Command::new(disassembler()).arg("-c").arg(&file).output().expect("the disassembler runs");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let mut kernels = Code::read(&String::from_utf8_lossy(&output.stdout));
    (kernels.remove(kernel).expect("the kernel is in the listing"), registers)
}

fn int8(dim: usize) -> Heads {
    Heads { dim, kv: KvStorage::Int8 }
}

/// The registers of a multiprocessor, on every device that kernels are compiled for.
const REGISTERS: usize = 65_536;

/// The instructions of a division of floats or integers.
const DIVISION: [&str; 2] = ["FCHK", "MUFU.RCP"];

#[test]
fn prefill_on_hopper_keeps_the_tensor_cores_busy() {
    for heads in [Heads::bf16(64), int8(64), Heads::bf16(128), int8(128)] {
        let (code, _) = code(&compile::ATTENTION_PREFILL_HOPPER, "attention_prefill_hopper", Arch::SM_90A, heads);
        let [scores_wait] = code.all("WARPGROUP.DEPBAR.LE gsb0, 0x1")[..] else { panic!("one wait for scores alone") };
        let all = code.loop_with("WARPGROUP.DEPBAR.LE gsb0, 0x1");
        let next = |what: &str, from: usize| code.all(what).into_iter().find(|&i| i >= from).unwrap_or(code.instructions.len());

        // A lane has 64 scores, and two factors for the earlier sums.
        let under_values = scores_wait..next("WARPGROUP.DEPBAR.LE gsb0, 0x0", scores_wait).min(all.end);
        assert_eq!(code.count("MUFU.EX2", &under_values), 66, "{heads:?}: exponentials while P V is on its way");
        assert_eq!(code.count("MUFU.EX2", &all), 66, "{heads:?}: exponentials of a tile");

        // Waits for K, and then for V.
        let barriers = code.all("BAR.SYNC").into_iter().filter(|i| all.contains(i)).collect::<Vec<_>>();
        let [k_barrier, v_barrier] = barriers[..] else { panic!("{heads:?}: two barriers, not {}", barriers.len()) };
        let idle = k_barrier..next("HGMMA", k_barrier);
        // The earlier sums are scaled, and exponentials are packed.
        assert!(idle.len() <= 96, "{heads:?}: {} instructions from the barrier to the first product", idle.len());

        let products = idle.end..code.all("HGMMA").into_iter().rfind(|&i| i < scores_wait).expect("products") + 1;
        assert_eq!(code.count("HGMMA", &products), heads.dim / 16 + 128 / 16, "{heads:?}: products of a tile are started together");
        assert!(products.contains(&v_barrier), "{heads:?}: V is waited for behind the products with K");
        for (waits, times) in [("DEPBAR", 0), ("BAR.SYNC", 1), ("BRA", 0)] {
            assert_eq!(code.count(waits, &products), times, "{heads:?}: {waits} between products");
        }
        for slow in DIVISION {
            assert_eq!(code.count(slow, &all), 0, "{heads:?}: {slow} in the loop over tiles");
        }
    }
}

#[test]
fn decode_asks_for_a_whole_block_before_it_computes() {
    // 8-bit integers are converted while others are in flight.
    for (heads, first_loads, loads) in [(Heads::bf16(64), 8, 8), (Heads::bf16(128), 16, 16), (int8(64), 10, 12), (int8(128), 12, 20)] {
        for arch in [Arch::SM_80, Arch::SM_90A] {
            let (code, registers) = code(&compile::ATTENTION_DECODE, "attention_decode", arch, heads);
            let within = code.loop_with("HMMA");
            let first = code.all("HMMA").into_iter().find(|i| within.contains(i)).expect("a product");
            let early = code.count("LDG", &(within.start..first));
            assert!(early >= first_loads, "{heads:?} on {arch}: {early} loads before the first product");
            assert_eq!(code.count("LDG", &within), loads, "{heads:?} on {arch}: loads of a block");
            for slow in DIVISION {
                assert_eq!(code.count(slow, &within), 0, "{heads:?} on {arch}: {slow} in the loop over blocks");
            }
            assert!(3 * 128 * registers <= REGISTERS, "{heads:?} on {arch}: {registers} registers, for three blocks of threads");
        }
    }
}

#[test]
fn sampling_adds_in_shared_memory_at_once() {
    for arch in [Arch::SM_80, Arch::SM_90A] {
        let (code, registers) = code(&compile::SAMPLE, "sample", arch, Heads::bf16(128));
        assert_eq!(code.count("ATOMS.CAS", &(0..code.instructions.len())), 0, "{arch}: additions by trial");
        for within in code.loops() {
            assert_eq!(code.count("FCHK", &within), 0, "{arch}: a division in {within:?}");
        }
        assert!(code.count("LDG.E.128", &(0..code.instructions.len())) >= 3, "{arch}: rows are read 16 bytes at a time");
        assert!(1024 * registers <= REGISTERS, "{arch}: {registers} registers, for a block of threads");
    }
}

#[test]
fn a_listing_is_read() {
    let listing = "\t.section\t.text.a,\"ax\",@progbits\n\t.sectioninfo\t@\"SHI_REGISTERS=32\"\na:\n.text.a:\n        /*0000*/                   MOV R1, R2 ;\n.L_x_0:\n        \
                   /*0010*/                   HMMA.16816.F32.BF16 R4, R8, R2, R4 ;\n        /*0020*/              @!P0 BRA `(.L_x_0) ;\n        \
                   /*0030*/                   EXIT ;\n.L_x_1:\n        /*0040*/                   BRA `(.L_x_1) ;\n\t.section\t.nv.info\n";
    let code = &Code::read(listing)["a"];
    assert_eq!(code.instructions[3], "EXIT");
    let [only] = &code.loops()[..] else { panic!("one loop") };
    assert_eq!(only, &(1..3));
    assert_eq!(code.loop_with("HMMA"), 1..3);
}
