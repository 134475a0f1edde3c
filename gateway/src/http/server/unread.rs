//! HTTP/2 streams whose clients have stopped reading. Their connection may still move data while one of its streams gets no room to send,
//! so the kernel, which sees connections, does not notice; and as the stream's body is not polled, neither does the body.

use hyper::rt::Executor;
use std::{cell::Cell, time::Duration};
use tokio::{
    task_local,
    time::{Instant, sleep_until},
};

task_local! {
    /// The time at which a part of this stream's answer was ready, until the next part is requested.
    static READY_SINCE: Cell<Option<Instant>>;
}

/// Notes that the next part of the answer is requested.
pub(super) fn asked() {
    // HTTP/1.1 has no task of this kind, and needs none.
    let _ = READY_SINCE.try_with(|since| since.set(None));
}

/// Notes that a part was delivered.
pub(super) fn given() {
    let _ = READY_SINCE.try_with(|since| since.set(Some(Instant::now())));
}

/// Runs streams, each until its client has read nothing for some time.
#[derive(Clone, Copy, Debug)]
pub(super) struct Streams {
    pub(super) unread_max: Duration,
}

impl<F: Future<Output = ()> + Send + 'static> Executor<F> for Streams {
    fn execute(&self, stream: F) {
        let Self { unread_max } = *self;
        tokio::spawn(READY_SINCE.scope(Cell::new(None), async move {
            tokio::select! {
                () = stream => {}
                () = unread(unread_max) => tracing::debug!("stream reset: its client read nothing for {unread_max:?}"),
            }
        }));
    }
}

async fn unread(max: Duration) {
    loop {
        let since = READY_SINCE.with(Cell::get).unwrap_or_else(Instant::now);
        sleep_until(since + max).await;
        if READY_SINCE.with(Cell::get).is_some_and(|since| since.elapsed() >= max) {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{future, sync::Arc};
    use tokio::{sync::Notify, time};

    #[tokio::test]
    async fn a_stream_that_is_not_read_ends_and_one_that_waits_for_its_answer_does_not() {
        let streams = Streams { unread_max: Duration::from_millis(50) };
        let [unread, waiting] = [true, false].map(|is_given| {
            let ended = Arc::new(Notify::new());
            let guard = Dropped(Arc::clone(&ended));
            streams.execute(async move {
                let _guard = guard;
                asked();
                if is_given {
                    given();
                }
                future::pending().await
            });
            ended
        });
        time::timeout(Duration::from_secs(30), unread.notified()).await.expect("it ends");
        assert!(time::timeout(Duration::from_millis(300), waiting.notified()).await.is_err());
    }

    struct Dropped(Arc<Notify>);

    impl Drop for Dropped {
        fn drop(&mut self) {
            self.0.notify_one();
        }
    }
}
