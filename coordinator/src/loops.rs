//! The event loops: the gateway has the process's, and links to workers and other coordinators have one of their own, which no client
//! request can hold up. The delay of each loop is measured.

use std::{io, time::Duration};
use tidemill_gateway::metrics;
use tokio::{
    runtime::{Builder, Handle, Runtime},
    time::{self, Instant},
};

/// The number of threads of the link loop. Messages are small, and handling one takes microseconds.
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
            // The drop may happen on a runtime, where blocking is not allowed.
            runtime.shutdown_background();
        }
    }
}

/// Measures the delay of tasks in the current loop. Never returns.
pub async fn measure(of: &'static str) {
    loop {
        let due = Instant::now() + MEASURED_EVERY;
        time::sleep_until(due).await;
        metrics::observe_loop_delay(of, due.elapsed());
    }
}
