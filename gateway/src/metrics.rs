//! `/metrics`, under the names of ARCHITECTURE §10. The gateway's own measurements go through the `metrics` crate; workers'
//! reports are written out as they are (`exposition`), so that they vanish with their workers. Some are there a second time, under the
//! names that others read (`vllm`).

mod exposition;
pub mod recent;
pub mod usage;
mod vllm;

use crate::{
    base::{registry::RegistryView, shares::Refused},
    cache::replay::Counts,
};
use metrics::{counter, describe_counter, describe_gauge, describe_histogram, gauge, histogram};
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use std::{
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};
use tidemill_cluster::{
    ClusterView,
    class::{ClassId, Classes},
};
use tidemill_proto::message::{Role, StepSample};
use tidemill_tenancy::{shared, sink};
use usage::RankedBy;

/// Upper bounds of the latency histograms, in seconds.
const SECONDS: &[f64] =
    &[0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0];
const ROWS: &[f64] = &[1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0];

/// The process's recorder: a single one, even if a test runs several coordinators in it.
static RECORDER: OnceLock<PrometheusHandle> = OnceLock::new();

/// Starts recording.
pub fn install() {
    RECORDER.get_or_init(|| {
        let recorder = PrometheusBuilder::new()
            .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), SECONDS)
            .and_then(|builder| builder.set_buckets_for_metric(Matcher::Full("tidemill_batch_size".into()), ROWS))
            .expect("the bounds are not empty")
            .build_recorder();
        let handle = recorder.handle();
        if metrics::set_global_recorder(recorder).is_err() {
            tracing::warn!("could not install the metrics recorder; /metrics shows workers' reports only");
        }
        describe();
        handle
    });
}

fn describe() {
    // Requests
    describe_counter!(
        "tidemill_requests_total",
        "Requests that ended, by `outcome`: ok, invalid (4xx), rejected (429, 503), failed, cancelled (the client left)"
    );
    describe_histogram!("tidemill_ttft_seconds", "Time from a request's arrival to its first token, per choice");
    describe_histogram!(
        "tidemill_ttft_predicted_seconds",
        "Time to first token that the scheduler predicted, of choices that ended; far off means that the cost model does not fit yet"
    );
    describe_histogram!("tidemill_tpot_seconds", "Mean time per token after the first, per choice");
    describe_histogram!("tidemill_itl_seconds", "Time between two tokens of a choice");
    describe_histogram!("tidemill_e2e_seconds", "Time from a request's arrival to its last token");
    describe_gauge!("tidemill_goodput_ratio", "Share of finished choices of a `class` that kept its limits, since start");
    describe_counter!(
        "tidemill_class_choices_total",
        "Choices by `class` and `outcome`: attained or missed its limits, or rejected (429, 503)"
    );
    describe_counter!("tidemill_prompt_tokens_total", "Prompt tokens of requests that ended");
    describe_counter!("tidemill_generation_tokens_total", "Tokens generated for requests that ended");
    describe_histogram!(
        "tidemill_event_loop_delay_seconds",
        "Delay of tasks in an event `loop`: that of clients (front_door), or of workers and other coordinators (links); both should be milliseconds"
    );
    describe_counter!(
        "tidemill_traces_total",
        "Traces that were to be kept, by `outcome`: sent to the collector, or lost, because it did not take them or too many waited, in all or of one tenant"
    );
    // Engines' steps
    describe_histogram!("tidemill_step_seconds", "Time of one engine step, by `worker` and `role`");
    describe_histogram!("tidemill_batch_size", "Sequences that decoded a token in one step, by `worker` and `role`");
    // Clients' limits
    describe_counter!(
        "tidemill_quota_refusals_total",
        "Requests refused because a tenant has used up a limit, by `kind`: requests, tokens, tokens-per-day, concurrent, budget-day, budget-month"
    );
    describe_counter!("tidemill_erased_total", "What was erased on an operator's order, by its `kind`");
    describe_counter!(
        "tidemill_budget_warnings_total",
        "Requests that were let pass though a soft budget is used up, by its `scope` (tenant, key, model) and `period` (day, month)"
    );
    describe_gauge!(
        "tidemill_quota_server_used",
        "1 while the quota server decides, 0 while this coordinator's share of the limits applies"
    );
    describe_counter!(
        "tidemill_quota_decisions_total",
        "Requests whose quota was decided, where there is a quota server, `by` it (server), or by this coordinator's share while it failed (share)"
    );
    describe_counter!(
        "tidemill_quota_server_failures_total",
        "Failures of the quota server by `reason`: no answer in time (slow), no connection (gone), an answer that says no (refused)"
    );
    describe_gauge!("tidemill_quota_server_behind", "Charges and settlements that the quota server has yet to be told");
    describe_counter!("tidemill_quota_server_lost_total", "Charges and settlements that were given up; should be 0");
    describe_histogram!("tidemill_quota_server_seconds", "Time that requests waited for their quota, where there is a quota server");
    describe_counter!(
        "tidemill_share_refusals_total",
        "Refusals by `resource` and `share`: the client has its share (own), or others have all of it (total)"
    );
    describe_counter!(
        "tidemill_connections_closed_total",
        "Connections closed by `reason`: the client took too long for a head, rested too long (idle), or gave way to others (displaced)"
    );
    describe_counter!(
        "tidemill_door_refusals_total",
        "Requests that a web page may have made, by `what` gave them away: host, origin, site, content_type"
    );
    describe_gauge!("tidemill_data_free_bytes", "Free bytes of the data directory's disk, when a file was last written there for a client");
    describe_counter!(
        "tidemill_disk_refusals_total",
        "Files and answers of batches that were not written, to keep `batch_disk_reserve` free"
    );
    describe_gauge!("tidemill_body_bytes", "Bytes of request bodies on their way, or being read");
    describe_counter!("tidemill_shed_total", "Requests turned away because there is too much to do, by `tier`");
    describe_gauge!("tidemill_shedding_step", "Steps of tiers that are turned away: 0 none, 1 the first ones, 2 the second ones, too");
    describe_counter!("tidemill_jwks_fetches_total", "Fetches of the identity provider's keys, by `outcome`: ok, failed");
    describe_counter!(
        "tidemill_operator_jwks_fetches_total",
        "Fetches of the keys of the operators' identity provider, by `outcome`: ok, failed"
    );
    describe_counter!(
        "tidemill_operator_requests_total",
        "Sign-ins and requests that need a role, by `outcome`: allowed, signed_in, no_credential, token, role, origin, provider, audit, no_row"
    );
    // Usage
    describe_counter!(
        "tidemill_usage_events_lost_total",
        "Events of the usage log that there was no room for while the disk failed; should be 0"
    );
    describe_gauge!("tidemill_usage_log_failing", "1 while the usage log cannot be written; should be 0");
    describe_counter!("tidemill_usage_sink_events_total", "Usage events that arrived where they are sent");
    describe_counter!("tidemill_usage_sink_failures_total", "Requests with usage events that failed");
    describe_gauge!("tidemill_usage_sink_failing", "1 while usage events do not arrive");
    describe_gauge!("tidemill_usage_sink_behind_bytes", "Bytes of the usage log that have not arrived");
    describe_counter!("tidemill_kafka_events_total", "Events of a `log` (usage, audit, feedback) that all replicas of a Kafka topic have");
    describe_counter!("tidemill_kafka_failures_total", "Groups of a `log`'s events that did not all arrive in Kafka, and were sent again");
    describe_gauge!("tidemill_kafka_failing", "1 while events of a `log` do not arrive in Kafka");
    describe_gauge!("tidemill_kafka_behind_events", "Events of a `log` that have not arrived in Kafka");
    // Repeats and caches
    describe_counter!(
        "tidemill_replays_total",
        "Requests with an Idempotency-Key, and streams asked for by id, by `outcome`: started, joined, replayed, resumed, recomputed, not-kept. Those that started, were recomputed or not kept count as requests, too"
    );
    describe_gauge!("tidemill_replay_bytes", "Bytes of answers kept for repeated requests");
    describe_gauge!("tidemill_replay_recordings", "Answers kept for repeated requests, by `state`: running, ended");
    describe_counter!(
        "tidemill_replay_forgotten_total",
        "Such answers by `reason`: made room before their time (evicted), had their time (expired), were given up since no client came back (abandoned), could not be joined any more for want of room (passed)"
    );
    describe_counter!(
        "tidemill_expired_total",
        "Stored things that were deleted because of their age, by `kind`: responses, conversations, memories, files, batches, opinions, audit"
    );
    describe_counter!(
        "tidemill_evicted_total",
        "Stored things of clients that made room, by `kind`: records (conversations and responses), feedback; the log says whose"
    );
    describe_counter!(
        "tidemill_response_cache_total",
        "Greedy and seeded requests of one prompt, by `outcome`: hit, miss. A hit counts as a request, too"
    );
    describe_gauge!("tidemill_response_cache_bytes", "Bytes of answers in the response cache, about");
    describe_gauge!("tidemill_response_cache_answers", "Answers in the response cache");
    describe_counter!(
        "tidemill_semantic_cache_total",
        "Questions of tenants that opted in, by `outcome`: hit, miss. A hit counts as a request, too"
    );
    describe_gauge!("tidemill_semantic_cache_bytes", "Bytes of questions and answers in the semantic cache, about");
    describe_gauge!("tidemill_semantic_cache_answers", "Answers in the semantic cache");
    describe_histogram!("tidemill_semantic_cache_seconds", "Time of one look for a similar question");
    describe_histogram!("tidemill_semantic_cache_read_seconds", "Time in which semantic_cache.model read a question, or was given up");
    describe_counter!(
        "tidemill_semantic_cache_unread_total",
        "Questions that semantic_cache.model did not read, by `reason`: no_model, no_worker, too_long, busy, rejected, failed, overdue, paused"
    );
    // Conversations, batches and tools
    describe_counter!(
        "tidemill_recall_ranked_total",
        "Chats with context.model whose old messages or facts were ranked, `by` what: words, both (words and vectors)"
    );
    describe_counter!(
        "tidemill_recall_unread_total",
        "Questions, old messages and facts that context.model did not read, by `reason`: no_model, no_worker, busy, rejected, failed, overdue, paused"
    );
    describe_gauge!("tidemill_recall_bytes", "Bytes of vectors of old messages and facts, about");
    describe_gauge!("tidemill_recall_texts", "Old messages and facts whose vectors are kept");
    describe_histogram!("tidemill_recall_read_seconds", "Time in which context.model read a question, or was given up");
    describe_counter!(
        "tidemill_summaries_total",
        "Summaries that conversations needed, by `outcome`: made, failed, gone (the conversation was deleted or changed), dropped (too many waited)"
    );
    describe_gauge!("tidemill_summaries_waiting", "Conversations that wait to be summarized");
    describe_gauge!("tidemill_batches_running", "Batches that have not ended");
    describe_counter!(
        "tidemill_batch_requests_total",
        "Attempts of batches' requests, by `outcome`: completed, failed (an answer in the error file), later"
    );
    describe_counter!(
        "tidemill_grammar_verdicts_total",
        "Clients' schemas, expressions and grammars by `outcome`: passed, refused, too_much_work (ended at a limit, or slow at each token), known (judged before), unavailable"
    );
    describe_counter!("tidemill_server_tool_calls_total", "Calls of tools that the coordinator runs, by `tool` and `outcome`: ok, failed");
    describe_histogram!("tidemill_server_tool_seconds", "Time of one call of such a tool");
    describe_gauge!("tidemill_mcp_server_up", "1 if an MCP `server` told its tools when it was last asked, else 0");
    // Safety and people's data
    describe_counter!(
        "tidemill_safety_blocks_total",
        "Prompts refused (input) and answers cut (output) by safety checks, by `side`, `category` and `stage`"
    );
    describe_histogram!("tidemill_safety_input_seconds", "Time of checking one prompt, without a model");
    describe_histogram!(
        "tidemill_safety_model_seconds",
        "Time of a model's judgement of what the classifier was not sure of, by `side`: in one prompt (input), or in one passage of an answer (output)"
    );
    describe_counter!(
        "tidemill_safety_bypasses_total",
        "Doubtful prompts and passages that passed because the judging model did not answer, by `side` and `reason`: no_worker, busy, overdue, failed, resting"
    );
    describe_counter!(
        "tidemill_safety_unchecked_total",
        "Prompts refused and answers cut because the judging model did not answer, by `side` and `reason`: no_worker, busy, overdue, failed, resting, unclear (it said neither of its words)"
    );
    describe_counter!("tidemill_safety_disclaimers_total", "Disclaimers that were said after answers, by `name`");
    describe_counter!("tidemill_audit_lost_total", "Records that the audit log had no room for, because its disk failed; should be 0");
    describe_counter!(
        "tidemill_feedback_total",
        "Opinions of answers, by `model` and `rating`: up, down, regenerate. A user's other opinion of the same answer counts, too"
    );
    describe_counter!(
        "tidemill_pii_redactions_total",
        "Findings by `side` and `kind`: different ones hidden from models (input), ones taken out of answers (output)"
    );
    describe_histogram!("tidemill_pii_input_seconds", "Time of finding and hiding people's data in one prompt");
    // Routes and rollouts
    describe_counter!(
        "tidemill_route_unread_total",
        "Requests that router.auto judged by form alone, by `reason`: examples (they are not read yet), no_model, no_worker, busy, rejected, failed, overdue, paused"
    );
    describe_histogram!("tidemill_route_read_seconds", "Time in which router.auto.model read a request, or was given up");
    describe_counter!(
        "tidemill_routed_total",
        "Requests that there was a model to choose for, by the `model` that answers and `by` what chose it: pin, rule, auto, overflow, rollout, asked"
    );
    describe_counter!(
        "tidemill_relayed_total",
        "Requests sent to another `region`, by `outcome`: answered, refused (the next region is asked, and at last this one answers), failed"
    );
    describe_gauge!("tidemill_rollout_share", "Share of users at the new model, by `from` and `to`");
    describe_gauge!(
        "tidemill_rollout_state",
        "State of a rollout, by `from` and `to`: 0 forgotten, 1 running, 2 paused, 3 done, 4 rolled back, 5 aborted"
    );
    describe_gauge!("tidemill_rollout_requests", "Requests within a rollout's window at all coordinators, by `from`, `to` and `side`");
    describe_gauge!("tidemill_rollout_error_ratio", "Share of these that failed, by `from`, `to` and `side`");
    describe_gauge!("tidemill_rollout_goodput_ratio", "Share of answers within their class's limits, by `from`, `to` and `side`");
    describe_gauge!("tidemill_rollout_ttft_p95_seconds", "95th percentile of the times to first token, by `from`, `to` and `side`");
    describe_gauge!("tidemill_rollout_tpot_p95_seconds", "95th percentile of the times per further token, by `from`, `to` and `side`");
    describe_counter!("tidemill_rollbacks_total", "Rollouts that this coordinator has found to be worse, by `from` and `to`");
    describe_counter!(
        "tidemill_shadows_total",
        "Requests that a rollout's new model (`to`) answered unseen, or should have, by `outcome`: same, differs, drawn, failed, dropped"
    );
}

/// The end of a request.
#[derive(Clone, Copy, Debug)]
pub enum RequestOutcome {
    Ok,
    /// The client's fault: a 4xx response.
    Invalid,
    /// Not accepted: 429 or 503.
    Rejected,
    Failed,
    /// The client disconnected.
    Cancelled,
}

impl RequestOutcome {
    pub fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Invalid => "invalid",
            Self::Rejected => "rejected",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

/// Counts traces by their outcome: sent, or lost.
pub fn count_traces(outcome: &'static str, traces: u64) {
    counter!("tidemill_traces_total", "outcome" => outcome).increment(traces);
}

pub fn count_request(outcome: RequestOutcome) {
    counter!("tidemill_requests_total", "outcome" => outcome.name()).increment(1);
}

/// Counts a refused share.
pub fn count_share_refusal(resource: &'static str, refused: Refused) {
    counter!("tidemill_share_refusals_total", "resource" => resource, "share" => refused.name()).increment(1);
}

/// Counts a connection that was closed because its client was slow or idle, or gave way to a new one.
pub fn count_closed(reason: &'static str) {
    counter!("tidemill_connections_closed_total", "reason" => reason).increment(1);
}

/// Counts a refused request that a web page may have made.
pub fn count_wrong_door(what: &'static str) {
    counter!("tidemill_door_refusals_total", "what" => what).increment(1);
}

pub fn show_data_free_bytes(bytes: u64) {
    gauge!("tidemill_data_free_bytes").set(bytes as f64);
}

/// Counts a file, or a batch's answers, for which the disk has too little free space.
pub fn count_disk_refusal() {
    counter!("tidemill_disk_refusals_total").increment(1);
}

pub fn show_body_bytes(bytes: u64) {
    gauge!("tidemill_body_bytes").set(bytes as f64);
}

/// Records the delay of a task of this event loop.
pub fn observe_loop_delay(of: &'static str, delay: Duration) {
    histogram!("tidemill_event_loop_delay_seconds", "loop" => of).record(delay);
}

pub fn count_quota_refusal(kind: &'static str) {
    counter!("tidemill_quota_refusals_total", "kind" => kind).increment(1);
}

/// Observes the time that a request has waited for its quota, where there is a quota server.
pub fn observe_quota_server(waited: Duration) {
    histogram!("tidemill_quota_server_seconds").record(waited.as_secs_f64());
}

pub fn show_quota_server(counts: &shared::Counts) {
    gauge!("tidemill_quota_server_used").set(u8::from(counts.is_used));
    for (by, decisions) in [("server", counts.by_server), ("share", counts.by_share)] {
        counter!("tidemill_quota_decisions_total", "by" => by).absolute(decisions);
    }
    let failures = counts.failures;
    for (reason, failures) in [("slow", failures.slow), ("gone", failures.gone), ("refused", failures.refused)] {
        counter!("tidemill_quota_server_failures_total", "reason" => reason).absolute(failures);
    }
    gauge!("tidemill_quota_server_behind").set(counts.behind as f64);
    counter!("tidemill_quota_server_lost_total").absolute(counts.lost);
}

pub fn count_erased(kind: &'static str, count: u64) {
    counter!("tidemill_erased_total", "kind" => kind).increment(count);
}

pub fn count_budget_warning(scope: &'static str, period: &'static str) {
    counter!("tidemill_budget_warnings_total", "scope" => scope, "period" => period).increment(1);
}

pub fn count_shed(tier: &str) {
    counter!("tidemill_shed_total", "tier" => tier.to_owned()).increment(1);
}

pub fn show_shedding(step: u8) {
    gauge!("tidemill_shedding_step").set(step);
}

pub fn show_usage_log(lost: u64, failing: bool) {
    counter!("tidemill_usage_events_lost_total").absolute(lost);
    gauge!("tidemill_usage_log_failing").set(u8::from(failing));
}

/// Sets the numbers of fetches that ended, and of those that failed.
pub fn show_jwks((ended, failed): (u64, u64)) {
    counter!("tidemill_jwks_fetches_total", "outcome" => "ok").absolute(ended.saturating_sub(failed));
    counter!("tidemill_jwks_fetches_total", "outcome" => "failed").absolute(failed);
}

pub fn show_operator_keys((ended, failed): (u64, u64)) {
    counter!("tidemill_operator_jwks_fetches_total", "outcome" => "ok").absolute(ended.saturating_sub(failed));
    counter!("tidemill_operator_jwks_fetches_total", "outcome" => "failed").absolute(failed);
}

pub fn count_operator_request(outcome: &'static str) {
    counter!("tidemill_operator_requests_total", "outcome" => outcome).increment(1);
}

pub fn show_usage_sink(counts: &sink::Counts) {
    counter!("tidemill_usage_sink_events_total").absolute(counts.events);
    counter!("tidemill_usage_sink_failures_total").absolute(counts.failed);
    gauge!("tidemill_usage_sink_failing").set(u8::from(counts.is_failing));
    gauge!("tidemill_usage_sink_behind_bytes").set(counts.behind_bytes as f64);
}

pub fn show_kafka(log: &'static str, counts: &sink::Counts) {
    counter!("tidemill_kafka_events_total", "log" => log).absolute(counts.events);
    counter!("tidemill_kafka_failures_total", "log" => log).absolute(counts.failed);
    gauge!("tidemill_kafka_failing", "log" => log).set(u8::from(counts.is_failing));
    gauge!("tidemill_kafka_behind_events", "log" => log).set(counts.behind as f64);
}

/// Counts a verdict on a client's schema, expression or grammar.
pub fn count_grammar(outcome: &'static str) {
    counter!("tidemill_grammar_verdicts_total", "outcome" => outcome).increment(1);
}

/// Counts an attempt of a batch's request.
pub fn count_batch_request(outcome: &'static str) {
    counter!("tidemill_batch_requests_total", "outcome" => outcome).increment(1);
}

pub fn show_batches(running: usize) {
    gauge!("tidemill_batches_running").set(running as f64);
}

/// Counts a summary that a conversation needed, by its outcome.
pub fn count_summary(outcome: &'static str) {
    counter!("tidemill_summaries_total", "outcome" => outcome).increment(1);
}

pub fn show_summaries_waiting(waiting: usize) {
    gauge!("tidemill_summaries_waiting").set(waiting as f64);
}

/// Counts a routed request, by model and by the rule that chose it.
pub fn count_routed(model: &str, by: &'static str) {
    counter!("tidemill_routed_total", "model" => model.to_owned(), "by" => by).increment(1);
}

/// Counts a request that was sent to another region, by its outcome.
pub fn count_relayed(region: &str, outcome: &'static str) {
    counter!("tidemill_relayed_total", "region" => region.to_owned(), "outcome" => outcome).increment(1);
}

pub fn count_shadow(to: &str, outcome: &'static str) {
    counter!("tidemill_shadows_total", "to" => to.to_owned(), "outcome" => outcome).increment(1);
}

/// Counts a request that may be a repeat, by its outcome.
pub fn count_replay(outcome: &'static str) {
    counter!("tidemill_replays_total", "outcome" => outcome).increment(1);
}

/// Logs and counts stored records that made room for others of their own tenant, or of one with less than its share.
pub fn note_evicted(kind: &'static str, tenant: &str, evicted: u64) {
    tracing::info!(kind, tenant, evicted, "evicted a tenant's oldest stored records");
    counter!("tidemill_evicted_total", "kind" => kind).increment(evicted);
}

/// Logs and counts things that were deleted because of their age.
pub fn note_expired(kind: &'static str, expired: u64) {
    tracing::info!(kind, expired, "old things were deleted");
    counter!("tidemill_expired_total", "kind" => kind).increment(expired);
}

pub fn show_replays(counts: &Counts) {
    gauge!("tidemill_replay_bytes").set(counts.bytes as f64);
    for (state, recordings) in [("running", counts.running), ("ended", counts.recordings - counts.running)] {
        gauge!("tidemill_replay_recordings", "state" => state).set(recordings as f64);
    }
    let reasons = [("evicted", counts.evicted), ("expired", counts.expired), ("abandoned", counts.abandoned), ("passed", counts.passed)];
    for (reason, recordings) in reasons {
        counter!("tidemill_replay_forgotten_total", "reason" => reason).absolute(recordings);
    }
}

/// Counts a lookup in the response cache.
pub fn count_response_cache(hit: bool) {
    counter!("tidemill_response_cache_total", "outcome" => if hit { "hit" } else { "miss" }).increment(1);
}

pub fn show_response_cache(bytes: u64, answers: usize) {
    gauge!("tidemill_response_cache_bytes").set(bytes as f64);
    gauge!("tidemill_response_cache_answers").set(answers as f64);
}

/// Counts a lookup in the semantic cache, and the time that it took.
pub fn count_semantic_cache(hit: bool, time: Duration) {
    counter!("tidemill_semantic_cache_total", "outcome" => if hit { "hit" } else { "miss" }).increment(1);
    histogram!("tidemill_semantic_cache_seconds").record(time);
}

/// Counts a question that the encoder did not read.
pub fn count_unread_question(reason: &'static str) {
    counter!("tidemill_semantic_cache_unread_total", "reason" => reason).increment(1);
}

/// Records the time in which the encoder read a question, or did not.
pub fn observe_question_read(time: Duration) {
    histogram!("tidemill_semantic_cache_read_seconds").record(time);
}

pub fn show_semantic_cache(bytes: u64, answers: usize) {
    gauge!("tidemill_semantic_cache_bytes").set(bytes as f64);
    gauge!("tidemill_semantic_cache_answers").set(answers as f64);
}

/// Counts a request that `auto` judged by its form alone, since its meaning was not read in time.
pub fn count_route_unread(reason: &'static str) {
    counter!("tidemill_route_unread_total", "reason" => reason).increment(1);
}

/// Records the time in which the encoder of `auto` read a request, or did not.
pub fn observe_route_read(time: Duration) {
    histogram!("tidemill_route_read_seconds").record(time);
}

/// Counts a chat whose old messages or facts were ranked.
pub fn count_ranked(by: RankedBy) {
    counter!("tidemill_recall_ranked_total", "by" => by.name()).increment(1);
}

/// Counts texts that the encoder of old messages and facts did not read.
pub fn count_recall_unread(reason: &'static str, texts: u64) {
    counter!("tidemill_recall_unread_total", "reason" => reason).increment(texts);
}

/// Records the time in which that encoder read a question, or did not.
pub fn observe_recall_read(time: Duration) {
    histogram!("tidemill_recall_read_seconds").record(time);
}

pub fn show_recall(bytes: u64, texts: usize) {
    gauge!("tidemill_recall_bytes").set(bytes as f64);
    gauge!("tidemill_recall_texts").set(texts as f64);
}

/// Counts the tokens of a request that ended in any way.
pub fn count_tokens(prompt: u64, generated: u64) {
    counter!("tidemill_prompt_tokens_total").increment(prompt);
    counter!("tidemill_generation_tokens_total").increment(generated);
}

pub fn observe_ttft(time: Duration) {
    histogram!("tidemill_ttft_seconds").record(time);
}

pub fn observe_predicted_ttft(ms: f64) {
    histogram!("tidemill_ttft_predicted_seconds").record(ms / 1e3);
}

pub fn observe_itl(time: Duration) {
    histogram!("tidemill_itl_seconds").record(time);
}

pub fn observe_e2e(time: Duration) {
    histogram!("tidemill_e2e_seconds").record(time);
}

/// The classes' limits, and the numbers of choices that kept them.
#[derive(Debug)]
pub struct Objectives {
    classes: Classes,
    kept: Vec<Kept>,
}

/// The counts of one class.
#[derive(Debug, Default)]
struct Kept {
    attained: AtomicU64,
    finished: AtomicU64,
}

impl Objectives {
    pub fn new(classes: Classes) -> Self {
        let kept = classes.iter().map(|_| Kept::default()).collect();
        Self { classes, kept }
    }

    pub fn classes(&self) -> &Classes {
        &self.classes
    }

    /// Counts choices of a class that were rejected.
    pub fn reject(&self, class: ClassId, choices: u64) {
        count_class(&self.classes.get(class).name, "rejected", choices);
    }

    /// Records a choice that ended normally. `tpot` is present if there were several tokens. Returns whether it kept its class's limits.
    pub fn observe(&self, class: ClassId, ttft: Duration, tpot: Option<Duration>) -> bool {
        if let Some(tpot) = tpot {
            histogram!("tidemill_tpot_seconds").record(tpot);
        }
        let limits = self.classes.get(class);
        let within = |time: Duration, limit: Option<f64>| limit.is_none_or(|limit| time.as_secs_f64() * 1e3 <= limit);
        let met = within(ttft, limits.ttft_ms) && tpot.is_none_or(|tpot| within(tpot, limits.tpot_ms));
        count_class(&limits.name, if met { "attained" } else { "missed" }, 1);
        let Some(kept) = self.kept.get(usize::from(class.0)) else { return met };
        let attained = kept.attained.fetch_add(met.into(), Ordering::Relaxed) + u64::from(met);
        let finished = kept.finished.fetch_add(1, Ordering::Relaxed) + 1;
        gauge!("tidemill_goodput_ratio", "class" => limits.name.clone()).set(attained as f64 / finished as f64);
        met
    }

    /// Returns the share of choices of all classes that met their objectives; `None` before the first choice ended.
    pub fn share_met(&self) -> Option<f64> {
        let sum = |count: fn(&Kept) -> &AtomicU64| self.kept.iter().map(|kept| count(kept).load(Ordering::Relaxed)).sum::<u64>();
        let finished = sum(|kept| &kept.finished);
        (finished > 0).then(|| sum(|kept| &kept.attained) as f64 / finished as f64)
    }
}

fn count_class(class: &str, outcome: &'static str, choices: u64) {
    counter!("tidemill_class_choices_total", "class" => class.to_owned(), "outcome" => outcome).increment(choices);
}

pub struct WorkerLabels {
    pub name: String,
    pub role: Role,
}

pub fn observe_steps(worker: &WorkerLabels, steps: &[StepSample]) {
    let labels = || [("worker", worker.name.clone()), ("role", exposition::role_name(worker.role).into())];
    for step in steps {
        histogram!("tidemill_step_seconds", &labels()).record(f64::from(step.ms) / 1e3);
        if worker.role == Role::Decode {
            histogram!("tidemill_batch_size", &labels()).record(f64::from(step.decode_rows));
        }
    }
}

/// Writes all metrics in Prometheus' text format.
pub fn render(cluster: &ClusterView, registry: &RegistryView) -> String {
    let mut text = RECORDER.get().map(PrometheusHandle::render).unwrap_or_default();
    exposition::write(&mut text, cluster);
    exposition::write_registry(&mut text, registry);
    vllm::write(&mut text, cluster);
    text
}
