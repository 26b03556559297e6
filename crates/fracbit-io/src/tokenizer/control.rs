//! Text of a conversation that spells a control token stays text.
//!
//! A rendered prompt knows which of its characters came with the request ([`crate::chat`]). Control
//! tokens are those that the tokenizer's files call special, those that end a text, and those that
//! the template writes itself (such as DeepSeek's `<｜User｜>`, which its files do not call special).
//! Where one of them is spelled with a character of the request, it should be encoded as any other
//! text is.
//!
//! Splitting the prompt there would change how its neighbours are encoded. So the others are
//! spelled in another way: a second tokenizer, made when first needed, knows each control token by
//! one private character with the same number and rules, and does not know its usual spelling,
//! neither as an added token nor in the vocabulary of its model.
//!
//! What the assistant said is the model's own: of its turns only special tokens are kept from it,
//! lest `</think>` become another text than it was.

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use super::{Tokenizer, guard, load};
use crate::error::Error;
use crate::jinja::text::{ASSISTANT, REQUEST, character, plain, units};

/// The first private character, of the last plane.
const FIRST: u32 = 0x10_0000;

/// Tokens that are known by other names.
#[derive(Debug)]
pub(super) struct Guarded {
    inner: Box<tokenizers::Tokenizer>,
    /// Which ones, and the character of each.
    private: BTreeMap<String, char>,
}

impl Tokenizer {
    /// Whether a token is one whatever template is used.
    fn is_special(&self, id: u32) -> bool {
        self.special_ids.binary_search(&id).is_ok() || self.settings.eos_ids.contains(&id)
    }

    /// Control tokens, and whether they are special; the template's text tells of others.
    fn control_tokens(&self, template: &str) -> BTreeMap<String, bool> {
        let mut tokens = BTreeMap::new();
        for (id, token) in self.inner.get_added_tokens_decoder() {
            let special = self.is_special(id);
            let written = !token.content.trim().is_empty() && template.contains(&token.content);
            if !token.content.is_empty() && (special || written) {
                tokens.insert(token.content, special);
            }
        }
        tokens
    }

    /// Tokens of a rendered prompt, without any that the prompt does not spell itself.
    pub(super) fn encode_guarded(&self, prompt: &[u32], template: &str) -> Result<Vec<u32>, Error> {
        let text = plain(prompt);
        let plainly = || self.encode_rendered(&self.inner, &text);
        if prompt.iter().all(|unit| unit & REQUEST == 0) {
            return plainly();
        }
        let control = self.control_tokens(template);
        let spelled: Vec<(Vec<u32>, &str, bool)> =
            control.iter().map(|(token, special)| (units(token, 0), token.as_str(), *special)).collect();
        let mut by_first: BTreeMap<char, Vec<usize>> = BTreeMap::new();
        for (i, (token, ..)) in spelled.iter().enumerate() {
            by_first.entry(character(token[0])).or_default().push(i);
        }
        // Where a token is spelled, the longest of several, and whether it is the prompt's own.
        let (mut found, mut any_foreign, mut at) = (Vec::new(), false, 0);
        while at < prompt.len() {
            let fits = |&&i: &&usize| {
                let token = &spelled[i].0;
                prompt.len() - at >= token.len()
                    && token.iter().zip(&prompt[at..]).all(|(&a, &b)| character(a) == character(b))
            };
            let here = by_first.get(&character(prompt[at])).into_iter().flatten();
            let Some(&longest) = here.filter(fits).max_by_key(|&&i| spelled[i].0.len()) else {
                at += 1;
                continue;
            };
            let (token, name, special) = &spelled[longest];
            let end = at + token.len();
            let foreign =
                prompt[at..end].iter().any(|unit| unit & REQUEST != 0 && (*special || unit & ASSISTANT == 0));
            any_foreign |= foreign;
            found.push((at..end, *name, foreign));
            at = end;
        }
        if !any_foreign {
            return plainly();
        }
        let names = control.keys().cloned().collect();
        let guarded = self.guarded(names)?;
        let is_private = |c: char| (FIRST..FIRST + guarded.private.len() as u32).contains(&(c as u32));
        if text.chars().any(is_private) {
            return Err(Error::Template(
                "a text that spells control tokens should have no characters of the last private plane"
                    .to_owned(),
            ));
        }
        let (mut respelled, mut from) = (String::new(), 0);
        for (range, name, foreign) in found {
            respelled.push_str(&plain(&prompt[from..range.start]));
            match guarded.private.get(name) {
                Some(&private) if !foreign => respelled.push(private),
                _ => respelled.push_str(name),
            }
            from = range.end;
        }
        respelled.push_str(&plain(&prompt[from..]));
        let ids = self.encode_rendered(&guarded.inner, &respelled)?;
        // A vocabulary may still make one of text.
        let own = |id: &u32| {
            guarded.private.values().any(|&c| guarded.inner.token_to_id(&c.to_string()) == Some(*id))
        };
        match ids.iter().find(|id| self.is_special(**id) && !own(id)) {
            None => Ok(ids),
            Some(id) => {
                let token = self.token(*id).unwrap_or_default();
                Err(Error::Template(format!(
                    "this tokenizer cannot keep `{token}` in a message from becoming a token"
                )))
            }
        }
    }

    fn encode_rendered(&self, tokenizer: &tokenizers::Tokenizer, text: &str) -> Result<Vec<u32>, Error> {
        let encoding = guard(|| tokenizer.encode_fast(text, false)).map_err(|rule| self.bad(rule))?;
        Ok(encoding.get_ids().to_vec())
    }

    fn guarded(&self, tokens: BTreeSet<String>) -> Result<&Guarded, Error> {
        // One template, so one set of tokens.
        let made = self.guarded.get_or_init(|| self.make_guarded(tokens));
        made.as_ref().map_err(|rule| self.bad(rule.clone()))
    }

    fn make_guarded(&self, tokens: BTreeSet<String>) -> Result<Guarded, String> {
        let json = guard(|| self.inner.to_string(false))?;
        let mut v: Value = serde_json::from_str(&json).map_err(|e| e.to_string())?;
        let private: BTreeMap<String, char> = tokens
            .into_iter()
            .enumerate()
            .filter_map(|(i, token)| Some((token, char::from_u32(FIRST + u32::try_from(i).ok()?)?)))
            .collect();
        let respell = |s: &mut Value| {
            if let Some(c) = s.as_str().and_then(|s| private.get(s)) {
                *s = c.to_string().into();
            }
        };
        if let Some(added) = v.get_mut("added_tokens").and_then(Value::as_array_mut) {
            added.iter_mut().filter_map(|token| token.get_mut("content")).for_each(respell);
        }
        if let Some(model) = v.get_mut("model") {
            let merged: BTreeSet<String> = model
                .get("merges")
                .and_then(Value::as_array)
                .into_iter()
                .flatten()
                .flat_map(|pair| match pair {
                    Value::Array(pair) => pair.iter().filter_map(Value::as_str).map(str::to_owned).collect(),
                    other => {
                        other.as_str().unwrap_or_default().split(' ').map(str::to_owned).collect::<Vec<_>>()
                    }
                })
                .collect();
            match model.get_mut("vocab") {
                Some(Value::Object(vocab)) => {
                    for (token, c) in private.iter().filter(|(token, _)| !merged.contains(*token)) {
                        if let Some(id) = vocab.get(token).cloned() {
                            vocab.shift_remove(token);
                            vocab.insert(c.to_string(), id);
                        }
                    }
                }
                Some(Value::Array(pieces)) => {
                    pieces.iter_mut().filter_map(|p| p.get_mut(0)).for_each(respell)
                }
                _ => {}
            }
            if let Some(unknown) = model.get_mut("unk_token") {
                respell(unknown);
            }
        }
        let inner = load(v.to_string().as_bytes())?;
        for (token, c) in &private {
            if inner.token_to_id(&c.to_string()) != self.inner.token_to_id(token) {
                return Err(format!("cannot tell `{token}` in a message from the token of this name"));
            }
        }
        Ok(Guarded { inner: Box::new(inner), private })
    }
}
