//! `tidemill-bench plan`: from users to GPUs and dollars. Every assumption is a row of [`assumptions::TABLE`], printed and settable.

pub mod assumptions;
pub mod examples;
pub mod fleet;
pub mod levers;
pub mod page;
pub mod tables;
pub mod validate;

use crate::record;
use anyhow::Context;
use assumptions::{Assumption, Assumptions};
use fleet::Fleet;
use levers::{Lever, Sensitivity};
use serde::Serialize;
use std::{
    fmt::Write as _,
    fs,
    io::{Write as _, stdout},
    path::PathBuf,
};
use validate::Validation;

/// Plan a fleet: from users, limits, a model and hardware to GPUs, pool, network and dollars.
///
/// Every assumption is printed with its source; change any with --set.
#[derive(Clone, Debug, Serialize, clap::Args)]
pub struct PlanArgs {
    /// llama2-70b, llama-3.1-8b and others by name, a `config.json`, or a directory with one.
    #[arg(long, default_value = "llama2-70b")]
    pub model: String,
    /// h100, h200, a100, a800, b200, l40s or cpu.
    #[arg(long, default_value = "h100")]
    pub hardware: String,
    /// Change an assumption: `users=5e6`. May be given several times; `plan` prints them all.
    #[arg(long = "set", value_name = "KEY=VALUE")]
    pub sets: Vec<String>,
    /// Run the plan in the simulator, at its peak.
    #[arg(long)]
    pub validate: bool,
    /// Print published worked examples beside our arithmetic instead.
    #[arg(long)]
    pub examples: bool,
    /// Write everything to this file, too.
    #[arg(long)]
    pub json: Option<PathBuf>,
    /// Write an interactive page here: one file that needs nothing else.
    #[arg(long)]
    pub html: Option<PathBuf>,
}

#[derive(Serialize)]
struct Report<'a> {
    settings: &'a PlanArgs,
    fleet: &'a Fleet,
    warnings: Vec<String>,
    assumptions: Vec<Assumed>,
    levers: Vec<Lever>,
    sensitivity: Vec<Sensitivity>,
    validation: Option<&'a Validation>,
    examples: Vec<examples::Example>,
}

#[derive(Serialize)]
struct Assumed {
    #[serde(flatten)]
    row: &'static Assumption,
    assumed: f64,
}

pub fn run(args: &PlanArgs) -> anyhow::Result<()> {
    if args.examples {
        stdout().write_all(examples::text().as_bytes())?;
        return record::write(args.json.as_ref(), "plan", &serde_json::json!({"examples": examples::all()}));
    }
    let assumptions = assumed(args)?;
    let fleet = Fleet::plan(&assumptions);
    stdout().write_all(text(args, &assumptions, &fleet).as_bytes())?;
    let validation = args.validate.then(|| validate::run(&args.model, &args.hardware, &assumptions, &fleet)).transpose()?;
    if let Some(validation) = &validation {
        println!("\n{validation}");
    }
    if let Some(path) = &args.html {
        let title = format!("A fleet for {} on {}", args.model, args.hardware);
        fs::write(path, page::page(&title, &assumptions)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let report = Report {
        settings: args,
        fleet: &fleet,
        warnings: fleet.warnings(&assumptions),
        assumptions: assumptions.rows().map(|(row, assumed)| Assumed { row, assumed }).collect(),
        levers: levers::levers(&assumptions),
        sensitivity: levers::sensitivities(&assumptions),
        validation: validation.as_ref(),
        examples: examples::all(),
    };
    record::write(args.json.as_ref(), "plan", &report)
}

/// The defaults, overridden by the hardware, then the model, then the values set by hand.
fn assumed(args: &PlanArgs) -> anyhow::Result<Assumptions> {
    let assumptions = tables::hardware(&args.hardware)?.apply(Assumptions::default());
    let mut assumptions = tables::model(&args.model, assumptions)?;
    args.sets.iter().try_for_each(|set| assumptions.set(set)).map_err(anyhow::Error::msg)?;
    Ok(assumptions)
}

fn text(args: &PlanArgs, assumptions: &Assumptions, fleet: &Fleet) -> String {
    let mut text = format!("{} on {}\n\n", args.model, args.hardware);
    let mut line = |name: &str, value: String, note: &str| {
        writeln!(text, "{name:<34} {value:>12}   {note}").expect("a string takes everything");
    };
    let f = fleet;
    line("requests/s, mean and peak", format!("{} / {}", short(f.mean_requests_per_s), short(f.peak_requests_per_s)), "");
    line("output tokens/s at peak", short(f.peak_output_tokens_per_s), "");
    line("prompt tokens/s at peak", short(f.peak_prompt_tokens_per_s), "without cached ones");
    line("turns in flight", short(f.turns_in_flight), "Little's law, both limits just kept");
    line("KV per token", format!("{:.1} KiB", f.kv_bytes_per_token / 1024.0), "layers × (2 × KV heads × dimension, or the latent) × bytes");
    line("KV in flight", format!("{}B", short(f.kv_in_flight_gb * 1e9)), "");
    line(
        "GPUs per instance",
        short(f.gpus_per_instance),
        &format!("weights {:.0} GB; {:.1} GB per GPU, and {:.1} are left for KV", f.weights_gb, f.weights_gb_per_gpu, f.kv_gb_per_gpu),
    );
    line(
        "KV per token and GPU",
        format!("{:.1} KiB", f.kv_bytes_per_token_per_gpu / 1024.0),
        "a KV head, or a latent, is on each GPU that needs it",
    );
    let collective_note = "received by a GPU for a row of its own, per layer";
    line("collectives", format!("{:.1} KiB", f.collective_bytes / 1024.0), collective_note);
    if f.stage_bytes > 0.0 {
        line("between stages", format!("{:.1} KiB", f.stage_bytes / 1024.0), "per row and hop");
    }
    let times = format!("{} / {} ms", short(f.collective_ms), short(f.collective_prompt_ms));
    line("collectives of a step and of 1k", times, "prompt tokens, at the links' rate, without latency; nothing is computed meanwhile");
    line("sequences per step", short(f.batch), &format!("a step takes {:.1} ms", f.step_ms));
    line("output tokens/s of a GPU", short(f.decode_tok_s_per_gpu), "");
    line("prompt tokens/s of a GPU", short(f.prefill_tok_s_per_gpu), "");
    line("mean TTFT at peak", format!("{:.2} s", f.ttft_s), "");
    line("GPUs that prefill", short(f.prefill_gpus), "");
    line("GPUs that decode", short(f.decode_gpus), "");
    if f.small_model_gpus > 0.0 {
        line("GPUs of the small model", short(f.small_model_gpus), "");
    }
    line("GPUs", short(f.gpus), &format!("headroom × {}", assumptions.get("headroom")));
    line("pool, DRAM and NVMe", format!("{}B / {}B", short(f.pool_dram_gb * 1e9), short(f.pool_nvme_gb * 1e9)), "");
    line(
        "network at peak",
        format!("{}B/s", short(f.network_gb_s * 1e9)),
        &format!("{:.1} % of the fleet's cards", 100.0 * f.network_share),
    );
    line("dollars a month", short(f.dollars_per_month), "");
    line("dollars per million output tokens", format!("{:.2}", f.dollars_per_million_output_tokens), "");
    line("dollars per turn", short(f.dollars_per_turn), "");
    for warning in fleet.warnings(assumptions) {
        text += &format!("warning: {warning}\n");
    }
    text += &format!("\n{:<48} {:>12} {:>8}\n", "what saves how much", "$ a month", "saved");
    for Lever { name, dollars_per_month, saved, note, .. } in levers::levers(assumptions) {
        text += &format!("{name:<48} {:>12} {:>7.1}%   {note}\n", short(dollars_per_month), 100.0 * saved);
    }
    text += &format!("\n{:<48} {:>12} {:>12}\n", "what matters most: the month's cost with", "× 0.8", "× 1.25");
    for Sensitivity { name, less, more, .. } in levers::sensitivities(assumptions).iter().take(12) {
        let change = |dollars: f64| 100.0 * (dollars / fleet.dollars_per_month - 1.0);
        text += &format!("{name:<48} {:>+11.1}% {:>+11.1}%\n", change(*less), change(*more));
    }
    text += "\nassumptions, each settable by --set KEY=VALUE\n";
    for (row, value) in assumptions.rows() {
        let set = if value == row.value { ' ' } else { '*' };
        text += &format!("{set} {:<18} {:>10} {:<8} {}; {}\n", row.key, short(value), row.unit, row.name, row.source);
    }
    text
}

/// The value with three digits and the letter of a power.
pub fn short(value: f64) -> String {
    let size = value.abs();
    if !value.is_finite() {
        return "–".into();
    }
    let (power, letter) = match size {
        _ if size >= 1e12 => (1e12, "T"),
        _ if size >= 1e9 => (1e9, "G"),
        _ if size >= 1e6 => (1e6, "M"),
        _ if size >= 1e4 => (1e3, "k"),
        _ => (1.0, ""),
    };
    let scaled = value / power;
    let digits = match scaled.abs() {
        0.0 => 0,
        size if size >= 100.0 => 0,
        size if size >= 10.0 => 1,
        size if size >= 0.1 => 2,
        size => (2.0 - size.log10().floor()).clamp(2.0, 12.0) as usize,
    };
    let text = format!("{scaled:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text}{letter}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    #[derive(Parser)]
    struct Cli {
        #[command(flatten)]
        plan: PlanArgs,
    }

    fn args(flags: &[&str]) -> PlanArgs {
        Cli::parse_from(["plan"].iter().chain(flags)).plan
    }

    #[test]
    fn every_assumption_is_printed_and_what_was_set_is_marked() {
        let args = args(&["--set", "users=2e6", "--hardware", "h200"]);
        let assumptions = assumed(&args).unwrap();
        let text = text(&args, &assumptions, &Fleet::plan(&assumptions));
        assert!(text.contains("* users                      2M"), "{text}");
        assert!(assumptions::TABLE.iter().all(|row| text.contains(row.source)), "{text}");
        assert!(assumed(&super::PlanArgs { sets: vec!["user=1".into()], ..args }).is_err());
    }

    #[test]
    fn a_plan_is_simulated() {
        let args = args(&["--model", "llama-3.1-8b", "--set", "users=3e5", "--validate"]);
        let assumptions = assumed(&args).unwrap();
        let fleet = Fleet::plan(&assumptions);
        let validation = validate::run(&args.model, &args.hardware, &assumptions, &fleet).unwrap();
        assert!(validation.goodput_ratio > 0.0 && validation.ttft_ms_p50 > 0.0, "{validation}");
        assert!((validation.cached_share - 0.37).abs() < 0.05, "{validation}");
        assert!(validate::run("qwen2.5-7b", "h100", &assumptions, &fleet).unwrap_err().to_string().contains("simulator knows"));
    }

    #[test]
    fn numbers_are_short() {
        let written = [0.0, 0.000_072, 0.5, 3.0, 59.94, 275.0, 2190.0, 15e6, 950e3, 6e9].map(short);
        assert_eq!(written, ["0", "0.000072", "0.5", "3", "59.9", "275", "2190", "15M", "950k", "6G"]);
    }
}
