//! An evaluation of one model: asks it all cases, checks the answers, and compares the scores with a gate.

use super::{
    Progress, RunArgs,
    results::{Checked, Outcome, Results, Run},
    server::Server,
};
use anyhow::bail;
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use tidemill_eval::{
    case::Ready,
    check::{Answer, Compiled},
    gate::{Gate, Scores, mean},
    judge,
};

pub(super) async fn run(args: RunArgs) -> anyhow::Result<()> {
    let mut cases = args.asks.cases()?;
    let server = args.asks.server()?;
    let served = server.models().await?;
    let model = match (&args.model, &served[..]) {
        (Some(model), _) => model.clone(),
        (None, [only]) => only.clone(),
        (None, _) => bail!("say with --model which one: {} are served", served.join(", ")),
    };
    if args.judge.is_none() {
        let before = cases.len();
        // Without a judge, the checks that need one are dropped, and so are cases that have no others.
        cases.iter_mut().for_each(|ready| {
            let (case, checks) = (&mut ready.case, &mut ready.checks);
            let keep: Vec<bool> = checks.iter().map(|check| !matches!(check, Compiled::Judge(_))).collect();
            let (mut a, mut b) = (keep.iter(), keep.iter());
            case.checks.retain(|_| *a.next().expect("one each"));
            checks.retain(|_| *b.next().expect("one each"));
        });
        cases.retain(|ready| !ready.checks.is_empty());
        if cases.len() < before {
            eprintln!("{} cases are left out: they need --judge", before - cases.len());
        }
        if cases.is_empty() {
            bail!("no case is left");
        }
    }
    let mut results = Results::open(&args.kept.results)?;
    let number = results.begin(&model, args.judge.as_deref(), &args.commit, cases.len())?;
    let mut progress = Progress::new("cases", cases.len());
    let asker = Asker { server: &server, model: &model, judge: args.judge.as_deref(), max_tokens: args.asks.max_tokens };
    let mut outcomes = Vec::with_capacity(cases.len());
    let mut asking = stream::iter(&cases).map(|ready| asker.outcome(ready)).buffer_unordered(args.asks.concurrency.into());
    while let Some(outcome) = asking.next().await {
        results.add(number, &outcome)?;
        outcomes.push(outcome);
        progress.step();
    }
    outcomes.sort_by(|a, b| a.id.cmp(&b.id));

    let scores: Scores = outcomes.iter().map(|outcome| (outcome.id.clone(), outcome.score())).collect();
    let baseline = results.baseline(args.baseline.as_deref(), &model, number)?;
    let before = baseline.as_ref().map(|run| results.scores(run.id)).transpose()?;
    let failed = Gate { score: args.gate_score, drop: args.gate_drop }.check(&scores, before.as_ref());
    let score = mean(scores.values().copied()).unwrap_or(0.0);
    let unanswered = outcomes.iter().filter(|outcome| outcome.error.is_some()).count();
    results.end(number, score, unanswered, failed.is_empty())?;

    if args.json {
        println!("{:#}", as_json(number, &model, score, baseline.as_ref(), &failed, &outcomes));
    } else {
        show(&outcomes, args.verbose);
        let against = baseline.map_or(String::new(), |run| format!(", compared with run {} of {}", run.id, run.model));
        println!("run {number} of {model}: score {score:.3} over {} cases, {unanswered} without an answer{against}", outcomes.len());
    }
    if failed.is_empty() {
        return Ok(());
    }
    bail!("not good enough: {}", failed.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))
}

struct Asker<'a> {
    server: &'a Server,
    model: &'a str,
    judge: Option<&'a str>,
    max_tokens: u32,
}

impl Asker<'_> {
    async fn outcome(&self, ready: &Ready) -> Outcome {
        let case = &ready.case;
        let mut outcome = Outcome { id: case.id.clone(), tags: case.tags.clone(), ..Outcome::default() };
        let answer = match case.wants_an_answer() {
            true => self.server.chat(self.model, request(ready, self.max_tokens)).await,
            false => Ok(Answer::default()),
        };
        let answer = answer.inspect_err(|error| outcome.error = Some(format!("{error:#}"))).ok();
        outcome.answer = answer.as_ref().map_or(String::new(), shown);
        for (check, compiled) in case.checks.iter().zip(&ready.checks) {
            let checked = match &answer {
                Some(answer) => self.check(ready, compiled, answer).await,
                None => Ok((0.0, false)),
            };
            let (score, passed) = checked.unwrap_or_else(|error| {
                outcome.error.get_or_insert(format!("{}: {error:#}", check.name()));
                (0.0, false)
            });
            outcome.checks.push(Checked { kind: check.name(), score, passed });
        }
        outcome
    }

    /// The score of a check, and whether it passes.
    async fn check(&self, ready: &Ready, check: &Compiled, answer: &Answer) -> anyhow::Result<(f64, bool)> {
        let passed = match (check.passes(answer), check) {
            (Some(passed), _) => passed,
            (None, Compiled::Allowed(side)) => self.server.allows(&ready.case.question(), *side).await?,
            (None, Compiled::Judge(wanted)) => {
                let Some(judge) = self.judge else { bail!("there is no judge") };
                let asked = judge::grading(&ready.case.question(), &shown(answer), wanted.rubric.as_deref());
                let Some(grade) = self.server.judge(judge, asked).await?.grade() else { bail!("{judge} gives no grade") };
                return Ok((grade, grade >= wanted.min));
            }
            (None, _) => bail!("nobody can check this"),
        };
        Ok((f64::from(u8::from(passed)), passed))
    }
}

/// The request for a case. The case's own fields take precedence.
pub(super) fn request(ready: &Ready, max_tokens: u32) -> Value {
    let mut fields = json!({"messages": ready.case.messages(), "temperature": 0, "seed": 0, "max_tokens": max_tokens});
    for (name, value) in &ready.case.request {
        fields[name] = value.clone();
    }
    fields
}

/// An answer as text, including its tool calls.
pub(super) fn shown(answer: &Answer) -> String {
    let calls = answer.calls.iter().map(|call| format!("[calls {} with {}]", call.name, json!(call.arguments)));
    let blocked = answer.is_blocked.then(|| "[blocked by safety checks]".to_owned());
    Some(answer.text.clone()).filter(|text| !text.is_empty()).into_iter().chain(calls).chain(blocked).collect::<Vec<_>>().join("\n")
}

fn show(outcomes: &[Outcome], verbose: bool) {
    let mut tags = BTreeMap::<&str, Vec<f64>>::new();
    for outcome in outcomes {
        outcome.tags.iter().for_each(|tag| tags.entry(tag).or_default().push(outcome.score()));
        if let Some(error) = &outcome.error {
            println!("{}: {error}", outcome.id);
        }
        for check in outcome.checks.iter().filter(|check| verbose && !check.passed && outcome.error.is_none()) {
            println!("{}: {} failed ({:.2}): {}", outcome.id, check.kind, check.score, outcome.answer.replace('\n', " "));
        }
    }
    for (tag, scores) in tags {
        println!("{tag:16} {:.3}  ({} cases)", mean(scores.iter().copied()).unwrap_or(0.0), scores.len());
    }
}

fn as_json(
    run: i64,
    model: &str,
    score: f64,
    baseline: Option<&Run>,
    failed: &[tidemill_eval::gate::Failed],
    outcomes: &[Outcome],
) -> Value {
    let case = |outcome: &Outcome| {
        let checks: Vec<Value> =
            outcome.checks.iter().map(|check| json!({"kind": check.kind, "score": check.score, "passed": check.passed})).collect();
        json!({"id": outcome.id, "score": outcome.score(), "answer": outcome.answer, "error": outcome.error, "checks": checks})
    };
    json!({
        "run": run, "model": model, "score": score, "passed": failed.is_empty(),
        "failed": failed.iter().map(ToString::to_string).collect::<Vec<_>>(),
        "baseline": baseline.map(|run| json!({"run": run.id, "model": run.model, "score": run.score})),
        "cases": outcomes.iter().map(case).collect::<Vec<_>>(),
    })
}
