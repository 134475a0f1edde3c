//! `tidemill rollout`: moves users from one model to another, at a coordinator's operators' port.

use crate::keys::At;
use anyhow::bail;
use reqwest::Method;
use serde_json::{Map, Value, json};
use std::time::{SystemTime, UNIX_EPOCH};

#[derive(Debug, clap::Subcommand)]
pub enum RolloutCommand {
    /// Begin a rollout: the first step's users go to the new model at once
    Start(Box<StartArgs>),
    /// Show all rollouts: their steps, what was measured of both models, and what they wait for
    Status {
        #[command(flatten)]
        at: At,
    },
    /// Pause a rollout: users stay where they are; it still rolls back if the new model is worse
    Pause(Named),
    /// Resume a paused step
    Resume(Named),
    /// Abort a rollout: all users go back
    Abort(Named),
    /// Give later scores on the golden set
    Golden {
        #[command(flatten)]
        of: Named,
        /// The old model's, from 0 to 1
        #[arg(long, value_name = "SCORE")]
        golden_from: f64,
        /// The new model's
        #[arg(long, value_name = "SCORE")]
        golden_to: f64,
    },
    /// Remove an ended rollout from the list: requests get the model that they name
    Forget(Named),
}

#[derive(Debug, clap::Args)]
pub struct Named {
    /// The model that users move from
    #[arg(long, value_name = "MODEL")]
    from: String,
    #[command(flatten)]
    at: At,
}

#[derive(Debug, clap::Args)]
pub struct StartArgs {
    /// The model that users move from
    #[arg(long, value_name = "MODEL")]
    from: String,
    /// The model that they move to
    #[arg(long, value_name = "MODEL")]
    to: String,
    /// Shares of users, in percent; 0 as the first is for shadows alone
    #[arg(long, value_delimiter = ',', value_name = "PERCENT,…", default_value = "1,5,25,100")]
    steps: Vec<f64>,
    /// Least time of each step, in minutes [default: 15]
    #[arg(long, value_name = "MINUTES", conflicts_with = "step_seconds")]
    step_minutes: Option<f64>,
    /// Least time of each step, in seconds
    #[arg(long, value_name = "SECONDS")]
    step_seconds: Option<u64>,
    /// The old model's score on the golden set, from 0 to 1
    #[arg(long, value_name = "SCORE", requires = "golden_to")]
    golden_from: Option<f64>,
    /// The new model's
    #[arg(long, value_name = "SCORE", requires = "golden_from")]
    golden_to: Option<f64>,
    /// Start without scores on the golden set
    #[arg(long)]
    no_gate: bool,
    /// Share of the old model's requests that the new one answers, too, unseen by clients
    #[arg(long, value_name = "SHARE", default_value = "0")]
    shadow: f64,
    /// Requests of a model before it is judged, and of the new one before a step ends [default: 50]
    #[arg(long, value_name = "N")]
    requests_min: Option<u64>,
    /// Seconds before now in which requests count [default: 60]
    #[arg(long, value_name = "S")]
    window_s: Option<u64>,
    /// Seconds after which a missing first token is a failure [default: 5]
    #[arg(long, value_name = "S")]
    overdue_s: Option<u64>,
    /// Most by which the share of failures may be higher [default: 0.02]
    #[arg(long, value_name = "SHARE")]
    errors_over: Option<f64>,
    /// Most by which the share of answers within their limits may be lower [default: 0.05]
    #[arg(long, value_name = "SHARE")]
    goodput_under: Option<f64>,
    /// Most times that the 95th percentiles of TTFT and TPOT may be as high [default: 1.5]
    #[arg(long, value_name = "TIMES")]
    latency_ratio: Option<f64>,
    /// Most by which the golden score may be lower [default: 0.02]
    #[arg(long, value_name = "POINTS")]
    golden_under: Option<f64>,
    /// Most by which the share of thumbs down may be higher [default: 0.05]
    #[arg(long, value_name = "SHARE")]
    thumbs_over: Option<f64>,
    #[command(flatten)]
    at: At,
}

pub async fn rollout(command: RolloutCommand) -> anyhow::Result<()> {
    match command {
        RolloutCommand::Start(args) => {
            let body = args.body()?;
            let started = args.at.call(Method::POST, "/rollouts", Some(body)).await?;
            args.at.print(&started, tell);
        }
        RolloutCommand::Status { at } => {
            let listed = at.call(Method::GET, "/rollouts", None).await?;
            at.print(&listed, |listed| {
                let rollouts = listed["rollouts"].as_array().map_or(&[][..], Vec::as_slice);
                if rollouts.is_empty() {
                    println!("no rollouts");
                }
                rollouts.iter().for_each(show);
            });
        }
        RolloutCommand::Pause(of) => of.act("pause", json!({})).await?,
        RolloutCommand::Resume(of) => of.act("resume", json!({})).await?,
        RolloutCommand::Abort(of) => of.act("abort", json!({})).await?,
        RolloutCommand::Forget(of) => of.act("forget", json!({})).await?,
        RolloutCommand::Golden { of, golden_from, golden_to } => {
            of.act("golden", json!({"golden": {"from": golden_from, "to": golden_to}})).await?;
        }
    }
    Ok(())
}

impl Named {
    async fn act(&self, action: &str, mut body: Value) -> anyhow::Result<()> {
        body["from"] = self.from.as_str().into();
        let answer = self.at.call(Method::POST, &format!("/rollouts/{action}"), Some(body)).await?;
        self.at.print(&answer, tell);
        Ok(())
    }
}

impl StartArgs {
    fn body(&self) -> anyhow::Result<Value> {
        let step_s = match (self.step_seconds, self.step_minutes) {
            (Some(seconds), _) => Some(seconds),
            (None, Some(minutes)) if minutes.is_finite() && minutes > 0.0 => Some((minutes * 60.0).ceil() as u64),
            (None, Some(_)) => bail!("--step-minutes must be more than 0"),
            (None, None) => None,
        };
        let limits = [
            ("requests_min", json!(self.requests_min)),
            ("window_s", json!(self.window_s)),
            ("overdue_s", json!(self.overdue_s)),
            ("errors_over", json!(self.errors_over)),
            ("goodput_under", json!(self.goodput_under)),
            ("latency_ratio", json!(self.latency_ratio)),
            ("golden_under", json!(self.golden_under)),
            ("thumbs_over", json!(self.thumbs_over)),
        ];
        let limits: Map<String, Value> =
            limits.into_iter().filter(|(_, value)| !value.is_null()).map(|(name, value)| (name.to_owned(), value)).collect();
        let golden = self.golden_from.zip(self.golden_to).map(|(from, to)| json!({"from": from, "to": to}));
        Ok(json!({
            "from": self.from, "to": self.to, "steps": self.steps, "step_s": step_s, "golden": golden, "no_gate": self.no_gate,
            "shadow": self.shadow, "limits": limits,
        }))
    }
}

/// Prints the rollout's state after an action.
fn tell(answer: &Value) {
    match answer["why"].as_str() {
        Some(why) => println!("{} -> {}: {why}", text(&answer["from"]), text(&answer["to"])),
        None => println!("done"),
    }
}

fn show(rollout: &Value) {
    let steps = rollout["steps"].as_array().map_or(&[][..], Vec::as_slice);
    let here = rollout["step"].as_u64().unwrap_or(0) as usize;
    let steps: Vec<String> =
        steps.iter().enumerate().map(|(n, step)| if n == here { format!("[{step}]") } else { step.to_string() }).collect();
    println!("{} -> {}: {}", text(&rollout["from"]), text(&rollout["to"]), text(&rollout["state"]).replace('_', " "));
    println!("  steps      {} % of users, each {} s", steps.join(" "), rollout["step_s"]);
    println!("  waits for  {}", text(&rollout["waits_for"]));
    for (name, side) in [("from", &rollout["seen_from"]), ("to", &rollout["seen_to"])] {
        let percent = |value: &Value| format!("{:.1} %", value.as_f64().unwrap_or(0.0) * 100.0);
        let ms = |value: &Value| value.as_f64().map_or("-".into(), |ms| format!("{ms:.0} ms"));
        println!(
            "  {name:<10} {} requests, {} failed, {} within limits, TTFT p95 {}, TPOT p95 {}, {} votes, {} down",
            side["requests"],
            percent(&side["error_rate"]),
            percent(&side["goodput"]),
            ms(&side["ttft_p95_ms"]),
            ms(&side["tpot_p95_ms"]),
            side["votes"],
            percent(&side["thumbs_down"]),
        );
    }
    let shadows = &rollout["shadows"];
    println!(
        "  shadows    {} same, {} differ, {} drawn, {} failed, {} dropped; {} characters against {}",
        shadows["same"],
        shadows["differs"],
        shadows["drawn"],
        shadows["failed"],
        shadows["dropped"],
        shadows["to_chars"],
        shadows["from_chars"]
    );
    let now = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |now| now.as_millis() as u64);
    for event in rollout["events"].as_array().map_or(&[][..], Vec::as_slice) {
        let ago = now.saturating_sub(event["at_ms"].as_u64().unwrap_or(now)) / 1000;
        println!("  {ago:>6} s ago  {}", text(&event["what"]));
    }
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}
