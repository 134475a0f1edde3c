//! The role that each route of the operators' port needs, where operators sign in: one table. A route that is not in it is refused.

use axum::http::Method;
use tidemill_tenancy::operators::Role;

/// The demand of a route on its caller.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Needed {
    /// Probes, the console's files, and the way in: there is nothing to see there.
    Nothing,
    Role(Role),
}

#[derive(Debug)]
pub(super) struct Row {
    method: &'static str,
    path: &'static str,
    pub(super) needed: Needed,
    /// Whether each request is recorded in the audit log, also the ones that were refused.
    pub(super) is_recorded: bool,
}

const NOTHING: Needed = Needed::Nothing;
const LOOK: Needed = Needed::Role(Role::Look);
const OPERATE: Needed = Needed::Role(Role::Operate);
const ADMINISTER: Needed = Needed::Role(Role::Administer);

const TABLE: &[Row] = &[
    seen("/", NOTHING),
    seen("/health", NOTHING),
    seen("/ready", NOTHING),
    // Probes have no token, and any number of them costs as much as one.
    seen("/ready/generate", NOTHING),
    seen("/console", NOTHING),
    seen("/console/", NOTHING),
    seen("/console/{asset}", NOTHING),
    seen("/console/sign-in", NOTHING),
    seen("/console/callback", NOTHING),
    seen("/console/who", NOTHING),
    // It records by itself whose session ended.
    Row { method: "POST", path: "/console/sign-out", needed: NOTHING, is_recorded: false },
    seen("/openapi.json", LOOK),
    seen("/metrics", LOOK),
    seen("/cluster", LOOK),
    seen("/cluster/events", LOOK),
    seen("/admin/spend", LOOK),
    seen("/admin/tenants", LOOK),
    seen("/registry", LOOK),
    seen("/registry/{kind}/{*key}", LOOK),
    seen("/rollouts", LOOK),
    changed("POST", "/rollouts", OPERATE),
    changed("POST", "/rollouts/{action}", OPERATE),
    changed("POST", "/reset_prefix_cache", OPERATE),
    // They have texts of prompts, without what identifies people.
    seen("/admin/appeals", OPERATE),
    changed("POST", "/admin/appeals/{id}", OPERATE),
    // Users' names, and texts as they wrote them.
    seen("/admin/keys", ADMINISTER),
    seen("/admin/feedback", ADMINISTER),
    seen("/admin/erasures", ADMINISTER),
    // An archive of everything is recorded like a change.
    changed("GET", "/admin/export", ADMINISTER),
    changed("GET", "/admin/backup", ADMINISTER),
    changed("POST", "/admin/keys", ADMINISTER),
    changed("DELETE", "/admin/keys/{id}", ADMINISTER),
    changed("PUT", "/admin/tenants/{id}", ADMINISTER),
    changed("POST", "/admin/erasures", ADMINISTER),
    // Records revoke certificates, too.
    changed("PUT", "/registry/{kind}/{*key}", ADMINISTER),
    changed("DELETE", "/registry/{kind}/{*key}", ADMINISTER),
    changed("DELETE", "/coordinators/{name}", ADMINISTER),
];

const fn seen(path: &'static str, needed: Needed) -> Row {
    Row { method: "GET", path, needed, is_recorded: false }
}

const fn changed(method: &'static str, path: &'static str, needed: Needed) -> Row {
    Row { method, path, needed, is_recorded: true }
}

/// The row of a route; `None` if it has none, and must be refused. `path` is the route's, with its parameters' names.
pub(super) fn row(method: &Method, path: &str) -> Option<&'static Row> {
    let method = if *method == Method::HEAD { "GET" } else { method.as_str() };
    TABLE.iter().find(|row| row.method == method && row.path == path)
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// The methods and paths of the table.
    pub(in crate::http) fn routes() -> BTreeSet<(String, String)> {
        TABLE.iter().map(|row| (row.method.to_owned(), row.path.to_owned())).collect()
    }

    #[test]
    fn a_route_has_one_row_and_every_change_needs_a_role_and_is_recorded() {
        assert_eq!(routes().len(), TABLE.len());
        for row in TABLE.iter().filter(|row| row.path != "/console/sign-out") {
            assert!(row.method == "GET" || row.is_recorded, "{row:?}");
            assert!(!row.is_recorded || matches!(row.needed, Needed::Role(role) if role >= Role::Operate), "{row:?}");
        }
        for open in TABLE.iter().filter(|row| row.needed == NOTHING) {
            assert!(["/", "/health", "/ready", "/ready/generate"].contains(&open.path) || open.path.starts_with("/console"), "{open:?}");
        }
    }

    #[test]
    fn what_is_not_in_the_table_has_no_row() {
        let needed = |method: Method, path| row(&method, path).map(|row| row.needed);
        assert_eq!(needed(Method::GET, "/admin/keys"), Some(ADMINISTER));
        assert_eq!(needed(Method::HEAD, "/cluster"), Some(LOOK));
        for (method, path) in [(Method::PATCH, "/admin/keys"), (Method::DELETE, "/admin/tenants/{id}"), (Method::GET, "/admin/new")] {
            assert_eq!(needed(method, path), None, "{path}");
        }
    }
}
