//! Processes that find the stand-in when they look for CUDA's libraries.

use std::{
    ffi::OsString,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    os::unix::fs::symlink,
    path::{Path, PathBuf},
    process::{Command, Output},
};
use tempfile::TempDir;

/// A folder of CUDA's libraries, and one for compiled kernels, which depends on the sources that they were made from.
pub(crate) struct Standin {
    folder: TempDir,
    options: String,
    variables: Vec<(&'static str, String)>,
}

/// The names under which the libraries are searched for.
const NAMES: [&str; 3] = ["libcuda.so.1", "libcublasLt.so.13", "libnvrtc.so.13"];

impl Standin {
    /// Creates a stand-in with the `options` of `src/options.rs`.
    pub(crate) fn new(options: &str) -> Self {
        let folder = TempDir::new().expect("a folder");
        for name in NAMES {
            symlink(library(), folder.path().join(name)).expect("a link");
        }
        Self { folder, options: options.to_owned(), variables: Vec::new() }
    }

    /// Edits kernels' sources before they are compiled: (file, text that occurs once, replacement).
    pub(crate) fn with_edit(mut self, (file, from, to): (&str, &str, &str)) -> Self {
        let plan = self.folder.path().join("plan");
        fs::write(&plan, format!("{file}\n<<<<\n{from}\n====\n{to}\n>>>>\n")).expect("a file");
        // Sources that are not edited need not be compiled again.
        fs::create_dir(self.folder.path().join("kernels")).expect("a folder");
        for entry in fs::read_dir(self.cache()).into_iter().flatten().flatten().filter(|_| file != "common.cuh") {
            let name = entry.file_name().into_string().expect("names are text");
            // Other processes write files beside their places, and then move them there.
            if !name.starts_with(&format!("{}-", file.trim_end_matches(".cu"))) && !name.ends_with(".partial") {
                fs::copy(entry.path(), self.folder.path().join("kernels").join(&name)).expect("a copy");
            }
        }
        self.options =
            [&self.options, &*format!("plant={}", plan.display())].into_iter().filter(|o| !o.is_empty()).collect::<Vec<_>>().join(",");
        self
    }

    /// Sets a variable of the environment, for tests of several cases.
    pub(crate) fn with_variable(mut self, name: &'static str, value: &str) -> Self {
        self.variables.push((name, value.to_owned()));
        self
    }

    /// The folder of compiled kernels, which all tests share, and keep between runs, for unchanged sources only.
    pub(crate) fn cache(&self) -> PathBuf {
        if self.options.contains("plant=") { self.folder.path().join("kernels") } else { kept("kernels") }
    }

    pub(crate) fn path(&self) -> &Path {
        self.folder.path()
    }

    /// Sets a command up to find the stand-in.
    pub(crate) fn prepare(&self, command: &mut Command) {
        let mut folders: Vec<OsString> = vec![self.folder.path().into()];
        folders.extend(std::env::var_os("LD_LIBRARY_PATH"));
        command.env("LD_LIBRARY_PATH", folders.join(":".as_ref()));
        command.env("TIDEMILL_GPU_STANDIN", &self.options).env("GPU_STANDIN_CACHE", self.cache());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
    }

    /// Runs a test of this program, which is ignored otherwise, in a process of its own.
    pub(crate) fn run(&self, test: &str) -> Output {
        let mut command = Command::new(std::env::current_exe().expect("a program"));
        self.prepare(command.args([test, "--exact", "--ignored", "--nocapture"]));
        command.output().expect("it starts")
    }

    /// Runs such a test, and asserts that it passes.
    pub(crate) fn passes(&self, test: &str) -> String {
        let output = self.run(test);
        let text = told(&output);
        assert!(output.status.success() && text.contains("1 passed"), "{test} on the stand-in ({}):\n{text}", self.options);
        text
    }
}

/// The output of a process, errors last.
pub(crate) fn told(output: &Output) -> String {
    format!("{}\n{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
}

/// The folder of compiled kernels, in a process that `run` started.
pub(crate) fn cache() -> PathBuf {
    PathBuf::from(std::env::var_os("GPU_STANDIN_CACHE").expect("started by `Standin::run`"))
}

/// A folder beside the stand-in that is kept between runs. A kernel's file is named after its source, the compiler's options and version; the
/// folder after the part of the stand-in that changes these options.
pub(crate) fn kept(name: &str) -> PathBuf {
    let mut hasher = DefaultHasher::new();
    include_str!("../../src/api/nvrtc.rs").hash(&mut hasher);
    library().with_file_name(format!("gpu-standin-{name}-{:016x}", hasher.finish()))
}

/// The stand-in: the newest that Cargo has built beside this program.
pub(crate) fn library() -> PathBuf {
    let program = std::env::current_exe().expect("a program");
    let deps = program.parent().expect("a folder");
    let candidates = [deps.to_owned(), deps.join("..")].map(|folder| folder.join("libtidemill_gpu_standin.so"));
    let newest = candidates.into_iter().filter(|path| path.exists()).max_by_key(|path| path.metadata().and_then(|m| m.modified()).ok());
    newest.expect("Cargo builds the library before its tests").canonicalize().expect("a path")
}

pub(crate) fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}
