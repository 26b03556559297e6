use std::collections::BTreeMap;

use fracbit_io::Message;

use super::*;

/// Text and calls, as a client sees them of an answer in one piece.
#[derive(Debug, Default, PartialEq)]
struct Read {
    text: String,
    calls: Vec<(String, String)>,
}

/// The pieces read in one go, and what a stream says of them.
fn read(format: Format, pieces: &[&str]) -> (Read, Read) {
    let mut calls = Calls::new(format, vec!["add".to_owned(), "time.now".to_owned()]);
    let mut said: Vec<Said> = pieces.iter().flat_map(|piece| calls.push(piece)).collect();
    said.extend(calls.finish());
    let (mut whole, mut streamed) = (Read::default(), Read::default());
    for said in said {
        match said {
            Said::Text(text) => [&mut whole, &mut streamed].into_iter().for_each(|read| read.text += &text),
            Said::Call(name) => {
                let call = (name, String::new());
                [&mut whole, &mut streamed].into_iter().for_each(|read| read.calls.push(call.clone()));
            }
            Said::Arguments(piece) => [&mut whole, &mut streamed]
                .into_iter()
                .for_each(|read| read.calls.last_mut().expect("a call").1 += &piece),
            Said::Broken { all, rest } => {
                whole.calls.pop();
                whole.text += &all;
                streamed.text += &rest;
            }
        }
    }
    assert_eq!(calls.count(), whole.calls.len());
    (whole, streamed)
}

/// What is read does not depend on where pieces are cut.
fn check(format: Format, text: &str, want: &Read) {
    let (whole, _) = read(format, &[text]);
    assert_eq!(&whole, want, "{format:?}: {text}");
    let cuts: Vec<usize> = text.char_indices().map(|(at, _)| at).collect();
    for &at in &cuts {
        let (cut, _) = read(format, &[&text[..at], &text[at..]]);
        assert_eq!(&cut, want, "{format:?}, cut at {at}: {text}");
    }
    let ends = cuts.iter().skip(1).copied().chain([text.len()]);
    let letters: Vec<&str> = cuts.iter().zip(ends).map(|(&from, to)| &text[from..to]).collect();
    let (one_by_one, streamed) = read(format, &letters);
    assert_eq!(&one_by_one, want, "{format:?}, letter by letter: {text}");
    // Nothing is lost in a stream either, whatever is thought of it.
    if want.calls.is_empty() && streamed.calls.is_empty() {
        assert_eq!(streamed.text, want.text);
    }
}

#[test]
fn calls_are_found_wherever_pieces_are_cut() {
    use Format::{Generic, Hermes, Llama, Mistral, MistralArgs};
    /// What is written, and the text and calls that it is.
    type Case = (Format, &'static str, &'static str, &'static [(&'static str, &'static str)]);
    let cases: &[Case] = &[
        // Calls as templates write them, and one whose end was cut off.
        (Generic, "<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool", "", &[("add", "{}")]),
        (
            Hermes,
            "<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1, \"b\": [2, {}]}}\n</tool_call>",
            "",
            &[("add", "{\"a\": 1, \"b\": [2, {}]}")],
        ),
        (
            Hermes,
            "Let me see.\n\n<tool_call>\n{\"name\": \"add\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"time.now\", \"arguments\": {\"z\": \"é}\\\"{\"}}\n</tool_call>",
            "Let me see.",
            &[("add", "{}"), ("time.now", "{\"z\": \"é}\\\"{\"}")],
        ),
        (Generic, "<tool_call>{\"name\":\"add\",\"arguments\":{}}</tool_call> So.", " So.", &[("add", "{}")]),
        (Llama, "{\"name\": \"add\", \"parameters\": {\"a\": \"1\"}}", "", &[("add", "{\"a\": \"1\"}")]),
        (
            Llama,
            "<|python_tag|>{\"name\": \"add\", \"parameters\": {}}; {\"name\": \"add\", \"parameters\": {\"a\": 2}}",
            "",
            &[("add", "{}"), ("add", "{\"a\": 2}")],
        ),
        (
            Mistral,
            "[TOOL_CALLS] [{\"name\": \"add\", \"arguments\": {\"a\": 1}}, {\"name\": \"time.now\", \"arguments\": {}, \"id\": \"abcdefghi\"}]",
            "",
            &[("add", "{\"a\": 1}"), ("time.now", "{}")],
        ),
        (Mistral, "Well[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {}}]", "Well", &[("add", "{}")]),
        (
            MistralArgs,
            "[TOOL_CALLS]add[ARGS]{\"a\": 1}[TOOL_CALLS]time.now[CALL_ID]abcdefghi[ARGS]{}",
            "",
            &[("add", "{\"a\": 1}"), ("time.now", "{}")],
        ),
        // Other orders, other forms of arguments, no end.
        (
            Hermes,
            "<tool_call>{\"arguments\": {\"a\":1}, \"name\": \"add\"}</tool_call>",
            "",
            &[("add", "{\"a\":1}")],
        ),
        (
            Hermes,
            "<tool_call>{\"name\": \"add\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>",
            "",
            &[("add", "{\"a\":1}")],
        ),
        (Hermes, "<tool_call>{\"name\": \"time.now\"}", "", &[("time.now", "{}")]),
        (Hermes, "<tool_call>{\"name\": \"add\", \"arguments\": {}}", "", &[("add", "{}")]),
        (
            Llama,
            "{\"type\": \"function\", \"function\": {\"name\": \"add\", \"parameters\": {\"a\":1}}}",
            "",
            &[("add", "{\"a\":1}")],
        ),
        // What is none is text, to the letter.
        (Hermes, "a < b, <tool>, <tool_cal", "a < b, <tool>, <tool_cal", &[]),
        (Hermes, "  spaces stay \n", "  spaces stay \n", &[]),
        (
            Hermes,
            "<tool_call>\n{\"name\": \"sub\", \"arguments\": {}}\n</tool_call>",
            "<tool_call>\n{\"name\": \"sub\", \"arguments\": {}}\n</tool_call>",
            &[],
        ),
        (Hermes, "So <tool_call> is a tag", "So <tool_call> is a tag", &[]),
        (
            Hermes,
            "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": tru}}</tool_call>",
            "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": tru}}</tool_call>",
            &[],
        ),
        (
            Hermes,
            "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1",
            "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1",
            &[],
        ),
        (
            Hermes,
            "<tool_call>{\"name\": \"add\", \"arguments\": {}</tool_call> and",
            "<tool_call>{\"name\": \"add\", \"arguments\": {}</tool_call> and",
            &[],
        ),
        (
            Hermes,
            "<tool_call><tool_call>{\"name\": \"add\", \"arguments\": {}}</tool_call>",
            "<tool_call>",
            &[("add", "{}")],
        ),
        (Llama, "{\"answer\": 42}", "{\"answer\": 42}", &[]),
        (
            Llama,
            "Say {\"name\": \"add\", \"parameters\": {}}",
            "Say {\"name\": \"add\", \"parameters\": {}}",
            &[],
        ),
        (Llama, "<|python_tag|>print(1)", "<|python_tag|>print(1)", &[]),
        (Mistral, "[TOOL_CALLS] nothing", "[TOOL_CALLS] nothing", &[]),
        (
            Mistral,
            "[TOOL_CALLS][{\"name\": \"add\", \"arguments\": {}}, {\"name\": \"sub\"}]",
            " {\"name\": \"sub\"}]",
            &[("add", "{}")],
        ),
        (MistralArgs, "[TOOL_CALLS]sub[ARGS]{}", "[TOOL_CALLS]sub[ARGS]{}", &[]),
        (MistralArgs, "[TOOL_CALLS]add[ARGS]{\"a\"", "[TOOL_CALLS]add[ARGS]{\"a\"", &[]),
    ];
    for (format, text, said, calls) in cases {
        let calls = calls.iter().map(|(name, with)| ((*name).to_owned(), (*with).to_owned())).collect();
        check(*format, text, &Read { text: (*said).to_owned(), calls });
    }
}

#[test]
fn streams_say_names_first_and_arguments_as_they_come() {
    let mut calls = Calls::new(Format::Hermes, vec!["add".to_owned()]);
    let pieces =
        ["Ok ", "<tool_call>", "{\"name\": \"add\"", ", \"arguments\": {\"a\"", ": 1", "}}</tool_call>"];
    let said: Vec<Vec<Said>> = pieces.iter().map(|piece| calls.push(piece)).collect();
    let text = |text: &str| vec![Said::Text(text.to_owned())];
    let arguments = |text: &str| Said::Arguments(text.to_owned());
    assert_eq!(said[0], text("Ok"));
    assert_eq!((said[1].len(), said[2].len()), (0, 0));
    assert_eq!(said[3], [Said::Call("add".to_owned()), arguments("{\"a\"")]);
    assert_eq!((&said[4][..], &said[5][..]), (&[arguments(": 1")][..], &[arguments("}")][..]));
    assert_eq!(calls.finish(), []);
}

#[test]
fn formats_are_those_of_the_templates() {
    for (template, want) in [
        (
            "{% if tools %}<tools>...</tools> <tool_call>{\"name\": ...}</tool_call>{% endif %}",
            Format::Hermes,
        ),
        ("{% if tools %}<tool_call>\n<function=name>{% endif %}", Format::Generic),
        ("{% if tools %}{{ '[TOOL_CALLS] [' }}{% endif %}", Format::Mistral),
        ("{% if tools %}{{ '[TOOL_CALLS]' + name + '[ARGS]' }}{% endif %}", Format::MistralArgs),
        (
            "{% if tools is not none %}Environment: ipython {\"name\": n, \"parameters\": p}{% endif %}",
            Format::Llama,
        ),
        ("{% for m in messages %}{{ m.content }}{% endfor %}", Format::Generic),
        ("{% if tools %}<|tool|>{{ tools | tojson }}<|/tool|>{% endif %}", Format::Generic),
    ] {
        assert_eq!(Format::of(Some(template)), want, "{template}");
    }
    assert_eq!(Format::of(None), Format::Generic);
}

#[test]
fn templates_without_functions_get_them_as_text() {
    let call = json!({ "id": "abcdefghi", "type": "function", "function": { "name": "add", "arguments": { "a": 1 } } });
    let mut called = Message::new("assistant", "");
    called.rest = BTreeMap::from([("tool_calls".to_owned(), json!([call]))]);
    let mut answer = Message::new("tool", "3");
    answer.rest = BTreeMap::from([("tool_call_id".to_owned(), json!("abcdefghi"))]);
    let messages =
        [Message::new("user", "1 + 2?"), called, answer.clone(), answer, Message::new("assistant", "3.")];
    let tool = json!({ "type": "function", "function": { "name": "add", "parameters": {} } });
    let (said, list) = Format::Generic.prompt(&messages, std::slice::from_ref(&tool));
    let roles: Vec<&str> = said.iter().map(|message| message.role.as_str()).collect();
    assert_eq!((roles, list), (vec!["system", "user", "assistant", "user", "assistant"], None));
    assert!(said[0].content.contains("{\"name\":\"add\",\"parameters\":{}}"), "{}", said[0].content);
    assert_eq!(said[2].content, "<tool_call>\n{\"name\":\"add\",\"arguments\":{\"a\":1}}\n</tool_call>");
    assert_eq!(said[3].content.matches("<tool_response>\n3\n</tool_response>").count(), 2);
    assert!(said.iter().all(|message| message.rest.is_empty()));
    // A template that knows them gets all as it is.
    assert_eq!(
        Format::Hermes.prompt(&messages, std::slice::from_ref(&tool)),
        (messages.to_vec(), Some(json!([tool])))
    );
}

#[test]
fn fields_of_calls_are_read_or_refused_by_name() {
    let read = |body: Value| tools(&mut Fields::parse(body.to_string().as_bytes()).expect("an object"));
    let add = json!({ "type": "function", "function": { "name": "add", "description": "d", "strict": true,
        "parameters": { "type": "object" } } });
    let now = json!({ "type": "function", "function": { "name": "now" } });
    let both = json!([add, now]);
    let (list, all) = read(json!({ "tools": both })).expect("functions");
    let all = all.expect("functions");
    assert_eq!(
        (json!(list), all.functions.len(), all.choice, all.parallel),
        (both.clone(), 2, Choice::Auto, true)
    );
    let one = json!({ "type": "function", "function": { "name": "now" } });
    let (list, named) =
        read(json!({ "tools": both, "tool_choice": one, "parallel_tool_calls": false })).expect("one");
    let named = named.expect("one");
    assert_eq!((list.len(), &named.functions[0].name[..], named.functions.len()), (2, "now", 1));
    assert_eq!((named.choice, named.parallel), (Choice::Required, false));
    for body in [
        json!({}),
        json!({ "tools": [], "tool_choice": "auto" }),
        json!({ "tools": both, "tool_choice": "none" }),
    ] {
        assert_eq!(read(body).expect("nothing to call"), (Vec::new(), None));
    }
    for (body, field) in [
        (json!({ "tools": "add" }), "tools"),
        (json!({ "tools": [{ "type": "web_search" }] }), "tools"),
        (json!({ "tools": [{ "type": "function", "function": { "name": "two words" } }] }), "tools"),
        (
            json!({ "tools": [{ "type": "function", "function": { "name": "a", "parameters": [] } }] }),
            "tools",
        ),
        (json!({ "tools": [now, now] }), "tools"),
        (json!({ "tools": both, "tool_choice": "any" }), "tool_choice"),
        (
            json!({ "tools": both, "tool_choice": { "type": "function", "function": { "name": "sub" } } }),
            "tool_choice",
        ),
        (json!({ "tool_choice": "required" }), "tool_choice"),
    ] {
        let refusal = read(body.clone()).expect_err("a refusal");
        assert_eq!((refusal.status, refusal.field.as_deref()), (400, Some(field)), "{body}");
    }
}
