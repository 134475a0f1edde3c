//! The metrics that vLLM's dashboards and the Gateway API inference extension read, under their names, beside our own.
//!
//! Sources of the names: the page of metrics among the design documents of vLLM; the extension's model server protocol, by whose metrics it
//! picks an endpoint.
//! A coordinator is one endpoint, however many workers it has, so a model's values are sums over its workers; KV use is their mean.

use super::exposition::escaped;
use std::fmt::Write;
use tidemill_cluster::{ClusterView, ModelView};
use tidemill_proto::message::Role;

/// Our histograms and counters, and their names there.
const SAME: [(&str, &str); 6] = [
    ("tidemill_ttft_seconds", "vllm:time_to_first_token_seconds"),
    ("tidemill_tpot_seconds", "vllm:request_time_per_output_token_seconds"),
    ("tidemill_itl_seconds", "vllm:inter_token_latency_seconds"),
    ("tidemill_e2e_seconds", "vllm:e2e_request_latency_seconds"),
    ("tidemill_prompt_tokens_total", "vllm:prompt_tokens_total"),
    ("tidemill_generation_tokens_total", "vllm:generation_tokens_total"),
];

/// Appends them to our own metrics.
pub(super) fn write(text: &mut String, cluster: &ClusterView) {
    let ours = text.len();
    let mut gauge = |name: &str, help: &str, of: &dyn Fn(&ModelView) -> f64| {
        let _ = writeln!(text, "# HELP vllm:{name} {help}\n# TYPE vllm:{name} gauge");
        for model in &cluster.models {
            let _ = writeln!(text, "vllm:{name}{{model_name=\"{}\"}} {}", escaped(&model.name), of(model));
        }
    };
    gauge("num_requests_running", "As tidemill_requests_running, by model", &|model| model.sequences_running as f64);
    gauge("num_requests_waiting", "As tidemill_requests_waiting, by model", &|model| model.sequences_waiting as f64);
    gauge("kv_cache_usage_perc", "Share of decode workers' device blocks in use, by model", &|model| kv_used(cluster, model));
    gauge("gpu_cache_usage_perc", "The same under its former name", &|model| kv_used(cluster, model));
    // Ours are of all models together.
    let [model] = &cluster.models[..] else { return };
    let copies = copies(&text[..ours], &escaped(&model.name));
    text.push_str(&copies);
}

/// The mean over a model's decode workers.
fn kv_used(cluster: &ClusterView, model: &ModelView) -> f64 {
    let workers = cluster.members.iter().filter(|member| member.role == Role::Decode && member.model == model.name);
    let (used, total) = workers.fold((0.0, 0.0), |(used, total), worker| {
        let blocks = worker.report.blocks.hbm;
        (used + blocks.used as f64, total + blocks.total as f64)
    });
    if total > 0.0 { used / total } else { 0.0 }
}

/// The lines of our metrics that have another name as well, under that.
fn copies(text: &str, model: &str) -> String {
    let mut copies = String::new();
    for line in text.lines() {
        let (comment, sample) = match line.strip_prefix("# ").and_then(|rest| rest.split_once(' ')) {
            Some((kind, rest)) => (format!("# {kind} "), rest),
            None => (String::new(), line),
        };
        let Some((rest, theirs)) = SAME.iter().find_map(|(ours, theirs)| Some((sample.strip_prefix(ours)?, theirs))) else { continue };
        let of_histogram = ["_bucket", "_sum", "_count"].into_iter().find_map(|end| Some((end, rest.strip_prefix(end)?)));
        let (end, rest) = of_histogram.unwrap_or(("", rest));
        // `{` begins a sample's labels, and a space its value or a comment's text: anything else is a longer name.
        let _ = match (rest.strip_prefix('{'), rest.strip_prefix(' ')) {
            (Some(labels), _) => writeln!(copies, "{theirs}{end}{{model_name=\"{model}\",{labels}"),
            (None, Some(text)) if !comment.is_empty() => writeln!(copies, "{comment}{theirs} {text}"),
            (None, Some(value)) => writeln!(copies, "{theirs}{end}{{model_name=\"{model}\"}} {value}"),
            (None, None) => Ok(()),
        };
    }
    copies
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ours_are_there_under_the_other_names_with_the_model() {
        let text = "# HELP tidemill_ttft_seconds Time\n# TYPE tidemill_ttft_seconds histogram\n\
                    tidemill_ttft_seconds_bucket{le=\"0.1\"} 3\ntidemill_ttft_seconds_sum 0.5\ntidemill_ttft_seconds_count 4\n\
                    tidemill_ttft_predicted_seconds_sum 1\ntidemill_prompt_tokens_total 70\n# TYPE tidemill_rescues_total counter\n";
        assert_eq!(
            copies(text, "m"),
            "# HELP vllm:time_to_first_token_seconds Time\n# TYPE vllm:time_to_first_token_seconds histogram\n\
             vllm:time_to_first_token_seconds_bucket{model_name=\"m\",le=\"0.1\"} 3\n\
             vllm:time_to_first_token_seconds_sum{model_name=\"m\"} 0.5\nvllm:time_to_first_token_seconds_count{model_name=\"m\"} 4\n\
             vllm:prompt_tokens_total{model_name=\"m\"} 70\n"
        );
    }
}
