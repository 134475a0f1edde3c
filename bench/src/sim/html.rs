//! The report as one page that needs no other files: tables and plots, in light and dark, also for phones.

use super::{
    plot::{Axis, Line, Plot, Scale, escape},
    report::{Report, Row},
};
use std::fmt::Write;
use tidemill_sim::outcome::{Answer, LoadPoint};

pub fn page(report: &Report) -> String {
    let mut body = format!("<h1>{}</h1><p>{}</p>", escape(&report.head.title), escape(&report.head.about));
    body += &table(report);
    body += &references(report);
    for plot in plots(report) {
        body += &plot.figure();
    }
    write!(
        body,
        "<p class=\"note\">Virtual time; {:.0} s of real time for all of it. Every cell's settings are in the JSON report.</p>",
        report.wall_s
    )
    .expect("a string takes everything");
    document(&report.head.title, &body)
}

/// A page that needs no other files, around `body`.
pub fn document(title: &str, body: &str) -> String {
    let title = escape(title);
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\"><meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <title>{title}</title><style>{STYLE}</style><main>{body}</main></html>\n"
    )
}

fn table(report: &Report) -> String {
    let columns = report.columns();
    let head: String = columns.iter().map(|column| format!("<th>{}</th>", escape(column.name))).collect();
    let cells = |row: &Row| row.cells(&columns).iter().map(|cell| format!("<td>{}</td>", escape(cell))).collect::<String>();
    let rows: String = report.rows.iter().map(|row| format!("<tr>{}</tr>", cells(row))).collect();
    format!("<div class=\"wide\"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>")
}

fn references(report: &Report) -> String {
    let references = report.references();
    if references.is_empty() {
        return String::new();
    }
    let row = |(name, ours, reference): &(String, Option<f64>, &super::scenario::Reference)| {
        let ours = ours.map_or("–".into(), |ours| format!("{ours:.2}"));
        format!("<tr><td>{}</td><td>{ours}</td><td>{}</td><td>{}</td></tr>", escape(name), reference.value, escape(&reference.source))
    };
    let rows: String = references.iter().map(row).collect();
    format!(
        "<div class=\"wide\"><table><thead><tr><th></th><th>here</th><th>there</th><th>source</th></tr></thead><tbody>{rows}</tbody></table></div>"
    )
}

fn plots(report: &Report) -> Vec<Plot> {
    let mut plots = Vec::new();
    let axis = |label: &str, scale| Axis { label: label.into(), scale, range: None };
    if let Some(along) = &report.head.axis
        && report.rows.iter().all(|row| row.x.is_some())
    {
        let label = along.label.clone().unwrap_or_else(|| along.key.clone());
        let curves = |of: &dyn Fn(&Row) -> Option<f64>| -> Vec<Line> {
            let mut lines: Vec<Line> = Vec::new();
            for row in &report.rows {
                let Some(point) = row.x.zip(of(row)) else { continue };
                match lines.iter_mut().find(|line| line.name == row.variant) {
                    Some(line) => line.points.push(point),
                    None => lines.push(Line { name: row.variant.clone(), points: vec![point], dots: true, ..Line::default() }),
                }
            }
            lines
        };
        let mut along = |title: &str, y: Axis, of: &dyn Fn(&Row) -> Option<f64>| {
            let lines = curves(of);
            if !lines.is_empty() {
                plots.push(Plot { title: title.into(), x: axis(&label, Scale::Linear), y, lines });
            }
        };
        if let Some(search) = &report.head.search {
            let title = format!("Highest {} with {:.0} % of requests good", search.key, 100.0 * search.ratio);
            along(&title, axis(&search.key, Scale::Linear), &|row| row.found.as_ref().map(|found| found.value));
        } else {
            along("Good requests", axis("good per second", Scale::Linear), &|row| Some(row.summary.good_per_s));
            along("Goodput", Axis { range: Some((0.0, 1.0)), ..axis("share of requests", Scale::Linear) }, &|row| {
                Some(row.summary.goodput_ratio)
            });
            along("Mean TTFT", axis("seconds", Scale::Linear), &|row| Some(row.summary.ttft_ms.as_ref()?.mean / 1e3));
        }
        along("Decision", axis("µs, median", Scale::Linear), &|row| Some(row.decisions.as_ref()?.submit_us_p50));
    }
    if report.rows.len() <= CURVES_MAX {
        plots.push(distribution(report, "TTFT", Answer::ttft_ms));
        plots.push(distribution(report, "TPOT", Answer::tpot_ms));
    }
    if report.head.plot_load && report.rows.len() <= CURVES_MAX {
        for row in &report.rows {
            let line = |name: &str, of: fn(&LoadPoint) -> f64| Line {
                name: name.into(),
                points: row.run.load.iter().map(|point| (point.s, of(point))).collect(),
                ..Line::default()
            };
            let lines = vec![line("prefill", |point| point.prefill_load), line("decode", |point| point.decode_load)];
            let title = format!("Load over time, {}: 1 is the limit of TTFT or TPOT", row.name());
            plots.push(Plot { title, x: axis("seconds", Scale::Linear), y: axis("load", Scale::Linear), lines });
        }
    }
    plots
}

/// The most curves of a plot that can be distinguished.
const CURVES_MAX: usize = 8;

fn distribution(report: &Report, what: &str, of: fn(&Answer) -> Option<f64>) -> Plot {
    let line = |row: &Row| {
        let mut values: Vec<f64> = row.run.answers.iter().filter_map(of).map(|ms| ms / 1e3).collect();
        values.sort_by(f64::total_cmp);
        // Requests without an answer are part of the whole.
        let all = row.run.answers.len() as f64;
        let points = values.iter().zip(1..).map(|(&value, n)| (value, f64::from(n) / all)).collect();
        Line { name: row.name(), points, ..Line::default() }
    };
    Plot {
        title: format!("{what} of all requests (first seed)"),
        x: Axis { label: "seconds".into(), scale: Scale::Log, range: None },
        y: Axis { label: "share of requests".into(), scale: Scale::Linear, range: Some((0.0, 1.0)) },
        lines: report.rows.iter().map(line).collect(),
    }
}

const STYLE: &str = "\
:root{color-scheme:light dark;--bg:#fff;--fg:#1b2733;--dim:#5c6b7a;--line:#d9e0e7;\
--c0:#0b6e99;--c1:#c4501b;--c2:#3a7d34;--c3:#8a3ea8;--c4:#a3820a;--c5:#c2185b;--c6:#5d6d7e;--c7:#00897b}\
@media(prefers-color-scheme:dark){:root{--bg:#12181f;--fg:#e6edf3;--dim:#93a1af;--line:#2c3743;\
--c0:#4fb3dd;--c1:#f08a52;--c2:#7cc46f;--c3:#c98be0;--c4:#e0c04a;--c5:#f06a9b;--c6:#a9b7c4;--c7:#4dc9b8}}\
body{margin:0;background:var(--bg);color:var(--fg);font:15px/1.5 system-ui,sans-serif}\
main{max-width:60rem;margin:0 auto;padding:1rem}h1{font-size:1.4rem}\
.wide{overflow-x:auto}table{border-collapse:collapse;font-variant-numeric:tabular-nums;font-size:.85rem}\
th,td{padding:.25rem .55rem;text-align:right;border-bottom:1px solid var(--line);white-space:nowrap}\
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--bg)}th{color:var(--dim);font-weight:600}\
figure{margin:1.6rem 0}figcaption{font-weight:600}svg{width:100%;height:auto}\
svg text{fill:var(--dim);font-size:12px}.grid{stroke:var(--line)}polyline{fill:none;stroke-width:2;stroke-linejoin:round}\
.legend{margin:.3rem 0;display:flex;flex-wrap:wrap;gap:.2rem 1rem;font-size:.85rem}\
.legend i{display:inline-block;width:.8rem;height:.8rem;border-radius:2px;margin-right:.35rem;vertical-align:-1px}\
.note{color:var(--dim);font-size:.85rem}";
