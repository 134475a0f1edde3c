//! `tidemill-bench report`: the contents of `--json` files as one page with plots, as Markdown, or compared.

pub mod compare;
pub mod figures;

use crate::{
    record::Record,
    sim::{html, plot::escape},
};
use anyhow::{Context, ensure};
use figures::{Figures, Table};
use std::{fmt::Write, fs, path::PathBuf};

/// Turn --json files into a page with tables and plots, or show the changes between two.
#[derive(Clone, Debug, clap::Args)]
pub struct ReportArgs {
    #[arg(required = true)]
    pub files: Vec<PathBuf>,
    /// Show the changes beyond noise from the first to the second of two files of the same subcommand.
    #[arg(long)]
    pub compare: bool,
    /// Write a page to this file, which needs no other files.
    #[arg(long, conflicts_with = "compare")]
    pub html: Option<PathBuf>,
    #[arg(long, default_value = "Measurements")]
    pub title: String,
    /// Replace the text between `<!-- report -->` and `<!-- /report -->` in this Markdown file by the tables.
    #[arg(long, conflicts_with = "compare")]
    pub into: Option<PathBuf>,
}

/// A record and its name.
pub struct Named {
    pub name: String,
    pub record: Record,
}

pub fn run(args: &ReportArgs) -> anyhow::Result<()> {
    let read = |path: &PathBuf| {
        let name = path.file_stem().unwrap_or_default().to_string_lossy().into_owned();
        anyhow::Ok(Named { name, record: Record::read(path)? })
    };
    let records = args.files.iter().map(read).collect::<anyhow::Result<Vec<_>>>()?;
    if args.compare {
        let [before, after] = records.as_slice() else { anyhow::bail!("--compare takes two files") };
        print!("{}", compare::text(before, after)?);
        return Ok(());
    }
    let figures = Figures::of(&records)?;
    if let Some(path) = &args.html {
        fs::write(path, page(&args.title, &records, &figures)).with_context(|| format!("cannot write {}", path.display()))?;
    }
    let markdown = markdown(&records, &figures);
    match &args.into {
        Some(path) => {
            let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
            let text = put_into(&text, &markdown).with_context(|| path.display().to_string())?;
            fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
        }
        None if args.html.is_none() => {
            print!("{markdown}");
            Ok(())
        }
        None => Ok(()),
    }
}

const BEGIN: &str = "<!-- report -->";
const END: &str = "<!-- /report -->";

fn put_into(text: &str, report: &str) -> anyhow::Result<String> {
    let (before, rest) = text.split_once(BEGIN).with_context(|| format!("there is no line {BEGIN}"))?;
    let (_, after) = rest.split_once(END).with_context(|| format!("there is no line {END} after {BEGIN}"))?;
    ensure!(!after.contains(BEGIN), "there are two lines {BEGIN}");
    Ok(format!("{before}{BEGIN}\n\n{report}\n{END}{after}"))
}

fn markdown(records: &[Named], figures: &Figures) -> String {
    let mut text = String::new();
    for Table { title, head, rows } in &figures.tables {
        if !title.is_empty() {
            writeln!(text, "**{title}**\n").expect("a string takes everything");
        }
        let line =
            |cells: &[String]| format!("| {} |\n", cells.iter().map(|cell| cell.replace('|', "\\|")).collect::<Vec<_>>().join(" | "));
        text += &line(head);
        text += &format!("|{}\n", head.iter().enumerate().map(|(n, _)| if n == 0 { "---|" } else { "---:|" }).collect::<String>());
        rows.iter().for_each(|row| text += &line(row));
        text.push('\n');
    }
    for Named { name, record } in records {
        writeln!(text, "{name}: `tidemill-bench {}`; {}", record.command.join(" "), origin(record)).expect("a string takes everything");
    }
    text
}

/// The origin of a record.
fn origin(record: &Record) -> String {
    let machine = &record.machine;
    let gpus = if machine.gpus.is_empty() { String::new() } else { format!(", {}", machine.gpus.join(", ")) };
    let commit = record.commit.as_deref().unwrap_or("unknown");
    format!("{} × {}{gpus}, {:.0} GiB; commit {commit}; {}", machine.cores, machine.cpu, machine.memory_gib, record.time)
}

fn page(title: &str, records: &[Named], figures: &Figures) -> String {
    let mut body = format!("<h1>{}</h1>", escape(title));
    for Table { title, head, rows } in &figures.tables {
        let cells = |tag: &str, row: &[String]| row.iter().map(|cell| format!("<{tag}>{}</{tag}>", escape(cell))).collect::<String>();
        let rows: String = rows.iter().map(|row| format!("<tr>{}</tr>", cells("td", row))).collect();
        body += &format!(
            "<h2>{}</h2><div class=\"wide\"><table><thead><tr>{}</tr></thead><tbody>{rows}</tbody></table></div>",
            escape(title),
            cells("th", head)
        );
    }
    figures.plots.iter().for_each(|plot| body += &plot.figure());
    for Named { name, record } in records {
        body += &format!(
            "<p class=\"note\">{}: <code>tidemill-bench {}</code><br>{}</p>",
            escape(name),
            escape(&record.command.join(" ")),
            escape(&origin(record))
        );
    }
    html::document(title, &body)
}

#[cfg(test)]
mod tests;
