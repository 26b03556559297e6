//! Files as people have them, each with its right value: those of public bug reports of other
//! programs, with contents of our own.
#![expect(clippy::unwrap_used, reason = "a test's helpers fail by panicking")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use fracbit_io::{EncodeOptions, Ending, Error, Message, ModelConfig, Tokenizer};
use serde_json::{Value, json};

fn case(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/cases").join(name)
}

fn open(name: &str) -> Result<Tokenizer, Error> {
    let dir = case(name);
    Tokenizer::from_dir(&dir, Some(&ModelConfig::from_dir(&dir)?))
}

/// A copy with other files, `None` for one that is not there.
fn changed(name: &str, files: &[(&str, Option<&str>)]) -> (tempfile::TempDir, Result<Tokenizer, Error>) {
    let place = tempfile::tempdir().unwrap();
    for entry in std::fs::read_dir(case(name)).unwrap() {
        let path = entry.unwrap().path();
        std::fs::copy(&path, place.path().join(path.file_name().unwrap())).unwrap();
    }
    for (file, text) in files {
        match text {
            Some(text) => std::fs::write(place.path().join(file), text).unwrap(),
            None => std::fs::remove_file(place.path().join(file)).unwrap(),
        }
    }
    let opened = Tokenizer::from_dir(place.path(), None);
    (place, opened)
}

fn says(t: &Tokenizer, text: &str, allow_special: bool) -> Vec<u32> {
    t.conversation(&[Message::new("user", text)], &BTreeMap::new(), allow_special)
        .unwrap()
        .expect("a template")
}

fn prompt(name: &str) -> String {
    let t = open(name).unwrap();
    t.decode(&says(&t, "hi", false), false).unwrap()
}

#[test]
fn templates_see_what_transformers_gives_them() {
    assert_eq!(prompt("03-tools-not-none"), "hi");
    assert_eq!(prompt("04-tools-iterable-length"), "hi");
    let t = open("03-tools-not-none").unwrap();
    let with_tools = |tools: Value| {
        let variables = BTreeMap::from([("tools".to_owned(), tools)]);
        t.conversation(&[Message::new("user", "hi")], &variables, false).unwrap().expect("a template").len()
    };
    assert_eq!((with_tools(Value::Null), with_tools(json!([]))), (2, 10));
}

#[test]
fn templates_format_and_escape_as_python_does() {
    let t = open("12-template-own-format-limit").unwrap();
    let template = t.chat_template().unwrap().expect("a template");
    let rendered = |source: &str| {
        let messages = [Message::new("user", "hi")];
        let template = fracbit_io::ChatTemplate::new(source).unwrap();
        template.render(&messages, &fracbit_io::RenderOptions::default())
    };
    let render = |source: &str| rendered(source).unwrap();
    assert_eq!(render(template.source()), "In 2024: xhi");
    // It says what it made of its strings, by refusing.
    let strings = open("14-template-strings").unwrap();
    let said = rendered(strings.chat_template().unwrap().expect("a template").source()).unwrap_err();
    assert!(said.to_string().contains("ab|\u{1F600}"), "{said}");
    // Every line is one that transformers renders; what it should be is among the constructs.
    let lines = std::fs::read_to_string(case("15-template-missing-pieces").join("lines.txt")).unwrap();
    assert_eq!(lines.lines().map(render).filter(|text| !text.is_empty()).count(), 18);
}

#[test]
fn added_tokens_of_the_settings_are_tokens() {
    let t = open("07-added-tokens-in-tokenizer-config").unwrap();
    assert_eq!((says(&t, "h", false).len(), t.token_id("<|im_end|>")), (20, Some(40)));
    let t = open("08-eos-in-added-tokens-decoder").unwrap();
    assert_eq!((t.eos_ids(), t.eos_token()), (&[40][..], Some("<|im_end|>")));
    assert_eq!(t.decode(&[40, 11, 40], true).unwrap(), "h");
    // One that would get another number than its file says.
    let settings = |id: &str| {
        format!("{{\"added_tokens_decoder\":{{\"{id}\":{{\"content\":\"<new>\",\"special\":true}}}}}}")
    };
    for (id, word) in [("45", "should be token 45"), ("x", "token ids"), ("-1", "token ids")] {
        let (_place, t) =
            changed("10-special-tokens-map-only", &[("tokenizer_config.json", Some(&settings(id)))]);
        let e = t.unwrap_err().to_string();
        assert!(e.contains(word) && e.contains("tokenizer_config.json"), "{e}");
    }
}

#[test]
fn special_tokens_are_found_wherever_they_are_said() {
    let t = open("10-special-tokens-map-only").unwrap();
    assert_eq!((t.eos_ids(), t.bos_id()), (&[2][..], Some(1)));
    assert_eq!(t.special_tokens().get("unk_token").map(String::as_str), Some("<unk>"));
    let t = open("24-special-flag-in-tokenizer-config").unwrap();
    assert_eq!(t.decode(&[1, 12], true).unwrap(), "i");
    // Where the settings list all added tokens the map does not count, which is said.
    let settings =
        r#"{"added_tokens_decoder": {"2": {"content": "</s>", "special": true}}, "bos_token": "<s>"}"#;
    let (_place, t) = changed("10-special-tokens-map-only", &[("tokenizer_config.json", Some(settings))]);
    let t = t.unwrap();
    assert!(t.eos_ids().is_empty() && t.notes().iter().any(|n| n.contains("eos_token")), "{:?}", t.notes());
    // added_tokens.json, special where a name says so.
    let (_place, t) = changed(
        "10-special-tokens-map-only",
        &[
            ("added_tokens.json", Some(r#"{"<a>": 30, "<b>": 31}"#)),
            (
                "special_tokens_map.json",
                Some(r#"{"additional_special_tokens": ["<b>", {"content": "</s>"}], "eos_token": "</s>"}"#),
            ),
        ],
    );
    let t = t.unwrap();
    assert_eq!((t.token_id("<a>"), t.token_id("<b>")), (Some(30), Some(31)));
    assert_eq!(t.decode(&[30, 31], true).unwrap(), "<a>");
}

#[test]
fn a_template_may_be_in_a_file_of_its_own() {
    const NAME: &str = "09-chat-template-json-only";
    assert_eq!(says(&open(NAME).unwrap(), "h", false).len(), 20);
    let source = |t: &Tokenizer| t.chat_template().unwrap().map(|t| t.source().to_owned());
    for (files, want) in [
        (vec![("chat_template.json", None)], None),
        (vec![("chat_template.jinja", Some("jinja"))], Some("jinja")),
        (
            vec![
                ("chat_template.json", None),
                ("processor_config.json", Some(r#"{"chat_template": "images"}"#)),
            ],
            Some("images"),
        ),
        (vec![("tokenizer_config.json", Some(r#"{"chat_template": "settings"}"#))], Some("settings")),
        (
            vec![("tokenizer_config.json", Some(r#"{"chat_template": {"default": "named", "rag": "r"}}"#))],
            Some("named"),
        ),
    ] {
        let (_place, t) = changed(NAME, &files);
        assert_eq!(source(&t.unwrap()).as_deref(), want, "{files:?}");
    }
    // Of several the default; with tools the one for tools.
    let list = r#"{"chat_template": [{"name": "tool_use", "template": "ttt"}, {"name": "default", "template": "d"}]}"#;
    let (_place, t) = changed(NAME, &[("tokenizer_config.json", Some(list))]);
    let t = t.unwrap();
    let variables = BTreeMap::from([("tools".to_owned(), json!([{}]))]);
    let with_tools = t.conversation(&[], &variables, false).unwrap().expect("a template");
    assert_eq!((says(&t, "h", false).len(), with_tools.len()), (1, 3));
    let list = r#"{"chat_template": [{"name": "rag", "template": "r"}, {"name": "x", "template": "d"}]}"#;
    let (_place, t) = changed(NAME, &[("tokenizer_config.json", Some(list))]);
    let e = t.unwrap().chat_template().unwrap_err().to_string();
    assert!(e.contains("default") && e.contains("rag, x"), "{e}");
}

/// What transformers 5.24 makes of it with `sanitize_control_tokens`.
#[test]
fn text_of_messages_never_becomes_a_control_token() {
    let t = open("11-special-token-in-user-text").unwrap();
    let text = [
        1, 25, 23, 9, 22, 3, 5, 35, 37, 13, 17, 38, 9, 18, 8, 37, 36, 2, 3, 1, 5, 23, 23, 13, 23, 24, 5, 18,
        24, 3,
    ];
    let token = [1, 25, 23, 9, 22, 3, 5, 2, 2, 3, 1, 5, 23, 23, 13, 23, 24, 5, 18, 24, 3];
    assert_eq!(
        (says(&t, "a<|im_end|>", false), says(&t, "a<|im_end|>", true)),
        (text.to_vec(), token.to_vec())
    );
    // Nor does half of one beside the template's text, a role, or a variable.
    let mut half = t.encode("<|im_start|>user\na<|im_end|>\n", EncodeOptions::default()).unwrap();
    let ids = |t: &Tokenizer, messages: &[Message], variables: &BTreeMap<String, Value>| {
        t.conversation(messages, variables, false).unwrap().expect("a template")
    };
    let got = ids(&t, &[Message::new("user", "a")], &BTreeMap::new());
    assert_eq!(got[..half.len()], half[..]);
    half.clear();
    let role = ids(&t, &[Message::new("x<|im_end|>", "a")], &BTreeMap::new());
    assert_eq!(role.iter().filter(|&&id| id == 2).count(), 1, "{role:?}");
    let template = "{{ m or '' }}<|im_{{ messages[0].content }}{{ messages[0].role }}<|im_end|>";
    let settings = json!({ "chat_template": template }).to_string();
    let (_place, t) = changed("11-special-token-in-user-text", &[("tokenizer_config.json", Some(&settings))]);
    let t = t.unwrap();
    let variables = BTreeMap::from([("m".to_owned(), json!("<|im_start|>"))]);
    let got = ids(&t, &[Message::new("end|>", "end|>")], &variables);
    assert_eq!((got.iter().filter(|&&id| id < 3).count(), got.last()), (1, Some(&2)), "{got:?}");
    // A plain role completes a token of the template's, as Phi-3's template does.
    let got = ids(&t, &[Message::new("end", "")], &BTreeMap::new());
    assert_eq!(t.decode(&got, false).unwrap(), "<|im_end<|im_end|>");
    let settings = json!({ "chat_template": "{{ '<|' + messages[0].role + '|>' }}" }).to_string();
    let (_place, t) = changed("11-special-token-in-user-text", &[("tokenizer_config.json", Some(&settings))]);
    assert_eq!(ids(&t.unwrap(), &[Message::new("im_end", "")], &BTreeMap::new()), [2]);
}

/// A token that no file calls special and the template writes: kept from users, not from what the
/// model said itself.
#[test]
fn tokens_that_the_template_writes_are_the_templates() {
    let settings =
        json!({ "chat_template": "{% for m in messages %}<|tag|>{{ m.content }}{% endfor %}" }).to_string();
    let (_place, t) =
        changed("24-special-flag-in-tokenizer-config", &[("tokenizer_config.json", Some(&settings))]);
    let t = t.unwrap();
    let tags = |role: &str| {
        // Characters that the vocabulary does not have make no tokens.
        let ids =
            t.conversation(&[Message::new(role, "a<|tag|>b")], &BTreeMap::new(), false).unwrap().unwrap();
        ids.iter().filter(|&&id| id == 1).count()
    };
    assert_eq!((tags("user"), tags("assistant")), (1, 2));
}

/// A conversation ends with the opening of the answer, its last message, or the text of that.
#[test]
fn conversations_have_three_endings() {
    let template = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}\
        {% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}";
    let settings = json!({ "chat_template": template }).to_string();
    let (_place, t) = changed("11-special-token-in-user-text", &[("tokenizer_config.json", Some(&settings))]);
    let t = t.unwrap();
    let messages = [Message::new("user", "a"), Message::new("assistant", " hello ")];
    let made = |messages: &[Message], ending| {
        let rendered = t.render_conversation(messages, &BTreeMap::new(), ending, false)?;
        let rendered = rendered.expect("a template");
        let tokens = t.encode_conversation(&rendered)?;
        assert!(!tokens.is_empty());
        Ok::<_, Error>(rendered.text().to_owned())
    };
    let before = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nhello";
    assert_eq!(made(&messages, Ending::Continued).unwrap(), before);
    assert_eq!(made(&messages, Ending::Message).unwrap(), format!("{before}<|im_end|>\n"));
    let open = format!("{before}<|im_end|>\n<|im_start|>assistant\n");
    assert_eq!(made(&messages, Ending::Answer).unwrap(), open);
    // What is to be continued has to be there.
    for messages in [&messages[..1], &[Message::new("assistant", " ")], &[]] {
        let error = made(messages, Ending::Continued).unwrap_err().to_string();
        assert!(error.contains("should have a text"), "{error}");
    }
}
