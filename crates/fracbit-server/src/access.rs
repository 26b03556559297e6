//! Who may use the API.

use std::io::{self, Write};
use std::net::IpAddr;
use std::str::FromStr;
use std::sync::Arc;
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use serde_json::json;
use subtle::{Choice, ConstantTimeEq};

use crate::app::AppState;
use crate::fields::Refusal;
use crate::messages;

/// Lets a request in that has a key. Without keys, one that asks for this machine by its address or
/// a name that was allowed: a page that a browser got from elsewhere can reach a server here under
/// a name of its own (DNS rebinding), but then that name is what it asks for.
pub(crate) async fn admit(State(app): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    let allowed = if app.keys.is_empty() {
        asks_by_address(request.headers(), request.uri(), &app.hosts)
    } else {
        has_key(request.headers(), &app.keys)
    };
    let (began, method, path) = (Instant::now(), request.method().clone(), request.uri().path().to_owned());
    let response = match allowed {
        Ok(()) => next.run(request).await,
        Err(refusal) if path.starts_with("/v1/messages") => messages::refused(refusal),
        Err(refusal) => refusal.into_response(),
    };
    let status = response.status().as_u16();
    app.metrics.answered(status);
    if app.log {
        let time = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64());
        let seconds = began.elapsed().as_secs_f64();
        let line = json!({
            "time": time, "method": method.as_str(), "path": path, "status": status, "seconds": seconds,
        });
        // Standard error may be closed; that is no reason to stop.
        let _ = writeln!(io::stderr(), "{line}");
    }
    response
}

/// The origin of a page: scheme, host and, where it is not the scheme's own, port.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Origin(pub(crate) HeaderValue);

impl FromStr for Origin {
    type Err = &'static str;

    /// Reads an origin as browsers write it.
    ///
    /// # Errors
    /// When it is none; `*` is none, either: every page could then use the server.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let rule =
            "should be an origin as browsers write it, such as https://chat.example or http://localhost:3000";
        let uri: Uri = text.parse().map_err(|_| rule)?;
        let (Some(scheme), Some(authority)) = (uri.scheme_str(), uri.authority()) else { return Err(rule) };
        // Compared byte by byte, so nothing else may stand there: no path, no name of a user.
        let written = format!("{scheme}://{authority}");
        let plain = ["http", "https"].contains(&scheme) && !authority.as_str().contains('@');
        if !plain || written != text || text.bytes().any(|b| b.is_ascii_uppercase()) {
            return Err(rule);
        }
        HeaderValue::from_str(text).map(Self).map_err(|_| rule)
    }
}

/// The key of a request, as OpenAI's clients or others send it.
fn given(headers: &HeaderMap) -> Option<&[u8]> {
    if let Some(key) = headers.get("x-api-key") {
        return Some(key.as_bytes());
    }
    let value = headers.get(header::AUTHORIZATION)?.as_bytes();
    let (scheme, key) = value.split_at(value.iter().position(|&b| b == b' ')?);
    scheme.eq_ignore_ascii_case(b"Bearer").then(|| key.trim_ascii())
}

fn has_key(headers: &HeaderMap, keys: &[String]) -> Result<(), Refusal> {
    // All are compared, in time that does not tell which.
    let fits = |given: &[u8]| {
        keys.iter().map(|key| given.ct_eq(key.as_bytes())).fold(Choice::from(0), |any, one| any | one)
    };
    if given(headers).is_some_and(|given| bool::from(fits(given))) {
        return Ok(());
    }
    let message = "this server wants a key: `Authorization: Bearer KEY` or `X-Api-Key: KEY`";
    Err(Refusal::new(401, message).coded("invalid_api_key"))
}

fn asks_by_address(headers: &HeaderMap, uri: &Uri, hosts: &[String]) -> Result<(), Refusal> {
    let named = match headers.get(header::HOST) {
        Some(host) => Some(host.to_str().unwrap_or_default()),
        None => uri.authority().map(|authority| authority.as_str()),
    };
    let host = named.map(|named| {
        let without_port =
            named.rsplit_once(':').filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()));
        without_port.map_or(named, |(host, _)| host).trim_start_matches('[').trim_end_matches(']')
    });
    let known = |host: &str| {
        let named = |name: &str| host.eq_ignore_ascii_case(name);
        named("localhost") || hosts.iter().any(|name| named(name)) || host.parse::<IpAddr>().is_ok()
    };
    // No browser leaves it out.
    if host.is_none_or(known) {
        return Ok(());
    }
    let rule = "a server without a key should be asked for by its address, as localhost or by a name of `--allow-host`";
    Err(Refusal::new(403, rule))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_other_sites_are_refused() {
        let asks = |host: Option<&str>| {
            let headers = host.map(|host| (header::HOST, host.parse().unwrap())).into_iter().collect();
            asks_by_address(&headers, &Uri::from_static("/v1/models"), &["box.local".to_owned()]).is_ok()
        };
        let good = [
            "localhost",
            "LocalHost:8080",
            "127.0.0.1",
            "127.0.0.1:80",
            "[::1]:8080",
            "[::1]",
            "192.168.0.7:1",
            "Box.local:8080",
        ];
        good.into_iter().for_each(|host| assert!(asks(Some(host)), "{host}"));
        assert!(asks(None));
        let odd = [(header::HOST, HeaderValue::from_bytes(b"\xff").unwrap())];
        assert!(asks_by_address(&odd.into_iter().collect(), &Uri::from_static("/"), &[]).is_err());
        let bad = [
            "evil.example",
            "evil.example:8080",
            "my.box.local",
            "localhost.evil.example",
            "",
            "127.0.0.1.evil.example:80",
        ];
        bad.into_iter().for_each(|host| assert!(!asks(Some(host)), "{host}"));
    }

    #[test]
    fn origins_are_as_browsers_write_them() {
        for good in ["https://chat.example", "http://localhost:3000", "http://[::1]:8080"] {
            assert!(good.parse::<Origin>().is_ok(), "{good}");
        }
        for bad in [
            "*",
            "null",
            "chat.example",
            "https://chat.example/",
            "https://a@b",
            "file:///x",
            "https://A.b",
            "",
        ] {
            assert!(bad.parse::<Origin>().is_err(), "{bad}");
        }
    }

    #[test]
    fn a_key_is_wanted_whole() {
        let keys = ["secret".to_owned(), "other".to_owned()];
        let has = |name: &'static str, value: &str| {
            let headers =
                [(name.parse().unwrap(), value.parse().unwrap())].into_iter().collect::<HeaderMap>();
            has_key(&headers, &keys).is_ok()
        };
        for good in ["Bearer secret", "bearer other", "BEARER  secret"] {
            assert!(has("authorization", good), "{good}");
        }
        assert!(has("x-api-key", "other"));
        for wrong in ["", "secret", "Bearer", "Bearer ", "Bearer secre", "Bearer secrets", "Basic secret"] {
            assert!(!has("authorization", wrong) && !has("x-api-key", wrong) || wrong == "secret", "{wrong}");
        }
        assert_eq!(has_key(&HeaderMap::new(), &keys).unwrap_err().status, 401);
    }
}
