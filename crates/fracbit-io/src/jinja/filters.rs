//! What may follow `|`.

use std::cmp::Ordering;
use std::rc::Rc;

use super::access::{attribute, compare, item, no_operand};
use super::eval::{Args, Run};
use super::methods::wanted_text;
use super::text::{self, Ends, units};
use super::value::{Kind, Value};
use super::{Fail, dump, format, markup, tests, text_filters};

const NAMES: [&str; 56] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
    "wordwrap",
    "random",
    "urlize",
    "xmlattr",
    "==",
    "!=",
];
/// Of a page, or of chance, and not of a prompt.
const REFUSED: [&str; 3] = ["random", "urlize", "xmlattr"];

pub(super) fn exists(name: &str) -> bool {
    NAMES.contains(&name)
}

/// Applies a filter.
pub(super) fn apply(run: &mut Run, name: &str, value: Value, args: Args) -> Result<Value, Fail> {
    run.work(1)?;
    match name {
        "escape" | "e" => {
            let [] = args.bind(name, [])?;
            return markup::escaped(run, &value);
        }
        "safe" => {
            let [] = args.bind(name, [])?;
            return Ok(markup::safe(Value::Text(value.string())));
        }
        _ if markup::is_safe(&value) && !["d", "default", "format", "truncate"].contains(&name) => {
            let plain = Value::Text(value.string());
            return Ok(markup::filtered(name, apply(run, name, plain, args)?));
        }
        "map" | "select" | "reject" | "selectattr" | "rejectattr" => return each(run, name, &value, args),
        "format" => {
            let values = if args.named.is_empty() {
                Value::tuple(args.positional)
            } else if args.positional.is_empty() {
                let named = args.named.into_iter().map(|(n, v)| ((&*n).into(), v)).collect();
                Value::dict(named)
            } else {
                return Err(Fail::new("`format` takes values with names or without, not both"));
            };
            let format = if let Value::Text(t) = value { t } else { value.string() };
            return format::percent(run, &format, &values);
        }
        "sort" | "unique" | "min" | "max" | "dictsort" | "groupby" | "sum" => {
            return ordered(run, name, &value, args);
        }
        "capitalize" | "center" | "forceescape" | "indent" | "lower" | "replace" | "string" | "striptags"
        | "title" | "trim" | "truncate" | "upper" | "urlencode" | "wordcount" | "wordwrap" => {
            return text_filters::apply(run, name, &value, args);
        }
        "abs" | "float" | "int" | "round" | "filesizeformat" => return of_number(name, &value, args),
        "tojson" => return dump::tojson(run, &value, args),
        _ => {}
    }
    match name {
        "attr" => {
            let [wanted] = args.bind(name, ["name"])?;
            attribute(&value, &text::plain(&wanted_text(name, wanted)?))
        }
        "default" | "d" => {
            let [default, falsy] = args.bind(name, ["default_value", "boolean"])?;
            let replaced = matches!(value, Value::Undefined(_))
                || falsy.is_some_and(|f| f.is_true()) && !value.is_true();
            Ok(if replaced { default.unwrap_or_else(|| "".into()) } else { value })
        }
        "batch" | "slice" => {
            let [count, fill] = args.bind(name, ["count", "fill_with"])?;
            let count =
                count.and_then(|c| c.integer()).and_then(|c| usize::try_from(c).ok()).filter(|&c| c > 0);
            let count = count.ok_or_else(|| Fail::new(format!("`{name}` should get a number above 0")))?;
            let fill = fill.filter(|f| !matches!(f, Value::None));
            pieces(run, name, &value, count, fill)
        }
        "first" | "last" => {
            let [] = args.bind(name, [])?;
            let items = value.items()?;
            if name == "last" && matches!(value, Value::Sequence(Kind::Generator, _)) {
                return Err(no_operand("last", &value));
            }
            let found = if name == "first" { items.first() } else { items.last() };
            Ok(found.cloned().unwrap_or_else(|| {
                Value::undefined(format!("there is no {name} item, the sequence is empty"))
            }))
        }
        "items" => {
            let [] = args.bind(name, [])?;
            match &value {
                Value::Undefined(_) => Ok(Value::generator(Vec::new())),
                Value::Dict(d) => {
                    run.spend(d.0.len())?;
                    let pair = |(k, v): &(Value, Value)| Value::tuple(vec![k.clone(), v.clone()]);
                    Ok(Value::generator(d.0.iter().map(pair).collect()))
                }
                other => Err(no_operand("items", other)),
            }
        }
        "join" => {
            let [separator, by] = args.bind(name, ["d", "attribute"])?;
            let separator = separator.map(|s| s.string()).unwrap_or_default();
            let mut out = Vec::new();
            for (i, item) in value.items()?.iter().enumerate() {
                let item = match &by {
                    None | Some(Value::None) => item.string(),
                    Some(by) => at_path(item, by)?.string(),
                };
                run.spend(item.len() + separator.len() + 1)?;
                if i > 0 {
                    out.extend_from_slice(&separator);
                }
                out.extend_from_slice(&item);
            }
            Ok(out.into())
        }
        "length" | "count" => {
            let [] = args.bind(name, [])?;
            Ok(value.len()?.into())
        }
        "list" => {
            let [] = args.bind(name, [])?;
            let items = value.items()?;
            run.spend(items.len())?;
            Ok(Value::Sequence(Kind::List, items))
        }
        "pprint" => {
            let [] = args.bind(name, [])?;
            run.made(value.repr())
        }
        "reverse" => {
            let [] = args.bind(name, [])?;
            if let Value::Text(t) = &value {
                return run.made(t.iter().rev().copied().collect());
            }
            let items = value.items()?;
            run.spend(items.len())?;
            Ok(Value::generator(items.iter().rev().cloned().collect()))
        }
        name if REFUSED.contains(&name) => Err(Fail::new(format!("filter `{name}` is not for prompts"))),
        name => Err(Fail::new(format!("unknown filter `{name}`"))),
    }
}

/// What `attribute=` of a filter means: names and numbers with dots between them.
fn at_path(value: &Value, path: &Value) -> Result<Value, Fail> {
    at_path_or(value, path, None)
}

/// The same, with something in the place of what is not there, on the way as well.
fn at_path_or(value: &Value, path: &Value, default: Option<&Value>) -> Result<Value, Fail> {
    let found = |value: Value| match (value, default) {
        (Value::Undefined(_), Some(default)) => default.clone(),
        (value, _) => value,
    };
    let Value::Text(path) = path else { return item(value, path).map(found) };
    let mut value = value.clone();
    for part in text::plain(path).split('.') {
        let key = match part.parse::<i64>() {
            Ok(i) if part.bytes().all(|b| b.is_ascii_digit()) => Value::Integer(i),
            _ => part.into(),
        };
        value = found(item(&value, &key)?);
    }
    Ok(value)
}

/// `map`, `select`, `reject`, `selectattr` and `rejectattr`.
fn each(run: &mut Run, name: &str, value: &Value, mut args: Args) -> Result<Value, Fail> {
    let items = if value.is_true() { value.items()? } else { Rc::default() };
    run.work(items.len())?;
    run.spend(items.len())?;
    let mut out = Vec::with_capacity(items.len());
    if name == "map" {
        if args.positional.is_empty() && args.named.iter().any(|(n, _)| &**n == "attribute") {
            let [path, default] = args.bind(name, ["attribute", "default"])?;
            let path = path.unwrap_or(Value::None);
            let default = default.filter(|d| !matches!(d, Value::None));
            for one in items.iter() {
                out.push(at_path_or(one, &path, default.as_ref())?);
            }
            return Ok(Value::generator(out));
        }
        let (filter, rest) = first_name(name, args.positional)?;
        for one in items.iter() {
            let args = Args { positional: rest.clone(), named: args.named.clone() };
            out.push(apply(run, &filter, one.clone(), args)?);
        }
        return Ok(Value::generator(out));
    }
    let by = if name.ends_with("attr") {
        if args.positional.is_empty() {
            return Err(Fail::new(format!("`{name}` should get the name of an attribute")));
        }
        Some(args.positional.remove(0))
    } else {
        None
    };
    let test = if args.positional.is_empty() { None } else { Some(first_name(name, args.positional)?) };
    for one in items.iter() {
        let seen = match &by {
            Some(path) => at_path(one, path)?,
            None => one.clone(),
        };
        let holds = match &test {
            None => seen.is_true(),
            Some((test, rest)) => {
                tests::check(test, &seen, Args { positional: rest.clone(), named: args.named.clone() })?
            }
        };
        if holds != name.starts_with("reject") {
            out.push(one.clone());
        }
    }
    Ok(Value::generator(out))
}

fn first_name(what: &str, mut positional: Vec<Value>) -> Result<(String, Vec<Value>), Fail> {
    if positional.is_empty() {
        return Err(Fail::new(format!("`{what}` should get the name of a filter or test")));
    }
    let name = positional.remove(0);
    Ok((text::plain(&wanted_text(what, Some(name))?), positional))
}

fn pieces(
    run: &mut Run,
    name: &str,
    value: &Value,
    count: usize,
    fill: Option<Value>,
) -> Result<Value, Fail> {
    let items = value.items()?;
    run.spend(items.len() + count)?;
    let mut out = Vec::new();
    if name == "batch" {
        for chunk in items.chunks(count) {
            let mut piece = chunk.to_vec();
            if let Some(fill) = &fill {
                piece.resize(count.max(piece.len()), fill.clone());
            }
            out.push(Value::list(piece));
        }
        return Ok(Value::generator(out));
    }
    let (each, more) = (items.len() / count, items.len() % count);
    let mut at = 0;
    for i in 0..count {
        let len = each + usize::from(i < more);
        let mut piece = items[at..at + len].to_vec();
        at += len;
        if let Some(fill) = &fill
            && i >= more
            && more > 0
        {
            piece.push(fill.clone());
        }
        out.push(Value::list(piece));
    }
    Ok(Value::generator(out))
}

/// A text in small letters, unless case counts.
fn folded(value: Value, case: bool) -> Value {
    match &value {
        Value::Text(t) if !case => text::lower(t).into(),
        _ => value,
    }
}

fn sorted(run: &mut Run, mut keyed: Vec<(Value, Value)>, reverse: bool) -> Result<Vec<Value>, Fail> {
    run.work(keyed.len() * (usize::BITS - keyed.len().leading_zeros()) as usize)?;
    let mut failed = None;
    keyed.sort_by(|(a, _), (b, _)| {
        let order = a.compare(b).map(|order| order.unwrap_or(Ordering::Equal)).unwrap_or_else(|rule| {
            failed.get_or_insert(rule);
            Ordering::Equal
        });
        if reverse { order.reverse() } else { order }
    });
    match failed {
        Some(rule) => Err(Fail::new(rule)),
        None => Ok(keyed.into_iter().map(|(_, v)| v).collect()),
    }
}

fn ordered(run: &mut Run, name: &str, value: &Value, args: Args) -> Result<Value, Fail> {
    let is = |v: &Option<Value>| v.as_ref().is_some_and(Value::is_true);
    let given = |v: Option<Value>| v.filter(|v| !matches!(v, Value::None));
    if name == "dictsort" {
        let [case, by, reverse] = args.bind(name, ["case_sensitive", "by", "reverse"])?;
        let Value::Dict(d) = value else { return Err(no_operand(name, value)) };
        let by = by.map_or_else(|| "key".to_owned(), |by| text::plain(&by.string()));
        if by != "key" && by != "value" {
            return Err(Fail::new("`dictsort` should sort by `key` or `value`"));
        }
        run.spend(d.0.len())?;
        let keyed = d.0.iter().map(|(k, v)| {
            let key = if by == "key" { k } else { v };
            (folded(key.clone(), is(&case)), Value::tuple(vec![k.clone(), v.clone()]))
        });
        return Ok(Value::list(sorted(run, keyed.collect(), is(&reverse))?));
    }
    let items = value.items()?;
    run.spend(items.len())?;
    match name {
        "sort" => {
            let [reverse, case, by] = args.bind(name, ["reverse", "case_sensitive", "attribute"])?;
            let paths: Vec<Value> = match given(by) {
                None => Vec::new(),
                Some(Value::Text(t)) => {
                    text::split(&t, Some(&units(",", 0)), None).into_iter().map(Value::from).collect()
                }
                Some(other) => vec![other],
            };
            let mut keyed = Vec::with_capacity(items.len());
            for one in items.iter() {
                let mut keys = Vec::new();
                for path in &paths {
                    keys.push(folded(at_path(one, path)?, is(&case)));
                }
                let key = match keys.len() {
                    0 => folded(one.clone(), is(&case)),
                    1 => keys.remove(0),
                    _ => Value::list(keys),
                };
                keyed.push((key, one.clone()));
            }
            Ok(Value::list(sorted(run, keyed, is(&reverse))?))
        }
        "unique" => {
            let [case, by] = args.bind(name, ["case_sensitive", "attribute"])?;
            let by = given(by);
            let (mut seen, mut out): (Vec<Value>, Vec<Value>) = (Vec::new(), Vec::new());
            for one in items.iter() {
                let key = match &by {
                    Some(path) => at_path(one, path)?,
                    None => one.clone(),
                };
                let key = folded(key, is(&case));
                run.work(seen.len() / 16)?;
                if !seen.iter().any(|s| s.equals(&key)) {
                    seen.push(key);
                    out.push(one.clone());
                }
            }
            Ok(Value::generator(out))
        }
        "min" | "max" => {
            let [case, by] = args.bind(name, ["case_sensitive", "attribute"])?;
            let by = given(by);
            let mut best: Option<(Value, Value)> = None;
            for one in items.iter() {
                let key = match &by {
                    Some(path) => at_path(one, path)?,
                    None => one.clone(),
                };
                let key = folded(key, is(&case));
                let better = match &best {
                    None => true,
                    Some((least, _)) => compare(if name == "min" { "<" } else { ">" }, &key, least)?,
                };
                if better {
                    best = Some((key, one.clone()));
                }
            }
            Ok(best.map_or_else(|| Value::undefined("there is no item, the sequence is empty"), |(_, v)| v))
        }
        "groupby" => {
            let [by, default, case] = args.bind(name, ["attribute", "default", "case_sensitive"])?;
            let by = by.ok_or_else(|| Fail::new("`groupby` should get an attribute"))?;
            let mut keyed = Vec::new();
            for one in items.iter() {
                let key = at_path_or(one, &by, default.as_ref())?;
                keyed.push((folded(key.clone(), is(&case)), Value::tuple(vec![key, one.clone()])));
            }
            let sorted = sorted(run, keyed, false)?;
            let mut groups: Vec<(Value, Vec<Value>)> = Vec::new();
            for pair in sorted {
                let pair = pair.items()?;
                let same = groups.last().is_some_and(|(key, _)| {
                    folded(key.clone(), is(&case)).equals(&folded(pair[0].clone(), is(&case)))
                });
                match groups.last_mut().filter(|_| same) {
                    Some((_, list)) => list.push(pair[1].clone()),
                    None => groups.push((pair[0].clone(), vec![pair[1].clone()])),
                }
            }
            let group = |(key, list)| Value::sequence(Kind::Group, vec![key, Value::list(list)]);
            Ok(Value::list(groups.into_iter().map(group).collect()))
        }
        _ => {
            let [by, start] = args.bind(name, ["attribute", "start"])?;
            let by = given(by);
            let (mut whole, mut sum, mut exact) = (0_i64, 0.0, true);
            let mut all = vec![start.unwrap_or(Value::Integer(0))];
            for one in items.iter() {
                all.push(match &by {
                    Some(path) => at_path(one, path)?,
                    None => one.clone(),
                });
            }
            for one in all {
                let n = one.number().ok_or_else(|| no_operand("+", &one))?;
                match one.integer() {
                    Some(i) if exact => {
                        whole = whole
                            .checked_add(i)
                            .ok_or_else(|| Fail::new("an integer should fit in 64 bits"))?;
                    }
                    _ if exact => (exact, sum) = (false, whole as f64 + n),
                    _ => sum += n,
                }
            }
            Ok(if exact { Value::Integer(whole) } else { Value::Float(sum) })
        }
    }
}

fn of_number(name: &str, value: &Value, args: Args) -> Result<Value, Fail> {
    let trimmed = || text::plain(text::strip(&value.string(), None, Ends::Both)).replace('_', "");
    match name {
        "abs" => {
            let [] = args.bind(name, [])?;
            match value {
                Value::Float(f) => Ok(Value::Float(f.abs())),
                other => {
                    let n = other.integer().ok_or_else(|| no_operand(name, other))?;
                    n.checked_abs()
                        .map(Value::Integer)
                        .ok_or_else(|| Fail::new("an integer should fit in 64 bits"))
                }
            }
        }
        "float" => {
            let [default] = args.bind(name, ["default"])?;
            let parsed = match value {
                Value::Text(_) => trimmed().parse().ok(),
                Value::Undefined(what) => return Err(Fail::new(what.to_string())),
                other => other.number(),
            };
            Ok(parsed.map_or_else(|| default.unwrap_or(Value::Float(0.0)), Value::Float))
        }
        "int" => {
            let [default, base] = args.bind(name, ["default", "base"])?;
            let default = default.unwrap_or(Value::Integer(0));
            let base = base.map_or(Some(10), |b| b.integer()).and_then(|b| u32::try_from(b).ok());
            let base = base
                .filter(|b| (2..=36).contains(b))
                .ok_or_else(|| Fail::new("`int` should have a base of 2 to 36"))?;
            Ok(match value {
                Value::Undefined(what) => return Err(Fail::new(what.to_string())),
                Value::Text(_) => {
                    let t = trimmed().to_lowercase();
                    let (sign, digits) = match t.strip_prefix('-') {
                        Some(rest) => ("-", rest),
                        None => ("", t.strip_prefix('+').unwrap_or(&t)),
                    };
                    let prefix = match base {
                        2 => "0b",
                        8 => "0o",
                        16 => "0x",
                        _ => "",
                    };
                    let digits = digits.strip_prefix(prefix).unwrap_or(digits);
                    let whole = i64::from_str_radix(&format!("{sign}{digits}"), base).ok();
                    let cut = || t.parse::<f64>().ok().filter(|f| f.abs() < 9e18).map(|f| f as i64);
                    whole.or_else(cut).map_or(default, Value::Integer)
                }
                Value::Float(f) if f.abs() < 9e18 => Value::Integer(*f as i64),
                other => other.integer().map_or(default, Value::Integer),
            })
        }
        "round" => {
            let [precision, method] = args.bind(name, ["precision", "method"])?;
            let precision = precision.map_or(Some(0), |p| p.integer()).and_then(|p| i32::try_from(p).ok());
            let precision = precision
                .filter(|p| p.abs() <= 300)
                .ok_or_else(|| Fail::new("`round` should have a precision"))?;
            let f = value.number().ok_or_else(|| no_operand(name, value))?;
            let method = method.map_or_else(|| "common".to_owned(), |m| text::plain(&m.string()));
            let scale = 10f64.powi(precision);
            Ok(match method.as_str() {
                "ceil" => Value::Float((f * scale).ceil() / scale),
                "floor" => Value::Float((f * scale).floor() / scale),
                // Python rounds the decimal number half to even; formatting does the same from the
                // exact value.
                "common" if precision >= 0 => match value.integer() {
                    Some(i) => Value::Integer(i),
                    None => Value::Float(format!("{f:.*}", precision as usize).parse().unwrap_or(f)),
                },
                "common" => match value.integer() {
                    Some(i) => Value::Integer(((i as f64 * scale).round_ties_even() / scale) as i64),
                    None => Value::Float((f * scale).round_ties_even() / scale),
                },
                _ => return Err(Fail::new("`round` should be `common`, `ceil` or `floor`")),
            })
        }
        _ => {
            let [binary] = args.bind(name, ["binary"])?;
            let binary = binary.is_some_and(|b| b.is_true());
            let parsed = match value {
                Value::Text(_) => trimmed().parse().ok(),
                other => other.number(),
            };
            let bytes: f64 = parsed.ok_or_else(|| no_operand(name, value))?;
            let base: f64 = if binary { 1024.0 } else { 1000.0 };
            let text = if bytes == 1.0 {
                "1 Byte".to_owned()
            } else if bytes < base {
                format!("{} Bytes", bytes.trunc())
            } else {
                let exponent = (1..8).find(|&i| bytes < base.powi(i + 1)).unwrap_or(8);
                let letter = b"kMGTPEZY"[exponent as usize - 1] as char;
                let letter = if binary { letter.to_ascii_uppercase() } else { letter };
                format!("{:.1} {letter}{}", bytes / base.powi(exponent), if binary { "iB" } else { "B" })
            };
            Ok((&*text).into())
        }
    }
}
