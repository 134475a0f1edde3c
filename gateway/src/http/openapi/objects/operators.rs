//! Bodies that operators send and read.

use crate::http::openapi::schema::{
    Kind::{self, Any, Bool, Either, Integer, List, Named, Number, Text, Words},
    Object,
    Part::Own,
    answered, field, sent,
};

/// A number, or `none` for no limit.
const LIMIT: Kind = Either(&[Integer, Words(&["none"])]);
/// A sum of money, or `none` for no budget.
const AMOUNT: Kind = Either(&[Number, Text]);

pub(super) const OBJECTS: &[Object] = &[
    sent(
        "NewKey",
        "A key to be made.",
        &[Own(&[
            field("tenant", Text, "The key's tenant, which is made if it is new.").needed(),
            field("tier", Text, "The tier of a new tenant."),
            field("user", Text, "The user whose key it is."),
            field("name", Text, "A name for display."),
            field("limits", Named("Limits"), "Limits of this key alone.").not_null(),
            field("expires_in_s", Integer, "The key's life."),
        ])],
    ),
    sent(
        "Limits",
        "Limits that replace the tier's.",
        &[Own(&[
            field("requests_per_minute", LIMIT, "Requests a minute."),
            field("tokens_per_minute", LIMIT, "Tokens a minute."),
            field("tokens_per_day", LIMIT, "Tokens a day."),
            field("concurrent", LIMIT, "Requests at a time."),
            field("budget_day", AMOUNT, "Money that may be spent in a day."),
            field("budget_day_soft", AMOUNT, "Money from which answers say that the day's budget runs out."),
            field("budget_month", AMOUNT, "Money that may be spent in a month."),
            field("budget_month_soft", AMOUNT, "Money from which answers say that the month's budget runs out."),
        ])],
    ),
    sent(
        "TenantChange",
        "A tenant, or changes of one.",
        &[Own(&[
            field("tier", Text, "The tier, which a new tenant needs."),
            field("limits", Named("Limits"), "Limits that replace the tier's.").not_null(),
            field("reset_limits", Bool, "Whether earlier limits are dropped.").not_null(),
            field("semantic_cache", Bool, "Whether requests may be answered from the semantic cache."),
        ])],
    ),
    sent(
        "ErasureRequest",
        "An order to erase.",
        &[Own(&[
            field("tenant", Text, "The tenant.").needed(),
            field("user", Text, "The user; the whole tenant without one."),
            field("check", Bool, "Whether data is only counted.").not_null(),
        ])],
    ),
    sent(
        "RecordChange",
        "A record's new value.",
        &[Own(&[
            field("value", Any, "The value.").needed(),
            field("expected", Integer, "The revision to be replaced; 0 if the record must not exist."),
        ])],
    ),
    sent(
        "NewRollout",
        "A rollout to be started.",
        &[Own(&[
            field("from", Text, "The model that users leave.").needed(),
            field("to", Text, "The model that users move to.").needed(),
            field("steps", List(&Number), "The shares of users."),
            field("step_s", Integer, "The length of a step."),
            field("limits", Named("RolloutLimits"), "The differences by which `to` may be worse.").not_null(),
            field("golden", Named("Golden"), "The golden scores."),
            field("no_gate", Bool, "Whether it may start without golden scores.").not_null(),
            field("shadow", Number, "The share of requests that are repeated at `to`.").not_null(),
        ])],
    ),
    sent(
        "RolloutLimits",
        "The differences by which a new model may be worse.",
        &[Own(&[
            field("requests_min", Integer, "The least number of requests before a model is judged.").not_null(),
            field("window_s", Integer, "The length of the window.").not_null(),
            field("overdue_s", Integer, "The time after which a missing first token counts as a failure.").not_null(),
            field("errors_over", Number, "The tolerated excess of the share of failures.").not_null(),
            field("goodput_under", Number, "The tolerated deficit of the share of requests within their limits.").not_null(),
            field("latency_ratio", Number, "The tolerated ratio of the 95th percentiles.").not_null(),
            field("golden_under", Number, "The tolerated deficit of the golden score.").not_null(),
            field("thumbs_over", Number, "The tolerated excess of the share of thumbs down.").not_null(),
        ])],
    ),
    sent(
        "Golden",
        "Golden scores.",
        &[Own(&[field("from", Number, "The score of `from`.").needed(), field("to", Number, "The score of `to`.").needed()])],
    ),
    sent(
        "RolloutAction",
        "The rollout that an action is for.",
        &[Own(&[
            field("from", Text, "The model that users leave.").needed(),
            field("golden", Named("Golden"), "The scores, for the action `golden`."),
        ])],
    ),
    sent(
        "RolloutVotes",
        "Ratings that were collected elsewhere, for the action `votes`.",
        &[Own(&[
            field("model", Text, "The model.").needed(),
            field("up", Integer, "The thumbs up.").not_null(),
            field("down", Integer, "The thumbs down.").not_null(),
        ])],
    ),
    sent(
        "AppealDecision",
        "The decision of an appeal.",
        &[Own(&[
            field("decision", Words(&["upheld", "overturned"]), "The decision.").needed(),
            field("note", Text, "The reviewer's words.").not_null(),
        ])],
    ),
    answered("RecordList", "Agreed records.", &[Own(&[field("records", List(&Named("Record")), "The records.").needed()])]),
    answered(
        "Record",
        "An agreed record.",
        &[Own(&[
            field("kind", Text, "The kind.").needed(),
            field("key", Text, "The key.").needed(),
            field("value", Any, "The value.").needed(),
            field("revision", Integer, "The revision.").needed(),
        ])],
    ),
    answered(
        "Cluster",
        "The cluster as this coordinator sees it. It has further fields.",
        &[Own(&[field("replays", Any, "Recorded answers.").needed(), field("registry", Any, "The coordinators' agreement.").needed()])],
    ),
    answered(
        "CacheReset",
        "The notice that cached blocks are found no more.",
        &[Own(&[field("models", List(&Text), "The models whose cache was reset.").needed()])],
    ),
    answered(
        "ProbedModels",
        "The models, each of which has computed a token.",
        &[Own(&[field("models", List(&Named("ProbedModel")), "The models.").needed()])],
    ),
    answered(
        "ProbedModel",
        "A model that has computed a token.",
        &[Own(&[field("model", Text, "The name.").needed(), field("took_ms", Number, "The time that it took.").needed()])],
    ),
    answered("Shown", "An object. Its fields are in the guide of its subject.", &[Own(&[])]),
];
