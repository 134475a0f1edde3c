//! The cost of calls on a store as it grows: `store_cost sqlite FILE CONVERSATIONS` | `store_cost postgres ADDRESS CONVERSATIONS`, where
//! the file or the database is empty and stays behind.
//!
//! Conversations have four messages of 200 bytes. One in ten is one user's, the others are those of users with a hundred each. At each power
//! of ten the calls are timed one at a time, on users and conversations at random. The table goes to standard output, progress to standard
//! error.

use futures_util::{StreamExt, TryStreamExt, stream};
use rand::Rng;
use std::{env, error::Error, path::Path, sync::Arc, time::Instant};
use tidemill_gateway::store::{
    Addition, Item, Kind, Limits, NewRecord, Owner, Page, Part, Store, Stored,
    postgres::{Address, Postgres},
    sqlite::Sqlite,
};

const LIMITS: Limits = Limits { bytes: 1 << 40, history_bytes: 64 << 20 };
const MESSAGES: u64 = 4;
/// The number of conversations of most users.
const OF_A_USER: u64 = 100;
/// One conversation in so many is that of the user who has most.
const OF_THE_HEAVIEST: u64 = 10;
/// The number of the first conversation that a measurement begins.
const NEW: u64 = 1_000_000_000_000;
const NOW: u64 = 1_800_000_000;
/// The number of calls of each kind that are timed.
const CALLS: usize = 1000;
/// The number of conversations on a page of a list.
const PAGE: usize = 20;
/// The number of calls at a time while the store is filled.
const AT_ONCE: usize = 16;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let args: Vec<String> = env::args().skip(1).collect();
    let [kind, place, conversations] = &args[..] else { return Err("usage: store_cost sqlite FILE|postgres ADDRESS CONVERSATIONS".into()) };
    let conversations: u64 = conversations.parse()?;
    let store: Arc<dyn Store> = match kind.as_str() {
        "sqlite" => Arc::new(Sqlite::open(Path::new(place), LIMITS)?),
        "postgres" => Arc::new(Postgres::new(place.parse::<Address>()?, LIMITS)),
        other => return Err(format!("`{other}` is not `sqlite` or `postgres`").into()),
    };
    println!("| conversations | call | p50, ms | p99, ms |");
    println!("|---:|---|---:|---:|");
    let mut stored = 0;
    while stored < conversations {
        let next = (stored * 10).clamp(1000, conversations);
        let began = Instant::now();
        let puts = stream::iter(stored..next).map(|number| put(&*store, number)).buffer_unordered(AT_ONCE);
        puts.try_collect::<()>().await?;
        eprintln!("{next} conversations, {:.0} a second", (next - stored) as f64 / began.elapsed().as_secs_f64());
        stored = next;
        measure(&*store, stored).await?;
    }
    Ok(())
}

fn owner(number: u64) -> Owner {
    let user = if number.is_multiple_of(OF_THE_HEAVIEST) { "heaviest".into() } else { format!("user-{}", number / OF_A_USER) };
    Owner::of(Some("acme"), Some(&user))
}

fn id(number: u64) -> String {
    format!("conv_{number:024}")
}

fn message(id: String) -> Item {
    let body = format!(r#"{{"id":"{id}","type":"message","role":"user","content":"{}"}}"#, "word ".repeat(24));
    Item { id, body, tokens: 30 }
}

fn put(store: &dyn Store, number: u64) -> Stored<'_, ()> {
    let items = (0..MESSAGES).map(|message_number| message(format!("msg_{number:020}_{message_number:03}"))).collect();
    let body = format!(r#"{{"id":"{}","object":"conversation","metadata":{{}}}}"#, id(number));
    let record = NewRecord { id: id(number), kind: Kind::Conversation, body, items, ..NewRecord::default() };
    Box::pin(async move { store.put(&owner(number), record, NOW).await })
}

async fn measure(store: &dyn Store, stored: u64) -> Result<(), Box<dyn Error>> {
    let page = |after: Option<u64>| Page { after: after.map(id), limit: PAGE, descending: true };
    let heaviest = owner(0);
    let any = || rand::rng().random_range(0..stored);
    let of_the_heaviest = || any() / OF_THE_HEAVIEST * OF_THE_HEAVIEST;
    let mut rows: [(&str, Vec<f64>); 6] = [
        ("list a user's first page", Vec::new()),
        ("list the heaviest user's first page", Vec::new()),
        ("list one of its later pages", Vec::new()),
        ("open", Vec::new()),
        ("append two messages", Vec::new()),
        ("begin a conversation", Vec::new()),
    ];
    for call in 0..CALLS {
        for (row, (_, times)) in rows.iter_mut().enumerate() {
            let number = any();
            let began = Instant::now();
            match row {
                0 => drop(store.list(&owner(number), Kind::Conversation, page(None)).await?),
                1 => drop(store.list(&heaviest, Kind::Conversation, page(None)).await?),
                2 => drop(store.list(&heaviest, Kind::Conversation, page(Some(of_the_heaviest()))).await?),
                3 => drop(store.load_within(&owner(number), &id(number), Part::All, u64::MAX).await?),
                4 => {
                    let items = (0..2).map(|half| message(format!("msg_{stored}_{call}_{half}"))).collect();
                    store.append(&owner(number), &id(number), Addition::of(items), NOW).await?;
                }
                _ => {
                    put(store, NEW + stored * 10 + call as u64).await?;
                }
            }
            times.push(began.elapsed().as_secs_f64() * 1e3);
        }
    }
    for (name, times) in &mut rows {
        times.sort_by(f64::total_cmp);
        println!("| {stored} | {name} | {:.2} | {:.2} |", times[CALLS / 2], times[CALLS * 99 / 100]);
    }
    Ok(())
}
