//! Sampling against the CPU's, and tiny checkpoints' greedy tokens against references, handed over from one executor to another.

use crate::standin::{Standin, cache, repository};
use std::{fs, os::unix::fs::symlink};
use tempfile::TempDir;
use tidemill_kernels::cuda::checks::{Checks, Extent, TestGpu};

#[test]
fn sampling_matches_the_cpus() {
    print!("{}", Standin::new("arch=90").passes("models::sampling"));
}

macro_rules! checkpoints {
    ($($test:ident = $name:literal,)+) => {
        const CHECKPOINTS: &[&str] = &[$($name),+];

        mod checkpoints_match_their_references {
            $(
                #[test]
                fn $test() {
                    super::matches_its_reference($name);
                }
            )+
        }
    };
}

checkpoints! {
    cohere2 = "cohere2",
    deepseek_v2 = "deepseek-v2",
    deepseek_v3 = "deepseek-v3",
    exaone4 = "exaone4",
    fp8_blocks = "fp8-blocks",
    fp8_channel = "fp8-channel",
    fp8_fbgemm = "fp8-fbgemm",
    fp8_tensor = "fp8-tensor",
    gemma2 = "gemma2",
    gemma3 = "gemma3",
    glm4 = "glm4",
    glm4_moe = "glm4-moe",
    gpt_oss = "gpt-oss",
    gpt_oss_mxfp4 = "gpt-oss-mxfp4",
    granite = "granite",
    int4_awq = "int4-awq",
    int4_gptq = "int4-gptq",
    int4_gptq_v2 = "int4-gptq-v2",
    int4_packed = "int4-packed",
    lfm2 = "lfm2",
    llama = "llama",
    llama3 = "llama3",
    minimax_m2 = "minimax-m2",
    ministral3 = "ministral3",
    mistral = "mistral",
    mixtral = "mixtral",
    olmo2 = "olmo2",
    olmo3 = "olmo3",
    phi3 = "phi3",
    prose = "prose",
    qwen2 = "qwen2",
    qwen2_moe = "qwen2-moe",
    qwen3 = "qwen3",
    qwen3_5 = "qwen3-5",
    qwen3_5_moe = "qwen3-5-moe",
    qwen3_moe = "qwen3-moe",
    qwen3_next = "qwen3-next",
    seed_oss = "seed-oss",
    smollm3 = "smollm3",
    starcoder2 = "starcoder2",
}

fn matches_its_reference(name: &str) {
    print!("{}", Standin::new("arch=90").with_variable(CHECKPOINT, name).passes("models::checkpoint"));
}

/// The variable that names the checkpoint of [`checkpoint`].
const CHECKPOINT: &str = "GPU_STANDIN_CHECKPOINT";

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn checkpoint() {
    let wanted = std::env::var(CHECKPOINT).expect("started by `matches_its_reference`");
    check(|name| name == wanted);
}

#[test]
fn every_checkpoint_has_its_test() {
    let folder = fs::read_dir(repository().join("model/tests/fixtures")).unwrap().map(|entry| entry.unwrap());
    let with_reference = folder.filter(|entry| entry.path().join("reference.json").is_file());
    let mut names: Vec<String> = with_reference.map(|entry| entry.file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, CHECKPOINTS);
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn sampling() {
    let mut gpu = TestGpu::open(&cache(), 29).unwrap();
    let mut checks = Checks::new(gpu.seed);
    tidemill_model::cuda::checks::sampling(&mut gpu, &mut checks, Extent::All).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
}

#[test]
fn weights_in_fp8_stay_so_only_where_the_device_multiplies_them() {
    let in_fp8 = |options: &str| {
        let told = Standin::new(options).passes("models::checkpoints_in_fp8");
        ["fp8-blocks", "fp8-channel", "fp8-fbgemm", "fp8-tensor"].map(|form| told.contains(&format!("{form}: products in FP8")))
    };
    assert_eq!(in_fp8("arch=90"), [false, true, true, true]);
    assert_eq!(in_fp8("arch=80"), [false; 4]);
    assert_eq!(in_fp8("cublaslt=120805"), [false; 4], "a library that does not know a scale for each row");
    assert_eq!(in_fp8("refuse=rows"), [false; 4], "one that has no algorithm for it");
    assert_eq!(in_fp8("refuse=rows+bias"), [false, true, true, true], "one that adds no bias to it");
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn checkpoints_in_fp8() {
    check(|name| name.starts_with("fp8-"));
}

#[test]
fn layers_of_experts_run_on_the_device() {
    let told = Standin::new("arch=80,seed=3").passes("models::checkpoints_of_experts");
    print!("{told}");
    assert!(!told.contains("not checked"), "{told}");
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn checkpoints_of_experts() {
    check(|name| ["mixtral", "qwen2-moe", "qwen3-moe"].contains(&name));
}

/// Checks the tiny checkpoints whose name `wanted` takes.
fn check(wanted: impl Fn(&str) -> bool) {
    let folder = TempDir::new().unwrap();
    let fixtures = repository().join("model/tests/fixtures").canonicalize().unwrap();
    for name in CHECKPOINTS.iter().filter(|name| wanted(name)) {
        symlink(fixtures.join(name), folder.path().join(name)).unwrap();
    }
    let mut checks = Checks::new(0);
    tidemill_model::cuda::checks::models(folder.path(), &cache(), &mut checks).unwrap();
    println!("{}", checks.table());
    assert!(checks.verdict().is_ok());
}
