//! The display while a measurement runs: a bar on a terminal, a line every ten seconds elsewhere. On stderr.

use super::{
    percentiles::{Latencies, Percentiles},
    summary::{Failure, Slo},
    timeline::Answer,
};
use indicatif::{ProgressBar, ProgressStyle};
use std::{
    io::{IsTerminal, stderr},
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep},
};

pub struct Progress {
    state: Mutex<State>,
    bar: ProgressBar,
    /// The number of requests if every turn is sent.
    all: u64,
}

struct State {
    started: Instant,
    sent: u64,
    good: u64,
    failed: u64,
    answered: u64,
    output_tokens: u64,
    ttft: Latencies,
    tpot: Latencies,
}

/// Reports the progress while it lives.
pub struct Telling {
    progress: Arc<Progress>,
    task: JoinHandle<()>,
}

const BAR_EVERY: Duration = Duration::from_millis(500);
const LINE_EVERY: Duration = Duration::from_secs(10);

impl Progress {
    pub fn new(requests: u64) -> Progress {
        let style = ProgressStyle::with_template("{elapsed} [{wide_bar}] {pos}/{len} {msg}").expect("the template is well-formed");
        let state = State {
            started: Instant::now(),
            sent: 0,
            good: 0,
            failed: 0,
            answered: 0,
            output_tokens: 0,
            ttft: Latencies::default(),
            tpot: Latencies::default(),
        };
        Progress { state: Mutex::new(state), bar: ProgressBar::new(requests).with_style(style), all: requests }
    }

    pub fn sent(&self) {
        self.state().sent += 1;
    }

    pub fn done(&self, outcome: &Result<Answer, Failure>, slo: Slo) {
        let mut state = self.state();
        match outcome {
            Ok(answer) => {
                state.answered += 1;
                state.good += u64::from(slo.is_met(answer));
                state.output_tokens += answer.output_tokens;
                state.ttft.record(answer.ttft);
                answer.tpot().into_iter().for_each(|tpot| state.tpot.record(tpot));
            }
            Err(_) => state.failed += 1,
        }
        drop(state);
        self.bar.inc(1);
    }

    pub fn tell(self: &Arc<Self>) -> Telling {
        let (progress, terminal) = (self.clone(), stderr().is_terminal());
        let task = tokio::spawn(async move {
            loop {
                sleep(if terminal { BAR_EVERY } else { LINE_EVERY }).await;
                let line = progress.line();
                if terminal { progress.bar.set_message(line) } else { eprintln!("{line}") }
            }
        });
        Telling { progress: self.clone(), task }
    }

    fn line(&self) -> String {
        let state = self.state();
        let seconds = state.started.elapsed().as_secs_f64().max(1e-9);
        let done = state.answered + state.failed;
        let pair = |latencies: &Latencies| {
            let of = |Percentiles { p50, p99, .. }| format!("{p50:.0}/{p99:.0}");
            latencies.percentiles().map_or("–".into(), of)
        };
        format!(
            "{done}/{} done, {} running, {:.2} requests/s, {:.0} tokens/s, TTFT p50/p99 {} ms, TPOT {} ms, {:.0} % good, {} failed",
            self.all,
            state.sent - done,
            done as f64 / seconds,
            state.output_tokens as f64 / seconds,
            pair(&state.ttft),
            pair(&state.tpot),
            100.0 * state.good as f64 / done.max(1) as f64,
            state.failed
        )
    }

    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().expect("nobody panics with the lock")
    }
}

impl Drop for Telling {
    fn drop(&mut self) {
        self.task.abort();
        self.progress.bar.finish_and_clear();
    }
}
