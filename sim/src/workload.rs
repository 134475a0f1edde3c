//! Clients: the time of each request, its parameters, and the prompt's tokens.
//!
//! Prompts of a trace have one id per 512 tokens, and equal ids stand for equal prefixes; their tokens are a hash of id and place. The
//! tokens that a model draws are likewise a hash of request and number, so they need not be stored.

use crate::{
    random::{Random, mix},
    settings::{Arrivals, InvalidSetting, Stream, WorkloadSettings},
};
use std::time::Duration;
use tidemill_proto::{block::Token, tokens::Tokens};

/// The number of tokens that one id stands for.
pub const ID_TOKENS: u32 = 512;

/// One line of a trace.
#[derive(Clone, PartialEq, Debug)]
pub struct TraceRequest {
    pub at: Duration,
    pub input_tokens: u32,
    pub output_tokens: u32,
    /// The ids of the prompt, one per 512 tokens; the last may stand for fewer.
    pub ids: Vec<u64>,
}

/// One request of a run.
#[derive(Clone, PartialEq, Debug)]
pub struct Ask {
    pub at: Duration,
    pub input_tokens: u32,
    pub output_tokens: u32,
    pub ids: Vec<u64>,
    /// The place in the settings' list of classes; 0 if there are none.
    pub class: usize,
}

impl Ask {
    pub fn prompt(&self, vocab: u32) -> Tokens {
        let of_id = |&id: &u64| (0..ID_TOKENS).map(move |place| token(id, place, vocab));
        self.ids.iter().flat_map(of_id).take(self.input_tokens as usize).collect()
    }
}

/// Token `place` of the tokens that belong to `id`.
pub fn token(id: u64, place: u32, vocab: u32) -> Token {
    (mix(mix(id).wrapping_add(u64::from(place))) % u64::from(vocab)) as Token
}

/// The requests of a run, by time. `trace` is the one that the settings name, if any.
pub fn draw(settings: &WorkloadSettings, trace: Option<&[TraceRequest]>, seed: u64) -> Result<Vec<Ask>, InvalidSetting> {
    let mut random = Random::new(seed);
    let mut asks = match (trace, settings.streams.is_empty()) {
        (Some(trace), true) => of_trace(settings, trace, &mut random)?,
        (None, false) => of_streams(settings, &mut random)?,
        (Some(_), false) => return Err(InvalidSetting::new("workload", "a trace or streams of requests, not both")),
        (None, true) => return Err(InvalidSetting::new("workload", "name a `trace`, or list `streams`")),
    };
    asks.sort_by_key(|ask| ask.at);
    let shares: f64 = settings.classes.iter().map(|class| class.share).sum();
    if settings.streams.is_empty() && shares > 0.0 {
        for ask in &mut asks {
            let mut at = random.unit() * shares;
            ask.class = settings.classes.iter().position(|class| (at < class.share, at -= class.share).0).unwrap_or(0);
        }
    }
    Ok(asks)
}

fn of_trace(settings: &WorkloadSettings, trace: &[TraceRequest], random: &mut Random) -> Result<Vec<Ask>, InvalidSetting> {
    let rate = positive("workload.rate", settings.rate)?;
    let wanted = if settings.requests == 0 { trace.len() } else { settings.requests };
    let part = trace.get(settings.skip..).unwrap_or_default();
    let (Some(first), Some(last)) = (part.first(), part.last()) else {
        return Err(InvalidSetting::new("workload.skip", "nothing of the trace is left"));
    };
    let span = last.at - first.at;
    let mut clock = Clock { now: 0.0, settings, random: random.clone() };
    let asks = (0..wanted).map(|number| {
        let (round, request) = ((number / part.len()) as u32, &part[number % part.len()]);
        let at = match settings.arrivals {
            Arrivals::Trace => (span * round + request.at - first.at).as_secs_f64() / rate,
            Arrivals::Poisson | Arrivals::Diurnal => clock.next(rate),
        };
        let TraceRequest { input_tokens, output_tokens, ref ids, .. } = *request;
        let ids = ids.iter().map(|&id| if round == 0 { id } else { mix(id ^ u64::from(round) << 48) }).collect();
        Ask { at: Duration::from_secs_f64(at), input_tokens, output_tokens, ids, class: 0 }
    });
    Ok(asks.collect())
}

/// The requests of all streams, each drawn independently until it has its share of the requests.
fn of_streams(settings: &WorkloadSettings, random: &mut Random) -> Result<Vec<Ask>, InvalidSetting> {
    let factor = positive("workload.rate", settings.rate)?;
    let total: f64 = settings.streams.iter().map(|stream| stream.rate).sum();
    let mut asks = Vec::new();
    for (number, stream) in (0..).zip(&settings.streams) {
        let rate = positive("workload.streams.rate", stream.rate)? * factor;
        let class = settings.class(stream.class.as_deref())?;
        let mut clock = Clock { now: 0.0, settings, random: Random::new(random.draw()) };
        let requests = (settings.requests as f64 * stream.rate / total).round() as u64;
        for request in 0..requests {
            let at = Duration::from_secs_f64(clock.next(rate));
            let [input_tokens, output_tokens] =
                [stream.input, stream.output].map(|[least, most]| random.between(least.max(1), most.max(1)));
            asks.push(Ask { at, input_tokens, output_tokens, ids: ids(stream, number, request, input_tokens), class });
        }
    }
    Ok(asks)
}

/// The ids of a stream's prompt: those of its common prefix, then its own.
fn ids(stream: &Stream, number: u64, request: u64, input_tokens: u32) -> Vec<u64> {
    let common = stream.prefix_tokens / ID_TOKENS;
    let id = |place: u32| {
        if place < common { mix(number << 32 | u64::from(place)) } else { mix(1 << 63 | number << 56 | request << 16 | u64::from(place)) }
    };
    (0..input_tokens.div_ceil(ID_TOKENS)).map(id).collect()
}

/// The arrival times of a Poisson process, whose rate may follow the time of day.
struct Clock<'a> {
    now: f64,
    settings: &'a WorkloadSettings,
    random: Random,
}

impl Clock<'_> {
    fn next(&mut self, rate: f64) -> f64 {
        let swing = if self.settings.arrivals == Arrivals::Diurnal { self.settings.swing.clamp(0.0, 1.0) } else { 0.0 };
        // Thinning (Lewis and Shedler 1979): draw at the highest rate, keep each with the probability of its time.
        loop {
            self.now += self.random.exponential(rate * (1.0 + swing));
            let day = std::f64::consts::TAU * self.now / self.settings.period_s;
            let height = ((1.0 - day.cos()) / 2.0).powf(self.settings.sharpness);
            if swing == 0.0 || self.random.unit() * (1.0 + swing) < 1.0 + swing * (2.0 * height - 1.0) {
                return self.now;
            }
        }
    }
}

fn positive(key: &'static str, value: f64) -> Result<f64, InvalidSetting> {
    if value > 0.0 && value.is_finite() { Ok(value) } else { Err(InvalidSetting::new(key, "must be above 0")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(arrivals: Arrivals, rate: f64) -> WorkloadSettings {
        let stream = Stream { rate: 1.0, input: [600, 2000], output: [1, 9], prefix_tokens: 512, class: None };
        WorkloadSettings { arrivals, rate, requests: 5000, streams: vec![stream], ..WorkloadSettings::default() }
    }

    #[test]
    fn equal_ids_are_equal_prefixes_and_nothing_more() {
        let ask = |ids: &[u64]| Ask { at: Duration::ZERO, input_tokens: 1000, output_tokens: 1, ids: ids.to_vec(), class: 0 };
        let (a, b) = (ask(&[1, 2]).prompt(32000), ask(&[1, 3]).prompt(32000));
        assert_eq!((a.len(), &a[..512]), (1000, &b[..512]));
        assert!(a[512..].iter().zip(&b[512..]).filter(|(a, b)| a == b).count() < 5);
        let mut distinct = a.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        assert!(distinct.len() > 900, "tokens are spread over the vocabulary");
    }

    #[test]
    fn streams_come_at_their_rate_and_share_their_prefix() {
        let asks = draw(&settings(Arrivals::Poisson, 2.0), None, 1).unwrap();
        assert_eq!(asks, draw(&settings(Arrivals::Poisson, 2.0), None, 1).unwrap());
        assert!((asks.last().unwrap().at.as_secs_f64() / 2500.0 - 1.0).abs() < 0.05);
        assert!(asks.iter().all(|ask| ask.ids[0] == asks[0].ids[0] && (600..=2000).contains(&ask.input_tokens)));
        assert_ne!(asks[0].ids[1], asks[1].ids[1]);
    }

    #[test]
    fn a_day_swings_around_the_same_mean() {
        let day = WorkloadSettings { swing: 0.8, period_s: 100.0, ..settings(Arrivals::Diurnal, 10.0) };
        let asks = draw(&day, None, 1).unwrap();
        assert!((asks.last().unwrap().at.as_secs_f64() / 500.0 - 1.0).abs() < 0.1);
        let by_night = asks.iter().filter(|ask| (ask.at.as_secs_f64() % 100.0 - 50.0).abs() > 37.5).count();
        let sharp = draw(&WorkloadSettings { sharpness: 3.0, requests: 300, ..day.clone() }, None, 1).unwrap();
        assert!(sharp.last().unwrap().at.as_secs_f64() / asks[299].at.as_secs_f64() > 1.1, "a narrower peak has fewer requests");
        let at_noon = asks.iter().filter(|ask| (ask.at.as_secs_f64() % 100.0 - 50.0).abs() < 12.5).count();
        assert!(at_noon > 4 * by_night, "{at_noon} at noon, {by_night} by night");
    }

    #[test]
    fn a_trace_is_replayed_faster_or_slower() {
        let trace: Vec<TraceRequest> =
            (0..10).map(|n| TraceRequest { at: Duration::from_secs(n), input_tokens: 20, output_tokens: 3, ids: vec![n] }).collect();
        let settings = WorkloadSettings { rate: 2.0, requests: 4, skip: 3, ..WorkloadSettings::default() };
        let asks = draw(&settings, Some(&trace), 1).unwrap();
        assert_eq!(asks.iter().map(|ask| (ask.at.as_millis(), ask.ids[0])).collect::<Vec<_>>(), [(0, 3), (500, 4), (1000, 5), (1500, 6)]);
        assert!(draw(&WorkloadSettings { skip: 10, ..settings.clone() }, Some(&trace), 1).is_err());
        let twice = draw(&WorkloadSettings { requests: 14, skip: 0, ..settings }, Some(&trace), 1).unwrap();
        assert_eq!([9, 10, 13].map(|number| twice[number].at.as_millis()), [4500, 4500, 6000]);
        assert!(twice[10..].iter().all(|again| twice[..10].iter().all(|first| first.ids != again.ids)), "its prompts are others");
    }
}
