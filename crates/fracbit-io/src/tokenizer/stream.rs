//! Decoding tokens as they come, in pieces that are whole characters.
//!
//! A character may be spread over up to four byte tokens, and decoders treat the first token of a
//! text specially (they strip its space). So neither token-by-token decoding nor decoding the whole
//! text again at each step will do. We decode a sliding window twice, without and with the new
//! tokens, and emit the difference once it does not end in an incomplete character, which shows as
//! U+FFFD. The window begins at the previous emission, so the cost per token is that of a few
//! tokens.
//!
//! The pieces concatenate to [`Tokenizer::decode`] of the whole for every valid text. Where tokens
//! form no valid UTF-8 the pieces are valid (with U+FFFD), but may hold another number of them.
//! After [`MAX_PENDING`] tokens without a complete character the text is taken to be invalid and
//! emitted as it is.

use super::Tokenizer;
use crate::error::Error;

/// Tokens to wait for the end of a run of U+FFFD. An incomplete character is over after three more
/// tokens, but a text may hold U+FFFD itself, which looks the same: the wait is long enough for any
/// run of them that a text has reason to hold.
const MAX_PENDING: usize = 64;

/// A streaming decoder; see [`Tokenizer::stream`].
#[derive(Debug)]
pub struct TokenStream<'a> {
    tokenizer: &'a Tokenizer,
    skip_special: bool,
    /// The window: tokens already emitted that give context, then pending ones.
    ids: Vec<u32>,
    /// How many of `ids` are already emitted.
    emitted: usize,
    /// The decoded form of those.
    context: String,
}

impl<'a> TokenStream<'a> {
    pub(super) fn new(tokenizer: &'a Tokenizer, skip_special: bool) -> Self {
        Self { tokenizer, skip_special, ids: Vec::new(), emitted: 0, context: String::new() }
    }

    /// Takes one token, returns the text that is complete now, often empty.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn push(&mut self, id: u32) -> Result<String, Error> {
        self.ids.push(id);
        let text = self.tokenizer.decode(&self.ids, self.skip_special)?;
        let pending = self.ids.len() - self.emitted;
        if text.len() <= self.context.len() || text.ends_with('\u{fffd}') && pending < MAX_PENDING {
            return Ok(String::new());
        }
        self.emit(&text)
    }

    /// Ends the text, returns what was still held back.
    ///
    /// # Errors
    /// [`Error::Tokenizer`].
    pub fn finish(mut self) -> Result<String, Error> {
        let text = self.tokenizer.decode(&self.ids, self.skip_special)?;
        if text.len() <= self.context.len() { Ok(String::new()) } else { self.emit(&text) }
    }

    fn emit(&mut self, text: &str) -> Result<String, Error> {
        // A decoder that rewrites earlier text when more comes (or a run of byte tokens that has
        // become invalid as a whole) breaks the prefix; then what is behind the same number of
        // bytes, at the next boundary, is the best that can be said.
        let start =
            (self.context.len()..=text.len()).find(|&i| text.is_char_boundary(i)).unwrap_or(text.len());
        let piece = text[start..].to_owned();
        self.ids.drain(..self.emitted);
        self.emitted = self.ids.len();
        self.context = self.tokenizer.decode(&self.ids, self.skip_special)?;
        Ok(piece)
    }
}
