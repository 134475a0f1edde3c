//! The `tracing` output of this test program, on any thread. A process has one subscriber, so the tests share it.

use std::{
    collections::HashMap,
    fmt::Debug,
    io,
    sync::{Arc, Mutex, OnceLock},
};
use tidemill_gateway::base::json::PARSES;
use tracing::{
    Event, Level, Subscriber,
    field::{Field, Visit},
};
use tracing_subscriber::{
    Layer,
    filter::{LevelFilter, Targets},
    fmt,
    layer::{Context, SubscriberExt},
};

pub(crate) struct Listening {
    pub(crate) log: Log,
    pub(crate) parses: Parses,
}

/// Collects the output from the first call on.
pub(crate) fn listen() -> &'static Listening {
    static LISTENING: OnceLock<Listening> = OnceLock::new();
    LISTENING.get_or_init(|| {
        let (log, parses) = (Log(Arc::new(Mutex::new(Some(Vec::new())))), Parses::default());
        let writer = log.clone();
        let logged = fmt::layer().with_writer(move || writer.clone()).with_filter(LevelFilter::DEBUG);
        let counted = parses.clone().with_filter(Targets::new().with_target(PARSES, Level::TRACE));
        tracing::subscriber::set_global_default(tracing_subscriber::registry().with(logged).with(counted)).unwrap();
        Listening { log, parses }
    })
}

/// The collected log, until it is taken.
#[derive(Clone)]
pub(crate) struct Log(Arc<Mutex<Option<Vec<u8>>>>);

impl Log {
    pub(crate) fn take(&self) -> Vec<u8> {
        self.0.lock().unwrap().take().unwrap_or_default()
    }
}

impl io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if let Some(log) = &mut *self.0.lock().unwrap() {
            log.extend_from_slice(bytes);
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The number of texts of each length that were parsed.
#[derive(Clone, Default)]
pub(crate) struct Parses(Arc<Mutex<HashMap<u64, usize>>>);

impl Parses {
    pub(crate) fn of(&self, length: usize) -> usize {
        self.0.lock().unwrap().get(&(length as u64)).copied().unwrap_or_default()
    }
}

impl<S: Subscriber> Layer<S> for Parses {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut length = Length(0);
        event.record(&mut length);
        *self.0.lock().unwrap().entry(length.0).or_default() += 1;
    }
}

struct Length(u64);

impl Visit for Length {
    fn record_u64(&mut self, field: &Field, value: u64) {
        if field.name() == "bytes" {
            self.0 = value;
        }
    }

    fn record_debug(&mut self, _: &Field, _: &dyn Debug) {}
}
