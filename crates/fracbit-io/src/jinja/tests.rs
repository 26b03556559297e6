//! What may follow `is`.

use super::access::{compare, contains};
use super::eval::Args;
use super::filters;
use super::value::{Kind, Value};
use super::{Fail, markup, text};

const NAMES: [&str; 39] = [
    "defined",
    "undefined",
    "none",
    "boolean",
    "true",
    "false",
    "integer",
    "float",
    "number",
    "string",
    "mapping",
    "sequence",
    "iterable",
    "callable",
    "odd",
    "even",
    "divisibleby",
    "eq",
    "equalto",
    "==",
    "ne",
    "!=",
    "lt",
    "lessthan",
    "<",
    "le",
    "<=",
    "gt",
    "greaterthan",
    ">",
    "ge",
    ">=",
    "in",
    "sameas",
    "upper",
    "lower",
    "escaped",
    "filter",
    "test",
];

pub(super) fn exists(name: &str) -> bool {
    NAMES.contains(&name)
}

pub(super) fn check(name: &str, value: &Value, args: Args) -> Result<bool, Fail> {
    let operator = match name {
        "eq" | "equalto" | "==" => Some("=="),
        "ne" | "!=" => Some("!="),
        "lt" | "lessthan" | "<" => Some("<"),
        "le" | "<=" => Some("<="),
        "gt" | "greaterthan" | ">" => Some(">"),
        "ge" | ">=" => Some(">="),
        _ => None,
    };
    if operator.is_some() || matches!(name, "in" | "sameas" | "divisibleby") {
        let [other] = args.bind(name, ["other"])?;
        let other =
            other.ok_or_else(|| Fail::new(format!("`is {name}` should have a value to compare with")))?;
        return match (operator, name) {
            (Some(operator), _) => compare(operator, value, &other),
            (None, "in") => contains(&other, value),
            (None, "sameas") => Ok(value.type_name() == other.type_name() && value.equals(&other)),
            _ => match (value.integer(), other.integer()) {
                (_, Some(0)) => Err(Fail::new("division by zero")),
                (Some(a), Some(b)) => Ok(a.wrapping_rem(b) == 0),
                _ => Err(Fail::new("`is divisibleby` is for whole numbers")),
            },
        };
    }
    let [] = args.bind(name, [])?;
    Ok(match name {
        "defined" => !matches!(value, Value::Undefined(_)),
        "undefined" => matches!(value, Value::Undefined(_)),
        "none" => matches!(value, Value::None),
        "boolean" => matches!(value, Value::Bool(_)),
        "true" => matches!(value, Value::Bool(true)),
        "false" => matches!(value, Value::Bool(false)),
        "integer" => matches!(value, Value::Integer(_)),
        "float" => matches!(value, Value::Float(_)),
        "number" => value.number().is_some(),
        "string" => matches!(value, Value::Text(_)),
        "mapping" => matches!(value, Value::Dict(_)),
        "sequence" => matches!(
            value,
            Value::Undefined(_)
                | Value::Text(_)
                | Value::Dict(_)
                | Value::Sequence(Kind::List | Kind::Tuple | Kind::Group | Kind::Range(_), _)
        ),
        "iterable" => value.items().is_ok() || matches!(value, Value::Loop(_)),
        "callable" => matches!(
            value,
            Value::Undefined(_)
                | Value::Function(_)
                | Value::Method(..)
                | Value::Macro(_)
                | Value::Loop(_)
                | Value::Joiner(_)
        ),
        "odd" | "even" => match value.integer() {
            Some(i) => (i.rem_euclid(2) == 1) == (name == "odd"),
            None => return Err(Fail::new(format!("`is {name}` is for whole numbers"))),
        },
        "upper" | "lower" => {
            let t = value.string();
            let (mut large, mut small) = (false, false);
            for c in t.iter().map(|&u| text::character(u)) {
                large |= c.is_uppercase();
                small |= c.is_lowercase();
            }
            if name == "upper" { large && !small } else { small && !large }
        }
        "escaped" => markup::is_safe(value),
        "filter" => filters::exists(&text::plain(&value.string())),
        "test" => exists(&text::plain(&value.string())),
        _ => return Err(Fail::new(format!("unknown test `{name}`"))),
    })
}
