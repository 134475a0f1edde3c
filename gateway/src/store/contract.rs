//! The contract of every store, run on each: PostgreSQL is a real server (`server`).

mod server;

use super::{
    Addition, Cut, Erasing, Held, Item, ItemPage, Kind, Limits, NewRecord, Owner, PAGE_BYTES_MAX, Page, Part, Record, RecordPage, Rewrite,
    Store, StoreError, Stored, Summary, Totals, Whose,
    postgres::{self, Postgres},
    sqlite::{self, Sqlite},
};
use server::Server;
use std::{
    any::Any,
    sync::Arc,
    time::{Duration, Instant},
};

const LIMITS: Limits = Limits { bytes: 1 << 30, history_bytes: 1 << 30 };

/// Each kind of store, for one scenario, with the resources that it needs.
async fn stores(limits: Limits) -> Vec<(Arc<dyn Store>, Box<dyn Any>)> {
    let dir = tempfile::tempdir().unwrap();
    let sqlite = Sqlite::open(&dir.path().join("new/store.sqlite"), limits).unwrap();
    let server = Server::shared().await;
    let postgres = Postgres::new(server.database().await.parse().unwrap(), limits);
    vec![
        (Arc::new(Sqlite::in_memory(limits).unwrap()), Box::new(())),
        (Arc::new(sqlite), Box::new(dir)),
        (Arc::new(postgres), Box::new(server)),
    ]
}

fn me() -> Owner {
    Owner("me".into())
}

fn item(id: &str) -> Item {
    Item { id: id.into(), body: format!(r#"{{"id":"{id}"}}"#), tokens: id.len() as u32 }
}

fn items(ids: &str) -> Vec<Item> {
    ids.split_whitespace().map(item).collect()
}

/// A record with new `items`, the last `outputs` of which are output.
fn record(id: &str, earlier: &str, new: &str, outputs: usize) -> NewRecord {
    NewRecord {
        id: id.into(),
        kind: if id.starts_with("conv_") { Kind::Conversation } else { Kind::Response },
        body: body(id),
        earlier: earlier.split_whitespace().map(str::to_owned).collect(),
        items: items(new),
        outputs,
        conversation: None,
    }
}

fn body(id: &str) -> String {
    format!("{{\"record\":\"{id}\"}}")
}

fn ids(items: &[Item]) -> String {
    items.iter().map(|item| item.id.as_str()).collect::<Vec<_>>().join(" ")
}

/// Calls without a bound.
trait Whole {
    fn load(&self, owner: &Owner, id: &str, part: Part) -> Stored<'_, Record>;
    fn find(&self, owner: &Owner, ids: &[String]) -> Stored<'_, Vec<Item>>;
}

impl<S: Store + ?Sized> Whole for S {
    fn load(&self, owner: &Owner, id: &str, part: Part) -> Stored<'_, Record> {
        self.load_within(owner, id, part, u64::MAX)
    }

    fn find(&self, owner: &Owner, ids: &[String]) -> Stored<'_, Vec<Item>> {
        self.find_within(owner, ids, u64::MAX)
    }
}

async fn history(store: &dyn Store, id: &str, part: Part) -> Result<String, StoreError> {
    store.load(&me(), id, part).await.map(|record| ids(&record.items))
}

fn gone<T>(id: &str) -> Result<T, StoreError> {
    Err(StoreError::NotFound(id.into()))
}

#[tokio::test]
async fn erasing_takes_all_of_a_user_or_a_tenant_and_nothing_of_others() {
    for (store, _dir) in stores(LIMITS).await {
        let owners = ["acme", "acme/ann", "acme/ann/x", "acme/annie", "acme2", "acme2/ann"].map(|owner| Owner(owner.into()));
        for owner in &owners {
            // More than one transaction takes.
            for number in 0..130 {
                store.put(owner, record(&format!("resp_{number}"), "", &format!("item_{number}"), 1), 0).await.unwrap();
            }
            store.put(owner, record("conv_1", "item_0", "msg_own", 0), 0).await.unwrap();
            let fact = NewRecord { id: "mem_1".into(), kind: Kind::Memory, body: body("mem_1"), ..NewRecord::default() };
            store.put(owner, fact, 0).await.unwrap();
        }
        let all = Held { responses: 130, conversations: 1, memories: 1 };
        let acme_owners = async |after: Option<&str>, limit| {
            let whose = Whose { tenant: "acme".into(), user: None };
            let found = store.owners(&whose, after.map(str::to_owned), limit).await.unwrap();
            found.into_iter().map(|owner| owner.0).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(acme_owners(None, 2).await, "acme acme/ann");
        assert_eq!(acme_owners(Some("acme/ann"), 9).await, "acme/ann/x acme/annie");
        let (none, both) = (Held::default(), Held { responses: 3 * 130, conversations: 3, memories: 3 });
        let ann = Whose { tenant: "acme".into(), user: Some("ann".into()) };
        let acme = Whose { tenant: "acme".into(), user: None };
        let erase = async |whose: &Whose, erasing| store.erase(whose, erasing).await.unwrap();
        assert_eq!(erase(&ann, Erasing::Count).await, all);
        assert_eq!(erase(&ann, Erasing::Remove).await, all);
        assert_eq!((erase(&ann, Erasing::Count).await, erase(&ann, Erasing::Remove).await), (none, none), "and nothing is left");
        assert_eq!(store.find(&owners[1], &["item_0".into()]).await, gone("item_0"), "items go with the last record that names them");
        assert_eq!(erase(&acme, Erasing::Count).await, both);
        assert_eq!(erase(&acme, Erasing::Remove).await, both);
        assert_eq!(erase(&acme, Erasing::Count).await, none);
        for other in &owners[4..] {
            assert_eq!(ids(&store.load(other, "conv_1", Part::All).await.unwrap().items), "item_0 msg_own", "{other:?}");
        }
        let both = Held { responses: 2 * 130, conversations: 2, memories: 2 };
        assert_eq!(erase(&Whose { tenant: "acme2".into(), user: None }, Erasing::Count).await, both);
        // Records that are stored afterwards are the user's again.
        store.put(&owners[1], record("resp_new", "", "item_0", 1), 0).await.unwrap();
        assert_eq!(erase(&ann, Erasing::Count).await, Held { responses: 1, ..none });
    }
}

#[tokio::test]
async fn an_erased_text_is_not_in_the_file_any_more() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.sqlite");
    let store = Sqlite::open(&path, LIMITS).unwrap();
    let (ann, bob) = (Owner("acme/ann".into()), Owner("acme/bob".into()));
    let secret = |owner: &str| Item { id: "a".into(), body: format!("the secret of {owner} {}", "x".repeat(5000)), tokens: 1 };
    for (owner, name) in [(&ann, "ann"), (&bob, "bob")] {
        store.put(owner, NewRecord { items: vec![secret(name)], ..record("resp_1", "", "", 0) }, 0).await.unwrap();
    }
    store.erase(&Whose { tenant: "acme".into(), user: Some("ann".into()) }, Erasing::Remove).await.unwrap();
    let files = std::fs::read_dir(dir.path()).unwrap().map(|file| std::fs::read(file.unwrap().path()).unwrap());
    let text = files.map(|bytes| String::from_utf8_lossy(&bytes).into_owned()).collect::<String>();
    assert!(!text.contains("the secret of ann") && text.contains("the secret of bob"));
}

#[tokio::test]
async fn a_response_and_the_next_turn() {
    for (store, _dir) in stores(LIMITS).await {
        store.put(&me(), record("resp_1", "", "a b", 1), 0).await.unwrap();
        store.put(&me(), record("resp_2", "a b", "c d e", 2), 1).await.unwrap();
        let one = store.load(&me(), "resp_1", Part::All).await.unwrap();
        assert_eq!((one.id.as_str(), one.body, one.updated, one.items), ("resp_1", body("resp_1"), 0, items("a b")));
        for (part, expected) in [(Part::Nothing, ""), (Part::Input, "a b c"), (Part::Output, "d e"), (Part::All, "a b c d e")] {
            assert_eq!(history(&*store, "resp_2", part).await.unwrap(), expected, "{part:?}");
        }
    }
}

#[tokio::test]
async fn what_is_not_there_is_said() {
    for (store, _dir) in stores(LIMITS).await {
        store.put(&me(), record("resp_1", "", "a", 0), 0).await.unwrap();
        assert_eq!(history(&*store, "resp_9", Part::All).await, gone("resp_9"));
        assert_eq!(store.delete(&me(), "resp_9").await, gone("resp_9"));
        assert_eq!(store.update(&me(), "resp_9", "{}".into(), 0).await, gone("resp_9"));
        assert_eq!(store.append(&me(), "resp_9", Addition::of(items("x")), 0).await, gone("resp_9"));
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
    for (store, _dir) in stores(LIMITS).await {
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
    for (store, _dir) in stores(LIMITS).await {
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
    for (store, _dir) in stores(LIMITS).await {
        store.put(&me(), record("conv_1", "", "a", 0), 0).await.unwrap();
        let turn = |id, earlier, new| NewRecord { conversation: Some(("conv_1".into(), None)), ..record(id, earlier, new, 1) };
        store.put(&me(), turn("resp_1", "a", "b c"), 1).await.unwrap();
        store.append(&me(), "conv_1", Addition::of(items("d")), 2).await.unwrap();
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
    let page = |after: Option<&str>, limit, descending| Page { after: after.map(str::to_owned), limit, descending };
    for (store, _dir) in stores(LIMITS).await {
        store.put(&me(), record("resp_1", "", "a b c d e x", 1), 0).await.unwrap();
        for (after, limit, descending, expected, has_more) in [
            (None, 2, false, "a b", true),
            (Some("b"), 3, false, "c d e", false),
            (Some("e"), 3, false, "", false),
            (None, 2, true, "e d", true),
            (Some("d"), 2, true, "c b", true),
            (Some("b"), 2, true, "a", false),
        ] {
            let ItemPage { items, has_more: more } =
                store.page(&me(), "resp_1", Part::Input, page(after, limit, descending)).await.unwrap();
            assert_eq!((ids(&items).as_str(), more), (expected, has_more), "{after:?} {limit} {descending}");
        }
        assert_eq!(store.page(&me(), "resp_1", Part::Input, page(Some("x"), 2, true)).await, gone("x"), "an output is no input");
    }
}

#[tokio::test]
async fn an_owners_conversations_are_listed_as_they_were_put() {
    let page = |after: Option<&str>, limit, descending| Page { after: after.map(str::to_owned), limit, descending };
    for (store, _dir) in stores(LIMITS).await {
        for n in 1..=5 {
            store.put(&me(), record(&format!("conv_{n}"), "", "", 0), n).await.unwrap();
            store.put(&me(), record(&format!("resp_{n}"), "", "", 0), n).await.unwrap();
        }
        store.put(&Owner("other".into()), record("conv_6", "", "", 0), 6).await.unwrap();
        store.append(&me(), "conv_1", Addition::of(items("msg_1")), 9).await.unwrap();
        store.delete(&me(), "conv_4").await.unwrap();
        for (after, limit, descending, expected, more) in [
            (None, 2, true, "conv_5 conv_3", true),
            (Some("conv_3"), 2, true, "conv_2 conv_1", false),
            (Some("conv_1"), 2, true, "", false),
            (None, 9, false, "conv_1 conv_2 conv_3 conv_5", false),
            (Some("conv_2"), 1, false, "conv_3", true),
        ] {
            let RecordPage { records, has_more } = store.list(&me(), Kind::Conversation, page(after, limit, descending)).await.unwrap();
            let listed: Vec<_> = records.iter().map(|record| record.id.as_str()).collect();
            assert_eq!((listed.join(" ").as_str(), has_more), (expected, more), "{after:?} {limit} {descending}");
        }
        for stranger in ["conv_4", "conv_6", "resp_1"] {
            assert_eq!(store.list(&me(), Kind::Conversation, page(Some(stranger), 2, true)).await, gone(stranger));
        }
        let first = store.list(&me(), Kind::Conversation, page(None, 1, false)).await.unwrap().records.remove(0);
        let totals = Totals { messages: 1, tokens: 5 };
        assert_eq!(first, Record { id: "conv_1".into(), body: body("conv_1"), updated: 9, totals, summary: None, items: vec![] });
    }
}

#[tokio::test]
async fn a_history_gets_another_end_or_stays() {
    for (store, _dir) in stores(LIMITS).await {
        store.put(&me(), record("conv_1", "", "msg_1 msg_2 rs_3 msg_4", 0), 0).await.unwrap();
        store.put(&me(), record("conv_2", "msg_1 msg_2", "", 0), 0).await.unwrap();
        let cut = |keep, of| Some(Cut { keep, of });
        let late = Addition { cut: cut(1, 3), ..Addition::of(items("msg_5")) };
        assert_eq!(store.append(&me(), "conv_1", late, 1).await, Err(StoreError::Changed("conv_1".into())));
        assert_eq!(store.find(&me(), &["msg_5".into()]).await, gone("msg_5"), "nothing of it was kept");
        let rewrite = Rewrite { from: body("conv_1"), to: "{}".into() };
        let addition = Addition { cut: cut(1, 4), items: items("rs_6 msg_7"), body: Some(rewrite.clone()) };
        store.append(&me(), "conv_1", addition, 2).await.unwrap();
        let one = store.load(&me(), "conv_1", Part::All).await.unwrap();
        assert_eq!((ids(&one.items).as_str(), one.body.as_str(), one.updated), ("msg_1 rs_6 msg_7", "{}", 2));
        assert_eq!(one.totals, Totals { messages: 2, tokens: 5 + 4 + 5 });
        assert_eq!(history(&*store, "conv_2", Part::All).await.unwrap(), "msg_1 msg_2", "what another history names stays");
        assert_eq!(store.find(&me(), &["msg_4".into()]).await, gone("msg_4"), "what no history names is gone");
        let other = Some(Rewrite { to: "{\"late\":1}".into(), ..rewrite });
        store.append(&me(), "conv_1", Addition { body: other, ..Addition::default() }, 3).await.unwrap();
        store.remove(&me(), "conv_1", "msg_1").await.unwrap();
        let one = store.load(&me(), "conv_1", Part::Nothing).await.unwrap();
        assert_eq!((one.body.as_str(), one.totals), ("{}", Totals { messages: 1, tokens: 4 + 5 }), "another's change is not undone");
    }
}

#[tokio::test]
async fn a_summary_lives_as_long_as_all_that_it_tells_of() {
    let summary = |body: &str, items, last: &str| Summary { body: body.into(), items, last: last.into() };
    for (store, _dir) in stores(LIMITS).await {
        let kept = async || store.load(&me(), "conv_1", Part::Nothing).await.unwrap().summary;
        store.put(&me(), record("conv_1", "", "msg_1 msg_2 msg_3 msg_4 msg_5", 0), 7).await.unwrap();
        assert_eq!(kept().await, None);
        assert_eq!(store.summarize(&me(), "conv_9", summary("[]", 1, "msg_1")).await, gone("conv_9"));
        assert_eq!(store.summarize(&Owner("other".into()), "conv_1", summary("[]", 1, "msg_1")).await, gone("conv_1"));
        for (items, last) in [(3, "msg_2"), (0, "msg_1"), (6, "msg_5"), (2, "msg_x")] {
            let late = store.summarize(&me(), "conv_1", summary("[]", items, last)).await;
            assert_eq!(late, Err(StoreError::Changed("conv_1".into())), "{items} {last}");
        }
        store.summarize(&me(), "conv_1", summary("one", 2, "msg_2")).await.unwrap();
        store.summarize(&me(), "conv_1", summary("three", 3, "msg_3")).await.unwrap();
        store.update(&me(), "conv_1", "{}".into(), 8).await.unwrap();
        store.append(&me(), "conv_1", Addition { cut: Some(Cut { keep: 4, of: 5 }), ..Addition::of(items("msg_6")) }, 8).await.unwrap();
        store.remove(&me(), "conv_1", "msg_4").await.unwrap();
        let whole = store.load(&me(), "conv_1", Part::All).await.unwrap();
        assert_eq!((whole.summary.as_deref(), ids(&whole.items).as_str(), whole.updated), (Some("three"), "msg_1 msg_2 msg_3 msg_6", 8));
        let page = Page { after: None, limit: 1, descending: true };
        assert_eq!(store.list(&me(), Kind::Conversation, page).await.unwrap().records[0].summary, None, "lists do not show it");
        store.remove(&me(), "conv_1", "msg_1").await.unwrap();
        assert_eq!(kept().await, None, "a message that it tells of is gone");
        store.summarize(&me(), "conv_1", summary("two", 2, "msg_3")).await.unwrap();
        store
            .append(&me(), "conv_1", Addition { cut: Some(Cut { keep: 1, of: 3 }), ..Addition::of(items("msg_7 msg_8")) }, 9)
            .await
            .unwrap();
        assert_eq!(kept().await, None, "what it told of was replaced");
        store.summarize(&me(), "conv_1", summary("all", 3, "msg_8")).await.unwrap();
        store.delete(&me(), "conv_1").await.unwrap();
        store.put(&me(), record("conv_1", "", "msg_1", 0), 10).await.unwrap();
        assert_eq!(kept().await, None);
    }
}

/// Deletes all that is older, of each kind. Returns the numbers of responses, conversations and facts.
async fn expired(store: &dyn Store, before: u64) -> [u64; 3] {
    let mut all = [0; 3];
    for (count, kind) in all.iter_mut().zip([Kind::Response, Kind::Conversation, Kind::Memory]) {
        loop {
            match store.expire(kind, before).await.unwrap() {
                0 => break,
                some => *count += some,
            }
        }
    }
    all
}

#[tokio::test]
async fn facts_age_from_when_they_were_stored_and_make_no_room() {
    let fact = |id: &str| NewRecord { kind: Kind::Memory, ..record(id, "", "", 0) };
    for (store, _dir) in stores(Limits { bytes: 1 << 20, ..LIMITS }).await {
        store.put(&me(), fact("mem_1"), 7).await.unwrap();
        store.put(&me(), fact("mem_2"), 8).await.unwrap();
        store.put(&me(), record("conv_1", "", "a", 0), 1).await.unwrap();
        store.update(&me(), "mem_1", "{\"text\":\"other\"}".into(), 9).await.unwrap();
        assert_eq!(expired(&*store, 7).await, [0, 1, 0], "the conversation");
        for n in 0..2 {
            let huge = Item { id: format!("huge_{n}"), body: "x".repeat(2 << 20), tokens: 0 };
            store.put(&me(), NewRecord { items: vec![huge], ..record(&format!("resp_{n}"), "", "", 0) }, 1_000_000).await.unwrap();
            assert_eq!(history(&*store, &format!("resp_{n}"), Part::All).await.unwrap(), format!("huge_{n}"), "the newest stays");
        }
        assert_eq!(history(&*store, "resp_0", Part::All).await, gone("resp_0"));
        let page = || Page { after: None, limit: 9, descending: false };
        let listed = store.list(&me(), Kind::Memory, page()).await.unwrap().records;
        assert_eq!(listed.iter().map(|record| record.id.as_str()).collect::<Vec<_>>(), ["mem_1", "mem_2"]);
        assert_eq!(listed[0].body, "{\"text\":\"other\"}");
        assert_eq!(store.list(&Owner("other".into()), Kind::Memory, page()).await.unwrap().records, []);
        assert_eq!(store.delete(&Owner("other".into()), "mem_1").await, gone("mem_1"));
        assert_eq!(expired(&*store, 8).await, [0, 0, 1], "and its change made it no younger");
        assert_eq!(store.load(&me(), "mem_1", Part::Nothing).await, gone("mem_1"));
        store.delete(&me(), "mem_2").await.unwrap();
        assert_eq!(store.load(&me(), "mem_2", Part::Nothing).await, gone("mem_2"));
    }
}

#[tokio::test]
async fn what_is_old_goes_with_what_only_it_needs() {
    for (store, _dir) in stores(LIMITS).await {
        store.put(&me(), record("resp_1", "", "a b", 0), 10).await.unwrap();
        store.put(&me(), record("conv_1", "", "c", 0), 10).await.unwrap();
        store.put(&me(), record("resp_2", "a", "d", 0), 50).await.unwrap();
        store.append(&me(), "conv_1", Addition::of(items("e")), 60).await.unwrap();
        assert_eq!(store.find(&me(), &["e".into(), "a".into()]).await, Ok(items("e a")));
        assert_eq!(expired(&*store, 10).await, [0; 3]);
        assert_eq!(expired(&*store, 11).await, [1, 0, 0]);
        assert_eq!(history(&*store, "resp_1", Part::All).await, gone("resp_1"));
        assert_eq!(history(&*store, "resp_2", Part::All).await.unwrap(), "a d");
        assert_eq!(history(&*store, "conv_1", Part::All).await.unwrap(), "c e");
        assert_eq!(store.find(&me(), &["a".into(), "b".into()]).await, gone("b"));
        assert_eq!(expired(&*store, 900).await, [1, 1, 0]);
    }
}

#[tokio::test]
async fn a_bounded_number_goes_at_a_time_and_of_one_kind_only() {
    for (store, _dir) in stores(LIMITS).await {
        for number in 0..130 {
            store.put(&me(), record(&format!("resp_{number}"), "", "a", 1), number).await.unwrap();
            store.put(&me(), record(&format!("conv_{number}"), "", "a", 0), number).await.unwrap();
        }
        let expire = async |before| store.expire(Kind::Response, before).await.unwrap();
        assert_eq!([expire(120).await, expire(120).await, expire(120).await], [100, 20, 0]);
        assert_eq!(history(&*store, "resp_119", Part::All).await, gone("resp_119"));
        assert_eq!(history(&*store, "resp_120", Part::All).await.unwrap(), "a");
        assert_eq!(history(&*store, "conv_0", Part::All).await.unwrap(), "a");
    }
}

#[tokio::test]
async fn the_oldest_make_room_for_the_newest() {
    for (store, _dir) in stores(Limits { bytes: 1 << 20, ..LIMITS }).await {
        let big = |n: u64| NewRecord {
            items: vec![Item { id: format!("item_{n}"), body: "x".repeat(100 << 10), tokens: 0 }],
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
        let huge =
            NewRecord { items: vec![Item { id: "huge".into(), body: "x".repeat(3 << 20), tokens: 0 }], ..record("resp_huge", "", "", 0) };
        store.put(&me(), huge, 40).await.unwrap();
        assert_eq!(history(&*store, "resp_huge", Part::All).await.unwrap(), "huge");
        assert_eq!(history(&*store, "resp_29", Part::All).await, gone("resp_29"));
    }
}

fn big(id: &str, bytes: usize) -> NewRecord {
    NewRecord { items: vec![Item { id: format!("item_{id}"), body: "x".repeat(bytes), tokens: 0 }], ..record(id, "", "", 0) }
}

#[tokio::test]
async fn a_flood_of_one_tenant_drives_out_nothing_of_another() {
    let owner = |name: &str| Owner(name.into());
    for (store, _dir) in stores(Limits { bytes: 4 << 20, ..LIMITS }).await {
        for n in 0..5 {
            store.put(&owner("paid/ann"), big(&format!("conv_{n}"), 50 << 10), 0).await.unwrap();
        }
        store.put(&owner("paid/ann"), NewRecord { kind: Kind::Memory, ..record("mem_1", "", "", 0) }, 0).await.unwrap();
        store.put(&owner("small"), record("conv_1", "", "a", 0), 0).await.unwrap();
        // Both by new records, of many users of one tenant, and by a growing conversation.
        store.put(&owner("free"), record("conv_1", "", "", 0), 1).await.unwrap();
        for n in 0..40 {
            store.put(&owner(&format!("free/user_{}", n % 3)), big(&format!("resp_{n}"), 500 << 10), 10 + n).await.unwrap();
            let more = Item { id: format!("more_{n}"), body: "x".repeat(20 << 10), tokens: 0 };
            let added = store.append(&owner("free"), "conv_1", Addition::of(vec![more]), 10 + n).await;
            assert!(added.is_ok() || added == gone("conv_1"), "{added:?}");
        }
        for n in 0..5 {
            assert!(store.load(&owner("paid/ann"), &format!("conv_{n}"), Part::All).await.is_ok(), "{store:?} {n}");
        }
        assert!(store.load(&owner("paid/ann"), "mem_1", Part::All).await.is_ok());
        assert!(store.load(&owner("small"), "conv_1", Part::All).await.is_ok());
        assert!(store.load(&owner("free/user_0"), "resp_39", Part::All).await.is_ok(), "its newest is there");
        assert_eq!(store.load(&owner("free/user_0"), "resp_0", Part::All).await, gone("resp_0"), "its oldest is not");
    }
}

#[tokio::test]
async fn room_that_was_borrowed_is_given_back() {
    let (free, paid) = (Owner("free".into()), Owner("paid".into()));
    for (store, _dir) in stores(Limits { bytes: 4 << 20, ..LIMITS }).await {
        for n in 0..20 {
            store.put(&free, big(&format!("resp_{n}"), 300 << 10), n).await.unwrap();
        }
        for n in 0..4 {
            store.put(&paid, big(&format!("resp_{n}"), 300 << 10), 100 + n).await.unwrap();
        }
        for n in 0..4 {
            assert!(store.load(&paid, &format!("resp_{n}"), Part::Nothing).await.is_ok(), "{store:?} {n}: less than its share");
        }
        assert!(store.load(&free, "resp_19", Part::Nothing).await.is_ok());
        assert_eq!(store.load(&free, "resp_10", Part::Nothing).await, gone("resp_10"));
    }
}

#[tokio::test]
async fn what_does_not_fit_into_a_share_is_refused_and_changes_nothing() {
    let (free, paid) = (Owner("free".into()), Owner("paid".into()));
    for (store, _dir) in stores(Limits { bytes: 2 << 20, ..LIMITS }).await {
        for n in 0..9 {
            store.put(&paid, big(&format!("resp_{n}"), 100 << 10), 0).await.unwrap();
        }
        store.put(&free, big("conv_1", 100 << 10), 1).await.unwrap();
        store.put(&free, big("conv_2", 100 << 10), 2).await.unwrap();
        assert_eq!(store.put(&free, big("conv_3", 3 << 20), 3).await, Err(StoreError::Full));
        let more = Item { id: "more".into(), body: "x".repeat(3 << 20), tokens: 0 };
        assert_eq!(store.append(&free, "conv_2", Addition::of(vec![more]), 3).await, Err(StoreError::Full));
        assert_eq!(store.load(&free, "conv_3", Part::All).await, gone("conv_3"));
        for (id, items) in [("conv_1", "item_conv_1"), ("conv_2", "item_conv_2")] {
            assert_eq!(store.load(&free, id, Part::All).await.map(|record| ids(&record.items)).unwrap(), items, "{store:?}");
        }
        for n in 0..9 {
            assert!(store.load(&paid, &format!("resp_{n}"), Part::All).await.is_ok());
        }
        store.delete(&free, "conv_1").await.unwrap();
    }
}

#[tokio::test]
async fn facts_that_fill_a_share_are_refused_and_drive_out_nothing() {
    let (free, paid) = (Owner("free".into()), Owner("paid".into()));
    let fact = |n: usize| NewRecord { kind: Kind::Memory, body: "x".repeat(100 << 10), ..record(&format!("mem_{n}"), "", "", 0) };
    for (store, _dir) in stores(Limits { bytes: 2 << 20, ..LIMITS }).await {
        for n in 0..5 {
            store.put(&paid, big(&format!("resp_{n}"), 150 << 10), 0).await.unwrap();
        }
        let mut put = 0;
        while store.put(&free, fact(put), 1).await.is_ok() {
            put += 1;
            assert!(put < 20, "{store:?}");
        }
        assert_eq!(store.put(&free, fact(put), 1).await, Err(StoreError::Full));
        for n in 0..5 {
            assert!(store.load(&paid, &format!("resp_{n}"), Part::All).await.is_ok(), "{store:?} {n}");
        }
        store.delete(&free, "mem_0").await.unwrap();
        store.put(&free, fact(put), 1).await.unwrap();
    }
}

#[tokio::test]
async fn a_history_has_so_many_bytes() {
    for (store, _dir) in stores(Limits { history_bytes: 1000, ..LIMITS }).await {
        let too_large = |id: &str| Err(StoreError::TooLarge { id: id.into(), max: 1000 });
        store.put(&me(), big("conv_1", 600), 0).await.unwrap();
        assert_eq!(store.put(&me(), big("conv_2", 1001), 0).await, too_large("conv_2"));
        let more = |bytes: usize| Addition::of(vec![Item { id: format!("more_{bytes}"), body: "x".repeat(bytes), tokens: 0 }]);
        assert_eq!(store.append(&me(), "conv_1", more(401), 1).await, too_large("conv_1"));
        store.append(&me(), "conv_1", more(400), 1).await.unwrap();
        let twice = NewRecord { earlier: vec!["item_conv_1".into(), "item_conv_1".into()], ..record("resp_1", "", "", 0) };
        assert_eq!(store.put(&me(), twice, 1).await, too_large("resp_1"), "each place counts");
        let turn = NewRecord { conversation: Some(("conv_1".into(), None)), ..record("resp_2", "", "b", 0) };
        assert_eq!(store.put(&me(), turn, 1).await, too_large("conv_1"));
        assert_eq!(history(&*store, "conv_1", Part::All).await.unwrap(), "item_conv_1 more_400");
        assert_eq!(history(&*store, "resp_2", Part::All).await, gone("resp_2"));
        store.append(&me(), "conv_1", Addition { cut: Some(Cut { keep: 1, of: 2 }), ..more(300) }, 2).await.unwrap();
    }
}

#[tokio::test]
async fn a_page_has_so_many_bytes_and_one_item_at_least() {
    for (store, _dir) in stores(LIMITS).await {
        let sized = |id: &str, bytes: u64| Item { id: id.into(), body: "x".repeat(bytes as usize), tokens: 0 };
        let items =
            vec![sized("a", 10), sized("b", PAGE_BYTES_MAX), sized("c", PAGE_BYTES_MAX + 1), sized("d", 1), sized("e", PAGE_BYTES_MAX - 1)];
        store.put(&me(), NewRecord { items, ..record("conv_1", "", "", 0) }, 0).await.unwrap();
        for (descending, pages) in [(false, ["a", "b", "c", "d e"]), (true, ["e d", "c", "b", "a"])] {
            let mut after = None;
            for (place, expected) in pages.iter().enumerate() {
                let ItemPage { items, has_more } =
                    store.page(&me(), "conv_1", Part::All, Page { after: after.clone(), limit: 100, descending }).await.unwrap();
                assert_eq!((ids(&items).as_str(), has_more), (*expected, place < 3), "{store:?}");
                after = items.last().map(|item| item.id.clone());
            }
        }
    }
}

/// The counters of bytes are right after any change of records.
#[tokio::test]
async fn what_is_held_is_counted_and_forgotten() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.sqlite");
    let sqlite = Sqlite::open(&path, LIMITS).unwrap();
    let server = Server::shared().await;
    let address = server.database().await;
    let postgres = Postgres::new(address.parse().unwrap(), LIMITS);
    for store in [&sqlite as &dyn Store, &postgres] {
        for owner in ["acme/ann", "acme/bob", "other", ""] {
            let owner = Owner(owner.into());
            store.put(&owner, record("conv_1", "", "a b c", 0), 0).await.unwrap();
            store.put(&owner, record("conv_2", "a b", "d", 0), 0).await.unwrap();
            store.update(&owner, "conv_1", "{\"another\":\"body\"}".into(), 1).await.unwrap();
            store.summarize(&owner, "conv_1", Summary { body: "long".repeat(9), items: 3, last: "c".into() }).await.unwrap();
            store.append(&owner, "conv_1", Addition { cut: Some(Cut { keep: 2, of: 3 }), ..Addition::of(items("e f")) }, 2).await.unwrap();
            store.remove(&owner, "conv_1", "e").await.unwrap();
            store.delete(&owner, "conv_2").await.unwrap();
        }
        for owner in ["acme/bob", "other", ""] {
            store.delete(&Owner(owner.into()), "conv_1").await.unwrap();
        }
    }
    // The rest: a record with a longer body, and the items `a`, `b` and `f`.
    let item = |id: &str| 128 + item(id).body.len() as i64;
    let left = 256 + "{\"another\":\"body\"}".len() as i64 + item("a") + item("b") + item("f");
    drop(sqlite);
    let connection = rusqlite::Connection::open(&path).unwrap();
    let mut select = connection.prepare("SELECT tenant, bytes FROM shares WHERE bytes <> 0").unwrap();
    let held: Vec<(String, i64)> = select.query_map([], |row| Ok((row.get(0)?, row.get(1)?))).unwrap().map(Result::unwrap).collect();
    let history: i64 = connection.query_row("SELECT octet_length(history) FROM records", [], |row| row.get(0)).unwrap();
    assert_eq!(held, [("acme".to_owned(), left + history)]);
    let (client, connection) = tokio_postgres::connect(&address, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let select = "SELECT tenant, sum(bytes)::BIGINT, (SELECT sum(bytes)::BIGINT FROM tidemill.stored) FROM tidemill.shares
         GROUP BY tenant HAVING sum(bytes) <> 0";
    let held: Vec<(String, i64, i64)> =
        client.query(select, &[]).await.unwrap().iter().map(|row| (row.get(0), row.get(1), row.get(2))).collect();
    assert_eq!(held, [("acme".to_owned(), left, left)]);
}

#[tokio::test]
async fn a_file_of_version_1_goes_on() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.sqlite");
    let version_1 = "
        CREATE TABLE records (
            number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, used INTEGER NOT NULL,
            body TEXT NOT NULL, history TEXT NOT NULL, outputs INTEGER NOT NULL, UNIQUE (owner, id));
        CREATE INDEX records_by_age ON records (used, number);
        CREATE TABLE items (number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, body TEXT NOT NULL, UNIQUE (owner, id));
        CREATE TABLE uses (item INTEGER PRIMARY KEY, places INTEGER NOT NULL);
        PRAGMA user_version = 1;
        INSERT INTO records VALUES (1, 'me', 'conv_1', 7, '{}', '[1,2]', 0), (2, 'me', 'resp_1', 8, '{}', '[1]', 1);
        INSERT INTO items VALUES (1, 'me', 'msg_1', '{\"id\":\"msg_1\"}'), (2, 'me', 'rs_2', '{\"id\":\"rs_2\"}');
        INSERT INTO uses VALUES (1, 2), (2, 1);";
    rusqlite::Connection::open(&path).unwrap().execute_batch(version_1).unwrap();
    for _ in 0..2 {
        let store = Sqlite::open(&path, LIMITS).unwrap();
        let page = Page { after: None, limit: 9, descending: true };
        let RecordPage { records, .. } = store.list(&me(), Kind::Conversation, page).await.unwrap();
        assert_eq!((records.len(), records[0].id.as_str(), records[0].totals.messages), (1, "conv_1", 1));
        assert_eq!(history(&store, "conv_1", Part::All).await.unwrap(), "msg_1 rs_2");
        assert_eq!(history(&store, "resp_1", Part::Output).await.unwrap(), "msg_1");
    }
    let file = rusqlite::Connection::open(&path).unwrap();
    for (kind, index) in [(Kind::Response, "records_by_kind_and_age"), (Kind::Memory, "memories_by_age")] {
        let explain = format!("EXPLAIN QUERY PLAN {}", sqlite::older(kind));
        let plan: String = file.query_row(&explain, [9, 9], |row| row.get(3)).unwrap();
        assert!(plan.contains(&format!("INDEX {index} (")) && plan.ends_with("<?)"), "{plan}");
    }
    drop(file);
    let store = Sqlite::open(&path, LIMITS).unwrap();
    assert_eq!(expired(&store, 8).await, [0, 1, 0]);
}

#[tokio::test]
async fn a_fact_of_an_earlier_version_has_the_age_that_its_body_says() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("store.sqlite");
    drop(Sqlite::open(&path, LIMITS).unwrap());
    let version_4 = "
        DROP INDEX memories_by_age; DROP INDEX records_by_kind_and_age; ALTER TABLE records DROP COLUMN created;
        CREATE INDEX records_by_age ON records (used, number);
        INSERT INTO records (owner, id, used, body, history, outputs, kind) VALUES
            ('me', 'mem_1', 9223372036854775807, '{\"created_at\":50}', '[]', 0, 2), ('me', 'mem_2', 9223372036854775807, '{', '[]', 0, 2);
        PRAGMA user_version = 4;";
    rusqlite::Connection::open(&path).unwrap().execute_batch(version_4).unwrap();
    let store = Sqlite::open(&path, LIMITS).unwrap();
    assert_eq!(expired(&store, 50).await, [0; 3]);
    assert_eq!(expired(&store, 51).await, [0, 0, 1]);
    assert_eq!(store.load(&me(), "mem_2", Part::Nothing).await.map(|record| record.id), Ok("mem_2".into()), "it counts from now on");
}

#[tokio::test]
async fn a_database_of_version_1_goes_on() {
    let server = Server::shared().await;
    let address = server.database().await;
    let (client, connection) = tokio_postgres::connect(&address, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let version_1 = "
        CREATE SCHEMA tidemill;
        CREATE TABLE tidemill.version (version INTEGER NOT NULL);
        INSERT INTO tidemill.version VALUES (1);
        CREATE TABLE tidemill.records (
            number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, used BIGINT NOT NULL,
            body TEXT NOT NULL, history BIGINT[] NOT NULL, outputs BIGINT NOT NULL,
            kind SMALLINT NOT NULL, messages BIGINT NOT NULL DEFAULT 0, tokens BIGINT NOT NULL DEFAULT 0, UNIQUE (owner, id));
        CREATE TABLE tidemill.items (
            number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, body TEXT NOT NULL,
            tokens BIGINT NOT NULL, UNIQUE (owner, id));
        CREATE TABLE tidemill.uses (item BIGINT PRIMARY KEY, places BIGINT NOT NULL);
        CREATE TABLE tidemill.stored (part INTEGER PRIMARY KEY, bytes BIGINT NOT NULL);
        INSERT INTO tidemill.items (owner, id, body, tokens) VALUES ('me', 'msg_1', '{}', 3);
        INSERT INTO tidemill.uses VALUES (1, 1);
        INSERT INTO tidemill.records (owner, id, used, body, history, outputs, kind) VALUES ('me', 'conv_1', 7, '{}', '{1}', 0, 1);";
    client.batch_execute(version_1).await.unwrap();
    for _ in 0..2 {
        let store = Postgres::new(address.parse().unwrap(), LIMITS);
        assert_eq!(history(&store, "conv_1", Part::All).await.unwrap(), "msg_1");
        store.summarize(&me(), "conv_1", Summary { body: "[]".into(), items: 1, last: "msg_1".into() }).await.unwrap();
    }
    // An earlier version goes on beside this one, and what it stores has a time, too.
    let insert =
        "INSERT INTO tidemill.records (owner, id, used, body, history, outputs, kind) VALUES ('me', 'mem_1', $1, '{}', '{}', 0, 2)";
    client.execute(insert, &[&i64::MAX]).await.unwrap();
    let store = Postgres::new(address.parse().unwrap(), LIMITS);
    assert_eq!(expired(&store, 7).await, [0, 0, 0]);
    let soon = crate::base::stamp::unix_seconds() + 60;
    assert_eq!(expired(&store, soon).await, [0, 1, 1]);
}

/// The plan of a statement says by which index its rows are found.
#[tokio::test]
async fn old_records_are_found_along_an_index_also_after_one_was_left_unfinished() {
    let server = Server::shared().await;
    let address = server.database().await;
    let store = Postgres::new(address.parse().unwrap(), LIMITS);
    store.put(&me(), record("resp_1", "", "", 0), 10).await.unwrap();
    let (client, connection) = tokio_postgres::connect(&address, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    for kind in [Kind::Response, Kind::Memory] {
        store.expire(kind, 0).await.unwrap();
    }
    // As it is after a crash.
    let cut_off = "UPDATE pg_index SET indisvalid = false WHERE indexrelid = 'tidemill.records_by_kind_and_age'::regclass";
    client.execute(cut_off, &[]).await.unwrap();
    assert_eq!(expired(&store, 11).await, [1, 0, 0]);
    client.batch_execute("SET enable_seqscan = off").await.unwrap();
    for (kind, index) in
        [(Kind::Response, "records_by_kind_and_age"), (Kind::Conversation, "records_by_kind_and_age"), (Kind::Memory, "memories_by_age")]
    {
        let select = postgres::older(kind).replace("$1", "9").replace("$2", "9");
        let plan = client.query(&format!("EXPLAIN {select}"), &[]).await.unwrap();
        let plan: Vec<String> = plan.iter().map(|row| row.get(0)).collect();
        assert!(plan.iter().any(|line| line.contains("Index Scan") && line.contains(index)), "{plan:#?}");
        assert!(!plan.iter().any(|line| line.contains("Sort")), "{plan:#?}");
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

#[tokio::test(flavor = "multi_thread", worker_threads = 4)]
async fn coordinators_share_a_database() {
    let server = Server::shared().await;
    let address = server.database().await;
    let coordinators: Vec<_> = (0..2).map(|_| Arc::new(Postgres::new(address.parse().unwrap(), LIMITS))).collect();
    coordinators[0].put(&me(), record("conv_1", "", "", 0), 0).await.unwrap();
    let tasks = (0..8).map(|n| {
        let store = Arc::clone(&coordinators[n % 2]);
        tokio::spawn(async move {
            for turn in 0..10 {
                let (user, answer) = (format!("msg_user_{n}_{turn}"), format!("msg_answer_{n}_{turn}"));
                store.append(&me(), "conv_1", Addition::of(items(&format!("{user} {answer}"))), 1).await.unwrap();
                let branch = format!("conv_{n}_{turn}");
                store.put(&me(), record(&branch, &format!("{answer} {user}"), "msg_shared", 0), 1).await.unwrap();
                if turn % 2 == 0 {
                    store.delete(&me(), &branch).await.unwrap();
                }
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.unwrap();
    }
    let whole = coordinators[1].load(&me(), "conv_1", Part::All).await.unwrap();
    assert_eq!((whole.items.len(), whole.totals.messages), (160, 160));
    for turn in whole.items.chunks(2) {
        assert_eq!(turn[0].id.replace("user", "answer"), turn[1].id, "a turn stays together");
    }
    // They sweep side by side.
    let sweeps = coordinators.iter().cloned().map(|store| tokio::spawn(async move { expired(&*store, 900).await }));
    let mut swept = 0;
    for sweep in sweeps.collect::<Vec<_>>() {
        swept += sweep.await.unwrap()[1];
    }
    // One of them may have gone without the index that the other was making.
    assert_eq!(swept + expired(&*coordinators[0], 900).await[1], 41);
    assert_eq!(coordinators[1].find(&me(), &["msg_shared".into()]).await, gone("msg_shared"));
    let (client, connection) = tokio_postgres::connect(&address, tokio_postgres::NoTls).await.unwrap();
    tokio::spawn(connection);
    let left = "SELECT (SELECT count(*) FROM tidemill.items), (SELECT count(*) FROM tidemill.uses), (SELECT sum(bytes)::BIGINT FROM tidemill.stored)";
    let left = client.query_one(left, &[]).await.unwrap();
    assert_eq!((left.get::<_, i64>(0), left.get::<_, i64>(1), left.get::<_, i64>(2)), (0, 0, 0), "nothing is left, and that is known");
}

#[tokio::test]
async fn a_server_is_reached_as_safely_as_its_address_says() {
    let server = Server::start_over_tcp(true).await;
    let [named, by_number] = [server.database_over_tcp("localhost").await, server.database_over_tcp("127.0.0.1").await];
    let authority = server.authority().display().to_string();
    let other = Server::start_over_tcp(true).await;
    let stranger = other.authority().display().to_string();
    let tried = async |address: String| {
        let store = Postgres::new(address.parse().unwrap(), LIMITS);
        let put = store.put(&Owner(address.clone()), record("resp_1", "", "a", 0), 0).await;
        let encrypted = match &put {
            Ok(()) => {
                let connection = store.connection().await;
                Some(connection.query_one("SELECT ssl FROM pg_stat_ssl WHERE pid = pg_backend_pid()", &[]).await.unwrap().get::<_, bool>(0))
            }
            Err(StoreError::Failed(reason)) => {
                assert!(
                    reason.contains("certificate") || reason.contains("TLS") || reason.contains("channel binding"),
                    "{address}: {reason}"
                );
                None
            }
            Err(error) => panic!("{address}: {error}"),
        };
        assert_eq!(put.is_ok(), encrypted.is_some());
        encrypted
    };
    for (address, encrypted) in [
        (format!("{named}?sslmode=disable"), Some(false)),
        (named.clone(), Some(true)),
        (format!("{named}?sslmode=require"), Some(true)),
        (format!("{named}?sslmode=verify-ca&sslrootcert={authority}"), Some(true)),
        (format!("{named}?sslmode=verify-full&sslrootcert={authority}"), Some(true)),
        (format!("{by_number}?sslmode=verify-ca&sslrootcert={authority}"), Some(true)),
        (format!("{by_number}?sslmode=verify-full&sslrootcert={authority}"), None),
        (format!("{named}?sslmode=verify-full&sslrootcert={stranger}"), None),
        (format!("{named}?sslmode=verify-ca&sslrootcert={stranger}"), None),
        (format!("{named}?sslmode=require&sslrootcert={stranger}"), None),
        (format!("{named}?sslrootcert=system"), None),
    ] {
        assert_eq!(tried(address.clone()).await, encrypted, "{address}");
    }
    let with_password = server.database_with_password("localhost").await;
    for (options, encrypted) in [
        ("sslmode=require&channel_binding=require", Some(true)),
        ("sslmode=disable&channel_binding=prefer", Some(false)),
        ("sslmode=disable&channel_binding=require", None),
    ] {
        assert_eq!(tried(format!("{with_password}?{options}")).await, encrypted, "{options}");
    }
    let plain = Server::start_over_tcp(false).await;
    let address = plain.database_over_tcp("localhost").await;
    assert_eq!(tried(address.clone()).await, Some(false), "here, TLS is used where there is some");
    for mode in ["require".to_owned(), format!("verify-full&sslrootcert={authority}")] {
        assert_eq!(tried(format!("{address}?sslmode={mode}")).await, None, "{mode}");
    }
}

#[tokio::test]
async fn a_server_that_goes_fails_calls_soon_and_serves_when_it_is_back() {
    let server = Server::start().await;
    let store = Postgres::new(server.database().await.parse().unwrap(), LIMITS);
    server.stop();
    let called = Instant::now();
    let refused = store.put(&me(), record("resp_1", "", "a", 0), 0).await;
    assert!(matches!(refused, Err(StoreError::Failed(_))), "{refused:?}");
    server.go_on().await;
    store.put(&me(), record("resp_1", "", "a", 0), 0).await.unwrap();
    server.stop();
    for _ in 0..3 {
        let refused = store.load(&me(), "resp_1", Part::All).await;
        assert!(matches!(refused, Err(StoreError::Failed(_))), "{refused:?}");
    }
    assert!(called.elapsed() < Duration::from_secs(60), "each wait has a deadline");
    server.go_on().await;
    assert_eq!(history(&store, "resp_1", Part::All).await.unwrap(), "a");
    assert_eq!(store.load(&me(), "resp\0", Part::All).await, gone("resp\0"), "text that the server would refuse");
}

/// A copy is made while others write: it has at least what was there when it began, and is a store of its own.
#[tokio::test]
async fn a_copy_is_whole_while_others_write() {
    let dir = tempfile::tempdir().unwrap();
    let store = Sqlite::open(&dir.path().join("store.sqlite"), LIMITS).unwrap();
    let long = "x".repeat(10_000);
    let put = async |store: &Sqlite, id: String| {
        let record = NewRecord { body: format!("{{\"record\":\"{long}\"}}"), ..record(&id, "", "", 0) };
        store.put(&me(), record, 0).await.unwrap();
    };
    // More pages than are copied at a time.
    for number in 0..800 {
        put(&store, format!("resp_{number}")).await;
    }
    let path = dir.path().join("copy.sqlite");
    let (copied, ()) = tokio::join!(store.copy(path.clone()), async {
        for number in 800..850 {
            put(&store, format!("resp_{number}")).await;
        }
        store.delete(&me(), "resp_800").await.unwrap();
    });
    assert!(copied.unwrap());
    let copy = Sqlite::open(&path, LIMITS).unwrap();
    for number in 0..800 {
        assert!(copy.load(&me(), &format!("resp_{number}"), Part::All).await.is_ok(), "{number}");
    }
    put(&copy, "resp_new".into()).await;
    assert!(store.load(&me(), "resp_new", Part::Nothing).await.is_err());
}
