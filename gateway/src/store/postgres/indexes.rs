//! Indexes along which old records are found. The first coordinator that needs one makes it while all go on reading and writing.

use super::{super::Kind, failed::Outcome};
use std::time::Duration;
use tokio_postgres::Client;

/// The longest time that an index takes: far more than for millions of records.
pub(super) const MADE_WITHIN: Duration = Duration::from_secs(3600);
/// The lock under which an index is made: an arbitrary number that is used for no other lock.
const LOCK: i64 = 0x7469_6465_6964_7873;

/// Makes the index of the times of a kind, if it is not there yet. Returns whether it is: another coordinator may be making it.
pub(super) async fn by_age(client: &mut Client, kind: Kind) -> Outcome<bool> {
    let (name, on) = match kind {
        Kind::Memory => ("memories_by_age", "(created, number) WHERE kind = 2"),
        Kind::Response | Kind::Conversation => ("records_by_kind_and_age", "(kind, used, number)"),
    };
    if is_whole(client, name).await? == Some(true) {
        return Ok(true);
    }
    // No coordinator waits for this lock: the index waits for transactions that are under way, and they would wait for each other.
    if !client.query_one("SELECT pg_try_advisory_lock($1)", &[&LOCK]).await?.get::<_, bool>(0) {
        return Ok(false);
    }
    let made = make(client, name, on).await;
    let unlocked = client.batch_execute(&format!("RESET statement_timeout; SELECT pg_advisory_unlock({LOCK})")).await;
    made?;
    Ok(unlocked.map(|()| true)?)
}

/// Whether an index is there, and if so, whether all of it is: one whose making was cut off is not used.
async fn is_whole(client: &Client, name: &str) -> Outcome<Option<bool>> {
    let select = "SELECT indisvalid FROM pg_index WHERE indexrelid = to_regclass($1)";
    Ok(client.query_opt(select, &[&format!("tidemill.{name}")]).await?.map(|row| row.get(0)))
}

async fn make(client: &Client, name: &str, on: &str) -> Outcome<()> {
    client.batch_execute("SET statement_timeout = 0").await?;
    if is_whole(client, name).await? == Some(false) {
        client.batch_execute(&format!("DROP INDEX CONCURRENTLY tidemill.{name}")).await?;
    }
    Ok(client.batch_execute(&format!("CREATE INDEX CONCURRENTLY IF NOT EXISTS {name} ON tidemill.records {on}")).await?)
}
