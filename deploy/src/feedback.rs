//! `tidemill feedback`: users' ratings of answers, at a coordinator's operators' port.

use crate::{
    golden,
    keys::{At, table, text},
};
use anyhow::Context;
use serde_json::{Value, json};
use std::{collections::HashSet, fs, path::PathBuf};
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
    /// Make examples for `[router.auto]` of opinions on the small model's answers: a thumb up, the small one will do; a thumb down, or another
    /// answer wanted, the large one should have answered
    Routes {
        /// The small model
        #[arg(long, value_name = "MODEL")]
        small: String,
        /// Tenants that agreed that their questions become examples (several times)
        #[arg(long = "tenant", value_name = "TENANT", required = true)]
        tenants: Vec<String>,
        /// Most opinions to look at, the newest
        #[arg(long, default_value_t = 1000)]
        limit: usize,
        /// File for the questions that the small model should answer
        #[arg(long, value_name = "FILE", default_value = "small-examples.txt")]
        small_examples: PathBuf,
        /// File for the questions that the large model should answer
        #[arg(long, value_name = "FILE", default_value = "large-examples.txt")]
        large_examples: PathBuf,
        #[command(flatten)]
        at: At,
    },
}

/// The maximum number of examples of one side that a coordinator reads.
const EXAMPLES_MAX: usize = 1000;
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
        FeedbackCommand::Routes { small, tenants, limit, small_examples, large_examples, at } => {
            let listed = at.call(reqwest::Method::GET, &format!("/admin/feedback?limit={limit}"), None).await?;
            let opinions = listed["feedback"].as_array().map(Vec::as_slice).unwrap_or_default();
            let [good, bad] = examples(opinions, &small, &tenants);
            anyhow::ensure!(
                !good.is_empty() && !bad.is_empty(),
                "{} questions that {small} answered well and {} that it did not are too few: both need one at least",
                good.len(),
                bad.len()
            );
            for (file, texts) in [(&small_examples, &good), (&large_examples, &bad)] {
                let lines: String = texts.iter().map(|text| format!("{text}\n")).collect();
                fs::write(file, lines).with_context(|| format!("cannot write {}", file.display()))?;
            }
            let shown = json!({"small": good.len(), "large": bad.len()});
            at.print(&shown, |_| {
                println!("{} examples in {}, {} in {}", good.len(), small_examples.display(), bad.len(), large_examples.display());
            });
        }
    }
    Ok(())
}

/// The questions of these tenants that the small model answered well, and those that it did not, each in one line, the newest opinion first.
/// A question with opinions of both kinds counts by its newest.
fn examples(opinions: &[Value], small: &str, tenants: &[String]) -> [Vec<String>; 2] {
    let (mut seen, mut sides) = (HashSet::new(), [Vec::new(), Vec::new()]);
    for opinion in opinions {
        let of_these = opinion["model"] == small && tenants.iter().any(|tenant| opinion["tenant"] == tenant.as_str());
        let is_bad = opinion["rating"] == "down" || opinion["regenerate"] == true;
        let Some(question) = asked_last(opinion).filter(|_| of_these && (is_bad || opinion["rating"] == "up")) else { continue };
        if sides[usize::from(is_bad)].len() < EXAMPLES_MAX && seen.insert(question.clone()) {
            sides[usize::from(is_bad)].push(question);
        }
    }
    sides
}

/// The user's last message, in one line.
fn asked_last(opinion: &Value) -> Option<String> {
    let message = opinion["question"].as_array()?.iter().rfind(|message| message["role"] == "user")?;
    let text = match &message["content"] {
        Value::Array(parts) => parts.iter().filter_map(|part| part["text"].as_str()).collect::<Vec<_>>().join(" "),
        content => content.as_str()?.to_owned(),
    };
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    (!line.is_empty()).then_some(line)
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn opinions_on_the_small_models_answers_become_examples() {
        let opinion = |tenant: &str, model: &str, rating: &str, asked: &str| {
            let question = json!([{"role": "system", "content": "Be brief."}, {"role": "user", "content": asked}]);
            json!({"tenant": tenant, "model": model, "rating": rating, "regenerate": false, "question": question})
        };
        let mut again = opinion("acme", "small", "", "Prove it.");
        again["regenerate"] = true.into();
        let opinions = [
            opinion("acme", "small", "up", "Hello\nthere"),
            opinion("acme", "small", "down", "Find the race."),
            again,
            opinion("acme", "small", "up", "Prove it."),
            opinion("acme", "large", "down", "What is love?"),
            opinion("other", "small", "up", "Not asked whether it agrees"),
            json!({"tenant": "acme", "model": "small", "rating": "up", "question": []}),
            json!({"tenant": "acme", "model": "small", "rating": "up", "question": [{"role": "user", "content": [{"type": "text", "text": "In parts"}]}]}),
        ];
        let [good, bad] = examples(&opinions, "small", &["acme".to_owned()]);
        assert_eq!(good, ["Hello there", "In parts"]);
        assert_eq!(bad, ["Find the race.", "Prove it."], "the newest opinion counts");
    }
}
