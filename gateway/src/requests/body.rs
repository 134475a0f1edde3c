//! Request bodies as they arrive: read within a time limit, and counted from their heads on against their senders' shares in flight.

use crate::{
    base::{
        json,
        line::LARGE_BYTES,
        shares::{Party, Pool, Refused, Share, Shares},
    },
    metrics,
    requests::{computing::refusal, error::ApiError},
};
use axum::body::{Body, Bytes, HttpBody};
use futures_util::StreamExt;
use std::{ops::Deref, time::Duration};
use tokio::time;

/// The step in which a body of unknown length takes its share.
const STEP_BYTES: u64 = 64 << 10;
/// The weight of each JSON value in a body, in bytes: parsed, the shortest takes hundreds of bytes, while texts take their length.
const VALUE_WEIGHT: usize = 8;

/// The shares of request bodies in flight.
#[derive(Debug)]
pub struct Bodies {
    /// The maximum size of one body.
    bytes_max: usize,
    /// The time within which one must have arrived.
    read_max: Duration,
    pool: Pool,
}

/// A complete body. Its bytes count until it is dropped.
#[derive(Debug)]
pub struct Whole {
    bytes: Bytes,
    /// The number of JSON values in it, once they are counted.
    values: usize,
    _share: Share,
}

impl Deref for Whole {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl Whole {
    /// Counts the body's JSON values. Fails if they are more than [`json::VALUES_MAX`].
    pub fn counted(mut self) -> Result<Self, ApiError> {
        self.values = json::values(&self.bytes);
        if self.values > json::VALUES_MAX { Err(ApiError::too_many_values(json::VALUES_MAX)) } else { Ok(self) }
    }

    /// Returns the size of work on the body, in bytes: its approximate memory once it is parsed, up to a factor.
    pub fn weight(&self) -> usize {
        self.bytes.len() + VALUE_WEIGHT * self.values
    }

    /// Shares the bytes, which count as long as the body itself is kept.
    pub fn bytes(&self) -> Bytes {
        self.bytes.clone()
    }

    /// Returns the bytes, which no longer count.
    pub fn into_bytes(self) -> Bytes {
        self.bytes
    }
}

/// A body and its parsed form, between two stages of work on it.
#[derive(Debug)]
pub struct Kept<T> {
    body: Whole,
    parsed: Option<T>,
}

impl<T> Kept<T> {
    /// Keeps both, unless the request waits for the store in between and the body is large: then it will be parsed again, because the total
    /// memory of waiting requests is not bounded as that of running work is.
    pub fn new(body: Whole, parsed: T, waits: bool) -> Self {
        let parsed = (!waits || body.weight() <= LARGE_BYTES).then_some(parsed);
        Self { body, parsed }
    }

    /// Returns the size of work on it, in bytes.
    pub fn weight(&self) -> usize {
        self.body.weight()
    }

    /// Works on the parsed body, whose bytes count until that is done.
    pub fn with<R>(
        self,
        parse: impl FnOnce(&[u8]) -> Result<T, ApiError>,
        work: impl FnOnce(T) -> Result<R, ApiError>,
    ) -> Result<R, ApiError> {
        let Self { body, parsed } = self;
        work(match parsed {
            Some(parsed) => parsed,
            None => parse(&body)?,
        })
    }
}

impl Bodies {
    /// Allows `bytes_max` and `read_max` for one body, and `in_flight_max` for all of them together.
    pub fn new(bytes_max: usize, in_flight_max: u64, read_max: Duration) -> Self {
        let least = bytes_max as u64;
        Self { bytes_max, read_max, pool: Pool::new(Shares::quarters(in_flight_max.max(least), least)) }
    }

    /// Reads a body, after taking its declared length from the sender's share.
    pub async fn read(&self, party: Party, body: Body) -> Result<Whole, ApiError> {
        let size = body.size_hint();
        if size.lower() > self.bytes_max as u64 {
            return Err(ApiError::too_large(self.bytes_max));
        }
        let share = self.pool.take(party, size.lower()).map_err(refused)?;
        metrics::show_body_bytes(self.pool.used());
        let read = time::timeout(self.read_max, self.collect(body, share)).await;
        read.unwrap_or_else(|_| Err(ApiError::too_slow(self.read_max)))
    }

    async fn collect(&self, body: Body, mut share: Share) -> Result<Whole, ApiError> {
        let mut frames = body.into_data_stream();
        let (mut first, mut rest) = (Bytes::new(), Vec::new());
        while let Some(frame) = frames.next().await {
            let frame = frame.map_err(|error| ApiError::malformed(format!("the request body broke off: {error}")))?;
            let bytes = first.len() + rest.len() + frame.len();
            if bytes > self.bytes_max {
                return Err(ApiError::too_large(self.bytes_max));
            }
            if bytes as u64 > share.amount() {
                let step = (bytes as u64).next_multiple_of(STEP_BYTES).min(self.bytes_max as u64);
                share.grow_to(step).map_err(refused)?;
                metrics::show_body_bytes(self.pool.used());
            }
            if first.is_empty() {
                first = frame;
            } else {
                rest.extend_from_slice(&frame);
            }
        }
        // Most bodies arrive in one frame, which is not copied.
        let bytes = if rest.is_empty() { first } else { [&first[..], &rest].concat().into() };
        Ok(Whole { bytes, values: 0, _share: share })
    }
}

fn refused(refused: Refused) -> ApiError {
    refusal("bodies", refused)
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures_util::stream;
    use std::convert::Infallible;

    const READ_MAX: Duration = Duration::from_secs(60);

    fn party(name: &str) -> Party {
        Party::Tenant { name: name.into(), shed: 0 }
    }

    fn chunked(chunks: &[&'static str]) -> Body {
        let chunks: Vec<_> = chunks.iter().map(|chunk| Ok::<_, Infallible>(*chunk)).collect();
        Body::from_stream(stream::iter(chunks))
    }

    #[tokio::test]
    async fn a_body_is_read_whole_whether_its_length_is_known_or_not() {
        let bodies = Bodies::new(10, 1000, READ_MAX);
        assert_eq!(&bodies.read(party("a"), Body::from("0123456789")).await.unwrap()[..], b"0123456789");
        assert_eq!(&bodies.read(party("a"), chunked(&["0123", "", "456789"])).await.unwrap()[..], b"0123456789");
        assert!(bodies.read(party("a"), Body::empty()).await.unwrap().is_empty());
        for long in [Body::from("0123456789a"), chunked(&["0123456789", "a"])] {
            assert_eq!(bodies.read(party("a"), long).await.unwrap_err().status(), 413);
        }
        assert_eq!(bodies.pool.used(), 0);
    }

    #[tokio::test]
    async fn a_large_body_that_waits_is_parsed_again() {
        let bodies = Bodies::new(1 << 20, 4 << 20, READ_MAX);
        let kept = async |body: String, waits| {
            let whole = bodies.read(party("a"), Body::from(body)).await.unwrap().counted().unwrap();
            Kept::new(whole, "kept", waits).with(|_| Ok("again"), Ok).unwrap()
        };
        assert_eq!(kept("[1, 2]".into(), true).await, "kept");
        let large = format!("\"{}\"", "a".repeat(LARGE_BYTES));
        assert_eq!(kept(large.clone(), true).await, "again");
        assert_eq!(kept(large, false).await, "kept");
        assert_eq!(kept(format!("[{}1]", "1,".repeat(LARGE_BYTES / 4)), true).await, "again", "few bytes, many values");
    }

    #[tokio::test]
    async fn bytes_count_from_the_head_until_the_body_is_dropped() {
        let bodies = Bodies::new(100, 400, READ_MAX);
        let whole = bodies.read(party("flood"), Body::from(vec![b' '; 60])).await.unwrap();
        let refused = bodies.read(party("flood"), Body::from(vec![b' '; 60])).await.unwrap_err();
        assert_eq!(refused.status(), 429, "a quarter is the most");
        assert_eq!(
            bodies.read(party("flood"), chunked(&["x"])).await.unwrap_err().status(),
            429,
            "its first step is all that one may have"
        );
        assert!(bodies.read(party("quiet"), Body::from(vec![b' '; 60])).await.is_ok());
        drop(whole);
        assert!(bodies.read(party("flood"), chunked(&["x"])).await.is_ok());
    }
}
