use super::*;

fn read(chat: bool, body: &str) -> Result<Request, Refusal> {
    let defaults = SampleConfig { temperature: 0.8, seed: 7, ..SampleConfig::default() };
    if chat {
        Request::chat(body.as_bytes(), defaults)
    } else {
        Request::completion(body.as_bytes(), defaults)
    }
}

#[test]
fn requests_are_read() {
    let short = read(false, r#"{"prompt": "a"}"#).unwrap();
    assert_eq!((&short.prompts, short.max_tokens), (&vec![Prompt::Text("a".into())], Some(16)));
    assert_eq!((short.sampling.temperature, short.sampling.seed), (0.8, 7));
    assert!(!short.stream && !short.usage && short.stops.is_empty() && short.model.is_none());
    assert!(short.skip_special && short.stop_tokens.is_empty() && !short.echo && !short.ignore_eos);
    assert_eq!((short.n, short.logprobs, short.adjustments), (1, None, Adjustments::default()));
    let ends =
        read(false, r#"{"prompt": "a", "stop_token_ids": [3, 4], "skip_special_tokens": false}"#).unwrap();
    assert_eq!((ends.stop_tokens, ends.skip_special), (vec![3, 4], false));
    let long = read(
        true,
        r#"{"model": "m", "messages": [
            {"role": "system", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {"role": "assistant", "content": "c", "refusal": null, "annotations": []}],
            "max_completion_tokens": 5, "max_tokens": 6, "temperature": 0, "top_p": 0.5, "top_k": 3, "min_p": 0.1,
            "repetition_penalty": 1.5, "seed": -1, "stop": "x", "stream": true, "stream_options": {"include_usage": true},
            "n": 2, "tools": [], "tool_choice": "auto", "logit_bias": {"5": -100, "6": 0.5}, "presence_penalty": 1, "user": "u",
            "frequency_penalty": -2, "min_tokens": 2, "ignore_eos": true, "parallel_tool_calls": true, "logprobs": true, "top_logprobs": 3,
            "response_format": {"type": "text"}, "chat_template_kwargs": {"enable_thinking": false}}"#,
    )
    .unwrap();
    let messages = vec![Message::new("system", "ab"), Message::new("assistant", "c")];
    let variables = BTreeMap::from([("enable_thinking".to_owned(), json!(false))]);
    let (tools, ending, effort) = (Vec::new(), Ending::Answer, None);
    assert_eq!(long.prompts, [Prompt::Chat { messages, variables, tools, ending, effort }]);
    assert_eq!((long.max_tokens, long.stops, long.model.as_deref()), (Some(5), vec!["x".into()], Some("m")));
    assert!(long.stream && long.usage && long.ignore_eos);
    assert_eq!((long.n, long.logprobs), (2, Some(3)));
    let sampling = SampleConfig {
        temperature: 0.0,
        top_k: 3,
        top_p: 0.5,
        min_p: 0.1,
        repetition_penalty: 1.5,
        seed: u64::MAX,
        ..SampleConfig::default()
    };
    assert_eq!(long.sampling, sampling);
    let adjustments = Adjustments {
        presence_penalty: 1.0,
        frequency_penalty: -2.0,
        bias: BTreeMap::from([(5, -100.0), (6, 0.5)]),
        min_tokens: 2,
        ..Adjustments::default()
    };
    assert_eq!(long.adjustments, adjustments);
    let old = read(
        true,
        r#"{"messages": [{"role": "user", "content": "a"}], "max_tokens": 6, "stop": ["x", "y"]}"#,
    )
    .unwrap();
    assert_eq!((old.max_tokens, old.stops.len(), old.logprobs), (Some(6), 2, None));
}

#[test]
fn prompts_are_texts_and_tokens_one_or_many() {
    let prompts = |prompt: &str| read(false, &format!(r#"{{"prompt": {prompt}}}"#)).unwrap().prompts;
    let text = |text: &str| Prompt::Text(text.to_owned());
    assert_eq!(prompts(r#"["a"]"#), [text("a")]);
    assert_eq!(prompts(r#"["a", "b"]"#), [text("a"), text("b")]);
    assert_eq!(prompts("[1, 2]"), [Prompt::Tokens(vec![1, 2])]);
    assert_eq!(prompts("[[1, 2], [3]]"), [Prompt::Tokens(vec![1, 2]), Prompt::Tokens(vec![3])]);
    // What the evaluation harness of EleutherAI sends.
    let asked = read(
        false,
        r#"{"model": "m", "prompt": [[1, 2]], "temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": true}"#,
    )
    .unwrap();
    assert_eq!((asked.echo, asked.logprobs, asked.max_tokens), (true, Some(1), Some(1)));
    let none = read(false, r#"{"prompt": "a", "max_tokens": 0, "echo": true, "top_k": -1}"#).unwrap();
    assert_eq!((none.max_tokens, none.sampling.top_k), (Some(0), 0));
    let same = read(false, r#"{"prompt": "a", "repeat_penalty": 1.25, "top_k": 0, "n": 3, "best_of": 3}"#);
    assert_eq!(same.unwrap().sampling.repetition_penalty, 1.25);
}

#[test]
fn what_is_not_served_is_refused_by_name() {
    let bodies = [
        (false, "", ""),
        (false, "[]", ""),
        (false, "{}", "prompt"),
        (false, r#"{"prompt": 3}"#, "prompt"),
        (false, r#"{"prompt": ["a", 3]}"#, "prompt"),
        (false, r#"{"prompt": [1, "a"]}"#, "prompt"),
        (false, r#"{"prompt": [1.5]}"#, "prompt"),
        (false, r#"{"prompt": [[1], [-1]]}"#, "prompt"),
        (false, r#"{"prompt": ["a", "b"], "n": 100}"#, "prompt"),
        (false, r#"{"prompt": "a", "prompt": "b"}"#, "prompt"),
        (false, r#"{"prompt": "a", "max_tokens": 0}"#, "max_tokens"),
        (false, r#"{"prompt": "a", "max_tokens": -1}"#, "max_tokens"),
        (false, r#"{"prompt": "a", "max_completion_tokens": 1}"#, "max_completion_tokens"),
        (false, r#"{"prompt": "a", "echo": 1}"#, "echo"),
        (false, r#"{"prompt": "a", "suffix": "b"}"#, "suffix"),
        (false, r#"{"prompt": "a", "logprobs": 21}"#, "logprobs"),
        (false, r#"{"prompt": "a", "logprobs": true}"#, "logprobs"),
        (false, r#"{"prompt": "a", "n": 0}"#, "n"),
        (false, r#"{"prompt": "a", "best_of": 0}"#, "best_of"),
        (false, r#"{"prompt": "a", "best_of": 2, "n": 3}"#, "best_of"),
        (false, r#"{"prompt": "a", "best_of": 2, "stream": true}"#, "best_of"),
        (false, r#"{"prompt": ["a", "b"], "best_of": 100}"#, "prompt"),
        (false, r#"{"prompt": "a", "temprature": 1}"#, "temprature"),
        (false, r#"{"prompt": "a", "temperature": "hot"}"#, "temperature"),
        (false, r#"{"prompt": "a", "temperature": -1}"#, "temperature"),
        (false, r#"{"prompt": "a", "top_p": 1.5}"#, "top_p"),
        (false, r#"{"prompt": "a", "top_k": -2}"#, "top_k"),
        (false, r#"{"prompt": "a", "repeat_penalty": 0}"#, "repeat_penalty"),
        (false, r#"{"prompt": "a", "repetition_penalty": 0}"#, "repetition_penalty"),
        (false, r#"{"prompt": "a", "repeat_penalty": 1, "repetition_penalty": 1}"#, "repeat_penalty"),
        (false, r#"{"prompt": "a", "frequency_penalty": 2.5}"#, "frequency_penalty"),
        (false, r#"{"prompt": "a", "logit_bias": {"3": 101}}"#, "logit_bias"),
        (false, r#"{"prompt": "a", "logit_bias": {"x": 1}}"#, "logit_bias"),
        (false, r#"{"prompt": "a", "logit_bias": {"3": 1, "3": 2}}"#, "logit_bias"),
        (false, r#"{"prompt": "a", "min_tokens": 17}"#, "min_tokens"),
        (false, r#"{"prompt": "a", "seed": "x"}"#, "seed"),
        (false, r#"{"prompt": "a", "stream": true, "stream_options": {"speed": 1}}"#, "stream_options"),
        (false, r#"{"prompt": "a", "stream_options": {"include_usage": true}}"#, "stream_options"),
        (true, "{}", "messages"),
        (true, r#"{"messages": []}"#, "messages"),
        (true, r#"{"messages": [{"role": "user"}]}"#, "messages"),
        (true, r#"{"messages": [{"role": "user", "content": "a", "name": "b"}]}"#, "messages"),
        (true, r#"{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}"#, "messages"),
    ];
    for (chat, body, field) in bodies {
        let refusal = read(chat, body).expect_err(body);
        let named = refusal.field.as_deref().unwrap_or_default();
        assert_eq!((refusal.status, named), (400, field), "{body}");
        assert!(refusal.message.contains(field), "{}", refusal.message);
        assert_eq!(refusal.json()["error"]["type"], "invalid_request_error");
    }
    for (field, value) in [
        ("tools", "[{}]"),
        ("tool_choice", r#""required""#),
        ("response_format", r#"{"type": "xml"}"#),
        ("functions", r#"[{"name": "f"}]"#),
        ("logprobs", "1"),
        ("top_logprobs", "2"),
        ("top_logprobs", "21"),
        ("echo", "true"),
        ("best_of", "1"),
        ("max_tokens", "0"),
        ("prompt", r#""b""#),
        ("reasoning_effort", "3"),
        ("verbosity", r#""low""#),
    ] {
        let body = format!(r#"{{"messages": [{{"role": "user", "content": "a"}}], "{field}": {value}}}"#);
        assert_eq!(read(true, &body).unwrap_err().field.as_deref(), Some(field), "{body}");
    }
    let message = read(false, r#"{"prompt": "a", "top_k": -2}"#).unwrap_err().message;
    assert_eq!(message, "`top_k` should be at least 1, or 0 or -1 for all, got -2");
    let many = format!(r#"{{"prompt": "a", "stop": {:?}}}"#, vec!["x"; STOPS + 1]);
    let long = format!(r#"{{"prompt": "a", "stop": "{}"}}"#, "x".repeat(STOP_BYTES + 1));
    let none = r#"{"prompt": "a", "stop": ["x", ""]}"#.to_owned();
    for body in [many, long, none] {
        assert_eq!(read(false, &body).unwrap_err().field.as_deref(), Some("stop"));
    }
}

#[test]
fn conversations_end_as_asked() {
    let read = |more: Value| {
        let said = json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }]);
        let mut body = json!({ "messages": said });
        body.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        read(true, &body.to_string()).map(|request| match &request.prompts[..] {
            [Prompt::Chat { ending, effort, variables, .. }] => (*ending, *effort, variables.clone()),
            other => panic!("{other:?}"),
        })
    };
    let none = BTreeMap::new();
    for (more, ending) in [
        (json!({}), Ending::Answer),
        (json!({ "add_generation_prompt": true, "continue_final_message": false }), Ending::Answer),
        (json!({ "add_generation_prompt": false }), Ending::Message),
        (json!({ "continue_final_message": true }), Ending::Continued),
        (json!({ "add_generation_prompt": false, "continue_final_message": true }), Ending::Continued),
    ] {
        assert_eq!(read(more).unwrap(), (ending, None, none.clone()));
    }
    let low = BTreeMap::from([(EFFORT.to_owned(), json!("low"))]);
    assert_eq!(
        read(json!({ "reasoning_effort": "low" })).unwrap(),
        (Ending::Answer, Some(EFFORT), low.clone())
    );
    // Who names a variable knows the template.
    assert_eq!(
        read(json!({ "chat_template_kwargs": low.clone() })).unwrap(),
        (Ending::Answer, None, low.clone())
    );
    let call = json!({ "function": { "name": "f", "arguments": {} } });
    for (more, field) in [
        (json!({ "continue_final_message": true, "add_generation_prompt": true }), "continue_final_message"),
        (json!({ "continue_final_message": 1 }), "continue_final_message"),
        (json!({ "reasoning_effort": 3 }), EFFORT),
        (json!({ "reasoning_effort": "low", "chat_template_kwargs": low }), EFFORT),
        (
            json!({ "continue_final_message": true, "messages": [{ "role": "user", "content": "a" }] }),
            "continue_final_message",
        ),
        (
            json!({ "continue_final_message": true, "messages": [
                { "role": "assistant", "content": "b", "tool_calls": [call] },
            ] }),
            "continue_final_message",
        ),
    ] {
        assert_eq!(read(more.clone()).unwrap_err().field.as_deref(), Some(field), "{more}");
    }
}

#[test]
fn samplers_of_other_servers() {
    let more = r#"{"prompt": "a", "typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.2, "top_p": 0.8,
        "mirostat": 2, "mirostat_eta": 0.2, "dry_multiplier": 0.8, "dry_base": 2, "dry_allowed_length": 3,
        "dry_penalty_last_n": 64, "dry_sequence_breakers": ["x", "\n"]}"#;
    let defaults =
        SampleConfig { temperature: 0.8, top_k: 9, top_p: 0.95, min_p: 0.1, ..SampleConfig::default() };
    let of = |body: &str| Request::completion(body.as_bytes(), defaults);
    let request = of(more).unwrap();
    let want = SampleConfig {
        temperature: 0.8,
        // What the request does not ask for is off beside mirostat.
        top_p: 0.8,
        typical_p: 0.9,
        xtc_probability: 0.5,
        xtc_threshold: 0.2,
        mirostat_tau: TAU,
        mirostat_eta: 0.2,
        dry_multiplier: 0.8,
        dry_base: 2.0,
        dry_allowed_length: 3,
        dry_window: 64,
        ..SampleConfig::default()
    };
    assert_eq!((request.sampling, request.breakers), (want, vec!["x".to_owned(), "\n".to_owned()]));
    let plain = of(r#"{"prompt": "a", "mirostat": 0, "mirostat_tau": 3, "dry_penalty_last_n": -1}"#).unwrap();
    assert_eq!((plain.sampling, plain.breakers.len()), (defaults, 4));
    for (body, field) in [
        (r#""mirostat": 1"#, "mirostat"),
        (r#""mirostat_tau": 3"#, "mirostat_tau"),
        (r#""mirostat_eta": 0.2"#, "mirostat_eta"),
        (r#""mirostat": 2, "mirostat_tau": -1"#, "mirostat_tau"),
        (r#""typical_p": 0"#, "typical_p"),
        (r#""xtc_probability": 2"#, "xtc_probability"),
        (r#""dry_base": 0.5"#, "dry_base"),
        (r#""dry_penalty_last_n": 0"#, "dry_penalty_last_n"),
        (r#""dry_allowed_length": -1"#, "dry_allowed_length"),
        (r#""dry_sequence_breakers": [""]"#, "dry_sequence_breakers"),
    ] {
        let refusal = of(&format!(r#"{{"prompt": "a", {body}}}"#)).expect_err(body);
        assert_eq!((refusal.status, refusal.field.as_deref()), (400, Some(field)), "{body}");
    }
}
