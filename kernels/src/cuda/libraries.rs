//! CUDA's libraries as this process found them. They are searched for under several names in several folders, and the ones found determine
//! which features work, and how fast.

use super::{CudaError, compile};
use cudarc::{cublaslt, driver, nvrtc};
use std::{fmt, fs, path::PathBuf};

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Libraries {
    /// The driver (`libcuda`); its version is the latest CUDA that it supports.
    pub driver: Library,
    pub nvrtc: Library,
    pub cublaslt: Library,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Library {
    /// The version of CUDA, or of cuBLAS.
    pub version: Version,
    /// The mapped file, if the system reports it.
    pub path: Option<PathBuf>,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Version {
    pub major: u32,
    pub minor: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.path {
            Some(path) => write!(f, "{} ({})", self.version, path.display()),
            None => write!(f, "{}", self.version),
        }
    }
}

/// Loads the libraries if necessary, and queries their versions. An error names the first missing library.
pub fn libraries() -> Result<Libraries, CudaError> {
    let driver = driver_version()?;
    let (major, minor) = compile::version()?;
    // SAFETY: looks for the library and loads it.
    if !unsafe { cublaslt::sys::is_culib_present() } {
        return Err(CudaError::NoLibrary { name: "libcublasLt" });
    }
    // SAFETY: the library is there; the function has no requirements.
    let cublaslt = unsafe { cublaslt::sys::cublasLtGetVersion() } as u32;
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    macro_rules! at {
        ($sys:path, $function:literal) => {{
            use $sys as sys;
            // SAFETY: the library is there; the function is not called, only its address is taken.
            let found = unsafe { sys::culib().get::<unsafe extern "C" fn()>($function) };
            found.ok().and_then(|function| file_at(&maps, *function as usize))
        }};
    }
    Ok(Libraries {
        driver: Library { version: driver, path: at!(driver::sys, b"cuDriverGetVersion\0") },
        nvrtc: Library { version: Version { major: major as u32, minor: minor as u32 }, path: at!(nvrtc::sys, b"nvrtcVersion\0") },
        cublaslt: Library {
            version: Version { major: cublaslt / 10_000, minor: cublaslt / 100 % 100 },
            path: at!(cublaslt::sys, b"cublasLtGetVersion\0"),
        },
    })
}

/// The driver refuses machine code by an NVRTC of a later major version, with an unhelpful message, so this checks beforehand.
pub(super) fn assert_that_the_driver_loads_nvrtcs_code() -> Result<(), CudaError> {
    let (driver, (major, minor)) = (driver_version()?, compile::version()?);
    let nvrtc = Version { major: major as u32, minor: minor as u32 };
    if nvrtc.major > driver.major { Err(CudaError::NvrtcTooNew { nvrtc, driver }) } else { Ok(()) }
}

fn driver_version() -> Result<Version, CudaError> {
    // SAFETY: looks for the driver's library and loads it.
    if !unsafe { driver::sys::is_culib_present() } {
        return Err(CudaError::NoDriver);
    }
    let mut version = 0;
    // SAFETY: the library is there, and the pointer is to a live integer.
    unsafe { driver::sys::cuDriverGetVersion(&mut version) }.result()?;
    Ok(Version { major: version as u32 / 1000, minor: version as u32 % 1000 / 10 })
}

/// The file that is mapped at an address, by lines of `START-END PERMISSIONS OFFSET DEVICE INODE PATH`.
fn file_at(maps: &str, address: usize) -> Option<PathBuf> {
    let file = |line: &str| {
        let (range, rest) = line.split_once(' ')?;
        let (start, end) = range.split_once('-')?;
        let at = |text| usize::from_str_radix(text, 16).ok();
        let path = rest.find('/').map(|slash| &rest[slash..]);
        (at(start)?..at(end)?).contains(&address).then_some(path?.into())
    };
    maps.lines().find_map(file)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn a_function_is_in_the_file_that_is_mapped_there() {
        let maps = "55d0a000-55d0b000 r-xp 00000000 fe:00 12                         /usr/bin/worker\n\
                    7f0000000000-7f0000100000 r-xp 00001000 fe:00 34                 /opt/cuda 13/libnvrtc.so.13\n\
                    7f0000200000-7f0000201000 rw-p 00000000 00:00 0 \n";
        assert_eq!(file_at(maps, 0x7f00_0000_1234).as_deref(), Some(Path::new("/opt/cuda 13/libnvrtc.so.13")));
        assert_eq!(file_at(maps, 0x7f00_0020_0000), None, "memory that is no file's");
        assert_eq!(file_at(maps, 0x1000), None);
        let own = file_at(&fs::read_to_string("/proc/self/maps").unwrap(), file_at as *const () as usize);
        assert_eq!(own, std::env::current_exe().ok());
    }
}
