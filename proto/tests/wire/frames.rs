//! Frames from a hostile or broken peer: any bytes give a message or an error, and no allocation beyond the frame.

use proptest::prelude::*;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use tidemill_proto::{
    block::LayoutFingerprint,
    frame::{self, FRAME_BYTES_MAX, FrameError, HEADER_BYTES, Preamble, Version},
    grammar::{Constraint, Grammar},
    ids::{Epoch, RequestId, SequenceId},
    message::*,
    sampling::{Sampling, StopRule, TokenLogprob},
    thought::{ReaderState, ThoughtLimit, ThoughtReader},
    urgency::Urgency,
};

const NODE: PoolNode = PoolNode { addr: SocketAddr::new(IpAddr::V6(Ipv6Addr::LOCALHOST), 7), near: true };

fn job() -> impl Strategy<Value = DecodeJob> {
    (prop::collection::vec(any::<u32>(), 0..200), any::<u64>(), prop::collection::vec(any::<u8>(), 0..20), any::<Option<u32>>()).prop_map(
        |(tokens, id, salt, prompt_logprobs)| DecodeJob {
            request: RequestId(id),
            sequence: SequenceId(!id),
            prompt_tokens: tokens.len() as u32,
            tokens: tokens.into(),
            salt,
            read: vec![Run { node: NODE, blocks: 2 }],
            home: Some(NODE),
            hot_blocks: 1,
            expected_blocks: 3,
            wait_ms: id,
            sampling: Sampling { logit_bias: vec![(1, 2.0)], logprobs: prompt_logprobs, ..Sampling::default() },
            stop: StopRule { max_tokens: 1, min_tokens: 0, stop_tokens: vec![2] },
            constraint: Some(Constraint { grammar: Grammar::Regex("a+".into()), end_tokens: vec![2], ends_late: true }),
            urgency: Urgency { due_ms: Some(id), tpot_ms: Some(50.0), priority: 1, group: !id, weight: 2.0 },
            prompt_logprobs,
            embeds: (id % 2 == 0).then_some(Embeds { second_text: 3 }),
        },
    )
}

fn events() -> Vec<WorkerEvent> {
    vec![
        WorkerEvent::Heartbeat(Box::default()),
        WorkerEvent::Tokens(vec![SequenceToken {
            sequence: SequenceId(1),
            index: 2,
            token: 3,
            logprob: Some(TokenLogprob { logprob: -0.5, top: vec![(1, -0.5)] }),
        }]),
        WorkerEvent::Finished { sequence: SequenceId(1), reason: Finish::Returned, provenance: Provenance::default() },
        WorkerEvent::Embedding { sequence: SequenceId(1), values: vec![0.5, -1.0] },
        WorkerEvent::Sources { sequence: SequenceId(1), tokens: TokensBySource { hbm: 16, ..TokensBySource::default() } },
        WorkerEvent::Prefilled { request: RequestId(1), outcome: PrefillOutcome::Failed { reason: "no".into() } },
        WorkerEvent::PoolEvents { from: 7, events: vec![PoolEvent::Cleared] },
        WorkerEvent::Leaving,
        WorkerEvent::Release("1.2.3".into()),
    ]
}

proptest! {
    #[test]
    fn what_goes_in_comes_out(job in job()) {
        let message = ToWorker::Decode(job);
        let bytes = frame::encode(&message).unwrap();
        prop_assert_eq!(frame::payload_bytes(*bytes.first_chunk().unwrap()).unwrap(), bytes.len() - HEADER_BYTES);
        prop_assert_eq!(frame::decode::<ToWorker>(&bytes[HEADER_BYTES..]).unwrap(), message);
    }

    #[test]
    fn a_limit_on_a_thought_goes_with_its_job(job in job(), tokens_max: u32) {
        let state = ReaderState { is_thought: true, otherwise: 0, steps: vec![(1, 0), (70_000, 0)], ending: vec![1] };
        let limit = ThoughtLimit { tokens_max, start: 0, reader: ThoughtReader { states: vec![state] }.into() };
        let message = ToWorker::DecodeLimited { job, limit };
        let bytes = frame::encode(&message).unwrap();
        prop_assert_eq!(frame::decode::<ToWorker>(&bytes[HEADER_BYTES..]).unwrap(), message);
    }

    #[test]
    fn random_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = frame::decode::<ToWorker>(&bytes);
        let _ = frame::decode::<ToCoordinator>(&bytes);
    }

    #[test]
    fn a_damaged_frame_never_panics(job in job(), at in any::<prop::sample::Index>(), value in any::<u8>(), cut in any::<prop::sample::Index>()) {
        let whole = frame::encode(&ToWorker::Decode(job)).unwrap().split_off(HEADER_BYTES);
        let cut = cut.index(whole.len());
        prop_assert!(frame::decode::<ToWorker>(&whole[..cut]).is_err());
        // A byte that turns an option off makes a shorter message, so a damaged frame may well decode, truncated or not.
        let mut damaged = whole;
        let at = at.index(damaged.len());
        damaged[at] = value;
        let _ = frame::decode::<ToWorker>(&damaged);
        let _ = frame::decode::<ToWorker>(&damaged[..cut]);
    }

    #[test]
    fn a_preamble_of_another_kind_or_version_is_refused(bytes in any::<[u8; 8]>()) {
        let (kind, version) = (Preamble::Control, Version::NEWEST);
        prop_assert!(kind.check(version, bytes).is_err() || bytes == kind.bytes(version));
    }
}

#[test]
fn every_event_survives_the_trip() {
    for event in events() {
        let message = ToCoordinator::Event { epoch: Epoch(9), event };
        let bytes = frame::encode(&message).unwrap();
        assert_eq!(frame::decode::<ToCoordinator>(&bytes[HEADER_BYTES..]), Ok(message));
    }
}

#[test]
fn a_length_that_lies_allocates_nothing() {
    assert_eq!(frame::payload_bytes(u32::MAX.to_le_bytes()), Err(FrameError::TooLarge { bytes: u32::MAX as usize }));
    // A vector that claims 2^60 elements inside a small frame.
    let mut bytes = vec![253];
    bytes.extend((1u64 << 60).to_le_bytes());
    assert!(matches!(frame::decode::<Vec<u64>>(&bytes), Err(FrameError::Malformed(_))));
}

#[test]
fn a_message_over_the_limit_is_refused_by_its_sender() {
    let tokens = vec![u32::MAX; FRAME_BYTES_MAX / 4];
    assert!(matches!(frame::encode(&tokens), Err(FrameError::TooLarge { .. } | FrameError::Malformed(_))));
}

#[test]
fn trailing_bytes_and_other_versions_are_named() {
    let mut bytes = frame::encode(&7u8).unwrap().split_off(HEADER_BYTES);
    bytes.push(0);
    assert_eq!(frame::decode::<u8>(&bytes), Err(FrameError::TrailingBytes(1)));
    let mut preamble = Preamble::Control.bytes(Version::NEWEST);
    preamble[4] = 99;
    let refused = Err(FrameError::Version { theirs: 99, agreed: Version::NEWEST });
    assert_eq!(Preamble::Control.check(Version::NEWEST, preamble), refused);
}

#[test]
fn versions_have_names() {
    let names = Version::names();
    assert_eq!(Version::named(&names[0]), Some(Version::NEWEST), "the newest is offered first");
    assert_eq!(Version::named(names.last().unwrap()), Some(Version::OLDEST));
    for strange in [&b"tidemill/13"[..], b"tidemill/99", b"tidemill/", b"tidemill/14x", b"h3", b"\xff"] {
        assert_eq!(Version::named(strange), None);
    }
}

#[test]
fn a_layout_prints_as_hex() {
    assert_eq!(LayoutFingerprint([0xab; 16]).to_string(), "ab".repeat(16));
}
