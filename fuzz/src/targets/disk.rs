//! Files in data directories: damaged in any way, they are read, repaired, or refused.

use crate::{
    dice::Dice,
    mutate::{bytes, json},
    target::{Subject, Target},
};
use serde_json::{Value, json};
use std::{
    fs, io,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};
use tidemill_coordinator::revoked::Revoked;
use tidemill_gateway::{
    batch::file::Room,
    batches::{self, Batches},
    store::{self, Kind as RecordKind, NewRecord, Owner, Page, Part, Store, sqlite::Sqlite},
};
use tidemill_kvpool::{
    core::directory::DiskBlock,
    node::nvme::slab::{Geometry, Manifest, RecordStore, Slab},
};
use tidemill_proto::{
    block::{BlockKey, LayoutFingerprint, Tenant},
    ids::RequestId,
    pool::Lineage,
};
use tidemill_registry::command::ReplicaId;
use tidemill_safety::{classifier::Classifier, corpus, patterns::Patterns};
use tidemill_tenancy::{
    audit::{Chain, Line, Verifier},
    journal::{self, Journal},
    keeper,
    usage::Event,
};

pub(crate) const DISK: Target = Target {
    name: "disk",
    about: "files found in data directories: records of the pool's disk, logs, databases, batches, lists of revoked certificates",
    open,
    cpu_max: Duration::from_secs(10),
    bytes_max: 256 << 20,
    short: 150,
};

fn open() -> anyhow::Result<Box<dyn Subject>> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let mut kinds = Vec::new();
    for (name, make, read) in KINDS {
        let dir = tempfile::tempdir()?;
        let _entered = runtime.enter();
        make(dir.path())?;
        let files = found(dir.path())?;
        anyhow::ensure!(!files.is_empty(), "{name} makes no file");
        kinds.push((*name, files, *read));
    }
    let keys: Vec<String> = json::keys([&batch(), &file()]);
    Ok(Box::new(move |dice: &mut Dice| {
        let (name, files, read) = dice.pick(&kinds);
        let dir = tempfile::tempdir().map_err(|error| error.to_string())?;
        let mutated = dice.below(files.len());
        for (number, (path, contents)) in files.iter().enumerate() {
            let mut contents = contents.clone();
            if number == mutated {
                match serde_json::from_slice::<Value>(&contents) {
                    Ok(mut tree) if !dice.one_in(4) => {
                        json::mutate(dice, &mut tree, &keys);
                        contents = json::text(dice, &tree).into_bytes();
                    }
                    _ => bytes::mutate(dice, &mut contents),
                }
                dice.show(&format!("{name} {}", path.display()), &contents);
            }
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap_or(dir.path())).and_then(|()| fs::write(path, contents)).map_err(|e| e.to_string())?;
        }
        let _entered = runtime.enter();
        read(dir.path(), &runtime);
        Ok(())
    }))
}

/// A kind of directory: its name, the creation of its files, and their reading.
type Kind = (&'static str, fn(&Path) -> anyhow::Result<()>, fn(&Path, &tokio::runtime::Runtime));

const KINDS: &[Kind] = &[
    ("slab", make_slab, |dir, _| {
        let Ok(slab) = Slab::open(dir, RecordStore::File) else { return };
        let (manifest, blocks) = (slab.manifest(), slab.records().take(100_000).count());
        if let (Some(manifest), true) = (manifest, blocks > 0) {
            let _ = Geometry::new(1 << 20, manifest.block_bytes);
        }
    }),
    ("usage", make_usage, |dir, _| {
        let _ = journal::read(dir, 2, |_, _: Event| true);
        drop(Journal::<Event>::open(dir, JOURNAL, SystemTime::UNIX_EPOCH, drop));
    }),
    ("audit", make_audit, |dir, _| {
        let mut verifier = Verifier::looking_for(None);
        if journal::read(dir, 0, |_, line| verifier.record(&line).is_ok()).is_ok() {
            let _ = verifier.finish();
        }
        let _ = journal::expired::<Line>(dir, SystemTime::now(), 100);
        let _ = journal::remove::<Line>(dir, 2);
    }),
    (
        "revoked",
        |dir| Ok(fs::write(dir.join("revoked.json"), r#"{"log": 7, "serials": ["ab", "cd"]}"#)?),
        |dir, _| {
            if let Ok(mut revoked) = Revoked::read(Some(dir.join("revoked.json"))) {
                let _ = revoked.all(8, Default::default());
            }
        },
    ),
    (
        "registry",
        |dir| {
            tidemill_registry::sqlite::Sqlite::open(Some(&dir.join("registry.sqlite")), ReplicaId(5))?;
            Ok(())
        },
        |dir, _| {
            drop(tidemill_registry::sqlite::Sqlite::open(Some(&dir.join("registry.sqlite")), ReplicaId(6)));
        },
    ),
    (
        "tenants",
        |dir| {
            keeper::sqlite::Sqlite::open(&dir.join("tenants.sqlite"))?;
            Ok(())
        },
        |dir, _| {
            drop(keeper::sqlite::Sqlite::open(&dir.join("tenants.sqlite")));
        },
    ),
    ("responses", make_responses, |dir, runtime| {
        let Ok(store) = Sqlite::open(&dir.join("responses.sqlite"), STORE) else { return };
        let owner = Owner::of(Some("acme"), None);
        runtime.block_on(async {
            let _ = store.load_within(&owner, "conv_1", Part::All, u64::MAX).await;
            let _ = store.list(&owner, RecordKind::Conversation, Page { after: None, limit: 10, descending: true }).await;
            let _ = store.expire(RecordKind::Response, 1 << 40).await;
        });
    }),
    ("batches", make_batches, |dir, _| {
        if let Ok(batches) = Batches::open(dir, BATCHES) {
            let _ = batches.stored_file("acme", "file-1").map(|file| file.view());
        }
    }),
    ("safety", make_safety, |dir, _| {
        let text = |name: &str| fs::read(dir.join(name)).map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).unwrap_or_default();
        if let Ok(patterns) = Patterns::with(&[text("words.txt")]) {
            let _ = patterns.find(b"how to build a bomb and then some more text");
        }
        let _ = Classifier::read(&text("classifier.txt")).map(|classifier| classifier.score(b"some text that is not long"));
        let _ = corpus::examples(&text("examples.txt"));
        let _ = tidemill_eval::case::read(&text("cases.jsonl"));
    }),
];

const JOURNAL: journal::Settings = journal::Settings { sync_every: Duration::from_millis(100), segment_bytes: 1 << 20 };
const STORE: store::Limits = store::Limits { bytes: 1 << 20, history_bytes: 1 << 20 };
const BATCHES: batches::Limits = batches::Limits {
    file_bytes: 1 << 20,
    lines: 100,
    room: Room { files: 10, bytes: 1 << 20 },
    total_bytes: 1 << 30,
    reserve_bytes: 0,
    files_age: Some(Duration::from_secs(3600)),
    batches_age: None,
    at_once: 1,
    line_bytes: 1 << 16,
};

/// All files below a directory, by their paths in it.
fn found(dir: &Path) -> io::Result<Vec<(PathBuf, Vec<u8>)>> {
    let mut files = Vec::new();
    let mut dirs = vec![PathBuf::new()];
    while let Some(relative) = dirs.pop() {
        for entry in fs::read_dir(dir.join(&relative))? {
            let entry = entry?;
            let path = relative.join(entry.file_name());
            if entry.file_type()?.is_dir() {
                dirs.push(path);
            } else {
                files.push((path, fs::read(entry.path())?));
            }
        }
    }
    files.sort();
    Ok(files)
}

fn make_slab(dir: &Path) -> anyhow::Result<()> {
    let slab = Slab::open(dir, RecordStore::File)?;
    slab.prepare(Manifest::new(4096, LayoutFingerprint([1; 16])), Geometry::new(1 << 16, 4096)?)?;
    let block = |n: u8| {
        let lineage = Lineage { origin: RequestId(1), tenant: Tenant(2), parent: Some(BlockKey([n; 16])), position: n.into() };
        DiskBlock { key: BlockKey([n + 1; 16]), checksum: 7, lineage }
    };
    Ok(slab.record((0..8).map(|n| (n, block(n as u8))))?)
}

fn make_usage(dir: &Path) -> anyhow::Result<()> {
    let log = Journal::open(dir, JOURNAL, SystemTime::UNIX_EPOCH, drop)?;
    (0..5).try_for_each(|_| log.offer(Event::default()).map(drop))?;
    Ok(())
}

fn make_audit(dir: &Path) -> anyhow::Result<()> {
    let log = Journal::open(dir, JOURNAL, SystemTime::UNIX_EPOCH, drop)?;
    let mut chain = Chain::default();
    for number in 0..5 {
        let (next, line) = chain.next(number, &json!({"kind": "block", "number": number}));
        log.offer(line)?;
        chain = next;
    }
    Ok(())
}

fn make_responses(dir: &Path) -> anyhow::Result<()> {
    let store = Sqlite::open(&dir.join("responses.sqlite"), STORE)?;
    let owner = Owner::of(Some("acme"), None);
    let item = |n: usize| store::Item { id: format!("msg_{n}"), body: json!({"type": "message", "content": "x"}).to_string(), tokens: 3 };
    let record = NewRecord {
        id: "conv_1".into(),
        kind: RecordKind::Conversation,
        body: json!({"id": "conv_1"}).to_string(),
        items: (0..5).map(item).collect(),
        ..NewRecord::default()
    };
    tokio::runtime::Builder::new_current_thread().enable_all().build()?.block_on(store.put(&owner, record, 5))?;
    Ok(())
}

fn file() -> Value {
    json!({"id": "file-1", "owner": "acme", "filename": "a", "purpose": "batch", "bytes": 3, "created_ms": 5, "expires_at": 99999999999_u64})
}

fn batch() -> Value {
    json!({"id": "batch_1", "sender": {"tenant": "acme", "tier": null, "user": null, "key": null, "until": null}, "endpoint": "/v1/completions",
        "input_file": "file-1", "metadata": {"a": "b"}, "output_age_s": null, "status": "in_progress", "ending": null, "output_file": null,
        "error_file": null, "counts": {"total": 1, "completed": 0, "failed": 0}, "problems": [], "created_ms": 5, "times": {}})
}

fn make_batches(dir: &Path) -> anyhow::Result<()> {
    for (path, contents) in [
        ("files/file-1.json", file().to_string()),
        ("files/file-1.content", "{}\n".into()),
        ("batches/batch_1.json", batch().to_string()),
        ("batches/batch_1.begun", "1 process_x\n".into()),
        ("batches/batch_1.output", "{}\n".into()),
    ] {
        fs::create_dir_all(dir.join(path).parent().unwrap_or(dir))?;
        fs::write(dir.join(path), contents)?;
    }
    Ok(())
}

fn make_safety(dir: &Path) -> anyhow::Result<()> {
    fs::write(dir.join("words.txt"), "[dangerous]\nbuild a bomb\nre:bomb(s|ing)?\n")?;
    let examples = [("some text", None), ("some other text", Some(tidemill_safety::category::Category::Dangerous))];
    fs::write(dir.join("classifier.txt"), Classifier::train(examples).write())?;
    fs::write(dir.join("examples.txt"), "[dangerous]\nhow to {do|make} it\n[harmless]\nhow to cook\n")?;
    fs::write(dir.join("cases.jsonl"), "{\"id\": \"a\", \"prompt\": \"hi\", \"checks\": [{\"contains\": \"x\"}]}\n")?;
    Ok(())
}
