//! Texts and tokens.

use crate::errors::{Refused, argument, raise, refuse};
use fracbit_cli::Prompt;
use fracbit_io::{Bos, EncodeOptions, Message};
use pyo3::prelude::*;
use std::{path::PathBuf, sync::Arc};

/// The tokenizer of a model directory or a GGUF file.
///
/// It is read from `tokenizer.json`, `tokenizer.model`, `vocab.json` with `merges.txt`,
/// `tekken.json` or tiktoken files, and encodes as in transformers.
///
/// >>> tokenizer = fracbit.Tokenizer(demo)
/// >>> tokens = tokenizer.encode("Once upon a time")
/// >>> tokenizer.decode(tokens)
/// 'Once upon a time'
#[pyclass(frozen, module = "fracbit")]
pub(crate) struct Tokenizer(pub(crate) Arc<fracbit_io::Tokenizer>);

/// A message of a conversation: a dict with `role` and `content`.
#[derive(FromPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Said {
    role: String,
    content: String,
}

/// What somebody says first, or a conversation.
#[derive(FromPyObject)]
pub(crate) enum Conversation {
    /// One message of the user.
    One(String),
    /// All of them.
    Messages(Vec<Said>),
}

impl Conversation {
    /// Its tokens in the model's chat template, `most` at most.
    pub(crate) fn encode(
        self,
        tokenizer: &fracbit_io::Tokenizer,
        allow_special: bool,
        most: usize,
    ) -> Refused<Vec<u32>> {
        let messages: Vec<Message> = match self {
            Self::One(text) => vec![Message::new("user", text)],
            Self::Messages(said) => said.into_iter().map(|m| Message::new(m.role, m.content)).collect(),
        };
        fracbit_cli::encode(tokenizer, Prompt::Chat { messages: &messages, allow_special }, most)
    }
}

#[pymethods]
impl Tokenizer {
    #[new]
    fn new(py: Python<'_>, path: PathBuf) -> PyResult<Self> {
        let read = || {
            let quiet = Arc::new(fracbit::Quiet);
            Ok(fracbit_cli::open(&path, quiet)?.tokenizer()?)
        };
        let tokenizer: Refused<_> = py.detach(read);
        Ok(Self(Arc::new(tokenizer.map_err(|refusal| raise(py, &refusal))?)))
    }

    /// Token ids of a text.
    ///
    /// `bos` says whether BOS goes before it: None, as the tokenizer does; True, always; False,
    /// neither BOS nor any other special token.
    #[pyo3(signature = (text, *, bos=None))]
    fn encode(&self, py: Python<'_>, text: &str, bos: Option<bool>) -> PyResult<Vec<u32>> {
        let bos = match bos {
            None => Bos::AsConfigured,
            Some(true) => Bos::Always,
            Some(false) => Bos::Never,
        };
        let options = EncodeOptions { bos, ..EncodeOptions::default() };
        let tokens = py.detach(|| self.0.encode(text, options));
        tokens.map_err(|error| raise(py, &refuse(error)))
    }

    /// The text of token ids, without special tokens unless `skip_special` is False.
    #[pyo3(signature = (tokens, *, skip_special=true))]
    fn decode(&self, py: Python<'_>, tokens: Vec<u32>, skip_special: bool) -> PyResult<String> {
        let text = py.detach(|| self.0.decode(&tokens, skip_special));
        text.map_err(|error| raise(py, &refuse(error)))
    }

    /// Token ids of a conversation in the model's chat template, up to where its answer begins.
    ///
    /// `messages` is a list of dicts with `role` and `content`, or the text of one message of the
    /// user. What messages spell becomes no control token unless `allow_special` is True. Raises
    /// InputError for a model without chat template.
    #[pyo3(signature = (messages, *, allow_special=false))]
    fn chat(&self, py: Python<'_>, messages: Conversation, allow_special: bool) -> PyResult<Vec<u32>> {
        let tokens = py.detach(|| messages.encode(&self.0, allow_special, usize::MAX));
        tokens.map_err(|refusal| raise(py, &refusal))
    }

    /// The token of an id, in the tokenizer's own spelling.
    fn token(&self, py: Python<'_>, id: u32) -> PyResult<String> {
        let rule = || argument("id", format_args!("should be below {}, got {id}", self.0.vocab_size()));
        self.0.token(id).ok_or_else(|| raise(py, &rule()))
    }

    /// Number of tokens, special ones included; may be less than the rows of the embedding.
    #[getter]
    fn vocab_size(&self) -> usize {
        self.0.vocab_size()
    }

    /// The token that begins a text, if there is one.
    #[getter]
    fn bos_id(&self) -> Option<u32> {
        self.0.bos_id()
    }

    /// The tokens that end a text, sorted.
    #[getter]
    fn eos_ids(&self) -> Vec<u32> {
        self.0.eos_ids().to_vec()
    }

    fn __len__(&self) -> usize {
        self.0.vocab_size()
    }

    fn __repr__(&self) -> String {
        format!("Tokenizer(vocab_size={})", self.0.vocab_size())
    }
}
