//! What a text should be, by the names that OpenAI's API, vLLM and llama.cpp have for it.

use fracbit_grammar::Rule;
use serde::Deserialize;
use serde_json::{Value, json};

use crate::fields::{Fields, Refusal};

/// A rule for the text, and the field that it stands in.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Structure {
    pub(crate) field: &'static str,
    pub(crate) rule: Rule,
}

/// `response_format`.
#[derive(Deserialize)]
#[serde(tag = "type", rename_all = "snake_case")]
enum Format {
    Text {},
    JsonObject { schema: Option<Value> },
    JsonSchema { json_schema: Named },
}

/// A schema with a name, which changes nothing; a schema is always followed to the letter.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Named {
    #[serde(rename = "name")]
    _name: Option<String>,
    #[serde(rename = "description")]
    _description: Option<String>,
    #[serde(rename = "strict")]
    _strict: Option<bool>,
    schema: Option<Value>,
}

/// `structured_outputs` of vLLM.
#[derive(Default, Deserialize)]
#[serde(deny_unknown_fields)]
struct Outputs {
    json: Option<Value>,
    json_object: Option<bool>,
    regex: Option<String>,
    choice: Option<Vec<String>>,
    grammar: Option<String>,
}

/// Reads what a text should be; at most one field may say it.
pub(crate) fn structure(fields: &mut Fields) -> Result<Option<Structure>, Refusal> {
    let mut found: Vec<Structure> = Vec::new();
    let mut add = |field, rule| found.push(Structure { field, rule });
    let any = || json!({ "type": "object" });
    let field = "response_format";
    let want = "`{\"type\": \"text\"}`, `{\"type\": \"json_object\"}` or `{\"type\": \"json_schema\", \"json_schema\": {\"name\": ..., \"schema\": {...}}}`";
    match fields.take::<Format>(field, want)? {
        None | Some(Format::Text {}) => {}
        Some(Format::JsonObject { schema }) => add(field, json_rule(field, schema.unwrap_or_else(any))?),
        Some(Format::JsonSchema { json_schema }) => {
            let schema = json_schema.schema.ok_or_else(|| Refusal::field(field, "should have a `schema`"))?;
            add(field, json_rule(field, schema)?);
        }
    }
    for field in ["guided_json", "json_schema"] {
        if let Some(schema) = fields.value(field) {
            add(field, json_rule(field, schema)?);
        }
    }
    if let Some(regex) = fields.take("guided_regex", "a regular expression")? {
        add("guided_regex", Rule::Regex(regex));
    }
    if let Some(texts) = fields.take("guided_choice", "a list of texts")? {
        add("guided_choice", Rule::Choice(texts));
    }
    if let Some(grammar) = fields.take("guided_grammar", "a grammar in the notation of Lark or GBNF")? {
        add("guided_grammar", grammar_rule(grammar));
    }
    // The name of llama.cpp, whose notation it is.
    if let Some(grammar) = fields.take("grammar", "a grammar in GBNF")? {
        add("grammar", Rule::Gbnf(grammar));
    }
    let field = "structured_outputs";
    let want = "an object with one of `json`, `json_object`, `regex`, `choice` and `grammar`";
    if let Some(outputs) = fields.take::<Outputs>(field, want)? {
        let Outputs { json, json_object, regex, choice, grammar } = outputs;
        let rules = [
            json.map(|schema| json_rule(field, schema)).transpose()?,
            json_object.filter(|wanted| *wanted).map(|_| Rule::Json(any())),
            regex.map(Rule::Regex),
            choice.map(Rule::Choice),
            grammar.map(grammar_rule),
        ];
        let mut rules = rules.into_iter().flatten();
        let (Some(rule), None) = (rules.next(), rules.next()) else {
            return Err(Refusal::field(field, format_args!("should be {want}")));
        };
        add(field, rule);
    }
    match &found[..] {
        [first, second, ..] => {
            let rule =
                format!("should not be there beside `{}`, which also says what the text is", first.field);
            Err(Refusal::field(second.field, rule))
        }
        _ => Ok(found.pop()),
    }
}

/// A schema, as it is or as a text.
fn json_rule(field: &str, schema: Value) -> Result<Rule, Refusal> {
    let schema = match schema {
        Value::String(text) => serde_json::from_str(&text).unwrap_or(Value::String(text)),
        schema => schema,
    };
    if !(schema.is_object() || schema.is_boolean()) {
        return Err(Refusal::field(field, "should have a JSON schema, which is an object"));
    }
    Ok(Rule::Json(schema))
}

/// A grammar in the notation of Lark, or with `::=` in that of llama.cpp.
fn grammar_rule(grammar: String) -> Rule {
    if grammar.contains("::=") { Rule::Gbnf(grammar) } else { Rule::Lark(grammar) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: Value) -> Result<Option<Structure>, Refusal> {
        let mut fields = Fields::parse(body.to_string().as_bytes()).expect("an object");
        let found = structure(&mut fields)?;
        fields.end()?;
        Ok(found)
    }

    #[test]
    fn rules_have_many_names() {
        let schema = json!({ "type": "integer" });
        let (number, object) = (Rule::Json(schema.clone()), Rule::Json(json!({ "type": "object" })));
        let named = json!({ "name": "n", "strict": true, "schema": schema, "description": "d" });
        let regex = |text: &str| Rule::Regex(text.to_owned());
        let choice = Rule::Choice(vec!["a".to_owned(), "b".to_owned()]);
        let lark = Rule::Lark("start: \"a\"".to_owned());
        let gbnf = Rule::Gbnf("root ::= \"a\"".to_owned());
        for (field, value, want) in [
            ("response_format", json!({ "type": "json_schema", "json_schema": named }), &number),
            ("response_format", json!({ "type": "json_object" }), &object),
            ("response_format", json!({ "type": "json_object", "schema": schema }), &number),
            ("guided_json", schema.clone(), &number),
            ("guided_json", schema.to_string().into(), &number),
            ("json_schema", schema.clone(), &number),
            ("guided_regex", "[ab]+".into(), &regex("[ab]+")),
            ("guided_choice", json!(["a", "b"]), &choice),
            ("guided_grammar", "start: \"a\"".into(), &lark),
            ("guided_grammar", "root ::= \"a\"".into(), &gbnf),
            ("grammar", "root ::= \"a\"".into(), &gbnf),
            ("structured_outputs", json!({ "grammar": "root ::= \"a\"" }), &gbnf),
            ("structured_outputs", json!({ "json": schema }), &number),
            ("structured_outputs", json!({ "json_object": true }), &object),
            ("structured_outputs", json!({ "regex": "a", "json": null }), &regex("a")),
            ("structured_outputs", json!({ "choice": ["a", "b"] }), &choice),
            ("structured_outputs", json!({ "grammar": "start: \"a\"" }), &lark),
        ] {
            let found = read(json!({ field: value })).expect(field).expect("a rule");
            assert_eq!((found.field, &found.rule), (field, want));
        }
        assert_eq!(read(json!({ "response_format": { "type": "text" }, "guided_json": null })), Ok(None));
    }

    #[test]
    fn what_is_no_rule_is_refused_by_name() {
        let schema = json!({ "type": "integer" });
        for (body, field) in [
            (json!({ "response_format": { "type": "xml" } }), "response_format"),
            (
                json!({ "response_format": { "type": "json_schema", "json_schema": { "name": "n" } } }),
                "response_format",
            ),
            (
                json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": 1 } } }),
                "response_format",
            ),
            (
                json!({ "response_format": { "type": "json_schema", "json_schema": { "schema": {}, "x": 1 } } }),
                "response_format",
            ),
            (json!({ "guided_json": "{" }), "guided_json"),
            (json!({ "guided_choice": "a" }), "guided_choice"),
            (json!({ "guided_grammar": 1 }), "guided_grammar"),
            (json!({ "guided_decoding_backend": "xgrammar" }), "guided_decoding_backend"),
            (json!({ "grammar": ["root"] }), "grammar"),
            (json!({ "structured_outputs": {} }), "structured_outputs"),
            (json!({ "structured_outputs": { "regex": "a", "choice": ["a"] } }), "structured_outputs"),
            (json!({ "structured_outputs": { "structural_tag": "a" } }), "structured_outputs"),
            (json!({ "response_format": { "type": "json_object" }, "guided_json": schema }), "guided_json"),
        ] {
            let refusal = read(body.clone()).expect_err("a refusal");
            assert_eq!((refusal.status, refusal.field.as_deref()), (400, Some(field)), "{body}");
        }
    }
}
