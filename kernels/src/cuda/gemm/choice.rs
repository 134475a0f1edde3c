//! The choice of the fastest algorithm on this device out of those that cuBLASLt proposes for a product: each is run a few times, and the
//! choice is kept on disk. The library's own order is a prediction, and with few rows its first is often not the best.

use super::Problem;
use crate::cuda::{
    CudaError,
    device::{Device, Properties},
    launch::address,
};
use cudarc::{
    cublaslt::sys,
    driver::{CudaSlice, CudaStream, result, sys::CUevent_flags},
};
use std::{collections::BTreeMap, fmt::Write, fs, path::PathBuf};

type Algorithm = sys::cublasLtMatmulAlgo_t;

/// The choices so far, including those of earlier processes.
pub(super) struct Choices {
    file: PathBuf,
    by_problem: BTreeMap<String, Algorithm>,
    /// Whether there are choices that are not on disk yet.
    changed: bool,
    /// Memory that is overwritten between runs, so that weights come from memory as they do in a step.
    flush: Option<CudaSlice<u8>>,
    l2_bytes: usize,
}

/// The number of timed runs of each algorithm.
const RUNS: usize = 3;
/// The time from which an algorithm is run only once, as noise matters little.
const LONG_MS: f32 = 0.3;
/// The time relative to the best algorithm so far below which a later one is preferred; a smaller gain is noise.
const GAIN: f32 = 0.97;

impl Choices {
    /// Reads the choices of earlier processes. A file that is missing or damaged counts as empty.
    pub(super) fn open(device: &Device, version: usize) -> Self {
        let file = device.cache().folder().join(name(device.properties(), version));
        let by_problem = fs::read_to_string(&file).unwrap_or_default().lines().filter_map(parse).collect();
        Self { file, by_problem, changed: false, flush: None, l2_bytes: device.properties().l2_bytes }
    }

    pub(super) fn known(&self, problem: &Problem) -> Option<Algorithm> {
        self.by_problem.get(&key(problem)).copied()
    }

    /// The fastest of `proposed`, which is not empty. `run` launches a product; algorithms that it cannot launch are skipped, and its last
    /// error is returned if none is left. Not for use while the stream is recorded.
    pub(super) fn measure<E: From<CudaError>>(
        &mut self,
        stream: &CudaStream,
        problem: &Problem,
        proposed: &[Algorithm],
        run: impl Fn(&Algorithm) -> Result<(), E>,
    ) -> Result<Algorithm, E> {
        let (mut best, mut failure): (Option<(f32, Algorithm)>, Option<E>) = (None, None);
        for algorithm in proposed {
            // The first run loads the library's code.
            if let Err(error) = run(algorithm) {
                failure = Some(error);
                continue;
            }
            let ms = self.time(stream, || run(algorithm))?;
            if best.is_none_or(|(least, _)| ms < least * GAIN) {
                best = Some((ms, *algorithm));
            }
        }
        match (best, failure) {
            (Some((_, algorithm)), _) => {
                self.by_problem.insert(key(problem), algorithm);
                self.changed = true;
                Ok(algorithm)
            }
            (None, failure) => Err(failure.expect("an algorithm ran or failed")),
        }
    }

    /// The shortest of some runs.
    fn time<E: From<CudaError>>(&mut self, stream: &CudaStream, run: impl Fn() -> Result<(), E>) -> Result<f32, E> {
        let mut least = f32::INFINITY;
        for _ in 0..RUNS {
            self.flush(stream)?;
            let event = || stream.record_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(CudaError::from);
            let begun = event()?;
            run()?;
            least = least.min(begun.elapsed_ms(&event()?).map_err(CudaError::from)?);
            if least > LONG_MS {
                break;
            }
        }
        Ok(least)
    }

    fn flush(&mut self, stream: &CudaStream) -> Result<(), CudaError> {
        if self.flush.is_none() {
            let set_up = stream.context().default_stream();
            // SAFETY: the memory is never read.
            self.flush = Some(unsafe { set_up.alloc(2 * self.l2_bytes) }?);
            set_up.synchronize()?;
        }
        let memory = self.flush.as_ref().expect("set above");
        // SAFETY: all bytes of memory of our own.
        unsafe { result::memset_d8_async(address(memory), 0, memory.len(), stream.cu_stream()) }?;
        Ok(())
    }

    /// Writes the new choices, and frees the memory used for measuring. If writing fails, the next process measures again.
    pub(super) fn keep(&mut self) {
        self.flush = None;
        if !std::mem::take(&mut self.changed) {
            return;
        }
        let lines: String = self.by_problem.iter().map(|(key, algorithm)| line(key, algorithm)).collect();
        let partial = self.file.with_extension(format!("{}.partial", std::process::id()));
        let _ = fs::write(&partial, lines).and_then(|()| fs::rename(&partial, &self.file));
    }
}

/// The name of the file: an algorithm's numbers are valid for one version of the library, and its speed for one kind of device.
fn name(device: &Properties, version: usize) -> String {
    let mut hasher = blake3::Hasher::new_derive_key("tidemill product choices v1");
    hasher.update(format!("{} {} {} {version}", device.name, device.arch, device.multiprocessors).as_bytes());
    format!("products-{}-{}.txt", device.arch, &hasher.finalize().to_hex()[..32])
}

fn key(&Problem { rows, inner, columns, operands, product, bias }: &Problem) -> String {
    format!("{rows} {inner} {columns} {operands:?} {product:?} {bias}")
}

/// A line of the file: the problem, a colon, and the algorithm's words.
fn line(key: &str, algorithm: &Algorithm) -> String {
    let mut line = format!("{key}:");
    for word in algorithm.data {
        let _ = write!(line, " {word:016x}");
    }
    line + "\n"
}

fn parse(line: &str) -> Option<(String, Algorithm)> {
    let (key, words) = line.split_once(':')?;
    let words: Vec<u64> = words.split_whitespace().map(|word| u64::from_str_radix(word, 16).ok()).collect::<Option<_>>()?;
    Some((key.to_owned(), Algorithm { data: words.try_into().ok()? }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_choice_is_read_as_it_was_written_and_damage_is_passed_over() {
        let algorithm = Algorithm { data: [0, u64::MAX, 2, 3, 4, 5, 6, 7] };
        let text = line("1 8 16 Bf16 CUDA_R_32F false", &algorithm);
        assert_eq!(parse(text.trim_end()), Some(("1 8 16 Bf16 CUDA_R_32F false".into(), algorithm)));
        for damaged in ["", "1 8 16", "1 8 16: 0 1 2", "1 8 16: 0 1 2 3 4 5 6 z", &text[..text.len() / 2]] {
            assert_eq!(parse(damaged), None, "{damaged}");
        }
    }
}
