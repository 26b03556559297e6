//! Aligned columns for people.

use std::fmt;

/// Rows of cells under a header. The first column and those named so are left-aligned, numbers
/// right.
pub(crate) struct Table {
    left: &'static [usize],
    rows: Vec<Vec<String>>,
}

impl Table {
    /// `left` lists the columns beside the first that hold words.
    pub(crate) fn new<const N: usize>(header: [&str; N], left: &'static [usize]) -> Self {
        Self { left, rows: vec![header.map(str::to_owned).to_vec()] }
    }

    /// Adds a row; missing cells stay empty.
    pub(crate) fn row<const N: usize>(&mut self, cells: [String; N]) {
        self.rows.push(cells.to_vec());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| {
            self.rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<usize> = (0..columns).map(width).collect();
        for (at, row) in self.rows.iter().enumerate() {
            let mut line = String::new();
            for (c, (cell, &width)) in row.iter().zip(&widths).enumerate() {
                let gap = " ".repeat(width - cell.chars().count());
                let left = c == 0 || self.left.contains(&c);
                line.push_str(if c == 0 { "" } else { "  " });
                line.push_str(&if left { format!("{cell}{gap}") } else { format!("{gap}{cell}") });
            }
            writeln!(f, "{}", line.trim_end())?;
            if at == 0 {
                writeln!(f, "{}", "-".repeat(widths.iter().sum::<usize>() + 2 * columns.saturating_sub(1)))?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up() {
        let mut table = Table::new(["name", "kind", "bits"], &[1]);
        table.row(["a".to_owned(), "tcq-3".to_owned(), "3".to_owned()]);
        table.row(["größer".to_owned(), "f16".to_owned(), "16.25".to_owned()]);
        let want = "name    kind    bits\n--------------------\na       tcq-3      3\ngrößer  f16    16.25\n";
        assert_eq!(table.to_string(), want);
    }
}
