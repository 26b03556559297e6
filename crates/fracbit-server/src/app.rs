//! From a request to the texts that the model is asked for, within limits of memory and number.

use std::sync::atomic::AtomicU64;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::time::Instant;

use axum::extract::FromRef;
use fracbit_grammar::{Rule, RuleError, Vocabulary};
use fracbit_io::{Bos, EncodeOptions, Pooling, Tokenizer};
use fracbit_model::{Adjustments, Constraint, SampleConfig, Sampler};
use serde_json::{Value, json};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

use crate::embeddings::{Embedding, Wanted};
use crate::engine::{Event, Job, Line, Order};
use crate::fields::Refusal;
use crate::metrics::Metrics;
use crate::request::{EFFORT, Prompt, Request};
use crate::tools::{Choice, Format};

/// Most bytes of a request's body.
pub(crate) const BODY: usize = 4 << 20;
/// Most bytes of all bodies that are there at a time, in units of [`UNIT`]: what is made of them
/// takes some times as much.
const BODIES: usize = 64 << 10;
const UNIT: usize = 1 << 10;
/// Most bytes of an answer of vectors, which count like those of bodies.
pub(crate) const RESULTS: usize = BODIES * UNIT / 2;
/// A role that most templates do not know.
const DEVELOPER: &str = "developer";
/// Bodies that are read and tokenized at a time: 4 MB of text take half a gigabyte meanwhile.
const READERS: usize = 2;

/// What requests are served from.
pub(crate) struct AppState {
    pub(crate) orders: Sender<Order>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    /// The model's names.
    pub(crate) names: Vec<String>,
    pub(crate) created: u64,
    /// Most tokens of a text with its prompt.
    pub(crate) context: usize,
    /// Texts at a time.
    pub(crate) slots: usize,
    /// Rows of the embedding.
    pub(crate) vocab: usize,
    /// Its columns.
    pub(crate) width: usize,
    /// How vectors are made, or why there are none.
    pub(crate) pooling: Result<Pooling, String>,
    /// Text of messages may make control tokens.
    pub(crate) allow_special: bool,
    pub(crate) sampling: SampleConfig,
    /// Tokens that end every text.
    pub(crate) end_tokens: Vec<u32>,
    /// How the model calls functions.
    pub(crate) format: Format,
    /// The bytes of all tokens, once a request has a rule for its text.
    pub(crate) vocabulary: OnceLock<Result<Vocabulary, String>>,
    /// What a request must present, one of them.
    pub(crate) keys: Vec<String>,
    /// Names that a server without keys may be asked for by.
    pub(crate) hosts: Vec<String>,
    /// Numbers of answers and, with a random start, seeds.
    pub(crate) next: Arc<AtomicU64>,
    pub(crate) metrics: Arc<Metrics>,
    /// Answers are told on standard error.
    pub(crate) log: bool,
    pub(crate) limits: Limits,
}

/// What requests are served from now: another, once another model is loaded. Who has asked already
/// keeps what was there.
#[derive(Clone)]
pub(crate) struct Current(Arc<RwLock<Arc<AppState>>>);

impl Current {
    pub(crate) fn new(app: AppState) -> Self {
        Self(Arc::new(RwLock::new(Arc::new(app))))
    }

    pub(crate) fn now(&self) -> Arc<AppState> {
        // What it guards is whole after every statement.
        Arc::clone(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    pub(crate) fn replace(&self, app: AppState) {
        let mut place = self.0.write().unwrap_or_else(PoisonError::into_inner);
        let old = std::mem::replace(&mut *place, Arc::new(app));
        // What it holds is given back without anybody waiting.
        drop(place);
        drop(old);
    }
}

impl FromRef<Current> for Arc<AppState> {
    fn from_ref(current: &Current) -> Self {
        current.now()
    }
}

impl Drop for AppState {
    /// Nobody can ask for this model any more: its thread ends when its texts are done.
    fn drop(&mut self) {
        // Gone already: nothing to end.
        let _ = self.orders.send(Order::Retire);
    }
}

/// What all requests share.
#[derive(Clone)]
pub(crate) struct Limits {
    /// Requests that run or wait.
    places: Arc<Semaphore>,
    bodies: Arc<Semaphore>,
    readers: Arc<Semaphore>,
}

impl Limits {
    /// Limits for so many requests at a time.
    pub(crate) fn new(requests: usize) -> Self {
        let [places, bodies, readers] = [requests.min(Semaphore::MAX_PERMITS), BODIES, READERS]
            .map(|permits| Arc::new(Semaphore::new(permits)));
        Self { places, bodies, readers }
    }

    /// A place among those that run or wait.
    pub(crate) fn place(&self) -> Result<OwnedSemaphorePermit, Refusal> {
        let place = Arc::clone(&self.places).try_acquire_owned();
        place.map_err(|_| Refusal::new(503, "too many requests are waiting: try again later"))
    }

    /// The memory of so many bytes more of a body.
    pub(crate) fn memory(&self, there: usize, more: usize) -> Result<OwnedSemaphorePermit, Refusal> {
        let units = (there + more).div_ceil(UNIT) - there.div_ceil(UNIT);
        let units = u32::try_from(units).unwrap_or(u32::MAX);
        let memory = Arc::clone(&self.bodies).try_acquire_many_owned(units);
        memory.map_err(|_| Refusal::new(503, "the requests that are waiting are too large: try again later"))
    }

    /// The right to read a body, as soon as others have.
    pub(crate) async fn reader(&self) -> OwnedSemaphorePermit {
        Arc::clone(&self.readers).acquire_owned().await.expect("never closed")
    }
}

/// A request's place and memory. They are given back when its texts are there or when nobody waits
/// for them any more, whichever comes first: each side has one of two tickets.
#[derive(Debug)]
pub(crate) struct Ticket(Arc<Mutex<Option<[OwnedSemaphorePermit; 2]>>>);

impl Ticket {
    pub(crate) fn pair(permits: [OwnedSemaphorePermit; 2]) -> [Self; 2] {
        let held = Arc::new(Mutex::new(Some(permits)));
        [Self(Arc::clone(&held)), Self(held)]
    }
}

impl Drop for Ticket {
    fn drop(&mut self) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take();
    }
}

/// The texts of a request, as they come.
pub(crate) struct Coming {
    pub(crate) events: UnboundedReceiver<(usize, Event)>,
    /// How many there are.
    pub(crate) texts: usize,
    /// Tokens of their prompts.
    pub(crate) prompt: usize,
    pub(crate) ticket: Ticket,
}

impl AppState {
    /// What is said of the model under one of its names.
    pub(crate) fn card(&self, name: &str) -> Value {
        let Self { created, context, .. } = self;
        json!({
            "id": name, "object": "model", "created": created, "owned_by": "fracbit",
            "context_length": context, "max_model_len": context,
        })
    }

    /// Which of its names a request calls the model by.
    pub(crate) fn name(&self, asked: Option<&str>) -> Result<&str, Refusal> {
        let Some(asked) = asked else { return Ok(&self.names[0]) };
        self.names.iter().map(String::as_str).find(|name| *name == asked).ok_or_else(|| {
            let names = self.names.join("` or `");
            let rule = format!("should be `{names}`, the model of this server, got `{asked}`");
            Refusal { status: 404, ..Refusal::field("model", rule).coded("model_not_found") }
        })
    }

    /// Hands the texts of a request for vectors to the model.
    pub(crate) fn embed(
        &self,
        wanted: &Wanted,
        permits: [OwnedSemaphorePermit; 2],
    ) -> Result<Coming, Refusal> {
        let arrived = Instant::now();
        let pooling = self.pooling.as_ref();
        let none = |rule: &String| Refusal::new(501, format!("this server gives no embeddings: {rule}"));
        let pooling = *pooling.map_err(none)?;
        let [place, mut memory] = permits;
        memory.merge(self.limits.memory(0, wanted.bytes(self.width)?)?);
        let inputs = wanted.inputs.iter().enumerate().map(|(i, input)| {
            let tokens = match input {
                Prompt::Text(text) => {
                    self.surely(text, "input", self.context)?;
                    Prompt::Tokens(
                        self.tokenizer.encode_whole(text).map_err(|e| Refusal::new(500, e.to_string()))?,
                    )
                }
                other => other.clone(),
            };
            self.tokens_in("input", &tokens, Bos::AsConfigured, self.context).map_err(|mut refusal| {
                refusal.message += &format!(" (text {i})");
                refusal
            })
        });
        let inputs = inputs.collect::<Result<Vec<_>, _>>()?;
        let sampler = Sampler::new(SampleConfig::default()).map_err(|e| Refusal::new(400, e.to_string()))?;
        let [ticket, twin] = Ticket::pair([place, memory]);
        let twin = Arc::new(twin);
        let (events, answer) = unbounded_channel();
        let (texts, tokens) = (inputs.len(), inputs.iter().map(|input| input.len()).sum());
        for (choice, prompt) in inputs.into_iter().enumerate() {
            let job = Job {
                prompt,
                max_tokens: 0,
                sampler: sampler.clone(),
                end_tokens: Vec::new(),
                stops: Vec::new(),
                min_tokens: 0,
                skip_special: true,
                kept: Vec::new(),
                echo: false,
                embedding: Some(Embedding::new(pooling, self.width, wanted.encoding)),
                logprobs: None,
                line: Line {
                    choice,
                    events: events.clone(),
                    metrics: Arc::clone(&self.metrics),
                    _ticket: Arc::clone(&twin),
                    arrived,
                    over: false,
                },
            };
            self.orders.send(Order::Write(Box::new(job))).map_err(|_| Refusal::ending())?;
        }
        Ok(Coming { events: answer, texts, prompt: tokens, ticket })
    }

    /// Refuses a text that surely has more tokens than `most`, without making tokens of all of it.
    fn surely(&self, text: &str, field: &str, most: usize) -> Result<(), Refusal> {
        match self.tokenizer.fewest_tokens(text) {
            fewest if fewest > most => Err(self.too_long(field, most, format_args!("at least {fewest}"))),
            _ => Ok(()),
        }
    }

    /// The tokens of a prompt, at least one and at most so many; `bos` is for a text.
    pub(crate) fn tokens(&self, prompt: &Prompt, bos: Bos, most: usize) -> Result<Arc<[u32]>, Refusal> {
        self.tokens_in("prompt", prompt, bos, most)
    }

    /// The same of a prompt that stands in `field`, unless it is a conversation.
    fn tokens_in(&self, field: &str, prompt: &Prompt, bos: Bos, most: usize) -> Result<Arc<[u32]>, Refusal> {
        let broken = |e: fracbit_io::Error| match e {
            fracbit_io::Error::Template(_) => {
                Refusal::field("messages", format_args!("do not suit the model: {e}"))
            }
            e => Refusal::new(500, e.to_string()),
        };
        let (tokens, field) = match prompt {
            Prompt::Tokens(tokens) => (tokens.clone(), field),
            Prompt::Text(text) => {
                self.surely(text, field, most)?;
                let options = EncodeOptions { bos, ..EncodeOptions::default() };
                (self.tokenizer.encode(text, options).map_err(broken)?, field)
            }
            Prompt::Chat { messages, variables, tools, ending, effort } => {
                let source = self.tokenizer.chat_template_source();
                let known = |word: &str| source.is_some_and(|template| template.contains(word));
                if let Some(field) = effort.filter(|_| !known(EFFORT)) {
                    let rule = "is nothing that this model's chat template knows: leave it out";
                    return Err(Refusal::field(field, rule));
                }
                let mut messages = messages.clone();
                if !known(DEVELOPER) {
                    // Clients say so what systems said before.
                    let developers = messages.iter_mut().filter(|message| message.role == DEVELOPER);
                    developers.for_each(|message| "system".clone_into(&mut message.role));
                }
                let (messages, list) = self.format.prompt(&messages, tools);
                let mut variables = variables.clone();
                variables.extend(list.map(|list| ("tools".to_owned(), list)));
                let rendered =
                    self.tokenizer.render_conversation(&messages, &variables, *ending, self.allow_special);
                let none = "cannot be read: this model has no chat template, it was not trained for conversations; /v1/completions continues a text";
                let rendered = rendered.map_err(broken)?.ok_or_else(|| Refusal::field("messages", none))?;
                self.surely(rendered.text(), "messages", most)?;
                (self.tokenizer.encode_conversation(&rendered).map_err(broken)?, "messages")
            }
        };
        if tokens.is_empty() {
            return Err(Refusal::field(field, "should have at least one token"));
        }
        // A tokenizer may know more tokens than the weights have rows for.
        self.within_vocabulary(field, tokens.iter().copied())?;
        if tokens.len() > most {
            return Err(self.too_long(field, most, tokens.len()));
        }
        Ok(tokens.into())
    }

    fn too_long(&self, field: &str, most: usize, has: impl std::fmt::Display) -> Refusal {
        let rule =
            format!("should have at most {most} tokens, for the context of {}, has {has}", self.context);
        Refusal::field(field, rule).coded("context_length_exceeded")
    }

    /// Whether the model has all of these tokens.
    pub(crate) fn within_vocabulary(
        &self,
        field: &str,
        mut tokens: impl Iterator<Item = u32>,
    ) -> Result<(), Refusal> {
        match tokens.find(|&token| token as usize >= self.vocab) {
            None => Ok(()),
            Some(token) => {
                let rule =
                    format!("should have tokens below {}, the model's vocabulary, has {token}", self.vocab);
                Err(Refusal::field(field, rule))
            }
        }
    }

    /// What a request lets come, where it has a rule for its text or calls.
    fn constraint(&self, request: &Request) -> Result<Option<Box<dyn Constraint>>, Refusal> {
        if let Some(structure) = &request.structure {
            return Ok(Some(Box::new(self.grammar(structure.field, &structure.rule)?)));
        }
        let Some(tools) = &request.tools else { return Ok(None) };
        let rule = |behind| Rule::Lark(self.format.grammar(tools, behind, &self.tokenizer));
        match (tools.choice, self.format.open_token(&self.tokenizer)) {
            (Choice::Required, _) => Ok(Some(Box::new(self.grammar("tools", &rule(false))?))),
            (Choice::Auto, Some(opener)) => {
                let grammar = self.grammar("tools", &rule(true))?;
                Ok(Some(Box::new(grammar.behind(vec![opener], self.format.goes_on(tools)))))
            }
            // Where a call begins is told by several tokens: it is read, and not held to a rule.
            (Choice::Auto, None) => Ok(None),
        }
    }

    /// The grammar of a rule that stands in `field`.
    fn grammar(&self, field: &str, rule: &Rule) -> Result<fracbit_grammar::Grammar, Refusal> {
        let vocabulary = self.vocabulary.get_or_init(|| {
            Vocabulary::new(&self.tokenizer, self.vocab, &self.end_tokens).map_err(|e| e.to_string())
        });
        let vocabulary = vocabulary.as_ref().map_err(|rule| Refusal::field(field, rule))?;
        vocabulary.grammar(rule).map_err(|error| match error {
            RuleError::Thread(error) => Refusal::new(500, error.to_string()),
            error => Refusal::field(field, error),
        })
    }

    /// Hands the texts of a request to the model.
    pub(crate) fn submit(
        &self,
        request: &Request,
        permits: [OwnedSemaphorePermit; 2],
    ) -> Result<Coming, Refusal> {
        let arrived = Instant::now();
        self.within_vocabulary("stop_token_ids", request.stop_tokens.iter().copied())?;
        self.within_vocabulary("logit_bias", request.adjustments.bias.keys().copied())?;
        let max_tokens = request.max_tokens.unwrap_or(usize::MAX);
        let most = self.context - max_tokens.min(1);
        let prompts = request.prompts.iter().map(|prompt| self.tokens(prompt, Bos::AsConfigured, most));
        let prompts = prompts.collect::<Result<Vec<_>, _>>()?;
        let own: &[u32] = if request.ignore_eos { &[] } else { &self.end_tokens };
        let end_tokens = [own, &request.stop_tokens].concat();
        let constraint = self.constraint(request)?;
        let kept = if request.tools.is_some() { self.format.tokens(&self.tokenizer) } else { Vec::new() };
        let breakers = match request.sampling.dry_multiplier > 0.0 {
            true => self.tokenizer.tokens_with(&request.breakers),
            false => Vec::new(),
        };
        let [ticket, twin] = Ticket::pair(permits);
        let twin = Arc::new(twin);
        let (events, answer) = unbounded_channel();
        let mut texts = 0;
        // What is the best is told by probabilities.
        let logprobs = request.logprobs.or((request.best_of > request.n).then_some(0));
        for prompt in &prompts {
            for offset in 0..request.best_of as u64 {
                let seed = request.sampling.seed.wrapping_add(offset);
                let sampler = Sampler::new(SampleConfig { seed, ..request.sampling })
                    .map_err(|e| Refusal::new(400, e.to_string()))?;
                let adjustments = Adjustments {
                    prompt: prompt.len(),
                    ends: end_tokens.clone(),
                    breakers: breakers.clone(),
                    ..request.adjustments.clone()
                };
                let sampler = sampler.adjusted(adjustments);
                let sampler = match &constraint {
                    Some(constraint) => sampler.constrained(constraint.clone()),
                    None => sampler,
                };
                let job = Job {
                    prompt: Arc::clone(prompt),
                    max_tokens,
                    sampler,
                    end_tokens: end_tokens.clone(),
                    stops: request.stops.clone(),
                    min_tokens: request.adjustments.min_tokens,
                    skip_special: request.skip_special,
                    kept: kept.clone(),
                    echo: request.echo,
                    embedding: None,
                    logprobs,
                    line: Line {
                        choice: texts,
                        events: events.clone(),
                        metrics: Arc::clone(&self.metrics),
                        _ticket: Arc::clone(&twin),
                        arrived,
                        over: false,
                    },
                };
                self.orders.send(Order::Write(Box::new(job))).map_err(|_| Refusal::ending())?;
                texts += 1;
            }
        }
        let prompt = prompts.iter().map(|prompt| prompt.len()).sum();
        Ok(Coming { events: answer, texts, prompt, ticket })
    }
}
