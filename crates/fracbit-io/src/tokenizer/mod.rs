//! Text to token ids and back, through the `tokenizers` crate behind a fence.
//!
//! `tokenizers` 0.23 is correct on the files that models come with and panics on files made to hurt
//! (four of six kinds we tried; its issues 2094 and 2198). So a file passes the checks of the
//! `precheck` module first, and every call into the crate runs under `catch_unwind`. That needs
//! panics to unwind: in a program built with `panic = "abort"` only the checks remain.
//!
//! **The leading space.** Llama-family tokenizers prepend U+2581 to every text, because
//! sentencepiece trained them so. Some models were trained without it after BOS
//! (`TinyStories-656K`: 2.80 nats per token without, 3.06 with) although their tokenizer file says
//! otherwise. [`PrefixSpace::Drop`] tokenizes as if the file did not ask for the prefix.

mod bpe;
mod bytes;
mod control;
mod conversation;
mod other;
mod precheck;
mod settings;
mod spm;
mod stream;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

pub use conversation::{Ending, Rendered};
pub use stream::TokenStream;

use crate::chat::ChatTemplate;
use crate::error::Error;
use settings::{Settings, Template};

/// File name of the tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";
/// File name of the tokenizer's settings.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// File name of the chat template, where it is not in the settings.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
/// All files that a tokenizer and its templates are read from, where they are there; `*.tiktoken`
/// as well.
pub const FILES: [&str; 11] = [
    TOKENIZER,
    TOKENIZER_CONFIG,
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "tekken.json",
    CHAT_TEMPLATE,
    "chat_template.json",
    "processor_config.json",
];
const MAX_TOKENIZER: u64 = 256 << 20;

/// What goes before the text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Bos {
    /// What the tokenizer's files say: its post-processor, and `add_bos_token`.
    #[default]
    AsConfigured,
    /// BOS, and no other special token.
    Always,
    /// No special token. For text that contains its own, such as a rendered chat template.
    Never,
}

/// Whether to follow a tokenizer that puts a space before every text.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum PrefixSpace {
    /// As the file says.
    #[default]
    Keep,
    /// Without the prefix, whatever the file says.
    Drop,
}

/// How to encode.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub struct EncodeOptions {
    /// What goes before the text.
    pub bos: Bos,
    /// The leading space.
    pub prefix_space: PrefixSpace,
}

/// A tokenizer with the settings of its model directory.
pub struct Tokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
    /// The same without the prefix, made when first asked for; `None` inside when the file asks for
    /// no prefix.
    unprefixed: OnceLock<Result<Option<Box<tokenizers::Tokenizer>>, String>>,
    /// Ids of the special tokens, sorted.
    special_ids: Vec<u32>,
    /// The same with other names for control tokens, made when first asked for.
    guarded: OnceLock<Result<control::Guarded, String>>,
    /// What its tokens say of bytes, made when first asked for.
    spelling: OnceLock<bytes::Spelling>,
    settings: Settings,
    templates: Vec<Template>,
    notes: Vec<String>,
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("path", &self.path)
            .field("settings", &self.settings)
            .finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// Reads the text of a `tokenizer.json` without settings; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, Error> {
        let bad = |rule: String| Error::Tokenizer { path: path.to_owned(), rule };
        let inner = match bpe::load(bytes) {
            Some(t) => t,
            None => {
                precheck::check(bytes).map_err(bad)?;
                load_with_crate(bytes).map_err(bad)?
            }
        };
        let mut t = Self {
            path: path.to_owned(),
            inner,
            unprefixed: OnceLock::new(),
            special_ids: Vec::new(),
            guarded: OnceLock::new(),
            spelling: OnceLock::new(),
            settings: Settings::default(),
            templates: Vec::new(),
            notes: Vec::new(),
        };
        t.find_special();
        Ok(t)
    }

    /// After added tokens have changed.
    fn find_special(&mut self) {
        let added = self.inner.get_added_tokens_decoder();
        self.special_ids = added.iter().filter(|(_, t)| t.special).map(|(id, _)| *id).collect();
        self.special_ids.sort_unstable();
    }

    /// Token ids of `text`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] when the tokenizer fails, or BOS is asked for and not known.
    pub fn encode(&self, text: &str, options: EncodeOptions) -> Result<Vec<u32>, Error> {
        let tokenizer = match options.prefix_space {
            PrefixSpace::Keep => &self.inner,
            PrefixSpace::Drop => self.unprefixed()?.unwrap_or(&self.inner),
        };
        let special = options.bos == Bos::AsConfigured;
        let encoding = guard(|| tokenizer.encode_fast(text, special)).map_err(|rule| self.bad(rule))?;
        let mut ids = encoding.get_ids().to_vec();
        let has_bos = |ids: &[u32]| self.bos_id().is_some_and(|b| ids.first() == Some(&b));
        match (options.bos, self.settings.add_bos) {
            (Bos::Always, _) => {
                let bos = self.bos_id().ok_or_else(|| self.bad("should define a BOS token".to_owned()))?;
                ids.insert(0, bos);
            }
            // The post-processor of the file and `add_bos_token` may differ; the Hugging Face
            // classes follow the latter.
            (Bos::AsConfigured, Some(true)) if !has_bos(&ids) => {
                if let Some(bos) = self.bos_id() {
                    ids.insert(0, bos);
                }
            }
            (Bos::AsConfigured, Some(false)) if has_bos(&ids) && !self.starts_with_bos(text) => {
                ids.remove(0);
            }
            _ => {}
        }
        Ok(ids)
    }

    /// Token ids of a text that is whole, and not to be continued: EOS stands behind it where
    /// `add_eos_token` or the post-processor says so.
    ///
    /// # Errors
    /// As for [`Tokenizer::encode`].
    pub fn encode_whole(&self, text: &str) -> Result<Vec<u32>, Error> {
        let mut ids = self.encode(text, EncodeOptions::default())?;
        let eos = self.settings.eos.as_ref().filter(|_| self.settings.add_eos).map(|(_, id)| *id);
        if let Some(eos) = eos.filter(|eos| ids.last() != Some(eos)) {
            ids.push(eos);
        }
        Ok(ids)
    }

    /// Text of token ids. Ids beyond the vocabulary (padding rows of the embedding) give nothing.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        if !skip_special {
            return guard(|| self.inner.decode(ids, false)).map_err(|rule| self.bad(rule));
        }
        // By id: the crate compares texts, and misses a special token that its own normalizer
        // changes (TinyStories-656K's BOS).
        let plain: Vec<u32> =
            ids.iter().copied().filter(|id| self.special_ids.binary_search(id).is_err()).collect();
        guard(|| self.inner.decode(&plain, true)).map_err(|rule| self.bad(rule))
    }

    /// A decoder for tokens that come one by one.
    #[must_use]
    pub fn stream(&self, skip_special: bool) -> TokenStream<'_> {
        TokenStream::new(self, skip_special)
    }

    /// Id of a token, special ones included.
    #[must_use]
    pub fn token_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token of an id, in the tokenizer's own spelling.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The text of a special token; `None` for others.
    #[must_use]
    pub fn special_text(&self, id: u32) -> Option<String> {
        self.special_ids.binary_search(&id).is_ok().then(|| self.token(id)).flatten()
    }

    /// Number of tokens, special ones included. May be less than the rows of the embedding.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The token that begins a text.
    #[must_use]
    pub fn bos_id(&self) -> Option<u32> {
        self.settings.bos.as_ref().map(|b| b.1)
    }

    /// Text of the token that begins a text.
    #[must_use]
    pub fn bos_token(&self) -> Option<&str> {
        self.settings.bos.as_ref().map(|b| b.0.as_str())
    }

    /// Text of the token that ends a text.
    #[must_use]
    pub fn eos_token(&self) -> Option<&str> {
        self.settings.eos.as_ref().map(|b| b.0.as_str())
    }

    /// The tokens that end a text, sorted.
    #[must_use]
    pub fn eos_ids(&self) -> &[u32] {
        &self.settings.eos_ids
    }

    /// Texts of the special tokens that have a name, such as `bos_token`: what a chat template
    /// gets.
    #[must_use]
    pub fn special_tokens(&self) -> BTreeMap<String, String> {
        let mut tokens = self.settings.special.clone();
        for (name, token) in [("bos_token", &self.settings.bos), ("eos_token", &self.settings.eos)] {
            if let Some((text, _)) = token {
                tokens.entry(name.to_owned()).or_insert_with(|| text.clone());
            }
        }
        tokens
    }

    /// What the files say that is not followed, a sentence each.
    #[must_use]
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// The chat template, where there is one; of several the one called `default`.
    ///
    /// # Errors
    /// [`Error::Config`] naming the file of a template that does not compile, or of several without
    /// a default.
    pub fn chat_template(&self) -> Result<Option<&ChatTemplate>, Error> {
        self.template_for("default")
    }

    /// The text of the chat template, as it stands in its file.
    #[must_use]
    pub fn chat_template_source(&self) -> Option<&str> {
        let named = self.templates.iter().find(|template| template.name == "default");
        named.or(self.templates.first()).map(|template| template.source.as_str())
    }

    /// The tokenizer as the text of a `tokenizer.json`.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn to_json(&self) -> Result<String, Error> {
        guard(|| self.inner.to_string(false)).map_err(|rule| self.bad(rule))
    }

    fn starts_with_bos(&self, text: &str) -> bool {
        self.bos_token().is_some_and(|b| text.starts_with(b))
    }

    fn unprefixed(&self) -> Result<Option<&tokenizers::Tokenizer>, Error> {
        let made = self.unprefixed.get_or_init(|| {
            let json = guard(|| self.inner.to_string(false))?;
            let mut v: Value = serde_json::from_str(&json).map_err(|e| e.to_string())?;
            if !drop_prefix(&mut v) {
                return Ok(None);
            }
            load(v.to_string().as_bytes()).map(|t| Some(Box::new(t)))
        });
        match made {
            Ok(t) => Ok(t.as_deref()),
            Err(rule) => Err(self.bad(rule.clone())),
        }
    }

    fn bad(&self, rule: String) -> Error {
        Error::Tokenizer { path: self.path.clone(), rule }
    }
}

/// Loads what has passed the checks.
fn load(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    bpe::load(bytes).map_or_else(|| load_with_crate(bytes), Ok)
}

fn load_with_crate(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let mut t = guard(|| tokenizers::Tokenizer::from_bytes(bytes))?;
    // Settings of someone's training batch; a text must come through whole.
    guard(|| t.with_truncation(None).map(|_| ()))?;
    t.with_padding(None);
    Ok(t)
}

/// Runs a call into `tokenizers`, turning both its errors and its panics into text.
fn guard<T>(f: impl FnOnce() -> Result<T, tokenizers::Error>) -> Result<T, String> {
    // Unwind safety: after a panic the value is dropped (loading) or read again; its only interior
    // state is a cache of merges behind a lock that the crate takes with `try_read`/`try_write`, so
    // a poisoned one is a cache that is not used.
    match catch_unwind(AssertUnwindSafe(f)) {
        Ok(Ok(v)) => Ok(v),
        Ok(Err(e)) => Err(format!("should be a valid tokenizer: {e}")),
        Err(panic) => {
            let text =
                panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
            Err(format!(
                "should be a valid tokenizer: the tokenizers crate panicked ({})",
                text.unwrap_or("no message")
            ))
        }
    }
}

/// Removes everything that puts a space before a text; false when there was nothing.
fn drop_prefix(v: &mut Value) -> bool {
    fn walk(v: &mut Value) -> bool {
        let mut changed = false;
        match v {
            Value::Array(items) => {
                let before = items.len();
                items.retain(|i| !is_prepend(i));
                changed |= items.len() != before;
                for i in items {
                    changed |= walk(i);
                }
            }
            Value::Object(map) => {
                if map.get("prepend_scheme").is_some_and(|s| s != "never") {
                    map.insert("prepend_scheme".to_owned(), "never".into());
                    changed = true;
                }
                if map.get("add_prefix_space") == Some(&Value::Bool(true)) {
                    map.insert("add_prefix_space".to_owned(), false.into());
                    changed = true;
                }
                for (_, child) in map.iter_mut() {
                    changed |= walk(child);
                }
            }
            _ => {}
        }
        changed
    }
    fn is_prepend(v: &Value) -> bool {
        v.get("type").and_then(Value::as_str) == Some("Prepend")
    }
    let mut changed = false;
    for part in ["normalizer", "pre_tokenizer"] {
        if let Some(v) = v.get_mut(part) {
            if is_prepend(v) {
                *v = Value::Null;
                changed = true;
            } else {
                changed |= walk(v);
            }
        }
    }
    changed
}
