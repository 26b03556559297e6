//! Routes, and who may use them.

use std::convert::Infallible;
use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{SyncSender, TrySendError};
use std::time::Duration;

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::extract::{Path, Request as HttpRequest, State};
use axum::http::{HeaderMap, HeaderValue, StatusCode, Uri, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use fracbit_io::{EncodeOptions, Tokenizer};
use fracbit_model::{SampleConfig, Sampler};
use serde_json::{Value, json};
use subtle::ConstantTimeEq;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_stream::{StreamExt, once};

use crate::api::{Answers, Prompt, Refusal, Request, event};
use crate::engine::{Event, Job};

/// Most bytes of a request's body.
const BODY: usize = 4 << 20;
/// How long a body may take to arrive.
const ARRIVAL: Duration = Duration::from_secs(30);
/// A stream that has nothing to say for this long says so: proxies and clients give up on silent
/// ones.
const SILENCE: Duration = Duration::from_secs(10);

/// What requests are served from.
pub(crate) struct Desk {
    pub(crate) jobs: SyncSender<Job>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// The model's name.
    pub(crate) id: String,
    pub(crate) created: u64,
    /// Most tokens of a text with its prompt.
    pub(crate) context: usize,
    /// Rows of the embedding.
    pub(crate) vocab: usize,
    /// Text of messages may make control tokens.
    pub(crate) allow_special: bool,
    pub(crate) sampling: SampleConfig,
    /// What a request must present.
    pub(crate) key: Option<String>,
    /// Numbers of answers and, with a random start, seeds.
    pub(crate) next: AtomicU64,
}

type Shared = Arc<Desk>;

pub(crate) fn router(desk: Desk) -> Router {
    let desk = Arc::new(desk);
    Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route_layer(middleware::from_fn_with_state(Arc::clone(&desk), admit))
        // Says nothing but that the server is there.
        .route("/health", get(async || axum::Json(json!({ "status": "ok" }))))
        .fallback(async |uri: Uri| {
            Refusal::new(404, format!("there is no `{}` here: the API is below /v1", uri.path()))
        })
        .method_not_allowed_fallback(async || Refusal::new(405, "this address is for another method"))
        .with_state(desk)
}

impl IntoResponse for Refusal {
    fn into_response(self) -> Response {
        let status = StatusCode::from_u16(self.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
        let mut response = (status, axum::Json(self.json())).into_response();
        let headers = response.headers_mut();
        match self.status {
            401 => _ = headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer")),
            503 => _ = headers.insert(header::RETRY_AFTER, HeaderValue::from_static("5")),
            _ => {}
        }
        response
    }
}

/// Lets a request in that has the key. Without a key, one that asks for this machine by its
/// address: a page that a browser got from elsewhere can reach a server here under a name of its
/// own (DNS rebinding), but then that name is what it asks for.
async fn admit(State(desk): State<Shared>, request: HttpRequest, next: Next) -> Response {
    let allowed = match &desk.key {
        Some(key) => has_key(request.headers(), key),
        None => asks_by_address(request.headers(), request.uri()),
    };
    match allowed {
        Ok(()) => next.run(request).await,
        Err(refusal) => refusal.into_response(),
    }
}

fn has_key(headers: &HeaderMap, key: &str) -> Result<(), Refusal> {
    let given =
        headers.get(header::AUTHORIZATION).and_then(|value| value.as_bytes().strip_prefix(b"Bearer "));
    if given.is_some_and(|given| bool::from(given.ct_eq(key.as_bytes()))) {
        return Ok(());
    }
    let message = "this server wants its key: `Authorization: Bearer KEY`";
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

impl Desk {
    fn card(&self) -> Value {
        let Self { id, created, context, .. } = self;
        json!({ "id": id, "object": "model", "created": created, "owned_by": "fracbit", "context_length": context })
    }

    /// The tokens of a prompt, fewer than the context holds.
    fn tokens(&self, prompt: &Prompt) -> Result<Vec<u32>, Refusal> {
        let broken = |e: fracbit_io::Error| Refusal::new(500, e.to_string());
        let (tokens, field) = match prompt {
            Prompt::Tokens(tokens) => (tokens.clone(), "prompt"),
            Prompt::Text(text) => {
                (self.tokenizer.encode(text, EncodeOptions::default()).map_err(broken)?, "prompt")
            }
            Prompt::Chat { messages, variables } => {
                let tokens = self.tokenizer.conversation(messages, variables, self.allow_special).map_err(
                    |e| match e {
                        fracbit_io::Error::Template(_) => {
                            Refusal::field("messages", format_args!("do not suit the model: {e}"))
                        }
                        e => broken(e),
                    },
                )?;
                let none = "this model has no chat template: it was not trained for conversations; /v1/completions continues a text";
                (tokens.ok_or_else(|| Refusal::new(400, none))?, "messages")
            }
        };
        if tokens.is_empty() {
            return Err(Refusal::field(field, "should have at least one token"));
        }
        // A tokenizer may know more tokens than the weights have rows for.
        self.within_vocabulary(field, &tokens)?;
        if tokens.len() >= self.context {
            let rule = format!(
                "should leave room in the context of {} tokens, has {} tokens",
                self.context,
                tokens.len()
            );
            return Err(Refusal::field(field, rule).coded("context_length_exceeded"));
        }
        Ok(tokens)
    }

    fn within_vocabulary(&self, field: &str, tokens: &[u32]) -> Result<(), Refusal> {
        match tokens.iter().find(|&&token| token as usize >= self.vocab) {
            None => Ok(()),
            Some(token) => {
                let rule =
                    format!("should have tokens below {}, the model's vocabulary, has {token}", self.vocab);
                Err(Refusal::field(field, rule))
            }
        }
    }

    /// Hands a request to the model.
    fn submit(&self, request: &Request) -> Result<UnboundedReceiver<Event>, Refusal> {
        if let Some(model) = request.model.as_ref().filter(|&model| *model != self.id) {
            let rule = format!("should be `{}`, the model of this server, got `{model}`", self.id);
            return Err(Refusal { status: 404, ..Refusal::field("model", rule).coded("model_not_found") });
        }
        let sampler = Sampler::new(request.sampling).map_err(|e| Refusal::new(400, e.to_string()))?;
        let prompt = self.tokens(&request.prompt)?;
        self.within_vocabulary("stop_token_ids", &request.stop_tokens)?;
        let (events, answer) = unbounded_channel();
        let job = Job {
            max_tokens: request.max_tokens.unwrap_or(usize::MAX),
            sampler,
            stops: request.stops.clone(),
            stop_tokens: request.stop_tokens.clone(),
            skip_special: request.skip_special,
            prompt,
            events,
        };
        self.jobs.try_send(job).map_err(|e| match e {
            TrySendError::Full(_) => Refusal::new(503, "too many requests are waiting: try again later"),
            TrySendError::Disconnected(_) => Refusal::new(503, "the server is ending"),
        })?;
        Ok(answer)
    }
}

async fn models(State(desk): State<Shared>) -> Response {
    axum::Json(json!({ "object": "list", "data": [desk.card()] })).into_response()
}

async fn model(State(desk): State<Shared>, Path(id): Path<String>) -> Response {
    if id == desk.id {
        return axum::Json(desk.card()).into_response();
    }
    let message = format!("there is no model `{id}` here, but `{}`", desk.id);
    Refusal::new(404, message).coded("model_not_found").into_response()
}

async fn completions(State(desk): State<Shared>, request: HttpRequest) -> Response {
    answer(desk, request, Request::completion).await.unwrap_or_else(IntoResponse::into_response)
}

async fn chat(State(desk): State<Shared>, request: HttpRequest) -> Response {
    answer(desk, request, Request::chat).await.unwrap_or_else(IntoResponse::into_response)
}

/// The body of a request, as JSON: no page can send that to another site unasked.
async fn body(request: HttpRequest) -> Result<axum::body::Bytes, Refusal> {
    let kind = request.headers().get(header::CONTENT_TYPE).and_then(|kind| kind.to_str().ok());
    let kind = kind.and_then(|kind| kind.split(';').next()).map(str::trim);
    if kind != Some("application/json") {
        return Err(Refusal::new(415, "the body should be JSON: `Content-Type: application/json`"));
    }
    match tokio::time::timeout(ARRIVAL, to_bytes(request.into_body(), BODY)).await {
        Ok(Ok(bytes)) => Ok(bytes),
        Ok(Err(_)) => {
            Err(Refusal::new(413, format!("the body should arrive whole, with at most {BODY} bytes")))
        }
        Err(_) => Err(Refusal::new(408, format!("the body should arrive within {} s", ARRIVAL.as_secs()))),
    }
}

async fn answer(
    desk: Shared,
    request: HttpRequest,
    parse: fn(&[u8], SampleConfig) -> Result<Request, Refusal>,
) -> Result<Response, Refusal> {
    let body = body(request).await?;
    let id = desk.next.fetch_add(1, Ordering::Relaxed);
    let defaults = SampleConfig { seed: id, ..desk.sampling };
    // Long texts take their time.
    let read = tokio::task::spawn_blocking(move || {
        let request = parse(&body, defaults)?;
        let events = desk.submit(&request)?;
        Ok::<_, Refusal>((Answers::new(&request, id, desk.id.clone()), request.stream, events))
    });
    let (answers, stream, mut events) =
        read.await.map_err(|_| Refusal::new(500, "reading the request failed"))??;
    if stream {
        let first = answers.first();
        let events = UnboundedReceiverStream::new(events).map(move |event| match event {
            Event::Text(text) => answers.piece(&text),
            Event::Done(done) => answers.last(done),
            Event::Failed(message) => self::event(&Refusal::new(500, message).json()),
        });
        let events = events
            .timeout_repeating(tokio::time::interval_at(tokio::time::Instant::now() + SILENCE, SILENCE));
        let texts = once(first)
            .chain(events.map(|event| event.unwrap_or_else(|_| ": waiting\n\n".to_owned())))
            .filter(|text| !text.is_empty())
            .map(Ok::<_, Infallible>);
        let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
        return Ok((headers, Body::from_stream(texts)).into_response());
    }
    let mut all = String::new();
    while let Some(event) = events.recv().await {
        match event {
            Event::Text(text) => all += &text,
            Event::Done(done) => return Ok(axum::Json(answers.whole(&all, done)).into_response()),
            Event::Failed(message) => return Err(Refusal::new(500, message)),
        }
    }
    Err(Refusal::new(500, "the text was given up: the server is ending"))
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn the_key_is_wanted_whole() {
        let has = |value: &str| {
            let headers = [(header::AUTHORIZATION, value.parse().unwrap())].into_iter().collect();
            has_key(&headers, "secret").is_ok()
        };
        assert!(has("Bearer secret"));
        for wrong in ["", "secret", "Bearer", "Bearer ", "Bearer secre", "Bearer secrets", "Basic secret"] {
            assert!(!has(wrong), "{wrong}");
        }
        assert_eq!(has_key(&HeaderMap::new(), "secret").unwrap_err().status, 401);
    }
}
