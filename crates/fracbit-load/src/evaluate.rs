//! Perplexity, and how far a model is from a baseline.
//!
//! A text is encoded once and cut into windows of `ctx` tokens; every token of a window predicts
//! the next one of the text, so that a window scores `ctx` predictions. With a BOS token in front
//! of every window the first token is predicted too. A text may hold several documents, divided by
//! a separator such as `<|endoftext|>`: then windows do not cross documents.

use crate::{Error, Opened, Progress, kernels};
use fracbit_io::{Bos, EncodeOptions, PrefixSpace, Tokenizer};
use fracbit_model::{KvType, Model, Precision, StateOptions, eval};
use serde::Serialize;
use std::path::Path;

/// How to evaluate.
#[derive(Clone, Debug)]
pub struct EvalOptions {
    /// Tokens of a window; `None`: 2048, or the model's context when that is shorter.
    pub ctx: Option<usize>,
    /// Windows at most.
    pub windows: Option<usize>,
    /// Put BOS before every window; `None`: when the tokenizer puts one before a text.
    pub bos: Option<bool>,
    /// Encode without the space that some tokenizers put before a text.
    pub drop_prefix_space: bool,
    /// Text between documents.
    pub separator: Option<String>,
    /// Element type of the KV cache.
    pub kv: KvType,
    /// What is read of nested weights.
    pub precision: Precision,
}

impl Default for EvalOptions {
    fn default() -> Self {
        Self {
            ctx: None,
            windows: None,
            bos: None,
            drop_prefix_space: false,
            separator: None,
            kv: KvType::I16,
            precision: Precision::FULL,
        }
    }
}

/// What an evaluation found: the document of `fracbit eval --json`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Evaluation {
    /// Mean negative log-likelihood.
    pub nats_per_token: f64,
    /// Its exponential.
    pub perplexity: f64,
    /// Predictions scored.
    pub tokens: u64,
    /// Stored bits per parameter, everything counted.
    pub bits_per_weight: f64,
    /// Mean KL divergence from the baseline, nats per token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kl: Option<f64>,
    /// Share of predictions where both models find the same token most likely.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub top1_agreement: Option<f64>,
}

/// Evaluates a model on a text, beside a baseline if one is given. `origin` names the text in
/// messages.
///
/// # Errors
/// When a model cannot be loaded, the text is too short for one prediction, or the two models have
/// different vocabularies or tokenizers.
pub fn evaluate(
    model: &Opened,
    baseline: Option<&Opened>,
    text: &str,
    origin: &Path,
    options: &EvalOptions,
    progress: &dyn Progress,
) -> Result<Evaluation, Error> {
    let kernels = kernels()?;
    let built = model.model(&kernels, true)?;
    let base = baseline.map(|b| b.model(&kernels, true)).transpose()?;
    let windows = windows_of_both(model, baseline, text, origin, options)?;
    let state = StateOptions { kv: options.kv, precision: options.precision, ..StateOptions::default() };
    let bits = match options.precision {
        Precision::FULL => model.bits_per_weight(),
        some => built.bits_at(some),
    };
    score(&built, base.as_ref(), &windows, state, bits, progress)
}

/// Scores windows of tokens: every token but the last of a window predicts the next.
///
/// # Errors
/// As for [`evaluate`], and when the predictions are no numbers.
pub fn score(
    model: &Model,
    baseline: Option<&Model>,
    windows: &[Vec<u32>],
    state: StateOptions,
    bits_per_weight: f64,
    progress: &dyn Progress,
) -> Result<Evaluation, Error> {
    let options = eval::EvalOptions { state, ..eval::EvalOptions::default() };
    let predictions: usize = windows.iter().map(|w| w.len().saturating_sub(1)).sum();
    progress.stage("evaluating", predictions as u64);
    let mut done = 0;
    let mut advance = |total: u64| {
        progress.advance(total - done);
        done = total;
    };
    let (nll, beside) = match baseline {
        Some(base) => {
            let found = eval::compare(base, model, windows, &options, &mut advance)?;
            (found.model, Some(found))
        }
        None => (eval::nll(model, windows, &options, &mut advance)?, None),
    };
    if !(nll.nats_per_token().is_finite() && beside.is_none_or(|c| c.kl().is_finite())) {
        return Err(fracbit_model::Error::NoLogit.into());
    }
    Ok(Evaluation {
        nats_per_token: nll.nats_per_token(),
        perplexity: nll.perplexity(),
        tokens: nll.tokens,
        bits_per_weight,
        kl: beside.map(|c| c.kl()),
        top1_agreement: beside.map(|c| c.top1_agreement()),
    })
}

/// [`windows`] of a text, which a baseline must encode alike.
///
/// # Errors
/// As for [`evaluate`].
pub fn windows_of_both(
    model: &Opened,
    baseline: Option<&Opened>,
    text: &str,
    origin: &Path,
    options: &EvalOptions,
) -> Result<Vec<Vec<u32>>, Error> {
    let windows = windows(model, text, origin, options)?;
    if let Some(base) = baseline
        && self::windows(base, text, origin, options)? != windows
    {
        let rule = "the model and the baseline should encode this text alike (same tokenizer, same context)";
        return Err(Error::Text { path: origin.to_path_buf(), rule: rule.to_owned() });
    }
    Ok(windows)
}

/// Windows of a text, each one token longer than the number of its predictions.
///
/// # Errors
/// When the text yields none, or the tokenizer cannot be read.
pub fn windows(
    model: &Opened,
    text: &str,
    origin: &Path,
    options: &EvalOptions,
) -> Result<Vec<Vec<u32>>, Error> {
    cut(model, text, origin, options, usize::MAX)
}

/// Those of [`windows`] that hold the first `tokens` tokens, or a few more: no more of the text is
/// encoded than they take.
///
/// # Errors
/// As for [`windows`].
pub fn windows_of_tokens(
    model: &Opened,
    text: &str,
    origin: &Path,
    options: &EvalOptions,
    tokens: usize,
) -> Result<Vec<Vec<u32>>, Error> {
    cut(model, text, origin, options, tokens)
}

fn cut(
    model: &Opened,
    text: &str,
    origin: &Path,
    options: &EvalOptions,
    enough: usize,
) -> Result<Vec<Vec<u32>>, Error> {
    let tokenizer = model.tokenizer()?;
    let limit = model.config.max_position_embeddings;
    let ctx = options.ctx.unwrap_or(2048.min(limit));
    if ctx == 0 || ctx > limit {
        return Err(Error::Option {
            option: "--ctx",
            rule: format!("should be 1 to {limit} for this model, got {ctx}"),
        });
    }
    let bos = bos_token(&tokenizer, options.bos)?;
    let prefix_space = if options.drop_prefix_space { PrefixSpace::Drop } else { PrefixSpace::Keep };
    let encode = EncodeOptions { bos: Bos::Never, prefix_space };
    let documents: Vec<&str> = match &options.separator {
        Some(separator) if !separator.is_empty() => text.split(separator.as_str()).map(str::trim).collect(),
        _ => vec![text],
    };
    let mut windows: Vec<Vec<u32>> = Vec::new();
    let mut held = 0;
    for document in documents.into_iter().filter(|d| !d.is_empty()) {
        let windows_left = options.windows.unwrap_or(usize::MAX) - windows.len();
        // One more than is predicted.
        let left = windows_left.saturating_mul(ctx).min(enough - held).saturating_add(1);
        let tokens = first_tokens(&tokenizer, document, encode, left)?;
        let before = windows.len();
        match bos {
            // BOS predicts the first token, and takes a place of the context.
            Some(bos) => windows.extend(tokens.chunks(ctx).map(|part| [&[bos], part].concat())),
            None => windows.extend((0..tokens.len().saturating_sub(1)).step_by(ctx).map(|at| {
                let end = tokens.len().min(at + ctx + 1);
                tokens[at..end].to_vec()
            })),
        }
        held += windows[before..].iter().map(Vec::len).sum::<usize>();
        if held >= enough || options.windows.is_some_and(|most| windows.len() >= most) {
            break;
        }
    }
    windows.truncate(options.windows.unwrap_or(usize::MAX));
    if windows.is_empty() {
        let rule = "the text should hold at least two tokens".to_owned();
        return Err(Error::Text { path: origin.to_path_buf(), rule });
    }
    Ok(windows)
}

/// The first `most` tokens of a text, of which no more is encoded than that takes.
fn first_tokens(
    tokenizer: &Tokenizer,
    text: &str,
    options: EncodeOptions,
    most: usize,
) -> Result<Vec<u32>, Error> {
    /// Tokens behind those, so that none is beside the cut.
    const BESIDE: usize = 64;
    const BYTES: usize = 5;
    let enough = most.saturating_add(BESIDE);
    let mut bytes = enough.saturating_mul(BYTES);
    loop {
        let cut = word_end(text, bytes);
        let mut tokens = tokenizer.encode(&text[..cut], options)?;
        if cut == text.len() || tokens.len() >= enough {
            tokens.truncate(most);
            return Ok(tokens);
        }
        bytes = bytes.saturating_mul(2);
    }
}

/// The first end of a word behind so many bytes of a text: tokens do not reach over it.
fn word_end(text: &str, bytes: usize) -> usize {
    let Some(from) = (bytes..text.len()).find(|&at| text.is_char_boundary(at)) else { return text.len() };
    let mut in_word = false;
    for (at, c) in text[from..].char_indices() {
        if in_word && c.is_whitespace() {
            return from + at;
        }
        in_word = !c.is_whitespace();
    }
    text.len()
}

/// The token to put before every window.
fn bos_token(tokenizer: &Tokenizer, wanted: Option<bool>) -> Result<Option<u32>, Error> {
    let rule = || "the tokenizer should have a BOS token for this option".to_owned();
    match wanted {
        Some(false) => Ok(None),
        Some(true) => {
            tokenizer.bos_id().map(Some).ok_or_else(|| Error::Option { option: "--bos", rule: rule() })
        }
        None => {
            let probe = EncodeOptions { bos: Bos::AsConfigured, prefix_space: PrefixSpace::Keep };
            let first = tokenizer.encode("a", probe)?.first().copied();
            Ok(tokenizer.bos_id().filter(|&bos| first == Some(bos)))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_where_words_end() {
        for (text, bytes, cut) in
            [("ab cd  ef", 0, 2), ("ab cd  ef", 1, 2), ("ab cd  ef", 2, 5), ("ab cd  ef", 6, 9), ("ab", 9, 2)]
        {
            assert_eq!(word_end(text, bytes), cut, "{text} {bytes}");
        }
        assert_eq!(word_end("€€€ €", 1), "€€€".len());
        assert_eq!(word_end("", 0), 0);
    }
}
