//! `tojson`: Python's `json.dumps`, with the options that transformers gives it.

use super::Fail;
use super::eval::{Args, Run};
use super::text::{self, units};
use super::value::{Kind, Value, float};

struct Style {
    ascii: bool,
    indent: Option<Vec<u32>>,
    between: Vec<u32>,
    behind_key: Vec<u32>,
    sorted: bool,
}

pub(super) fn tojson(run: &mut Run, value: &Value, args: Args) -> Result<Value, Fail> {
    let [ascii, indent, separators, sorted] =
        args.bind("tojson", ["ensure_ascii", "indent", "separators", "sort_keys"])?;
    let is = |v: Option<Value>| v.is_some_and(|v| v.is_true());
    let indent = match indent {
        None | Some(Value::None) => None,
        Some(Value::Text(t)) => Some(t.to_vec()),
        Some(v) => {
            let n = v.integer().ok_or_else(|| Fail::new("`tojson` should indent by a number or a text"))?;
            let n = usize::try_from(n).unwrap_or(0);
            run.spend(n)?;
            Some(units(&" ".repeat(n), 0))
        }
    };
    let (between, behind_key) = match separators {
        None | Some(Value::None) => (units(if indent.is_some() { "," } else { ", " }, 0), units(": ", 0)),
        Some(pair) => match &pair.items()?[..] {
            [Value::Text(between), Value::Text(behind)] => (between.to_vec(), behind.to_vec()),
            _ => return Err(Fail::new("`tojson` should have two texts as separators")),
        },
    };
    let style = Style { ascii: is(ascii), indent, between, behind_key, sorted: is(sorted) };
    let mut out = Vec::new();
    dump(run, value, &style, 0, &mut out)?;
    Ok(out.into())
}

fn dump(run: &mut Run, value: &Value, style: &Style, depth: usize, out: &mut Vec<u32>) -> Result<(), Fail> {
    run.work(1)?;
    let before = out.len();
    match value {
        Value::None => out.extend(units("null", 0)),
        Value::Bool(b) => out.extend(units(if *b { "true" } else { "false" }, 0)),
        Value::Integer(i) => out.extend(units(&i.to_string(), 0)),
        Value::Float(f) => out.extend(units(
            &match float(*f).as_str() {
                "nan" => "NaN".to_owned(),
                "inf" => "Infinity".to_owned(),
                "-inf" => "-Infinity".to_owned(),
                finite => finite.to_owned(),
            },
            0,
        )),
        Value::Text(t) => quote(t, style.ascii, out),
        Value::Sequence(Kind::List | Kind::Tuple | Kind::Group, items) => {
            out.push(u32::from(b'['));
            for (i, item) in items.iter().enumerate() {
                line(run, style, i, depth + 1, out)?;
                dump(run, item, style, depth + 1, out)?;
            }
            close(run, style, items.is_empty(), depth, b']', out)?;
        }
        Value::Dict(d) => {
            out.push(u32::from(b'{'));
            let mut entries: Vec<&(Value, Value)> = d.0.iter().collect();
            if style.sorted {
                let mut failed = None;
                entries.sort_by(|(a, _), (b, _)| match a.compare(b) {
                    Ok(order) => order.unwrap_or(std::cmp::Ordering::Equal),
                    Err(rule) => {
                        failed.get_or_insert(rule);
                        std::cmp::Ordering::Equal
                    }
                });
                failed.map_or(Ok(()), |rule| Err(Fail::new(rule)))?;
            }
            for (i, (key, value)) in entries.into_iter().enumerate() {
                line(run, style, i, depth + 1, out)?;
                match key {
                    Value::Text(t) => quote(t, style.ascii, out),
                    Value::None | Value::Bool(_) | Value::Integer(_) | Value::Float(_) => {
                        out.push(u32::from(b'"'));
                        dump(run, key, style, depth, out)?;
                        out.push(u32::from(b'"'));
                    }
                    other => {
                        return Err(Fail::new(format!(
                            "`tojson` should have no key of type `{}`",
                            other.type_name()
                        )));
                    }
                }
                out.extend_from_slice(&style.behind_key);
                dump(run, value, style, depth + 1, out)?;
            }
            close(run, style, d.0.is_empty(), depth, b'}', out)?;
        }
        Value::Undefined(what) => return Err(Fail::new(format!("`tojson` should get a value: {what}"))),
        other => {
            return Err(Fail::new(format!("`tojson` is not for a value of type `{}`", other.type_name())));
        }
    }
    run.spend(out.len() - before)
}

fn line(run: &mut Run, style: &Style, index: usize, depth: usize, out: &mut Vec<u32>) -> Result<(), Fail> {
    if index > 0 {
        out.extend_from_slice(&style.between);
    }
    if let Some(indent) = &style.indent {
        run.spend(indent.len().saturating_mul(depth))?;
        out.push(u32::from(b'\n'));
        (0..depth).for_each(|_| out.extend_from_slice(indent));
    }
    Ok(())
}

fn close(
    run: &mut Run,
    style: &Style,
    empty: bool,
    depth: usize,
    end: u8,
    out: &mut Vec<u32>,
) -> Result<(), Fail> {
    if !empty && style.indent.is_some() {
        line(run, style, 0, depth, out)?;
    }
    out.push(u32::from(end));
    Ok(())
}

fn quote(t: &[u32], ascii: bool, out: &mut Vec<u32>) {
    out.push(u32::from(b'"'));
    for &unit in t {
        let escape = match text::character(unit) {
            '"' => "\\\"".to_owned(),
            '\\' => "\\\\".to_owned(),
            '\n' => "\\n".to_owned(),
            '\r' => "\\r".to_owned(),
            '\t' => "\\t".to_owned(),
            '\x08' => "\\b".to_owned(),
            '\x0c' => "\\f".to_owned(),
            c if c < ' ' => format!("\\u{:04x}", c as u32),
            c if ascii && !c.is_ascii() => {
                let mut pair = [0; 2];
                c.encode_utf16(&mut pair).iter().map(|half| format!("\\u{half:04x}")).collect()
            }
            _ => {
                out.push(unit);
                continue;
            }
        };
        out.extend(units(&escape, 0));
    }
    out.push(u32::from(b'"'));
}
