//! Folding rotations into the weights of a transformer.
//!
//! Legend: R rotates the residual stream (width d), P rotates inside one head (width head_dim), Q
//! rotates the input of the down projection. Weights are row-major (out, in) of y = W·x + b; "input
//! by R" is [`Rotation::apply_rows`](crate::Rotation::apply_rows), "output by R" is
//! [`Rotation::rotate_output`](crate::Rotation::rotate_output) and, on a bias,
//! [`Rotation::apply`](crate::Rotation::apply).
//!
//! | tensor                   | first              | input by | output by | bias    |
//! |--------------------------|--------------------|----------|-----------|---------|
//! | embedding (vocab, d)     |                    | R (rows) |           |         |
//! | q, k                     | [`fold_gain`]      | R        |           | as is   |
//! | v                        | [`fold_gain`]      | R        | P by head | P by head |
//! | o                        |                    | P by head | R        | R       |
//! | gate, up                 | [`fold_gain`]      | R        |           | as is   |
//! | down                     |                    | Q, online | R        | R       |
//! | head (vocab, d)          | [`fold_gain`] of the final norm | R |     | as is   |
//!
//! Rules, each with its reason:
//!
//! 1. **Gains first.** A root-mean-square norm is x/rms(x) ⊙ g. Rotation keeps rms(x) but does not
//!    commute with ⊙ g, so g moves into the columns of every linear that reads the norm, and the
//!    norm's own gain becomes 1 (SliceGPT, Ashkboos et al. 2024, arXiv 2401.15024, section 3). A
//!    layer norm with mean subtraction would need its mean folded too; it is not handled.
//! 2. **Every writer and every reader of the residual stream**, or none: embedding, o and down
//!    write, q, k, v, gate, up and head read.
//! 3. **Tied embeddings come apart** if the final norm has a gain that is not constant: the
//!    embedding is rotated without it, the head with it.
//! 4. **Biases live in the output's basis.** A rotated input leaves them alone.
//! 5. **q and k outputs stay**: rotary positions and per-head norms act on their coordinates. The
//!    input of down follows an elementwise product, which nothing folds through, hence the one
//!    rotation left online.

/// W ← W·diag(gain) for a row-major (rows, n) weight: moves the gain (n) of the norm before a
/// linear into it.
///
/// # Panics
/// If `gain` is empty or the length of `w` is not a multiple of that of `gain`.
pub fn fold_gain(w: &mut [f32], gain: &[f32]) {
    assert!(
        !gain.is_empty() && w.len().is_multiple_of(gain.len()),
        "fold_gain: entries of `w` should be a multiple of the gain's {}, got {}",
        gain.len(),
        w.len()
    );
    for row in w.chunks_exact_mut(gain.len()) {
        row.iter_mut().zip(gain).for_each(|(w, g)| *w *= g);
    }
}
