//! `tidemill-bench stub`: a server that speaks OpenAI's stream and answers after known delays. It writes down when it really sent each
//! token, so `load` can be held to the truth.

use crate::{
    load::{
        length::Length,
        percentiles::{Latencies, Percentiles},
    },
    record,
};
use anyhow::Context;
use axum::{
    Json, Router,
    body::{Body, Bytes},
    extract::State,
    response::{IntoResponse, Response},
    routing::{get, post},
    serve::ListenerExt,
};
use futures_util::stream;
use rand::{SeedableRng, rngs::StdRng};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use std::{
    collections::VecDeque,
    convert::Infallible,
    net::SocketAddr,
    path::PathBuf,
    sync::{Arc, Mutex, MutexGuard, OnceLock},
    time::Duration,
};
use tokio::{
    net::TcpListener,
    signal::unix::{SignalKind, signal},
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, sleep, sleep_until},
};

/// Serve answers after known delays: a truth to hold a client to.
///
/// Prints `ready URL`. SIGTERM or Ctrl-C ends it; then it writes what it did.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct StubArgs {
    #[arg(long, default_value = "127.0.0.1:0")]
    pub http: SocketAddr,
    /// To the first token, in milliseconds: `200`, `100-300` or `lognormal/200/0.5`.
    #[arg(long, default_value = "200")]
    pub ttft_ms: Length,
    /// From each token to the next.
    #[arg(long, default_value = "20")]
    pub gap_ms: Length,
    /// Answers at a time; other requests wait. No limit by default.
    #[arg(long)]
    pub slots: Option<u32>,
    /// So long after the first request that counts,
    #[arg(long, default_value_t = 0.0)]
    pub stall_at_s: f64,
    /// nothing is sent for so long.
    #[arg(long, default_value_t = 0.0)]
    pub stall_s: f64,
    /// Requests at the beginning that do not count: `load` probes with one.
    #[arg(long, default_value_t = 1)]
    pub skip: u64,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write what was sent when here.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// What the server did: latencies from the arrival of a request to when a token was written.
#[derive(Debug, Serialize, Deserialize)]
pub struct Truth {
    pub requests: u64,
    pub ttft_ms: Option<Percentiles>,
    pub itl_ms: Option<Percentiles>,
    pub e2e_ms: Option<Percentiles>,
    /// How late its own timers fired.
    pub delay_ms: Option<Percentiles>,
    /// Most answers at a time.
    pub running_max: u64,
}

struct Stub {
    args: StubArgs,
    state: Mutex<StubState>,
    slots: Arc<Semaphore>,
    /// When the first request that counts came.
    began: OnceLock<Instant>,
}

struct StubState {
    rng: StdRng,
    seen: u64,
    running: u64,
    running_max: u64,
    ttft: Latencies,
    itl: Latencies,
    e2e: Latencies,
}

/// One answer on its way.
struct Answer {
    stub: Arc<Stub>,
    _slot: Option<OwnedSemaphorePermit>,
    counts: bool,
    asked: Instant,
    /// When each token is due, the first one at the front.
    due: VecDeque<Instant>,
    last: Option<Instant>,
    chat: bool,
    tokens: usize,
    prompt_tokens: usize,
    over: bool,
}

/// An answer of more is cut.
const TOKENS_MAX: u64 = 100_000;

pub async fn run(args: StubArgs) -> anyhow::Result<()> {
    let listener = TcpListener::bind(args.http).await.with_context(|| format!("cannot listen on {}", args.http))?;
    let state = StubState {
        rng: StdRng::seed_from_u64(args.seed),
        seen: 0,
        running: 0,
        running_max: 0,
        ttft: Latencies::default(),
        itl: Latencies::default(),
        e2e: Latencies::default(),
    };
    let slots = Arc::new(Semaphore::new(args.slots.map_or(Semaphore::MAX_PERMITS, |slots| slots as usize)));
    let stub = Arc::new(Stub { args, slots, state: Mutex::new(state), began: OnceLock::new() });
    let models = Json(json!({"object": "list", "data": [{"id": "stub", "object": "model"}]}));
    let app = Router::new()
        .route("/v1/models", get(async || models))
        .route("/v1/completions", post(answer))
        .route("/v1/chat/completions", post(answer))
        .with_state(stub.clone());
    println!("ready http://{}/v1", listener.local_addr()?);
    // Otherwise the kernel holds small writes back for the sake of fewer packets.
    let listener = listener.tap_io(|socket| socket.set_nodelay(true).unwrap_or_default());
    let server = tokio::spawn(async move { axum::serve(listener, app).await });
    let delays = Arc::new(Mutex::new(Latencies::default()));
    let ticks = tokio::spawn(tick(delays.clone()));
    let mut terminated = signal(SignalKind::terminate())?;
    tokio::select! {
        _ = terminated.recv() => {}
        _ = tokio::signal::ctrl_c() => {}
    }
    server.abort();
    ticks.abort();
    let state = stub.state();
    let truth = Truth {
        requests: state.seen.saturating_sub(stub.args.skip),
        ttft_ms: state.ttft.percentiles(),
        itl_ms: state.itl.percentiles(),
        e2e_ms: state.e2e.percentiles(),
        delay_ms: delays.lock().expect("nobody panics with the lock").percentiles(),
        running_max: state.running_max,
    };
    record::write(stub.args.json.as_ref(), "stub", &json!({"settings": stub.args, "truth": truth}))
}

async fn tick(delays: Arc<Mutex<Latencies>>) {
    const TICK: Duration = Duration::from_millis(5);
    loop {
        let due = Instant::now() + TICK;
        sleep(TICK).await;
        delays.lock().expect("nobody panics with the lock").record(due.elapsed());
    }
}

async fn answer(State(stub): State<Arc<Stub>>, Json(ask): Json<Value>) -> Response {
    let asked = Instant::now();
    let tokens = ask["max_tokens"].as_u64().unwrap_or(16).clamp(1, TOKENS_MAX);
    let counts = {
        let mut state = stub.state();
        state.seen += 1;
        state.seen > stub.args.skip
    };
    if counts {
        stub.began.get_or_init(|| asked);
    }
    let slot = stub.slots.clone().acquire_owned().await.ok();
    let due = {
        let mut state = stub.state();
        state.running += 1;
        state.running_max = state.running_max.max(state.running);
        let mut at = Instant::now() + millis(stub.args.ttft_ms.draw(&mut state.rng));
        let mut due = VecDeque::from([at]);
        for _ in 1..tokens {
            at += millis(stub.args.gap_ms.draw(&mut state.rng));
            due.push_back(at);
        }
        due
    };
    let prompt_tokens = ask["prompt"].as_array().map_or(16, Vec::len);
    let (chat, tokens) = (ask.get("messages").is_some(), tokens as usize);
    let answer = Answer { stub, _slot: slot, counts, asked, due, last: None, chat, tokens, prompt_tokens, over: false };
    let events = stream::unfold(answer, |mut answer| async move { Some((answer.next().await?, answer)) });
    let body = Body::from_stream(futures_util::StreamExt::map(events, Ok::<_, Infallible>));
    ([("content-type", "text/event-stream")], body).into_response()
}

fn millis(ms: u32) -> Duration {
    Duration::from_millis(ms.into())
}

impl Answer {
    /// The next event, when it is due; `None` after the last one.
    async fn next(&mut self) -> Option<Bytes> {
        if self.over {
            return None;
        }
        let Some(due) = self.due.pop_front() else {
            self.over = true;
            let usage = json!({"prompt_tokens": self.prompt_tokens, "completion_tokens": self.tokens});
            return Some(Bytes::from(format!("data: {}\n\ndata: [DONE]\n\n", json!({"choices": [], "usage": usage}))));
        };
        sleep_until(self.stub.after_stall(due)).await;
        let now = Instant::now();
        if self.counts {
            let mut state = self.stub.state();
            match self.last {
                None => state.ttft.record(now - self.asked),
                Some(last) => state.itl.record(now - last),
            }
            if self.due.is_empty() {
                state.e2e.record(now - self.asked);
            }
        }
        self.last = Some(now);
        let choice = if self.chat { json!({"delta": {"content": "x "}}) } else { json!({"text": "x "}) };
        Some(Bytes::from(format!("data: {}\n\n", json!({"choices": [choice]}))))
    }
}

impl Drop for Answer {
    fn drop(&mut self) {
        self.stub.state().running -= 1;
    }
}

impl Stub {
    /// When something that is due at `at` is sent.
    fn after_stall(&self, at: Instant) -> Instant {
        let seconds = |s: f64| Duration::try_from_secs_f64(s).unwrap_or_default();
        let Some(began) = self.began.get() else { return at };
        let from = *began + seconds(self.args.stall_at_s);
        let until = from + seconds(self.args.stall_s);
        if (from..until).contains(&at) { until } else { at }
    }

    fn state(&self) -> MutexGuard<'_, StubState> {
        self.state.lock().expect("nobody panics with the lock")
    }
}
