//! Checks on a GPU that need a model or its sampler, behind the same feature as those of the kernels.

mod models;
mod sampling;

pub use models::{CheckError, all as models, on_several as models_on_several};
pub use sampling::all as sampling;

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;
    use tidemill_kernels::cuda::checks::{Checks, Extent, TestGpu};

    #[test]
    fn sampling_and_every_checkpoint_match_their_references_on_this_machines_gpu() {
        let cache = std::env::temp_dir().join("tidemill-kernels");
        let Some(mut gpu) = TestGpu::for_test(&cache) else { return };
        let mut checks = Checks::new(gpu.seed);
        sampling(&mut gpu, &mut checks, Extent::All).unwrap();
        models(&Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures"), &cache, &mut checks).unwrap();
        assert!(checks.verdict().is_ok(), "{}", checks.table());
    }
}
