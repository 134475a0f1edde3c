//! The libraries that a process finds, and versions that do not go together.

use crate::standin::{Standin, cache, library};
use tidemill_kernels::cuda::{CudaError, Device, libraries};

#[test]
fn libraries_are_named_by_version_and_file() {
    Standin::new("driver=13010,cublaslt=130201").passes("libraries::named");
}

#[test]
fn an_nvrtc_that_is_newer_than_the_driver_is_refused_in_words() {
    Standin::new("driver=12080").passes("libraries::too_new");
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn named() {
    let found = libraries().unwrap();
    assert_eq!((found.driver.version.to_string(), found.cublaslt.version.to_string()), ("13.1".into(), "13.2".into()));
    assert_eq!(found.nvrtc.version.major, 13);
    assert_eq!([&found.driver.path, &found.cublaslt.path], [&Some(library()), &Some(library())]);
}

#[test]
#[ignore = "runs on the stand-in, started by the tests above"]
fn too_new() {
    let Err(error) = Device::open(0, &cache()) else { panic!("it opens") };
    assert!(matches!(error, CudaError::NvrtcTooNew { .. }) && error.to_string().contains("knows CUDA 12.8"), "{error}");
}
