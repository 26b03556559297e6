//! Bodies of requests, field by field: a field that nobody looks at is refused, and so is one that
//! stands there twice.

use std::cell::Cell;

use serde::Serialize;
use serde::de::{DeserializeOwned, DeserializeSeed, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value, json};

/// Most characters of a value that a message repeats.
const SHOWN: usize = 60;
/// Most lists and objects of a body: each takes a hundred times its two bytes.
const NESTED: usize = 1 << 16;
/// Fields that change nothing of a text.
const OF_NO_CONSEQUENCE: [&str; 7] = [
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
    "prompt_cache_retention",
];

/// A request that cannot be served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    pub(crate) message: String,
    pub(crate) field: Option<String>,
    pub(crate) code: Option<&'static str>,
}

impl Refusal {
    pub(crate) fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), field: None, code: None }
    }

    /// A field that is wrong.
    pub(crate) fn field(field: &str, rule: impl std::fmt::Display) -> Self {
        Self { field: Some(field.to_owned()), ..Self::new(400, format!("`{field}` {rule}")) }
    }

    /// The server ends before the text does.
    pub(crate) fn ending() -> Self {
        Self::new(503, "the server is ending")
    }

    pub(crate) fn coded(mut self, code: &'static str) -> Self {
        self.code = Some(code);
        self
    }

    /// The body.
    pub(crate) fn json(&self) -> Value {
        let kind = match self.status {
            401 => "authentication_error",
            500.. => "server_error",
            _ => "invalid_request_error",
        };
        json!({ "error": { "message": self.message, "type": kind, "param": self.field, "code": self.code } })
    }
}

/// A value, short enough for a message.
pub(crate) fn shown(value: impl Serialize) -> String {
    let text = serde_json::to_string(&value).unwrap_or_default();
    match text.char_indices().nth(SHOWN) {
        Some((cut, _)) => format!("{}...", &text[..cut]),
        None => text,
    }
}

/// Any JSON, and the first name that stands twice in an object of it.
#[derive(Default)]
struct Once {
    value: Value,
    twice: Option<String>,
}

impl Once {
    fn of(value: impl Into<Value>) -> Self {
        Self { value: value.into(), twice: None }
    }
}

/// Reads values of which so many may still be lists and objects.
#[derive(Clone, Copy)]
struct Any<'a>(&'a Cell<usize>);

impl Any<'_> {
    /// One more of them.
    fn nested<E: serde::de::Error>(self) -> Result<(), E> {
        let left = self.0.get().checked_sub(1).ok_or_else(|| E::custom(too_nested()))?;
        self.0.set(left);
        Ok(())
    }
}

fn too_nested() -> String {
    format!("the body should have at most {NESTED} lists and objects")
}

impl<'de> DeserializeSeed<'de> for Any<'_> {
    type Value = Once;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Once, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Any<'_> {
    type Value = Once;
    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }
    fn visit_unit<E>(self) -> Result<Once, E> {
        Ok(Once::default())
    }
    fn visit_bool<E>(self, value: bool) -> Result<Once, E> {
        Ok(Once::of(value))
    }
    fn visit_u64<E>(self, value: u64) -> Result<Once, E> {
        Ok(Once::of(value))
    }
    fn visit_i64<E>(self, value: i64) -> Result<Once, E> {
        Ok(Once::of(value))
    }
    fn visit_f64<E>(self, value: f64) -> Result<Once, E> {
        Ok(Once::of(value))
    }
    fn visit_str<E>(self, value: &str) -> Result<Once, E> {
        Ok(Once::of(value))
    }
    fn visit_string<E>(self, value: String) -> Result<Once, E> {
        Ok(Once::of(value))
    }
    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Once, A::Error> {
        self.nested()?;
        let (mut all, mut twice) = (Vec::new(), None);
        while let Some(item) = items.next_element_seed(self)? {
            all.push(item.value);
            twice = twice.or(item.twice);
        }
        Ok(Once { value: Value::Array(all), twice })
    }
    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Once, A::Error> {
        self.nested()?;
        let (mut all, mut twice) = (Map::new(), None);
        while let Some(name) = members.next_key::<String>()? {
            let member = members.next_value_seed(self)?;
            twice = twice.or(member.twice);
            if all.contains_key(&name) {
                twice = twice.or_else(|| Some(name.clone()));
            }
            all.insert(name, member.value);
        }
        Ok(Once { value: Value::Object(all), twice })
    }
}

/// Reads the members of an object, in their order.
struct Members<'a>(Any<'a>);

impl<'de> DeserializeSeed<'de> for Members<'_> {
    type Value = Vec<(String, Once)>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Self::Value, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Members<'_> {
    type Value = Vec<(String, Once)>;
    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("an object")
    }
    fn visit_map<A: MapAccess<'de>>(self, mut members: A) -> Result<Self::Value, A::Error> {
        let mut all = Vec::new();
        while let Some(name) = members.next_key()? {
            all.push((name, members.next_value_seed(self.0)?));
        }
        Ok(all)
    }
}

/// The fields of a request that nobody has looked at yet.
pub(crate) struct Fields(Map<String, Value>);

impl Fields {
    pub(crate) fn parse(body: &[u8]) -> Result<Self, Refusal> {
        let left = Cell::new(NESTED);
        let mut reader = serde_json::Deserializer::from_slice(body);
        let members = Members(Any(&left)).deserialize(&mut reader);
        let members = members.and_then(|members| reader.end().map(|()| members)).map_err(|e| {
            let json = || format!("the body should be a JSON object: {e}");
            Refusal::new(400, if e.is_data() && left.get() == 0 { too_nested() } else { json() })
        })?;
        let mut fields = Map::new();
        for (field, Once { value, twice }) in members {
            if let Some(name) = twice {
                return Err(Refusal::field(&field, format_args!("should have `{}` once", clip(&name))));
            }
            if fields.contains_key(&field) {
                return Err(Refusal::field(&clip(&field), "should be there once"));
            }
            fields.insert(field, value);
        }
        Ok(Self(fields))
    }

    /// Those of these fields that are there, as they came.
    pub(crate) fn copies(&self, fields: &[&str]) -> Map<String, Value> {
        let there =
            |&field: &&str| Some((field.to_owned(), self.0.get(field).filter(|v| !v.is_null())?.clone()));
        fields.iter().filter_map(there).collect()
    }

    /// A field as it is; null is absent.
    pub(crate) fn value(&mut self, field: &str) -> Option<Value> {
        self.0.shift_remove(field).filter(|value| !value.is_null())
    }

    /// A field, which should be what `want` says.
    pub(crate) fn take<T: DeserializeOwned>(
        &mut self,
        field: &str,
        want: &str,
    ) -> Result<Option<T>, Refusal> {
        self.within(field, want, |_| true)
    }

    /// The same of a value with a rule of its own.
    pub(crate) fn within<T: DeserializeOwned>(
        &mut self,
        field: &str,
        want: &str,
        fits: impl Fn(&T) -> bool,
    ) -> Result<Option<T>, Refusal> {
        let Some(value) = self.value(field) else { return Ok(None) };
        match T::deserialize(&value).ok().filter(fits) {
            Some(value) => Ok(Some(value)),
            None => Err(Refusal::field(field, format_args!("should be {want}, got {}", shown(value)))),
        }
    }

    /// A field that is served with the values of `fine` only.
    pub(crate) fn only(&mut self, field: &str, fine: impl Fn(&Value) -> bool) -> Result<(), Refusal> {
        match self.value(field) {
            Some(value) if !fine(&value) => {
                Err(Refusal::field(field, "is not served by this server: leave it out"))
            }
            _ => Ok(()),
        }
    }

    /// Nothing should be left.
    pub(crate) fn end(mut self) -> Result<(), Refusal> {
        self.0.retain(|field, value| !value.is_null() && !OF_NO_CONSEQUENCE.contains(&field.as_str()));
        match self.0.keys().next() {
            Some(field) => {
                Err(Refusal::field(&clip(field), "is not a field that this server knows: leave it out"))
            }
            None => Ok(()),
        }
    }
}

/// A number as it is written, without the digits that one of 32 bits gets as one of 64.
pub(crate) fn number(x: f32) -> Value {
    x.to_string().parse::<f64>().unwrap_or(x.into()).into()
}

/// A name, short enough for a message.
fn clip(name: &str) -> String {
    name.chars().take(SHOWN).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_stand_once_wherever_they_stand() {
        for (body, field, name) in [
            (r#"{"a": 1, "b": 2, "a": null}"#, "a", "there once"),
            (r#"{"a": 1, "b": [{"c": 1, "d": {"e": 1, "e": 2}}]}"#, "b", "`e` once"),
            (r#"{"a": {"x": 1, "x": 1}, "a": 2}"#, "a", "`x` once"),
        ] {
            let refusal = Fields::parse(body.as_bytes()).err().expect(body);
            assert_eq!((refusal.status, refusal.field.as_deref()), (400, Some(field)), "{body}");
            assert!(refusal.message.contains(name), "{}", refusal.message);
        }
        let body = r#"{"b": [1, -2, 3.5, "x", true, null, {"y": {}}], "a": {"b": {"b": 1}}}"#;
        let Ok(Fields(fields)) = Fields::parse(body.as_bytes()) else { panic!("good JSON") };
        assert_eq!(Value::Object(fields).to_string(), body.replace(": ", ":").replace(", ", ","));
    }

    #[test]
    fn lists_and_objects_are_counted_wherever_they_are() {
        let body = |one: &str, times: usize| format!(r#"{{"a": [{}null]}}"#, one.repeat(times));
        for (one, each) in [("[],", 1), ("{},", 1), (r#"{"b": [1]},"#, 2)] {
            let most = (NESTED - 1) / each;
            assert!(Fields::parse(body(one, most).as_bytes()).is_ok(), "{one}");
            let refusal = Fields::parse(body(one, most + 1).as_bytes()).err().expect(one);
            assert_eq!((refusal.status, refusal.message), (400, too_nested()), "{one}");
        }
        // Tokens and texts are none.
        assert!(Fields::parse(body("1,", 4 * NESTED).as_bytes()).is_ok());
    }

    #[test]
    fn messages_say_what_should_be_and_what_is() {
        let mut fields = Fields::parse(format!(r#"{{"a": "{}", "n": null}}"#, "é".repeat(99)).as_bytes())
            .expect("good JSON");
        let refusal = fields.take::<u32>("a", "a number").expect_err("a text");
        let want = format!("`a` should be a number, got \"{}...", "é".repeat(SHOWN - 1));
        assert_eq!(refusal.message, want);
        assert_eq!(fields.take::<u32>("n", "a number"), Ok(None));
        assert!(fields.end().is_ok());
        let deep = format!(r#"{{"a": {}1{}}}"#, "[".repeat(500), "]".repeat(500));
        assert_eq!(Fields::parse(deep.as_bytes()).err().map(|r| r.status), Some(400));
    }
}
