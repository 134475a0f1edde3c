//! The compiler (`libnvrtc`): the real one, which is asked for PTX with line information instead of machine code.
//!
//! The option `plant` names a file of edits to sources, with which tests check that a bug is found:
//!
//! ```text
//! FILE.cu
//! <<<<
//! text that occurs once
//! ====
//! text in its place
//! >>>>
//! ```

use super::driver::{COMPILES, MODULE_MAGIC};
use crate::options::options;
use std::{
    ffi::{CStr, CString, c_char, c_int, c_void},
    mem::transmute_copy,
    path::{Path, PathBuf},
    sync::OnceLock,
};

type Status = c_int;
type Program = *mut c_void;

const NAME: &str = "libnvrtc.so.13";

/// A function of the real library.
fn real<F>(name: &CStr) -> F {
    static LIBRARY: OnceLock<usize> = OnceLock::new();
    let library = *LIBRARY.get_or_init(|| {
        let own = own_path();
        let folders = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
        let candidates = std::env::split_paths(&folders).map(|folder| folder.join(NAME));
        let found = candidates.filter(|path| path.exists()).find(|path| path.canonicalize().ok() != own.canonicalize().ok());
        let path = found.unwrap_or_else(|| panic!("the stand-in needs the real {NAME}, in another folder of LD_LIBRARY_PATH"));
        let path = CString::new(path.into_os_string().into_encoded_bytes()).expect("a path");
        // SAFETY: NVRTC's initializer has no requirements.
        let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
        assert!(!library.is_null(), "{path:?} does not load");
        library as usize
    });
    // SAFETY: the library is loaded, and never unloaded.
    let function = unsafe { libc::dlsym(library as *mut c_void, name.as_ptr()) };
    assert!(!function.is_null(), "NVRTC has no {name:?}");
    // SAFETY: the caller names the function's type.
    unsafe { transmute_copy(&function) }
}

/// The path of this library.
fn own_path() -> PathBuf {
    // SAFETY: plain numbers and pointers, written by `dladdr`.
    let mut info: libc::Dl_info = unsafe { std::mem::zeroed() };
    // SAFETY: any address of this library will do.
    let known = unsafe { libc::dladdr(own_path as *const c_void, &mut info) };
    assert!(known != 0 && !info.dli_fname.is_null(), "the loader knows this library");
    // SAFETY: the loader's string.
    Path::new(&*unsafe { CStr::from_ptr(info.dli_fname) }.to_string_lossy()).to_owned()
}

/// A source with the edits that are planned for it.
fn edited(name: &CStr, text: &CStr) -> CString {
    let Some(path) = &options().plant else { return text.to_owned() };
    let plan = std::fs::read_to_string(path).unwrap_or_else(|error| panic!("{path}: {error}"));
    let mut text = text.to_string_lossy().into_owned();
    for edit in plan.split(">>>>").filter(|edit| !edit.trim().is_empty()) {
        let (file, rest) = edit.split_once("<<<<").expect("an edit has a file, and <<<<");
        let (from, to) = rest.split_once("====").expect("an edit has ====");
        let (from, to) = (from.trim_matches('\n'), to.trim_matches('\n'));
        if file.trim().as_bytes() != name.to_bytes() {
            continue;
        }
        assert_eq!(text.matches(from).count(), 1, "{name:?} holds once: {from}");
        text = text.replace(from, to);
    }
    CString::new(text).expect("sources have no zero bytes")
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcVersion(major: *mut c_int, minor: *mut c_int) -> Status {
    // SAFETY: the caller's pointers, passed on.
    unsafe { real::<unsafe extern "C" fn(*mut c_int, *mut c_int) -> Status>(c"nvrtcVersion")(major, minor) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCreateProgram(
    to: *mut Program,
    text: *const c_char,
    name: *const c_char,
    count: c_int,
    headers: *const *const c_char,
    names: *const *const c_char,
) -> Status {
    type Function =
        unsafe extern "C" fn(*mut Program, *const c_char, *const c_char, c_int, *const *const c_char, *const *const c_char) -> Status;
    // SAFETY: the caller's strings; the real function copies ours.
    unsafe {
        let text = edited(CStr::from_ptr(name), CStr::from_ptr(text));
        let edited: Vec<CString> =
            (0..count as usize).map(|i| edited(CStr::from_ptr(*names.add(i)), CStr::from_ptr(*headers.add(i)))).collect();
        let headers: Vec<*const c_char> = edited.iter().map(|header| header.as_ptr()).collect();
        real::<Function>(c"nvrtcCreateProgram")(to, text.as_ptr(), name, count, headers.as_ptr(), names)
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcCompileProgram(program: Program, count: c_int, options: *const *const c_char) -> Status {
    type Function = unsafe extern "C" fn(Program, c_int, *const *const c_char) -> Status;
    // SAFETY: the caller's strings.
    let given: Vec<String> =
        (0..count as usize).map(|i| unsafe { CStr::from_ptr(*options.add(i)) }.to_string_lossy().into_owned()).collect();
    let mut changed: Vec<CString> = Vec::new();
    for option in given {
        // A virtual architecture gives PTX, without the assembler.
        if !option.starts_with("--ptxas-options") {
            changed.push(CString::new(option.replace("=sm_", "=compute_")).expect("options have no zero bytes"));
        }
    }
    changed.push(c"--generate-line-info".to_owned());
    let pointers: Vec<*const c_char> = changed.iter().map(|option| option.as_ptr()).collect();
    COMPILES.set(true);
    // SAFETY: as above.
    let status = unsafe { real::<Function>(c"nvrtcCompileProgram")(program, pointers.len() as c_int, pointers.as_ptr()) };
    COMPILES.set(false);
    status
}

fn ptx(program: Program) -> Result<Vec<u8>, Status> {
    let mut size = 0usize;
    // SAFETY: the caller's program; the size is ours.
    let status = unsafe { real::<unsafe extern "C" fn(Program, *mut usize) -> Status>(c"nvrtcGetPTXSize")(program, &mut size) };
    if status != 0 {
        return Err(status);
    }
    let mut text = vec![0u8; size];
    // SAFETY: as above; the buffer has the size asked for.
    let status = unsafe { real::<unsafe extern "C" fn(Program, *mut c_char) -> Status>(c"nvrtcGetPTX")(program, text.as_mut_ptr().cast()) };
    if status != 0 {
        return Err(status);
    }
    while text.last() == Some(&0) {
        text.pop();
    }
    Ok([&MODULE_MAGIC[..], &(text.len() as u64).to_le_bytes(), &text].concat())
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetCUBINSize(program: Program, size: *mut usize) -> Status {
    match ptx(program) {
        // SAFETY: the caller's pointer.
        Ok(bytes) => unsafe {
            *size = bytes.len();
            0
        },
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetCUBIN(program: Program, to: *mut c_char) -> Status {
    match ptx(program) {
        // SAFETY: the caller's buffer, of the size asked for.
        Ok(bytes) => unsafe {
            to.cast::<u8>().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len());
            0
        },
        Err(status) => status,
    }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLogSize(program: Program, size: *mut usize) -> Status {
    // SAFETY: passed on.
    unsafe { real::<unsafe extern "C" fn(Program, *mut usize) -> Status>(c"nvrtcGetProgramLogSize")(program, size) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetProgramLog(program: Program, to: *mut c_char) -> Status {
    // SAFETY: passed on.
    unsafe { real::<unsafe extern "C" fn(Program, *mut c_char) -> Status>(c"nvrtcGetProgramLog")(program, to) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcDestroyProgram(program: *mut Program) -> Status {
    // SAFETY: passed on.
    unsafe { real::<unsafe extern "C" fn(*mut Program) -> Status>(c"nvrtcDestroyProgram")(program) }
}

#[unsafe(no_mangle)]
unsafe extern "C" fn nvrtcGetErrorString(status: Status) -> *const c_char {
    // SAFETY: passed on.
    unsafe { real::<unsafe extern "C" fn(Status) -> *const c_char>(c"nvrtcGetErrorString")(status) }
}
