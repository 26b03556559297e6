//! Metadata of a GGUF file by key, with the rule in the error where a value is not as it should be.

use std::collections::BTreeMap;
use std::path::Path;

use super::container::{Entry, Kind, List, Reader, Value};
use crate::config::clip;
use crate::error::Error;

/// The metadata of one file.
#[derive(Clone, Copy)]
pub(super) struct Metadata<'a> {
    pub(super) path: &'a Path,
    pub(super) entries: &'a BTreeMap<String, Entry>,
    pub(super) bytes: &'a [u8],
}

impl<'a> Metadata<'a> {
    pub(super) fn bad(self, key: &str, rule: impl Into<String>) -> Error {
        Error::Config { path: self.path.to_owned(), field: key.to_owned(), rule: rule.into() }
    }

    pub(super) fn missing(self, key: &str, what: &str) -> Error {
        self.bad(key, format!("should be {what}, is missing"))
    }

    pub(super) fn has(self, key: &str) -> bool {
        self.entries.contains_key(key)
    }

    fn get(self, key: &str) -> Option<&'a Value> {
        self.entries.get(key).map(|entry| &entry.value)
    }

    pub(super) fn is_list(self, key: &str) -> bool {
        matches!(self.get(key), Some(Value::List(_)))
    }

    /// A whole number from 0 on, of whatever width.
    pub(super) fn unsigned(self, key: &str) -> Result<Option<u64>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Unsigned(n)) => Ok(Some(*n)),
            Some(Value::Signed(n)) if *n >= 0 => Ok(Some(n.unsigned_abs())),
            Some(v) => {
                Err(self.bad(key, format!("should be a whole number from 0 on, got {}", self.shown(v))))
            }
        }
    }

    /// A finite number. Of single precision the decimal number that it was written as is meant, not
    /// its nearest neighbour: 1e-5 is 0.00001.
    pub(super) fn number(self, key: &str) -> Result<Option<f64>, Error> {
        let number = match self.get(key) {
            None => return Ok(None),
            Some(Value::Single(n)) => decimal(*n),
            Some(Value::Double(n)) => *n,
            Some(Value::Unsigned(n)) => *n as f64,
            Some(Value::Signed(n)) => *n as f64,
            Some(_) => f64::NAN,
        };
        if number.is_finite() {
            return Ok(Some(number));
        }
        let got = self.get(key).map_or_else(String::new, |v| self.shown(v));
        Err(self.bad(key, format!("should be a finite number, got {got}")))
    }

    pub(super) fn flag(self, key: &str) -> Result<Option<bool>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(v) => Err(self.bad(key, format!("should be a bool, got {}", self.shown(v)))),
        }
    }

    pub(super) fn text(self, key: &str) -> Result<Option<&'a str>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::Text(at)) => std::str::from_utf8(&self.bytes[at.clone()])
                .map(Some)
                .map_err(|e| self.bad(key, format!("should be UTF-8, byte {} is not", e.valid_up_to()))),
            Some(v) => Err(self.bad(key, format!("should be a string, got {}", self.shown(v)))),
        }
    }

    fn list(self, key: &str, what: &str) -> Result<Option<&'a List>, Error> {
        match self.get(key) {
            None => Ok(None),
            Some(Value::List(list)) => Ok(Some(list)),
            Some(v) => Err(self.bad(key, format!("should be an array of {what}, got {}", self.shown(v)))),
        }
    }

    /// An array of strings.
    pub(super) fn texts(self, key: &str) -> Result<Option<Vec<&'a str>>, Error> {
        let Some(list) = self.list(key, "strings")? else { return Ok(None) };
        if list.kind != Kind::Text && list.len > 0 {
            return Err(self.bad(key, format!("should be an array of strings, got one of {:?}", list.kind)));
        }
        let mut reader = Reader { file: self.bytes, at: list.at.start };
        let one = |i: usize| {
            let at = reader.text().map_err(|source| Error::Gguf { path: self.path.to_owned(), source })?;
            let text = std::str::from_utf8(&self.bytes[at]);
            text.map_err(|_| self.bad(key, format!("string {i} should be UTF-8")))
        };
        (0..list.len).map(one).collect::<Result<_, _>>().map(Some)
    }

    /// An array of numbers or bools (as 0 and 1).
    pub(super) fn numbers(self, key: &str) -> Result<Option<Vec<f64>>, Error> {
        let Some(list) = self.list(key, "numbers")? else { return Ok(None) };
        let b = &self.bytes[list.at.clone()];
        let numbers = match list.kind {
            _ if list.len == 0 => Vec::new(),
            Kind::U8 | Kind::Bool => b.iter().map(|&n| f64::from(n)).collect(),
            Kind::I8 => b.iter().map(|&n| f64::from(n as i8)).collect(),
            Kind::U16 => b.as_chunks().0.iter().map(|&n| f64::from(u16::from_le_bytes(n))).collect(),
            Kind::I16 => b.as_chunks().0.iter().map(|&n| f64::from(i16::from_le_bytes(n))).collect(),
            Kind::U32 => b.as_chunks().0.iter().map(|&n| f64::from(u32::from_le_bytes(n))).collect(),
            Kind::I32 => b.as_chunks().0.iter().map(|&n| f64::from(i32::from_le_bytes(n))).collect(),
            Kind::F32 => b.as_chunks().0.iter().map(|&n| decimal(f32::from_le_bytes(n))).collect(),
            Kind::U64 => b.as_chunks().0.iter().map(|&n| u64::from_le_bytes(n) as f64).collect(),
            Kind::I64 => b.as_chunks().0.iter().map(|&n| i64::from_le_bytes(n) as f64).collect(),
            Kind::F64 => b.as_chunks().0.iter().map(|&n| f64::from_le_bytes(n)).collect(),
            Kind::Text | Kind::List => {
                return Err(
                    self.bad(key, format!("should be an array of numbers, got one of {:?}", list.kind))
                );
            }
        };
        Ok(Some(numbers))
    }

    /// A whole number that may be given for each layer: the one that all have, which they should
    /// agree on.
    pub(super) fn of_all_layers(self, key: &str) -> Result<Option<u64>, Error> {
        if !self.is_list(key) {
            return self.unsigned(key);
        }
        let numbers = self.numbers(key)?.unwrap_or_default();
        let Some(&first) = numbers.first() else { return Err(self.bad(key, "should not be empty")) };
        if numbers.iter().any(|&n| n != first) || first < 0.0 || first.fract() != 0.0 {
            return Err(self.bad(key, "should be the same whole number for all layers"));
        }
        Ok(Some(first as u64))
    }

    fn shown(self, value: &Value) -> String {
        match value {
            Value::Unsigned(n) => n.to_string(),
            Value::Signed(n) => n.to_string(),
            Value::Single(n) => n.to_string(),
            Value::Double(n) => n.to_string(),
            Value::Bool(b) => b.to_string(),
            Value::Text(at) => format!("`{}`", clip(&String::from_utf8_lossy(&self.bytes[at.clone()]))),
            Value::List(list) => format!("an array of {} ({:?})", list.len, list.kind),
        }
    }
}

/// The shortest decimal number that is `n` in single precision.
fn decimal(n: f32) -> f64 {
    n.to_string().parse().unwrap_or(f64::NAN)
}
