//! Texts that count as safe in a page: Python's `Markup`, which `safe` and `escape` make.
//!
//! Prompts are no pages, yet what is added to such a text is escaped, and templates that build
//! sentences with `safe` come out of transformers with `&lt;` in them.

use super::Fail;
use super::eval::{Args, Run};
use super::text;
use super::value::Value;

/// Filters that see no difference, and give such a text where they get one.
const FILTERS: [&str; 8] = ["capitalize", "center", "indent", "lower", "reverse", "string", "trim", "upper"];

/// Whether a value is such a text.
pub(super) fn is_safe(value: &Value) -> bool {
    matches!(value, Value::Text(t) if t.safe)
}

/// The characters of a text that mean something in a page, as its entities.
pub(super) fn entities(t: &[u32]) -> Vec<u32> {
    text::map(t, |c| {
        let escaped = match c {
            '&' => "&amp;",
            '<' => "&lt;",
            '>' => "&gt;",
            '"' => "&#34;",
            '\'' => "&#39;",
            _ => return [c; 5].into_iter().take(1),
        };
        let mut all = ['\0'; 5];
        escaped.chars().zip(&mut all).for_each(|(c, place)| *place = c);
        all.into_iter().take(escaped.len())
    })
}

/// `escape`: a safe text as it is, others with entities.
pub(super) fn escaped(run: &mut Run, value: &Value) -> Result<Value, Fail> {
    if is_safe(value) {
        return Ok(value.clone());
    }
    run.made(entities(&value.string())).map(safe)
}

/// The texts of a result, each a safe one.
pub(super) fn safe(value: Value) -> Value {
    match value {
        Value::Text(t) => Value::Text(t.with_safety(true)),
        Value::Sequence(kind, items) => Value::sequence(kind, items.iter().cloned().map(safe).collect()),
        other => other,
    }
}

/// A filter's result for a safe text.
pub(super) fn filtered(name: &str, result: Value) -> Value {
    if FILTERS.contains(&name) { safe(result) } else { result }
}

/// The arguments of a method of a safe text: what gets into the text is escaped.
pub(super) fn arguments(run: &mut Run, name: &str, mut args: Args) -> Result<Args, Fail> {
    match (name, &mut args.positional[..]) {
        ("replace", [_, new, ..]) => *new = escaped(run, new)?,
        ("center" | "ljust" | "rjust", [_, fill, ..]) => *fill = escaped(run, fill)?,
        ("join", [items]) => {
            let all = items.items()?;
            let all: Result<_, Fail> = all.iter().map(|item| escaped(run, item)).collect();
            *items = Value::list(all?);
        }
        _ => {}
    }
    Ok(args)
}

/// `a + b` of two texts.
pub(super) fn added(run: &mut Run, a: &Value, b: &Value) -> Result<Value, Fail> {
    if !is_safe(a) && !is_safe(b) {
        return run.made([&a.string()[..], &b.string()[..]].concat());
    }
    let (a, b) = (escaped(run, a)?.string(), escaped(run, b)?.string());
    run.made([&a[..], &b[..]].concat()).map(safe)
}
