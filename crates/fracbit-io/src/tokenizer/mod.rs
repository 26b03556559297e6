//! Text to token ids and back, through the `tokenizers` crate behind a fence.
//!
//! `tokenizers` 0.23 is correct on the files that models come with and panics on files made to hurt (four of six kinds we
//! tried; its issues 2094 and 2198). So a file passes the checks of the `precheck` module first, and every call into the crate runs under
//! `catch_unwind`. That needs panics to unwind: in a program built with `panic = "abort"` only the checks remain.
//!
//! **The leading space.** Llama-family tokenizers prepend U+2581 to every text, because sentencepiece trained them so. Some models were
//! trained without it after BOS (`TinyStories-656K`: 2.80 nats per token without, 3.06 with) although their tokenizer file
//! says otherwise. [`PrefixSpace::Drop`] tokenizes as if the file did not ask for the prefix.

mod precheck;
mod stream;

use std::collections::BTreeMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::Value;

pub use stream::TokenStream;

use crate::chat::{ChatTemplate, Message, RenderOptions};
use crate::config::{ModelConfig, clip};
use crate::error::{Error, read_limited, read_optional};
use crate::gguf::{Gguf, is_gguf};

/// File name of the tokenizer.
pub const TOKENIZER: &str = "tokenizer.json";
/// File name of the tokenizer's settings.
pub const TOKENIZER_CONFIG: &str = "tokenizer_config.json";
/// File name of the chat template, where it is not in the settings.
pub const CHAT_TEMPLATE: &str = "chat_template.jinja";
const MAX_TOKENIZER: u64 = 256 << 20;
const MAX_TOKENIZER_CONFIG: u64 = 16 << 20;

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
    /// The same without the prefix, made when first asked for; `None` inside when the file asks for no prefix.
    unprefixed: OnceLock<Result<Option<Box<tokenizers::Tokenizer>>, String>>,
    /// Ids of the special tokens, sorted.
    special_ids: Vec<u32>,
    settings: Settings,
    template: Option<Template>,
}

/// A chat template that is compiled when it is first asked for: a text can be continued whatever is wrong with it.
#[derive(Debug)]
struct Template {
    /// The file that holds it.
    path: PathBuf,
    source: String,
    compiled: OnceLock<Result<ChatTemplate, String>>,
}

#[derive(Debug, Default)]
struct Settings {
    bos: Option<(String, u32)>,
    eos: Option<(String, u32)>,
    eos_ids: Vec<u32>,
    add_bos: Option<bool>,
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
    /// Reads `tokenizer.json`, `tokenizer_config.json` and `chat_template.jinja` of a directory, the last two where present, or
    /// the same from the metadata of a GGUF file.
    /// Token ids of `config` fill in what the settings leave out, and add to the tokens that end a text.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming file and rule, [`Error::Json`], [`Error::Config`], [`Error::Io`].
    pub fn from_dir(dir: impl AsRef<Path>, config: Option<&ModelConfig>) -> Result<Self, Error> {
        let dir = dir.as_ref();
        let mut t = if is_gguf(dir) { Gguf::open(dir)?.read_tokenizer()? } else { Self::of_files(dir)? };
        if let Some(c) = config {
            let named = |id: Option<u32>| id.and_then(|id| Some((t.token(id)?, id)));
            let (bos, eos) = (named(c.bos_token_id), named(c.eos_token_ids.first().copied()));
            t.settings.bos = t.settings.bos.take().or(bos);
            t.settings.eos = t.settings.eos.take().or(eos);
            t.settings.eos_ids.extend(&c.eos_token_ids);
            t.settings.eos_ids.sort_unstable();
            t.settings.eos_ids.dedup();
        }
        Ok(t)
    }

    fn of_files(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(TOKENIZER);
        let mut t = Self::parse(&read_limited(&path, MAX_TOKENIZER)?, &path)?;
        let path = dir.join(TOKENIZER_CONFIG);
        let settings = read_optional(&path, MAX_TOKENIZER_CONFIG)?;
        let template = read_optional(&dir.join(CHAT_TEMPLATE), MAX_TOKENIZER_CONFIG)?;
        t.apply_settings(settings.as_deref().unwrap_or(b"{}"), &path, template.as_deref())?;
        Ok(t)
    }

    /// Reads the text of a `tokenizer.json` without settings; `path` is for messages.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, Error> {
        let bad = |rule: String| Error::Tokenizer { path: path.to_owned(), rule };
        precheck::check(bytes).map_err(bad)?;
        let inner = load(bytes).map_err(bad)?;
        let mut special_ids: Vec<u32> =
            inner.get_added_tokens_decoder().iter().filter(|(_, t)| t.special).map(|(id, _)| *id).collect();
        special_ids.sort_unstable();
        Ok(Self {
            path: path.to_owned(),
            inner,
            unprefixed: OnceLock::new(),
            special_ids,
            settings: Settings::default(),
            template: None,
        })
    }

    /// Takes special tokens and the chat template from the text of a `tokenizer_config.json`; a `template` file wins.
    ///
    /// # Errors
    /// As for [`Tokenizer::from_dir`].
    pub fn apply_settings(
        &mut self,
        settings: &[u8],
        path: &Path,
        template: Option<&[u8]>,
    ) -> Result<(), Error> {
        let v: serde_json::Map<String, Value> = serde_json::from_slice(settings).map_err(|e| {
            Error::Json { path: path.to_owned(), what: "a JSON object", detail: e.to_string() }
        })?;
        let bad = |field: &str, rule: String| Error::Config {
            path: path.to_owned(),
            field: field.to_owned(),
            rule,
        };
        let special = |field: &str| -> Result<Option<(String, u32)>, Error> {
            let text = match v.get(field) {
                None | Some(Value::Null) => return Ok(None),
                // Early conversions of Llama have it so; what it should be is in config.json.
                Some(Value::String(s)) if s.is_empty() => return Ok(None),
                Some(Value::String(s)) => s,
                Some(Value::Object(o)) if o.get("content").is_some_and(Value::is_string) => {
                    o.get("content").and_then(Value::as_str).unwrap_or_default()
                }
                Some(_) => {
                    return Err(bad(field, "should be a string or an object with `content`".to_owned()));
                }
            };
            let id = self.token_id(text);
            let id =
                id.ok_or_else(|| bad(field, format!("should be in the vocabulary, got `{}`", clip(text))))?;
            Ok(Some((text.to_owned(), id)))
        };
        let (bos, eos) = (special("bos_token")?, special("eos_token")?);
        let add_bos = match v.get("add_bos_token") {
            None | Some(Value::Null) => None,
            Some(Value::Bool(b)) => Some(*b),
            Some(_) => return Err(bad("add_bos_token", "should be true or false".to_owned())),
        };
        let source = match template {
            Some(bytes) => Some(
                std::str::from_utf8(bytes)
                    .map_err(|e| Error::Template(format!("`{CHAT_TEMPLATE}` should be UTF-8: {e}")))?
                    .to_owned(),
            ),
            None => template_in(&v).map_err(|rule| bad("chat_template", rule))?,
        };
        let origin = if template.is_some() { path.with_file_name(CHAT_TEMPLATE) } else { path.to_owned() };
        self.template = source.map(|source| Template { path: origin, source, compiled: OnceLock::new() });
        self.settings.eos_ids = eos.iter().map(|(_, id)| *id).collect();
        (self.settings.bos, self.settings.eos, self.settings.add_bos) = (bos, eos, add_bos);
        Ok(())
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
            // The post-processor of the file and `add_bos_token` may differ; the Hugging Face classes follow the latter.
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

    /// Text of token ids. Ids beyond the vocabulary (padding rows of the embedding) give nothing.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, Error> {
        if !skip_special {
            return guard(|| self.inner.decode(ids, false)).map_err(|rule| self.bad(rule));
        }
        // By id: the crate compares texts, and misses a special token that its own normalizer changes (TinyStories-656K's BOS).
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

    /// The chat template, where the model has one; compiled by the first call.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming the file, and line and reason why it does not compile.
    pub fn chat_template(&self) -> Result<Option<&ChatTemplate>, Error> {
        let Some(template) = &self.template else { return Ok(None) };
        let compiled =
            template.compiled.get_or_init(|| ChatTemplate::new(&template.source).map_err(|e| e.to_string()));
        match compiled {
            Ok(compiled) => Ok(Some(compiled)),
            Err(rule) => Err(Error::Tokenizer { path: template.path.clone(), rule: rule.clone() }),
        }
    }

    /// Tokens of a conversation in the chat template, up to where the model's answer begins; `None` where the model has no template. `variables` are
    /// those of the template besides the messages, such as `enable_thinking`.
    ///
    /// # Errors
    /// [`Error::Template`] when the template refuses the messages; otherwise as for [`Tokenizer::chat_template`] and
    /// [`Tokenizer::encode`].
    pub fn conversation(
        &self,
        messages: &[Message],
        variables: &BTreeMap<String, Value>,
    ) -> Result<Option<Vec<u32>>, Error> {
        let Some(template) = self.chat_template()? else { return Ok(None) };
        let options = RenderOptions {
            add_generation_prompt: true,
            bos_token: self.bos_token(),
            eos_token: self.eos_token(),
            extra: variables.clone(),
            ..RenderOptions::default()
        };
        let text = template.render(messages, &options)?;
        // The template writes its special tokens itself.
        self.encode(&text, EncodeOptions { bos: Bos::Never, prefix_space: PrefixSpace::Keep }).map(Some)
    }

    /// The text of the chat template, as it stands in its file.
    #[must_use]
    pub fn chat_template_source(&self) -> Option<&str> {
        self.template.as_ref().map(|template| template.source.as_str())
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

fn load(bytes: &[u8]) -> Result<tokenizers::Tokenizer, String> {
    let mut t = guard(|| tokenizers::Tokenizer::from_bytes(bytes))?;
    // Settings of someone's training batch; a text must come through whole.
    guard(|| t.with_truncation(None).map(|_| ()))?;
    t.with_padding(None);
    Ok(t)
}

/// Runs a call into `tokenizers`, turning both its errors and its panics into text.
fn guard<T>(f: impl FnOnce() -> Result<T, tokenizers::Error>) -> Result<T, String> {
    // Unwind safety: after a panic the value is dropped (loading) or read again; its only interior state is a cache of merges
    // behind a lock that the crate takes with `try_read`/`try_write`, so a poisoned one is a cache that is not used.
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

/// `chat_template`: a string, or a list of named ones of which `default` is taken, else the first.
fn template_in(v: &serde_json::Map<String, Value>) -> Result<Option<String>, String> {
    match v.get("chat_template") {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(s)) => Ok(Some(s.clone())),
        Some(Value::Array(list)) => {
            let named = |t: &&Value| t.get("name").and_then(Value::as_str) == Some("default");
            let Some(chosen) = list.iter().find(named).or(list.first()) else { return Ok(None) };
            match chosen.get("template").and_then(Value::as_str) {
                Some(s) => Ok(Some(s.to_owned())),
                None => Err("entries should be {name, template}".to_owned()),
            }
        }
        Some(_) => Err("should be a string or a list of {name, template}".to_owned()),
    }
}
