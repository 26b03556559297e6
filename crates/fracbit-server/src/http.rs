//! Routes, and how answers are sent.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::rejection::PathRejection;
use axum::extract::{Path, Request as HttpRequest, State};
use axum::http::{HeaderMap, HeaderValue, Method, StatusCode, Uri, header};
use axum::middleware;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use fracbit_io::Bos;
use fracbit_model::SampleConfig;
use serde_json::{Value, json};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::Instant;
use tokio_stream::wrappers::UnboundedReceiverStream;
use tokio_stream::{StreamExt, once};
use tower_http::cors::{AllowHeaders, CorsLayer};

use crate::access::admit;
use crate::answer::Answers;
use crate::app::{AppState, BODY, Coming, Current};
use crate::embeddings::{self, Wanted};
use crate::engine::Event;
use crate::fields::{Fields, Refusal};
use crate::form::{Answering, Form, renamed};
use crate::messages::{self, Message};
use crate::request::{self, Prompt, Request};
use crate::responses;

/// How long a body may take to arrive.
const ARRIVAL: Duration = Duration::from_secs(10);
/// A stream that has nothing to say for this long says so: proxies and clients give up on silent
/// ones.
const SILENCE: Duration = Duration::from_secs(10);

type Shared = Arc<AppState>;

/// The routes. Pages of `origins` may read answers.
pub(crate) fn router(current: Current, origins: Vec<HeaderValue>) -> Router {
    // A page asks before it sends: it may send whatever headers it asks for, such as a key.
    let shared = CorsLayer::new()
        .allow_origin(origins)
        .allow_methods([Method::GET, Method::POST])
        .allow_headers(AllowHeaders::mirror_request());
    let plain = Refusal::into_response;
    let tokenize = async move |app, request| simply(app, request, tokenize, plain).await;
    let detokenize = async move |app, request| simply(app, request, detokenize, plain).await;
    let count_tokens = async |app, request| simply(app, request, count_tokens, messages::refused).await;
    Router::new()
        .route("/v1/models", get(models))
        .route("/v1/models/{*id}", get(model))
        .route("/v1/completions", post(completions))
        .route("/v1/chat/completions", post(chat))
        .route("/v1/responses", post(responses))
        .route("/v1/embeddings", post(embeddings))
        .route("/v1/messages", post(messages))
        .route("/v1/messages/count_tokens", post(count_tokens))
        .route("/tokenize", post(tokenize))
        .route("/detokenize", post(detokenize))
        .route("/tokenizer_info", get(tokenizer_info))
        .route("/metrics", get(metrics))
        .route("/props", get(crate::props::props))
        .route("/slots", get(crate::props::slots))
        .route("/version", get(async || axum::Json(json!({ "version": env!("CARGO_PKG_VERSION") }))))
        .route_layer(middleware::from_fn_with_state(current.clone(), admit))
        // Nothing of the model or of anybody's texts. The page asks for the key itself.
        .route("/", get(crate::page::page))
        .route("/health", get(crate::props::health))
        .fallback(async |uri: Uri| {
            Refusal::new(404, format!("there is no `{}` here: the API is below /v1", uri.path()))
        })
        .method_not_allowed_fallback(async || Refusal::new(405, "this address is for another method"))
        .layer(shared)
        .with_state(current)
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

/// Reads a body as the route does, before the model is needed: the status of a refusal, if it is
/// one.
pub(crate) fn judged(path: &str, body: &[u8]) -> Result<(), u16> {
    let defaults = SampleConfig::default();
    let read = match path {
        "/v1/completions" => Request::completion(body, defaults).map(drop),
        "/v1/chat/completions" => Request::chat(body, defaults).map(drop),
        "/v1/responses" => responses::read(body, defaults).map(drop),
        "/v1/embeddings" => Wanted::read(body).map(drop),
        "/v1/messages" => messages::read(body, defaults).map(drop),
        "/v1/messages/count_tokens" => Fields::parse(body).and_then(messages::counted).map(drop),
        _ => Err(Refusal::new(404, "no such address")),
    };
    read.map_err(|refusal| refusal.status)
}

async fn models(State(app): State<Shared>) -> Response {
    let cards: Vec<Value> = app.names.iter().map(|name| app.card(name)).collect();
    axum::Json(json!({ "object": "list", "data": cards })).into_response()
}

async fn model(State(app): State<Shared>, id: Result<Path<String>, PathRejection>) -> Response {
    // What is no UTF-8 is no name.
    let id = id.map_or_else(|_| String::new(), |Path(id)| id);
    match app.name(Some(&id)) {
        Ok(name) => axum::Json(app.card(name)).into_response(),
        Err(refusal) => refusal.into_response(),
    }
}

async fn metrics(State(app): State<Shared>) -> Response {
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], app.metrics.text()).into_response()
}

async fn completions(State(app): State<Shared>, request: HttpRequest) -> Response {
    answer::<Answers>(app, request, Request::completion).await
}

async fn chat(State(app): State<Shared>, request: HttpRequest) -> Response {
    answer::<Answers>(app, request, Request::chat).await
}

async fn responses(State(app): State<Shared>, request: HttpRequest) -> Response {
    answer::<responses::Response>(app, request, responses::read).await
}

async fn messages(State(app): State<Shared>, request: HttpRequest) -> Response {
    answer::<Message>(app, request, messages::read).await
}

async fn embeddings(State(app): State<Shared>, request: HttpRequest) -> Response {
    let embedded = async {
        let (body, memory) = body(&app, request).await?;
        let place = app.limits.place()?;
        let shared = Arc::clone(&app);
        let work = move || {
            let wanted = Wanted::read(&body)?;
            let model = shared.name(wanted.model.as_deref())?.to_owned();
            Ok((shared.embed(&wanted, [place, memory])?, model))
        };
        let (coming, model) = read(&app, work).await?;
        embeddings::answer(coming, &model).await
    };
    embedded.await.unwrap_or_else(IntoResponse::into_response)
}

fn too_large() -> Refusal {
    Refusal::new(413, format!("the body should have at most {BODY} bytes"))
}

/// Whether a body should be read at all. It should be JSON: no page can send that to another stream
/// unasked.
fn announced(headers: &HeaderMap) -> Result<(), Refusal> {
    let text = |name| headers.get(name).and_then(|value| value.to_str().ok());
    let kind = text(header::CONTENT_TYPE).and_then(|kind| kind.split(';').next()).map(str::trim);
    if !kind.is_some_and(|kind| kind.eq_ignore_ascii_case("application/json")) {
        return Err(Refusal::new(415, "the body should be JSON: `Content-Type: application/json`"));
    }
    let length = text(header::CONTENT_LENGTH).and_then(|length| length.parse::<usize>().ok());
    if length.is_some_and(|length| length > BODY) { Err(too_large()) } else { Ok(()) }
}

/// The body of a request, with the memory that it takes.
async fn body(app: &AppState, request: HttpRequest) -> Result<(Vec<u8>, OwnedSemaphorePermit), Refusal> {
    announced(request.headers())?;
    let mut pieces = request.into_body().into_data_stream();
    let arriving = async {
        let (mut body, mut memory) = (Vec::new(), app.limits.memory(0, 0)?);
        while let Some(piece) = pieces.next().await {
            let piece = piece.map_err(|_| Refusal::new(400, "the body should arrive whole"))?;
            if body.len() + piece.len() > BODY {
                return Err(too_large());
            }
            // What has arrived counts, not what was announced: who only announces takes nothing.
            memory.merge(app.limits.memory(body.len(), piece.len())?);
            body.extend_from_slice(&piece);
        }
        Ok((body, memory))
    };
    let late = || Refusal::new(408, format!("the body should arrive within {} s", ARRIVAL.as_secs()));
    tokio::time::timeout(ARRIVAL, arriving).await.unwrap_or_else(|_| Err(late()))
}

/// Does what takes long beside what others wait for, a few at a time.
async fn read<T: Send + 'static>(
    app: &AppState,
    work: impl FnOnce() -> Result<T, Refusal> + Send + 'static,
) -> Result<T, Refusal> {
    let reader = app.limits.reader().await;
    let done = tokio::task::spawn_blocking(move || {
        let _reader = reader;
        work()
    });
    done.await.map_err(|_| Refusal::new(500, "reading the request failed"))?
}

/// Answers a request in the form of its kind.
async fn answer<F: Form>(
    app: Shared,
    request: HttpRequest,
    parse: fn(&[u8], SampleConfig) -> Result<Request, Refusal>,
) -> Response {
    answered::<F>(app, request, parse).await.unwrap_or_else(F::refused)
}

async fn answered<F: Form>(
    app: Shared,
    request: HttpRequest,
    parse: fn(&[u8], SampleConfig) -> Result<Request, Refusal>,
) -> Result<Response, Refusal> {
    let (body, memory) = body(&app, request).await?;
    let place = app.limits.place()?;
    let id = app.next.fetch_add(1, Ordering::Relaxed);
    let defaults = SampleConfig { seed: id, ..app.sampling };
    let work = {
        let app = Arc::clone(&app);
        move || {
            let request = parse(&body, defaults)?;
            let model = app.name(request.model.as_deref())?.to_owned();
            let coming = app.submit(&request, [place, memory])?;
            let tokenizer = Arc::clone(&app.tokenizer);
            let (texts, prompt, format) = (coming.texts, coming.prompt, app.format);
            let answers = F::new(&request, Answering { texts, prompt, id, model, tokenizer, format });
            Ok((answers, request.stream, coming))
        }
    };
    let (answers, stream, mut coming) = read(&app, work).await?;
    if !stream {
        return answers.whole(&mut coming.events).await.map(|answer| axum::Json(answer).into_response());
    }
    streamed(answers, coming).await
}

/// The answer as a stream of events. It begins with the first of them, or when the client should
/// hear something, so that a request that only waited can still be refused.
async fn streamed(mut answers: impl Form, coming: Coming) -> Result<Response, Refusal> {
    let Coming { mut events, ticket, .. } = coming;
    let first = tokio::time::timeout(SILENCE, events.recv()).await.ok();
    let first = match first {
        Some(Some((_, Event::GivenUp)) | None) => return Err(Refusal::ending()),
        Some(Some((_, Event::Failed(message)))) => return Err(Refusal::new(500, message)),
        Some(Some((at, event))) => answers.first() + &answers.event(at, event).unwrap_or_default(),
        None => answers.first(),
    };
    let texts = UnboundedReceiverStream::new(events).map_while(move |(at, event)| {
        // Kept until the last event has been sent, or nobody reads them.
        let _ticket = &ticket;
        answers.event(at, event)
    });
    let ticks = tokio::time::interval_at(Instant::now() + SILENCE, SILENCE);
    let texts = texts.timeout_repeating(ticks);
    let texts = once(first)
        .chain(texts.map(|text| text.unwrap_or_else(|_| ": waiting\n\n".to_owned())))
        .filter(|text| !text.is_empty())
        .map(Ok::<_, Infallible>);
    let headers = [(header::CONTENT_TYPE, "text/event-stream"), (header::CACHE_CONTROL, "no-cache")];
    Ok((headers, Body::from_stream(texts)).into_response())
}

/// Answers a request that the model is not needed for.
async fn simply(
    State(app): State<Shared>,
    request: HttpRequest,
    respond: fn(&AppState, Fields) -> Result<Value, Refusal>,
    refused: fn(Refusal) -> Response,
) -> Response {
    let done = async {
        let (body, memory) = body(&app, request).await?;
        let shared = Arc::clone(&app);
        read(&app, move || {
            let _memory = memory;
            respond(&shared, Fields::parse(&body)?)
        })
        .await
    };
    done.await.map_or_else(refused, |answer| axum::Json(answer).into_response())
}

/// The tokens of a prompt or of a conversation.
fn tokenize(app: &AppState, mut fields: Fields) -> Result<Value, Refusal> {
    app.name(fields.take::<String>("model", "a text")?.as_deref())?;
    let text = fields.take("prompt", "a text")?.map(Prompt::Text);
    // As llama.cpp's server calls it, which puts no BOS token before it unless that is asked for.
    let content = fields.take("content", "a text")?.map(Prompt::Text);
    let chat = request::chat_prompt(&mut fields)?.map(|(prompt, _)| prompt);
    let flag = if content.is_some() { "add_special" } else { "add_special_tokens" };
    let special = fields.take(flag, "true or false")?;
    // The template writes its special tokens itself.
    if special == Some(true) && chat.is_some() {
        return Err(Refusal::field(flag, "should be true with `prompt` only"));
    }
    let called = if content.is_some() { "content" } else { "prompt" };
    let bos = if special.unwrap_or(content.is_none()) { Bos::AsConfigured } else { Bos::Never };
    let mut all = [text, content, chat].into_iter().flatten();
    let (Some(prompt), None) = (all.next(), all.next()) else {
        let rule = "should be there, or else `content` or `messages`, one of them";
        return Err(Refusal::field("prompt", rule));
    };
    fields.end()?;
    let tokens = app.tokens(&prompt, bos, app.context).map_err(|e| renamed(e, &[(called, "prompt")]))?;
    Ok(json!({ "tokens": *tokens, "count": tokens.len(), "max_model_len": app.context }))
}

/// The number of tokens of a conversation in Anthropic's form.
fn count_tokens(app: &AppState, fields: Fields) -> Result<Value, Refusal> {
    let mut counted = tokenize(app, messages::counted(fields)?)?;
    Ok(json!({ "input_tokens": counted["count"].take() }))
}

/// What a program needs beside the two to work as with a tokenizer of its own.
async fn tokenizer_info(State(app): State<Shared>) -> Response {
    let tokenizer = &app.tokenizer;
    axum::Json(json!({
        "bos_token": tokenizer.bos_token(), "eos_token": tokenizer.eos_token(),
        "chat_template": tokenizer.chat_template_source(),
    }))
    .into_response()
}

/// The text of tokens, control tokens too.
fn detokenize(app: &AppState, mut fields: Fields) -> Result<Value, Refusal> {
    app.name(fields.take::<String>("model", "a text")?.as_deref())?;
    let want = format!("a list of at most {} tokens", app.context);
    let fits = |tokens: &Vec<u32>| tokens.len() <= app.context;
    let tokens = fields.within("tokens", &want, fits)?;
    let tokens = tokens.ok_or_else(|| Refusal::field("tokens", format_args!("should be {want}")))?;
    fields.end()?;
    app.within_vocabulary("tokens", tokens.iter().copied())?;
    let text = app.tokenizer.decode(&tokens, false).map_err(|e| Refusal::new(500, e.to_string()))?;
    // By the names of vLLM and of llama.cpp.
    Ok(json!({ "prompt": text, "content": text }))
}
