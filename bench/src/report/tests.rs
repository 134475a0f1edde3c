use super::*;
use crate::load::{
    drive::Sample,
    summary::{Slo, Summary},
    timeline::Answer,
};
use serde_json::{Value, json};
use std::time::Duration;

fn summary(ttft_ms: u64, requests: u64) -> Summary {
    let sample = |n: u64| {
        let ms = Duration::from_millis;
        let ttft = ms(ttft_ms * (50 + n % 100) / 100);
        let answer = Answer { ttft, e2e: ttft + ms(90), gaps: vec![ms(10); 9], prompt_tokens: 64, cached_tokens: 32, output_tokens: 10 };
        Sample { session: n as usize, due: ms(10 * n), lag: Duration::ZERO, turn: 0, outcome: Ok(answer) }
    };
    let samples: Vec<Sample> = (0..requests).map(sample).collect();
    let slo = Slo { ttft: Some(Duration::from_millis(150)), ..Slo::default() };
    Summary::new(&samples, Duration::from_millis(10 * requests), Duration::ZERO, slo)
}

fn named(name: &str, subcommand: &str, result: Value) -> Named {
    Named { name: name.into(), record: Record::new(subcommand, result) }
}

fn load(name: &str, ttft_ms: u64, requests: u64) -> Named {
    named(name, "load", serde_json::to_value(summary(ttft_ms, requests)).unwrap())
}

fn goodput(name: &str, low: f64, high: f64) -> Named {
    let point = |rate: f64, ratio: f64| json!({"rate": rate, "ratio": ratio, "ratio_low": ratio - 0.05, "ratio_high": ratio, "summary": summary(100, 50)});
    let server = json!({
        "name": "a<b", "goodput": {"mean": (low + high) / 2.0, "low": low, "high": high}, "capacity": null,
        "points": [point(4.0, 0.3), point(2.0, 0.95)],
    });
    named(name, "goodput", json!({"comparisons": [{"title": "documents", "settings": {"ratio": 0.9}, "servers": [server]}]}))
}

#[test]
fn a_page_shows_every_record_and_needs_nothing_else() {
    let kinds = json!({"kinds": {"chats": summary(20, 40), "documents": summary(300, 40)}});
    let rows = json!([{"name": "put", "gb_per_s": 3.5, "limit": null}, {"name": "get", "gb_per_s": 5.25}]);
    let records = [load("one", 100, 60), named("mixed", "load", kinds), goodput("search", 2.0, 3.0), named("pool", "kv", rows)];
    let figures = Figures::of(&records).unwrap();
    let page = page("All <of> it", &records, &figures);
    for text in [
        "one",
        "mixed: chats",
        "mixed: documents",
        "documents: TTFT at the highest good rate",
        "a&lt;b",
        "2.00 to 3.00",
        "5.25",
        "TTFT over time",
        "prefers-color-scheme:dark",
    ] {
        assert!(page.contains(text), "{text}");
    }
    assert!(!page.contains("NaN") && !page.contains("<script") && !page.contains("src="), "{page}");
    let markdown = markdown(&records, &figures);
    assert!(markdown.contains("| a<b | 2.50 | 2.00 to 3.00 |") && markdown.contains("| get | 5.25 |"), "{markdown}");
}

#[test]
fn repeats_of_a_rate_are_one_point_of_a_curve() {
    let mut twice = goodput("x", 2.0, 3.0);
    let points = twice.record.result["comparisons"][0]["servers"][0]["points"].as_array_mut().unwrap();
    points.push(json!({"rate": 2.0, "ratio": 0.55, "summary": summary(100, 50)}));
    let figures = Figures::of(&[twice]).unwrap();
    let curve = &figures.plots[0].lines[0];
    let (xs, ys): (Vec<f64>, Vec<f64>) = curve.points.iter().copied().unzip();
    // The counts are 48 and 28 good ones of 50 each.
    assert_eq!((xs.as_slice(), ys[0], curve.intervals.len()), (&[2.0, 4.0][..], 0.76, 2));
}

#[test]
fn only_what_is_beyond_noise_has_changed() {
    let said = |a: &Named, b: &Named| compare::text(a, b).unwrap();
    let line = |text: &str, what: &str| text.lines().find(|line| line.starts_with(what)).unwrap().to_owned();
    let slower = said(&load("a", 100, 400), &load("b", 200, 400));
    assert!(line(&slower, "TTFT p50").ends_with("worse") && line(&slower, "TPOT p50").ends_with("within noise"), "{slower}");
    let hardly = said(&load("a", 100, 40), &load("b", 102, 40));
    assert!(hardly.contains("0 of"), "{hardly}");
    let better = said(&goodput("a", 2.0, 3.0), &goodput("b", 3.5, 4.5));
    assert!(better.contains("better") && said(&goodput("a", 2.0, 3.0), &goodput("b", 2.5, 4.0)).contains("within noise"));
    let rows = |value: f64| named("x", "kv", json!([{"name": "put", "gb_per_s": value}]));
    assert!(said(&rows(1.0), &rows(2.0)).contains("noise unknown"));
    assert!(compare::text(&rows(1.0), &load("a", 1, 1)).is_err());
}

#[test]
fn tables_go_between_their_lines() {
    let text = put_into("a\n<!-- report -->\nold\n<!-- /report -->\nb", "new").unwrap();
    assert_eq!(text, "a\n<!-- report -->\n\nnew\n<!-- /report -->\nb");
    assert!(put_into("a", "new").is_err());
}
