//! The page that the measuring examples write to: `docs/lab/tables.md`, from the workspace root.

use std::fs;

const PAGE: &str = "docs/lab/tables.md";

/// Where the text between the markers of a section of the page stands.
fn section(page: &str, name: &str) -> Result<std::ops::Range<usize>, Box<dyn std::error::Error>> {
    let (start, end) = (format!("<!-- begin {name} -->\n"), format!("<!-- end {name} -->"));
    let from = page.find(&start).ok_or(format!("{PAGE} lacks `{start}`"))? + start.len();
    let to = page[from..].find(&end).ok_or(format!("{PAGE} lacks `{end}`"))? + from;
    Ok(from..to)
}

/// The text between the markers of a section of the page.
#[allow(dead_code, reason = "each example uses a part of this module")]
pub(crate) fn section_text(name: &str) -> Result<String, Box<dyn std::error::Error>> {
    let page = fs::read_to_string(PAGE)?;
    let at = section(&page, name)?;
    Ok(page[at].to_owned())
}

/// Puts `text` between the markers of a section of the page.
pub(crate) fn replace_section(name: &str, text: &str) -> Result<(), Box<dyn std::error::Error>> {
    let page = fs::read_to_string(PAGE)?;
    let at = section(&page, name)?;
    fs::write(PAGE, format!("{}\n{text}\n{}", &page[..at.start], &page[at.end..]))?;
    println!("{PAGE}: {name} written");
    Ok(())
}
