//! Final hidden states as the checkpoint's own program gives them.
//!
//! [`Model::forward`] leaves them in the basis and with the factors that its head wants. What
//! embeddings are made of is `g∘n`, with the stored gain g of the final norm and the normalized
//! residual stream n:
//!
//! | rotation | a row of `forward` | back |
//! | --- | --- | --- |
//! | `none` | `g∘n` | |
//! | `online` | `g/f∘n`, f the factors of the head's input | times f |
//! | `fold`, tied | `R n` | turned back, times g |
//! | `fold`, a head of its own | `R n`, g in the head | turned back, times g, stored beside |
//!
//! A factor of all logits (Granite) is in the gain, too, and is divided away.

use fracbit_base::ShapeError;
use fracbit_kernels::with_team;
use fracbit_rotation::Rotation;

use crate::rotations::{HeadRotation, RESIDUAL, RotationMode, apply_inverse};
use crate::{Error, Model};

impl Model {
    /// Whether [`Model::leave`] can do it.
    ///
    /// # Errors
    /// [`Error::Hidden`] of a rotated model with a head of its own whose directory does not hold
    /// the gain.
    pub fn check_leave(&self) -> Result<(), Error> {
        let own_head = !self.config.tie_word_embeddings && self.rotations.mode() != RotationMode::None;
        if own_head && self.rotations.final_factors.is_none() {
            let rule = "the directory should hold `fracbit.final_factors`, which earlier versions did not write: \
                        quantize the original model again";
            return Err(Error::Hidden(rule));
        }
        Ok(())
    }

    /// Turns rows of [`Model::forward`] into the final hidden states of the checkpoint, normalized,
    /// in place: (tokens, hidden).
    ///
    /// # Errors
    /// [`Error::Shape`] unless they are whole rows; as for [`Model::check_leave`].
    pub fn leave(&self, rows: &mut [f32]) -> Result<(), Error> {
        self.check_leave()?;
        let width = self.config.hidden_size;
        ShapeError::check_len("hidden states", "rows", rows.len() / width * width, rows.len())?;
        let own = match (&self.rotations.head, self.rotations.mode()) {
            (HeadRotation::Plain, RotationMode::Fold) => {
                Some(Rotation::new(width, self.rotations.seed(), RESIDUAL)?)
            }
            _ => None,
        };
        let (rotation, factors) = match &self.rotations.head {
            HeadRotation::Regain(rotation) => (Some(rotation), Some(&self.final_norm[..])),
            HeadRotation::Plain | HeadRotation::Rotate(_) => {
                let tied = self.rotations.embedding_divisors();
                (own.as_ref(), tied.or(self.rotations.final_factors.as_deref()))
            }
        };
        if let Some(rotation) = rotation {
            let mut scratch = vec![0.0; rotation.scratch_len()];
            with_team(|team| apply_inverse(rotation, team, rows, &mut scratch));
        }
        #[expect(clippy::cast_possible_truncation, reason = "f32 is meant")]
        let by = self.config.logit_factor.recip() as f32;
        for row in rows.chunks_exact_mut(width) {
            if let Some(factors) = factors {
                row.iter_mut().zip(factors).for_each(|(x, f)| *x *= f);
            }
            row.iter_mut().for_each(|x| *x *= by);
        }
        Ok(())
    }
}
