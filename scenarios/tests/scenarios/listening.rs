//! The `tracing` output of this test program, on any thread. A process has one subscriber, so the tests share it.

use std::{
    collections::HashMap,
    fmt::Debug,
    io,
    ops::Range,
    sync::{Arc, Mutex, OnceLock},
};
use tidemill_gateway::{base::json::PARSES, text::template::RENDERS};
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
    /// Texts that are parsed as JSON.
    pub(crate) parses: Lengths,
    /// Prompts that are rendered.
    pub(crate) renders: Lengths,
}

/// Collects the output from the first call on.
pub(crate) fn listen() -> &'static Listening {
    static LISTENING: OnceLock<Listening> = OnceLock::new();
    LISTENING.get_or_init(|| {
        let log = Log(Arc::new(Mutex::new(Some(Vec::new()))));
        let (parses, renders) = (Lengths::default(), Lengths::default());
        let writer = log.clone();
        let logged = fmt::layer().with_writer(move || writer.clone()).with_filter(LevelFilter::DEBUG);
        let only = |target| Targets::new().with_target(target, Level::TRACE);
        let subscriber = tracing_subscriber::registry().with(logged);
        let subscriber = subscriber.with(parses.clone().with_filter(only(PARSES))).with(renders.clone().with_filter(only(RENDERS)));
        tracing::subscriber::set_global_default(subscriber).unwrap();
        Listening { log, parses, renders }
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

/// The number of texts of each length.
#[derive(Clone, Default)]
pub(crate) struct Lengths(Arc<Mutex<HashMap<u64, usize>>>);

impl Lengths {
    pub(crate) fn of(&self, length: usize) -> usize {
        self.within(length..length + 1)
    }

    pub(crate) fn within(&self, lengths: Range<usize>) -> usize {
        self.0.lock().unwrap().iter().filter(|(length, _)| lengths.contains(&(**length as usize))).map(|(_, count)| count).sum()
    }
}

impl<S: Subscriber> Layer<S> for Lengths {
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
