//! Checks of a cluster, based on what a coordinator shows.

use super::checks::{Finding, failure, good, warning};
use crate::operators::TokenArgs;
use anyhow::{Context, bail};
use serde::Deserialize;
use std::time::Duration;

const ANSWER: Duration = Duration::from_secs(5);
/// Seconds without a heartbeat after which a member counts as silent. Heartbeats are sent every second.
const SILENT_S: f64 = 3.0;

/// The fields of `/cluster` that are read.
#[derive(Debug, Deserialize)]
pub struct Cluster {
    pub members: Vec<Member>,
}

#[derive(Debug, Deserialize)]
pub struct Member {
    pub name: String,
    pub role: String,
    pub draining: bool,
    #[serde(default)]
    pub unhealthy: bool,
    pub seconds_since_heartbeat: f64,
}

/// Queries a coordinator. If it does not answer, that is a finding.
pub async fn check(url: &str, token: &TokenArgs) -> anyhow::Result<Vec<Finding>> {
    let base = url.trim_end_matches('/').trim_end_matches("/v1");
    if !base.starts_with("http://") || reqwest::Url::parse(base).is_err() {
        bail!("`{base}` is not an http:// URL such as http://127.0.0.1:9100");
    }
    let client = token.client()?.timeout(ANSWER).build()?;
    let ready = match client.get(format!("{base}/ready")).send().await {
        Ok(answer) => answer,
        Err(error) => {
            let todo = "is a coordinator running there, and do firewalls let this machine through?";
            return Ok(vec![failure("cluster", format!("{base} does not answer: {error}"), todo)]);
        }
    };
    let mut findings = Vec::new();
    let (status, text) = (ready.status(), ready.text().await.unwrap_or_default());
    findings.push(if status.is_success() {
        good("cluster", format!("{base} is ready"))
    } else {
        failure(
            "cluster",
            format!("{base} is not ready: {}", text.trim()),
            "start what it lacks; the coordinator's log says whom it refuses",
        )
    });
    let shown = client.get(format!("{base}/cluster")).send().await.with_context(|| format!("no answer from {base}/cluster"))?;
    if !shown.status().is_success() {
        let todo = "give the URL of the operators' port (`admin`)";
        findings.push(warning("members", format!("{base}/cluster answered {}", shown.status()), todo));
        return Ok(findings);
    }
    let cluster: Cluster = shown.json().await.with_context(|| format!("{base}/cluster is not what a coordinator shows"))?;
    findings.extend(members(&cluster));
    Ok(findings)
}

/// Faults of members, and the number of members of each role.
pub fn members(cluster: &Cluster) -> Vec<Finding> {
    let mut findings = Vec::new();
    for Member { name, role, draining, unhealthy, seconds_since_heartbeat: silent } in &cluster.members {
        if *unhealthy {
            findings.push(failure(
                "members",
                format!("{role} {name} computes wrongly"),
                "restart it; if it is found again, take its machine out",
            ));
        }
        if *draining {
            findings.push(warning("members", format!("{role} {name} drains"), "start another one, if it is to go for good"));
        }
        if *silent > SILENT_S {
            let todo = "is it paused, or its network cut? It is taken for dead after 5 s";
            findings.push(warning("members", format!("{role} {name} has been silent for {silent:.0} s"), todo));
        }
    }
    let count = |role: &str| cluster.members.iter().filter(|member| member.role == role && !member.unhealthy && !member.draining).count();
    let (decode, prefill, kvpool) = (count("decode"), count("prefill"), count("kvpool"));
    findings.push(match decode {
        0 => failure("members", "no decode worker: no request can be answered", "start tidemill-decode; its log says if it is refused"),
        _ => good("members", format!("{decode} decode, {prefill} prefill, {kvpool} kvpool")),
    });
    findings
}
