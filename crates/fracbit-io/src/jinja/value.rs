//! Values of templates, with the meaning that Python gives them.

use std::cell::{Cell, RefCell};
use std::cmp::Ordering;
use std::rc::Rc;
use std::sync::Arc;

use super::parser::{For, Macro};
use super::text::{self, Text};

/// What a row of values is called in Python.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    List,
    Tuple,
    /// A tuple of a value and its list, from `groupby`.
    Group,
    /// What comes one by one, without a length.
    Generator,
    /// `dict.keys()` and its like.
    View(&'static str),
    /// From, to and by.
    Range([i64; 3]),
}

impl Kind {
    /// Whether rows of both can be equal.
    fn same(self, other: Self) -> bool {
        let tuple = |kind| matches!(kind, Self::Tuple | Self::Group);
        self == other
            || tuple(self) && tuple(other)
            || matches!((self, other), (Self::Range(_), Self::Range(_)))
    }
}

/// A value.
#[derive(Clone, Debug)]
pub(super) enum Value {
    /// With what an error says of it.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    Integer(i64),
    Float(f64),
    Text(Text),
    Sequence(Kind, Rc<Items>),
    Dict(Rc<Dict>),
    Namespace(Rc<RefCell<Dict>>),
    /// A function by its name.
    Function(&'static str),
    /// A method of a value.
    Method(Rc<Value>, Arc<str>),
    Macro(Rc<Closure>),
    Loop(Rc<Loop>),
    Cycler(Rc<(Items, Cell<usize>)>),
    Joiner(Rc<(Value, Cell<bool>)>),
}

/// A macro, the scope that it was made in and what calls it with a body.
#[derive(Debug)]
pub(super) struct Closure {
    pub(super) made: Arc<Macro>,
    pub(super) scope: usize,
}

/// The variable `loop`.
#[derive(Debug)]
pub(super) struct Loop {
    pub(super) items: Rc<Items>,
    pub(super) index: Cell<usize>,
    pub(super) depth: usize,
    pub(super) last_changed: RefCell<Option<Vec<Value>>>,
    /// Of a recursive one: the statement and the scope around it.
    pub(super) again: Option<(Arc<For>, usize)>,
}

/// Values in a row, and how many lists and dicts are within each other there, this one included.
#[derive(Debug, Default)]
pub(super) struct Items {
    values: Vec<Value>,
    depth: usize,
}

impl From<Vec<Value>> for Items {
    fn from(values: Vec<Value>) -> Self {
        let depth = 1 + values.iter().map(Value::depth).max().unwrap_or(0);
        Self { values, depth }
    }
}

impl std::ops::Deref for Items {
    type Target = [Value];

    fn deref(&self) -> &[Value] {
        &self.values
    }
}

/// Keys and values in the order of insertion, and their depth as that of [`Items`].
#[derive(Clone, Debug, Default)]
pub(super) struct Dict(pub(super) Vec<(Value, Value)>, usize);

impl From<Vec<(Value, Value)>> for Dict {
    fn from(entries: Vec<(Value, Value)>) -> Self {
        let deepest = entries.iter().map(|(k, v)| k.depth().max(v.depth())).max().unwrap_or(0);
        Self(entries, 1 + deepest)
    }
}

impl Dict {
    pub(super) fn get(&self, key: &Value) -> Option<&Value> {
        self.0.iter().find(|(k, _)| k.equals(key)).map(|(_, v)| v)
    }

    pub(super) fn named(&self, key: &str) -> Option<&Value> {
        let found = |(k, _): &&(Value, Value)| matches!(k, Value::Text(t) if text::is(t, key));
        self.0.iter().find(found).map(|(_, v)| v)
    }

    pub(super) fn insert(&mut self, key: Value, value: Value) {
        self.1 = self.1.max(1 + key.depth().max(value.depth()));
        match self.0.iter_mut().find(|(k, _)| k.equals(&key)) {
            Some(entry) => entry.1 = value,
            None => self.0.push((key, value)),
        }
    }
}

impl From<&str> for Value {
    fn from(s: &str) -> Self {
        Self::Text(text::text(s))
    }
}

impl From<Vec<u32>> for Value {
    fn from(units: Vec<u32>) -> Self {
        Self::Text(units.into())
    }
}

impl From<&[u32]> for Value {
    fn from(units: &[u32]) -> Self {
        Self::Text(units.into())
    }
}

impl From<bool> for Value {
    fn from(b: bool) -> Self {
        Self::Bool(b)
    }
}

impl From<usize> for Value {
    fn from(n: usize) -> Self {
        Self::Integer(i64::try_from(n).unwrap_or(i64::MAX))
    }
}

impl Value {
    pub(super) fn undefined(what: impl Into<String>) -> Self {
        Self::Undefined(what.into().into())
    }

    pub(super) fn list(items: Vec<Value>) -> Self {
        Self::sequence(Kind::List, items)
    }

    pub(super) fn tuple(items: Vec<Value>) -> Self {
        Self::sequence(Kind::Tuple, items)
    }

    pub(super) fn generator(items: Vec<Value>) -> Self {
        Self::sequence(Kind::Generator, items)
    }

    pub(super) fn sequence(kind: Kind, items: Vec<Value>) -> Self {
        Self::Sequence(kind, Rc::new(items.into()))
    }

    pub(super) fn dict(entries: Vec<(Value, Value)>) -> Self {
        Self::Dict(Rc::new(entries.into()))
    }

    /// How many lists and dicts are within each other here. Namespaces do not count: they are
    /// emptied one by one.
    pub(super) fn depth(&self) -> usize {
        match self {
            Self::Sequence(_, items) => items.depth,
            Self::Dict(d) => d.1,
            Self::Method(value, _) => 1 + value.depth(),
            Self::Loop(l) => 1 + l.items.depth,
            Self::Cycler(c) => 1 + c.0.depth,
            Self::Joiner(j) => 1 + j.0.depth(),
            _ => 0,
        }
    }

    /// A JSON document, its texts marked with where they came from.
    pub(super) fn of_json(v: &serde_json::Value, marks: u32) -> Self {
        use serde_json::Value as J;
        match v {
            J::Null => Self::None,
            J::Bool(b) => Self::Bool(*b),
            J::Number(n) => match n.as_i64() {
                Some(i) => Self::Integer(i),
                None => Self::Float(n.as_f64().unwrap_or(f64::NAN)),
            },
            J::String(s) => text::units(s, marks).into(),
            J::Array(items) => Self::list(items.iter().map(|v| Self::of_json(v, marks)).collect()),
            J::Object(map) => {
                let entry = |(k, v): (&String, &J)| (text::units(k, marks).into(), Self::of_json(v, marks));
                Self::dict(map.iter().map(entry).collect())
            }
        }
    }

    /// The name of its type in Python.
    pub(super) fn type_name(&self) -> &'static str {
        match self {
            Self::Undefined(_) => "Undefined",
            Self::None => "NoneType",
            Self::Bool(_) => "bool",
            Self::Integer(_) => "int",
            Self::Float(_) => "float",
            Self::Text(t) if t.safe => "Markup",
            Self::Text(_) => "str",
            Self::Sequence(Kind::List, _) => "list",
            Self::Sequence(Kind::Tuple | Kind::Group, _) => "tuple",
            Self::Sequence(Kind::Generator, _) => "generator",
            Self::Sequence(Kind::View(name), _) => name,
            Self::Sequence(Kind::Range(_), _) => "range",
            Self::Dict(_) => "dict",
            Self::Namespace(_) => "namespace",
            Self::Function(_) => "function",
            Self::Method(..) => "method",
            Self::Macro(_) => "Macro",
            Self::Loop(_) => "LoopContext",
            Self::Cycler(_) => "Cycler",
            Self::Joiner(_) => "Joiner",
        }
    }

    pub(super) fn is_true(&self) -> bool {
        match self {
            Self::Undefined(_) | Self::None => false,
            Self::Bool(b) => *b,
            Self::Integer(i) => *i != 0,
            Self::Float(f) => *f != 0.0,
            Self::Text(t) => !t.is_empty(),
            Self::Sequence(Kind::Generator, _) => true,
            Self::Sequence(_, items) => !items.is_empty(),
            Self::Dict(d) => !d.0.is_empty(),
            _ => true,
        }
    }

    /// As a number, where it is one; a truth is 0 or 1.
    pub(super) fn number(&self) -> Option<f64> {
        match self {
            Self::Bool(b) => Some(f64::from(u8::from(*b))),
            Self::Integer(i) => Some(*i as f64),
            Self::Float(f) => Some(*f),
            _ => None,
        }
    }

    /// As a whole number, where it is of such a type.
    pub(super) fn integer(&self) -> Option<i64> {
        match self {
            Self::Bool(b) => Some(i64::from(*b)),
            Self::Integer(i) => Some(*i),
            _ => None,
        }
    }

    /// `==`.
    pub(super) fn equals(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Undefined(_), Self::Undefined(_)) | (Self::None, Self::None) => true,
            (Self::Text(a), Self::Text(b)) => text::same(a, b),
            (Self::Sequence(Kind::Generator, a), Self::Sequence(Kind::Generator, b)) => Rc::ptr_eq(a, b),
            (Self::Sequence(k, a), Self::Sequence(l, b)) => {
                k.same(*l) && a.len() == b.len() && a.iter().zip(b.iter()).all(|(a, b)| a.equals(b))
            }
            (Self::Dict(a), Self::Dict(b)) => {
                a.0.len() == b.0.len() && a.0.iter().all(|(k, v)| b.get(k).is_some_and(|w| v.equals(w)))
            }
            (Self::Namespace(a), Self::Namespace(b)) => Rc::ptr_eq(a, b),
            (Self::Macro(a), Self::Macro(b)) => Rc::ptr_eq(a, b),
            (Self::Loop(a), Self::Loop(b)) => Rc::ptr_eq(a, b),
            (Self::Function(a), Self::Function(b)) => a == b,
            _ => match (self.integer(), other.integer()) {
                (Some(a), Some(b)) => a == b,
                _ => matches!((self.number(), other.number()), (Some(a), Some(b)) if a == b),
            },
        }
    }

    /// `<` and its like; the error is what Python says.
    pub(super) fn compare(&self, other: &Self) -> Result<Option<Ordering>, String> {
        match (self, other) {
            (Self::Text(a), Self::Text(b)) => Ok(Some(text::compare(a, b))),
            (Self::Sequence(k @ (Kind::List | Kind::Tuple), a), Self::Sequence(l, b)) if k == l => {
                for (a, b) in a.iter().zip(b.iter()) {
                    if !a.equals(b) {
                        return a.compare(b);
                    }
                }
                Ok(Some(a.len().cmp(&b.len())))
            }
            _ => {
                if let (Some(a), Some(b)) = (self.integer(), other.integer()) {
                    return Ok(Some(a.cmp(&b)));
                }
                match (self.number(), other.number()) {
                    (Some(a), Some(b)) => Ok(a.partial_cmp(&b)),
                    _ => {
                        if let Self::Undefined(what) = self {
                            return Err(what.to_string());
                        }
                        if let Self::Undefined(what) = other {
                            return Err(what.to_string());
                        }
                        Err(format!("`{}` and `{}` have no order", self.type_name(), other.type_name()))
                    }
                }
            }
        }
    }

    /// The items that a loop over it sees.
    pub(super) fn items(&self) -> Result<Rc<Items>, String> {
        Ok(match self {
            Self::Undefined(_) => Rc::default(),
            Self::Sequence(_, items) => Rc::clone(items),
            Self::Text(t) => Rc::new(t.iter().map(|u| Self::from(&[*u][..])).collect::<Vec<_>>().into()),
            Self::Dict(d) => Rc::new(d.0.iter().map(|(k, _)| k.clone()).collect::<Vec<_>>().into()),
            Self::Loop(_)
            | Self::Namespace(_)
            | Self::None
            | Self::Bool(_)
            | Self::Integer(_)
            | Self::Float(_)
            | Self::Function(_)
            | Self::Method(..)
            | Self::Macro(_)
            | Self::Cycler(_)
            | Self::Joiner(_) => {
                return Err(format!("a value of type `{}` is not iterable", self.type_name()));
            }
        })
    }

    /// `len`.
    pub(super) fn len(&self) -> Result<usize, String> {
        match self {
            Self::Undefined(_) => Ok(0),
            Self::Text(t) => Ok(t.len()),
            Self::Sequence(kind, items) if *kind != Kind::Generator => Ok(items.len()),
            Self::Dict(d) => Ok(d.0.len()),
            Self::Loop(l) => Ok(l.items.len()),
            _ => Err(format!("a value of type `{}` has no length", self.type_name())),
        }
    }

    /// `str`.
    pub(super) fn string(&self) -> Text {
        match self {
            Self::Text(t) => t.clone().with_safety(false),
            Self::Undefined(_) => Text::default(),
            _ => self.repr().into(),
        }
    }

    /// `repr`.
    pub(super) fn repr(&self) -> Vec<u32> {
        let mut out = Vec::new();
        self.repr_into(&mut out);
        out
    }

    fn repr_into(&self, out: &mut Vec<u32>) {
        let mut push = |s: &str| out.extend(text::units(s, 0));
        match self {
            Self::Undefined(_) => push("Undefined"),
            Self::None => push("None"),
            Self::Bool(b) => push(if *b { "True" } else { "False" }),
            Self::Integer(i) => push(&i.to_string()),
            Self::Float(f) => push(&float(*f)),
            Self::Text(t) if t.safe => {
                push("Markup(");
                quoted(t, out);
                out.push(u32::from(b')'));
            }
            Self::Text(t) => quoted(t, out),
            Self::Sequence(Kind::Generator, _) => push("<generator object>"),
            Self::Sequence(Kind::Range([start, stop, step]), _) => push(&match step {
                1 => format!("range({start}, {stop})"),
                step => format!("range({start}, {stop}, {step})"),
            }),
            Self::Sequence(kind, items) => {
                let (open, close) = match kind {
                    Kind::Tuple if items.len() == 1 => ("(".to_owned(), ",)"),
                    Kind::Tuple | Kind::Group => ("(".to_owned(), ")"),
                    Kind::View(name) => (format!("{name}(["), "])"),
                    _ => ("[".to_owned(), "]"),
                };
                push(&open);
                for (i, item) in items.iter().enumerate() {
                    if i > 0 {
                        out.extend(text::units(", ", 0));
                    }
                    item.repr_into(out);
                }
                out.extend(text::units(close, 0));
            }
            Self::Dict(d) => dict_repr(d, out),
            // It may hold itself.
            Self::Namespace(_) => push("<Namespace>"),
            Self::Macro(m) => push(&format!("<Macro '{}'>", m.made.name)),
            other => push(&format!("<{}>", other.type_name())),
        }
    }
}

fn dict_repr(d: &Dict, out: &mut Vec<u32>) {
    out.extend(text::units("{", 0));
    for (i, (k, v)) in d.0.iter().enumerate() {
        if i > 0 {
            out.extend(text::units(", ", 0));
        }
        k.repr_into(out);
        out.extend(text::units(": ", 0));
        v.repr_into(out);
    }
    out.extend(text::units("}", 0));
}

/// A text as Python writes it into a program.
fn quoted(t: &[u32], out: &mut Vec<u32>) {
    let has = |c: char| t.iter().any(|&u| text::character(u) == c);
    let quote = if has('\'') && !has('"') { '"' } else { '\'' };
    out.push(quote as u32);
    for &unit in t {
        match text::character(unit) {
            '\n' => out.extend(text::units("\\n", 0)),
            '\r' => out.extend(text::units("\\r", 0)),
            '\t' => out.extend(text::units("\\t", 0)),
            c if c == '\\' || c == quote => out.extend([u32::from(b'\\'), unit]),
            c if text::is_printable(c) => out.push(unit),
            c => out.extend(text::units(
                &match c as u32 {
                    n @ ..0x100 => format!("\\x{n:02x}"),
                    n @ ..0x1_0000 => format!("\\u{n:04x}"),
                    n => format!("\\U{n:08x}"),
                },
                0,
            )),
        }
    }
    out.push(quote as u32);
}

/// The shortest decimal number that is this one, as Python writes it.
pub(super) fn float(f: f64) -> String {
    if f.is_nan() {
        return "nan".to_owned();
    }
    if f.is_infinite() {
        return if f > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    let scientific = format!("{f:e}");
    let (digits, exponent) = scientific.split_once('e').unwrap_or((&scientific, "0"));
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if (-4..16).contains(&exponent) {
        let plain = format!("{f}");
        return if plain.contains('.') { plain } else { plain + ".0" };
    }
    format!("{digits}e{}{:02}", if exponent < 0 { '-' } else { '+' }, exponent.abs())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_print_as_in_python() {
        for (f, want) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (1e16, "1e+16"),
            (1e15, "1000000000000000.0"),
            (1e-5, "1e-05"),
            (1.5e-7, "1.5e-07"),
            (1e-4, "0.0001"),
            (-0.0, "-0.0"),
            (1e300, "1e+300"),
            (123456789.125, "123456789.125"),
        ] {
            assert_eq!(float(f), want);
        }
        let v = Value::list(vec![
            Value::None,
            true.into(),
            "a'b".into(),
            "\"'\n\u{e9}\u{1F600}\u{7}".into(),
            Value::tuple(vec![1_usize.into()]),
        ]);
        assert_eq!(text::plain(&v.repr()), "[None, True, \"a'b\", '\"\\'\\n\u{e9}\u{1F600}\\x07', (1,)]");
    }
}
