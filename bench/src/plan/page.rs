//! The interactive page: one file that needs nothing else, with sliders over the same arithmetic in JavaScript.

use super::{
    assumptions::{Assumptions, HOURS_PER_MONTH, SPOT_DISCOUNT, TABLE},
    fleet::Fleet,
    levers::{self, LESS, MORE},
    tables::{HARDWARE, MODELS},
};
use serde_json::{Value, json};

const SCRIPT: &str = include_str!("page/page.js");
const STYLE: &str = include_str!("page/page.css");

pub fn page(title: &str, assumptions: &Assumptions) -> String {
    // Only this sequence could end a script element from inside.
    let data = data(assumptions).to_string().replace("</", "<\\/");
    let title = crate::sim::plot::escape(title);
    format!(
        "<!doctype html><html lang=\"en\"><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'\">\
         <title>{title}</title><style>{STYLE}</style>\
         <main><header><h1>{title}</h1><p>Every assumption is a slider. Nothing leaves this page.</p><p id=\"check\"></p></header>\
         <section><div class=\"choices\"><label>model<select id=\"model\"></select></label>\
         <label>hardware<select id=\"hardware\"></select></label></div><div id=\"controls\"></div></section>\
         <section id=\"output\"><div id=\"warnings\"></div><div id=\"figures\"></div>\
         <h2>What saves how much</h2><table><thead><tr><th></th><th>a month</th><th></th></tr></thead><tbody id=\"levers\"></tbody></table>\
         <h2>What matters most: the month's cost with one assumption × {LESS} and × {MORE}</h2>\
         <table><thead><tr><th></th><th>× {LESS}</th><th>× {MORE}</th><th></th></tr></thead><tbody id=\"sensitivity\"></tbody></table></section></main>\
         <script type=\"application/json\" id=\"data\">{data}</script><script>{SCRIPT}</script></html>\n"
    )
}

fn data(assumptions: &Assumptions) -> Value {
    json!({
        "rows": TABLE.as_slice(),
        "values": assumptions,
        "models": MODELS,
        "hardware": HARDWARE,
        "levers": levers::levers(assumptions).iter().map(|lever| json!({"name": lever.name, "changes": lever.changes, "note": lever.note})).collect::<Vec<_>>(),
        "cases": cases(assumptions),
        "spot_discount": SPOT_DISCOUNT,
        "hours_per_month": HOURS_PER_MONTH,
        "less": LESS,
        "more": MORE,
    })
}

/// The cases against which the page checks itself: each assumption a fifth less and a quarter more, and each lever.
fn cases(assumptions: &Assumptions) -> Vec<Value> {
    let case = |changes: Vec<(&'static str, f64)>| {
        let fleet = Fleet::plan(&assumptions.clone().with(&changes));
        json!({"changes": changes.into_iter().collect::<std::collections::BTreeMap<_, _>>(), "fleet": fleet})
    };
    let scaled = assumptions
        .rows()
        .flat_map(|(row, _)| [LESS, MORE].map(|factor| (row.key, levers::scaled(assumptions, row.key, factor).get(row.key))));
    let alone = scaled.map(|change| vec![change]);
    alone.chain(levers::levers(assumptions).into_iter().map(|lever| lever.changes)).map(case).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_needs_nothing_else_and_cannot_be_broken_out_of() {
        let page = page("</title><script>", &Assumptions::default());
        assert!(!page.contains("src=") && !page.contains("href=") && !page.contains("<title></title>"), "no reference to anything");
        assert_eq!(page.matches("<script").count(), 2);
        assert!(cases(&Assumptions::default()).len() > 80);
    }
}
