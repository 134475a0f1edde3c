//! Pages of stored items as clients list them.

use crate::{
    base::json,
    requests::{error::ApiError, parse},
    store::Page,
};
use serde::Deserialize;
use serde_json::Value;

/// Limits on the number of items on one page.
const PAGE_MAX: usize = 100;
const PAGE_DEFAULT: usize = 20;

/// Reads stored JSON.
pub(super) fn parsed(id: &str, body: &str) -> Result<Value, ApiError> {
    json::from_slice(body.as_bytes()).map_err(|error| not_json(id, &error))
}

pub(super) fn not_json(id: &str, error: &serde_json::Error) -> ApiError {
    ApiError::internal(format!("what is stored as `{id}` cannot be read: {error}"))
}

/// The query for a list of items.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub struct PageQuery {
    after: Option<String>,
    limit: Option<usize>,
    order: Option<String>,
}

pub(super) fn page_wanted(PageQuery { after, limit, order }: PageQuery) -> Result<Page, ApiError> {
    let descending = match order.as_deref() {
        None | Some("desc") => true,
        Some("asc") => false,
        Some(other) => return Err(ApiError::invalid("order", format!("`order` is `{other}`: it must be `asc` or `desc`"))),
    };
    let limit = parse::in_range("limit", limit.unwrap_or(PAGE_DEFAULT), 1..=PAGE_MAX)?;
    Ok(Page { after, limit, descending })
}
