//! The process that runs cases, one after the other, until it is ended or has a finding. Its parent reads the current case from a file.

use crate::{
    dice::Dice,
    meter,
    target::{Subject, Target, WALL_FACTOR},
};
use nix::{
    sys::{
        prctl,
        resource::{Resource, setrlimit},
        signal::Signal,
    },
    time::{ClockId, clock_gettime},
};
use std::{
    fs::File,
    io,
    os::unix::fs::FileExt,
    panic::{self, AssertUnwindSafe, catch_unwind},
    path::Path,
    process::ExitCode,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    thread,
    time::{Duration, Instant},
};

/// The exit status of a child that has reported a finding.
pub(crate) const FOUND: u8 = 3;

/// The progress that the parent reads. Times are in microseconds of CPU.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Progress {
    /// The seed of the current case, or of the last one.
    pub(crate) seed: u64,
    /// The number of cases that have ended.
    pub(crate) cases: u64,
    pub(crate) most_bytes: u64,
    pub(crate) most_bytes_seed: u64,
    pub(crate) slowest_us: u64,
    pub(crate) slowest_seed: u64,
}

impl Progress {
    const BYTES: usize = 48;

    fn write(&self, file: &File) -> io::Result<()> {
        let Self { seed, cases, most_bytes, most_bytes_seed, slowest_us, slowest_seed } = *self;
        let numbers = [seed, cases, most_bytes, most_bytes_seed, slowest_us, slowest_seed];
        file.write_all_at(&numbers.map(u64::to_le_bytes).concat(), 0)
    }

    /// Reads the progress; `None` if the child has not reached its first case.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        let mut bytes = [0; Self::BYTES];
        File::open(path).and_then(|file| file.read_exact_at(&mut bytes, 0)).ok()?;
        let number = |i: usize| bytes[8 * i..].first_chunk().map(|bytes| u64::from_le_bytes(*bytes)).unwrap_or_default();
        let [seed, cases, most_bytes, most_bytes_seed, slowest_us, slowest_seed] = [0, 1, 2, 3, 4, 5].map(number);
        Some(Self { seed, cases, most_bytes, most_bytes_seed, slowest_us, slowest_seed })
    }
}

/// Runs `cases` cases with the seeds `first`, `first + step`, …, or without end if `cases` is 0.
pub(crate) fn run(target: &Target, file: &Path, first: u64, step: u64, cases: u64) -> anyhow::Result<ExitCode> {
    prctl::set_pdeathsig(Signal::SIGKILL)?;
    let file = File::options().write(true).create(true).truncate(false).open(file)?;
    let mut runner = Runner::start(target)?;
    let mut progress = Progress::default();
    for number in 0..if cases == 0 { u64::MAX } else { cases } {
        progress.seed = first.wrapping_add(number.wrapping_mul(step));
        progress.write(&file)?;
        let mut dice = Dice::new(progress.seed, false);
        let (outcome, cost) = runner.case(&mut dice, progress.seed);
        progress.cases += 1;
        if cost.bytes > progress.most_bytes {
            (progress.most_bytes, progress.most_bytes_seed) = (cost.bytes, progress.seed);
        }
        if cost.cpu_us > progress.slowest_us {
            (progress.slowest_us, progress.slowest_seed) = (cost.cpu_us, progress.seed);
        }
        if let Err(broken) = outcome {
            progress.write(&file)?;
            eprintln!("finding: --target {} --seed {}: {broken}\n{}\n", target.name, progress.seed, dice.shown());
            // Background threads need no orderly end.
            std::process::exit(FOUND.into());
        }
    }
    progress.write(&file)?;
    std::process::exit(0)
}

/// Runs one case, and reports its cost.
pub(crate) fn replay(target: &Target, seed: u64) -> anyhow::Result<ExitCode> {
    let mut runner = Runner::start(target)?;
    let (outcome, cost) = runner.case(&mut Dice::new(seed, true), seed);
    println!("{} ms of CPU, {} KiB", cost.cpu_us / 1000, cost.bytes >> 10);
    match outcome {
        Ok(()) => {
            println!("this case is well");
            std::process::exit(0)
        }
        Err(broken) => {
            println!("finding: {broken}");
            std::process::exit(FOUND.into())
        }
    }
}

struct Runner {
    subject: Box<dyn Subject>,
    bytes_max: usize,
    watched: Arc<Watched>,
}

struct Cost {
    bytes: u64,
    cpu_us: u64,
}

/// The current case, as seen by its watchdog.
#[derive(Default)]
struct Watched {
    runs: AtomicBool,
    seed: AtomicU64,
    /// The number of cases so far.
    number: AtomicU64,
    /// The CPU time at which it began.
    cpu_us: AtomicU64,
}

impl Runner {
    fn start(target: &Target) -> anyhow::Result<Self> {
        setrlimit(Resource::RLIMIT_CORE, 0, 0)?;
        let subject = (target.open)()?;
        panic::set_hook(Box::new(|panic| {
            PANIC.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert_with(|| panic.to_string());
        }));
        let watched = Arc::new(Watched::default());
        let (seen, name, cpu_max) = (Arc::clone(&watched), target.name, target.cpu_max);
        thread::Builder::new().name("watchdog".into()).spawn(move || watch(&seen, name, cpu_max))?;
        Ok(Self { subject, bytes_max: target.bytes_max, watched })
    }

    fn case(&mut self, dice: &mut Dice, seed: u64) -> (Result<(), String>, Cost) {
        let before = meter::begin(self.bytes_max);
        let began = cpu_us();
        self.watched.seed.store(seed, Relaxed);
        self.watched.cpu_us.store(began, Relaxed);
        self.watched.number.fetch_add(1, Relaxed);
        self.watched.runs.store(true, Relaxed);
        let outcome = catch_unwind(AssertUnwindSafe(|| self.subject.case(dice)));
        self.watched.runs.store(false, Relaxed);
        let cost = Cost { bytes: meter::peak().saturating_sub(before) as u64, cpu_us: cpu_us() - began };
        meter::begin(usize::MAX);
        // A panic counts on any thread, even if it was caught.
        let panicked = PANIC.lock().unwrap_or_else(PoisonError::into_inner).take();
        let outcome = match (panicked, outcome) {
            (Some(panic), Ok(Ok(()))) if CONTAINED.iter().any(|place| panic.contains(place)) => Ok(()),
            (Some(panic), _) => Err(panic),
            (None, outcome) => outcome.unwrap_or_else(|_| Err("a panic without a message".to_owned())),
        };
        (outcome, cost)
    }
}

/// Places in libraries whose panics are known and caught: the case must then end well.
const CONTAINED: &[&str] = &[
    // A slice backwards of something that ends early (`{}.items()[::-1]`), in minijinja 3.0: rendering ends with an error.
    "minijinja-3.0.5/src/value/ops.rs",
    // A malformed decoder, and a post-processor's unknown token, in tokenizers 0.23: the file is refused.
    "tokenizers-0.23.2/src/decoders/mod.rs",
    "tokenizers-0.23.2/src/processors/template.rs",
];

/// The first panic since it was last taken.
static PANIC: Mutex<Option<String>> = Mutex::new(None);

const WATCHED_EVERY: Duration = Duration::from_millis(50);

/// Ends this process if a case does not end.
fn watch(watched: &Watched, name: &str, cpu_max: Duration) {
    let mut last = (0, Instant::now());
    loop {
        thread::sleep(WATCHED_EVERY);
        let number = watched.number.load(Relaxed);
        if number != last.0 {
            last = (number, Instant::now());
        }
        if !watched.runs.load(Relaxed) {
            last.1 = Instant::now();
            continue;
        }
        let cpu = Duration::from_micros(cpu_us().saturating_sub(watched.cpu_us.load(Relaxed)));
        let (seed, wall) = (watched.seed.load(Relaxed), last.1.elapsed());
        if cpu > cpu_max || wall > cpu_max * WALL_FACTOR {
            if watched.number.load(Relaxed) != number {
                continue;
            }
            eprintln!("finding: --target {name} --seed {seed}: no end after {cpu:.1?} of CPU, {wall:.1?} in all");
            std::process::abort();
        }
    }
}

/// CPU time of this process.
fn cpu_us() -> u64 {
    let time = clock_gettime(ClockId::CLOCK_PROCESS_CPUTIME_ID).expect("the kernel has this clock");
    time.tv_sec() as u64 * 1_000_000 + time.tv_nsec() as u64 / 1000
}
