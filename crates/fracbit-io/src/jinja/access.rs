//! What operators, dots and brackets make of values.

use std::rc::Rc;

use super::text::{self, Text};
use super::value::{Kind, Loop, Value};
use super::{Fail, methods};

pub(super) fn no_operand(operator: &str, value: &Value) -> Fail {
    Fail::new(match value {
        Value::Undefined(what) => what.to_string(),
        other => format!("`{operator}` is not for a value of type `{}`", other.type_name()),
    })
}

/// A key of a dict.
pub(super) fn hashable(key: Value) -> Result<Value, Fail> {
    match key {
        Value::Dict(_) | Value::Sequence(Kind::List | Kind::Generator | Kind::View(_), _) => {
            Err(Fail::new(format!("a value of type `{}` cannot be a key", key.type_name())))
        }
        key => Ok(key),
    }
}

pub(super) fn compare(operator: &str, a: &Value, b: &Value) -> Result<bool, Fail> {
    Ok(match operator {
        "==" => a.equals(b),
        "!=" => !a.equals(b),
        "in" => contains(b, a)?,
        "not in" => !contains(b, a)?,
        _ => {
            let Some(order) = a.compare(b)? else { return Ok(false) };
            match operator {
                "<" => order.is_lt(),
                "<=" => order.is_le(),
                ">" => order.is_gt(),
                _ => order.is_ge(),
            }
        }
    })
}

pub(super) fn contains(hay: &Value, needle: &Value) -> Result<bool, Fail> {
    match (hay, needle) {
        (Value::Text(hay), Value::Text(needle)) => Ok(text::find(hay, needle, 0).is_some()),
        (Value::Text(_), other) => Err(Fail::new(format!(
            "only a text can be in a text, got a value of type `{}`",
            other.type_name()
        ))),
        (Value::Dict(d), key) => Ok(d.get(key).is_some()),
        (hay, needle) => Ok(hay.items()?.iter().any(|item| item.equals(needle))),
    }
}

/// `value.name`.
pub(super) fn attribute(value: &Value, name: &str) -> Result<Value, Fail> {
    let none = || {
        let what = match value {
            Value::None => "'None'".to_owned(),
            other => format!("'{} object'", other.type_name()),
        };
        Ok(Value::undefined(format!("{what} has no attribute '{name}'")))
    };
    if let Value::Undefined(what) = value {
        return Err(Fail::new(what.to_string()));
    }
    if name.starts_with('_') && !matches!(value, Value::Dict(_)) {
        return none();
    }
    if methods::exists(value, name) {
        return Ok(Value::Method(Rc::new(value.clone()), name.into()));
    }
    let found = match value {
        Value::Dict(d) => d.named(name).cloned(),
        Value::Namespace(d) => d.borrow().named(name).cloned(),
        Value::Loop(l) => loop_attribute(l, name),
        Value::Macro(m) if name == "name" => Some((&*m.made.name).into()),
        Value::Cycler(c) if name == "current" => Some(c.0[c.1.get() % c.0.len()].clone()),
        Value::Sequence(Kind::Group, items) if name == "grouper" => items.first().cloned(),
        Value::Sequence(Kind::Group, items) if name == "list" => items.get(1).cloned(),
        _ => None,
    };
    found.map_or_else(none, Ok)
}

fn loop_attribute(l: &Loop, name: &str) -> Option<Value> {
    let (index, len) = (l.index.get(), l.items.len());
    Some(match name {
        "index" => (index + 1).into(),
        "index0" => index.into(),
        "revindex" => (len - index).into(),
        "revindex0" => (len - index - 1).into(),
        "first" => (index == 0).into(),
        "last" => (index + 1 == len).into(),
        "length" => len.into(),
        "depth" => (l.depth + 1).into(),
        "depth0" => l.depth.into(),
        "previtem" => match index.checked_sub(1) {
            Some(before) => l.items[before].clone(),
            None => Value::undefined("there is no previous item"),
        },
        "nextitem" => {
            l.items.get(index + 1).cloned().unwrap_or_else(|| Value::undefined("there is no next item"))
        }
        _ => return None,
    })
}

/// `value[key]`.
pub(super) fn item(value: &Value, key: &Value) -> Result<Value, Fail> {
    let place = |len: usize| {
        let i = key.integer()?;
        usize::try_from(if i < 0 { i.checked_add(len as i64)? } else { i }).ok()
    };
    let found = match value {
        Value::Undefined(what) => return Err(Fail::new(what.to_string())),
        Value::Text(t) => place(t.len())
            .and_then(|i| t.get(i))
            .map(|u| Value::Text(Text::from(&[*u][..]).with_safety(t.safe))),
        Value::Sequence(Kind::List | Kind::Tuple | Kind::Group | Kind::Range(_), items) => {
            place(items.len()).and_then(|i| items.get(i)).cloned()
        }
        Value::Dict(d) => d.get(key).cloned(),
        _ => None,
    };
    match (found, key) {
        (Some(found), _) => Ok(found),
        (None, Value::Text(name)) => attribute(value, &text::plain(name)),
        (None, key) => {
            let (name, key) = (value.type_name(), text::plain(&key.repr()));
            Ok(Value::undefined(format!("'{name} object' has no element {key}")))
        }
    }
}
