//! Encrypted connections.

use std::fs;
use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

use fracbit_server::{Options, Tls};
use rcgen::{CertifiedKey, generate_simple_self_signed};
use serde_json::{Value, json};
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::rustls::{ClientConfig, ClientConnection, RootCertStore, StreamOwned, crypto::ring};

use crate::client::{complete, options, serve, tokenizer};

/// A certificate for this machine, and what a client trusts it by.
fn certificate() -> (CertifiedKey<rcgen::KeyPair>, ClientConfig) {
    let made = generate_simple_self_signed(["localhost".to_owned()]).expect("a certificate");
    let mut roots = RootCertStore::empty();
    roots.add(made.cert.der().clone()).expect("a certificate");
    let client = ClientConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .expect("versions of the provider")
        .with_root_certificates(roots)
        .with_no_client_auth();
    (made, client)
}

#[test]
fn connections_are_encrypted_with_a_certificate() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let (cert, key) = (place.path().join("cert.pem"), place.path().join("key.pem"));
    let (made, client) = certificate();
    fs::write(&cert, made.cert.pem()).expect("written");
    fs::write(&key, made.signing_key.serialize_pem()).expect("written");
    let tls = Tls::read(&cert, &key).expect("a pair");
    let serving = serve(Options { tls: Some(tls), ..options() }, tokenizer(None));
    let plain = serve(options(), tokenizer(None));
    let body = json!({ "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0 });
    let want = complete(plain.address, &body);
    let client = Arc::new(client);
    let ask = |body: &Value| -> String {
        let name = ServerName::try_from("localhost").expect("a name");
        let session = ClientConnection::new(Arc::clone(&client), name).expect("a session");
        let socket = TcpStream::connect(serving.address).expect("a listener");
        let mut stream = StreamOwned::new(session, socket);
        let body = body.to_string();
        let head = format!(
            "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).expect("sent");
        let mut answer = String::new();
        // The server may end without the last word of the protocol, behind a whole answer.
        let _ = BufReader::new(stream).read_to_string(&mut answer);
        answer
    };
    let answer = ask(&body);
    let (head, json) = answer.split_once("\r\n\r\n").expect("a head");
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let answer: Value = serde_json::from_str(json).expect("JSON");
    assert_eq!(answer["choices"][0]["text"], want.as_str());
    // Who speaks without is not answered, and who says nothing is let go.
    let mut plain = TcpStream::connect(serving.address).expect("a listener");
    plain.write_all(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n").expect("sent");
    let mut answer = Vec::new();
    let _ = plain.read_to_end(&mut answer);
    assert!(!answer.starts_with(b"HTTP"), "{answer:?}");
    let silent = TcpStream::connect(serving.address).expect("a listener");
    silent.set_read_timeout(Some(Duration::from_secs(30))).expect("a timeout");
    let start = Instant::now();
    let _ = (&silent).read_to_end(&mut answer);
    assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
}

#[test]
fn certificates_that_are_none_are_named() {
    let place = tempfile::tempdir().expect("a temporary directory");
    let path = |name: &str| place.path().join(name);
    let ([one, other], absent) = ([certificate().0, certificate().0], path("absent.pem"));
    fs::write(path("cert.pem"), one.cert.pem()).expect("written");
    fs::write(path("key.pem"), one.signing_key.serialize_pem()).expect("written");
    fs::write(path("other.pem"), other.signing_key.serialize_pem()).expect("written");
    fs::write(path("text.pem"), "hello").expect("written");
    let cut = one.cert.pem();
    fs::write(path("cut.pem"), &cut[..cut.len() / 2]).expect("written");
    for (cert, key, named, rule) in [
        (&absent, &path("key.pem"), "absent.pem", "certificate"),
        (&path("cert.pem"), &absent, "absent.pem", "private key"),
        (&path("text.pem"), &path("key.pem"), "text.pem", "there is none"),
        (&path("cut.pem"), &path("key.pem"), "cut.pem", "certificate"),
        (&path("cert.pem"), &path("cert.pem"), "cert.pem", "private key"),
        (&path("cert.pem"), &path("other.pem"), "other.pem", "should be the key of"),
    ] {
        let error = Tls::read(cert, key).expect_err("refused").to_string();
        assert!(error.contains(named) && error.contains(rule), "{error}");
    }
}
