#![doc = include_str!("../README.md")]

mod api;
mod engine;
mod http;
mod stops;

use std::collections::hash_map::RandomState;
use std::future::Future;
use std::hash::BuildHasher;
use std::io;
use std::net::{SocketAddr, TcpListener};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::sync_channel;
use std::thread;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use fracbit_engine::{Engine, EngineError, EngineOptions};
use fracbit_io::Tokenizer;
use fracbit_model::{Draft, KvType, Model, SampleConfig};
use fracbit_schedule::Scheduler;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::GracefulShutdown;
use hyper_util::service::TowerToHyperService;
use tokio::sync::Semaphore;

use crate::http::Desk;

/// Connections at a time.
const CONNECTIONS: usize = 512;
/// How long a connection may take for the head of a request.
const HEAD: Duration = Duration::from_secs(10);
/// Most bytes of that head.
const HEAD_BYTES: usize = 64 << 10;
/// How long texts may still take when the server should end.
const GRACE: Duration = Duration::from_secs(10);

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

/// How to serve a model.
#[derive(Clone, Debug)]
pub struct Options {
    /// The name that requests call it by.
    pub id: String,
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
    /// What requests must present as `Authorization: Bearer KEY`. Without one only requests that
    /// ask for an address, not a name, are served.
    pub key: Option<String>,
    /// Tokens that end a text, beside those of the tokenizer.
    pub end_tokens: Vec<u32>,
    /// Text of messages and of variables of the template may make control tokens. Otherwise it
    /// stays text.
    pub allow_special: bool,
    /// What decides what steps read of a nested model; `None`: all of it.
    pub scheduler: Option<Scheduler>,
    /// How a nested model drafts for a text that is alone.
    pub draft: Option<Draft>,
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

    /// Serves until `stop` is there; texts that are being written then have some seconds to end.
    ///
    /// # Errors
    /// [`Error::Engine`], [`Error::Start`], [`Error::Thread`].
    pub fn run(
        self,
        model: &Model,
        tokenizer: Tokenizer,
        options: Options,
        stop: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Start)?;
        let tokenizer = Arc::new(tokenizer);
        let mut end_tokens = options.end_tokens;
        end_tokens.extend(tokenizer.eos_ids());
        let (jobs, queue) = sync_channel(options.queue);
        let desk = Desk {
            jobs,
            tokenizer: Arc::clone(&tokenizer),
            id: options.id,
            created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
            context: options.context,
            vocab: model.config().vocab_size,
            allow_special: options.allow_special,
            sampling: options.sampling,
            key: options.key,
            next: AtomicU64::new(RandomState::new().hash_one(())),
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
        let (words, ends) = (&*tokenizer, &end_tokens[..]);
        thread::scope(|scope| {
            let (ended, end) = tokio::sync::oneshot::channel::<()>();
            let engine = thread::Builder::new().name("model".to_owned()).spawn_scoped(scope, move || {
                // Dropped at the end of the thread, whatever ends it.
                let _ended = ended;
                engine::run(engine, words, ends, &queue);
            });
            let engine = engine.map_err(Error::Start)?;
            let served = runtime.block_on(self.serve(desk, stop, end));
            // Whatever still waits for the model is dropped, and with it the last sender of jobs:
            // the thread ends.
            runtime.shutdown_timeout(Duration::from_secs(1));
            engine.join().map_err(|_| Error::Thread)?;
            served
        })
    }

    /// The loop of connections. Not axum's own: that one sets no timer, so that clients may take
    /// for ever to say what they want.
    async fn serve(
        self,
        desk: Desk,
        stop: impl Future<Output = ()>,
        engine_end: tokio::sync::oneshot::Receiver<()>,
    ) -> Result<(), Error> {
        let listener = tokio::net::TcpListener::from_std(self.0).map_err(Error::Start)?;
        let router = http::router(desk);
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new()).header_read_timeout(HEAD).max_buf_size(HEAD_BYTES);
        let (graceful, places) = (GracefulShutdown::new(), Arc::new(Semaphore::new(CONNECTIONS)));
        let mut stop = std::pin::pin!(stop);
        let mut engine_end = std::pin::pin!(engine_end);
        loop {
            let accept = async {
                let place = Arc::clone(&places).acquire_owned().await.expect("never closed");
                (listener.accept().await, place)
            };
            tokio::select! {
                () = &mut stop => break,
                _ = &mut engine_end => return Err(Error::Thread),
                (accepted, place) = accept => match accepted {
                    Ok((stream, _)) => {
                        // Pieces of text are small and should not wait for each other.
                        let _ = stream.set_nodelay(true);
                        let service = TowerToHyperService::new(router.clone());
                        let connection = graceful.watch(http.serve_connection(TokioIo::new(stream), service));
                        tokio::spawn(async move {
                            if let Err(error) = connection.await {
                                tracing::debug!(%error, "a connection ended");
                            }
                            drop(place);
                        });
                    }
                    Err(error) => {
                        // Too many open files, for one: those of others may close.
                        tracing::warn!(%error, "accepting a connection failed");
                        tokio::time::sleep(Duration::from_millis(100)).await;
                    }
                },
            }
        }
        drop((listener, router));
        tokio::select! {
            () = graceful.shutdown() => {}
            () = tokio::time::sleep(GRACE) => tracing::warn!("texts were cut off: the server ends"),
        }
        Ok(())
    }
}
