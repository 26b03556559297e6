//! The page at `/`, to talk with the model in a browser.

use axum::http::{HeaderName, header};
use axum::response::{Html, IntoResponse, Response};

use crate::fields::Refusal;

/// One file, with all that it needs. What people and models say gets into it as text, never as
/// HTML; if it did not, the policy below would still keep it from running or loading anything.
const PAGE: &str = include_str!("page.html");
/// What marks its own script and style; a number takes the place of the word.
const MARK: &str = "nonce=\"NONCE\"";

/// The page, with a number that nobody could guess.
pub(crate) async fn page() -> Response {
    let mut random = [0; 16];
    if let Err(error) = getrandom::fill(&mut random) {
        return Refusal::new(500, format!("the system has no random numbers: {error}")).into_response();
    }
    let nonce = format!("{:032x}", u128::from_ne_bytes(random));
    let page = PAGE.replace(MARK, &format!("nonce=\"{nonce}\""));
    let policy = format!(
        "default-src 'none'; script-src 'nonce-{nonce}'; style-src 'nonce-{nonce}'; connect-src 'self'; \
         img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    );
    let headers: [(HeaderName, &str); 4] = [
        (header::CONTENT_SECURITY_POLICY, &policy),
        (header::CACHE_CONTROL, "no-store"),
        (header::REFERRER_POLICY, "no-referrer"),
        (header::X_CONTENT_TYPE_OPTIONS, "nosniff"),
    ];
    (headers, Html(page)).into_response()
}
