//! Filters of texts.

use super::access::no_operand;
use super::eval::{Args, Run};
use super::methods::{centered, replaced};
use super::text::{self, Ends, Text, units};
use super::value::Value;
use super::{Fail, markup};

/// Applies one of them.
pub(super) fn apply(run: &mut Run, name: &str, value: &Value, args: Args) -> Result<Value, Fail> {
    let t = value.string();
    run.work(t.len() / 64)?;
    let whole = |v: Option<Value>, or: usize| match v {
        None | Some(Value::None) => Ok(or),
        Some(v) => {
            let n = v.integer().ok_or_else(|| no_operand(name, &v))?;
            Ok::<_, Fail>(usize::try_from(n).unwrap_or(0))
        }
    };
    match name {
        "center" => {
            let [width] = args.bind(name, ["width"])?;
            let width = whole(width, 80)?;
            run.spend(width.max(t.len()))?;
            return Ok(centered(&t, width, u32::from(b' ')).into());
        }
        "indent" => {
            let [width, first, blank] = args.bind(name, ["width", "first", "blank"])?;
            let (first, blank) = (first.is_some_and(|f| f.is_true()), blank.is_some_and(|b| b.is_true()));
            let by = match width {
                Some(Value::Text(by)) => by,
                width => {
                    let width = whole(width, 4)?;
                    run.spend(width)?;
                    units(&" ".repeat(width), 0).into()
                }
            };
            let newline = u32::from(b'\n');
            let with_end = [&t[..], &[newline]].concat();
            let lines = text::lines(&with_end, false);
            run.spend(t.len().saturating_add(lines.len().saturating_mul(by.len() + 1)))?;
            let mut out = Vec::new();
            for (i, line) in lines.into_iter().enumerate() {
                if i > 0 {
                    out.push(newline);
                }
                if i == 0 && first || i > 0 && (blank || !line.is_empty()) {
                    out.extend_from_slice(&by);
                }
                out.extend_from_slice(line);
            }
            return Ok(out.into());
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"])?;
            let (Some(old), Some(new)) = (old, new) else {
                return Err(Fail::new("`replace` should get two texts"));
            };
            let count = match count {
                None | Some(Value::None) => None,
                Some(count) => usize::try_from(count.integer().ok_or_else(|| no_operand(name, &count))?).ok(),
            };
            return replaced(run, &t, &old.string(), &new.string(), count);
        }
        "trim" => {
            let [chars] = args.bind(name, ["chars"])?;
            let chars = chars.filter(|c| !matches!(c, Value::None)).map(|c| c.string());
            return run.made(text::strip(&t, chars.as_deref(), Ends::Both).to_vec());
        }
        "truncate" => {
            let [length, kill, end, leeway] = args.bind(name, ["length", "killwords", "end", "leeway"])?;
            let (length, leeway) = (whole(length, 255)?, whole(leeway, 5)?);
            let end = end.unwrap_or_else(|| "...".into());
            let ending = end.string().len();
            let Some(kept) = length.checked_sub(ending) else {
                return Err(Fail::new(format!("`truncate` should leave at least {ending} characters")));
            };
            let as_before = |t: Text| Value::Text(t.with_safety(markup::is_safe(value)));
            if t.len() <= length.saturating_add(leeway) {
                return Ok(as_before(t));
            }
            let mut cut = &t[..kept];
            if !kill.is_some_and(|k| k.is_true()) {
                cut = text::rsplit(cut, Some(&units(" ", 0)), Some(1))[0];
            }
            return markup::added(run, &as_before(cut.into()), &end);
        }
        "wordwrap" => {
            let [width, long, by, hyphens] =
                args.bind(name, ["width", "break_long_words", "wrapstring", "break_on_hyphens"])?;
            let width = whole(width, 79)?.max(1);
            let by =
                by.filter(|b| !matches!(b, Value::None)).map_or_else(|| text::text("\n"), |b| b.string());
            let (long, hyphens) = (long.is_none_or(|l| l.is_true()), hyphens.is_none_or(|h| h.is_true()));
            let mut wrapped: Vec<Vec<u32>> = Vec::new();
            for line in text::lines(&t, false) {
                let lines = wrap(line, width, long, hyphens);
                if lines.is_empty() {
                    wrapped.push(Vec::new());
                }
                wrapped.extend(lines);
            }
            run.spend(wrapped.iter().map(|line| line.len() + by.len()).sum())?;
            return Ok(wrapped.join(&by[..]).into());
        }
        "urlencode" => {
            let [] = args.bind(name, [])?;
            return urlencode(run, value);
        }
        _ => {}
    }
    let [] = args.bind(name, [])?;
    let made = match name {
        "capitalize" => text::capitalize(&t),
        "lower" => text::lower(&t),
        "upper" => text::upper(&t),
        "title" => {
            let (mut out, mut inside) = (Vec::new(), false);
            for unit in t.chunks(1) {
                out.extend(if inside { text::lower(unit) } else { text::upper(unit) });
                inside = !(text::is_space(unit[0])
                    || matches!(text::character(unit[0]), '-' | '(' | '{' | '[' | '<'));
            }
            out
        }
        "forceescape" => return run.made(markup::entities(&t)).map(markup::safe),
        "striptags" => {
            // There are two thousand entities, and none in any prompt.
            if text::find(&t, &units("&", 0), 0).is_some() {
                return Err(Fail::new("`striptags` does not read entities: the text should have no `&`"));
            }
            let (mut out, mut at) = (Vec::new(), 0);
            while let Some(open) = text::find(&t, &units("<", 0), at) {
                let comment = text::same(&t[open..t.len().min(open + 4)], &units("<!--", 0));
                let close = if comment { "-->" } else { ">" };
                let Some(end) = text::find(&t, &units(close, 0), open + if comment { 4 } else { 0 }) else {
                    break;
                };
                out.extend_from_slice(&t[at..open]);
                at = end + close.len();
            }
            out.extend_from_slice(&t[at..]);
            text::split(&out, None, None).join(&u32::from(b' '))
        }
        "wordcount" => {
            let (mut words, mut inside) = (0_usize, false);
            for c in t.iter().map(|&u| text::character(u)) {
                let word = c.is_alphanumeric() || c == '_';
                words += usize::from(word && !inside);
                inside = word;
            }
            return Ok(words.into());
        }
        _ => return Ok(Value::Text(t)),
    };
    run.made(made)
}

/// Lines of at most `width` characters, as Python's `textwrap` makes them of one line.
fn wrap(line: &[u32], width: usize, break_long: bool, hyphens: bool) -> Vec<Vec<u32>> {
    let mut chunks: Vec<Vec<u32>> = Vec::new();
    let mut at = 0;
    while at < line.len() {
        let space = text::is_space(line[at]);
        let end = (at..line.len()).find(|&i| text::is_space(line[i]) != space).unwrap_or(line.len());
        let mut from = at;
        if !space && hyphens {
            for i in at + 1..end.saturating_sub(1) {
                let letter = |i: usize| text::character(line[i]).is_alphabetic();
                if text::character(line[i]) == '-'
                    && letter(i - 1)
                    && i > at + 1
                    && letter(i - 2)
                    && letter(i + 1)
                {
                    chunks.push(line[from..=i].to_vec());
                    from = i + 1;
                }
            }
        }
        chunks.push(line[from..end].to_vec());
        at = end;
    }
    chunks.reverse();
    let blank = |chunk: &Vec<u32>| chunk.iter().all(|&u| text::is_space(u));
    let mut out: Vec<Vec<u32>> = Vec::new();
    while !chunks.is_empty() {
        if !out.is_empty() && chunks.last().is_some_and(blank) {
            chunks.pop();
        }
        let (mut made, mut len): (Vec<Vec<u32>>, usize) = (Vec::new(), 0);
        while let Some(chunk) = chunks.last() {
            if len + chunk.len() > width {
                break;
            }
            len += chunk.len();
            made.extend(chunks.pop());
        }
        if let Some(chunk) = chunks.last_mut().filter(|chunk| chunk.len() > width) {
            if break_long {
                let rest = chunk.split_off((width - len).min(chunk.len()));
                made.push(std::mem::replace(chunk, rest));
            } else if made.is_empty() {
                made.extend(chunks.pop());
            }
        }
        if made.last().is_some_and(blank) {
            made.pop();
        }
        if !made.is_empty() {
            out.push(made.concat());
        }
    }
    out
}

fn urlencode(run: &mut Run, value: &Value) -> Result<Value, Fail> {
    let quote = |t: &[u32], safe: &str| {
        let mut out = Vec::new();
        for &unit in t {
            let c = text::character(unit);
            if c.is_ascii_alphanumeric() || "_.-~".contains(c) || safe.contains(c) {
                out.push(unit);
            } else if c == ' ' && safe.is_empty() {
                // In a query.
                out.push(u32::from(b'+'));
            } else {
                let mut bytes = [0; 4];
                for b in c.encode_utf8(&mut bytes).bytes() {
                    out.extend(units(&format!("%{b:02X}"), 0));
                }
            }
        }
        out
    };
    let pairs = match value {
        Value::Dict(d) => d.0.clone(),
        Value::Sequence(..) => {
            let mut pairs = Vec::new();
            for pair in value.items()?.iter() {
                let pair = pair.items()?;
                let [k, v] = &pair[..] else { return Err(Fail::new("`urlencode` should get pairs")) };
                pairs.push((k.clone(), v.clone()));
            }
            pairs
        }
        other => return run.made(quote(&other.string(), "/")),
    };
    let parts: Vec<Vec<u32>> = pairs
        .iter()
        .map(|(k, v)| [&quote(&k.string(), "")[..], &units("=", 0), &quote(&v.string(), "")].concat())
        .collect();
    run.made(parts.join(&u32::from(b'&')))
}
