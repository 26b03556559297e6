//! Thousands of requests of every kind, good and bad, from clients of every kind.

use std::io::{Read, Write};
use std::net::{Shutdown, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use fracbit_server::Options;
use serde_json::{Value, json};

use crate::client::{
    CHAT, COMPLETIONS, TEMPLATE, ask, complete, connect, metric, options, prompts, receive, send, serve,
    tokenizer, until,
};

const CLIENTS: usize = 12;
const REQUESTS: usize = 10_000;
/// When clients stop, however many requests there were: other tests run beside, and machines are
/// slow. A quiet one with two cores takes half of it.
const LONGEST: Duration = Duration::from_secs(100);

/// A short text of a prompt.
fn body(prompt: &str, seed: usize) -> Value {
    json!({ "prompt": prompt, "max_tokens": 1 + seed % 9, "seed": seed, "temperature": 0.9 })
}

/// One request of a kind; what it says is checked where it should be the same always.
fn once(address: SocketAddr, kind: usize, prompt: &str, (seed, want): (usize, &str)) {
    let mut body = body(prompt, seed);
    match kind {
        0..=2 => assert_eq!(complete(address, &body), want, "{body}"),
        3..=4 => {
            body["stream"] = true.into();
            let answer = ask(address, COMPLETIONS, "", &body);
            let said: String =
                answer.events().iter().filter_map(|e| e["choices"][0]["text"].as_str()).collect();
            assert_eq!(said, want, "{body}");
        }
        5 => {
            body["n"] = 2.into();
            body["logprobs"] = 3.into();
            body["echo"] = true.into();
            let answer = ask(address, COMPLETIONS, "", &body).json();
            let texts = [0, 1].map(|i| answer["choices"][i]["text"].as_str().expect("a text").to_owned());
            assert_eq!(texts[0], format!("{prompt}{want}"), "{body}");
        }
        6 => {
            let messages = json!([{ "role": "user", "content": prompt }]);
            let chat = json!({ "messages": messages, "max_tokens": 4, "seed": seed, "logprobs": true });
            assert_eq!(ask(address, CHAT, "", &chat).status, 200);
        }
        // Gone before the answer, at its first byte, or in the middle of the request.
        7 => drop(send(address, COMPLETIONS, "", &body.to_string())),
        8 => {
            body["stream"] = true.into();
            body["max_tokens"] = 200.into();
            let mut stream = send(address, COMPLETIONS, "", &body.to_string());
            let _ = stream.read(&mut [0; 1]);
        }
        9 => {
            let mut stream = connect(address);
            let _ = stream.write_all(b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Le");
        }
        10 => {
            // Reads a little at a time.
            body["stream"] = true.into();
            let mut stream = send(address, COMPLETIONS, "", &body.to_string());
            let mut piece = [0; 64];
            while stream.read(&mut piece).is_ok_and(|n| n > 0) {
                thread::sleep(Duration::from_millis(2));
            }
        }
        11 => {
            for bytes in
                [&b"\0\xff\r\n\r\n"[..], b"GET / HTTP/9.9\r\n\r\n", b"PUT /v1/models HTTP/1.1\r\n\r\n"]
            {
                let mut stream = connect(address);
                let _ = stream.write_all(bytes);
                // Nothing more comes: the server need not keep the connection for it.
                let _ = stream.shutdown(Shutdown::Write);
                let _ = stream.read_to_end(&mut Vec::new());
            }
        }
        12 => {
            let broken = ["{", "[1]", r#"{"prompt": "a", "prompt": "b"}"#, r#"{"prompt": "a", "best": 1}"#];
            for body in broken {
                assert_eq!(receive(send(address, COMPLETIONS, "", body)).status, 400, "{body}");
            }
        }
        13 => {
            body["prompt"] = "a b ".repeat(100_000).into();
            let status = ask(address, COMPLETIONS, "", &body).status;
            assert!(status == 400 || status == 503, "{status}");
        }
        14 => {
            let answer = ask(address, "POST /tokenize", "", &json!({ "prompt": prompt })).json();
            let back = ask(address, "POST /detokenize", "", &json!({ "tokens": answer["tokens"] })).json();
            assert_eq!(back["prompt"], prompt);
        }
        _ => assert!(metric(address, "fracbit_texts_running") <= 4.0),
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "the one measurement of the tests")]
fn nothing_brings_it_down() {
    let mut serving = serve(Options { queue: 500, ..options() }, tokenizer(Some(TEMPLATE)));
    let address = serving.address;
    let prompts = prompts();
    let wanted: Vec<String> =
        prompts.iter().enumerate().map(|(seed, prompt)| complete(address, &body(prompt, seed))).collect();
    let (next, start) = (AtomicUsize::new(0), Instant::now());
    thread::scope(|scope| {
        for _ in 0..CLIENTS {
            scope.spawn(|| {
                while start.elapsed() < LONGEST {
                    let request = next.fetch_add(1, Ordering::Relaxed);
                    if request >= REQUESTS {
                        return;
                    }
                    // Kinds and prompts in every combination.
                    let which = request / 16 % prompts.len();
                    once(address, request % 16, &prompts[which], (which, &wanted[which]));
                }
            });
        }
    });
    let sent = next.load(Ordering::Relaxed).min(REQUESTS);
    println!("{sent} requests in {:?}", start.elapsed());
    assert!(sent > 1000, "{sent}");
    // Everybody has gone, and nothing is left of them.
    until(address, "fracbit_texts_running", 0.0);
    until(address, "fracbit_texts_waiting", 0.0);
    assert_eq!(metric(address, "fracbit_texts_total{outcome=\"failed\"}"), 0.0);
    assert_eq!(complete(address, &body(&prompts[0], 0)), wanted[0]);
    serving.end();
}
