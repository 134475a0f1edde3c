//! Items that are found by their ids, and their sizes, which are known before they are read.

use super::{
    super::Size,
    failed::{Outcome, missing},
};
use std::collections::HashMap;
use tokio_postgres::Row;

/// The numbers of items, from rows of ids with their numbers.
pub(super) fn numbers(ids: &[&str], rows: &[Row]) -> Outcome<Vec<i64>> {
    let numbers: HashMap<&str, i64> = rows.iter().map(|row| (row.get(0), row.get(1))).collect();
    ids.iter().map(|id| numbers.get(id).copied().ok_or_else(|| missing(id))).collect()
}

/// The sizes of bodies, one in a row.
pub(super) fn bytes(rows: &[Row]) -> impl Iterator<Item = u64> {
    rows.iter().map(|row| u64::from(row.get::<_, i32>(0).unsigned_abs()))
}

/// The size of items.
pub(super) async fn size(transaction: &tokio_postgres::Transaction<'_>, numbers: &[i64]) -> Outcome<Size> {
    if numbers.is_empty() {
        return Ok(Size::default());
    }
    let sums = "SELECT coalesce(sum(octet_length(items.body)), 0)::BIGINT,
             coalesce(sum(items.tokens) FILTER (WHERE items.id NOT LIKE 'rs\\_%'), 0)::BIGINT
         FROM unnest($1::BIGINT[]) AS item JOIN tidemill.items ON items.number = item";
    let row = transaction.query_one(sums, &[&numbers]).await?;
    Ok(Size { bytes: row.get::<_, i64>(0).unsigned_abs(), tokens: row.get::<_, i64>(1).unsigned_abs() })
}
