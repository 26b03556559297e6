//! The methods of Python's texts, lists and dicts that change nothing.

use std::rc::Rc;

use super::access::no_operand;
use super::eval::{Args, Run};
use super::text::{self, Ends, Text};
use super::value::{Kind, Value};
use super::{Fail, format, markup};

const OF_TEXT: [&str; 44] = [
    "capitalize",
    "casefold",
    "center",
    "count",
    "endswith",
    "expandtabs",
    "find",
    "format",
    "format_map",
    "index",
    "isalnum",
    "isalpha",
    "isascii",
    "isdecimal",
    "isdigit",
    "isidentifier",
    "islower",
    "isnumeric",
    "isprintable",
    "isspace",
    "istitle",
    "isupper",
    "join",
    "ljust",
    "lower",
    "lstrip",
    "partition",
    "removeprefix",
    "removesuffix",
    "replace",
    "rfind",
    "rindex",
    "rjust",
    "rpartition",
    "rsplit",
    "rstrip",
    "split",
    "splitlines",
    "startswith",
    "strip",
    "swapcase",
    "title",
    "upper",
    "zfill",
];
const OF_DICT: [&str; 5] = ["get", "items", "keys", "values", "copy"];

/// Whether a value has this method.
pub(super) fn exists(value: &Value, name: &str) -> bool {
    match value {
        Value::Text(_) => OF_TEXT.contains(&name),
        Value::Sequence(Kind::List, _) => ["count", "index", "copy"].contains(&name),
        Value::Sequence(Kind::Tuple | Kind::Group | Kind::Range(_), _) => ["count", "index"].contains(&name),
        Value::Dict(_) => OF_DICT.contains(&name),
        Value::Float(_) => name == "is_integer",
        Value::Loop(_) => ["cycle", "changed"].contains(&name),
        Value::Cycler(_) => ["next", "reset"].contains(&name),
        _ => false,
    }
}

/// Calls a method that [`exists`].
pub(super) fn call(run: &mut Run, value: &Value, name: &str, args: Args) -> Result<Value, Fail> {
    match value {
        Value::Text(t) if t.safe => {
            let args = markup::arguments(run, name, args)?;
            of_text(run, t, name, args).map(markup::safe)
        }
        Value::Text(t) => of_text(run, t, name, args),
        Value::Dict(d) => {
            let pairs = |view: &'static str, items: Vec<Value>| Value::sequence(Kind::View(view), items);
            if name == "get" {
                let [key, default] = args.bind("get", ["key", "default"])?;
                let key = key.ok_or_else(|| Fail::new("`get` should get a key"))?;
                return Ok(d.get(&key).cloned().unwrap_or(default.unwrap_or(Value::None)));
            }
            let [] = args.bind(name, [])?;
            run.spend(d.0.len())?;
            Ok(match name {
                "items" => {
                    let pair = |(k, v): &(Value, Value)| Value::tuple(vec![k.clone(), v.clone()]);
                    pairs("dict_items", d.0.iter().map(pair).collect())
                }
                "keys" => pairs("dict_keys", d.0.iter().map(|(k, _)| k.clone()).collect()),
                "values" => pairs("dict_values", d.0.iter().map(|(_, v)| v.clone()).collect()),
                _ => value.clone(),
            })
        }
        Value::Sequence(_, items) if name == "copy" => {
            let [] = args.bind(name, [])?;
            Ok(Value::Sequence(Kind::List, Rc::clone(items)))
        }
        Value::Sequence(_, items) => {
            let [wanted, start, stop] = args.bind(name, ["value", "start", "stop"])?;
            let wanted = wanted.ok_or_else(|| Fail::new(format!("`{name}` should get a value")))?;
            if name == "count" {
                return Ok(items.iter().filter(|v| v.equals(&wanted)).count().into());
            }
            let (start, stop) = range(items.len(), start, stop)?;
            let at = (start..stop).find(|&i| items[i].equals(&wanted));
            at.map(Value::from).ok_or_else(|| Fail::new("`index`: the value is not in the list"))
        }
        Value::Float(f) => {
            let [] = args.bind(name, [])?;
            Ok(Value::Bool(f.is_finite() && f.fract() == 0.0))
        }
        Value::Loop(l) if name == "cycle" => {
            if args.positional.is_empty() {
                return Err(Fail::new("`cycle` should get values"));
            }
            Ok(args.positional[l.index.get() % args.positional.len()].clone())
        }
        Value::Loop(l) => {
            let now = Some(args.positional);
            let mut last = l.last_changed.borrow_mut();
            let same = match (&*last, &now) {
                (Some(a), Some(b)) => a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.equals(b)),
                _ => false,
            };
            *last = now;
            Ok(Value::Bool(!same))
        }
        Value::Cycler(c) => {
            let [] = args.bind(name, [])?;
            let at = c.1.get();
            c.1.set(if name == "reset" { 0 } else { at + 1 });
            Ok(if name == "reset" { Value::None } else { c.0[at % c.0.len()].clone() })
        }
        other => Err(no_operand(name, other)),
    }
}

/// The places that `start` and `stop` mean in a row of this length.
fn range(len: usize, start: Option<Value>, stop: Option<Value>) -> Result<(usize, usize), Fail> {
    let place = |end: Option<Value>, default: usize| match end {
        None | Some(Value::None) => Ok(default),
        Some(v) => {
            let i = v.integer().ok_or_else(|| no_operand("[:]", &v))?;
            let i = if i < 0 { i.saturating_add(len as i64).max(0) } else { i };
            Ok::<_, Fail>(usize::try_from(i).unwrap_or(usize::MAX).min(len))
        }
    };
    let (start, stop) = (place(start, 0)?, place(stop, len)?);
    Ok((start, stop.max(start)))
}

/// An argument that should be a text.
pub(super) fn wanted_text(name: &str, value: Option<Value>) -> Result<Text, Fail> {
    match value {
        Some(Value::Text(t)) => Ok(t),
        Some(Value::Undefined(what)) => Err(Fail::new(what.to_string())),
        other => {
            let got = other.map_or("nothing", |v| v.type_name());
            Err(Fail::new(format!("`{name}` should get a text, got {got}")))
        }
    }
}

/// An argument that is a text or not there.
fn maybe_text(name: &str, value: Option<Value>) -> Result<Option<Text>, Fail> {
    match value {
        None | Some(Value::None) => Ok(None),
        some => wanted_text(name, some).map(Some),
    }
}

/// A count, where a negative one and none mean all.
fn most(value: Option<Value>) -> Result<Option<usize>, Fail> {
    match value {
        None | Some(Value::None) => Ok(None),
        Some(v) => Ok(usize::try_from(v.integer().ok_or_else(|| no_operand("count", &v))?).ok()),
    }
}

fn of_text(run: &mut Run, t: &Text, name: &str, args: Args) -> Result<Value, Fail> {
    run.work(t.len() / 64)?;
    match name {
        "format" => return format::braces(run, t, &args.positional, &args.named),
        "startswith" | "endswith" => {
            let [affix, start, stop] = args.bind(name, ["prefix", "start", "end"])?;
            let (start, stop) = range(t.len(), start, stop)?;
            let s = &t[start..stop];
            let fits = |affix: &[u32]| {
                let rest = s.len().checked_sub(affix.len());
                rest.is_some_and(|rest| {
                    text::same(if name == "startswith" { &s[..affix.len()] } else { &s[rest..] }, affix)
                })
            };
            if let Some(Value::Sequence(Kind::Tuple, affixes)) = &affix {
                let mut any = false;
                for affix in affixes.iter() {
                    any |= fits(&wanted_text(name, Some(affix.clone()))?);
                }
                return Ok(any.into());
            }
            return Ok(fits(&wanted_text(name, affix)?).into());
        }
        "strip" | "lstrip" | "rstrip" => {
            let [chars] = args.bind(name, ["chars"])?;
            let chars = maybe_text(name, chars)?;
            let ends = match name {
                "strip" => Ends::Both,
                "lstrip" => Ends::Left,
                _ => Ends::Right,
            };
            return run.made(text::strip(t, chars.as_deref(), ends).to_vec());
        }
        "split" | "rsplit" => {
            let [separator, count] = args.bind(name, ["sep", "maxsplit"])?;
            let (separator, count) = (maybe_text(name, separator)?, most(count)?);
            if separator.as_ref().is_some_and(|s| s.is_empty()) {
                return Err(Fail::new("the separator of `split` should not be empty"));
            }
            let split = if name == "split" { text::split } else { text::rsplit };
            let pieces = split(t, separator.as_deref(), count);
            run.spend(t.len() + pieces.len())?;
            return Ok(Value::list(pieces.into_iter().map(Value::from).collect()));
        }
        "splitlines" => {
            let [keep] = args.bind(name, ["keepends"])?;
            let lines = text::lines(t, keep.is_some_and(|k| k.is_true()));
            run.spend(t.len() + lines.len())?;
            return Ok(Value::list(lines.into_iter().map(Value::from).collect()));
        }
        "partition" | "rpartition" => {
            let [separator] = args.bind(name, ["sep"])?;
            let separator = wanted_text(name, separator)?;
            if separator.is_empty() {
                return Err(Fail::new(format!("the separator of `{name}` should not be empty")));
            }
            let first = name == "partition";
            let at = if first { text::find(t, &separator, 0) } else { text::rfind(t, &separator) };
            run.spend(t.len())?;
            let parts: [&[u32]; 3] = match at {
                Some(at) => [&t[..at], &t[at..at + separator.len()], &t[at + separator.len()..]],
                None if first => [t, &[], &[]],
                None => [&[], &[], t],
            };
            return Ok(Value::tuple(parts.map(Value::from).to_vec()));
        }
        "replace" => {
            let [old, new, count] = args.bind(name, ["old", "new", "count"])?;
            let (old, new, count) = (wanted_text(name, old)?, wanted_text(name, new)?, most(count)?);
            return replaced(run, t, &old, &new, count);
        }
        "join" => {
            let [items] = args.bind(name, ["iterable"])?;
            let items = items.ok_or_else(|| Fail::new("`join` should get a list"))?.items()?;
            let mut out = Vec::new();
            for (i, item) in items.iter().enumerate() {
                let item = wanted_text(name, Some(item.clone()))?;
                run.spend(item.len() + t.len())?;
                if i > 0 {
                    out.extend_from_slice(t);
                }
                out.extend_from_slice(&item);
            }
            return Ok(out.into());
        }
        "find" | "rfind" | "index" | "rindex" | "count" => {
            let [wanted, start, stop] = args.bind(name, ["sub", "start", "end"])?;
            let wanted = wanted_text(name, wanted)?;
            let (start, stop) = range(t.len(), start, stop)?;
            let s = &t[start..stop];
            if name == "count" {
                if wanted.is_empty() {
                    return Ok((s.len() + 1).into());
                }
                return Ok((text::split(s, Some(&wanted), None).len() - 1).into());
            }
            let at = if name.starts_with('r') { text::rfind(s, &wanted) } else { text::find(s, &wanted, 0) };
            return match at {
                Some(at) => Ok((start + at).into()),
                None if name.ends_with("find") => Ok(Value::Integer(-1)),
                None => Err(Fail::new(format!("`{name}`: the text does not hold it"))),
            };
        }
        "center" | "ljust" | "rjust" | "zfill" => {
            let [width, fill] = args.bind(name, ["width", "fillchar"])?;
            let width = width
                .and_then(|w| w.integer())
                .ok_or_else(|| Fail::new(format!("`{name}` should get a width")))?;
            let fill = maybe_text(name, fill)?;
            let fill = match fill.as_deref() {
                None => u32::from(b' '),
                Some([fill]) => *fill,
                Some(_) => return Err(Fail::new(format!("`{name}` should fill with one character"))),
            };
            let room = usize::try_from(width).unwrap_or(0).saturating_sub(t.len());
            run.spend(room.saturating_add(t.len()))?;
            return Ok(match name {
                "ljust" => text::pad(t, 0, room, fill).into(),
                "rjust" => text::pad(t, room, 0, fill).into(),
                "zfill" => {
                    let sign =
                        usize::from(t.first().is_some_and(|&u| matches!(text::character(u), '+' | '-')));
                    let mut out = t[..sign].to_vec();
                    out.extend(text::pad(&t[sign..], room, 0, u32::from(b'0')));
                    out.into()
                }
                _ => centered(t, usize::try_from(width).unwrap_or(0), fill).into(),
            });
        }
        "removeprefix" | "removesuffix" => {
            let [affix] = args.bind(name, ["prefix"])?;
            let affix = wanted_text(name, affix)?;
            let Some(rest) = t.len().checked_sub(affix.len()) else { return Ok(Value::Text(t.clone())) };
            let (s, found) = match name {
                "removeprefix" => (&t[affix.len()..], text::same(&t[..affix.len()], &affix)),
                _ => (&t[..rest], text::same(&t[rest..], &affix)),
            };
            return Ok(if found { s.into() } else { Value::Text(t.clone()) });
        }
        "expandtabs" => {
            let [size] = args.bind(name, ["tabsize"])?;
            let size =
                size.map_or(Some(8), |s| s.integer()).and_then(|n| usize::try_from(n).ok()).unwrap_or(0);
            let (mut out, mut column) = (Vec::new(), 0);
            for &unit in t.iter() {
                let c = text::character(unit);
                if c == '\t' {
                    let spaces = if size == 0 { 0 } else { size - column % size };
                    run.spend(spaces)?;
                    out.resize(out.len() + spaces, u32::from(b' '));
                    column += spaces;
                } else {
                    column = if matches!(c, '\n' | '\r') { 0 } else { column + 1 };
                    out.push(unit);
                }
            }
            return run.made(out);
        }
        "format_map" => {
            let [map] = args.bind(name, ["mapping"])?;
            let Some(Value::Dict(map)) = map else { return Err(Fail::new("`format_map` should get a dict")) };
            let named: Vec<_> =
                map.0.iter().map(|(k, v)| (text::plain(&k.string()).into(), v.clone())).collect();
            return format::braces(run, t, &[], &named);
        }
        _ => {}
    }
    let [] = args.bind(name, [])?;
    let all = |rule: fn(char) -> bool| !t.is_empty() && t.iter().all(|&u| rule(text::character(u)));
    let any = |rule: fn(char) -> bool| t.iter().any(|&u| rule(text::character(u)));
    let digit = |c: char| c.is_numeric() && c.is_alphanumeric();
    Ok(match name {
        "lower" | "casefold" => {
            return run.made(if name == "lower" {
                text::lower(t)
            } else {
                text::lower(&text::map(t, folded))
            });
        }
        "upper" => return run.made(text::upper(t)),
        "capitalize" => return run.made(text::capitalize(t)),
        "title" => return run.made(text::title(t)),
        "swapcase" => {
            let swapped = t.chunks(1).flat_map(|u| {
                if text::character(u[0]).is_uppercase() { text::lower(u) } else { text::upper(u) }
            });
            return run.made(swapped.collect());
        }
        "isalnum" => all(char::is_alphanumeric),
        "isalpha" => all(char::is_alphabetic),
        "isascii" => t.iter().all(|&u| text::character(u).is_ascii()),
        "isdecimal" | "isdigit" => all(|c| {
            c.is_ascii_digit() || !c.is_ascii() && c.is_numeric() && c.to_digit(36).is_none() && is_decimal(c)
        }),
        "isnumeric" => all(digit),
        "islower" => any(char::is_lowercase) && !any(char::is_uppercase),
        "isupper" => any(char::is_uppercase) && !any(char::is_lowercase),
        "isspace" => !t.is_empty() && t.iter().all(|&u| text::is_space(u)),
        "isprintable" => t.iter().all(|&u| text::is_printable(text::character(u))),
        "isidentifier" => {
            all(|c| c.is_alphanumeric() || c == '_')
                && !t.first().is_some_and(|&u| text::character(u).is_numeric())
        }
        _ => any(char::is_alphabetic) && text::same(&text::title(t), t),
    }
    .into())
}

/// Characters beyond their small letters that `casefold` changes.
fn folded(c: char) -> std::vec::IntoIter<char> {
    match c {
        'ß' | 'ẞ' => vec!['s', 's'],
        'ς' => vec!['σ'],
        'ſ' => vec!['s'],
        c => vec![c],
    }
    .into_iter()
}

/// The decimal digits of other scripts come in tens.
fn is_decimal(c: char) -> bool {
    matches!(c as u32, 0x660..=0x669 | 0x6f0..=0x6f9 | 0x7c0..=0x7c9 | 0x966..=0x96f | 0x9e6..=0x9ef | 0xa66..=0xa6f | 0xae6..=0xaef
        | 0xb66..=0xb6f | 0xbe6..=0xbef | 0xc66..=0xc6f | 0xce6..=0xcef | 0xd66..=0xd6f | 0xe50..=0xe59 | 0xed0..=0xed9 | 0xf20..=0xf29
        | 0x1040..=0x1049 | 0x17e0..=0x17e9 | 0x1810..=0x1819 | 0xff10..=0xff19 | 0x1d7ce..=0x1d7ff)
}

/// `str.center`.
pub(super) fn centered(t: &[u32], width: usize, fill: u32) -> Vec<u32> {
    let room = width.saturating_sub(t.len());
    let left = room / 2 + (room & width & 1);
    text::pad(t, left, room - left, fill)
}

/// `str.replace`, its size checked before.
pub(super) fn replaced(
    run: &mut Run,
    t: &[u32],
    old: &[u32],
    new: &[u32],
    count: Option<usize>,
) -> Result<Value, Fail> {
    let found = if old.is_empty() { t.len() + 1 } else { text::split(t, Some(old), None).len() - 1 };
    let times = found.min(count.unwrap_or(found));
    run.spend(t.len().saturating_add(times.saturating_mul(new.len())))?;
    Ok(text::replace(t, old, new, count).into())
}
