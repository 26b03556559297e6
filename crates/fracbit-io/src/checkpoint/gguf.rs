//! The tensors of a GGUF file as those of the checkpoint that it was made from.

use super::{Checkpoint, Entry, Shard};
use crate::error::Error;
use crate::gguf::{Gguf, Place, place};

impl Checkpoint {
    /// Takes all tensors of a model.
    ///
    /// # Errors
    /// [`Error::Tensor`] for one that models of this architecture do not have, [`Error::Index`] for
    /// one that is stored twice; what is wrong with the metadata.
    pub(super) fn add_gguf(&mut self, gguf: Gguf) -> Result<(), Error> {
        let config = gguf.model_config()?;
        for part in gguf.into_parts() {
            let shard = self.shards.len();
            let mut stacked = Vec::new();
            let path = part.path.clone();
            for (tensor, info) in part.tensors {
                let (place, stored) = place(&path, &tensor, &info, &config)?;
                let name = match place {
                    Place::One(name) => name,
                    Place::Experts(names) => {
                        let rows = info.rows_cols().0.checked_mul(info.shape.get(1).copied().unwrap_or(0));
                        stacked.push((tensor.clone(), names, rows.unwrap_or(0)));
                        tensor
                    }
                    Place::Config => continue,
                };
                let entry = Entry { stored, ..Entry::plain(shard, info) };
                if self.tensors.insert(name.clone(), entry).is_some() {
                    let rule = format!("tensor `{name}` should be stored once");
                    return Err(Error::Index { path, rule });
                }
            }
            self.shards.push(Shard {
                name: part.name,
                path: part.path,
                metadata: Default::default(),
                bytes: part.bytes,
                data_start: part.data_start,
            });
            for (tensor, names, rows) in stacked {
                let each = rows / names.len().max(1);
                self.part(&tensor, names.into_iter().map(|name| (name, each)).collect())?;
            }
        }
        Ok(())
    }
}
