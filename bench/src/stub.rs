//! `tidemill-bench stub`: a server that speaks OpenAI's stream and answers after known delays. It records the true time of each sent token,
//! with which `load` can be compared.

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

/// Serve answers after known delays: a reference for the accuracy of a client.
///
/// Prints `ready URL`. SIGTERM or Ctrl-C ends it; then it writes the true latencies.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct StubArgs {
    #[arg(long, default_value = "127.0.0.1:0")]
    pub http: SocketAddr,
    /// Time to the first token, in milliseconds: `200`, `100-300` or `lognormal/200/0.5`.
    #[arg(long, default_value = "200")]
    pub ttft_ms: Length,
    /// Time from each token to the next.
    #[arg(long, default_value = "20")]
    pub gap_ms: Length,
    /// Answers at a time; further requests wait. No limit by default.
    #[arg(long)]
    pub slots: Option<u32>,
    /// Seconds after the first counted request at which a stall begins.
    #[arg(long, default_value_t = 0.0)]
    pub stall_at_s: f64,
    /// Seconds of the stall, in which nothing is sent.
    #[arg(long, default_value_t = 0.0)]
    pub stall_s: f64,
    /// Requests at the beginning that do not count: `load` probes with one.
    #[arg(long, default_value_t = 1)]
    pub skip: u64,
    #[arg(long, default_value_t = 1)]
    pub seed: u64,
    /// Write the true latencies to this file.
    #[arg(long)]
    pub json: Option<PathBuf>,
}

/// The true latencies of the server, from the arrival of a request to the writing of a token.
#[derive(Debug, Serialize, Deserialize)]
pub struct Truth {
    pub requests: u64,
    pub ttft_ms: Option<Percentiles>,
    pub itl_ms: Option<Percentiles>,
    pub e2e_ms: Option<Percentiles>,
    /// The delay of its own timers.
    pub delay_ms: Option<Percentiles>,
    /// The most concurrent answers.
    pub running_max: u64,
}

struct Stub {
    args: StubArgs,
    state: Mutex<StubState>,
    slots: Arc<Semaphore>,
    /// The time of the first request that counts.
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

/// One answer in progress.
struct Answer {
    stub: Arc<Stub>,
    _slot: Option<OwnedSemaphorePermit>,
    counts: bool,
    asked: Instant,
    /// The times at which tokens are due, the first one at the front.
    due: VecDeque<Instant>,
    last: Option<Instant>,
    chat: bool,
    tokens: usize,
    prompt_tokens: usize,
    over: bool,
}

/// The most tokens of an answer.
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
    // Otherwise the kernel delays small writes to save packets.
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
    /// The next event, once it is due; `None` after the last one.
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
    /// The time at which an event that is due at `at` is sent.
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
