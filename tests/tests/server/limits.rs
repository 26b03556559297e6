//! What clients may do to the server and to each other.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::mpsc::channel;
use std::thread;
use std::time::{Duration, Instant};

use fracbit_server::Options;
use serde_json::{Value, json};
use tokio::net::TcpSocket;

use crate::client::{
    CHAT, COMPLETIONS, PATIENCE, TEMPLATE, ask, complete, connect, endless, metric, options, peak_memory,
    receive, send, serve, serve_long, tokenizer, until,
};

/// A text that is not done in a minute.
fn endless_text(stream: bool) -> String {
    json!({ "prompt": "Once", "max_tokens": 1 << 20, "stream": stream }).to_string()
}

/// One that has begun.
fn begin(address: SocketAddr) -> BufReader<TcpStream> {
    let mut stream = BufReader::new(send(address, COMPLETIONS, "", &endless_text(true)));
    let mut line = String::new();
    while !line.starts_with("data: ") {
        line.clear();
        assert!(stream.read_line(&mut line).expect("a first piece in time") > 0);
    }
    stream
}

#[test]
fn who_goes_away_leaves_the_place_to_others_and_who_comes_too_late_is_told() {
    let serving = serve_long(1 << 20, Options { slots: 1, queue: 1, ..options() }, endless());
    let address = serving.address;
    let first = begin(address);
    for stream in [false, true] {
        let behind = send(address, COMPLETIONS, "", &endless_text(stream));
        until(address, "fracbit_texts_waiting", 1.0);
        let health = ask(address, "GET /health", "", &Value::Null).json();
        assert_eq!(health, json!({ "status": "ok", "slots": 1, "running": 1, "waiting": 1 }));
        let refused = receive(send(address, COMPLETIONS, "", &endless_text(stream)));
        assert_eq!(refused.status, 503);
        assert!(refused.head.contains("retry-after:"), "{}", refused.head);
        // One that waits no longer makes room for another, while the first goes on.
        drop(behind);
        until(address, "fracbit_texts_waiting", 0.0);
    }
    let unwanted = "fracbit_texts_total{outcome=\"disconnected\"}";
    assert_eq!((metric(address, "fracbit_texts_running"), metric(address, unwanted)), (1.0, 2.0));
    drop(first);
    let start = Instant::now();
    while ask(address, COMPLETIONS, "", &json!({ "prompt": "a", "max_tokens": 1 })).status != 200 {
        assert!(start.elapsed() < PATIENCE, "the place is never free");
    }
}

#[test]
fn who_says_nothing_is_not_waited_for() {
    let serving = serve(options(), tokenizer(None));
    let head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n";
    let body = "Content-Type: application/json\r\nContent-Length: 4000000\r\n\r\n{\"prompt";
    let starts = [(String::new(), ""), (head[..40].to_owned(), ""), (format!("{head}{body}"), "408")];
    thread::scope(|scope| {
        for (start, status) in starts {
            scope.spawn(move || {
                let mut slow = connect(serving.address);
                slow.write_all(start.as_bytes()).expect("a listener that reads");
                let began = Instant::now();
                let mut rest = String::new();
                slow.read_to_string(&mut rest).expect("closed by the server");
                assert!(began.elapsed() < Duration::from_secs(20), "{start}: {:?}", began.elapsed());
                assert!(rest.split(' ').nth(1).unwrap_or_default() == status, "{start}: {rest}");
            });
        }
        // Nobody else waits for them, however many there are.
        let silent: Vec<TcpStream> = (0..200).map(|_| connect(serving.address)).collect();
        let began = Instant::now();
        assert!(!complete(serving.address, &json!({ "prompt": "a", "max_tokens": 3, "seed": 1 })).is_empty());
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        drop(silent);
    });
}

#[cfg(target_os = "linux")]
#[test]
fn an_address_has_its_share_of_connections() {
    let serving = serve(Options { peer_connections: 8, ..options() }, tokenizer(None));
    let mut silent: Vec<TcpStream> = (0..8).map(|_| connect(serving.address)).collect();
    let head = format!("GET /v1/models HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", serving.address);
    let ask_on = |mut stream: TcpStream| {
        // What is refused may be closed before it is written.
        let _ = stream.write_all(head.as_bytes());
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        answer.split(' ').nth(1).unwrap_or_default().to_owned()
    };
    assert_eq!(ask_on(connect(serving.address)), "503");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    let other = runtime.block_on(async {
        let socket = TcpSocket::new_v4().expect("a socket");
        socket.bind(([127, 0, 0, 2], 0).into()).expect("an address of this machine");
        socket.connect(serving.address).await.expect("a listener").into_std().expect("a socket")
    });
    other.set_nonblocking(false).expect("a socket");
    assert_eq!(ask_on(other), "200");
    silent.pop();
    let start = Instant::now();
    while ask_on(connect(serving.address)) != "200" {
        assert!(start.elapsed() < PATIENCE, "its place is never free");
    }
}

/// Two million tokens against a context of some hundred, forty times at once.
#[test]
fn prompts_far_beyond_the_context_cost_no_memory() {
    let serving = serve(options(), tokenizer(Some(TEMPLATE)));
    let address = serving.address;
    let text = "a b ".repeat(1_000_000);
    let numbers = format!("[{}1]", "1,".repeat(1_900_000));
    let bodies = [
        (COMPLETIONS, format!(r#"{{"prompt": "{text}"}}"#)),
        (COMPLETIONS, format!(r#"{{"prompt": {numbers}}}"#)),
        (CHAT, format!(r#"{{"messages": [{{"role": "user", "content": "{text}"}}]}}"#)),
        ("POST /tokenize", format!(r#"{{"prompt": "{text}"}}"#)),
    ];
    let before = peak_memory();
    let (answers, answered) = channel();
    thread::scope(|scope| {
        for i in 0..40 {
            let ((line, body), answers) = (&bodies[i % bodies.len()], answers.clone());
            scope.spawn(move || {
                let answer = receive(send(address, line, "", body));
                answers.send((answer.status, answer)).expect("a test that waits");
            });
        }
        // Others are served meanwhile, as soon as there is memory for what they ask.
        let start = Instant::now();
        while ask(address, COMPLETIONS, "", &json!({ "prompt": "a", "max_tokens": 1 })).status != 200 {
            assert!(start.elapsed() < PATIENCE, "nobody else is served");
        }
    });
    drop(answers);
    let mut refused = 0;
    for (status, answer) in answered {
        match status {
            400 => {
                refused += 1;
                assert_eq!(answer.json()["error"]["code"], "context_length_exceeded", "{answer:?}");
            }
            503 => assert!(answer.head.contains("retry-after:"), "{answer:?}"),
            // On a machine with much else to do forty of them take long to arrive.
            408 => {}
            _ => panic!("{answer:?}"),
        }
    }
    assert!(refused > 0, "all were turned away before they were read");
    // Bodies here and there, and what two of them become.
    if let (Some(before), Some(after)) = (before, peak_memory()) {
        assert!(after - before < 1 << 30, "{} MB", (after - before) >> 20);
    }
}

#[test]
fn bodies_have_their_share_of_memory() {
    // Nothing is read to its end, so all of it stays.
    let serving = serve(options(), tokenizer(None));
    let address = serving.address;
    let piece = vec![b' '; 4_000_000];
    let head = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n\
         Content-Length: {}\r\n\r\n",
        piece.len() + 1
    );
    let mut all: Vec<TcpStream> = (0..24).map(|_| connect(address)).collect();
    for stream in &mut all {
        stream.write_all(head.as_bytes()).expect("a listener that reads");
        // A refusal comes before the end.
        let _ = stream.write_all(&piece);
    }
    // The others say nothing yet.
    let refused = |stream: &mut TcpStream| {
        stream.set_read_timeout(Some(Duration::from_millis(50))).expect("a timeout");
        let mut answer = String::new();
        let _ = stream.read_to_string(&mut answer);
        let answer = answer.to_ascii_lowercase();
        answer.starts_with("http/1.1 503") && answer.contains("retry-after:") && answer.contains("too large")
    };
    let refused = all.iter_mut().filter_map(|stream| refused(stream).then_some(())).count();
    assert!(refused > 0, "there is memory for all");
    let small = || ask(address, COMPLETIONS, "", &json!({ "prompt": "a", "max_tokens": 1 }));
    drop(all);
    let start = Instant::now();
    while small().status != 200 {
        assert!(start.elapsed() < PATIENCE, "the memory is never free");
    }
}

#[test]
fn texts_end_before_the_server_does() {
    let mut serving = serve(options(), tokenizer(None));
    let body =
        json!({ "prompt": "Once upon a time", "max_tokens": 120, "stream": true, "seed": 5 }).to_string();
    let stream = send(serving.address, COMPLETIONS, "", &body);
    let mut first = [0; 1];
    stream.peek(&mut first).expect("an answer that begins");
    serving.end();
    receive(stream).events();
    assert!(TcpStream::connect(serving.address).is_err(), "nobody listens");
}

#[test]
fn a_server_that_ends_tells_all_that_are_there() {
    let grace = Duration::from_secs(1);
    let options = Options { slots: 1, grace, ..options() };
    let mut serving = serve_long(1 << 20, options, endless());
    let address = serving.address;
    let running = begin(address);
    let waiting = [false, true].map(|stream| send(address, COMPLETIONS, "", &endless_text(stream)));
    until(address, "fracbit_texts_waiting", 2.0);
    let start = Instant::now();
    serving.end();
    assert!(start.elapsed() < Duration::from_secs(4), "{:?}", start.elapsed());
    for waiting in waiting {
        let refused = receive(waiting);
        assert_eq!(refused.status, 503, "{refused:?}");
        assert!(refused.head.contains("retry-after:") && refused.body.contains("ending"), "{refused:?}");
    }
    // What was written, then why there is no more, then the end that every stream has.
    let mut rest = String::new();
    let mut running = running;
    running.read_to_string(&mut rest).expect("a whole answer");
    let events: Vec<&str> = rest.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    let [.., last, "[DONE]"] = events[..] else { panic!("{rest}") };
    let last: Value = serde_json::from_str(last).expect("JSON");
    assert_eq!(last["error"]["type"], "server_error", "{last}");
    assert!(TcpStream::connect(address).is_err(), "nobody listens");
}
