//! Texts that follow rules, and calls of functions.

use std::time::Instant;

use serde_json::{Value, json};

use crate::client::{
    Answer, CHAT, COMPLETIONS, PATIENCE, Serving, ask, options, serve, serve_long, tokenizer,
};

/// A template that knows functions, in the form of Hermes.
const TEMPLATE: &str = "{% if tools %}{{ tools | tojson }} <tool_call>\n{\"name\": ...}\n</tool_call>{% endif %}\
    {% for m in messages %}{{ m.role }}: {{ m.content }}{% for call in m.tool_calls or [] %}<tool_call>\
    {{ call.function.name }} {{ call.function.arguments.a }}</tool_call>{% endfor %}\n{% endfor %}assistant:";
/// One that does not.
const PLAIN: &str = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:";

fn user(text: &str) -> Value {
    json!([{ "role": "user", "content": text }])
}

fn answered(serving: &Serving, line: &str, body: &Value) -> Value {
    let answer = ask(serving.address, line, "", body);
    assert_eq!(answer.status, 200, "{body}: {answer:?}");
    answer.json()
}

/// Whether a value is what a schema says, of the words of it that are used here.
fn fits(value: &Value, schema: &Value, root: &Value) -> bool {
    if let Some(name) = schema["$ref"].as_str() {
        return fits(value, root.pointer(name.trim_start_matches('#')).expect("a definition"), root);
    }
    let of_type = |kind: &str| match kind {
        "object" => value.is_object(),
        "array" => value.is_array(),
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "null" => value.is_null(),
        other => panic!("no type: {other}"),
    };
    let list = |word: &str| schema[word].as_array().cloned();
    let number = |word: &str| schema[word].as_f64();
    let kinds = match &schema["type"] {
        Value::String(kind) => of_type(kind),
        Value::Array(kinds) => kinds.iter().any(|kind| of_type(kind.as_str().expect("a type"))),
        _ => true,
    };
    let within = |n: f64, [least, most]: [&str; 2]| {
        number(least).is_none_or(|least| n >= least) && number(most).is_none_or(|most| n <= most)
    };
    let of_kind = match value {
        Value::String(text) => within(text.chars().count() as f64, ["minLength", "maxLength"]),
        Value::Number(n) => within(n.as_f64().expect("a number"), ["minimum", "maximum"]),
        Value::Array(items) => {
            within(items.len() as f64, ["minItems", "maxItems"])
                && items.iter().all(|item| schema.get("items").is_none_or(|s| fits(item, s, root)))
        }
        Value::Object(members) => {
            let known = |(name, member): (&String, &Value)| match schema["properties"].get(name) {
                Some(of) => fits(member, of, root),
                None => schema["additionalProperties"] != false,
            };
            let required = list("required").unwrap_or_default();
            members.iter().all(known)
                && required.iter().all(|name| members.contains_key(name.as_str().expect("a name")))
        }
        _ => true,
    };
    kinds
        && of_kind
        && schema.get("const").is_none_or(|only| value == only)
        && list("enum").is_none_or(|all| all.contains(value))
        && list("anyOf").is_none_or(|all| all.iter().any(|one| fits(value, one, root)))
}

/// The model knows nothing of JSON: what it writes is by the schema alone.
#[test]
fn answers_are_json_by_their_schema() {
    let serving = serve_long(1000, options(), tokenizer(Some(TEMPLATE)));
    let word = json!({ "type": "string", "maxLength": 8 });
    let person = json!({
        "type": "object", "additionalProperties": false, "required": ["name", "age"],
        "properties": { "name": word, "age": { "type": "integer", "minimum": 0, "maximum": 120 }, "tall": { "type": "boolean" } },
    });
    let node = json!({
        "type": "object", "required": ["kind"], "additionalProperties": false,
        "properties": { "kind": { "enum": ["leaf", "é\n\"", 3, null] } },
    });
    let schemas = [
        json!({ "type": "boolean" }),
        json!({ "type": ["integer", "null"], "minimum": -5, "maximum": 5 }),
        json!({ "enum": ["red", "green", "blue"] }),
        json!({ "const": { "a": [1, null] } }),
        word.clone(),
        json!({ "type": "string", "minLength": 3, "maxLength": 5 }),
        json!({ "type": "array", "items": word, "minItems": 1, "maxItems": 3 }),
        json!({ "type": "array", "items": { "type": "number", "minimum": 0, "maximum": 1 }, "maxItems": 2 }),
        person.clone(),
        json!({ "type": "array", "items": person, "minItems": 2, "maxItems": 2 }),
        json!({ "anyOf": [person, { "type": "null" }] }),
        json!({ "$defs": { "node": node }, "type": "object", "required": ["left", "right"], "additionalProperties": false,
            "properties": { "left": { "$ref": "#/$defs/node" }, "right": { "$ref": "#/$defs/node" } } }),
    ];
    for (i, schema) in schemas.iter().enumerate() {
        let temperature = [0.0, 1.0][i % 2];
        let format = json!({ "type": "json_schema", "json_schema": { "name": "it", "strict": true, "schema": schema } });
        let mut body = json!({
            "messages": user("Tell me."), "max_tokens": 900, "seed": i, "temperature": temperature, "response_format": format,
        });
        let answer = answered(&serving, CHAT, &body);
        let choice = &answer["choices"][0];
        let text = choice["message"]["content"].as_str().expect("a text").to_owned();
        assert_eq!(choice["finish_reason"], "stop", "{schema}: {text}");
        let value: Value = serde_json::from_str(&text).unwrap_or_else(|e| panic!("{schema}: {e}: {text}"));
        assert!(fits(&value, schema, schema), "{schema}: {text}");
        body["stream"] = true.into();
        let events = ask(serving.address, CHAT, "", &body).events();
        let streamed: String =
            events.iter().filter_map(|e| e["choices"][0]["delta"]["content"].as_str()).collect();
        assert_eq!(streamed, text);
    }
    let body =
        json!({ "messages": user("a"), "max_tokens": 60, "response_format": { "type": "json_object" } });
    let text = answered(&serving, CHAT, &body)["choices"][0]["message"]["content"].clone();
    assert!(text.as_str().expect("a text").starts_with('{'), "{text}");
}

#[test]
fn texts_follow_other_rules_too() {
    let serving = serve(options(), tokenizer(None));
    let of = |field: &str, value: Value, seed: usize| {
        let body = json!({ "prompt": "Once upon a time", "max_tokens": 60, "seed": seed, field: value });
        let choice = answered(&serving, COMPLETIONS, &body)["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "stop", "{choice}");
        choice["text"].as_str().expect("a text").to_owned()
    };
    let lark = "start: \"(\" start? \")\" | WORD\nWORD: /[a-c]{2}/";
    for seed in 0..4 {
        let text = of("guided_regex", "[0-9]{3}-(a|bc)".into(), seed);
        assert!(text.len() <= 6 && text.as_bytes()[3] == b'-', "{text}");
        let text = of("structured_outputs", json!({ "choice": ["one dog", "two \"cats\"\n"] }), seed);
        assert!(["one dog", "two \"cats\"\n"].contains(&&text[..]), "{text}");
        let text = of("guided_grammar", lark.into(), seed);
        let inner = text.trim_start_matches('(').trim_end_matches(')');
        assert_eq!(text.matches('(').count(), text.matches(')').count(), "{text}");
        assert!(inner.is_empty() || inner.len() == 2, "{text}");
    }
    // What may go on ends with the end token; several texts of a request each follow their rule.
    let body =
        json!({ "prompt": ["Once", "The dog"], "n": 2, "max_tokens": 40, "guided_regex": "[a-z ]{4,}[.]?" });
    for choice in answered(&serving, COMPLETIONS, &body)["choices"].as_array().expect("choices") {
        let text = choice["text"].as_str().expect("a text").trim_end_matches('.');
        assert!(text.len() >= 4 && text.bytes().all(|b| b == b' ' || b.is_ascii_lowercase()), "{text}");
    }
}

/// Nobody brings the server down by a rule, or makes others wait for long.
#[test]
fn hostile_rules_are_refused_or_end_their_own_text() {
    let serving = serve(options(), tokenizer(Some(PLAIN)));
    let many = |n: usize, f: &dyn Fn(usize) -> String| (0..n).map(f).collect::<String>();
    let chain = format!("start: r0\n{}r9000: \"a\"\n", many(9000, &|i| format!("r{i}: r{}\n", i + 1)));
    let nested =
        (0..120).fold(json!({ "type": "null" }), |inner, _| json!({ "type": "array", "items": inner }));
    let wide: Vec<Value> =
        (0..3000).map(|i| json!({ "type": "string", "pattern": format!("^a{{{i}}}b*$") })).collect();
    let refs = json!({ "$ref": "#/$defs/a", "$defs": { "a": { "$ref": "#/$defs/b" }, "b": { "$ref": "#/$defs/a" } } });
    let cases = [
        ("guided_grammar", "start: \"a".into()),
        ("guided_grammar", "begin: \"a\"".into()),
        ("guided_grammar", "start: nothing".into()),
        ("guided_grammar", format!("start: {}\"a\"{}", "(".repeat(9000), ")".repeat(9000)).into()),
        ("guided_grammar", chain.into()),
        ("guided_grammar", "start: start start | start \"a\" start | \"a\"".into()),
        ("guided_grammar", format!("start: \"{}\"", "a".repeat(300 << 10)).into()),
        ("guided_regex", "(a{1000}){1000}".into()),
        ("guided_regex", "(".repeat(5000).into()),
        ("guided_regex", "(a|b)*a(a|b){500}".into()),
        ("guided_regex", "(?=look)ahead".into()),
        ("guided_choice", json!([])),
        ("guided_json", json!({ "type": "strings" })),
        ("guided_json", json!({ "not": { "type": "string" } })),
        ("guided_json", json!({ "type": "string", "pattern": "(" })),
        ("guided_json", json!({ "$ref": "https://example.com/schema" })),
        ("guided_json", json!({ "allOf": [{ "type": "string" }, { "type": "null" }] })),
        ("guided_json", refs),
        ("guided_json", nested),
        ("guided_json", json!({ "anyOf": wide })),
        ("guided_json", json!({ "type": "array", "minItems": 1_000_000, "items": { "type": "null" } })),
    ];
    for (field, rule) in cases {
        let shown: String = rule.to_string().chars().take(80).collect();
        let start = Instant::now();
        let body = json!({ "prompt": "a", "max_tokens": 6, field: rule });
        let answer: Answer = ask(serving.address, COMPLETIONS, "", &body);
        assert!(start.elapsed() < PATIENCE / 6, "{field} {shown}: {:?}", start.elapsed());
        match answer.status {
            200 => {}
            400 => assert_eq!(answer.json()["error"]["param"], field, "{shown}: {answer:?}"),
            _ => assert!(answer.body.contains("constraint"), "{field} {shown}: {answer:?}"),
        }
        let plain = json!({ "prompt": "Once", "max_tokens": 2 });
        assert_eq!(ask(serving.address, COMPLETIONS, "", &plain).status, 200, "after {field} {shown}");
    }
}

fn functions() -> Value {
    json!([
        { "type": "function", "function": { "name": "weather", "description": "Of a place", "parameters": {
            "type": "object", "required": ["a"], "additionalProperties": false,
            "properties": { "a": { "$ref": "#/$defs/place" } }, "$defs": { "place": { "enum": ["Rome", "Oslo"] } } } } },
        { "type": "function", "function": { "name": "add", "parameters": {
            "type": "object", "required": ["a", "b"], "additionalProperties": false,
            "properties": { "a": { "type": "integer", "minimum": 0, "maximum": 9 }, "b": { "type": "boolean" } } } } },
    ])
}

/// The calls of a stream, put together as clients do.
fn collected(events: &[Value]) -> Vec<Value> {
    let mut calls: Vec<Value> = Vec::new();
    for piece in events.iter().filter_map(|e| e["choices"][0]["delta"]["tool_calls"].as_array()).flatten() {
        let index = piece["index"].as_u64().expect("an index") as usize;
        if index == calls.len() {
            assert_eq!(piece["function"]["arguments"], "", "the name comes first");
            let mut call = piece.clone();
            call.as_object_mut().expect("a call").remove("index");
            calls.push(call);
        } else {
            let more = piece["function"]["arguments"].as_str().expect("a piece of arguments");
            let known = calls[index]["function"]["arguments"].as_str().expect("a text").to_owned();
            calls[index]["function"]["arguments"] = (known + more).into();
        }
    }
    calls
}

#[test]
fn functions_are_called_by_their_schema() {
    for template in [TEMPLATE, PLAIN] {
        // The functions alone take some hundred of this model's tokens.
        let serving = serve_long(1500, options(), tokenizer(Some(template)));
        let format = answered(&serving, "GET /props", &Value::Null)["tool_calls"].clone();
        assert_eq!(format, if template == PLAIN { "generic" } else { "hermes" });
        let only = json!({ "type": "function", "function": { "name": "add" } });
        for (choice, parallel) in [(json!("required"), false), (json!("required"), true), (only, false)] {
            let mut body = json!({
                "messages": user("What is it?"), "tools": functions(), "tool_choice": choice, "seed": 1,
                "parallel_tool_calls": parallel, "max_tokens": 160, "temperature": 0.7,
            });
            let answer = answered(&serving, CHAT, &body)["choices"][0].clone();
            let calls = answer["message"]["tool_calls"].as_array().cloned().unwrap_or_default();
            let ended = answer["finish_reason"] == "tool_calls";
            assert!(ended || (parallel && answer["finish_reason"] == "length"), "{answer}");
            assert!(!calls.is_empty() && (parallel || calls.len() == 1), "{answer}");
            assert!(!ended || answer["message"]["content"].is_null(), "{answer}");
            for call in &calls {
                let name = call["function"]["name"].as_str().expect("a name");
                let all = functions();
                let of = |f: &&Value| f["function"]["name"] == name;
                let schema =
                    &all.as_array().unwrap().iter().find(of).expect("one of them")["function"]["parameters"];
                let text = call["function"]["arguments"].as_str().expect("arguments as a text");
                let arguments: Value = serde_json::from_str(text).expect("JSON");
                assert!(fits(&arguments, schema, schema), "{call}");
                assert!(choice == "required" || name == "add", "{call}");
                let id = call["id"].as_str().expect("a name of its own");
                assert!(id.len() == 9 && id.bytes().all(|b| b.is_ascii_alphanumeric()), "{id}");
            }
            body["stream"] = true.into();
            let events = ask(serving.address, CHAT, "", &body).events();
            let functions = |calls: &[Value]| calls.iter().map(|c| c["function"].clone()).collect::<Vec<_>>();
            if ended {
                assert_eq!(functions(&collected(&events)), functions(&calls));
            }
            assert_eq!(
                events.last().expect("an end")["choices"][0]["finish_reason"],
                answer["finish_reason"]
            );
        }
        // Left to itself this model only tells stories.
        let mut body =
            json!({ "messages": user("a"), "max_tokens": 20, "temperature": 0, "tools": functions() });
        let choice = answered(&serving, CHAT, &body)["choices"][0].clone();
        assert!(choice["message"].get("tool_calls").is_none() && choice["message"]["content"].is_string());
        // The same prompt as a template gets it, and none of it with `none`.
        let count = |body: &Value| {
            answered(&serving, CHAT, body)["usage"]["prompt_tokens"].as_u64().expect("a count")
        };
        let with = count(&body);
        body["tool_choice"] = "none".into();
        let without = count(&body);
        assert!(with > without + 100, "{with} {without}");
        body.as_object_mut().expect("a body").remove("tools");
        assert_eq!(count(&body), without);
    }
}

#[test]
fn what_came_of_calls_is_part_of_the_conversation() {
    let serving = serve(options(), tokenizer(Some(TEMPLATE)));
    let messages = |arguments: &str| {
        let call = json!({ "id": "abcdefghi", "type": "function", "function": { "name": "add", "arguments": arguments } });
        json!([
            { "role": "user", "content": "Add." },
            { "role": "assistant", "content": null, "tool_calls": [call], "refusal": null },
            { "role": "tool", "tool_call_id": "abcdefghi", "content": [{ "type": "text", "text": "3" }] },
        ])
    };
    let body = json!({ "messages": messages("{\"a\": 2}"), "max_tokens": 2, "temperature": 0 });
    let asked = answered(&serving, CHAT, &body)["usage"]["prompt_tokens"].clone();
    // Blocks take the line break behind them.
    let prompt = "user: Add.assistant: <tool_call>add 2</tool_call>tool: 3assistant:";
    let plain = json!({ "prompt": prompt, "max_tokens": 2 });
    assert_eq!(answered(&serving, COMPLETIONS, &plain)["usage"]["prompt_tokens"], asked);
    for (messages, word) in [
        (messages("[1]"), "arguments"),
        (
            json!([{ "role": "user", "content": "a", "tool_calls": [{ "function": { "name": "f", "arguments": "{}" } }] }]),
            "tool_calls",
        ),
        (json!([{ "role": "user", "content": "a", "tool_call_id": "b" }]), "tool_call_id"),
    ] {
        let answer = ask(serving.address, CHAT, "", &json!({ "messages": messages, "max_tokens": 2 }));
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (400, &json!("messages")),
            "{messages}"
        );
        assert!(answer.body.contains(word), "{answer:?}");
    }
    let both =
        json!({ "messages": user("a"), "tools": functions(), "response_format": { "type": "json_object" } });
    assert_eq!(ask(serving.address, CHAT, "", &both).json()["error"]["param"], "response_format");
    let bad = json!([{ "type": "function", "function": { "name": "f", "parameters": { "type": "object", "not": {} } } }]);
    let bad = json!({ "messages": user("a"), "tools": bad, "tool_choice": "required" });
    assert_eq!(ask(serving.address, CHAT, "", &bad).json()["error"]["param"], "tools");
}

/// Functions in the forms of other clients.
#[test]
fn functions_are_called_in_every_form() {
    let serving = serve_long(1500, options(), tokenizer(Some(TEMPLATE)));
    let schema = json!({
        "type": "object", "additionalProperties": false, "required": ["a"],
        "properties": { "a": { "type": "integer", "minimum": 0, "maximum": 99 } },
    });
    let function = json!({ "name": "add", "description": "Adds.", "parameters": schema });
    let chat = json!({
        "messages": user("What is it?"), "tools": [{ "type": "function", "function": function }],
        "tool_choice": "required", "parallel_tool_calls": false, "max_tokens": 160, "temperature": 0,
    });
    let want = answered(&serving, CHAT, &chat);
    let call = want["choices"][0]["message"]["tool_calls"][0]["function"].clone();
    let arguments = call["arguments"].as_str().expect("arguments as a text");
    let value: Value = serde_json::from_str(arguments).expect("JSON");
    assert!(fits(&value, &schema, &schema), "{call}");
    let asked = want["usage"]["prompt_tokens"].clone();

    let messages = json!({
        "messages": user("What is it?"), "max_tokens": 160, "temperature": 0,
        "tools": [{ "name": "add", "description": "Adds.", "input_schema": schema }],
        "tool_choice": { "type": "any", "disable_parallel_tool_use": true },
    });
    const MESSAGES: &str = "POST /v1/messages";
    let answer = answered(&serving, MESSAGES, &messages);
    let block = &answer["content"][0];
    assert_eq!((&answer["stop_reason"], &block["type"]), (&json!("tool_use"), &json!("tool_use")));
    assert_eq!((&block["name"], &block["input"]), (&call["name"], &value));
    let count = |usage: &Value| {
        let part = |name: &str| usage[name].as_u64().expect("a count");
        part("input_tokens") + part("cache_read_input_tokens")
    };
    assert_eq!(json!(count(&answer["usage"])), asked, "the same prompt");
    let mut stream = messages.clone();
    stream["stream"] = true.into();
    let events = said_in(&ask(serving.address, MESSAGES, "", &stream));
    let kinds: Vec<&str> = events.iter().map(|e| e["type"].as_str().expect("a type")).collect();
    assert_eq!(kinds[..2], ["message_start", "content_block_start"]);
    assert_eq!(events[0]["message"]["usage"]["input_tokens"], asked);
    assert_eq!(kinds[kinds.len() - 3..], ["content_block_stop", "message_delta", "message_stop"]);
    let pieces = events.iter().filter_map(|e| e["delta"]["partial_json"].as_str());
    assert_eq!(pieces.collect::<String>(), arguments);
    // What came of it, with a text behind; the template has the call as it was.
    let history = json!([
        { "role": "user", "content": "Add." },
        { "role": "assistant", "content": [{ "type": "tool_use", "id": "toolu_abcdefghi", "name": "add", "input": { "a": 2 } }] },
        { "role": "user", "content": [
            { "type": "tool_result", "tool_use_id": "toolu_abcdefghi", "content": "3", "is_error": true },
            { "type": "text", "text": "So?" },
        ] },
    ]);
    let prompt = "user: Add.assistant: <tool_call>add 2</tool_call>tool: Error: 3user: So?assistant:";
    let plain = json!({ "prompt": prompt, "max_tokens": 2 });
    let want = answered(&serving, COMPLETIONS, &plain)["usage"]["prompt_tokens"].clone();
    let body = json!({ "messages": history, "max_tokens": 2 });
    assert_eq!(json!(count(&answered(&serving, MESSAGES, &body)["usage"])), want);

    let responses = json!({
        "input": "What is it?", "max_output_tokens": 160, "temperature": 0, "parallel_tool_calls": false,
        "tools": [{ "type": "function", "name": "add", "description": "Adds.", "parameters": schema, "strict": true }],
        "tool_choice": { "type": "function", "name": "add" },
    });
    const RESPONSES: &str = "POST /v1/responses";
    let answer = answered(&serving, RESPONSES, &responses);
    let item = &answer["output"][0];
    assert_eq!((&answer["status"], &item["type"]), (&json!("completed"), &json!("function_call")));
    assert_eq!((&item["name"], &item["arguments"]), (&call["name"], &call["arguments"]));
    assert_eq!(answer["usage"]["input_tokens"], asked);
    let mut stream = responses.clone();
    stream["stream"] = true.into();
    let events = said_in(&ask(serving.address, RESPONSES, "", &stream));
    let of = |kind: &str| events.iter().filter(|e| e["type"] == kind).cloned().collect::<Vec<_>>();
    let pieces = of("response.function_call_arguments.delta");
    assert_eq!(pieces.iter().filter_map(|e| e["delta"].as_str()).collect::<String>(), arguments);
    assert_eq!(of("response.output_item.done")[0]["item"]["arguments"], call["arguments"]);
    let last = events.last().expect("an end");
    assert_eq!(last["type"], "response.completed");
    assert_eq!(last["response"]["output"][0]["name"], call["name"]);
    let input = json!([
        { "role": "user", "content": "Add." },
        { "type": "function_call", "id": "fc_1", "call_id": "call_abcdefghi", "name": "add", "arguments": "{\"a\": 2}" },
        { "type": "function_call_output", "call_id": "call_abcdefghi", "output": "3" },
    ]);
    let prompt = "user: Add.assistant: <tool_call>add 2</tool_call>tool: 3assistant:";
    let plain = json!({ "prompt": prompt, "max_tokens": 2 });
    let want = answered(&serving, COMPLETIONS, &plain)["usage"]["prompt_tokens"].clone();
    let body = json!({ "input": input, "max_output_tokens": 2 });
    assert_eq!(answered(&serving, RESPONSES, &body)["usage"]["input_tokens"], want);
    let format = json!({ "format": { "type": "json_schema", "name": "it", "schema": schema } });
    let body = json!({ "input": "a", "text": format, "max_output_tokens": 100 });
    let text = answered(&serving, RESPONSES, &body)["output"][0]["content"][0]["text"].clone();
    let value: Value = serde_json::from_str(text.as_str().expect("a text")).expect("JSON");
    assert!(fits(&value, &schema, &schema), "{value}");
}

/// The data of all events of a stream.
fn said_in(answer: &Answer) -> Vec<Value> {
    let read = |line: &str| serde_json::from_str(line).expect("JSON");
    answer.body.lines().filter_map(|line| line.strip_prefix("data: ")).map(read).collect()
}
