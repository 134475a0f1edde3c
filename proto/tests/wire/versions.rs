//! Adjacent releases read each other's messages: the messages of each version that this release speaks have the shapes that they had when
//! that version was released, which are in `tests/versions`. A message may only be new.
//!
//! `TIDEMILL_RENEW_VERSIONS=1` writes the newest version's file. That is for a version that no release speaks yet.

use serde::Deserialize;
use serde_reflection::{ContainerFormat, Registry, Samples, Tracer, TracerConfig};
use std::{collections::BTreeMap, fs, net::SocketAddr, path::PathBuf};
use tidemill_proto::{
    block::KvDtype,
    frame::Version,
    grammar::Grammar,
    message::{CacheEvent, Finish, ModelKind, PoolEvent, PrefillOutcome, RoleInfo, ToCoordinator, ToWorker, WorkerEvent},
    pool::{FromPool, GetData, PutData, Reservation, Room, Tier, ToPool, Via},
    stage::{FromStage, ToStage},
};

/// The types of the messages on each kind of stream.
type Streams = BTreeMap<String, Registry>;

fn of_this_release() -> Streams {
    let control = Shapes::default()
        .with::<SocketAddr>()
        .with::<ToCoordinator>()
        .with::<ToWorker>()
        .with::<WorkerEvent>()
        .with::<RoleInfo>()
        .with::<ModelKind>()
        .with::<Finish>()
        .with::<PrefillOutcome>()
        .with::<PoolEvent>()
        .with::<CacheEvent>()
        .with::<Grammar>()
        .with::<Tier>();
    let pool = Shapes::default()
        .with::<KvDtype>()
        .with::<ToPool>()
        .with::<FromPool>()
        .with::<PutData>()
        .with::<GetData>()
        .with::<Via>()
        .with::<Tier>()
        .with::<Room>()
        .with::<Reservation>();
    let stage = Shapes::default().with::<KvDtype>().with::<ToStage>().with::<FromStage>();
    BTreeMap::from([("control", control), ("pool", pool), ("stage", stage)].map(|(kind, shapes)| (kind.to_owned(), shapes.all())))
}

struct Shapes {
    tracer: Tracer,
    samples: Samples,
}

impl Default for Shapes {
    fn default() -> Self {
        Self { tracer: Tracer::new(TracerConfig::default().is_human_readable(false)), samples: Samples::new() }
    }
}

impl Shapes {
    fn with<T: for<'de> Deserialize<'de>>(mut self) -> Self {
        self.tracer.trace_type::<T>(&self.samples).unwrap_or_else(|error| panic!("{}: {}", error, error.explanation()));
        self
    }

    fn all(self) -> Registry {
        self.tracer.registry().unwrap_or_else(|error| panic!("{}: {}", error, error.explanation()))
    }
}

fn file(version: Version) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("tests/versions/{version}.json"))
}

/// Whether a peer that knows `old` can read what is sent to it as `new`.
fn understands(old: &ContainerFormat, new: &ContainerFormat) -> bool {
    match (old, new) {
        (ContainerFormat::Enum(old), ContainerFormat::Enum(new)) => old.iter().all(|(index, variant)| new.get(index) == Some(variant)),
        (old, new) => old == new,
    }
}

#[test]
fn messages_keep_their_shapes_from_version_to_version() {
    let here = of_this_release();
    if std::env::var_os("TIDEMILL_RENEW_VERSIONS").is_some() {
        fs::write(file(Version::NEWEST), serde_json::to_string_pretty(&here).unwrap() + "\n").unwrap();
    }
    for version in Version::all() {
        let text = fs::read_to_string(file(version)).unwrap_or_else(|error| panic!("version {version}: {error}"));
        let there: Streams = serde_json::from_str(&text).unwrap();
        for (kind, types) in &there {
            for (name, old) in types {
                let new = here[kind].get(name).unwrap_or_else(|| panic!("`{name}` of version {version} is gone"));
                assert!(understands(old, new), "`{name}` has another shape than in version {version}: make a new variant of the message");
            }
        }
        assert!(version < Version::NEWEST || there == here, "a message is new since version {version}: raise `Version::NEWEST`");
    }
}
