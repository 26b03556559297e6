//! Who may use the API.

use std::net::IpAddr;
use std::sync::Arc;

use axum::extract::{Request, State};
use axum::http::{HeaderMap, Uri, header};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use subtle::{Choice, ConstantTimeEq};

use crate::app::AppState;
use crate::fields::Refusal;

/// Lets a request in that has a key. Without keys, one that asks for this machine by its address: a
/// page that a browser got from elsewhere can reach a server here under a name of its own (DNS
/// rebinding), but then that name is what it asks for.
pub(crate) async fn admit(State(app): State<Arc<AppState>>, request: Request, next: Next) -> Response {
    let allowed = if app.keys.is_empty() {
        asks_by_address(request.headers(), request.uri())
    } else {
        has_key(request.headers(), &app.keys)
    };
    let response = match allowed {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    };
    app.metrics.answered(response.status().as_u16());
    response
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

fn asks_by_address(headers: &HeaderMap, uri: &Uri) -> Result<(), Refusal> {
    let named = match headers.get(header::HOST) {
        Some(host) => Some(host.to_str().unwrap_or_default()),
        None => uri.authority().map(|authority| authority.as_str()),
    };
    let host = named.map(|named| {
        let without_port =
            named.rsplit_once(':').filter(|(_, port)| port.bytes().all(|b| b.is_ascii_digit()));
        without_port.map_or(named, |(host, _)| host).trim_start_matches('[').trim_end_matches(']')
    });
    // No browser leaves it out.
    if host.is_none_or(|host| host.eq_ignore_ascii_case("localhost") || host.parse::<IpAddr>().is_ok()) {
        return Ok(());
    }
    Err(Refusal::new(403, "a server without a key should be asked for by its address or as localhost"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::http::HeaderValue;

    #[test]
    fn names_of_other_sites_are_refused() {
        let asks = |host: Option<&str>| {
            let headers = host.map(|host| (header::HOST, host.parse().unwrap())).into_iter().collect();
            asks_by_address(&headers, &Uri::from_static("/v1/models")).is_ok()
        };
        let good = [
            "localhost",
            "LocalHost:8080",
            "127.0.0.1",
            "127.0.0.1:80",
            "[::1]:8080",
            "[::1]",
            "192.168.0.7:1",
        ];
        good.into_iter().for_each(|host| assert!(asks(Some(host)), "{host}"));
        assert!(asks(None));
        let odd = [(header::HOST, HeaderValue::from_bytes(b"\xff").unwrap())];
        assert!(asks_by_address(&odd.into_iter().collect(), &Uri::from_static("/")).is_err());
        let bad =
            ["evil.example", "evil.example:8080", "localhost.evil.example", "", "127.0.0.1.evil.example:80"];
        bad.into_iter().for_each(|host| assert!(!asks(Some(host)), "{host}"));
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
