//! The page that the measuring examples write to: `docs/quality.md`, from the workspace root.

use std::fs;

const PAGE: &str = "docs/quality.md";

/// Puts `text` between the markers of a section of the page.
pub(crate) fn replace_section(name: &str, text: &str) -> Result<(), Box<dyn std::error::Error>> {
    let page = fs::read_to_string(PAGE)?;
    let (start, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->"));
    let from = page.find(&start).ok_or(format!("{PAGE} lacks `{start}`"))? + start.len();
    let to = page[from..].find(&end).ok_or(format!("{PAGE} lacks `{end}`"))? + from;
    fs::write(PAGE, format!("{}\n{text}\n{}", &page[..from], &page[to..]))?;
    println!("{PAGE}: {name} written");
    Ok(())
}
