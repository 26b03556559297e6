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
mod models;
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
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use fracbit_engine::{Draft, EngineError};
use fracbit_model::{KvType, Runtime};
use fracbit_schedule::Scheduler;
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

pub use crate::access::Origin;
use crate::app::{Current, Limits};
use crate::metrics::Metrics;
pub use crate::models::Loaded;
use crate::models::{Engines, Shared};
pub use crate::tls::{Tls, TlsError};

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

/// Hears when the system asks to load what is served anew (SIGHUP); never where it has no such
/// signal.
///
/// # Errors
/// When the system lets nobody hear it.
pub fn reloads() -> io::Result<UnboundedReceiver<()>> {
    let (tell, heard) = unbounded_channel();
    #[cfg(unix)]
    {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        let mut signal = {
            let _inside = runtime.enter();
            tokio::signal::unix::signal(tokio::signal::unix::SignalKind::hangup())?
        };
        thread::Builder::new().name("signals".to_owned()).spawn(move || {
            runtime.block_on(async { while signal.recv().await.is_some() && tell.send(()).is_ok() {} });
        })?;
    }
    #[cfg(not(unix))]
    drop(tell);
    Ok(heard)
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
    /// Element type of the cache.
    pub kv: KvType,
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
    /// The model cannot be loaded anew.
    #[error("{0}")]
    Load(String),
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
    /// Whenever `reloads` says so, `load` makes a model anew, in the background. Requests that come
    /// once it is there go to it; those before are done on the model before, which is then freed.
    /// Until then both are in memory. Where it fails, nothing changes.
    ///
    /// # Errors
    /// [`Error::Engine`], [`Error::Start`], [`Error::Thread`].
    pub fn run<R: Runtime + Send>(
        self,
        first: Loaded<R>,
        options: Options,
        (load, reloads): (impl Fn() -> Result<Loaded<R>, String> + Sync, UnboundedReceiver<()>),
        stop: impl Future<Output = ()>,
    ) -> Result<(), Error> {
        let runtime =
            tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(Error::Start)?;
        let mut names = options.aliases;
        names.insert(0, options.id);
        let origins = options.origins.into_iter().map(|origin| origin.0).collect();
        let (failed, failures) = unbounded_channel();
        let shared = Shared {
            names,
            slots: options.slots,
            kv: options.kv,
            scheduler: options.scheduler,
            draft: options.draft,
            allow_special: options.allow_special,
            keys: options.keys,
            hosts: options.hosts,
            next: Arc::new(AtomicU64::new(RandomState::new().hash_one(()))),
            metrics: Arc::new(Metrics::default()),
            log: options.log_requests,
            limits: Limits::new(options.slots.saturating_add(options.queue)),
            engines: Engines::default(),
            failed,
        };
        let load = &load;
        thread::scope(|scope| {
            let (made, thread) = shared.start(scope, move || Ok(first))?;
            let threads = Mutex::new(vec![thread]);
            let limits = (options.peer_connections, options.grace, options.tls);
            let served = runtime.block_on(async {
                let current = Current::new(made.await.unwrap_or(Err(Error::Thread))?);
                let listener = tokio::net::TcpListener::from_std(self.0).map_err(Error::Start)?;
                let router = http::router(current.clone(), origins);
                let serving = connections::serve(listener, router, &shared.engines, limits, stop, failures);
                tokio::select! {
                    served = serving => served,
                    () = shared.reload(scope, load, reloads, &current, &threads) => Ok(()),
                }
            });
            // Whatever still waits for a model is dropped, and with it what requests are served
            // from: the threads end.
            runtime.shutdown_timeout(Duration::from_secs(1));
            let threads = threads.into_inner().unwrap_or_else(PoisonError::into_inner);
            let failed = threads.into_iter().map(|thread| thread.join()).filter(Result::is_err).count();
            if failed > 0 { Err(Error::Thread) } else { served }
        })
    }
}
