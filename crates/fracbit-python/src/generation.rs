//! Text as an iterator.

use crate::{
    errors::{Refused, raise, refuse},
    model::{Loaded, cache},
};
use fracbit_engine::{Engine, EngineError, EngineOptions, Finish, Listener, Tokens};
use fracbit_io::TokenStream;
use fracbit_model::{Model, SampleConfig};
use pyo3::{exceptions::PyTypeError, prelude::*, types::PyDict};
use running::Running;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How tokens are picked, and how many.
pub(crate) struct Picking {
    pub(crate) max_tokens: usize,
    pub(crate) config: SampleConfig,
    pub(crate) kv: u32,
}

impl Picking {
    /// Sets what `more` names, settings of `SampleConfig`; TypeError for other names. Without
    /// `top_p`, that is 0.95, or 1 beside mirostat, which is a filter of its own.
    pub(crate) fn new(
        max_tokens: usize,
        config: SampleConfig,
        top_p: Option<f32>,
        more: Option<&Bound<'_, PyDict>>,
        kv: u32,
    ) -> PyResult<Self> {
        let mut config = config;
        for (name, value) in more.into_iter().flatten() {
            let name: String = name.extract()?;
            match name.as_str() {
                "typical_p" => config.typical_p = value.extract()?,
                "xtc_probability" => config.xtc_probability = value.extract()?,
                "xtc_threshold" => config.xtc_threshold = value.extract()?,
                "mirostat_tau" => config.mirostat_tau = value.extract()?,
                "mirostat_eta" => config.mirostat_eta = value.extract()?,
                "dry_multiplier" => config.dry_multiplier = value.extract()?,
                "dry_base" => config.dry_base = value.extract()?,
                "dry_allowed_length" => config.dry_allowed_length = value.extract()?,
                "dry_window" => config.dry_window = value.extract()?,
                _ => {
                    let known = "typical_p, xtc_probability, xtc_threshold, mirostat_tau, mirostat_eta, \
                                 dry_multiplier, dry_base, dry_allowed_length and dry_window";
                    let rule = format!("`{name}` is no keyword; those of sampling are {known}");
                    return Err(PyTypeError::new_err(rule));
                }
            }
        }
        config.top_p = top_p.unwrap_or(if config.mirostat_tau > 0.0 { 1.0 } else { 0.95 });
        Ok(Self { max_tokens, config, kv })
    }
}

/// What a generation borrows from.
struct Owned {
    loaded: Arc<Loaded>,
    tokenizer: Arc<fracbit_io::Tokenizer>,
}

/// A text on its way; the stream is `None` once it has ended.
struct Writing<'a> {
    left: Tokens<'a, Model, Engine<'a, Model, Listener>>,
    tokens: Vec<u32>,
    stream: Option<TokenStream<'a>>,
}

#[expect(clippy::disallowed_methods, reason = "what the macro writes is its authors' to check")]
mod running {
    use super::{Owned, Writing};
    use self_cell::self_cell;

    self_cell!(
        pub(super) struct Running {
            owner: Owned,
            #[not_covariant]
            dependent: Writing,
        }
    );
}

/// Pieces of a text that a model writes, an iterator; `Model.generate` and `Model.chat` make one.
///
/// >>> pieces = fracbit.load(demo).generate("Once", max_tokens=3, temperature=0)
/// >>> next(pieces)
/// ' upon'
/// >>> list(pieces), pieces.stop, len(pieces.tokens)
/// ([' a', ' time'], 'max_tokens', 3)
#[pyclass(frozen, module = "fracbit")]
pub(crate) struct Generation {
    running: Mutex<Running>,
}

impl Generation {
    pub(crate) fn begin(
        loaded: &Arc<Loaded>,
        tokenizer: &Arc<fracbit_io::Tokenizer>,
        prompt: &[u32],
        picking: &Picking,
    ) -> Refused<Self> {
        let &Picking { max_tokens, config, kv } = picking;
        let sampler = fracbit_cli::sampler(config, tokenizer)?;
        // A cache for the whole context may take gigabytes that this text never needs.
        let room = prompt.len().saturating_add(max_tokens).min(loaded.context());
        let options =
            EngineOptions { sequences: 1, context: room, kv: cache(kv)?, ..EngineOptions::default() };
        let owned = Owned { loaded: Arc::clone(loaded), tokenizer: Arc::clone(tokenizer) };
        let running: Refused<_> = Running::try_new(owned, |owned| {
            let Owned { loaded, tokenizer } = owned;
            let engine = Engine::new(&loaded.model, options).map_err(|error| match error {
                EngineError::Model(error) => refuse(error),
                other => refuse(fracbit_model::Error::Sequence(other.to_string())),
            })?;
            let left = Tokens::begin(engine, prompt.to_vec(), max_tokens, loaded.end_tokens.clone(), sampler);
            let stream = Some(tokenizer.stream(true));
            Ok(Writing { left: left.map_err(refuse)?, tokens: Vec::new(), stream })
        });
        Ok(Self { running: Mutex::new(running?) })
    }

    /// Waits for another thread that has the iterator compute, with the interpreter's lock
    /// released.
    fn running(&self) -> MutexGuard<'_, Running> {
        self.running.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Writing<'_> {
    /// The next piece that is not empty; `None` at the end.
    fn piece(&mut self) -> Refused<Option<String>> {
        loop {
            let Some(stream) = &mut self.stream else { return Ok(None) };
            let Some(token) = self.left.next().transpose().map_err(refuse)? else {
                let rest = self.stream.take().map(TokenStream::finish).transpose().map_err(refuse)?;
                return Ok(rest.filter(|rest| !rest.is_empty()));
            };
            self.tokens.push(token);
            let piece = stream.push(token).map_err(refuse)?;
            if !piece.is_empty() {
                return Ok(Some(piece));
            }
        }
    }
}

#[pymethods]
impl Generation {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<String>> {
        let piece = py.detach(|| self.running().with_dependent_mut(|_, writing| writing.piece()));
        piece.map_err(|refusal| raise(py, &refusal))
    }

    /// The tokens written so far.
    #[getter]
    fn tokens(&self, py: Python<'_>) -> Vec<u32> {
        let all = |_: &_, writing: &Writing<'_>| writing.tokens.clone();
        py.detach(|| self.running().with_dependent(all))
    }

    /// Why no more comes: "end" (the model ended the text), "complete" (a rule lets nothing
    /// follow), "max_tokens", "context_full" or "failed"; None while there may be more.
    #[getter]
    fn stop(&self, py: Python<'_>) -> Option<&'static str> {
        py.detach(|| {
            self.running().with_dependent(|_, writing| match writing.left.done().map(|done| done.finish) {
                Some(Finish::End(_) | Finish::Output) => Some("end"),
                Some(Finish::Complete) => Some("complete"),
                Some(Finish::MaxTokens) => Some("max_tokens"),
                Some(Finish::ContextFull) => Some("context_full"),
                None => writing.left.is_over().then_some("failed"),
            })
        })
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let stop = self.stop(py).map_or_else(|| "None".to_owned(), |stop| format!("'{stop}'"));
        format!("Generation(tokens={}, stop={stop})", self.tokens(py).len())
    }
}
