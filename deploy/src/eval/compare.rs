//! Pairwise comparison of models: a judge sees two answers to one question in both orders, and says which is better.

use super::{
    CompareArgs, Progress,
    results::{Comparison, Results},
    run::{request, shown},
    server::Server,
};
use anyhow::bail;
use futures_util::{StreamExt, stream};
use serde_json::{Value, json};
use tidemill_eval::{
    case::Ready,
    elo::{Game, ratings},
    gate::mean,
    judge::{Swapped, comparing},
};

/// Two models and a case, as indices in their lists.
type Pair = (usize, usize, usize);

pub(super) async fn compare(args: CompareArgs) -> anyhow::Result<()> {
    let mut models = args.models.clone();
    models.sort();
    models.dedup();
    if models.len() != args.models.len() {
        bail!("a model is named twice");
    }
    let models = args.models;
    let mut cases = args.asks.cases()?;
    cases.retain(|ready| ready.case.wants_an_answer());
    let server = args.asks.server()?;
    let concurrency = args.asks.concurrency.into();

    let wanted: Vec<(usize, usize)> = (0..models.len()).flat_map(|model| (0..cases.len()).map(move |case| (model, case))).collect();
    let mut progress = Progress::new("answers", wanted.len());
    let mut answers: Vec<Vec<Option<String>>> = vec![vec![None; cases.len()]; models.len()];
    let mut asking = stream::iter(wanted)
        .map(|(model, case)| {
            let asked = server.chat(&models[model], request(&cases[case], args.asks.max_tokens));
            async move { (model, case, asked.await) }
        })
        .buffer_unordered(concurrency);
    while let Some((model, case, answer)) = asking.next().await {
        match answer {
            Ok(answer) => answers[model][case] = Some(shown(&answer)),
            Err(error) => eprintln!("{} has no answer to {}: {error:#}", models[model], cases[case].case.id),
        }
        progress.step();
    }
    drop(asking);

    let pairs: Vec<Pair> = (0..models.len())
        .flat_map(|first| (first + 1..models.len()).map(move |second| (first, second)))
        .flat_map(|(first, second)| (0..cases.len()).map(move |case| (first, second, case)))
        .filter(|&(first, second, case)| answers[first][case].is_some() && answers[second][case].is_some())
        .collect();
    let mut progress = Progress::new("pairs judged", pairs.len());
    let mut judged: Vec<(Pair, Swapped)> = Vec::new();
    let (mut unjudged, answer) = (0, |model: usize, case: usize| answers[model][case].as_deref().unwrap_or_default());
    let mut judging = stream::iter(pairs)
        .map(|pair @ (first, second, case)| {
            let swapped = swapped(&server, &args.judge, &cases[case], answer(first, case), answer(second, case));
            async move { (pair, swapped.await) }
        })
        .buffer_unordered(concurrency);
    while let Some((pair, swapped)) = judging.next().await {
        match swapped {
            Ok(swapped) => judged.push((pair, swapped)),
            Err(error) => {
                unjudged += 1;
                eprintln!("{}: {error:#}", cases[pair.2].case.id);
            }
        }
        progress.step();
    }
    if judged.is_empty() {
        bail!("{} judged nothing", args.judge);
    }

    let comparisons = comparisons(&models, &judged);
    let results = Results::open(&args.kept.results)?;
    comparisons.iter().try_for_each(|comparison| results.compared(&args.judge, comparison))?;
    let games: Vec<Game> =
        judged.iter().map(|((first, second, _), swapped)| Game { first: *first, second: *second, score: swapped.score() }).collect();
    let mut table: Vec<(&String, f64)> = models.iter().zip(ratings(models.len(), &games)).collect();
    table.sort_by(|a, b| b.1.total_cmp(&a.1));
    let agreement = mean(judged.iter().map(|(_, swapped)| f64::from(u8::from(swapped.agrees())))).unwrap_or(0.0);
    if args.json {
        let rows: Vec<Value> = comparisons.iter().map(as_json).collect();
        let ratings: Vec<Value> = table.iter().map(|(model, rating)| json!({"model": model, "rating": rating})).collect();
        println!("{:#}", json!({"judge": args.judge, "agreement": agreement, "unjudged": unjudged, "ratings": ratings, "pairs": rows}));
        return Ok(());
    }
    for Comparison { first, second, wins, losses, ties, agreement, bias } in &comparisons {
        let (agreement, bias) = (agreement.unwrap_or(0.0), bias.unwrap_or(0.0));
        println!(
            "{first} against {second}: {wins} better, {losses} worse, {ties} neither; agreement {agreement:.2}, bias to the first {bias:+.2}"
        );
    }
    println!();
    table.iter().for_each(|(model, rating)| println!("{rating:6.0}  {model}"));
    println!(
        "\n{} of {} pairs judged by {}, which says the same in both orders of {:.0} %",
        judged.len(),
        judged.len() + unjudged,
        args.judge,
        agreement * 100.0
    );
    Ok(())
}

async fn swapped(server: &Server, judge: &str, ready: &Ready, first: &str, second: &str) -> anyhow::Result<Swapped> {
    let question = ready.case.question();
    let ask = async |first: &str, second: &str| match server.judge(judge, comparing(&question, first, second)).await?.preference() {
        Some(preference) => Ok(preference),
        None => bail!("{judge} prefers nothing"),
    };
    Ok(Swapped { shown_first: ask(first, second).await?, shown_second: 1.0 - ask(second, first).await? })
}

fn comparisons(models: &[String], judged: &[(Pair, Swapped)]) -> Vec<Comparison> {
    let mut comparisons = Vec::new();
    for first in 0..models.len() {
        for second in first + 1..models.len() {
            let of: Vec<Swapped> =
                judged.iter().filter(|((a, b, _), _)| (*a, *b) == (first, second)).map(|(_, swapped)| *swapped).collect();
            let with = |score: f64| of.iter().filter(|swapped| swapped.score() == score).count() as u64;
            comparisons.push(Comparison {
                first: models[first].clone(),
                second: models[second].clone(),
                wins: with(1.0),
                losses: with(0.0),
                ties: with(0.5),
                agreement: mean(of.iter().map(|swapped| f64::from(u8::from(swapped.agrees())))),
                bias: mean(of.iter().map(|swapped| swapped.bias())),
            });
        }
    }
    comparisons
}

fn as_json(comparison: &Comparison) -> Value {
    let Comparison { first, second, wins, losses, ties, agreement, bias } = comparison;
    json!({"first": first, "second": second, "wins": wins, "losses": losses, "ties": ties, "agreement": agreement, "bias": bias})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pairs_are_added_up() {
        let models = ["a", "b", "c"].map(str::to_owned);
        let swapped = |shown_first, shown_second| Swapped { shown_first, shown_second };
        let judged = [((0, 1, 0), swapped(0.9, 0.8)), ((0, 1, 1), swapped(0.9, 0.1)), ((1, 2, 0), swapped(0.2, 0.3))];
        let rows = comparisons(&models, &judged);
        assert_eq!(rows.len(), 3);
        assert_eq!((rows[0].wins, rows[0].losses, rows[0].ties, rows[0].agreement), (1, 0, 1, Some(0.5)));
        assert_eq!((rows[1].wins, rows[1].agreement), (0, None));
        assert_eq!((rows[2].losses, rows[2].agreement), (1, Some(1.0)));
    }
}
