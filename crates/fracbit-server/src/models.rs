//! Models that come and go: each has a thread, an engine and what requests are served from.

use std::sync::mpsc::{Sender, channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread::{self, Scope, ScopedJoinHandle};
use std::time::{SystemTime, UNIX_EPOCH};

use fracbit_engine::{Engine, EngineOptions};
use fracbit_io::{Pooling, Tokenizer};
use fracbit_model::{KvType, Runtime, SampleConfig};
use fracbit_schedule::Scheduler;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender};
use tokio::sync::oneshot;

use crate::app::{AppState, Current, Limits};
use crate::engine::{self, Order};
use crate::metrics::{Measured, Metrics};
use crate::tools::Format;
use crate::{Draft, Error};

/// A model that is ready to be served, and what of it is its own.
#[derive(Debug)]
pub struct Loaded<R> {
    /// The model.
    pub model: R,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Most tokens of a text with its prompt, at least 2.
    pub context: usize,
    /// Most pages of the cache, which all texts share; `None`: as many as all take at their full
    /// length.
    pub pages: Option<usize>,
    /// Tokens that end a text, beside those of the tokenizer.
    pub end_tokens: Vec<u32>,
    /// How vectors are made of texts, or why they are not.
    pub pooling: Result<Pooling, String>,
    /// How tokens are picked where a request does not say; its seed is not used, every such request
    /// has another.
    pub sampling: SampleConfig,
}

/// Ways to the threads of all models that there were.
#[derive(Clone, Debug, Default)]
pub(crate) struct Engines(Arc<Mutex<Vec<Sender<Order>>>>);

impl Engines {
    fn list(&self) -> std::sync::MutexGuard<'_, Vec<Sender<Order>>> {
        // What it guards is whole after every statement.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tells those that are there; the others are forgotten.
    pub(crate) fn tell(&self, order: impl Fn() -> Order) {
        self.list().retain(|orders| orders.send(order()).is_ok());
    }
}

/// What all models of a server share.
#[derive(Clone)]
pub(crate) struct Shared {
    pub(crate) names: Vec<String>,
    pub(crate) slots: usize,
    pub(crate) kv: KvType,
    pub(crate) scheduler: Option<Scheduler>,
    pub(crate) draft: Option<Draft>,
    pub(crate) allow_special: bool,
    pub(crate) keys: Vec<String>,
    pub(crate) hosts: Vec<String>,
    pub(crate) next: Arc<std::sync::atomic::AtomicU64>,
    pub(crate) metrics: Arc<Metrics>,
    pub(crate) log: bool,
    pub(crate) limits: Limits,
    pub(crate) engines: Engines,
    /// Hears of a thread that has panicked.
    pub(crate) failed: UnboundedSender<()>,
}

/// What requests are served from, once it is there, and the thread that makes it.
type Starting<'scope> = (oneshot::Receiver<Result<AppState, Error>>, ScopedJoinHandle<'scope, ()>);

/// Tells that its thread panicked.
struct Watch(UnboundedSender<()>);

impl Drop for Watch {
    fn drop(&mut self) {
        if thread::panicking() {
            // Nobody there: the server ends already.
            let _ = self.0.send(());
        }
    }
}

impl Shared {
    /// Starts the thread of a model, which loads it, says what requests are served from, and runs
    /// it until that is dropped and all texts are done. The model is freed with the thread.
    pub(crate) fn start<'scope, R: Runtime>(
        &self,
        scope: &'scope Scope<'scope, '_>,
        load: impl FnOnce() -> Result<Loaded<R>, Error> + Send + 'scope,
    ) -> Result<Starting<'scope>, Error> {
        let (shared, (ready, made)) = (self.clone(), oneshot::channel());
        let thread = thread::Builder::new().name("model".to_owned()).spawn_scoped(scope, move || {
            let _watch = Watch(shared.failed.clone());
            let loaded = match load() {
                Ok(loaded) => loaded,
                // Nobody there: the server ends already. So below.
                Err(error) => return drop(ready.send(Err(error))),
            };
            let Loaded { model, tokenizer, context, pages, end_tokens, pooling, sampling } = loaded;
            let options = EngineOptions {
                sequences: shared.slots,
                context,
                kv: shared.kv,
                pages,
                scheduler: shared.scheduler.clone(),
                draft: shared.draft,
            };
            let engine = match Engine::new(&model, options) {
                Ok(engine) => engine,
                Err(error) => return drop(ready.send(Err(error.into()))),
            };
            let tokenizer = Arc::new(tokenizer);
            let end_tokens = [&end_tokens, tokenizer.eos_ids()].concat();
            let (orders, received) = channel();
            shared.engines.list().push(orders.clone());
            let app = AppState {
                orders,
                tokenizer: Arc::clone(&tokenizer),
                names: shared.names,
                created: SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs()),
                context,
                slots: shared.slots,
                vocab: model.config().vocab_size,
                width: model.config().hidden_size,
                pooling: model.check_hidden().map_err(|e| e.to_string()).and(pooling),
                allow_special: shared.allow_special,
                sampling,
                end_tokens,
                format: Format::of(tokenizer.chat_template_source()),
                vocabulary: OnceLock::new(),
                keys: shared.keys,
                hosts: shared.hosts,
                next: shared.next,
                metrics: Arc::clone(&shared.metrics),
                log: shared.log,
                limits: shared.limits,
            };
            let measured = Measured::new(shared.metrics);
            drop(ready.send(Ok(app)));
            engine::run(engine, &tokenizer, &received, &measured);
        });
        Ok((made, thread.map_err(Error::Start)?))
    }

    /// Loads the model anew whenever it is asked to, and puts it in the place of the one before
    /// once it is there. One that cannot be loaded changes nothing.
    pub(crate) async fn reload<'scope, R: Runtime>(
        &self,
        scope: &'scope Scope<'scope, '_>,
        load: &'scope (impl Fn() -> Result<Loaded<R>, String> + Sync),
        mut asked: UnboundedReceiver<()>,
        current: &Current,
        threads: &Mutex<Vec<ScopedJoinHandle<'scope, ()>>>,
    ) {
        while let Some(()) = asked.recv().await {
            tracing::info!("loading the model anew");
            let made = match self.start(scope, move || load().map_err(Error::Load)) {
                Ok((made, thread)) => {
                    threads.lock().unwrap_or_else(PoisonError::into_inner).push(thread);
                    made.await.unwrap_or(Err(Error::Thread))
                }
                Err(error) => Err(error),
            };
            self.metrics.reloaded(made.is_ok());
            match made {
                Ok(app) => {
                    current.replace(app);
                    tracing::warn!("the model was loaded anew");
                }
                Err(error) => {
                    tracing::error!(%error, "the model was not loaded anew; the one before goes on")
                }
            }
        }
        // Nobody asks any more.
        std::future::pending().await
    }
}
