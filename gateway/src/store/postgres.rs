//! A store in a PostgreSQL database, which several coordinators share.
//!
//! The first coordinator creates the schema `tidemill`. Each call is one transaction on a connection of a pool, in a task of its own: it is
//! committed, or rolled back, whether or not its caller still waits. If the server is down, calls fail within seconds, and succeed again
//! when it is back; this process need not be started after the server, nor restarted.
//!
//! - [`address`]: the server's address, and the encryption of connections
//! - `indexes`: indexes that are made while the database is in use; `sizes`: items that are found, and counted before they are read

pub mod address;
mod failed;
mod indexes;
mod sizes;
mod writing;

use super::{
    AT_A_TIME, Addition, Erasing, Held, ITEM_OVERHEAD, Item, ItemPage, Kind, Limits, NewRecord, Owner, Page, Part, RECORD_OVERHEAD, Record,
    RecordPage, Store, StoreError, Stored, Summary, Totals, Whose, on_one_page,
};
pub use address::{Address, AddressError};
use deadpool_postgres::{Manager, ManagerConfig, Object, Pool, PoolError, RecyclingMethod, Runtime, Timeouts};
use failed::{Failed, Outcome, missing, speakable};
use futures_util::future::BoxFuture;
use sizes::{bytes, numbers, size};
use std::{path::PathBuf, sync::Arc, time::Duration};
use tokio::{sync::OnceCell, time::timeout};
use tokio_postgres::{Client, NoTls, Row, error::SqlState};
use tokio_postgres_rustls::MakeRustlsConnect;
use writing::Writing;
#[cfg(test)]
pub(super) use writing::older;

const CONNECTIONS_MAX: usize = 16;
/// The time limit for a new connection, and for a free connection of the pool.
const CONNECT_MAX: Duration = Duration::from_secs(3);
/// The time after which a call fails. The server's own timeout is shorter.
const ANSWER_MAX: Duration = Duration::from_secs(20);
const STATEMENT_MAX_MS: u32 = 15_000;
/// The maximum number of attempts at a transaction that conflicts with others.
const ATTEMPTS_MAX: u32 = 5;
/// The lock for creating the schema: an arbitrary number that is used for no other lock.
const SCHEMA_LOCK: i64 = 0x7469_6465_6d69_6c6c;
/// The version that earlier coordinators can go on with, too: what they need not know of is added without another one.
const SCHEMA_VERSION: i32 = 3;

/// The tables, as in SQLite: a history is a list of items' numbers, and `uses` counts the places that name an item, apart from the bodies.
/// `stored` has the size of all bodies, and `shares` that of each tenant, spread over enough rows that transactions seldom wait for one
/// another there.
const SCHEMA: &str = "
    CREATE SCHEMA IF NOT EXISTS tidemill;
    CREATE TABLE tidemill.version (version INTEGER NOT NULL);
    INSERT INTO tidemill.version VALUES (2);
    CREATE TABLE tidemill.records (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, used BIGINT NOT NULL,
        body TEXT NOT NULL, history BIGINT[] NOT NULL, outputs BIGINT NOT NULL,
        kind SMALLINT NOT NULL, messages BIGINT NOT NULL DEFAULT 0, tokens BIGINT NOT NULL DEFAULT 0,
        summary TEXT, summarized BIGINT NOT NULL DEFAULT 0, UNIQUE (owner, id));
    CREATE INDEX records_by_age ON tidemill.records (used, number);
    CREATE INDEX records_by_kind ON tidemill.records (owner, kind, number);
    CREATE TABLE tidemill.items (
        number BIGINT GENERATED ALWAYS AS IDENTITY PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, body TEXT NOT NULL,
        tokens BIGINT NOT NULL, UNIQUE (owner, id));
    CREATE TABLE tidemill.uses (item BIGINT PRIMARY KEY, places BIGINT NOT NULL) WITH (fillfactor = 70);
    CREATE TABLE tidemill.stored (part INTEGER PRIMARY KEY, bytes BIGINT NOT NULL);";

/// Converts version 1, which had no summaries.
const TO_VERSION_2: &str = "
    ALTER TABLE tidemill.records ADD COLUMN summary TEXT, ADD COLUMN summarized BIGINT NOT NULL DEFAULT 0;
    UPDATE tidemill.version SET version = 2;";

/// Converts version 2, which had no tenants.
fn to_version_3() -> String {
    format!(
        "CREATE TABLE tidemill.shares (tenant TEXT NOT NULL, part INTEGER NOT NULL, bytes BIGINT NOT NULL, PRIMARY KEY (tenant, part));
         INSERT INTO tidemill.shares SELECT split_part(owner, '/', 1), 0, sum(bytes) FROM (
             SELECT owner, {RECORD_OVERHEAD} + octet_length(body) + coalesce(octet_length(summary), 0) AS bytes FROM tidemill.records
             UNION ALL SELECT owner, {ITEM_OVERHEAD} + octet_length(body) FROM tidemill.items) AS held GROUP BY 1;
         DELETE FROM tidemill.stored;
         INSERT INTO tidemill.stored SELECT 0, coalesce(sum(bytes), 0) FROM tidemill.shares;
         CREATE INDEX records_by_tenant ON tidemill.records (split_part(owner, '/', 1), used, number);
         UPDATE tidemill.version SET version = 3;"
    )
}

/// Adds the time at which a record was stored; the records that are there have that of the addition. The table is not written anew, and
/// waits no longer than this for those who use it. Records that earlier coordinators store have the server's time.
const ADD_CREATED: &str = "
    SET LOCAL lock_timeout = '3s';
    ALTER TABLE tidemill.records ADD COLUMN created BIGINT NOT NULL DEFAULT extract(epoch FROM now())::BIGINT;";
const HAS_CREATED: &str = "SELECT EXISTS (
    SELECT FROM pg_attribute WHERE attrelid = 'tidemill.records'::regclass AND attname = 'created' AND NOT attisdropped)";

#[derive(Clone, Debug)]
pub struct Postgres {
    pool: Pool,
    limits: Limits,
    /// Set once the schema exists.
    prepared: Arc<OnceCell<()>>,
}

impl Postgres {
    /// Creates the store, without contacting the server yet.
    pub fn new(Address { mut config, tls }: Address, limits: Limits) -> Self {
        config
            .application_name("tidemill")
            .connect_timeout(CONNECT_MAX)
            .keepalives_idle(Duration::from_secs(30))
            .tcp_user_timeout(ANSWER_MAX);
        let given = config.get_options().map_or(String::new(), |options| format!("{options} "));
        config.options(format!("{given}-c statement_timeout={STATEMENT_MAX_MS} -c idle_in_transaction_session_timeout={STATEMENT_MAX_MS}"));
        let recycling = ManagerConfig { recycling_method: RecyclingMethod::Fast };
        let manager = match tls {
            Some(tls) => Manager::from_config(config, MakeRustlsConnect::new((*tls).clone()), recycling),
            None => Manager::from_config(config, NoTls, recycling),
        };
        let wait = Some(CONNECT_MAX);
        let pool = Pool::builder(manager).max_size(CONNECTIONS_MAX).runtime(Runtime::Tokio1);
        let pool = pool.timeouts(Timeouts { wait, create: wait, recycle: wait }).build().expect("a pool with a runtime has its timeouts");
        Self { pool, limits, prepared: Arc::default() }
    }

    /// One of its connections.
    #[cfg(test)]
    pub(super) async fn connection(&self) -> Object {
        self.pool.get().await.expect("it has just been used")
    }

    fn call<T: Send + 'static>(
        &self,
        work: impl for<'a> Fn(&'a mut Client, Limits) -> BoxFuture<'a, Outcome<T>> + Send + Sync + 'static,
    ) -> Stored<'_, T> {
        self.call_within(ANSWER_MAX, work)
    }

    fn call_within<T: Send + 'static>(
        &self,
        answer_max: Duration,
        work: impl for<'a> Fn(&'a mut Client, Limits) -> BoxFuture<'a, Outcome<T>> + Send + Sync + 'static,
    ) -> Stored<'_, T> {
        let this = self.clone();
        Box::pin(async move {
            let call = tokio::spawn(async move {
                let mut connection = this.pool.get().await?;
                match timeout(answer_max, this.tried(&mut connection, work)).await {
                    Ok(outcome) => outcome,
                    Err(_) => {
                        // Its state is unknown.
                        drop(Object::take(connection));
                        Err(StoreError::Failed(format!("no answer within {} s", answer_max.as_secs())))
                    }
                }
            });
            call.await.unwrap_or_else(|_| Err(StoreError::Failed("the call was cut off".into())))
        })
    }

    async fn tried<T>(
        &self,
        client: &mut Client,
        work: impl for<'a> Fn(&'a mut Client, Limits) -> BoxFuture<'a, Outcome<T>>,
    ) -> Result<T, StoreError> {
        self.prepared.get_or_try_init(|| prepare(client)).await?;
        for attempt in 1.. {
            match work(client, self.limits).await {
                Ok(done) => return Ok(done),
                Err(Failed::Store(error)) => return Err(error),
                Err(Failed::Server(error)) if attempt == ATTEMPTS_MAX || !may_be_repeated(&error) => return Err(error.into()),
                Err(Failed::Overtaken) if attempt == ATTEMPTS_MAX => return Err(StoreError::Busy),
                Err(_) => tokio::time::sleep(Duration::from_millis(rand::random_range(1..10) * u64::from(attempt))).await,
            }
        }
        unreachable!("the last attempt returns")
    }
}

fn may_be_repeated(error: &tokio_postgres::Error) -> bool {
    [SqlState::T_R_DEADLOCK_DETECTED, SqlState::T_R_SERIALIZATION_FAILURE].iter().any(|code| error.code() == Some(code))
}

async fn prepare(client: &mut Client) -> Result<(), StoreError> {
    let transaction = client.transaction().await?;
    transaction.execute("SELECT pg_advisory_xact_lock($1)", &[&SCHEMA_LOCK]).await?;
    let there: bool = transaction.query_one("SELECT to_regclass('tidemill.version') IS NOT NULL", &[]).await?.get(0);
    if !there {
        transaction.batch_execute(SCHEMA).await?;
    }
    let found: i32 = transaction.query_one("SELECT version FROM tidemill.version", &[]).await?.get(0);
    if !(1..=SCHEMA_VERSION).contains(&found) {
        return Err(StoreError::Failed(format!("the database was written by another version (schema {found}, not {SCHEMA_VERSION})")));
    }
    if found == 1 {
        transaction.batch_execute(TO_VERSION_2).await?;
    }
    if found < SCHEMA_VERSION {
        transaction.batch_execute(&to_version_3()).await?;
    }
    if !transaction.query_one(HAS_CREATED, &[]).await?.get::<_, bool>(0) {
        transaction.batch_execute(ADD_CREATED).await?;
    }
    Ok(transaction.commit().await?)
}

impl Store for Postgres {
    fn put(&self, owner: &Owner, record: NewRecord, now: u64) -> Stored<'_, ()> {
        let owner = owner.clone();
        self.call(move |client, limits| {
            let (owner, record) = (owner.clone(), record.clone());
            Box::pin(async move {
                let mut writing = Writing::begin(client, limits).await?;
                writing.put(&owner, record, now).await?;
                writing.commit_for(&owner).await
            })
        })
    }

    fn load_within(&self, owner: &Owner, id: &str, part: Part, bytes_max: u64) -> Stored<'_, Record> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(move |client, _| {
            let (owner, id) = (owner.clone(), id.clone());
            Box::pin(async move {
                let reading = Reading::begin(client).await?;
                let (record, history, outputs) = reading.record(&owner, &id).await?;
                let numbers = &history[part.range(history.len(), outputs)];
                size(&reading.0, numbers).await?.check(bytes_max)?;
                Ok(Record { items: reading.items(numbers).await?, ..record })
            })
        })
    }

    fn page(&self, owner: &Owner, id: &str, part: Part, page: Page) -> Stored<'_, ItemPage> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(move |client, _| {
            let (owner, id, page) = (owner.clone(), id.clone(), page.clone());
            Box::pin(async move {
                let reading = Reading::begin(client).await?;
                let (_, history, outputs) = reading.record(&owner, &id).await?;
                let numbers = &history[part.range(history.len(), outputs)];
                let ids = if page.after.is_some() { reading.ids(numbers).await? } else { Vec::new() };
                let places = page.places(ids.iter().map(String::as_str), numbers.len());
                let (places, has_more) = places.ok_or_else(|| missing(page.after.as_deref().unwrap_or_default()))?;
                let numbers: Vec<_> = places.into_iter().map(|place| numbers[place]).collect();
                let items = reading.first_items(&numbers).await?;
                Ok(ItemPage { has_more: has_more || items.len() < numbers.len(), items })
            })
        })
    }

    fn list(&self, owner: &Owner, kind: Kind, page: Page) -> Stored<'_, RecordPage> {
        let owner = owner.clone();
        self.call(move |client, _| {
            let (owner, page) = (owner.clone(), page.clone());
            Box::pin(async move { Reading::begin(client).await?.list(&owner, kind, &page).await })
        })
    }

    fn find_within(&self, owner: &Owner, ids: &[String], bytes_max: u64) -> Stored<'_, Vec<Item>> {
        let (owner, ids) = (owner.clone(), ids.to_vec());
        self.call(move |client, limits| {
            let (owner, ids) = (owner.clone(), ids.clone());
            Box::pin(async move {
                let reading = Reading::begin(client).await?;
                let numbers = reading.numbers_of(&owner, &ids).await?;
                let size = size(&reading.0, &numbers).await?;
                size.check_history("the input", numbers.len(), limits)?;
                size.check(bytes_max)?;
                reading.items(&numbers).await
            })
        })
    }

    fn update(&self, owner: &Owner, id: &str, body: String, now: u64) -> Stored<'_, ()> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(move |client, limits| {
            let (owner, id, body) = (owner.clone(), id.clone(), body.clone());
            Box::pin(async move {
                let mut writing = Writing::begin(client, limits).await?;
                writing.update(&owner, &id, &body, now).await?;
                writing.commit_for(&owner).await
            })
        })
    }

    fn append(&self, owner: &Owner, id: &str, addition: Addition, now: u64) -> Stored<'_, ()> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(move |client, limits| {
            let (owner, id, addition) = (owner.clone(), id.clone(), addition.clone());
            Box::pin(async move {
                let mut writing = Writing::begin(client, limits).await?;
                writing.append(&owner, &id, &addition, now).await?;
                writing.commit_for(&owner).await
            })
        })
    }

    fn summarize(&self, owner: &Owner, id: &str, summary: Summary) -> Stored<'_, ()> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(move |client, limits| {
            let (owner, id, summary) = (owner.clone(), id.clone(), summary.clone());
            Box::pin(async move {
                let mut writing = Writing::begin(client, limits).await?;
                writing.summarize(&owner, &id, &summary).await?;
                writing.commit_for(&owner).await
            })
        })
    }

    fn remove(&self, owner: &Owner, id: &str, item: &str) -> Stored<'_, ()> {
        let (owner, id, item) = (owner.clone(), id.to_owned(), item.to_owned());
        self.call(move |client, limits| {
            let (owner, id, item) = (owner.clone(), id.clone(), item.clone());
            Box::pin(async move {
                let mut writing = Writing::begin(client, limits).await?;
                writing.remove(&owner, &id, &item).await?;
                writing.commit().await
            })
        })
    }

    fn delete(&self, owner: &Owner, id: &str) -> Stored<'_, ()> {
        let (owner, id) = (owner.clone(), id.to_owned());
        self.call(move |client, limits| {
            let (owner, id) = (owner.clone(), id.clone());
            Box::pin(async move {
                let mut writing = Writing::begin(client, limits).await?;
                writing.delete(&owner, &id).await?;
                writing.commit().await
            })
        })
    }

    fn expire(&self, kind: Kind, before: u64) -> Stored<'_, u64> {
        Box::pin(async move {
            let indexed = self.call_within(indexes::MADE_WITHIN, move |client, _| Box::pin(indexes::by_age(client, kind)));
            if !indexed.await? {
                return Ok(0);
            }
            let deleted = self.call(move |client, limits| {
                Box::pin(async move {
                    let mut writing = Writing::begin(client, limits).await?;
                    let deleted = writing.delete_older(kind, before).await?;
                    writing.commit().await?;
                    Ok(deleted)
                })
            });
            deleted.await
        })
    }

    fn erase(&self, whose: &Whose, erasing: Erasing) -> Stored<'_, Held> {
        let whose = whose.clone();
        Box::pin(async move {
            let mut held = Held::default();
            loop {
                let whose = whose.clone();
                let some = self.call(move |client, limits| {
                    let whose = whose.clone();
                    Box::pin(async move {
                        let mut writing = Writing::begin(client, limits).await?;
                        let some = match erasing {
                            Erasing::Count => writing.held(&whose).await?,
                            Erasing::Remove => writing.erase(&whose, AT_A_TIME).await?,
                        };
                        writing.commit().await?;
                        Ok(some)
                    })
                });
                let some = some.await?;
                held = held.plus(some);
                if erasing == Erasing::Count || some == Held::default() {
                    return Ok(held);
                }
            }
        })
    }

    fn copy(&self, _: PathBuf) -> Stored<'_, bool> {
        Box::pin(std::future::ready(Ok(false)))
    }

    fn owners(&self, whose: &Whose, after: Option<String>, limit: usize) -> Stored<'_, Vec<Owner>> {
        let (whose, after) = (whose.clone(), after.unwrap_or_default());
        self.call(move |client, _| {
            let (whose, after) = (whose.clone(), after.clone());
            Box::pin(async move {
                let of = writing::of_owners(&whose);
                // By bytes, as SQLite orders them.
                let select = format!(
                    "SELECT DISTINCT owner COLLATE \"C\" AS owner FROM tidemill.records WHERE {of} AND owner COLLATE \"C\" > $2
                     ORDER BY 1 LIMIT $3"
                );
                let rows = client.query(&select, &[&speakable(&whose.name())?, &speakable(&after)?, &(limit as i64)]).await?;
                Ok(rows.iter().map(|row| Owner(row.get(0))).collect())
            })
        })
    }

    fn calls_at_a_time(&self) -> usize {
        CONNECTIONS_MAX
    }

    fn is_shared(&self) -> bool {
        true
    }
}

/// A read-only transaction, in which all reads see the same state.
struct Reading<'a>(tokio_postgres::Transaction<'a>);

impl<'a> Reading<'a> {
    async fn begin(client: &'a mut Client) -> Outcome<Self> {
        let transaction = client.build_transaction().isolation_level(tokio_postgres::IsolationLevel::RepeatableRead).read_only(true);
        Ok(Self(transaction.start().await?))
    }

    /// Returns a record without its items, their numbers, and the number of outputs among them.
    async fn record(&self, owner: &Owner, id: &str) -> Outcome<(Record, Vec<i64>, usize)> {
        let select =
            "SELECT id, body, used, messages, tokens, summary, history, outputs FROM tidemill.records WHERE owner = $1 AND id = $2";
        let row = self.0.query_opt(select, &[&owner.0, &speakable(id)?]).await?.ok_or_else(|| missing(id))?;
        Ok((record(&row), row.get(6), row.get::<_, i64>(7) as usize))
    }

    async fn numbers_of(&self, owner: &Owner, ids: &[String]) -> Outcome<Vec<i64>> {
        let ids: Vec<_> = ids.iter().map(|id| speakable(id)).collect::<Result<_, _>>()?;
        let select = "SELECT id, number FROM tidemill.items WHERE owner = $1 AND id = ANY($2)";
        numbers(&ids, &self.0.query(select, &[&owner.0, &ids]).await?)
    }

    async fn items(&self, numbers: &[i64]) -> Outcome<Vec<Item>> {
        let select = "SELECT items.id, items.body, items.tokens FROM unnest($1::BIGINT[]) WITH ORDINALITY AS place (item, place)
             JOIN tidemill.items ON items.number = place.item ORDER BY place.place";
        let items: Vec<_> = self.0.query(select, &[&numbers]).await?.iter().map(item).collect();
        whole(numbers, items)
    }

    /// Returns the first of these items, as many as fit on a page.
    async fn first_items(&self, numbers: &[i64]) -> Outcome<Vec<Item>> {
        let sizes = "SELECT octet_length(items.body) FROM unnest($1::BIGINT[]) WITH ORDINALITY AS place (item, place)
             JOIN tidemill.items ON items.number = place.item ORDER BY place.place";
        self.items(&numbers[..on_one_page(bytes(&self.0.query(sizes, &[&numbers]).await?))]).await
    }

    async fn ids(&self, numbers: &[i64]) -> Outcome<Vec<String>> {
        let select = "SELECT items.id FROM unnest($1::BIGINT[]) WITH ORDINALITY AS place (item, place)
             JOIN tidemill.items ON items.number = place.item ORDER BY place.place";
        let ids = self.0.query(select, &[&numbers]).await?.iter().map(|row| row.get(0)).collect();
        whole(numbers, ids)
    }

    async fn list(&self, owner: &Owner, kind: Kind, page: &Page) -> Outcome<RecordPage> {
        let after: i64 = match &page.after {
            Some(after) => {
                let select = "SELECT number FROM tidemill.records WHERE owner = $1 AND id = $2 AND kind = $3";
                let row = self.0.query_opt(select, &[&owner.0, &speakable(after)?, &(kind as i16)]).await?;
                row.ok_or_else(|| missing(after))?.get(0)
            }
            None if page.descending => i64::MAX,
            None => i64::MIN,
        };
        let (beyond, order) = if page.descending { ("<", "DESC") } else { (">", "ASC") };
        let select = |columns: &str| {
            format!(
                "SELECT {columns} FROM tidemill.records WHERE owner = $1 AND kind = $2 AND number {beyond} $3 ORDER BY number {order} LIMIT $4"
            )
        };
        let (sizes, records) = (select("octet_length(body)"), select("id, body, used, messages, tokens, NULL::TEXT"));
        let sizes = self.0.query(&sizes, &[&owner.0, &(kind as i16), &after, &(page.limit.saturating_add(1) as i64)]).await?;
        let fitting = on_one_page(bytes(&sizes)).min(page.limit);
        let records = self.0.query(&records, &[&owner.0, &(kind as i16), &after, &(fitting as i64)]).await?;
        Ok(RecordPage { records: records.iter().map(record).collect(), has_more: sizes.len() > fitting })
    }
}

fn record(row: &Row) -> Record {
    let totals = Totals { messages: row.get::<_, i64>(3) as u64, tokens: row.get::<_, i64>(4) as u64 };
    Record { id: row.get(0), body: row.get(1), updated: row.get::<_, i64>(2) as u64, totals, summary: row.get(5), items: Vec::new() }
}

fn item(row: &Row) -> Item {
    Item { id: row.get(0), body: row.get(1), tokens: row.get::<_, i64>(2) as u32 }
}

/// Checks that all items were found: a history that lacks one must not pass for a whole one.
fn whole<T>(numbers: &[i64], found: Vec<T>) -> Outcome<Vec<T>> {
    let error = || Failed::Store(StoreError::Failed("a history names an item that is not there".into()));
    if found.len() == numbers.len() { Ok(found) } else { Err(error()) }
}

impl From<tokio_postgres::Error> for StoreError {
    fn from(error: tokio_postgres::Error) -> Self {
        match error.as_db_error() {
            Some(said) => Self::Failed(said.message().to_owned()),
            None => Self::Failed(with_cause(&error)),
        }
    }
}

impl From<PoolError> for StoreError {
    fn from(error: PoolError) -> Self {
        match error {
            PoolError::Timeout(deadpool_postgres::TimeoutType::Wait) => Self::Busy,
            PoolError::Backend(error) => error.into(),
            error => Self::Failed(with_cause(&error)),
        }
    }
}

fn with_cause(error: &dyn std::error::Error) -> String {
    error.source().map_or_else(|| error.to_string(), |cause| format!("{error}: {cause}"))
}
