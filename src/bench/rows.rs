//! Results that are one figure each, beside the one that it is compared with.

use comfy_table::{CellAlignment, Table, presets};
use gdasync::measure::Micros;
use serde::Serialize;

#[derive(Serialize)]
pub(super) struct Row {
    pub(super) name: &'static str,
    pub(super) us: Micros,
    /// What `ratio` compares with.
    pub(super) baseline: &'static str,
    /// The p50 over the baseline's.
    pub(super) ratio: f64,
}

/// The rows with so many digits behind the point, and one less in ratios.
pub(super) fn table(title: &str, rows: &[Row], digits: usize) -> Table {
    let mut table = Table::new();
    table.load_style(presets::NOTHING);
    table.set_header([title, "p50 us", "p99 us", "min us", "ratio", "to"]);
    for Row { name, us: Micros { min, p50, p99 }, baseline, ratio } in rows {
        let to = if name == baseline { "" } else { baseline };
        let numbers = [p50, p99, min].map(|us| format!("{us:.digits$}"));
        let first = std::iter::once((*name).to_owned()).chain(numbers);
        table.add_row(first.chain([format!("{ratio:.0$}", digits - 1), to.to_owned()]));
    }
    table
        .column_iter_mut()
        .skip(1)
        .take(4)
        .for_each(|column| column.set_cell_alignment(CellAlignment::Right));
    table
}
