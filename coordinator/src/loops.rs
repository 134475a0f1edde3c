//! The event loops: the front door has the process's, and links to workers and other coordinators have one of their own, which nothing that
//! clients send can hold up. How late each of them is, is measured.

use std::{io, time::Duration};
use tidemill_gateway::metrics;
use tokio::{
    runtime::{Builder, Handle, Runtime},
    time::{self, Instant},
};

/// The threads of the link loop. Messages are small, and what they mean is decided in microseconds.
const LINK_THREADS: usize = 2;
/// The time between two measurements.
const MEASURED_EVERY: Duration = Duration::from_millis(50);

/// The event loop of links. It ends when this is dropped.
#[derive(Debug)]
pub struct LinkLoop(Option<Runtime>);

impl LinkLoop {
    pub fn start() -> io::Result<Self> {
        let runtime = Builder::new_multi_thread().worker_threads(LINK_THREADS).thread_name("links").enable_all().build()?;
        runtime.spawn(measure("links"));
        Ok(Self(Some(runtime)))
    }

    pub fn handle(&self) -> &Handle {
        self.0.as_ref().expect("it runs until it is dropped").handle()
    }
}

impl Drop for LinkLoop {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            // Where this is dropped, nothing may be waited for.
            runtime.shutdown_background();
        }
    }
}

/// Measures how late tasks of the current loop run, for ever.
pub async fn measure(of: &'static str) {
    loop {
        let due = Instant::now() + MEASURED_EVERY;
        time::sleep_until(due).await;
        metrics::observe_loop_delay(of, due.elapsed());
    }
}
