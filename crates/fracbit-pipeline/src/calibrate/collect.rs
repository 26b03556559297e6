//! Moments of one block, and how a text is cut so that several processes can collect them.
//!
//! Sums are those of shards, one added to the other in the order of the text: so they do not depend
//! on who collects which shard. A [`Collecting`] is one who does.

use super::{Sequences, inputs};
use crate::deal::{CollectJob, Part, bad};
use fracbit_base::ShapeError;
use fracbit_io::ModelConfig;
use fracbit_kernels::Team;
use fracbit_load::{Error, Opened, kernels};
use fracbit_model::{Block, BlockInput, LinearId, Read, RotationMode, WeightSource, block::head_input};
use fracbit_quant::Moments;
use std::{
    mem,
    ops::Range,
    path::Path,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

/// Tokens after which a shard ends, with the sequence that they are in: enough that a block is
/// loaded once for many, and that sums are small beside the work.
pub(super) const SHARD: usize = 16_384;

/// Sequences of every shard of a text.
pub(super) fn shards(sequences: &Sequences) -> Vec<Range<usize>> {
    let (mut out, mut first, mut tokens) = (Vec::new(), 0, 0);
    for (at, sequence) in sequences.iter().enumerate() {
        tokens += sequence.len();
        if tokens >= SHARD || at + 1 == sequences.len() {
            out.push(first..at + 1);
            (first, tokens) = (at + 1, 0);
        }
    }
    out
}

/// What is collected of a block, or of the head's input, over some tokens.
pub(super) struct Collected {
    /// In the order of [`inputs`]; of the head its one input.
    pub(super) moments: Vec<Moments>,
    /// Sums over tokens of the channels of the attention's input; of the head none.
    pub(super) sums: Vec<f64>,
}

impl Collected {
    /// Nothing yet of block `index`; of the head's input behind the last.
    pub(super) fn new(config: &ModelConfig, index: usize) -> Self {
        if index == config.num_hidden_layers() {
            return Self { moments: vec![Moments::new(config.hidden_size)], sums: Vec::new() };
        }
        let channels = |input: BlockInput| LinearId::Layer(index, input.reader()).shape(config).cols;
        Self {
            moments: inputs(config).map(|input| Moments::new(channels(input))).collect(),
            sums: vec![0.0; config.hidden_size],
        }
    }

    /// Adds what was collected on the shard behind.
    fn add(&mut self, other: &Self) -> Result<(), ShapeError> {
        ShapeError::check_len("collected", "inputs", self.moments.len(), other.moments.len())?;
        for (moments, other) in self.moments.iter_mut().zip(&other.moments) {
            moments.merge(other)?;
        }
        self.sums.iter_mut().zip(&other.sums).for_each(|(sum, other)| *sum += other);
        Ok(())
    }

    /// Adds hidden states behind the last block to what is collected of the head's input.
    pub(super) fn add_head(&mut self, source: &WeightSource, x: &mut [f32]) -> Result<(), Error> {
        head_input(source, x)?;
        Ok(self.moments[0].add(x).map_err(fracbit_model::Error::from)?)
    }

    /// Adds `next` to what there is of the shards before, if there is anything.
    pub(super) fn join(all: &mut Option<Self>, next: Self) -> Result<(), Error> {
        match all {
            Some(all) => Ok(all.add(&next).map_err(fracbit_model::Error::from)?),
            None => {
                *all = Some(next);
                Ok(())
            }
        }
    }

    /// As tensors of a [`Part`]: sums and rows of each input, then the sums of channels.
    fn tensors(&self) -> Vec<(String, Vec<u8>)> {
        let bytes = |values: &[f64]| values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>();
        let moments = self.moments.iter().map(|m| (m.rows().to_string(), bytes(&m.sums())));
        moments.chain([("channels".to_owned(), bytes(&self.sums))]).collect()
    }

    /// What [`Collected::tensors`] wrote of block `index`.
    pub(super) fn of_part(part: Part, config: &ModelConfig, index: usize) -> Result<Self, Error> {
        let mut all = Self::new(config, index);
        let wrong = || bad(format!("block {index} came back from its worker with other shapes"));
        let mut tensors = part.tensors.into_iter();
        for moments in &mut all.moments {
            let (rows, bytes) = tensors.next().ok_or_else(wrong)?;
            let rows = rows.parse().map_err(|_| wrong())?;
            *moments = Moments::of_sums(moments.channels(), rows, floats(&bytes)).map_err(|_| wrong())?;
        }
        let (_, bytes) = tensors.next().ok_or_else(wrong)?;
        let sums = floats(&bytes);
        if sums.len() != all.sums.len() || tensors.next().is_some() {
            return Err(wrong());
        }
        all.sums = sums.collect();
        Ok(all)
    }
}

fn floats(bytes: &[u8]) -> impl ExactSizeIterator<Item = f64> {
    bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b))
}

/// A block that collects what its layers read.
pub(super) struct Collector {
    pub(super) block: Block,
    config: ModelConfig,
    index: usize,
    collected: Arc<Mutex<Collected>>,
}

impl Collector {
    /// Block `index` of `source`, whose basis that of the moments is.
    pub(super) fn new(source: &WeightSource, index: usize) -> Result<Self, Error> {
        let config = source.config().clone();
        let collected = Arc::new(Mutex::new(Collected::new(&config, index)));
        let kernels = kernels()?;
        let vectors = kernels.vectors();
        let block = Block::from_source(source, index, |input| {
            let at = inputs(&config).position(|i| i == input)?;
            let collected = Arc::clone(&collected);
            Some(Arc::new(move |team: &Team<'_>, Read { x, .. }: Read<'_>| {
                let mut collected = locked(&collected);
                let Collected { moments, sums } = &mut *collected;
                if input == BlockInput::Attention {
                    for row in x.chunks_exact(sums.len()) {
                        sums.iter_mut().zip(row).for_each(|(sum, &x)| *sum += f64::from(x));
                    }
                }
                // The threads of the pool stand by for the pass: a loop of rayon's would find none
                // of them.
                moments[at].add_on(team, &vectors, x).expect("a layer reads whole rows");
            }))
        })?
        .with_kernels(&kernels);
        Ok(Self { block, config, index, collected })
    }

    /// What was collected since the last time.
    pub(super) fn take(&self) -> Collected {
        mem::replace(&mut *locked(&self.collected), Collected::new(&self.config, self.index))
    }
}

fn locked(collected: &Mutex<Collected>) -> MutexGuard<'_, Collected> {
    collected.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A process that collects the moments of shards, block by block.
#[derive(Debug)]
pub(crate) struct Collecting {
    source: WeightSource,
    sequences: Sequences,
    shards: Vec<Range<usize>>,
}

impl Collecting {
    /// Opens what the job names.
    pub(crate) fn new(model: &Path, job: &CollectJob) -> Result<Self, Error> {
        let opened = Opened::new(model)?;
        let path = opened.checkpoint.path().display().to_string();
        if opened.checkpoint.content_hash() != job.source_hash {
            return Err(bad(format!("`{path}` on a worker has other weights")));
        }
        let here = instructions()?;
        if here != job.instructions {
            let want = &job.instructions;
            let rule = format!(
                "a worker has {here} and the command {want}: moments would differ in their last bits; run both on processors of one kind"
            );
            return Err(bad(rule));
        }
        let cut = Sequences::cut(&job.tokens, &job.lengths);
        let sequences = cut.ok_or_else(|| bad("the lengths of the sequences do not add up to the tokens"))?;
        let shards = shards(&sequences);
        if shards.is_empty() {
            return Err(bad("a job of collecting moments has no sequences"));
        }
        Ok(Self { source: opened.source(RotationMode::None, 0)?, sequences, shards })
    }

    /// Collects shard `index % shards` of block `index / shards`, behind the last block of the
    /// head's input: the bytes of a [`Part`], and the hidden states behind the block. `before` are
    /// those before it; where they are lost, and before the first block, they are made here.
    pub(crate) fn make(&self, index: usize, before: &[u8]) -> Result<(Vec<u8>, Vec<u8>), Error> {
        let config = self.source.config();
        let (block, shard) = (index / self.shards.len(), index % self.shards.len());
        if block > config.num_hidden_layers() {
            return Err(bad(format!("the model has {} blocks, got {block}", config.num_hidden_layers())));
        }
        let mut hidden = self.hidden(block, shard, before)?;
        let collected = if block == config.num_hidden_layers() {
            let mut collected = Collected::new(config, block);
            hidden.iter_mut().try_for_each(|x| collected.add_head(&self.source, x))?;
            collected
        } else {
            let collector = Collector::new(&self.source, block)?;
            self.through(&collector.block, &mut hidden)?;
            collector.take()
        };
        let part = Part { index, relative_error: 0.0, source: String::new(), tensors: collected.tensors() }
            .to_bytes();
        // Nothing goes on behind the head.
        let last = block == config.num_hidden_layers();
        let behind = hidden.iter().filter(|_| !last).flatten().flat_map(|v| v.to_le_bytes()).collect();
        Ok((part, behind))
    }

    /// The hidden states of a shard's sequences before a block.
    fn hidden(&self, block: usize, shard: usize, before: &[u8]) -> Result<Vec<Vec<f32>>, Error> {
        let own = self.sequences.iter().skip(self.shards[shard].start).take(self.shards[shard].len());
        let width = self.source.config().hidden_size;
        if before.is_empty() {
            let embedded = own.map(|tokens| Ok(self.source.embedding(tokens)?));
            let mut hidden = embedded.collect::<Result<Vec<_>, Error>>()?;
            let kernels = kernels()?;
            for index in 0..block {
                let block = Block::from_source(&self.source, index, |_| None)?.with_kernels(&kernels);
                self.through(&block, &mut hidden)?;
            }
            return Ok(hidden);
        }
        let lengths: Vec<usize> = own.map(|tokens| tokens.len() * width).collect();
        if before.len() != 4 * lengths.iter().sum::<usize>() {
            return Err(bad(format!("the hidden states before block {block} came damaged to their worker")));
        }
        let mut floats = before.as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b));
        Ok(lengths.iter().map(|&len| floats.by_ref().take(len).collect()).collect())
    }

    fn through(&self, block: &Block, hidden: &mut [Vec<f32>]) -> Result<(), Error> {
        // Of all sequences: some models turn keys by the longest text that there is room for.
        let mut state = self.sequences.state(block);
        for x in hidden {
            state.reset();
            block.forward(&mut state, x)?;
        }
        Ok(())
    }
}

/// What decides the last bits of moments: the instructions that they are summed with.
pub(crate) fn instructions() -> Result<String, Error> {
    let vectors = kernels()?.vectors();
    Ok(format!("{}{}", vectors.isa(), if vectors.has_bf16() { " with bf16" } else { "" }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shards_end_with_a_sequence_and_hold_all_of_them() {
        let ends = |lengths: &[usize]| -> Vec<usize> {
            let cut = shards(&Sequences::new(lengths.iter().map(|&n| vec![0; n]).collect()));
            let starts = cut.iter().map(|shard| shard.start).skip(1);
            assert!(starts.eq(cut.iter().map(|shard| shard.end).take(cut.len().saturating_sub(1))));
            cut.iter().map(|shard| shard.end).collect()
        };
        assert!(ends(&[]).is_empty());
        assert_eq!(ends(&[2048; 4]), [4]);
        assert_eq!(ends(&[2048; 8]), [8]);
        assert_eq!(ends(&[2048; 17]), [8, 16, 17]);
        assert_eq!(ends(&[SHARD - 1, 5, 3]), [2, 3]);
    }
    #[test]
    fn a_job_without_sequences_is_refused() {
        let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/reference/models/llama3");
        let source_hash = Opened::new(&model).expect("a checkpoint").checkpoint.content_hash();
        let instructions = instructions().expect("kernels");
        let job =
            CollectJob { tokens: Vec::new(), lengths: Vec::new(), source_hash, instructions, shards: 0 };
        let error = Collecting::new(&model, &job).expect_err("nothing to collect on").to_string();
        assert!(error.contains("no sequences"), "{error}");
    }
}
