//! What stands beside a tokenizer: special tokens, added tokens, chat templates.
//!
//! The files and their ranks are those of transformers (5.24,
//! `PreTrainedTokenizerBase._from_pretrained`): `tokenizer_config.json`; its `added_tokens_decoder`
//! adds tokens and changes the flags of those that are there. Only without it
//! `special_tokens_map.json` counts, before the settings, and `added_tokens.json`. Templates are in
//! `chat_template.jinja`, else in the settings, else where processors of images keep theirs
//! (`chat_template.json`, `processor_config.json`).
//!
//! We deviate in two points. `add_bos_token` is followed where it is there, as transformers did
//! until version 5 (with a note where `tokenizer.json` says otherwise); a prompt that is to be
//! continued has no EOS behind it, whatever `add_eos_token` says. And a token whose number is not
//! the one that its file gives it is an error there, where transformers gives it the next free one.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use serde_json::{Map, Value};
use tokenizers::AddedToken;

use super::{CHAT_TEMPLATE, MAX_TOKENIZER, TOKENIZER, TOKENIZER_CONFIG, Tokenizer, guard, other};
use crate::chat::ChatTemplate;
use crate::config::{ModelConfig, clip};
use crate::error::{Error, read_limited, read_optional};
use crate::gguf::{Gguf, is_gguf};
use crate::json;

const MAX_TOKENIZER_CONFIG: u64 = 16 << 20;

/// A chat template that is compiled when it is first asked for: a text can be continued whatever is
/// wrong with it.
#[derive(Debug)]
pub(super) struct Template {
    pub(super) name: String,
    /// The file that holds it.
    path: PathBuf,
    pub(super) source: String,
    compiled: OnceLock<Result<ChatTemplate, String>>,
}

/// Special tokens by name.
#[derive(Debug, Default)]
pub(super) struct Settings {
    pub(super) bos: Option<(String, u32)>,
    pub(super) eos: Option<(String, u32)>,
    pub(super) eos_ids: Vec<u32>,
    pub(super) add_bos: Option<bool>,
    pub(super) add_eos: bool,
    /// Texts of all that have a name ending in `_token`.
    pub(super) special: BTreeMap<String, String>,
}

/// A setting that cannot be followed.
fn bad(path: &Path, field: &str, rule: impl Into<String>) -> Error {
    Error::Config { path: path.to_owned(), field: field.to_owned(), rule: rule.into() }
}

/// The text of a token that is a string or an object with `content`.
fn content(token: &Value) -> Option<&str> {
    token.as_str().or_else(|| token.get("content")?.as_str())
}

fn optional(path: &Path) -> Result<Option<Map<String, Value>>, Error> {
    read_optional(path, MAX_TOKENIZER_CONFIG)?.map(|bytes| json::object(&bytes, path)).transpose()
}

impl Tokenizer {
    /// Reads the tokenizer of a directory: `tokenizer.json`, or what models have in its place
    /// (`tokenizer.model`, `vocab.json` with `merges.txt`, `tekken.json`, `*.tiktoken`), and the
    /// settings and templates beside it ([`super::FILES`]). Token ids of `config` fill in what the
    /// settings leave out, and add to the tokens that end a text.
    ///
    /// # Errors
    /// [`Error::Tokenizer`] naming file and rule, [`Error::Json`], [`Error::Config`],
    /// [`Error::Io`].
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
        let settings_path = dir.join(TOKENIZER_CONFIG);
        let mut settings = optional(&settings_path)?.unwrap_or_default();
        let mut notes = Vec::new();
        let complete = settings.contains_key("added_tokens_decoder");
        let map_path = dir.join("special_tokens_map.json");
        for (name, token) in optional(&map_path)?.into_iter().flatten() {
            let known = settings.get(&name).and_then(content);
            if !complete {
                settings.insert(name, token);
            } else if matches!(name.as_str(), "bos_token" | "eos_token") && known != content(&token) {
                notes.push(format!(
                    "`{}`: `{name}` is not followed: `{TOKENIZER_CONFIG}` has `added_tokens_decoder` and says it all",
                    map_path.display()
                ));
            }
        }
        let path = dir.join(TOKENIZER);
        let mut raw_added = false;
        let mut t = match read_optional(&path, MAX_TOKENIZER)? {
            Some(bytes) => Self::parse(&bytes, &path)?,
            None => match other::read(dir, &settings)? {
                Some(made) => {
                    for (name, token) in made.special {
                        settings.entry(name).or_insert(token);
                    }
                    raw_added = made.raw_added;
                    let class = settings.get("tokenizer_class").and_then(Value::as_str).unwrap_or_default();
                    if ["Llama", "Gemma"].iter().any(|family| class.starts_with(family)) {
                        settings.entry("add_bos_token").or_insert(true.into());
                    }
                    Self::parse(made.json.to_string().as_bytes(), &made.path)?
                }
                // For the message.
                None => Self::parse(&read_limited(&path, MAX_TOKENIZER)?, &path)?,
            },
        };
        t.notes = notes;
        if !complete {
            let path = dir.join("added_tokens.json");
            if let Some(listed) = optional(&path)? {
                t.add_listed(&listed, &settings, &path)?;
            }
        }
        let template = read_optional(&dir.join(CHAT_TEMPLATE), MAX_TOKENIZER_CONFIG)?;
        t.apply(&settings, &settings_path, template.as_deref(), raw_added)?;
        if t.templates.is_empty() {
            for name in ["chat_template.json", "processor_config.json"] {
                let path = dir.join(name);
                if let Some(document) = optional(&path)?
                    && t.templates.is_empty()
                {
                    t.templates = templates_in(&document, &path)?;
                }
            }
        }
        Ok(t)
    }

    /// Takes special and added tokens and the chat template from the text of a
    /// `tokenizer_config.json`; a `template` file wins.
    ///
    /// # Errors
    /// As for [`Tokenizer::from_dir`].
    pub fn apply_settings(
        &mut self,
        settings: &[u8],
        path: &Path,
        template: Option<&[u8]>,
    ) -> Result<(), Error> {
        self.apply(&json::object(settings, path)?, path, template, false)
    }

    fn apply(
        &mut self,
        settings: &Map<String, Value>,
        path: &Path,
        template: Option<&[u8]>,
        raw_added: bool,
    ) -> Result<(), Error> {
        self.add_described(settings, path, raw_added)?;
        let token = |field: &str| -> Result<Option<(String, u32)>, Error> {
            let text = match settings.get(field) {
                None | Some(Value::Null) => return Ok(None),
                Some(v) => content(v)
                    .ok_or_else(|| bad(path, field, "should be a string or an object with `content`"))?,
            };
            // Early conversions of Llama have it so; what it should be is in config.json.
            if text.is_empty() {
                return Ok(None);
            }
            let id = self.token_id(text);
            let id = id.ok_or_else(|| {
                bad(path, field, format!("should be in the vocabulary, got `{}`", clip(text)))
            })?;
            Ok(Some((text.to_owned(), id)))
        };
        let (bos, eos) = (token("bos_token")?, token("eos_token")?);
        let flag = |field: &str| match settings.get(field) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Bool(b)) => Ok(Some(*b)),
            Some(_) => Err(bad(path, field, "should be true or false")),
        };
        let add_bos = flag("add_bos_token")?;
        let add_eos = flag("add_eos_token")? == Some(true);
        if add_eos {
            self.notes.push(format!(
                "`{}`: `add_eos_token` is not followed: a prompt that is to be continued does not end",
                path.display()
            ));
        }
        let mut special = BTreeMap::new();
        let models_own = settings.get("extra_special_tokens").and_then(Value::as_object);
        for (name, token) in settings.iter().chain(models_own.into_iter().flatten()) {
            let ours = models_own.is_some_and(|own| own.contains_key(name)) || name.ends_with("_token");
            if let Some(text) = content(token).filter(|text| ours && !text.is_empty()) {
                special.insert(name.clone(), text.to_owned());
            }
        }
        self.templates = match template {
            Some(bytes) => {
                let source = std::str::from_utf8(bytes)
                    .map_err(|e| Error::Template(format!("`{CHAT_TEMPLATE}` should be UTF-8: {e}")))?;
                let path = path.with_file_name(CHAT_TEMPLATE);
                vec![Template::new("default", &path, source)]
            }
            None => templates_in(settings, path)?,
        };
        let eos_ids = eos.iter().map(|(_, id)| *id).collect();
        self.settings = Settings { bos, eos, eos_ids, add_bos, add_eos, special };
        let begins = self.begins_with_bos();
        if let (Some(begins), Some(add)) = (begins, add_bos)
            && begins != add
        {
            self.notes.push(format!(
                "`{}`: `add_bos_token`: {add} is followed, `{}` says otherwise",
                path.display(),
                self.path.display()
            ));
        }
        Ok(())
    }

    /// Whether the tokenizer itself puts BOS before a text; `None` where it has nothing to say.
    fn begins_with_bos(&self) -> Option<bool> {
        let bos = self.bos_id()?;
        self.inner.get_post_processor()?;
        let ids = guard(|| self.inner.encode_fast("a", true)).ok()?;
        Some(ids.get_ids().first() == Some(&bos))
    }

    /// The tokens of `added_tokens_decoder`, and those that have no entry there but a name or a
    /// place among the special ones.
    fn add_described(&mut self, settings: &Map<String, Value>, path: &Path, raw: bool) -> Result<(), Error> {
        const DECODER: &str = "added_tokens_decoder";
        let mut tokens: Vec<(Option<u32>, AddedToken)> = Vec::new();
        match settings.get(DECODER) {
            None | Some(Value::Null) => {}
            Some(Value::Object(decoder)) => {
                for (id, token) in decoder {
                    let rule = || {
                        bad(
                            path,
                            DECODER,
                            format!("should map token ids to {{content, ...}}, got `{}`", clip(id)),
                        )
                    };
                    let id = id.parse::<u32>().map_err(|_| rule())?;
                    let token = token.as_object().ok_or_else(rule)?;
                    let mut made = added(token).ok_or_else(rule)?;
                    made.normalized &= !raw;
                    tokens.push((Some(id), made));
                }
            }
            Some(_) => return Err(bad(path, DECODER, "should be an object")),
        }
        tokens.sort_by_key(|(id, _)| *id);
        // A token that has a name is special, whatever its flag says.
        let named: Vec<&str> = settings
            .iter()
            .filter(|(name, _)| name.ends_with("_token"))
            .filter_map(|(_, t)| content(t))
            .collect();
        for (_, token) in &mut tokens {
            token.special |= named.contains(&token.content.as_str());
        }
        // One of the vocabulary that has a name is a token of its own in any text.
        let there = self.inner.get_added_tokens_decoder();
        for (name, token) in settings.iter().filter(|(name, _)| name.ends_with("_token")) {
            let made = match token {
                Value::String(text) => AddedToken::from(text.as_str(), true),
                Value::Object(token) => match added(token) {
                    Some(made) => AddedToken { special: true, ..made },
                    None => return Err(bad(path, name, "should be a string or an object with `content`")),
                },
                _ => continue,
            };
            let known =
                tokens.iter().map(|(_, t)| t).chain(there.values()).any(|t| t.content == made.content);
            if !known && self.token_id(&made.content).is_some() {
                tokens.push((None, made));
            }
        }
        for field in ["additional_special_tokens", "extra_special_tokens"] {
            for token in settings.get(field).and_then(Value::as_array).into_iter().flatten() {
                let made = match token {
                    Value::String(text) => AddedToken::from(text.as_str(), true),
                    Value::Object(token) => {
                        let mut made =
                            added(token).ok_or_else(|| bad(path, field, "should be a list of tokens"))?;
                        made.special = true;
                        made
                    }
                    _ => return Err(bad(path, field, "should be a list of tokens")),
                };
                let here = tokens.iter().any(|(_, t)| t.content == made.content);
                if !here && self.token_id(&made.content).is_none() {
                    tokens.push((None, made));
                }
            }
        }
        self.add(tokens, DECODER, path)
    }

    /// The tokens of an `added_tokens.json`, which are special where the settings name them.
    fn add_listed(
        &mut self,
        listed: &Map<String, Value>,
        settings: &Map<String, Value>,
        path: &Path,
    ) -> Result<(), Error> {
        let named = |text: &str| {
            let in_list =
                |v: &Value| v.as_array().is_some_and(|list| list.iter().any(|t| content(t) == Some(text)));
            settings.iter().any(|(name, v)| {
                name.ends_with("_token") && content(v) == Some(text)
                    || name.ends_with("special_tokens") && in_list(v)
            })
        };
        let mut tokens = Vec::new();
        let there = self.inner.get_added_tokens_decoder();
        for (text, id) in listed {
            let id = id.as_u64().and_then(|id| u32::try_from(id).ok());
            let id = id.ok_or_else(|| bad(path, &clip(text), "should be a token id"))?;
            // What tokenizer.json says of it counts.
            if self.token_id(text) != Some(id) || !there.contains_key(&id) {
                tokens.push((Some(id), AddedToken::from(text.as_str(), named(text))));
            }
        }
        tokens.sort_by_key(|(id, _)| *id);
        self.add(tokens, "added tokens", path)
    }

    /// Adds tokens or changes their flags; those with a number should get it.
    fn add(&mut self, tokens: Vec<(Option<u32>, AddedToken)>, field: &str, path: &Path) -> Result<(), Error> {
        let there = self.inner.get_added_tokens_decoder();
        let new: Vec<AddedToken> = tokens
            .iter()
            .filter(|(_, token)| {
                let known = self.token_id(&token.content).and_then(|id| there.get(&id));
                known.is_none_or(|known| !same(known, token))
            })
            .map(|(_, token)| token.clone())
            .collect();
        if !new.is_empty() {
            guard(|| self.inner.add_tokens(new)).map_err(|rule| bad(path, field, rule))?;
            self.find_special();
        }
        for (id, token) in tokens {
            let got = self.token_id(&token.content);
            if let (Some(id), true) = (id, got != id) {
                let got = got.map_or_else(|| "none".to_owned(), |got| got.to_string());
                let rule = format!(
                    "`{}` should be token {id} here as there, is {got} in `{}`",
                    clip(&token.content),
                    self.path.display()
                );
                return Err(bad(path, field, rule));
            }
        }
        Ok(())
    }

    pub(super) fn template_for(&self, name: &str) -> Result<Option<&ChatTemplate>, Error> {
        let Some(first) = self.templates.first() else { return Ok(None) };
        let Some(template) = self.templates.iter().find(|t| t.name == name) else {
            let names: Vec<&str> = self.templates.iter().map(|t| t.name.as_str()).collect();
            let rule = format!("should have one called `{name}`, has {}", clip(&names.join(", ")));
            return Err(bad(&first.path, "chat_template", rule));
        };
        let compiled =
            template.compiled.get_or_init(|| ChatTemplate::new(&template.source).map_err(|e| e.to_string()));
        match compiled {
            Ok(compiled) => Ok(Some(compiled)),
            Err(rule) => Err(Error::Tokenizer { path: template.path.clone(), rule: rule.clone() }),
        }
    }
}

fn same(a: &AddedToken, b: &AddedToken) -> bool {
    let flags = |t: &AddedToken| [t.single_word, t.lstrip, t.rstrip, t.normalized, t.special];
    a.content == b.content && flags(a) == flags(b)
}

/// A token with its flags; of the flags those that are left out are as in transformers.
fn added(token: &Map<String, Value>) -> Option<AddedToken> {
    let flag = |name: &str, default: bool| match token.get(name) {
        None | Some(Value::Null) => Some(default),
        Some(v) => v.as_bool(),
    };
    let special = flag("special", false)?;
    Some(
        AddedToken::from(token.get("content")?.as_str()?, special)
            .single_word(flag("single_word", false)?)
            .lstrip(flag("lstrip", false)?)
            .rstrip(flag("rstrip", false)?)
            .normalized(flag("normalized", !special)?),
    )
}

impl Template {
    fn new(name: &str, path: &Path, source: &str) -> Self {
        Self {
            name: name.to_owned(),
            path: path.to_owned(),
            source: source.to_owned(),
            compiled: OnceLock::new(),
        }
    }
}

/// `chat_template` of a document: a string, or several by name.
fn templates_in(document: &Map<String, Value>, path: &Path) -> Result<Vec<Template>, Error> {
    const FIELD: &str = "chat_template";
    let rule = || bad(path, FIELD, "should be a string or a list of {name, template}");
    match document.get(FIELD) {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::String(source)) => Ok(vec![Template::new("default", path, source)]),
        Some(Value::Object(named)) => {
            let one = |(name, source): (&String, &Value)| {
                Ok(Template::new(name, path, source.as_str().ok_or_else(rule)?))
            };
            named.iter().map(one).collect()
        }
        Some(Value::Array(list)) => {
            let one = |t: &Value| {
                let text = |field: &str| t.get(field).and_then(Value::as_str).ok_or_else(rule);
                Ok(Template::new(text("name")?, path, text("template")?))
            };
            list.iter().map(one).collect()
        }
        Some(_) => Err(rule()),
    }
}
