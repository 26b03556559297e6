//! Text as an iterator.

use crate::{
    errors::{Refused, raise, refuse},
    model::{Loaded, cache},
};
use fracbit_io::TokenStream;
use fracbit_model::{GenerateOptions, SampleConfig, Sampler, State, StateOptions, Stop};
use pyo3::prelude::*;
use running::Running;
use self_cell::MutBorrow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// How tokens are picked, and how many.
pub(crate) struct Picking {
    pub(crate) max_tokens: usize,
    pub(crate) temperature: f32,
    pub(crate) top_k: usize,
    pub(crate) top_p: f32,
    pub(crate) min_p: f32,
    pub(crate) repetition_penalty: f32,
    pub(crate) seed: u64,
    pub(crate) kv: u32,
}

/// What a generation borrows from.
struct Owned {
    loaded: Arc<Loaded>,
    tokenizer: Arc<fracbit_io::Tokenizer>,
    state: State,
    sampler: Sampler,
}

/// A generation and the text of its tokens; the stream is `None` once it has ended.
struct Writing<'a> {
    generation: fracbit_model::Generation<'a>,
    stream: Option<TokenStream<'a>>,
}

#[expect(clippy::disallowed_methods, reason = "what the macro writes is its authors' to check")]
mod running {
    use super::{Owned, Writing};
    use self_cell::{MutBorrow, self_cell};

    self_cell!(
        pub(super) struct Running {
            owner: MutBorrow<Owned>,
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
    /// Tokens of the prompt.
    prompt: usize,
}

impl Generation {
    pub(crate) fn begin(
        loaded: &Arc<Loaded>,
        tokenizer: &Arc<fracbit_io::Tokenizer>,
        prompt: &[u32],
        picking: &Picking,
    ) -> Refused<Self> {
        let &Picking { max_tokens, temperature, top_k, top_p, min_p, repetition_penalty, seed, kv } = picking;
        let config = SampleConfig { temperature, top_k, top_p, min_p, repetition_penalty, seed };
        let sampler = Sampler::new(config).map_err(refuse)?;
        // A cache for the whole context may take gigabytes that this text never needs.
        let room = prompt.len().saturating_add(max_tokens).min(loaded.context());
        let options = StateOptions { context: Some(room), kv: cache(kv)?, ..StateOptions::default() };
        let state = loaded.model.state(&options);
        let (loaded, tokenizer) = (Arc::clone(loaded), Arc::clone(tokenizer));
        let owned = MutBorrow::new(Owned { loaded, tokenizer, state, sampler });
        let running: Refused<_> = Running::try_new(owned, |owned| {
            let Owned { loaded, tokenizer, state, sampler } = owned.borrow_mut();
            let options = GenerateOptions {
                max_tokens: Some(max_tokens),
                end_tokens: loaded.end_tokens.clone(),
                ..GenerateOptions::default()
            };
            let generation = fracbit_model::Generation::new(&loaded.model, state, sampler, prompt, options);
            Ok(Writing { generation: generation.map_err(refuse)?, stream: Some(tokenizer.stream(true)) })
        });
        Ok(Self { running: Mutex::new(running?), prompt: prompt.len() })
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
            let Some(token) = self.generation.next() else {
                let rest = self.stream.take().map(TokenStream::finish).transpose().map_err(refuse)?;
                return Ok(rest.filter(|rest| !rest.is_empty()));
            };
            let piece = stream.push(token.map_err(refuse)?).map_err(refuse)?;
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
        let all = |_: &_, writing: &Writing<'_>| writing.generation.tokens()[self.prompt..].to_vec();
        py.detach(|| self.running().with_dependent(all))
    }

    /// Why no more comes: "end" (the model ended the text), "complete" (a rule lets nothing
    /// follow), "max_tokens", "context_full" or "failed"; None while there may be more.
    #[getter]
    fn stop(&self, py: Python<'_>) -> Option<&'static str> {
        let stop = py.detach(|| self.running().with_dependent(|_, writing| writing.generation.stop()));
        stop.map(|stop| match stop {
            Stop::End(_) => "end",
            Stop::Complete => "complete",
            Stop::MaxTokens => "max_tokens",
            Stop::ContextFull => "context_full",
            Stop::Failed => "failed",
        })
    }

    fn __repr__(&self, py: Python<'_>) -> String {
        let stop = self.stop(py).map_or_else(|| "None".to_owned(), |stop| format!("'{stop}'"));
        format!("Generation(tokens={}, stop={stop})", self.tokens(py).len())
    }
}
