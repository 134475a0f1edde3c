//! A transaction that makes changes. If it is dropped before its commit, it has no effect.
//!
//! Locks are taken in one order, records before items and both by number, so that deadlocks are rare. If one occurs, the server aborts a
//! transaction, which is retried.

use super::super::{
    ALWAYS, AT_A_TIME, Addition, Held, ITEM_OVERHEAD, Item, Kind, Limits, NewRecord, Owner, RECORD_OVERHEAD, Rewrite, StoreError, Summary,
    Whose, note_evicted, tenant_of,
};
use crate::{
    base::room::Shares,
    store::postgres::{
        failed::{Failed, Outcome, missing, speakable},
        sizes::{numbers, size},
    },
};
use std::collections::BTreeMap;
use tokio_postgres::{Client, Row, Transaction};

/// The number of rows in `stored`.
const PARTS: i32 = 16;
/// The columns of a deleted record: its items' numbers, its size besides the overhead, and its owner.
const GONE: &str = "RETURNING history, octet_length(body) + coalesce(octet_length(summary), 0), owner";

/// The records of a user, or of a tenant and all its users, as a SQL condition.
pub(super) fn of_owners(whose: &Whose) -> &'static str {
    if whose.user.is_some() { "owner = $1" } else { "split_part(owner, '/', 1) = $1" }
}

/// The oldest records of a kind from before `$1`, along the index of its times. The kind is a literal: one index has facts only.
pub(in crate::store) fn older(kind: Kind) -> String {
    let (kind, time) = (kind as i16, kind.aged_by());
    format!(
        "SELECT number FROM tidemill.records WHERE kind = {kind} AND {time} < $1 ORDER BY {time}, number LIMIT $2 FOR UPDATE SKIP LOCKED"
    )
}

pub(super) struct Writing<'a> {
    transaction: Transaction<'a>,
    limits: Limits,
    /// The change in size of each tenant's records.
    bytes: BTreeMap<String, i64>,
}

impl<'a> Writing<'a> {
    pub(super) async fn begin(client: &'a mut Client, limits: Limits) -> Outcome<Self> {
        Ok(Self { transaction: client.transaction().await?, limits, bytes: BTreeMap::new() })
    }

    /// Commits, after deleting the oldest records if there are too many: of `newcomer`'s tenant, if it has more than its share.
    pub(super) async fn commit_for(mut self, newcomer: &Owner) -> Outcome<()> {
        let evicted = self.make_room(newcomer.tenant()).await?;
        self.commit().await?;
        evicted.iter().for_each(|(tenant, records)| note_evicted(tenant, *records));
        Ok(())
    }

    /// Commits a change that only deletes.
    pub(super) async fn commit(self) -> Outcome<()> {
        for (tenant, bytes) in self.bytes.iter().filter(|(_, bytes)| **bytes != 0) {
            let add = "INSERT INTO tidemill.shares AS shares (tenant, part, bytes) VALUES ($1, pg_backend_pid() % $2, $3)
                 ON CONFLICT (tenant, part) DO UPDATE SET bytes = shares.bytes + excluded.bytes";
            self.transaction.execute(add, &[tenant, &PARTS, bytes]).await?;
            let add = "INSERT INTO tidemill.stored AS stored (part, bytes) VALUES (pg_backend_pid() % $1, $2)
                 ON CONFLICT (part) DO UPDATE SET bytes = stored.bytes + excluded.bytes";
            self.transaction.execute(add, &[&PARTS, bytes]).await?;
        }
        Ok(self.transaction.commit().await?)
    }

    fn count_bytes(&mut self, owner: &str, bytes: i64) {
        *self.bytes.entry(tenant_of(owner).to_owned()).or_default() += bytes;
    }

    async fn stored(&self) -> Outcome<i64> {
        let sum = "SELECT coalesce(sum(bytes), 0)::BIGINT FROM tidemill.stored";
        Ok(self.transaction.query_one(sum, &[]).await?.get::<_, i64>(0) + self.bytes.values().sum::<i64>())
    }

    /// The size of each tenant's records, including this transaction's changes.
    async fn shares(&self) -> Outcome<Shares<String>> {
        let rows = self.transaction.query("SELECT tenant, sum(bytes)::BIGINT FROM tidemill.shares GROUP BY tenant", &[]).await?;
        let mut held: BTreeMap<String, i64> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
        self.bytes.iter().for_each(|(tenant, bytes)| *held.entry(tenant.clone()).or_default() += bytes);
        let mut shares = Shares::default();
        held.iter().for_each(|(tenant, bytes)| shares.add(tenant, u64::try_from(*bytes).unwrap_or(0)));
        Ok(shares)
    }

    /// Deletes the oldest records while there are too many. The newest of the newcomer's stays, regardless of its size; but if there are
    /// other tenants, it must then fit into a share. Returns the number of records deleted for each tenant.
    async fn make_room(&mut self, newcomer: &str) -> Outcome<BTreeMap<String, u64>> {
        let (newcomer, mut evicted) = (newcomer.to_owned(), BTreeMap::new());
        let limit = i64::try_from(self.limits.bytes).unwrap_or(i64::MAX);
        let grows = self.bytes.values().sum::<i64>() > 0;
        while grows && self.stored().await? > limit {
            let shares = self.shares().await?;
            let room = shares.total().min(self.limits.bytes);
            let mut losers = shares.losers(room, &newcomer, 0);
            if losers.is_empty() {
                losers.push(newcomer.clone());
            }
            let mut gone = None;
            for loser in losers {
                if self.delete_oldest(&loser, loser == newcomer).await? {
                    gone = Some(loser);
                    break;
                }
            }
            let Some(loser) = gone else {
                let held = shares.held(&newcomer);
                let is_over = held < shares.total() && held > shares.share(room, &newcomer);
                return if is_over { Err(StoreError::Full.into()) } else { Ok(evicted) };
            };
            *evicted.entry(loser).or_default() += 1;
        }
        Ok(evicted)
    }

    pub(super) async fn put(&mut self, owner: &Owner, record: NewRecord, now: u64) -> Outcome<()> {
        let NewRecord { id, kind, body, earlier, items, outputs, conversation } = record;
        let conversation = match &conversation {
            Some((conversation, body)) => Some((self.lock(owner, conversation).await?, body, conversation)),
            None => None,
        };
        let mut history = self.numbers_of(owner, &earlier).await?;
        let new = self.insert_items(owner, &items).await?;
        history.extend(&new);
        self.check_history(&id, &history).await?;
        if let Some((locked, body, conversation)) = conversation {
            self.extend(owner, conversation, locked, &new, &Addition { body: body.clone(), ..Addition::default() }, now).await?;
        }
        let insert =
            "INSERT INTO tidemill.records (owner, id, used, body, history, outputs, kind, created) VALUES ($1, $2, $3, $4, $5, $6, $7, $8)
             ON CONFLICT (owner, id) DO NOTHING RETURNING number";
        let (used, outputs, kind_number) = (kind.used(now) as i64, outputs as i64, kind as i16);
        let row =
            self.transaction.query_opt(insert, &[&owner.0, &id, &used, &body, &history, &outputs, &kind_number, &(now as i64)]).await?;
        let Some(row) = row else {
            return Err(StoreError::Failed(format!("`{id}` is stored already")).into());
        };
        self.count_bytes(&owner.0, RECORD_OVERHEAD as i64 + body.len() as i64);
        if kind == Kind::Conversation {
            self.count(row.get(0)).await?;
        }
        self.use_items(&history).await
    }

    pub(super) async fn update(&mut self, owner: &Owner, id: &str, body: &str, now: u64) -> Outcome<()> {
        let Locked { number, body: before, .. } = self.lock(owner, id).await?;
        let update = "UPDATE tidemill.records SET body = $2, used = CASE kind WHEN $4 THEN used ELSE $3 END WHERE number = $1";
        self.transaction.execute(update, &[&number, &body, &(now as i64), &(Kind::Memory as i16)]).await?;
        self.count_bytes(&owner.0, body.len() as i64 - before.len() as i64);
        Ok(())
    }

    pub(super) async fn append(&mut self, owner: &Owner, id: &str, addition: &Addition, now: u64) -> Outcome<()> {
        let locked = self.lock(owner, id).await?;
        let numbers = self.insert_items(owner, &addition.items).await?;
        self.extend(owner, id, locked, &numbers, addition, now).await
    }

    /// Appends to a record's history. `items` are the numbers of the addition's items.
    async fn extend(&mut self, owner: &Owner, id: &str, mut locked: Locked, items: &[i64], addition: &Addition, now: u64) -> Outcome<()> {
        let gone = match addition.cut {
            Some(cut) => cut.take(&mut locked.history).ok_or_else(|| StoreError::Changed(id.to_owned()))?,
            None => Vec::new(),
        };
        self.forget_summary(owner, &locked, locked.history.len()).await?;
        let Locked { number, body, mut history, .. } = locked;
        history.extend(items);
        self.check_history(id, &history).await?;
        self.use_items(items).await?;
        let update = "UPDATE tidemill.records SET history = $2, used = $3 WHERE number = $1";
        self.transaction.execute(update, &[&number, &history, &(now as i64)]).await?;
        self.count(number).await?;
        if let Some(Rewrite { to, .. }) = addition.body.as_ref().filter(|rewrite| rewrite.from == body) {
            self.transaction.execute("UPDATE tidemill.records SET body = $2 WHERE number = $1", &[&number, &to]).await?;
            self.count_bytes(&owner.0, to.len() as i64 - body.len() as i64);
        }
        self.give_up(&gone).await
    }

    pub(super) async fn remove(&mut self, owner: &Owner, id: &str, item: &str) -> Outcome<()> {
        let locked = self.lock(owner, id).await?;
        let place = self.numbers_of(owner, &[item.to_owned()]).await?[0];
        let first = locked.history.iter().position(|&number| number == place).ok_or_else(|| missing(item))?;
        self.forget_summary(owner, &locked, first).await?;
        let Locked { number, history, .. } = locked;
        let (gone, left): (Vec<_>, Vec<_>) = history.into_iter().partition(|&number| number == place);
        self.transaction.execute("UPDATE tidemill.records SET history = $2 WHERE number = $1", &[&number, &left]).await?;
        self.count(number).await?;
        self.give_up(&gone).await
    }

    pub(super) async fn delete(&mut self, owner: &Owner, id: &str) -> Outcome<()> {
        let delete = format!("DELETE FROM tidemill.records WHERE owner = $1 AND id = $2 {GONE}");
        let row = self.transaction.query_opt(&delete, &[&owner.0, &speakable(id)?]).await?.ok_or_else(|| missing(id))?;
        self.record_gone(&row);
        self.give_up(&row.get::<_, Vec<i64>>(0)).await
    }

    fn record_gone(&mut self, row: &Row) {
        self.count_bytes(row.get(2), -(RECORD_OVERHEAD as i64) - i64::from(row.get::<_, i32>(1)));
    }

    /// Deletes some records of a kind from before a time, except those that another transaction works on. Returns their number.
    pub(super) async fn delete_older(&mut self, kind: Kind, before: u64) -> Outcome<u64> {
        let delete = format!("DELETE FROM tidemill.records WHERE number IN ({}) {GONE}", older(kind));
        let rows = self.transaction.query(&delete, &[&(before as i64), &AT_A_TIME]).await?;
        rows.iter().for_each(|row| self.record_gone(row));
        self.give_up(&rows.iter().flat_map(|row| row.get::<_, Vec<i64>>(0)).collect::<Vec<_>>()).await?;
        Ok(rows.len() as u64)
    }

    /// Counts the records of these owners.
    pub(super) async fn held(&self, whose: &Whose) -> Outcome<Held> {
        let select = format!("SELECT kind, count(*) FROM tidemill.records WHERE {} GROUP BY kind", of_owners(whose));
        let mut held = Held::default();
        for row in self.transaction.query(&select, &[&speakable(&whose.name())?]).await? {
            held.add(row.get::<_, i16>(0).into(), row.get::<_, i64>(1).unsigned_abs());
        }
        Ok(held)
    }

    /// Deletes up to `some` records of these owners.
    pub(super) async fn erase(&mut self, whose: &Whose, some: i64) -> Outcome<Held> {
        let delete = format!(
            "DELETE FROM tidemill.records WHERE number IN (
                 SELECT number FROM tidemill.records WHERE {} ORDER BY number LIMIT $2 FOR UPDATE) {GONE}, kind",
            of_owners(whose)
        );
        let rows = self.transaction.query(&delete, &[&speakable(&whose.name())?, &some]).await?;
        let mut erased = Held::default();
        for row in &rows {
            self.record_gone(row);
            erased.add(row.get::<_, i16>(3).into(), 1);
        }
        self.give_up(&rows.iter().flat_map(|row| row.get::<_, Vec<i64>>(0)).collect::<Vec<_>>()).await?;
        Ok(erased)
    }

    /// Deletes a tenant's oldest record that can age. Returns whether there was one.
    async fn delete_oldest(&mut self, tenant: &str, but_the_newest: bool) -> Outcome<bool> {
        let delete = format!(
            "DELETE FROM tidemill.records WHERE number = (
                 SELECT number FROM tidemill.records WHERE split_part(owner, '/', 1) = $2 AND used < $1 AND (NOT $3 OR number <> (
                     SELECT number FROM tidemill.records WHERE split_part(owner, '/', 1) = $2 AND used < $1 ORDER BY used DESC, number DESC LIMIT 1))
                 ORDER BY used, number LIMIT 1 FOR UPDATE SKIP LOCKED) {GONE}"
        );
        let Some(row) = self.transaction.query_opt(&delete, &[&(ALWAYS as i64), &tenant, &but_the_newest]).await? else { return Ok(false) };
        self.record_gone(&row);
        self.give_up(&row.get::<_, Vec<i64>>(0)).await?;
        Ok(true)
    }

    async fn lock(&self, owner: &Owner, id: &str) -> Outcome<Locked> {
        let select = "SELECT number, body, history, summarized, coalesce(octet_length(summary), 0) FROM tidemill.records
             WHERE owner = $1 AND id = $2 FOR UPDATE";
        let row = self.transaction.query_opt(select, &[&owner.0, &speakable(id)?]).await?.ok_or_else(|| missing(id))?;
        Ok(Locked { number: row.get(0), body: row.get(1), history: row.get(2), summarized: row.get(3), summary_bytes: row.get(4) })
    }

    pub(super) async fn summarize(&mut self, owner: &Owner, id: &str, summary: &Summary) -> Outcome<()> {
        let Locked { number, history, summary_bytes, .. } = self.lock(owner, id).await?;
        let last = summary.items.checked_sub(1).and_then(|last| history.get(last));
        let last = match last {
            Some(last) => self.transaction.query_opt("SELECT id FROM tidemill.items WHERE number = $1", &[last]).await?,
            None => None,
        };
        let last = last.map(|row| row.get::<_, String>(0));
        summary.check(id, |_| last.as_deref())?;
        let update = "UPDATE tidemill.records SET summary = $2, summarized = $3 WHERE number = $1";
        self.transaction.execute(update, &[&number, &summary.body, &(summary.items as i64)]).await?;
        self.count_bytes(&owner.0, summary.body.len() as i64 - i64::from(summary_bytes));
        Ok(())
    }

    /// Drops the summary if it covers items from `place` on.
    async fn forget_summary(&mut self, owner: &Owner, locked: &Locked, place: usize) -> Outcome<()> {
        if locked.summarized > place as i64 {
            let update = "UPDATE tidemill.records SET summary = NULL, summarized = 0 WHERE number = $1";
            self.transaction.execute(update, &[&locked.number]).await?;
            self.count_bytes(&owner.0, -i64::from(locked.summary_bytes));
        }
        Ok(())
    }

    /// The numbers of stored items, which stay until the transaction ends.
    async fn numbers_of(&self, owner: &Owner, ids: &[String]) -> Outcome<Vec<i64>> {
        if ids.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<_> = ids.iter().map(|id| speakable(id)).collect::<Result<_, _>>()?;
        let select = "SELECT items.id, items.number FROM tidemill.items JOIN tidemill.uses ON uses.item = items.number
             WHERE items.owner = $1 AND items.id = ANY($2) ORDER BY items.number FOR UPDATE OF uses";
        numbers(&ids, &self.transaction.query(select, &[&owner.0, &ids]).await?)
    }

    async fn insert_items(&mut self, owner: &Owner, items: &[Item]) -> Outcome<Vec<i64>> {
        if items.is_empty() {
            return Ok(Vec::new());
        }
        let ids: Vec<_> = items.iter().map(|item| item.id.as_str()).collect();
        let bodies: Vec<_> = items.iter().map(|item| item.body.as_str()).collect();
        let tokens: Vec<_> = items.iter().map(|item| i64::from(item.tokens)).collect();
        let insert = "WITH new AS (
                 INSERT INTO tidemill.items (owner, id, body, tokens)
                 SELECT $1, given.id, given.body, given.tokens FROM unnest($2::TEXT[], $3::TEXT[], $4::BIGINT[]) AS given (id, body, tokens)
                 ON CONFLICT (owner, id) DO NOTHING RETURNING number, octet_length(body) AS bytes),
             counted AS (INSERT INTO tidemill.uses (item, places) SELECT number, 0 FROM new)
             SELECT coalesce(sum(bytes + $5::BIGINT), 0)::BIGINT FROM new";
        let overhead = ITEM_OVERHEAD as i64;
        let row = self.transaction.query_one(insert, &[&owner.0, &ids, &bodies, &tokens, &overhead]).await?;
        self.count_bytes(&owner.0, row.get(0));
        let ids: Vec<_> = items.iter().map(|item| item.id.clone()).collect();
        self.numbers_of(owner, &ids).await.map_err(|error| match error {
            // One was there, and its last history was deleted before this one could name it.
            Failed::Store(StoreError::NotFound(_)) => Failed::Overtaken,
            error => error,
        })
    }

    async fn use_items(&self, history: &[i64]) -> Outcome<()> {
        let update = "UPDATE tidemill.uses SET places = uses.places + given.places
             FROM (SELECT item, count(*) AS places FROM unnest($1::BIGINT[]) AS item GROUP BY item) AS given WHERE uses.item = given.item";
        self.transaction.execute(update, &[&history]).await?;
        Ok(())
    }

    /// Deletes the items of a history that no other history names.
    async fn give_up(&mut self, history: &[i64]) -> Outcome<()> {
        if history.is_empty() {
            return Ok(());
        }
        let lock = "SELECT 1 FROM tidemill.uses WHERE item = ANY($1) ORDER BY item FOR UPDATE";
        self.transaction.execute(lock, &[&history]).await?;
        let update = "UPDATE tidemill.uses SET places = uses.places - given.places
             FROM (SELECT item, count(*) AS places FROM unnest($1::BIGINT[]) AS item GROUP BY item) AS given WHERE uses.item = given.item";
        self.transaction.execute(update, &[&history]).await?;
        let delete = "WITH gone AS (DELETE FROM tidemill.uses WHERE item = ANY($1) AND places = 0 RETURNING item),
             deleted AS (
                 DELETE FROM tidemill.items USING gone WHERE items.number = gone.item RETURNING items.owner, octet_length(items.body) AS bytes)
             SELECT owner, sum(bytes + $2::BIGINT)::BIGINT FROM deleted GROUP BY owner";
        for row in self.transaction.query(delete, &[&history, &(ITEM_OVERHEAD as i64)]).await? {
            self.count_bytes(row.get(0), -row.get::<_, i64>(1));
        }
        Ok(())
    }

    async fn check_history(&self, id: &str, history: &[i64]) -> Outcome<()> {
        Ok(size(&self.transaction, history).await?.check_history(id, history.len(), self.limits)?)
    }

    /// Updates a conversation's totals.
    async fn count(&self, record: i64) -> Outcome<()> {
        let update = "UPDATE tidemill.records SET messages = counted.messages, tokens = counted.tokens FROM (
                 SELECT count(*) FILTER (WHERE items.id LIKE 'msg\\_%') AS messages, coalesce(sum(items.tokens), 0)::BIGINT AS tokens
                 FROM tidemill.records AS conversation, unnest(conversation.history) AS item
                 JOIN tidemill.items ON items.number = item WHERE conversation.number = $1) AS counted
             WHERE records.number = $1";
        self.transaction.execute(update, &[&record]).await?;
        Ok(())
    }
}

/// A record that is locked against concurrent changes.
struct Locked {
    number: i64,
    body: String,
    history: Vec<i64>,
    /// The number of items that its summary covers, and the summary's size.
    summarized: i64,
    summary_bytes: i32,
}

impl From<StoreError> for Failed {
    fn from(error: StoreError) -> Self {
        Self::Store(error)
    }
}
