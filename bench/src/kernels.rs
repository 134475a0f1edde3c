//! `tidemill-bench kernels`: the CUDA kernels against references, and against the limits of the device.
//!
//! Every operation gets fresh random inputs (the seed is printed, `--seed` replays it) and outputs full of NaN, and is compared
//! with f64 arithmetic on the host. Then the device's own limits are measured, and each operation at the shapes of Llama-3.1-8B
//! as a fraction of the limit that binds it. `bench/gpu-check` runs all of it on a machine that has nothing but a driver.

pub mod check_attention;
pub mod check_blocks;
pub mod check_products;
pub mod check_rows;
pub mod check_sampling;
pub mod gpu;
pub mod limits;
pub mod report;
pub mod speed;
pub mod step;

use anyhow::Context;
use gpu::Gpu;
use report::Report;
use std::{fs, path::PathBuf};
use tidemill_kernels::cuda::{CudaError, Device, KernelCache};

/// Check the CUDA kernels against references, and measure them against the device's limits.
#[derive(Clone, Debug, clap::Args)]
pub struct KernelsArgs {
    /// Write everything here too.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Check only: no measurements.
    #[arg(long)]
    pub check_only: bool,
    /// Which device.
    #[arg(long, default_value_t = 0)]
    pub device: usize,
    /// Of the random inputs; a fresh one if not given.
    #[arg(long)]
    pub seed: Option<u64>,
    /// Where compiled kernels are kept.
    #[arg(long, default_value_os_t = std::env::temp_dir().join("tidemill-kernels"))]
    pub cache: PathBuf,
}

/// What the process ends with where there is no GPU: not a failure of the kernels.
pub const NO_DEVICE: i32 = 3;

pub fn run(args: &KernelsArgs) -> anyhow::Result<()> {
    let device = match Device::open(args.device, KernelCache::open(&args.cache)?) {
        Err(error) if error.is_absence() => {
            eprintln!("no GPU to check kernels on: {error}");
            std::process::exit(NO_DEVICE);
        }
        other => other?,
    };
    let seed = args.seed.unwrap_or_else(rand::random);
    let mut gpu = Gpu::new(device, seed)?;
    let mut report = Report::new(gpu.device.properties(), seed);

    check_rows::all(&mut gpu, &mut report)?;
    check_products::all(&mut gpu, &mut report)?;
    check_attention::all(&mut gpu, &mut report)?;
    check_sampling::all(&mut gpu, &mut report)?;
    check_blocks::all(&mut gpu, &mut report)?;
    if !args.check_only {
        let limits = limits::measure(&mut gpu, &mut report)?;
        speed::all(&mut gpu, &limits, &mut report)?;
        step::all(&mut gpu, &limits, &mut report)?;
    }

    print!("{}", report.table());
    if let Some(path) = &args.json {
        fs::write(path, serde_json::to_string_pretty(&report)? + "\n").with_context(|| format!("cannot write {}", path.display()))?;
    }
    report.verdict()
}

/// Whether a measurement does not fit on this device, which is then told and not fatal.
fn does_not_fit(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref::<CudaError>(), Some(CudaError::OutOfMemory { .. }))
}
