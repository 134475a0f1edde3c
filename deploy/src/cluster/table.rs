//! Aligned columns of text.

use std::fmt::{self, Display};

#[derive(Debug)]
pub(super) struct Table {
    rows: Vec<Vec<String>>,
}

/// The most characters of a cell.
const CELL_CHARS_MAX: usize = 48;

impl Table {
    pub(super) fn new<const N: usize>(heads: [&str; N]) -> Self {
        Self { rows: vec![heads.map(str::to_owned).into()] }
    }

    pub(super) fn push(&mut self, cells: Vec<String>) {
        self.rows.push(cells.into_iter().map(bounded).collect());
    }

    pub(super) fn is_empty(&self) -> bool {
        self.rows.len() == 1
    }
}

/// Makes a cell printable and of bounded length: names come from the network.
pub(super) fn bounded(cell: String) -> String {
    let printable: String = cell.chars().map(|c| if c.is_control() { '·' } else { c }).collect();
    if printable.chars().count() <= CELL_CHARS_MAX {
        return printable;
    }
    printable.chars().take(CELL_CHARS_MAX - 1).chain(['…']).collect()
}

impl Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows[0].len();
        let width = |column: usize| self.rows.iter().filter_map(|row| Some(row.get(column)?.chars().count())).max().unwrap_or(0);
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for row in &self.rows {
            let cells: Vec<String> = row.iter().zip(&widths).map(|(cell, width)| format!("{cell:width$}")).collect();
            writeln!(f, "{}", cells.join("  ").trim_end())?;
        }
        Ok(())
    }
}
