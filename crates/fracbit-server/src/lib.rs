#![doc = include_str!("../README.md")]

mod access;
mod answer;
mod app;
mod connections;
mod embeddings;
mod engine;
mod fields;
mod form;
mod http;
mod messages;
mod metrics;
mod page;
mod props;
mod request;
mod responses;
mod scores;
mod stops;
mod structure;
mod tls;
mod tools;

use std::collections::hash_map::RandomState;
use std::future::Future;
use std::hash::BuildHasher;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::channel;
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fracbit_engine::{Draft, Engine, EngineError, EngineOptions};
use fracbit_io::{Pooling, Tokenizer};
use fracbit_model::{KvType, Runtime, SampleConfig};
use fracbit_schedule::Scheduler;

pub use crate::access::Origin;
use crate::app::{AppState, Limits};
use crate::metrics::Metrics;
pub use crate::tls::{Tls, TlsError};
use crate::tools::Format;

/// Waits for the user (Ctrl-C) or the system (SIGTERM) to end the program.
pub async fn interrupt() {
    let by_user = async {
        if tokio::signal::ctrl_c().await.is_err() {
            std::future::pending::<()>().await;
        }
    };
    #[cfg(unix)]
    let by_system = async {
        match tokio::signal::unix::signal(tokio::signal::unix::SignalKind::terminate()) {
            Ok(mut signal) => _ = signal.recv().await,
            Err(_) => std::future::pending().await,
        }
    };
    #[cfg(not(unix))]
    let by_system = std::future::pending::<()>();
    tokio::select! {
        () = by_user => {}
        () = by_system => {}
    }
}

/// What a body sent to `path` is refused with before the model is needed; for tests that make up
/// bodies.
///
/// # Errors
/// The status of the answer.
#[doc(hidden)]
pub fn judged(path: &str, body: &[u8]) -> Result<(), u16> {
    http::judged(path, body)
}

/// How to serve a model.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name that requests call it by.
    pub id: String,
    /// Other names of it.
    pub aliases: Vec<String>,
    /// Texts at a time, at least 1; further requests wait.
    pub slots: usize,
    /// Requests that may wait; further ones are turned away.
    pub queue: usize,
    /// Most tokens of a text with its prompt, at least 2.
    pub context: usize,
    /// Element type of the cache.
    pub kv: KvType,
    /// Most pages of the cache, which all texts share; `None`: as many as all take at their full
    /// length.
    pub pages: Option<usize>,
    /// How tokens are picked where a request does not say; its seed is not used, every such request
    /// has another.
    pub sampling: SampleConfig,
    /// What requests must present, one of them, as `Authorization: Bearer KEY` or `X-Api-Key: KEY`.
    /// Without any only requests that ask for an address, not a name, are served.
    pub keys: Vec<String>,
    /// Names that a server without keys may be asked for by, beside addresses and `localhost`.
    pub hosts: Vec<String>,
    /// Whose pages may read answers in a browser, such as `https://chat.example`.
    pub origins: Vec<Origin>,
    /// Write a line of JSON to standard error for each answer.
    pub log_requests: bool,
    /// Connections at a time from one address, or from one network of the sixth version, at least
    /// 1; further ones are turned away.
    pub peer_connections: usize,
    /// What connections are encrypted with; `None`: they are not.
    pub tls: Option<Tls>,
    /// How long texts may still take when the server should end.
    pub grace: Duration,
    /// Tokens that end a text, beside those of the tokenizer.
    pub end_tokens: Vec<u32>,
    /// Text of messages and of variables of the template may make control tokens. Otherwise it
    /// stays text.
    pub allow_special: bool,
    /// What decides what steps read of a nested model; `None`: all of it.
    pub scheduler: Option<Scheduler>,
    /// How a nested model drafts for a text that is alone.
    pub draft: Option<Draft>,
    /// How vectors are made of texts, or why they are not.
    pub pooling: Result<Pooling, String>,
}

/// What can fail beside single requests, which are told themselves.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The address cannot be listened at.
    #[error("listening at {address}: {source}")]
    Listen {
        /// Which.
        address: SocketAddr,
        /// What the system says.
        source: io::Error,
    },
    /// Options that do not fit together.
    #[error(transparent)]
    Engine(#[from] EngineError),
    /// No thread, no timer, no sockets.
    #[error("starting the server: {0}")]
    Start(#[source] io::Error),
    /// A bug: the thread that runs the model has ended.
    #[error("the thread that runs the model has failed; what it said stands above")]
    Thread,
}

/// An address that is listened at; nothing is answered yet.
#[derive(Debug)]
pub struct Server(TcpListener);

impl Server {
    /// Listens; port 0 is one that is free.
    ///
    /// # Errors
    /// [`Error::Listen`].
    pub fn bind(address: SocketAddr) -> Result<Self, Error> {
        let listen = TcpListener::bind(address).and_then(|l| l.set_nonblocking(true).map(|()| l));
        listen.map(Self).map_err(|source| Error::Listen { address, source })
    }

    /// The address.
    ///
    /// # Errors
    /// [`Error::Start`] when the system does not know.
    pub fn address(&self) -> Result<SocketAddr, Error> {
        self.0.local_addr().map_err(Error::Start)
    }

    /// Serves until `stop` is there. Requests that wait are then refused, and texts that are being
    /// written have [`Options::grace`] to end.
    ///
    /// # Errors
    /// [`Error::Engine`], [`Error::Start`], [`Error::Thread`].
    pub fn run<R: Runtime>(
        self,
        model: &R,
        tokenizer: Tokenizer,
        options: Options,
        stop: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Start)?;
        let tokenizer = Arc::new(tokenizer);
        let mut end_tokens = options.end_tokens;
        end_tokens.extend(tokenizer.eos_ids());
        let (orders, received) = channel();
        let metrics = Arc::new(Metrics::default());
        let mut names = options.aliases;
        names.insert(0, options.id);
        let origins = options.origins.into_iter().map(|origin| origin.0).collect();
        let app = AppState {
            orders: orders.clone(),
            tokenizer: Arc::clone(&tokenizer),
            names,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            context: options.context,
            slots: options.slots,
            vocab: model.config().vocab_size,
            width: model.config().hidden_size,
            pooling: model.check_hidden().map_err(|e| e.to_string()).and(options.pooling),
            allow_special: options.allow_special,
            sampling: options.sampling,
            end_tokens,
            format: Format::of(tokenizer.chat_template_source()),
            vocabulary: OnceLock::new(),
            keys: options.keys,
            hosts: options.hosts,
            next: AtomicU64::new(RandomState::new().hash_one(())),
            metrics: Arc::clone(&metrics),
            log: options.log_requests,
            limits: Limits::new(options.slots.saturating_add(options.queue)),
        };
        let engine = Engine::new(
            model,
            EngineOptions {
                sequences: options.slots,
                context: options.context,
                kv: options.kv,
                pages: options.pages,
                scheduler: options.scheduler,
                draft: options.draft,
            },
        )?;
        let words = &*tokenizer;
        thread::scope(|scope| {
            let (ended, end) = tokio::sync::oneshot::channel::<()>();
            let engine = thread::Builder::new().name("model".to_owned()).spawn_scoped(scope, move || {
                // Dropped at the end of the thread, whatever ends it.
                let _ended = ended;
                engine::run(engine, words, &received, &metrics);
            });
            let engine = engine.map_err(Error::Start)?;
            let limits = (options.peer_connections, options.grace, options.tls);
            let served = runtime.block_on(async {
                let listener = tokio::net::TcpListener::from_std(self.0).map_err(Error::Start)?;
                connections::serve(listener, http::router(app, origins), orders, limits, stop, end).await
            });
            // Whatever still waits for the model is dropped, and with it the last sender of orders:
            // the thread ends.
            runtime.shutdown_timeout(Duration::from_secs(1));
            engine.join().map_err(|_| Error::Thread)?;
            served
        })
    }
}
