//! The operations of the operators' port. Each row of the table of roles has one.

use super::{
    clients::SERVER,
    operation::{
        Content::{self, Events, Json, Nothing},
        Operation, route,
    },
    schema::{
        Field,
        Kind::{Any, Either, Integer, Map, Named, Text, Words},
        field,
    },
};

const CONSOLE: &str = "Console";
const CLUSTER: &str = "Cluster";
const TENANTS: &str = "Tenants";
const REVIEW: &str = "Review";
const REGISTRY: &str = "Registry";
const ROLLOUTS: &str = "Rollouts";

const WHOSE: &[Field] = &[field("tenant", Text, "The tenant.").needed(), field("user", Text, "The user; the whole tenant without one.")];
const EXPECTED: &[Field] = &[field("expected", Integer, "The revision to be deleted.")];

/// All are Tidemill's own.
pub(super) const OPERATIONS: &[Operation] = &[
    route("GET", "/", "greet", SERVER, "Says that this is Tidemill.").gives(Content::Text("text/plain")),
    route("GET", "/health", "health", SERVER, "Answers while the process lives.").gives(Nothing),
    route("GET", "/ready", "ready", SERVER, "Answers when a request would succeed.").gives(Nothing),
    route("GET", "/ready/generate", "ready_to_generate", SERVER, "Answers when every model has just computed a token.")
        .gives(Json(Named("ProbedModels"))),
    route("POST", "/reset_prefix_cache", "reset_prefix_cache", CLUSTER, "Makes all cached blocks and answers unfindable, as in vLLM.")
        .query(&[field("model", Text, "The model; all without it.")])
        .gives(Json(Named("CacheReset"))),
    route("GET", "/openapi.json", "describe", SERVER, "Gives this document.").gives(Json(Map(&Any))),
    route("GET", "/console", "console", CONSOLE, "Shows a web page.").gives(Content::Text("text/html")),
    route("GET", "/console/", "console_with_slash", CONSOLE, "Shows a web page.").gives(Content::Text("text/html")),
    route("GET", "/console/{asset}", "console_asset", CONSOLE, "Gives a file of the web page.").gives(Content::Text("text/plain")),
    route("GET", "/console/sign-in", "sign_in", CONSOLE, "Leads a browser to the identity provider.").gives(Nothing),
    route("GET", "/console/callback", "sign_in_callback", CONSOLE, "Takes a browser back from the identity provider.")
        .query(&[
            field("code", Text, "The provider's code."),
            field("state", Text, "The state that the sign-in began with."),
            field("error", Text, "The provider's reason of a refusal."),
        ])
        .gives(Nothing),
    route("GET", "/console/who", "console_who", CONSOLE, "Shows who is signed in.").gives(Json(Named("Who"))),
    route("POST", "/console/sign-out", "sign_out", CONSOLE, "Ends a browser's session.").gives(Json(Named("Shown"))),
    route("GET", "/metrics", "metrics", CLUSTER, "Gives the metrics in Prometheus' text format.").gives(Content::Text("text/plain")),
    route("GET", "/cluster", "cluster", CLUSTER, "Shows the cluster.").gives(Json(Named("Cluster"))),
    route("GET", "/cluster/events", "cluster_events", CLUSTER, "Shows the cluster as it changes.").gives(Events(Named("Shown"))),
    route("GET", "/admin/keys", "list_keys", TENANTS, "Lists keys, without their secrets.").gives(Json(Named("Shown"))),
    route("POST", "/admin/keys", "create_key", TENANTS, "Makes a key: the answer has its secret.")
        .takes(Json(Named("NewKey")))
        .gives(Json(Named("Shown"))),
    route("DELETE", "/admin/keys/{id}", "revoke_key", TENANTS, "Revokes a key.").gives(Json(Named("Shown"))),
    route("GET", "/admin/tenants", "list_tenants", TENANTS, "Lists tenants and tiers.").gives(Json(Named("Shown"))),
    route("PUT", "/admin/tenants/{id}", "put_tenant", TENANTS, "Makes or changes a tenant.")
        .takes(Json(Named("TenantChange")))
        .gives(Json(Named("Shown"))),
    route("GET", "/admin/spend", "spend", TENANTS, "Shows what was spent, beside the budgets.").gives(Json(Named("Shown"))),
    route("GET", "/admin/erasures", "list_erasures", TENANTS, "Lists orders to erase.").gives(Json(Named("Shown"))),
    route("POST", "/admin/erasures", "erase", TENANTS, "Erases a tenant's or a user's data, or counts it.")
        .takes(Json(Named("ErasureRequest")))
        .gives(Json(Named("Shown"))),
    route("GET", "/admin/export", "export", TENANTS, "Writes a tenant's or a user's data as JSON lines.")
        .query(WHOSE)
        .gives(Content::Text("application/jsonl")),
    route("GET", "/admin/backup", "backup", CLUSTER, "Writes what this coordinator keeps as a tar file.")
        .gives(Content::Bytes("application/x-tar")),
    route("GET", "/admin/appeals", "list_appeals", REVIEW, "Lists appeals.")
        .query(&[field("state", Text, "The state of those that are listed; all without it.")])
        .gives(Json(Named("Shown"))),
    route("POST", "/admin/appeals/{id}", "decide_appeal", REVIEW, "Decides an appeal.")
        .takes(Json(Named("AppealDecision")))
        .gives(Json(Named("Shown"))),
    route("GET", "/admin/feedback", "list_feedback", REVIEW, "Lists users' opinions.")
        .query(&[
            field("rating", Words(&["up", "down"]), "The rating of those that are listed; all without it."),
            field("response_id", Text, "The answer whose opinions are listed."),
            field("limit", Integer, "The most opinions."),
        ])
        .gives(Json(Named("Shown"))),
    route("GET", "/registry", "list_records", REGISTRY, "Lists agreed records.")
        .query(&[field("kind", Text, "The kind of those that are listed; all without it.")])
        .gives(Json(Named("RecordList"))),
    route("GET", "/registry/{kind}/{*key}", "get_record", REGISTRY, "Shows a record.").gives(Json(Named("Record"))),
    route("PUT", "/registry/{kind}/{*key}", "put_record", REGISTRY, "Writes a record.")
        .takes(Json(Named("RecordChange")))
        .gives(Json(Named("Shown"))),
    route("DELETE", "/registry/{kind}/{*key}", "delete_record", REGISTRY, "Deletes a record.").query(EXPECTED).gives(Json(Named("Shown"))),
    route("DELETE", "/coordinators/{name}", "remove_coordinator", REGISTRY, "Removes a coordinator that will not return.")
        .gives(Json(Named("Shown"))),
    route("GET", "/rollouts", "list_rollouts", ROLLOUTS, "Lists rollouts.").gives(Json(Named("Shown"))),
    route("POST", "/rollouts", "start_rollout", ROLLOUTS, "Starts a rollout.").takes(Json(Named("NewRollout"))).gives(Json(Named("Shown"))),
    route("POST", "/rollouts/{action}", "act_on_rollout", ROLLOUTS, "Pauses, resumes, aborts, scores, votes on or forgets a rollout.")
        .takes(Json(Either(&[Named("RolloutAction"), Named("RolloutVotes")])))
        .gives(Json(Named("Shown"))),
];
