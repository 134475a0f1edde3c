//! What every store promises, run on each.

use super::{Item, ItemPage, Limits, NewRecord, Owner, Page, Part, Record, Store, StoreError, memory::Memory, sqlite::Sqlite};
use std::{sync::Arc, time::Duration};

const LIMITS: Limits = Limits { age: Duration::from_secs(100), bytes: 1 << 30 };

/// Each kind of store, for one scenario.
fn stores(limits: Limits) -> Vec<(Arc<dyn Store>, Option<tempfile::TempDir>)> {
    let dir = tempfile::tempdir().unwrap();
    let sqlite = Sqlite::open(&dir.path().join("new/store.sqlite"), limits).unwrap();
    vec![(Arc::new(Memory::new(limits)), None), (Arc::new(sqlite), Some(dir))]
}

fn me() -> Owner {
    Owner("me".into())
}

fn item(id: &str) -> Item {
    Item { id: id.into(), body: format!(r#"{{"id":"{id}"}}"#) }
}

fn items(ids: &str) -> Vec<Item> {
    ids.split_whitespace().map(item).collect()
}

/// `items`: those that come new; the last `outputs` of them are output.
fn record(id: &str, earlier: &str, new: &str, outputs: usize) -> NewRecord {
    NewRecord {
        id: id.into(),
        body: format!("{{\"record\":\"{id}\"}}"),
        earlier: earlier.split_whitespace().map(str::to_owned).collect(),
        items: items(new),
        outputs,
        conversation: None,
    }
}

fn ids(items: &[Item]) -> String {
    items.iter().map(|item| item.id.as_str()).collect::<Vec<_>>().join(" ")
}

async fn history(store: &dyn Store, id: &str, part: Part) -> Result<String, StoreError> {
    store.load(&me(), id, part).await.map(|record| ids(&record.items))
}

fn gone<T>(id: &str) -> Result<T, StoreError> {
    Err(StoreError::NotFound(id.into()))
}

#[tokio::test]
async fn a_response_and_the_next_turn() {
    for (store, _dir) in stores(LIMITS) {
        store.put(&me(), record("resp_1", "", "a b", 1), 0).await.unwrap();
        store.put(&me(), record("resp_2", "a b", "c d e", 2), 1).await.unwrap();
        let one = store.load(&me(), "resp_1", Part::All).await.unwrap();
        assert_eq!(one, Record { body: r#"{"record":"resp_1"}"#.into(), items: items("a b") });
        for (part, expected) in [(Part::Nothing, ""), (Part::Input, "a b c"), (Part::Output, "d e"), (Part::All, "a b c d e")] {
            assert_eq!(history(&*store, "resp_2", part).await.unwrap(), expected, "{part:?}");
        }
    }
}

#[tokio::test]
async fn what_is_not_there_is_said() {
    for (store, _dir) in stores(LIMITS) {
        store.put(&me(), record("resp_1", "", "a", 0), 0).await.unwrap();
        assert_eq!(history(&*store, "resp_9", Part::All).await, gone("resp_9"));
        assert_eq!(store.delete(&me(), "resp_9").await, gone("resp_9"));
        assert_eq!(store.update(&me(), "resp_9", "{}".into(), 0).await, gone("resp_9"));
        assert_eq!(store.append(&me(), "resp_9", items("x"), 0).await, gone("resp_9"));
        assert_eq!(store.remove(&me(), "resp_1", "x").await, gone("x"));
        assert_eq!(store.put(&me(), record("resp_2", "a x", "b", 0), 0).await, gone("x"), "a turn never lacks what came before");
        assert_eq!(history(&*store, "resp_2", Part::All).await, gone("resp_2"), "all or nothing");
        let again = store.put(&me(), record("resp_1", "", "b", 0), 0).await;
        assert!(matches!(again, Err(StoreError::Failed(_))), "{again:?}");
        assert_eq!(store.put(&me(), record("resp_3", "b", "", 0), 0).await, gone("b"), "nothing of it was kept");
    }
}

#[tokio::test]
async fn another_owner_sees_nothing() {
    let other = Owner("other".into());
    for (store, _dir) in stores(LIMITS) {
        store.put(&me(), record("resp_1", "", "a", 0), 0).await.unwrap();
        assert_eq!(store.load(&other, "resp_1", Part::All).await, gone("resp_1"));
        assert_eq!(store.delete(&other, "resp_1").await, gone("resp_1"));
        assert_eq!(store.put(&other, record("resp_2", "a", "", 0), 0).await, gone("a"));
        store.put(&other, record("resp_1", "", "a", 0), 0).await.unwrap();
        store.delete(&other, "resp_1").await.unwrap();
        assert_eq!(history(&*store, "resp_1", Part::All).await.unwrap(), "a");
    }
}

#[tokio::test]
async fn an_item_lives_as_long_as_a_history_names_it() {
    for (store, _dir) in stores(LIMITS) {
        store.put(&me(), record("resp_1", "", "a b", 1), 0).await.unwrap();
        store.put(&me(), record("resp_2", "a b", "c", 0), 0).await.unwrap();
        store.put(&me(), record("resp_3", "a", "a d", 0), 0).await.unwrap();
        store.delete(&me(), "resp_1").await.unwrap();
        assert_eq!(history(&*store, "resp_2", Part::All).await.unwrap(), "a b c");
        store.delete(&me(), "resp_2").await.unwrap();
        assert_eq!(store.put(&me(), record("resp_4", "b", "", 0), 0).await, gone("b"));
        assert_eq!(history(&*store, "resp_3", Part::All).await.unwrap(), "a a d");
        store.delete(&me(), "resp_3").await.unwrap();
        assert_eq!(store.put(&me(), record("resp_4", "a", "", 0), 0).await, gone("a"));
    }
}

#[tokio::test]
async fn a_conversation_grows_with_its_responses() {
    for (store, _dir) in stores(LIMITS) {
        store.put(&me(), record("conv_1", "", "a", 0), 0).await.unwrap();
        let turn = |id, earlier, new| NewRecord { conversation: Some("conv_1".into()), ..record(id, earlier, new, 1) };
        store.put(&me(), turn("resp_1", "a", "b c"), 1).await.unwrap();
        store.append(&me(), "conv_1", items("d"), 2).await.unwrap();
        store.put(&me(), turn("resp_2", "a b c d", "e f"), 3).await.unwrap();
        assert_eq!(history(&*store, "conv_1", Part::All).await.unwrap(), "a b c d e f");
        assert_eq!(history(&*store, "resp_2", Part::Output).await.unwrap(), "f");
        store.remove(&me(), "conv_1", "b").await.unwrap();
        store.remove(&me(), "conv_1", "d").await.unwrap();
        assert_eq!(history(&*store, "conv_1", Part::All).await.unwrap(), "a c e f");
        assert_eq!(history(&*store, "resp_2", Part::All).await.unwrap(), "a b c d e f", "what a response was answered with stays");
        store.update(&me(), "conv_1", "{\"metadata\":{}}".into(), 4).await.unwrap();
        assert_eq!(store.load(&me(), "conv_1", Part::Nothing).await.unwrap().body, "{\"metadata\":{}}");
        store.delete(&me(), "conv_1").await.unwrap();
        assert_eq!(store.put(&me(), turn("resp_3", "a", "g"), 5).await, gone("conv_1"));
    }
}

#[tokio::test]
async fn items_come_in_pages() {
    let page = |after: Option<&str>, limit, descending| Page { part: Part::Input, after: after.map(str::to_owned), limit, descending };
    for (store, _dir) in stores(LIMITS) {
        store.put(&me(), record("resp_1", "", "a b c d e x", 1), 0).await.unwrap();
        for (after, limit, descending, expected, has_more) in [
            (None, 2, false, "a b", true),
            (Some("b"), 3, false, "c d e", false),
            (Some("e"), 3, false, "", false),
            (None, 2, true, "e d", true),
            (Some("d"), 2, true, "c b", true),
            (Some("b"), 2, true, "a", false),
        ] {
            let ItemPage { items, has_more: more } = store.page(&me(), "resp_1", page(after, limit, descending)).await.unwrap();
            assert_eq!((ids(&items).as_str(), more), (expected, has_more), "{after:?} {limit} {descending}");
        }
        assert_eq!(store.page(&me(), "resp_1", page(Some("x"), 2, true)).await, gone("x"), "an output is no input");
    }
}

#[tokio::test]
async fn what_is_old_goes_with_what_only_it_needs() {
    for (store, _dir) in stores(LIMITS) {
        store.put(&me(), record("resp_1", "", "a b", 0), 10).await.unwrap();
        store.put(&me(), record("conv_1", "", "c", 0), 10).await.unwrap();
        store.put(&me(), record("resp_2", "a", "d", 0), 50).await.unwrap();
        store.append(&me(), "conv_1", items("e"), 60).await.unwrap();
        assert_eq!(store.find(&me(), &["e".into(), "a".into()]).await, Ok(items("e a")));
        assert_eq!(store.expire(110).await, Ok(0));
        assert_eq!(store.expire(111).await, Ok(1));
        assert_eq!(history(&*store, "resp_1", Part::All).await, gone("resp_1"));
        assert_eq!(history(&*store, "resp_2", Part::All).await.unwrap(), "a d");
        assert_eq!(history(&*store, "conv_1", Part::All).await.unwrap(), "c e");
        assert_eq!(store.find(&me(), &["a".into(), "b".into()]).await, gone("b"));
        assert_eq!(store.expire(1000).await, Ok(2));
    }
}

#[tokio::test]
async fn the_oldest_make_room_for_the_newest() {
    for (store, _dir) in stores(Limits { bytes: 1 << 20, ..LIMITS }) {
        let big = |n: u64| NewRecord {
            items: vec![Item { id: format!("item_{n}"), body: "x".repeat(100 << 10) }],
            ..record(&format!("resp_{n}"), "", "", 0)
        };
        for n in 0..30 {
            store.put(&me(), big(n), n).await.unwrap();
        }
        let mut kept = 0;
        for n in 0..30 {
            let loaded = history(&*store, &format!("resp_{n}"), Part::All).await;
            assert!(kept == 0 || loaded.is_ok(), "resp_{n} is newer than one that was kept");
            kept += u64::from(loaded.is_ok());
        }
        assert!((8..=10).contains(&kept), "{kept} of 100 KiB in 1 MiB");
        let huge = NewRecord { items: vec![Item { id: "huge".into(), body: "x".repeat(3 << 20) }], ..record("resp_huge", "", "", 0) };
        store.put(&me(), huge, 40).await.unwrap();
        assert_eq!(history(&*store, "resp_huge", Part::All).await.unwrap(), "huge");
        assert_eq!(history(&*store, "resp_29", Part::All).await, gone("resp_29"));
    }
}

#[tokio::test]
async fn a_file_outlives_its_process_and_belongs_to_one() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.sqlite");
    let store = Sqlite::open(&path, LIMITS).unwrap();
    store.put(&me(), record("resp_1", "", "a b", 1), 0).await.unwrap();
    let second = Sqlite::open(&path, LIMITS).unwrap_err().to_string();
    assert!(second.contains("store.sqlite") && second.contains("data directory of its own"), "{second}");
    drop(store);
    let store = Sqlite::open(&path, LIMITS).unwrap();
    assert_eq!(history(&store, "resp_1", Part::All).await.unwrap(), "a b");
    drop(store);
    std::fs::write(&path, "This is no database, and far longer than its header would have to be. ".repeat(20)).unwrap();
    assert!(Sqlite::open(&path, LIMITS).unwrap_err().to_string().contains("store.sqlite"));
}
