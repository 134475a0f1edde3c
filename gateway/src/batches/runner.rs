//! A batch from its file to its end. Each request takes the path of a client's request, through the same routes: quota, safety checks,
//! cluster and usage log see no difference except its class and its sender's patience.

use super::{
    BatchError, Batches,
    begun::{Begun, DEATHS_MAX},
    disk::blocking,
    gone,
    journal::Journal,
    reserve::CHECK_EVERY_BYTES,
};
use crate::{
    base::stamp::{new_id, unix_seconds},
    batch::{
        input::{self, Check, Line, Problem},
        life::{Batch, Counts, Ending, Sender},
        pace::{Attempt, Pace, Step, Task},
        record,
    },
    metrics,
    requests::error::ApiError,
    tenants::Tenants,
};
use axum::{
    Router,
    body::{Body, to_bytes},
    http::{HeaderMap, Request, StatusCode, header},
};
use futures_util::FutureExt;
use hyper::service::Service;
use hyper_util::service::TowerToHyperService;
use serde_json::Value;
use std::{
    fs::File,
    io::{self, BufRead, BufReader},
    os::unix::fs::FileExt,
    panic::AssertUnwindSafe,
    sync::Arc,
    time::{Duration, Instant},
};
use tokio::{sync::Notify, task::JoinSet, time};

/// The pause after a disk failure.
const DISK_RETRY: Duration = Duration::from_secs(10);
/// The longest time between two checks of the clock.
const LOOK_EVERY: Duration = Duration::from_secs(30);
/// The maximum size of an answer, larger than any real one.
const ANSWER_BYTES_MAX: usize = 256 << 20;
/// Extra time before a request is given up: one that waits in the cluster's queue ends by itself.
const OVERDUE: Duration = Duration::from_secs(60);

/// The state that all batches share.
#[derive(Clone)]
struct Ways {
    tenants: Arc<Tenants>,
    /// The longest time of one request in the cluster.
    timeout: Duration,
    routes: TowerToHyperService<Router>,
}

impl Batches {
    /// Runs all batches, starting with those that an earlier process left. Never returns.
    pub async fn run(self: Arc<Self>, routes: TowerToHyperService<Router>, tenants: Arc<Tenants>, timeout: Duration) {
        let ways = Ways { tenants, timeout, routes };
        let mut running = JoinSet::new();
        loop {
            for id in self.take() {
                running.spawn(Runner { batches: Arc::clone(&self), ways: ways.clone(), id }.run());
            }
            metrics::show_batches(running.len());
            tokio::select! {
                () = self.come.notified() => {}
                // A panic was logged; the batch waits for the next start.
                Some(_) = running.join_next() => {}
            }
        }
    }
}

/// Runs one batch.
struct Runner {
    batches: Arc<Batches>,
    ways: Ways,
    id: String,
}

/// The end of a request.
enum Ran {
    Attempted {
        attempt: Attempt,
        request_id: String,
        body: Value,
    },
    /// The start of the request could not be recorded, so it did not run.
    NotBegun(io::Error),
    /// Its sender lost access.
    Gone(String),
    /// The batch ends.
    Dropped,
}

impl Runner {
    async fn run(self) {
        let runner = Arc::new(self);
        while let Err(error) = Self::attempt(&runner).await {
            if let BatchError::NotFound(_) = error {
                // Lines that it wrote meanwhile go with it.
                if let Err(error) = runner.batches.disk.remove_batch(&runner.id).await {
                    tracing::warn!(batch = runner.id, %error, "could not remove the rest of a batch; the next start does");
                }
                return;
            }
            tracing::error!(batch = runner.id, %error, "could not continue a batch; trying again in {DISK_RETRY:?}");
            time::sleep(DISK_RETRY).await;
        }
    }

    /// Runs the batch from its state on disk to its end.
    async fn attempt(self: &Arc<Self>) -> Result<(), BatchError> {
        let mut batch = self.batches.save(&self.id).await?;
        if batch.ending.is_none() {
            let path = self.batches.disk.content(&batch.input_file);
            let (limits, endpoint) = (self.batches.limits, batch.endpoint.clone());
            let checked = blocking(move || match File::open(path) {
                Ok(file) => Ok(check(&file, &endpoint, limits.lines, limits.line_bytes)?.map(|lines| (lines, file))),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    Ok(Err(vec![Problem::new("file_not_found", "The input file is gone.")]))
                }
                Err(error) => Err(error),
            });
            let (lines, file) = match checked.await? {
                Ok(good) => good,
                Err(problems) => {
                    self.batches.change(&self.id, |batch| batch.refuse(unix_seconds(), problems)).await?;
                    self.batches.disk.remove_journals(&self.id).await?;
                    return Ok(());
                }
            };
            let mut journal = Journal::open(&self.batches.disk, &self.id).await?;
            self.batches.note_answers(&self.id, journal.bytes());
            let (completed, failed) = journal.lines();
            let counts = Counts { total: lines.len() as u64, completed, failed };
            batch = self.batches.change(&self.id, |batch| batch.accept(unix_seconds(), counts)).await?;
            let ending = self.answer_all(&batch, &mut journal, lines, file).await?;
            let (completed, failed) = journal.lines();
            let name = |lines| (lines > 0).then(|| new_id("file-"));
            batch = self.batches.change(&self.id, |batch| batch.finalize(unix_seconds(), ending, name(completed), name(failed))).await?;
        }
        for (good, id, what) in [(true, &batch.output_file, "output"), (false, &batch.error_file, "error")] {
            if let Some(id) = id {
                let journal = self.batches.disk.journal(&self.id, good);
                self.batches.publish(&batch, &journal, id, format!("{}_{what}.jsonl", self.id)).await?;
            }
        }
        let batch = self.batches.change(&self.id, |batch| batch.close(unix_seconds())).await?;
        let Counts { total, completed, failed } = batch.counts;
        tracing::info!(batch = self.id, status = ?batch.status, total, completed, failed, "a batch has ended");
        Ok(self.batches.disk.remove_journals(&self.id).await?)
    }

    /// Runs until all requests are answered, or no more will be.
    async fn answer_all(
        self: &Arc<Self>,
        batch: &Batch,
        journal: &mut Journal,
        lines: Vec<Line>,
        file: File,
    ) -> Result<Ending, BatchError> {
        let file = Arc::new(file);
        let began = Instant::now();
        let begun = Arc::new(Begun::open(&self.batches.disk, &self.id, &self.batches.process).await?);
        for line in lines.iter().filter(|line| begun.deaths(line.number) >= DEATHS_MAX && !journal.has(&line.custom_id)).collect::<Vec<_>>()
        {
            let message = "This request is not run again: this server has died twice while it ran.";
            self.unanswered(journal, line, "server_died", message).await?;
            metrics::count_batch_request("failed");
            tracing::error!(
                batch = self.id,
                line = line.number,
                "a batch's request ran when a coordinator died, twice; it is not run again"
            );
        }
        let mut pace = Pace::new(self.batches.limits.at_once, lines.iter().filter(|line| !journal.has(&line.custom_id)).cloned());
        let mut running = JoinSet::new();
        let cancelled = self.cancelled()?;
        // The size of the answers when their tenant's room was looked at.
        let mut checked = None;
        let ending = loop {
            if let Some(ending) = self.now()?.ends(unix_seconds()) {
                break ending;
            }
            let rest = match pace.next(began.elapsed()) {
                Step::Run(task) => {
                    let is_due = checked.is_none_or(|bytes| journal.bytes() >= bytes + CHECK_EVERY_BYTES);
                    checked = if is_due { Some(journal.bytes()) } else { checked };
                    if is_due && let Err(full) = self.batches.check_answers(&batch.sender.owner()).await {
                        pace.dropped(task);
                        let problem = Problem::new("no_room_for_files", format!("The rest of this batch was not run: {full}."));
                        self.batches.change(&self.id, |batch| batch.stop(unix_seconds(), problem)).await?;
                        continue;
                    }
                    let (runner, sender, endpoint) = (Arc::clone(self), batch.sender.clone(), batch.endpoint.clone());
                    running.spawn(runner.one(Arc::clone(&file), Arc::clone(&begun), task, sender, endpoint));
                    continue;
                }
                Step::Rest(until) => until.saturating_sub(began.elapsed()),
                Step::Wait => LOOK_EVERY,
            };
            tokio::select! {
                Some(ended) = running.join_next() => self.ended(ended, &mut pace, journal, &begun, began).await?,
                () = time::sleep(rest.min(LOOK_EVERY)) => {}
                () = cancelled.notified() => {}
            }
        };
        match ending {
            Ending::Completed => {}
            // Running requests have been paid for.
            Ending::Cancelled => {
                while let Some(ended) = running.join_next().await {
                    self.ended(ended, &mut pace, journal, &begun, began).await?;
                }
            }
            Ending::Expired => {
                running.shutdown().await;
                let message = "This request could not be executed before the completion window expired.";
                for line in lines.iter().filter(|line| !journal.has(&line.custom_id)).collect::<Vec<_>>() {
                    self.unanswered(journal, line, "batch_expired", message).await?;
                }
            }
        }
        Ok(ending)
    }

    /// Records a line without an answer among the errors.
    async fn unanswered(&self, journal: &mut Journal, line: &Line, code: &str, message: &str) -> io::Result<()> {
        let record = record::unanswered(&record::request_id(&self.id, line.number), &line.custom_id, code, message);
        journal.append(false, &line.custom_id, &record).await?;
        self.batches.note_answers(&self.id, journal.bytes());
        self.batches.count(&self.id, false);
        Ok(())
    }

    async fn ended(
        &self,
        ended: Result<(Task, Ran), tokio::task::JoinError>,
        pace: &mut Pace,
        journal: &mut Journal,
        begun: &Begun,
        began: Instant,
    ) -> Result<(), BatchError> {
        let (task, ran) = ended.map_err(io::Error::other)?;
        match ran {
            Ran::Attempted { attempt, request_id, body } => {
                let line = task.line.clone();
                if !pace.ended(began.elapsed(), task, attempt) {
                    metrics::count_batch_request("later");
                    return Ok(begun.ended(line.number).await?);
                }
                let good = attempt.status == StatusCode::OK.as_u16();
                metrics::count_batch_request(if good { "completed" } else { "failed" });
                let id = record::request_id(&self.id, line.number);
                journal.append(good, &line.custom_id, &record::answer(&id, &line.custom_id, attempt.status, &request_id, &body)).await?;
                self.batches.note_answers(&self.id, journal.bytes());
                self.batches.count(&self.id, good);
            }
            Ran::Gone(reason) => {
                pace.dropped(task);
                self.batches.change(&self.id, |batch| batch.stop(unix_seconds(), gone(reason))).await?;
            }
            Ran::NotBegun(error) => return Err(error.into()),
            Ran::Dropped => pace.dropped(task),
        }
        Ok(())
    }

    /// Runs one request, as soon as there is room for it.
    async fn one(self: Arc<Self>, file: Arc<File>, begun: Arc<Begun>, task: Task, sender: Sender, endpoint: String) -> (Task, Ran) {
        let _alone = match begun.deaths(task.line.number) {
            0 => None,
            _ => Some(self.batches.alone.lock().await),
        };
        let party = match self.ways.tenants.caller_of_batch(&sender) {
            Ok(caller) => caller.party(),
            Err(_) if self.is_ending() => return (task, Ran::Dropped),
            Err(reason) => return (task, Ran::Gone(reason)),
        };
        let _place = self.batches.places.wait_for(party).await;
        if self.is_ending() {
            return (task, Ran::Dropped);
        }
        let line = task.line.clone();
        if let Err(error) = begun.began(line.number).await {
            return (task, Ran::NotBegun(error));
        }
        let asked = AssertUnwindSafe(self.ask(file, line, &sender, &endpoint)).catch_unwind().await;
        let ran = asked.unwrap_or_else(|_| failed(&ApiError::internal("this request has failed: please report this as a bug")));
        (task, ran)
    }

    async fn ask(&self, file: Arc<File>, line: Line, sender: &Sender, endpoint: &str) -> Ran {
        let caller = match self.ways.tenants.caller_of_batch(sender) {
            Ok(caller) => Arc::new(caller),
            Err(reason) => return Ran::Gone(reason),
        };
        let mut bytes = vec![0; line.bytes];
        let read = blocking(move || file.read_exact_at(&mut bytes, line.offset).map(|()| bytes)).await;
        let request = match read.map(|bytes| input::parse(endpoint, &bytes)) {
            Ok(Ok(request)) => request,
            Ok(Err(problem)) => return failed(&ApiError::invalid("input_file_id", format!("the file has changed: {}", problem.message))),
            Err(error) => return failed(&ApiError::internal(format!("the input file cannot be read: {error}"))),
        };
        if request.body.get("stream").is_some_and(|stream| *stream == Value::Bool(true)) {
            return failed(&ApiError::invalid("stream", "`stream` must be false: nobody reads while a batch runs"));
        }
        let request_id = caller.id.clone();
        let body = Body::from(serde_json::to_vec(&request.body).expect("it was read as JSON"));
        let request = Request::post(endpoint).header(header::CONTENT_TYPE, "application/json").extension(caller).body(body);
        let answered = async {
            let response = match self.ways.routes.call(request.expect("the endpoint is one of ours")).await {
                Ok(response) => response,
                Err(never) => match never {},
            };
            let (parts, body) = response.into_parts();
            let body = to_bytes(body, ANSWER_BYTES_MAX).await.ok().and_then(|body| serde_json::from_slice(&body).ok());
            let body = body.ok_or_else(|| ApiError::internal("the answer broke off"))?;
            Ok((Attempt { status: parts.status.as_u16(), retry_after: retry_after(&parts.headers) }, body))
        };
        match time::timeout(self.ways.timeout + OVERDUE, answered).await {
            Ok(Ok((attempt, body))) => Ran::Attempted { attempt, request_id, body },
            Ok(Err(error)) => failed(&error),
            Err(_) => failed(&ApiError::internal("there was no answer in time")),
        }
    }

    fn is_ending(&self) -> bool {
        self.now().map_or(true, |batch| batch.ends(unix_seconds()).is_some())
    }

    fn now(&self) -> Result<Batch, BatchError> {
        let index = self.batches.index.lock();
        index.batches.get(&self.id).map(|entry| entry.batch.clone()).ok_or_else(|| BatchError::NotFound(self.id.clone()))
    }

    fn cancelled(&self) -> Result<Arc<Notify>, BatchError> {
        let index = self.batches.index.lock();
        index.batches.get(&self.id).map(|entry| Arc::clone(&entry.cancelled)).ok_or_else(|| BatchError::NotFound(self.id.clone()))
    }
}

/// The outcome of a request that never reached its routes.
fn failed(error: &ApiError) -> Ran {
    let attempt = Attempt { status: error.status().as_u16(), retry_after: None };
    Ran::Attempted { attempt, request_id: String::new(), body: error.body() }
}

fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let number = |name: &str| headers.get(name).and_then(|value| value.to_str().ok()).and_then(|value| value.parse().ok());
    number("retry-after-ms").map(Duration::from_millis).or_else(|| number("retry-after").map(Duration::from_secs))
}

/// Reads all lines, or their problems.
fn check(file: &File, endpoint: &str, lines_max: usize, line_bytes_max: usize) -> io::Result<Result<Vec<Line>, Vec<Problem>>> {
    let mut check = Check::new(endpoint, lines_max);
    let (mut reader, mut line) = (BufReader::with_capacity(64 << 10, file), Vec::new());
    while !check.is_hopeless() {
        let bytes = read_line(&mut reader, line_bytes_max, &mut line)?;
        if bytes == 0 {
            break;
        }
        check.line((bytes <= line_bytes_max).then_some(&line), bytes);
    }
    Ok(check.finish())
}

/// Reads up to the end of a line, and keeps at most `bytes_max` of it. Returns the line's length; 0 at the end of the file.
fn read_line(reader: &mut impl BufRead, bytes_max: usize, line: &mut Vec<u8>) -> io::Result<usize> {
    line.clear();
    let mut bytes = 0;
    loop {
        let chunk = reader.fill_buf()?;
        let end = chunk.iter().position(|&byte| byte == b'\n').map(|at| at + 1);
        let taken = end.unwrap_or(chunk.len());
        line.extend_from_slice(&chunk[..taken.min(bytes_max.saturating_sub(line.len()))]);
        bytes += taken;
        reader.consume(taken);
        if end.is_some() || taken == 0 {
            return Ok(bytes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_measured_and_not_kept() {
        let text = format!("ab\n{}\n\nend", "x".repeat(100));
        let mut reader = BufReader::with_capacity(7, text.as_bytes());
        let mut line = Vec::new();
        let mut read = || read_line(&mut reader, 10, &mut line).map(|bytes| (bytes, String::from_utf8(line.clone()).unwrap())).unwrap();
        assert_eq!(read(), (3, "ab\n".into()));
        assert_eq!(read(), (101, "x".repeat(10)));
        assert_eq!(read(), (1, "\n".into()));
        assert_eq!(read(), (3, "end".into()));
        assert_eq!(read(), (0, String::new()));
    }

    #[test]
    fn headers_say_when_to_come_again() {
        let of = |pairs: &[(&'static str, &'static str)]| {
            retry_after(&pairs.iter().map(|(name, value)| (header::HeaderName::from_static(name), value.parse().unwrap())).collect())
        };
        assert_eq!(of(&[("retry-after", "2"), ("retry-after-ms", "1500")]), Some(Duration::from_millis(1500)));
        assert_eq!(of(&[("retry-after", "2")]), Some(Duration::from_secs(2)));
        assert_eq!(of(&[("retry-after", "soon")]), None);
        assert_eq!(of(&[]), None);
    }
}
