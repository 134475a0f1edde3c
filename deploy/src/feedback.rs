//! `tidemill feedback`: users' ratings of answers, at a coordinator's operators' port.

use crate::{
    golden,
    keys::{At, table, text},
};
use anyhow::Context;
use serde_json::{Value, json};
use std::path::PathBuf;
use tidemill_eval::{
    case::Case,
    check::{Check, Judge, Texts},
};

#[derive(Debug, clap::Subcommand)]
pub enum FeedbackCommand {
    /// Show users' opinions, the newest first
    List {
        /// Only opinions with this rating
        #[arg(long, value_parser = ["up", "down"])]
        rating: Option<String>,
        /// Most opinions to show
        #[arg(long, default_value_t = 100)]
        limit: usize,
        #[command(flatten)]
        at: At,
    },
    /// Make a golden case of an answer with an opinion: its question, and what a good answer must be like
    Golden {
        /// The answer's id, as `list` shows it
        response_id: String,
        /// The golden set
        #[arg(long, value_name = "FILE", default_value = "golden.jsonl")]
        cases: PathBuf,
        /// An answer must contain this
        #[arg(long, value_name = "TEXT")]
        contains: Vec<String>,
        /// An answer must match this
        #[arg(long, value_name = "EXPRESSION")]
        regex: Option<String>,
        /// Least score that a judge must give, from 0 to 1 [default: 0.7, where no other check is given]
        #[arg(long, value_name = "SCORE")]
        judge: Option<f64>,
        /// Criteria for the judge [default: the user's comment]
        #[arg(long, value_name = "TEXT")]
        rubric: Option<String>,
        #[command(flatten)]
        at: At,
    },
}

/// The least score that a judge must give, unless `--judge` sets another.
const JUDGE_MIN: f64 = 0.7;

pub async fn feedback(command: FeedbackCommand) -> anyhow::Result<()> {
    match command {
        FeedbackCommand::List { rating, limit, at } => {
            let rating = rating.map_or(String::new(), |rating| format!("&rating={rating}"));
            let listed = at.call(reqwest::Method::GET, &format!("/admin/feedback?limit={limit}{rating}"), None).await?;
            at.print(&listed, |listed| {
                table(&["response_id", "rating", "regenerate", "model", "tenant", "user", "comment"], &listed["feedback"]);
            });
        }
        FeedbackCommand::Golden { response_id, cases, contains, regex, judge, rubric, at } => {
            anyhow::ensure!(
                response_id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"_-".contains(&byte)),
                "an answer is named by its id, such as chatcmpl-0123…: `tidemill feedback list` shows the ids"
            );
            let found = at.call(reqwest::Method::GET, &format!("/admin/feedback?response_id={response_id}"), None).await?;
            let opinions = found["feedback"].as_array().into_iter().flatten();
            // If several users have rated the answer, prefer a thumb down, then a rating with a comment, then the latest.
            let worth = |opinion: &&Value| (opinion["rating"] == "down", opinion["comment"].is_string(), opinion["at"].as_u64());
            let opinion = opinions.max_by_key(worth).with_context(|| format!("nobody has said anything of {response_id}"))?;
            let mut checks = Vec::new();
            if !contains.is_empty() {
                checks.push(Check::Contains(Texts::Several(contains)));
            }
            checks.extend(regex.map(Check::Regex));
            if judge.is_some() || checks.is_empty() {
                checks.push(Check::Judge(Judge { min: judge.unwrap_or(JUDGE_MIN), rubric: rubric.or_else(|| complaint(opinion)) }));
            }
            let case = case(&response_id, opinion, checks)?;
            let added = golden::add(&cases, &[case])?;
            let shown = json!({"id": response_id, "added": added});
            at.print(&shown, |_| match added {
                0 => println!("{} has a case {response_id} already", cases.display()),
                _ => println!("{response_id} is a case of {}", cases.display()),
            });
        }
    }
    Ok(())
}

fn case(id: &str, opinion: &Value, checks: Vec<Check>) -> anyhow::Result<Case> {
    let messages = opinion["question"].as_array().cloned().unwrap_or_default();
    anyhow::ensure!(!messages.is_empty(), "what {id} answers is not known: it was too long, or no text");
    let thumb = opinion["rating"].as_str().unwrap_or("no");
    let note = format!("thumb: {thumb}; {} had answered: {}", text(opinion, "model"), text(opinion, "answer"));
    Ok(Case { id: id.to_owned(), tags: vec!["feedback".into()], messages, checks, note: Some(note), ..Case::default() })
}

/// The judge's criteria, made from the comment of a user who complained.
fn complaint(opinion: &Value) -> Option<String> {
    let comment = opinion["comment"].as_str().filter(|comment| !comment.is_empty())?;
    Some(format!("The answer is correct and does what was asked. Of an earlier answer a user said: {comment}"))
}
