//! Frames of peers: any bytes give a message or an error, and a message that was read is written as the same bytes.

use crate::{
    dice::Dice,
    mutate::bytes,
    target::{Subject, Target},
};
use serde::{Serialize, de::DeserializeOwned};
use std::time::Duration;
use tidemill_proto::{
    frame::{self, HEADER_BYTES, Preamble, Version},
    message::{ToCoordinator, ToWorker},
    pool::{FromPool, GetData, PutData, ToPool},
    stage::{FromStage, ToStage},
};
use tidemill_registry::{command::Proposal, peers::PeerMessage, state::State};

pub(crate) const FRAMES: Target = Target {
    name: "frames",
    about: "messages of workers and their stages, coordinators, pool nodes and their clients, as bytes",
    open,
    cpu_max: Duration::from_secs(2),
    // A frame allocates no more than its limit, 8 MiB, for the decoded message, which is encoded again.
    bytes_max: 128 << 20,
    short: 5000,
};

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let kinds = [
        Kind::new::<ToWorker>("ToWorker"),
        Kind::new::<ToCoordinator>("ToCoordinator"),
        Kind::new::<ToPool>("ToPool"),
        Kind::new::<FromPool>("FromPool"),
        Kind::new::<PutData>("PutData"),
        Kind::new::<GetData>("GetData"),
        Kind::new::<ToStage>("ToStage"),
        Kind::new::<FromStage>("FromStage"),
        Kind::new::<PeerMessage>("PeerMessage"),
        Kind::new::<Proposal>("Proposal"),
        Kind::new::<State>("State"),
    ];
    Ok(Box::new(move |dice: &mut Dice| {
        let kind = dice.pick(&kinds);
        let mut payload = if dice.one_in(4) { random(dice) } else { dice.pick(&kind.seeds).clone() };
        bytes::mutate(dice, &mut payload);
        dice.show(kind.name, payload.escape_ascii().to_string().as_bytes());
        if let Some(header) = payload.first_chunk() {
            let _ = frame::payload_bytes(*header);
        }
        if let Some(preamble) = payload.first_chunk() {
            let kinds = [Preamble::Control, Preamble::Pool, Preamble::PoolData, Preamble::Registry, Preamble::Stage];
            let _ = Preamble::one_of(&kinds, Version::NEWEST, *preamble);
            let _ = Version::named(&payload);
        }
        (kind.check)(&payload)
    }))
}

struct Kind {
    name: &'static str,
    /// Payloads that decode.
    seeds: Vec<Vec<u8>>,
    check: fn(&[u8]) -> Result<(), String>,
}

impl Kind {
    fn new<M: Serialize + DeserializeOwned>(name: &'static str) -> Self {
        Self { name, seeds: decodable::<M>(), check: check::<M> }
    }
}

/// Payloads that are messages of this type. The codec is dense: a few percent of small random payloads are.
pub(super) fn decodable<M: DeserializeOwned>() -> Vec<Vec<u8>> {
    const TRIES: usize = 60_000;
    const WANTED: usize = 300;
    let mut dice = Dice::new(0, false);
    let mut seeds = vec![Vec::new()];
    for _ in 0..TRIES {
        let mut payload = random(&mut dice);
        // Trailing bytes are cut off.
        if let Err(frame::FrameError::TrailingBytes(bytes)) = frame::decode::<M>(&payload) {
            payload.truncate(payload.len() - bytes);
        }
        if frame::decode::<M>(&payload).is_ok() {
            seeds.push(payload);
            if seeds.len() == WANTED {
                break;
            }
        }
    }
    seeds
}

/// Mostly small numbers: tags of variants and options, lengths, letters.
fn random(dice: &mut Dice) -> Vec<u8> {
    let length_max = if dice.one_in(3) { 400 } else { 60 };
    let length = dice.below(length_max);
    let byte = |dice: &mut Dice| match dice.below(8) {
        0 => dice.byte(),
        1 => *dice.pick(&[250, 251, 252, 253, 127, 128]),
        2 => b'a' + dice.below(26) as u8,
        _ => dice.below(6) as u8,
    };
    // The first byte chooses the variant.
    let first = dice.below(16) as u8;
    [first].into_iter().chain((0..length).map(|_| byte(dice))).collect()
}

fn check<M: Serialize + DeserializeOwned>(payload: &[u8]) -> Result<(), String> {
    let Ok(message) = frame::decode::<M>(payload) else { return Ok(()) };
    let written = frame::encode(&message).map_err(|error| format!("what was decoded is not encoded: {error}"))?;
    let written = &written[HEADER_BYTES..];
    let again = frame::decode::<M>(written).map_err(|error| format!("what was encoded is not decoded: {error}"))?;
    let again = frame::encode(&again).map_err(|error| error.to_string())?;
    if again[HEADER_BYTES..] == *written { Ok(()) } else { Err("decoded, encoded and decoded again it is another message".into()) }
}
