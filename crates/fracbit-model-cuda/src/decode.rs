//! Token by token: one recorded step, one wait for each token.

use crate::{DeviceModel, DeviceState, Error, graph::Products};
use fracbit_kernels_cuda::{
    Buffer, Device, DeviceError,
    ops::{self, Draw, SampleWork, Step, StepRows},
};
use fracbit_model::SampleConfig;

/// Draws tokens after a prompt.
///
/// Random numbers are those of a `SplitMix64` of the seed, one per draw: the same seed gives the
/// same text on the device, not the text that `fracbit_model::Sampler` gives (which orders
/// candidates by probability before it draws).
#[derive(Debug)]
pub struct Decoder<'m, 'd, D: Device> {
    model: &'m DeviceModel<'d, D>,
    state: &'m mut DeviceState<'d, D>,
    /// The step as it was recorded, where it is the same every time.
    graph: Option<D::Graph>,
    draw: Draw,
    out: Buffer<'d, D>,
    /// Held by the recorded step as well.
    draws: ([Buffer<'d, D>; 2], SampleWork<'d, D>),
    drawn: usize,
    most: usize,
}

impl<'m, 'd, D: Device> Decoder<'m, 'd, D> {
    /// Runs `prompt` but for its last token and records the step that draws up to `most` tokens.
    ///
    /// # Errors
    /// [`Error::Token`], [`Error::ContextFull`]; [`Error::Missing`] for an empty prompt.
    pub fn new(
        model: &'m DeviceModel<'d, D>,
        state: &'m mut DeviceState<'d, D>,
        prompt: &[u32],
        sampling: &SampleConfig,
        most: usize,
    ) -> Result<Self, Error> {
        let device = model.device;
        let (&last, before) = prompt.split_last().ok_or_else(|| Error::Missing("a prompt".to_owned()))?;
        model.check(state.len(), state.capacity(), prompt)?;
        model.run::<Error>(state, before, None)?;
        let most = most.min(state.capacity() - state.len());
        let vocabulary = model.config().vocab_size;
        let mut seen = vec![0u8; vocabulary];
        prompt.iter().for_each(|&t| seen[t as usize] = 1);
        let seen = Buffer::of(device, &seen, "tokens seen")?;
        let uniforms = Buffer::of(device, &uniforms(sampling.seed, most.max(1)), "random numbers")?;
        let out = Buffer::zeroed(device, 4 * most.max(1), "tokens")?;
        let work = SampleWork::new(device, vocabulary)?;
        let position = state.len();
        state.work.step.write(&[Step::new(&[position], &[last])])?;
        let draw = Draw {
            temperature: sampling.temperature,
            top_k: sampling.top_k,
            top_p: sampling.top_p,
            min_p: sampling.min_p,
            penalty: sampling.repetition_penalty,
        };
        let draws = ([uniforms, seen], work);
        model.find_angles(&state.work, state.sequence.list.pool().memory().kind())?;
        let mut decoder = Self { model, state, graph: None, draw, out, draws, drawn: 0, most };
        if model.recordable() {
            decoder.graph = Some(device.record(&mut || decoder.launch())?);
        }
        Ok(decoder)
    }

    /// Launches a step: the last token is run and the next one drawn.
    fn launch(&self) -> Result<(), DeviceError> {
        let (model, sequence, on) = (self.model, &self.state.sequence, &self.state.work);
        let (memory, precision) = (sequence.list.pool().memory(), sequence.precision);
        model.blocks(on, memory, StepRows::of_one(1), &Products::few(precision))?;
        model.head(on, &on.x, (0, 1), precision)?;
        let ([uniforms, seen], work) = &self.draws;
        ops::sample(&on.step, &on.logits, &self.out, uniforms, seen, work, &self.draw)
    }

    /// The next token, or `None` when all were drawn or the context is full.
    ///
    /// # Errors
    /// When the device fails.
    pub fn next_token(&mut self) -> Result<Option<u32>, Error> {
        if self.drawn == self.most {
            return Ok(None);
        }
        match &self.graph {
            Some(graph) => self.model.device.replay(graph)?,
            None => self.launch()?,
        }
        self.drawn += 1;
        self.state.sequence.list.advance(1);
        // The one wait: the newest token is the next to be run.
        const AT: usize = std::mem::offset_of!(Step, tokens) / size_of::<u32>();
        let step: Vec<u32> = self.state.work.step.read(AT + 1)?;
        Ok(Some(step[AT]))
    }

    /// All tokens drawn so far, read from the device.
    ///
    /// # Errors
    /// When the device fails.
    pub fn tokens(&self) -> Result<Vec<u32>, Error> {
        Ok(self.out.read(self.drawn)?)
    }

    /// Logits that the last token was drawn from.
    ///
    /// # Errors
    /// When the device fails.
    pub fn logits(&self) -> Result<Vec<f32>, Error> {
        Ok(self.state.work.logits.read(self.model.config().vocab_size)?)
    }
}

/// `n` numbers in 0..1 (Steele, Lea, Flood 2014: `SplitMix64`).
fn uniforms(seed: u64, n: usize) -> Vec<f32> {
    let mut x = seed;
    (0..n)
        .map(|_| {
            x = x.wrapping_add(0x9E37_79B9_7F4A_7C15);
            let mut z = x;
            z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
            z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
            #[expect(clippy::cast_precision_loss, reason = "24 bits fit")]
            {
                ((z ^ (z >> 31)) >> 40) as f32 / (1 << 24) as f32
            }
        })
        .collect()
}
