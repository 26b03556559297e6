//! Weights on the device and the graph over them.

use crate::key_bias::KeyBiases;
use fracbit_format::{PackedMatrixData, PackedView};
use fracbit_io::{ModelConfig, QkNorm};
use fracbit_kernels_cuda::{
    Buffer, Device, DeviceError, DeviceMatrix, LoadError, Workspace,
    ops::{DenseMatrix, HeadTurn, RotationTables},
};
use fracbit_model::{
    FloatId, KeyBias, KeyWeights, KvType, LayerLinear, LinearId, OnlineRotations, Precision,
    rotations::HeadRotation,
};
use fracbit_rotation::{Factor, HadamardMatrix, Rotation};
use half::f16;
use std::{collections::BTreeMap, sync::OnceLock};

/// A model that does not come to the device, or a step that failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A matrix that the kernels do not run, or memory that is short.
    #[error("{id}: {source}")]
    Matrix {
        /// Which matrix.
        id: LinearId,
        /// Why.
        source: LoadError,
    },
    /// The device failed.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// Rows of experts in several schemes.
    #[error("{0}: experts should be of one scheme each on a GPU, got bands of rows")]
    Bands(LinearId),
    /// A part was not given.
    #[error("model: {0} is missing")]
    Missing(String),
    /// More tokens than the state holds.
    #[error("the context of {capacity} tokens is full: {len} are held, {got} more were given")]
    ContextFull {
        /// Most tokens.
        capacity: usize,
        /// Tokens held.
        len: usize,
        /// Tokens given.
        got: usize,
    },
    /// A cache of another element type.
    #[error("the cache on a GPU should be of 16, 8, 6 or 4 bits, got {}", .0.bits())]
    Kind(KvType),
    /// A cache of few bits of heads that kernels do not take.
    #[error(
        "the cache on a GPU should be of 16 bits for heads of {head_dim} numbers, which is no multiple of \
         8, got {}", .kind.bits()
    )]
    Heads {
        /// Asked for.
        kind: KvType,
        /// Numbers of a head.
        head_dim: usize,
    },
    /// A cache that kernels cannot count in 32 bits.
    #[error("the cache on a GPU should have at most {most} pages, got {pages}")]
    Pages {
        /// Asked for.
        pages: usize,
        /// Most.
        most: usize,
    },
    /// What pages say.
    #[error(transparent)]
    Model(Box<fracbit_model::Error>),
    /// A token outside the vocabulary.
    #[error("token {token} is outside the vocabulary of {vocabulary}")]
    Token {
        /// The token.
        token: u32,
        /// Size of the vocabulary.
        vocabulary: usize,
    },
}

impl From<Error> for fracbit_model::Error {
    fn from(error: Error) -> Self {
        match error {
            Error::Token { token, vocabulary } => Self::Token { token, vocab: vocabulary },
            Error::ContextFull { capacity, len, got } => Self::ContextFull { capacity, len, got },
            Error::Model(error) => *error,
            other => Self::Device(Box::new(other)),
        }
    }
}

#[derive(Debug)]
pub(crate) enum Linear<'d, D: Device> {
    Packed(Box<DeviceMatrix<'d, D>>),
    Dense(DenseMatrix<'d, D>),
    /// Those of experts.
    Experts(Vec<DenseMatrix<'d, D>>),
}

/// Matrices that read one input, each writing its own rows of one output.
#[derive(Debug)]
pub(crate) struct Group<'d, D: Device> {
    pub(crate) parts: Vec<(usize, Linear<'d, D>)>, // first output row
    pub(crate) rows: usize,
    /// Where each output row belongs, if that is elsewhere: rows of matrices in bands.
    pub(crate) places: Option<Buffer<'d, D>>,
}

#[derive(Debug)]
pub(crate) struct Layer<'d, D: Device> {
    pub(crate) qkv: Group<'d, D>,
    pub(crate) output: Group<'d, D>,
    pub(crate) gate_up: Group<'d, D>,
    pub(crate) down: Group<'d, D>,
    /// What says which experts a token gets, (experts, hidden), where there are such.
    pub(crate) router: Option<Buffer<'d, D>>,
    /// Before attention and MLP, where there are such.
    pub(crate) attention_norm: Option<Buffer<'d, D>>,
    pub(crate) mlp_norm: Option<Buffer<'d, D>>,
    /// Behind attention and MLP, likewise.
    pub(crate) out_norms: Option<[Buffer<'d, D>; 2]>,
    pub(crate) query_norm: Option<Buffer<'d, D>>,
    pub(crate) key_norm: Option<Buffer<'d, D>>,
    pub(crate) attention_in: Option<RotationTables<'d, D>>,
    pub(crate) output_in: Option<RotationTables<'d, D>>,
    pub(crate) mlp_in: Option<RotationTables<'d, D>>,
    pub(crate) down_in: Option<RotationTables<'d, D>>,
}

/// What comes between the final norm and the head.
#[derive(Debug)]
pub(crate) enum HeadTables<'d, D: Device> {
    Plain,
    Rotate(RotationTables<'d, D>),
    Regain(RotationTables<'d, D>),
}

/// A decoder on a device.
#[derive(Debug)]
pub struct DeviceModel<'d, D: Device> {
    pub(crate) device: &'d D,
    pub(crate) config: ModelConfig,
    pub(crate) embed: DenseMatrix<'d, D>,
    pub(crate) embed_out: Option<RotationTables<'d, D>>,
    pub(crate) head: Option<Group<'d, D>>, // None: the embedding
    pub(crate) head_tables: HeadTables<'d, D>,
    pub(crate) final_norm: Buffer<'d, D>,
    pub(crate) layers: Vec<Layer<'d, D>>,
    pub(crate) work: Workspace<'d, D>,
    pub(crate) eps: f32,
    /// Of queries, keys, and behind attention and MLP.
    pub(crate) inner_eps: f32,
    /// Of queries and keys, where the cache is of codes.
    pub(crate) head_turn: HeadTurn<'d, D>,
    /// What caches of codes hold keys without: their biases, or where there are none and codes are
    /// of 4 bits their means, once they are found.
    pub(crate) key_biases: KeyBiases<'d, D>,
    pub(crate) key_means: OnceLock<KeyBiases<'d, D>>,
    /// Of what norms behind attention and MLP make.
    pub(crate) branch_out: Option<RotationTables<'d, D>>,
}

/// Weights as they were read.
enum Part {
    Packed(Box<PackedMatrixData<'static>>),
    Dense(Vec<u16>),
    /// Bands of rows, and the rows of all of them, one band behind the other.
    Banded(Vec<PackedMatrixData<'static>>, Vec<u32>),
}

/// A packed matrix or a band of one, on its way to the device.
struct Packed<'a> {
    id: LinearId,
    view: PackedView<'a>,
    /// Where its rows belong among those of its group.
    places: Vec<usize>,
    bias: Option<Vec<f32>>,
}

impl Part {
    /// The weights, (rows, cols).
    fn weights(&self, cols: usize) -> Vec<f32> {
        match self {
            Self::Packed(data) => data.view().dequantize(),
            Self::Dense(halves) => halves.iter().map(|&h| f16::from_bits(h).to_f32()).collect(),
            Self::Banded(bands, rows) => {
                let mut weights = vec![0.0; rows.len() * cols];
                let all = bands.iter().flat_map(|band| band.view().dequantize()).collect::<Vec<f32>>();
                for (&row, values) in rows.iter().zip(all.chunks_exact(cols)) {
                    weights[row as usize * cols..][..cols].copy_from_slice(values);
                }
                weights
            }
        }
    }

    /// One row of them.
    fn row(&self, row: usize, out: &mut [f32]) {
        match self {
            Self::Packed(data) => data.view().dequantize_row(row, out),
            Self::Dense(halves) => {
                let from = &halves[row * out.len()..];
                out.iter_mut().zip(from).for_each(|(to, &h)| *to = f16::from_bits(h).to_f32());
            }
            Self::Banded(bands, rows) => {
                let mut at = rows.iter().position(|&r| r as usize == row).expect("a row of the matrix");
                for band in bands {
                    if at < band.shape().rows {
                        return band.view().dequantize_row(at, out);
                    }
                    at -= band.shape().rows;
                }
            }
        }
    }
}

/// Collects the parts of a [`DeviceModel`]; matrices stay in main memory until [`Builder::build`]
/// or until their group is whole.
pub struct Builder<'d, D: Device> {
    device: &'d D,
    config: ModelConfig,
    rotations: OnlineRotations,
    parts: BTreeMap<LinearId, (Part, Option<Vec<f32>>)>,
    norms: Vec<(FloatId, Vec<f32>)>,
}

impl<D: Device> std::fmt::Debug for Builder<'_, D> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Builder").field("parts", &self.parts.len()).finish_non_exhaustive()
    }
}

impl<'d, D: Device> Builder<'d, D> {
    /// An empty model whose weights are rotated as `rotations` says.
    #[must_use]
    pub fn new(device: &'d D, config: ModelConfig, rotations: OnlineRotations) -> Self {
        Self { device, config, rotations, parts: BTreeMap::new(), norms: Vec::new() }
    }

    /// Sets a packed matrix.
    pub fn packed(&mut self, id: LinearId, view: &PackedView<'_>, bias: Option<Vec<f32>>) {
        self.parts.insert(id, (Part::Packed(Box::new(view.to_data())), bias));
    }

    /// Sets a matrix whose rows lie in several packed ones, `rows` one band behind the other.
    ///
    /// # Panics
    /// When there are not as many rows.
    pub fn banded(
        &mut self,
        id: LinearId,
        bands: Vec<PackedMatrixData<'static>>,
        rows: Vec<u32>,
        bias: Option<Vec<f32>>,
    ) {
        assert_eq!(rows.len(), bands.iter().map(|band| band.shape().rows).sum::<usize>(), "rows of bands");
        self.parts.insert(id, (Part::Banded(bands, rows), bias));
    }

    /// Sets a dense matrix, rounded to half precision.
    pub fn dense(&mut self, id: LinearId, weights: &[f32], bias: Option<Vec<f32>>) {
        let halves = weights.iter().map(|&w| f16::from_f32(w).to_bits()).collect();
        self.parts.insert(id, (Part::Dense(halves), bias));
    }

    /// Sets a dense matrix of f16 bits (rows, cols).
    pub fn halves(&mut self, id: LinearId, weights: Vec<u16>, bias: Option<Vec<f32>>) {
        self.parts.insert(id, (Part::Dense(weights), bias));
    }

    /// Sets a norm's gain.
    pub fn norm(&mut self, id: FloatId, gain: Vec<f32>) {
        self.norms.push((id, gain));
    }

    fn floats(&self, id: FloatId) -> Result<&[f32], Error> {
        let found = self.norms.iter().find(|(other, _)| *other == id);
        Ok(&found.ok_or_else(|| Error::Missing(format!("{id:?}")))?.1)
    }

    fn gain(&self, id: FloatId) -> Result<Buffer<'d, D>, Error> {
        Ok(Buffer::of(self.device, self.floats(id)?, "norms")?)
    }

    /// What caches of codes hold the keys of a layer without, of the matrix as it was read.
    fn key_bias(&self, layer: usize) -> Result<Option<KeyBias>, Error> {
        let config = &self.config;
        let Some((part, Some(bias))) = self.parts.get(&LinearId::Layer(layer, LayerLinear::K)) else {
            return Ok(None);
        };
        let gain = FloatId::before(config, layer, LayerLinear::K);
        let weights = KeyWeights {
            bias,
            gain: gain.map(|id| self.floats(id)).transpose()?,
            rotated: self.rotations.layer(layer).attention_in.is_some(),
        };
        Ok(KeyBias::of_keys(config, layer, weights, |row, out| part.row(row, out)))
    }

    /// Brings matrices that read one input to the device: as one all those, and bands of them, that
    /// share a scheme.
    fn group(&mut self, ids: &[LinearId]) -> Result<Group<'d, D>, Error> {
        let device = self.device;
        let mut taken = Vec::new();
        for &id in ids {
            let (part, bias) = self.parts.remove(&id).ok_or_else(|| Error::Missing(id.to_string()))?;
            taken.push((id, id.shape(&self.config), part, bias));
        }
        // Stacks of packed matrices, and where each of their rows belongs.
        let (mut stacks, mut dense, mut rows) = (Vec::<Vec<Packed<'_>>>::new(), Vec::new(), 0);
        for (id, shape, part, bias) in &taken {
            let mut add = |view, own: &mut dyn Iterator<Item = usize>| {
                let own = own.collect::<Vec<_>>();
                let bias = bias.as_ref().map(|bias| own.iter().map(|&row| bias[row]).collect());
                let places = own.iter().map(|&row| rows + row).collect();
                let fits = |stack: &&mut Vec<Packed<'_>>| {
                    stack.last().is_some_and(|last| DeviceMatrix::<D>::stackable(&[&last.view, &view]))
                };
                match stacks.iter_mut().find(fits) {
                    Some(stack) => stack.push(Packed { id: *id, view, places, bias }),
                    None => stacks.push(vec![Packed { id: *id, view, places, bias }]),
                }
            };
            match part {
                Part::Packed(data) => add(data.view(), &mut (0..shape.rows)),
                Part::Banded(bands, places) => {
                    let mut places = places.iter().map(|&row| row as usize);
                    for band in bands {
                        add(band.view(), &mut places.by_ref().take(band.shape().rows));
                    }
                }
                Part::Dense(weights) => {
                    let matrix =
                        DenseMatrix::new(device, (shape.rows, shape.cols), weights, bias.as_deref())?;
                    dense.push((rows..rows + shape.rows, matrix));
                }
            }
            rows += shape.rows;
        }
        let (mut parts, mut places) = (Vec::new(), Vec::new());
        for stack in stacks {
            let views: Vec<&PackedView<'_>> = stack.iter().map(|packed| &packed.view).collect();
            let zeros = |packed: &Packed<'_>| vec![0.0; packed.places.len()];
            let biased = stack.iter().any(|packed| packed.bias.is_some());
            let bias = stack.iter().flat_map(|p| p.bias.clone().unwrap_or_else(|| zeros(p)));
            let bias = biased.then(|| bias.collect::<Vec<f32>>());
            let bad = |source| Error::Matrix { id: stack[0].id, source };
            let matrix = DeviceMatrix::stacked(device, &views, bias.as_deref()).map_err(bad)?;
            parts.push((places.len(), Linear::Packed(Box::new(matrix))));
            places.extend(stack.iter().flat_map(|packed| &packed.places));
        }
        for (of, matrix) in dense {
            parts.push((places.len(), Linear::Dense(matrix)));
            places.extend(of);
        }
        let moved = places.iter().enumerate().any(|(at, &place)| at != place);
        let places: Vec<u32> = places.iter().map(|&p| u32::try_from(p).expect("rows of a model")).collect();
        let places = moved.then(|| Buffer::of(device, &places, "places of rows")).transpose()?;
        Ok(Group { parts, rows, places })
    }

    /// Brings matrices of experts that read one input to the device.
    fn expert_group(&mut self, ids: &[LinearId], count: usize) -> Result<Group<'d, D>, Error> {
        let (mut parts, mut rows) = (Vec::new(), 0);
        for &id in ids {
            let (part, _) = self.parts.remove(&id).ok_or_else(|| Error::Missing(id.to_string()))?;
            let shape = id.shape(&self.config);
            let each = (shape.rows / count, shape.cols);
            let linear = match part {
                Part::Packed(data) => {
                    let matrix = DeviceMatrix::pieces(self.device, &data.view(), count);
                    Linear::Packed(Box::new(matrix.map_err(|source| Error::Matrix { id, source })?))
                }
                Part::Dense(weights) => {
                    let all = weights.chunks_exact(each.0 * each.1);
                    let all = all.map(|weights| DenseMatrix::new(self.device, each, weights, None));
                    Linear::Experts(all.collect::<Result<_, _>>()?)
                }
                Part::Banded(..) => return Err(Error::Bands(id)),
            };
            parts.push((rows, linear));
            rows += each.0;
        }
        Ok(Group { parts, rows, places: None })
    }

    /// Embedding rows, turned back and divided by their factors, as f16 bits; `None` where they are
    /// used as they are.
    fn divided(&self) -> Result<Option<Vec<u16>>, Error> {
        let (Some(divisors), Some(rotation)) =
            (self.rotations.embedding_divisors(), self.rotations.embed_out())
        else {
            return Ok(None);
        };
        let id = LinearId::Embed;
        let (part, _) = self.parts.get(&id).ok_or_else(|| Error::Missing(id.to_string()))?;
        let mut rows = part.weights(id.shape(&self.config).cols);
        rotation.apply_rows_inverse(&mut rows);
        let by = divisors.iter().cycle();
        Ok(Some(rows.iter().zip(by).map(|(x, by)| f16::from_f32(x / by).to_bits()).collect()))
    }

    /// The model.
    ///
    /// # Errors
    /// When a part is missing or does not fit on the device.
    pub fn build(mut self) -> Result<DeviceModel<'d, D>, Error> {
        let (device, config) = (self.device, self.config.clone());
        let rotation = |r: &Option<Rotation>| r.as_ref().map(|r| tables(device, r)).transpose();
        let (mut layers, mut key_biases) = (Vec::new(), Vec::new());
        for i in 0..config.num_hidden_layers() {
            let id = |which| LinearId::Layer(i, which);
            key_biases.push(self.key_bias(i)?);
            let qkv = self.group(&[id(LayerLinear::Q), id(LayerLinear::K), id(LayerLinear::V)])?;
            let output = self.group(&[id(LayerLinear::O)])?;
            let (both, down) = ([id(LayerLinear::Gate), id(LayerLinear::Up)], [id(LayerLinear::Down)]);
            let (gate_up, down) = match config.experts {
                Some(experts) => {
                    (self.expert_group(&both, experts.count)?, self.expert_group(&down, experts.count)?)
                }
                None => (self.group(&both)?, self.group(&down)?),
            };
            let (rotations, gain) = (self.rotations.layer(i), |id| self.gain(id));
            let before = |which| FloatId::before(&config, i, which).map(gain).transpose();
            let qk_norm = config.qk_norm != QkNorm::Absent;
            layers.push(Layer {
                qkv,
                output,
                gate_up,
                down,
                router: config.experts.map(|_| gain(FloatId::Router(i))).transpose()?,
                attention_norm: before(LayerLinear::Q)?,
                mlp_norm: before(LayerLinear::Gate)?,
                out_norms: config
                    .post_norms
                    .then(|| Ok::<_, Error>([gain(FloatId::AttentionOut(i))?, gain(FloatId::MlpOut(i))?]))
                    .transpose()?,
                query_norm: qk_norm.then(|| gain(FloatId::Query(i))).transpose()?,
                key_norm: qk_norm.then(|| gain(FloatId::Key(i))).transpose()?,
                attention_in: rotation(&rotations.attention_in)?,
                output_in: rotation(&rotations.output_in)?,
                mlp_in: rotation(&rotations.mlp_in)?,
                down_in: rotation(&rotations.down_in)?,
            });
        }
        // The embedding is read by rows: a packed one is expanded. Tied, the packed form serves the
        // head.
        let shape = LinearId::Embed.shape(&config);
        let divided = self.divided()?;
        let mut tied_head = None;
        let embed_out = self.rotations.embed_out().filter(|_| divided.is_none());
        let embed_out = embed_out.map(|r| tables(device, r)).transpose()?;
        let table = divided.or_else(|| match self.parts.get(&LinearId::Embed) {
            Some((part @ Part::Banded(..), _)) => {
                Some(part.weights(shape.cols).iter().map(|&w| f16::from_f32(w).to_bits()).collect())
            }
            _ => None,
        });
        let mut group = self.group(&[LinearId::Embed])?;
        let embed = match (table, group.parts.pop()) {
            (Some(table), Some(last)) => {
                group.parts.push(last);
                tied_head = Some(group);
                DenseMatrix::new(device, (shape.rows, shape.cols), &table, None)?
            }
            (None, Some((_, Linear::Dense(dense)))) => dense,
            (None, Some((_, Linear::Packed(matrix)))) => {
                let table = Buffer::zeroed(device, 2 * shape.len(), "embedding")?;
                matrix.at(None).expand(&table, false)?;
                group.parts.push((0, Linear::Packed(matrix)));
                tied_head = Some(group);
                DenseMatrix::of_buffer(table, shape.rows, shape.cols)
            }
            (_, None) | (None, Some((_, Linear::Experts(_)))) => {
                return Err(Error::Missing(LinearId::Embed.to_string()));
            }
        };
        let head = if config.tie_word_embeddings { tied_head } else { Some(self.group(&[LinearId::Head])?) };
        let head_tables = match self.rotations.head() {
            HeadRotation::Plain => HeadTables::Plain,
            HeadRotation::Rotate(r) => HeadTables::Rotate(tables(device, r)?),
            HeadRotation::Regain(r) => HeadTables::Regain(tables(device, r)?),
        };
        let final_norm = self.gain(FloatId::Final)?;
        let work = {
            let groups = layers.iter().flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down]).chain(&head);
            let packed = groups.flat_map(|g| &g.parts).filter_map(|(_, linear)| match linear {
                Linear::Packed(matrix) => Some(&**matrix),
                Linear::Dense(_) | Linear::Experts(_) => None,
            });
            Workspace::new(device, packed)?
        };
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
        let (eps, inner_eps) = (config.rms_norm_eps as f32, config.inner_norm_eps as f32);
        let branch_out = rotation(&self.rotations.branch_out().cloned())?;
        let (signs, factors) = parts(&head_rotation(config.head_dim));
        let head_turn = HeadTurn::new(device, &signs, &factors)?;
        Ok(DeviceModel {
            head_turn,
            key_biases: KeyBiases::new(device, &config, key_biases)?,
            key_means: OnceLock::new(),
            branch_out,
            inner_eps,
            device,
            embed,
            embed_out,
            head,
            head_tables,
            final_norm,
            layers,
            work,
            eps,
            config,
        })
    }
}

/// A rotation's tables on the device.
///
/// # Errors
/// [`DeviceError::Memory`].
///
/// # Panics
/// Never: the rule that splits widths picks orders that have a matrix.
pub fn tables<'d, D: Device>(
    device: &'d D,
    rotation: &Rotation,
) -> Result<RotationTables<'d, D>, DeviceError> {
    let (signs, factors) = parts(rotation);
    RotationTables::new(device, &signs, &factors)
}

/// The rotation of queries and keys of caches of codes: that of the processor.
///
/// # Panics
/// Never: heads are narrow enough to be rotated.
pub(crate) fn head_rotation(head_dim: usize) -> Rotation {
    Rotation::new(head_dim, 0, 0).expect("heads are narrow enough to be rotated")
}

/// The scaled signs of a rotation and its dense factors: their orders, and entries by rows.
fn parts(rotation: &Rotation) -> (Vec<f32>, Vec<(usize, Vec<f32>)>) {
    let n = rotation.width();
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "the scale is a float")]
    let scale = (1.0 / (n as f64).sqrt()) as f32;
    let signs: Vec<f32> = rotation.signs().map(|s| s * scale).collect();
    let dense = |factor: &Factor| match *factor {
        Factor::Walsh(_) => None,
        Factor::Hadamard(order) => {
            let h = HadamardMatrix::new(order).expect("the rule picks orders that have a matrix");
            let entries = (0..order * order).map(|i| f32::from(h.entry(i / order, i % order)));
            Some((order, entries.collect()))
        }
        Factor::Hartley(order) => {
            #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "angles")]
            let cas = |i: usize| {
                let angle = std::f64::consts::TAU * (i % order) as f64 / order as f64;
                (angle.cos() + angle.sin()) as f32
            };
            Some((order, (0..order * order).map(|i| cas(i / order * (i % order))).collect()))
        }
    };
    (signs, rotation.hadamard().factors().iter().filter_map(dense).collect())
}

impl<'d, D: Device> DeviceModel<'d, D> {
    /// What the model is.
    #[must_use]
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }

    /// Mean bits of a weight that a step reads at a precision.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn step_bits(&self, precision: Precision) -> f64 {
        let id = |layer, which| LinearId::Layer(layer, which);
        let layers = 0..self.config.num_hidden_layers();
        let all = layers.flat_map(|i| LayerLinear::ALL.map(|which| id(i, which))).chain([LinearId::Embed]);
        let weights: usize = all.map(|id| id.shape(&self.config).len()).sum();
        (8 * self.bytes_with(precision, self.config.experts.map_or(1, |experts| experts.count))) as f64
            / weights.max(1) as f64
    }

    /// Launches that one step of the packed products takes: fewer where matrices share a scheme.
    #[must_use]
    pub fn products(&self) -> usize {
        let groups = self.layers.iter().flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down]);
        groups.map(|g| g.parts.len()).sum()
    }

    /// The matrices that steps multiply by.
    fn linears(&self) -> impl Iterator<Item = &Linear<'d, D>> {
        let groups = self.layers.iter().flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down]);
        groups.chain(&self.head).flat_map(|g| &g.parts).map(|(_, linear)| linear)
    }

    /// Those that are packed.
    pub(crate) fn packed(&self) -> impl Iterator<Item = &DeviceMatrix<'d, D>> {
        self.linears().filter_map(|linear| match linear {
            Linear::Packed(matrix) => Some(&**matrix),
            Linear::Dense(_) | Linear::Experts(_) => None,
        })
    }

    /// Bytes of weights that a step reads at a precision.
    #[must_use]
    pub fn step_bytes(&self, precision: Precision) -> usize {
        self.bytes_with(precision, self.config.experts.map_or(1, |experts| experts.active))
    }

    /// Bytes of weights at a precision, those of so many experts.
    fn bytes_with(&self, precision: Precision, experts: usize) -> usize {
        let of = |linear: &Linear<'d, D>| match linear {
            Linear::Packed(matrix) => matrix.at(precision.rate()).bytes(),
            Linear::Dense(matrix) => matrix.weights().bytes(),
            Linear::Experts(all) => all[0].weights().bytes(),
        };
        let alone = self.layers.iter().flat_map(|l| [&l.gate_up, &l.down]).flat_map(|g| &g.parts);
        let expert = alone.map(|(_, linear)| of(linear)).sum::<usize>();
        let read = self.linears().map(of).sum::<usize>() + (experts - 1) * expert;
        read + if self.head.is_none() { self.embed.weights().bytes() } else { 0 }
    }
}
