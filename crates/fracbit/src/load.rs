//! From a model directory, quantized or not, to a model that runs.

use crate::{
    Error,
    bands::Bands,
    directory::{BANDS, EMBEDDING_DIVISORS, QuantizationConfig, codebook_names, packed_names},
    foreign,
    fusion::{self, Parts},
    plan::Storage,
};
use fracbit_base::{Bytes, Scheme, Shape, ShapeError};
use fracbit_format::{Codebook, Layout, PackedError, PackedView, TILE_COLS};
use fracbit_io::{Checkpoint, Dtype, ModelConfig, TensorView, Tokenizer};
use fracbit_kernels::{Kernels, PackedMatrix};
use fracbit_model::{FloatId, Linear, LinearId, Model, ModelBuilder, RotationMode, Sites, WeightSource};
use half::f16;
use std::{
    collections::{BTreeMap, btree_map::Entry},
    path::Path,
    sync::Arc,
};

/// The best kernels of this machine, capped by `FRACBIT_ISA`.
///
/// # Errors
/// When `FRACBIT_ISA` names no instruction set.
pub fn kernels() -> Result<Kernels, Error> {
    let mut kernels = Kernels::scalar();
    #[cfg(target_arch = "x86_64")]
    fracbit_kernels_x86::install(&mut kernels)?;
    #[cfg(target_arch = "aarch64")]
    fracbit_kernels_neon::install(&mut kernels)?;
    Ok(kernels)
}

/// A directory opened and understood, nothing loaded yet.
#[derive(Debug)]
pub struct Opened {
    /// Its tensors.
    pub checkpoint: Arc<Checkpoint>,
    /// Its configuration.
    pub config: ModelConfig,
    /// How it is quantized, if it is.
    pub quantization: Option<QuantizationConfig>,
    /// What its configuration says of quantization and is not so.
    leftover: Option<String>,
}

impl QuantizationConfig {
    /// What the runtime rotates and divides.
    pub(crate) fn sites(&self, config: &ModelConfig, reader: &Reader<'_>) -> Result<Sites, Error> {
        let sites = Sites::new(config, self.rotation, self.seed)?;
        if !self.embedding_divisors {
            return Ok(sites);
        }
        let divisors = reader.f32s(EMBEDDING_DIVISORS, config.hidden_size)?;
        if let Some(at) = divisors.iter().position(|&by| by <= 0.0) {
            let rule = format!("number {at} should be positive, got {}", divisors[at]);
            return Err(reader.bad(EMBEDDING_DIVISORS, rule));
        }
        if self.rotation != RotationMode::Online || !config.tie_word_embeddings {
            let rule = "should be there for a tied embedding rotated online alone".to_owned();
            return Err(reader.bad(EMBEDDING_DIVISORS, rule));
        }
        Ok(sites.with_embedding_divisors(Some(divisors))?)
    }
}

impl Opened {
    /// Opens a directory and reads its configuration.
    ///
    /// # Errors
    /// When the directory is no model directory; the message names the file and the rule.
    pub fn new(dir: &Path) -> Result<Self, Error> {
        let config = ModelConfig::from_dir(dir)?;
        let quantization = QuantizationConfig::read(&config, dir)?;
        let checkpoint = Checkpoint::open(dir)?;
        let leftover = foreign::check(&config, &checkpoint)?;
        let checkpoint = Arc::new(checkpoint.parted(&config)?);
        Ok(Self { checkpoint, config, quantization, leftover })
    }

    /// What the directory holds or says that is not followed, a sentence each; nothing in it matters to the model.
    #[must_use]
    pub fn notes(&self) -> Vec<String> {
        let mut notes = self.config.notes.clone();
        notes.extend_from_slice(self.checkpoint.notes());
        notes.extend(self.leftover.clone());
        let source = if self.quantization.is_none() { self.source(RotationMode::None, 0).ok() } else { None };
        let count = self.config.num_hidden_layers();
        let layer = |name: &str| name.strip_prefix("model.layers.")?.split('.').next()?.parse::<usize>().ok();
        let unused = source.as_ref().map(WeightSource::unused).unwrap_or_default();
        let (beyond, others): (Vec<&str>, Vec<&str>) =
            unused.into_iter().partition(|name| layer(name).is_some_and(|layer| layer >= count));
        if let Some(last) = beyond.iter().filter_map(|name| layer(name)).max() {
            notes.push(format!(
                "left out: layers up to {last} are stored, config.json says `num_hidden_layers`: {count} (numbers from 0)"
            ));
        }
        if !others.is_empty() {
            let shown = others[..others.len().min(3)].join(", ");
            let more = others.len().saturating_sub(3);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            notes.push(format!(
                "left out, being no part of the model that config.json describes: {shown}{more}"
            ));
        }
        notes
    }

    /// The weights of an unquantized checkpoint, rotated.
    ///
    /// # Errors
    /// When the directory is quantized already, or a tensor is missing or has the wrong shape.
    pub fn source(&self, rotation: RotationMode, seed: u64) -> Result<WeightSource, Error> {
        if self.quantization.is_some() {
            let path = self.checkpoint.dir().to_path_buf();
            let rule = "the model is quantized already: start from the original checkpoint".to_owned();
            return Err(Error::QuantizationConfig { path, rule });
        }
        Ok(WeightSource::new(Arc::clone(&self.checkpoint), self.config.clone(), rotation, seed)?)
    }

    /// Parameters of the model.
    #[must_use]
    pub fn params(&self) -> u64 {
        let matrices = LinearId::all(&self.config).map(|id| {
            let shape = id.shape(&self.config);
            shape.len() + if id.has_bias(&self.config) { shape.rows } else { 0 }
        });
        let norms = FloatId::all(&self.config).map(|id| id.width(&self.config));
        matrices.chain(norms).map(|n| n as u64).sum()
    }

    /// Stored bits per parameter, everything counted.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    pub fn bits_per_weight(&self) -> f64 {
        self.checkpoint.data_bytes() as f64 * 8.0 / self.params().max(1) as f64
    }

    /// Bytes of tensors.
    #[must_use]
    pub fn bytes(&self) -> Bytes {
        Bytes(self.checkpoint.data_bytes())
    }

    /// The tokenizer of the directory.
    ///
    /// # Errors
    /// When there is none or it is malformed.
    pub fn tokenizer(&self) -> Result<Tokenizer, Error> {
        Ok(Tokenizer::from_dir(self.checkpoint.dir(), Some(&self.config))?)
    }

    /// Builds the model. With `verify`, the checksum of every tensor of a quantized directory is checked first.
    ///
    /// # Errors
    /// When a tensor is missing, damaged, or does not fit its scheme.
    pub fn model(&self, kernels: &Kernels, verify: bool) -> Result<Model, Error> {
        match &self.quantization {
            None => Ok(Model::from_source(&self.source(RotationMode::None, 0)?)?.with_kernels(kernels)),
            Some(block) => self.quantized(block, kernels, verify),
        }
    }

    fn quantized(&self, block: &QuantizationConfig, kernels: &Kernels, verify: bool) -> Result<Model, Error> {
        let reader = Reader { checkpoint: &self.checkpoint, verify };
        let sites = block.sites(&self.config, &reader)?;
        let mut builder = ModelBuilder::new(self.config.clone(), sites)?;
        let mut books = BTreeMap::new();
        let groups = block.fused(&self.config, self.checkpoint.dir())?;
        for id in LinearId::all(&self.config) {
            let bias = |id: LinearId| -> Result<_, Error> {
                let rows = id.shape(&self.config).rows;
                id.has_bias(&self.config).then(|| reader.f32s(&id.bias_name(), rows)).transpose()
            };
            let shape = id.shape(&self.config);
            let make = |view: &PackedView<'_>| PackedMatrix::new(kernels, view);
            if let Some((bands, matrices)) = reader.banded(block, id, shape, &mut books, make)? {
                let linear = Linear::banded(matrices, bands.each(), bias(id)?);
                builder.set(id, linear.map_err(fracbit_model::Error::from)?)?;
                continue;
            }
            match block.storage(id, self.checkpoint.dir())? {
                Storage::F16 => {
                    self.checkpoint.expect_shape(&id.weight_name(), &[shape.rows, shape.cols])?;
                    reader.tensor(&id.weight_name(), Dtype::F16)?;
                    let stored = Linear::stored(Arc::clone(&self.checkpoint), &id.weight_name(), bias(id)?)?;
                    builder.set(id, stored)?;
                }
                Storage::Packed(scheme) => {
                    let group = groups.iter().find(|group| group.contains(&id));
                    if group.is_some_and(|group| group[0] != id) {
                        continue; // came with the first of its group
                    }
                    reader.codebooks(scheme, &mut books)?;
                    let alone = [id];
                    let ids = group.map_or(&alone[..], Vec::as_slice);
                    let matrix = reader.packed(ids, scheme, &self.config, block.group, &books, kernels)?;
                    if ids.len() == 1 {
                        let linear = Linear::packed(matrix, bias(id)?).map_err(fracbit_model::Error::from)?;
                        builder.set(id, linear)?;
                        continue;
                    }
                    let members = ids.iter().map(|&id| Ok((id.shape(&self.config).rows, bias(id)?)));
                    let members = members.collect::<Result<Vec<_>, Error>>()?;
                    let linears = Linear::fused(matrix, members).map_err(fracbit_model::Error::from)?;
                    for (&id, linear) in ids.iter().zip(linears) {
                        builder.set(id, linear)?;
                    }
                }
            }
        }
        for id in FloatId::all(&self.config) {
            let width = id.width(&self.config);
            let folded = id.folded(&self.config, block.rotation);
            let gain = if folded { vec![1.0; width] } else { reader.f32s(&id.weight_name(), width)? };
            builder.set_floats(id, gain)?;
        }
        let model = builder.build()?.with_kernels(kernels);
        // Packed matrices are copies in the kernels' own memory: without this the files would count a second time.
        self.checkpoint.release();
        Ok(model)
    }
}

/// Columns that share a scale, of a shape, when a directory says `group`.
fn columns(group: usize) -> impl Fn(Shape) -> usize {
    move |shape| if group == 0 { shape.cols.next_multiple_of(TILE_COLS) } else { group }
}

/// A matrix as stored.
pub(crate) fn packed_view<'a>(
    parts: &'a Parts<'_>,
    shape: Shape,
    scheme: Scheme,
    group: usize,
    books: &'a BTreeMap<Scheme, Codebook>,
) -> Result<PackedView<'a>, PackedError> {
    let layout = Layout::new(scheme, shape);
    let used: Vec<&Codebook> = layout.segments().iter().map(|s| &books[&s.scheme]).collect();
    PackedView::new(scheme, shape, &used, parts.codes, &parts.scales, columns(group)(shape), parts.gain)
}

/// Reads tensors of a quantized directory.
pub(crate) struct Reader<'a> {
    pub(crate) checkpoint: &'a Checkpoint,
    pub(crate) verify: bool,
}

impl<'a> Reader<'a> {
    pub(crate) fn bad(&self, tensor: &str, rule: String) -> Error {
        Error::Packed { path: self.checkpoint.dir().to_path_buf(), tensor: tensor.to_owned(), rule }
    }

    pub(crate) fn tensor(&self, name: &str, dtype: Dtype) -> Result<TensorView<'a>, Error> {
        let view = self.checkpoint.tensor(name)?;
        if view.dtype != dtype {
            return Err(
                self.bad(name, format!("dtype should be {}, got {}", dtype.name(), view.dtype.name()))
            );
        }
        if self.verify {
            self.checkpoint.verify_tensor(name)?;
        }
        Ok(view)
    }

    pub(crate) fn f32s(&self, name: &str, len: usize) -> Result<Vec<f32>, Error> {
        let view = self.tensor(name, Dtype::F32)?;
        if view.bytes.len() != 4 * len {
            return Err(self.bad(name, format!("should hold {len} numbers, got {}", view.bytes.len() / 4)));
        }
        let values: Vec<f32> = view.bytes.as_chunks::<4>().0.iter().map(|&b| f32::from_le_bytes(b)).collect();
        match values.iter().position(|v| !v.is_finite()) {
            None => Ok(values),
            Some(at) => Err(self.bad(name, format!("number {at} should be finite, got {}", values[at]))),
        }
    }

    pub(crate) fn codebook(&self, scheme: Scheme) -> Result<Codebook, Error> {
        let [entries_name, step_name] = codebook_names(scheme);
        let view = self.tensor(&entries_name, Dtype::I16)?;
        let entries = view.bytes.as_chunks::<2>().0.iter().map(|&b| i16::from_le_bytes(b)).collect();
        let step = self.f32s(&step_name, 1)?[0];
        Codebook::new(scheme, entries, step).map_err(|e| self.bad(&entries_name, e.to_string()))
    }

    /// The codebooks of a scheme, unless they are there.
    pub(crate) fn codebooks(
        &self,
        scheme: Scheme,
        books: &mut BTreeMap<Scheme, Codebook>,
    ) -> Result<(), Error> {
        for half in scheme.halves() {
            if let Entry::Vacant(book) = books.entry(half) {
                book.insert(self.codebook(half)?);
            }
        }
        Ok(())
    }

    /// Which band each of `rows` tokens is in.
    pub(crate) fn bands(&self, rows: usize) -> Result<Bands, Error> {
        let bytes = self.tensor(BANDS, Dtype::U8)?.bytes;
        Bands::from_bytes(bytes, rows).ok_or_else(|| {
            let rule = format!("should be {} bytes for {rows} rows, got {}", Bands::bytes(rows), bytes.len());
            self.bad(BANDS, rule)
        })
    }

    /// The bands of a matrix and what `make` makes of each; `None` where it is stored as a whole.
    pub(crate) fn banded<T>(
        &self,
        block: &QuantizationConfig,
        id: LinearId,
        shape: Shape,
        books: &mut BTreeMap<Scheme, Codebook>,
        make: impl Fn(&PackedView<'_>) -> T,
    ) -> Result<Option<(Bands, Vec<T>)>, Error> {
        let Some(schemes) = block.bands(id, self.checkpoint.dir())? else { return Ok(None) };
        let bands = self.bands(shape.rows)?;
        let mut made = Vec::with_capacity(schemes.len());
        for (band, scheme) in schemes.into_iter().enumerate() {
            self.codebooks(scheme, books)?;
            let shape = Shape::new(bands.rows(band).count(), shape.cols);
            let names = packed_names(id, Some(band));
            let parts = self.parts(&names)?;
            let view = packed_view(&parts, shape, scheme, block.group, books)
                .map_err(|e| self.bad(&names[0], e.to_string()))?;
            made.push(make(&view));
        }
        Ok(Some((bands, made)))
    }

    /// One matrix, or the fused one of several that were checked to fit together.
    fn packed(
        &self,
        ids: &[LinearId],
        scheme: Scheme,
        config: &ModelConfig,
        group: usize,
        books: &BTreeMap<Scheme, Codebook>,
        kernels: &Kernels,
    ) -> Result<PackedMatrix, Error> {
        let columns = columns(group);
        let view = |shape: Shape, parts: &Parts<'_>| {
            packed_view(parts, shape, scheme, group, books).map(|view| PackedMatrix::new(kernels, &view))
        };
        let parts =
            ids.iter().map(|&id| self.parts(&packed_names(id, None))).collect::<Result<Vec<_>, Error>>()?;
        let [codes_name, ..] = packed_names(ids[0], None);
        if let [part] = &parts[..] {
            return view(ids[0].shape(config), part).map_err(|e| self.bad(&codes_name, e.to_string()));
        }
        for (id, part) in ids.iter().zip(&parts) {
            // Each for itself: together, an excess of one might make up for what another lacks.
            let (shape, [codes_name, scales_name, _]) = (id.shape(config), packed_names(*id, None));
            let want = Layout::new(scheme, shape).len();
            ShapeError::check_len("packed matrix", "codes", want, part.codes.len())
                .map_err(|e| self.bad(&codes_name, e.to_string()))?;
            let want = shape.rows * shape.cols.div_ceil(columns(shape));
            ShapeError::check_len("packed matrix", "scales", want, part.scales.len())
                .map_err(|e| self.bad(&scales_name, e.to_string()))?;
        }
        let (codes, scales, gain) = fusion::stack(&parts).ok_or_else(|| {
            self.bad(
                &packed_names(ids[0], None)[2],
                "is too far from the gains of the matrices fused with it".to_owned(),
            )
        })?;
        let rows = ids.iter().map(|id| id.shape(config).rows).sum();
        view(Shape::new(rows, ids[0].shape(config).cols), &Parts { codes: &codes, scales, gain })
            .map_err(|e| self.bad(&codes_name, e.to_string()))
    }

    /// The tensors of these [`packed_names`].
    pub(crate) fn parts(&self, [codes, scales, gain]: &[String; 3]) -> Result<Parts<'a>, Error> {
        let codes = self.tensor(codes, Dtype::U8)?.bytes;
        let scales = self.tensor(scales, Dtype::F16)?;
        let scales = scales.bytes.as_chunks::<2>().0.iter().map(|&b| f16::from_le_bytes(b)).collect();
        Ok(Parts { codes, scales, gain: self.f32s(gain, 1)?[0] })
    }
}
