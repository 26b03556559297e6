//! Python's two ways of formatting: `'%s' % x` and `'{}'.format(x)`.

use std::sync::Arc;

use super::access::{attribute, item, no_operand};
use super::eval::Run;
use super::text::{self, Text, units};
use super::value::{Kind, Value, float};
use super::{Fail, markup};

/// How a value is written.
#[derive(Clone, Debug)]
struct Spec {
    /// `<`, `>`, `^`, `=`; `\0`: as the type has it.
    align: char,
    fill: u32,
    /// `+`, ` ` or `-`.
    sign: char,
    alternate: bool,
    group: Option<char>,
    width: usize,
    precision: Option<usize>,
    kind: char,
}

const PLAIN: Spec = Spec {
    align: '\0',
    fill: b' ' as u32,
    sign: '-',
    alternate: false,
    group: None,
    width: 0,
    precision: None,
    kind: '\0',
};
/// Most digits behind the point.
const DIGITS: usize = 1000;

/// `format % values`.
pub(super) fn percent(run: &mut Run, format: &Text, values: &Value) -> Result<Value, Fail> {
    let single;
    let (list, named) = match values {
        Value::Sequence(Kind::Tuple | Kind::Group, items) => (&items[..], None),
        Value::Dict(d) => {
            single = [values.clone()];
            (&single[..], Some(d))
        }
        _ => {
            single = [values.clone()];
            (&single[..], None)
        }
    };
    let (mut used, mut by_name) = (0, false);
    let mut out = Vec::new();
    let mut at = 0;
    let fail = |rule: &str| Fail::new(format!("a format {rule}"));
    let mut take = || {
        let value = list.get(used).ok_or_else(|| fail("should have as many values as places"))?;
        used += 1;
        Ok::<_, Fail>(value)
    };
    while at < format.len() {
        let unit = format[at];
        at += 1;
        if text::character(unit) != '%' {
            out.push(unit);
            continue;
        }
        let next = |at: &mut usize| {
            let c =
                format.get(*at).map(|&u| text::character(u)).ok_or_else(|| fail("should not end with `%`"));
            *at += 1;
            c
        };
        let mut c = next(&mut at)?;
        let mut value = None;
        if c == '(' {
            let start = at;
            let mut open = 1;
            while open > 0 {
                open = match next(&mut at)? {
                    '(' => open + 1,
                    ')' => open - 1,
                    _ => open,
                };
            }
            let Some(named) = named else { return Err(fail("with names should get a dict")) };
            let key = Value::from(&format[start..at - 1]);
            let name = text::plain(&format[start..at - 1]);
            value = Some(named.get(&key).ok_or_else(|| Fail::new(format!("a format should find `{name}`")))?);
            by_name = true;
            c = next(&mut at)?;
        }
        let mut spec = PLAIN;
        let (mut left, mut zero) = (false, false);
        while let '-' | '+' | ' ' | '#' | '0' = c {
            match c {
                '-' => left = true,
                '+' => spec.sign = '+',
                ' ' if spec.sign == '-' => spec.sign = ' ',
                '#' => spec.alternate = true,
                '0' => zero = true,
                _ => {}
            }
            c = next(&mut at)?;
        }
        let number = |c: &mut char, at: &mut usize, take: &mut dyn FnMut() -> Result<Value, Fail>| {
            if *c == '*' {
                let value = take()?;
                *c = next(at)?;
                let n = value.integer().ok_or_else(|| no_operand("%*", &value))?;
                return usize::try_from(n).map_err(|_| fail("should have no negative widths"));
            }
            let mut n: usize = 0;
            while let Some(digit) = c.to_digit(10) {
                n = n.saturating_mul(10).saturating_add(digit as usize);
                *c = next(at)?;
            }
            Ok(n)
        };
        let mut take_value = || take().cloned();
        spec.width = number(&mut c, &mut at, &mut take_value)?;
        if c == '.' {
            c = next(&mut at)?;
            spec.precision = Some(number(&mut c, &mut at, &mut take_value)?);
        }
        while matches!(c, 'h' | 'l' | 'L') {
            c = next(&mut at)?;
        }
        if c == '%' {
            out.push(unit);
            continue;
        }
        let value = match value {
            Some(value) => value.clone(),
            None => take_value()?,
        };
        spec.align = if left {
            '<'
        } else if zero && !matches!(c, 's' | 'r' | 'a' | 'c') {
            '='
        } else {
            '>'
        };
        if spec.align == '=' {
            spec.fill = u32::from(b'0');
        }
        let made = match c {
            's' if format.safe => cut(&markup::escaped(run, &value)?.string(), &spec),
            's' => cut(&value.string(), &spec),
            'r' | 'a' if format.safe => cut(&markup::entities(&value.repr()), &spec),
            'r' | 'a' => cut(&value.repr(), &spec),
            'c' | 'x' | 'X' | 'o' if format.safe => return Err(no_operand(&format!("%{c}"), &value)),
            'c' => match &value {
                Value::Text(t) if t.len() == 1 => t.to_vec(),
                Value::Integer(i) => {
                    let c = u32::try_from(*i)
                        .ok()
                        .and_then(char::from_u32)
                        .ok_or_else(|| fail("with `%c` should get a character"))?;
                    vec![c as u32]
                }
                _ => return Err(fail("with `%c` should get a character")),
            },
            'd' | 'i' | 'u' | 'x' | 'X' | 'o' => {
                let whole = match &value {
                    Value::Float(f) if matches!(c, 'd' | 'i' | 'u') && f.abs() < 9e18 => *f as i64,
                    other => other.integer().ok_or_else(|| no_operand(&format!("%{c}"), other))?,
                };
                spec.kind = if matches!(c, 'i' | 'u') { 'd' } else { c };
                let digits = spec.precision.take().unwrap_or(0);
                integer(run, whole, &spec, digits)?
            }
            'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
                let f = value.number().ok_or_else(|| no_operand(&format!("%{c}"), &value))?;
                spec.kind = c;
                real(run, f, &spec)?
            }
            other => return Err(Fail::new(format!("a format should have no `%{other}`"))),
        };
        out.extend(padded(run, &made, &spec, '>')?);
    }
    if used < list.len() && !by_name && named.is_none() && !matches!(values, Value::Sequence(Kind::List, _)) {
        return Err(fail("should have a place for every value"));
    }
    let made = run.made(out)?;
    Ok(if format.safe { markup::safe(made) } else { made })
}

fn cut(t: &[u32], spec: &Spec) -> Vec<u32> {
    t[..spec.precision.unwrap_or(t.len()).min(t.len())].to_vec()
}

/// Filled up to the width.
fn padded(run: &mut Run, t: &[u32], spec: &Spec, usual: char) -> Result<Vec<u32>, Fail> {
    let room = spec.width.saturating_sub(t.len());
    run.spend(room.saturating_add(t.len()))?;
    Ok(match if spec.align == '\0' { usual } else { spec.align } {
        '<' => text::pad(t, 0, room, spec.fill),
        '^' => text::pad(t, room / 2, room - room / 2, spec.fill),
        '=' => {
            // Behind the sign and the prefix.
            let c = |i: usize| t.get(i).map(|&u| text::character(u));
            let sign = usize::from(matches!(c(0), Some('+' | '-' | ' ')));
            let prefix = if c(sign) == Some('0') && matches!(c(sign + 1), Some('x' | 'X' | 'o' | 'b' | 'B')) {
                2
            } else {
                0
            };
            let (head, tail) = t.split_at(sign + prefix);
            [head, &text::pad(tail, room, 0, spec.fill)].concat()
        }
        _ => text::pad(t, room, 0, spec.fill),
    })
}

fn sign(negative: bool, spec: &Spec) -> &'static str {
    match (negative, spec.sign) {
        (true, _) => "-",
        (false, '+') => "+",
        (false, ' ') => " ",
        _ => "",
    }
}

fn grouped(digits: &str, spec: &Spec, every: usize) -> String {
    let Some(separator) = spec.group else { return digits.to_owned() };
    let mut out = String::new();
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(every) {
            out.push(separator);
        }
        out.push(c);
    }
    out
}

fn integer(run: &mut Run, value: i64, spec: &Spec, digits: usize) -> Result<Vec<u32>, Fail> {
    run.spend(digits)?;
    let n = value.unsigned_abs();
    let (body, prefix, every) = match spec.kind {
        'x' => (format!("{n:x}"), "0x", 4),
        'X' => (format!("{n:X}"), "0X", 4),
        'o' => (format!("{n:o}"), "0o", 4),
        'b' => (format!("{n:b}"), "0b", 4),
        _ => (n.to_string(), "", 3),
    };
    let prefix = if spec.alternate { prefix } else { "" };
    let body = "0".repeat(digits.saturating_sub(body.len())) + &grouped(&body, spec, every);
    Ok(units(&format!("{}{prefix}{body}", sign(value < 0, spec)), 0))
}

fn real(run: &mut Run, f: f64, spec: &Spec) -> Result<Vec<u32>, Fail> {
    let precision = spec.precision.unwrap_or(6);
    if precision > DIGITS {
        return Err(Fail::new(format!(
            "a number should have at most {DIGITS} digits behind the point, got {precision}"
        )));
    }
    run.spend(precision + 310)?;
    let large = spec.kind.is_ascii_uppercase();
    let abs = f.abs();
    let scientific = |precision: usize| {
        let text = format!("{abs:.precision$e}");
        let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
        let exponent: i32 = exponent.parse().unwrap_or(0);
        (digits.to_owned(), exponent)
    };
    let with_exponent = |digits: &str, exponent: i32| {
        format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
    };
    let body = if !f.is_finite() {
        if f.is_nan() { "nan".to_owned() } else { "inf".to_owned() }
    } else {
        match spec.kind.to_ascii_lowercase() {
            'e' => {
                let (digits, exponent) = scientific(precision);
                with_exponent(&digits, exponent)
            }
            'g' => {
                let precision = precision.max(1);
                let (digits, exponent) = scientific(precision - 1);
                let shorter = |s: &str| {
                    if spec.alternate || !s.contains('.') {
                        s.to_owned()
                    } else {
                        s.trim_end_matches('0').trim_end_matches('.').to_owned()
                    }
                };
                if exponent < -4 || exponent >= precision as i32 {
                    with_exponent(&shorter(&digits), exponent)
                } else {
                    let behind = (precision as i32 - 1 - exponent).max(0) as usize;
                    shorter(&format!("{abs:.behind$}"))
                }
            }
            _ => format!("{abs:.precision$}"),
        }
    };
    let body = match body.split_once('.') {
        Some((whole, rest)) if spec.group.is_some() => format!("{}.{rest}", grouped(whole, spec, 3)),
        None if spec.group.is_some() && f.is_finite() => grouped(&body, spec, 3),
        _ => body,
    };
    let body = if large { body.to_uppercase() } else { body };
    Ok(units(&format!("{}{body}", sign(f.is_sign_negative() && !f.is_nan(), spec)), 0))
}

/// `format.format(*positional, **named)`.
pub(super) fn braces(
    run: &mut Run,
    format: &Text,
    positional: &[Value],
    named: &[(Arc<str>, Value)],
) -> Result<Value, Fail> {
    let mut numbered = 0;
    let out = fields(run, format, format.safe, positional, named, &mut numbered, 0)?;
    run.made(out)
}

fn fields(
    run: &mut Run,
    format: &[u32],
    safe: bool,
    positional: &[Value],
    named: &[(Arc<str>, Value)],
    numbered: &mut usize,
    depth: usize,
) -> Result<Vec<u32>, Fail> {
    let fail = |rule: &str| Fail::new(format!("a format {rule}"));
    if depth > 1 {
        return Err(fail("should have no braces within braces within braces"));
    }
    let c = |at: usize| format.get(at).map(|&u| text::character(u));
    let mut out = Vec::new();
    let mut at = 0;
    while let Some(ch) = c(at) {
        run.work(1)?;
        if !matches!(ch, '{' | '}') {
            out.push(format[at]);
            at += 1;
            continue;
        }
        if c(at + 1) == Some(ch) {
            out.push(format[at]);
            at += 2;
            continue;
        }
        if ch == '}' {
            return Err(fail("should double a `}` that stands alone"));
        }
        let start = at + 1;
        let mut open = 1;
        at += 1;
        while open > 0 {
            open = match c(at) {
                Some('{') => open + 1,
                Some('}') => open - 1,
                Some(_) => open,
                None => return Err(fail("should close its `{`")),
            };
            at += 1;
        }
        let field = &format[start..at - 1];
        let bracket = field.iter().position(|&u| text::character(u) == '[').unwrap_or(field.len());
        let end = (0..field.len())
            .find(|&i| {
                matches!(text::character(field[i]), ':' | '!')
                    && (i < bracket || field[bracket..i].iter().any(|&u| text::character(u) == ']'))
            })
            .unwrap_or(field.len());
        let mut value = named_value(&text::plain(&field[..end]), positional, named, numbered)?;
        let mut rest = &field[end..];
        if rest.first().is_some_and(|&u| text::character(u) == '!') {
            value = match rest.get(1).map(|&u| text::character(u)) {
                Some('s') => Value::Text(value.string()),
                Some('r' | 'a') => value.repr().into(),
                _ => return Err(fail("should convert by `!s`, `!r` or `!a`")),
            };
            rest = &rest[2..];
        }
        let spec = match rest.split_first() {
            None => Vec::new(),
            Some((&colon, spec)) if text::character(colon) == ':' => {
                fields(run, spec, safe, positional, named, numbered, depth + 1)?
            }
            Some(_) => return Err(fail("should have `:` behind a conversion")),
        };
        out.extend(match markup::is_safe(&value) && safe {
            true if !spec.is_empty() => return Err(fail("should not shape a text that is safe already")),
            true => value.string().to_vec(),
            false if safe => markup::entities(&formatted(run, &value, &spec)?),
            false => formatted(run, &value, &spec)?,
        });
    }
    Ok(out)
}

/// The value of a field such as `0`, `name.part` or `[1]`.
fn named_value(
    field: &str,
    positional: &[Value],
    named: &[(Arc<str>, Value)],
    numbered: &mut usize,
) -> Result<Value, Fail> {
    let end = field.find(['.', '[']).unwrap_or(field.len());
    let (first, mut rest) = field.split_at(end);
    let index = if first.is_empty() {
        *numbered += 1;
        Some(*numbered - 1)
    } else {
        whole(first).and_then(|i| usize::try_from(i).ok())
    };
    let mut value = match index {
        Some(i) => positional.get(i),
        None => named.iter().find(|(n, _)| **n == *first).map(|(_, v)| v),
    }
    .ok_or_else(|| Fail::new(format!("a format should find `{first}`")))?
    .clone();
    while !rest.is_empty() {
        if let Some(inner) = rest.strip_prefix('[') {
            let (name, behind) =
                inner.split_once(']').ok_or_else(|| Fail::new("a format should close its `[`"))?;
            let key = whole(filled(name)?).map_or_else(|| name.into(), Value::Integer);
            value = item(&value, &key)?;
            rest = behind;
        } else if let Some(inner) = rest.strip_prefix('.') {
            let (name, behind) = inner.split_at(inner.find(['.', '[']).unwrap_or(inner.len()));
            value = attribute(&value, filled(name)?)?;
            rest = behind;
        } else {
            return Err(Fail::new("a format should have `.` or `[` behind a `]`"));
        }
    }
    Ok(value)
}

/// A number of digits alone, which is a place; others are names.
fn whole(name: &str) -> Option<i64> {
    if name.bytes().all(|b| b.is_ascii_digit()) { name.parse().ok() } else { None }
}

fn filled(name: &str) -> Result<&str, Fail> {
    if name.is_empty() {
        Err(Fail::new("a format should have a name behind `.` and in `[]`"))
    } else {
        Ok(name)
    }
}

fn parse_spec(spec: &[u32]) -> Result<Spec, Fail> {
    let chars: Vec<char> = spec.iter().map(|&u| text::character(u)).collect();
    let mut made = PLAIN;
    let mut at = 0;
    let is_align = |c: Option<&char>| matches!(c, Some('<' | '>' | '^' | '='));
    if is_align(chars.get(1)) {
        (made.fill, made.align, at) = (spec[0], chars[1], 2);
    } else if is_align(chars.first()) {
        (made.align, at) = (chars[0], 1);
    }
    if let Some(c @ ('+' | '-' | ' ')) = chars.get(at) {
        (made.sign, at) = (*c, at + 1);
    }
    if chars.get(at) == Some(&'#') {
        (made.alternate, at) = (true, at + 1);
    }
    if chars.get(at) == Some(&'0') && made.align == '\0' {
        (made.fill, made.align) = (u32::from(b'0'), '=');
    }
    let number = |at: &mut usize| {
        let start = *at;
        let mut n: usize = 0;
        while let Some(digit) = chars.get(*at).and_then(|c| c.to_digit(10)) {
            n = n.saturating_mul(10).saturating_add(digit as usize);
            *at += 1;
        }
        (*at > start).then_some(n)
    };
    made.width = number(&mut at).unwrap_or(0);
    if let Some(c @ (',' | '_')) = chars.get(at) {
        (made.group, at) = (Some(*c), at + 1);
    }
    if chars.get(at) == Some(&'.') {
        at += 1;
        made.precision =
            Some(number(&mut at).ok_or_else(|| Fail::new("a format should have digits behind `.`"))?);
    }
    if let Some(c) = chars.get(at) {
        (made.kind, at) = (*c, at + 1);
    }
    if at < chars.len() {
        return Err(Fail::new(format!("a format should not have `{}`", text::plain(spec))));
    }
    Ok(made)
}

fn formatted(run: &mut Run, value: &Value, spec: &[u32]) -> Result<Vec<u32>, Fail> {
    if spec.is_empty() {
        return Ok(value.string().to_vec());
    }
    let mut spec = parse_spec(spec)?;
    let wrong = |kind: char| {
        Fail::new(format!("a format should have no `{kind}` for a value of type `{}`", value.type_name()))
    };
    let (made, usual) = match value {
        Value::Text(t) => match spec.kind {
            '\0' | 's' if spec.align != '=' => (cut(t, &spec), '<'),
            '\0' | 's' => {
                spec.align = '<';
                (cut(t, &spec), '<')
            }
            kind => return Err(wrong(kind)),
        },
        Value::Integer(_) | Value::Bool(_) => match spec.kind {
            '\0' | 'd' | 'x' | 'X' | 'o' | 'b' | 'n' => {
                if spec.precision.is_some() {
                    return Err(Fail::new("a format of a whole number should have no digits behind a point"));
                }
                (integer(run, value.integer().unwrap_or(0), &spec, 0)?, '>')
            }
            'c' => {
                let c = value.integer().and_then(|i| u32::try_from(i).ok()).and_then(char::from_u32);
                (vec![c.ok_or_else(|| wrong('c'))? as u32], '<')
            }
            kind => {
                (number(run, value.number().unwrap_or(0.0), &spec, kind).ok_or_else(|| wrong(kind))??, '>')
            }
        },
        Value::Float(f) => (number(run, *f, &spec, spec.kind).ok_or_else(|| wrong(spec.kind))??, '>'),
        other => {
            return Err(Fail::new(format!("a value of type `{}` should have no format", other.type_name())));
        }
    };
    padded(run, &made, &spec, usual)
}

fn number(run: &mut Run, f: f64, spec: &Spec, kind: char) -> Option<Result<Vec<u32>, Fail>> {
    let spec = match (kind, spec.precision) {
        ('\0', None) => {
            let body = float(f.abs());
            let body = match body.split_once('.') {
                Some((whole, rest)) if spec.group.is_some() => format!("{}.{rest}", grouped(whole, spec, 3)),
                _ => body,
            };
            return Some(Ok(units(&format!("{}{body}", sign(f.is_sign_negative(), spec)), 0)));
        }
        ('%', precision) => {
            let spec = Spec { kind: 'f', precision: Some(precision.unwrap_or(6)), ..spec.clone() };
            return Some(real(run, f * 100.0, &spec).map(|mut made| {
                made.push(u32::from(b'%'));
                made
            }));
        }
        ('\0' | 'n', _) => Spec { kind: 'g', ..spec.clone() },
        ('e' | 'E' | 'f' | 'F' | 'g' | 'G', _) => Spec { kind, ..spec.clone() },
        _ => return None,
    };
    Some(real(run, f, &spec))
}
