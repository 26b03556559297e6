//! A model directory as plain data, to be changed at will and written without any check and without
//! a manifest.

use crate::files;
use fracbit_base::Scheme;
use fracbit_format::{Codebook, Layout, PackedView, Planes, SchemeSpec};
use fracbit_io::{Checkpoint, Header, ModelConfig};
use fracbit_model::{FloatId, Linear, LinearId, Model, ModelBuilder, OnlineRotations, RotationMode};
use half::f16;
use serde_json::{Map, Value, json};
use std::{fs, path::Path};

/// A tensor; nothing says that dtype, shape and bytes fit together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Its name.
    pub name: String,
    /// Element type, as a header spells it.
    pub dtype: String,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Little-endian elements.
    pub bytes: Vec<u8>,
}

impl Stored {
    /// Changes bf16 numbers in place.
    ///
    /// # Panics
    /// When they are of another type.
    pub fn change_bf16(&mut self, f: impl Fn(usize, f32) -> f32) {
        assert_eq!(self.dtype, "BF16", "{}", self.name);
        for (at, pair) in self.bytes.as_chunks_mut::<2>().0.iter_mut().enumerate() {
            let value = f(at, f32::from_bits(u32::from(u16::from_le_bytes(*pair)) << 16));
            let rounded = (value.to_bits() + 0x8000) >> 16;
            *pair = u16::try_from(rounded).expect("the upper half").to_le_bytes();
        }
    }
}

/// The pieces of a model directory.
#[derive(Clone, Debug)]
pub struct Parts {
    /// `config.json`.
    pub config: Value,
    /// Every other file but shards, their index and the manifest.
    pub files: Vec<(String, Vec<u8>)>,
    /// All tensors.
    pub tensors: Vec<Stored>,
}

impl Parts {
    /// Takes a good directory apart.
    ///
    /// # Panics
    /// When it is not good.
    #[must_use]
    pub fn read(dir: &Path) -> Self {
        let mut parts = Self { config: Value::Null, files: Vec::new(), tensors: Vec::new() };
        for (name, bytes) in files(dir) {
            if name == "config.json" {
                parts.config = serde_json::from_slice(&bytes).expect("a good configuration");
            } else if name.ends_with(".safetensors") {
                let header = Header::parse(&bytes).expect("a good shard");
                parts.tensors.extend(header.tensors.into_iter().map(|(name, info)| Stored {
                    name,
                    dtype: info.dtype.name().to_owned(),
                    shape: info.shape,
                    bytes: bytes[info.range].to_vec(),
                }));
            } else if !name.starts_with("manifest") && !name.ends_with(".index.json") {
                parts.files.push((name, bytes));
            }
        }
        parts
    }

    /// A tensor to change.
    ///
    /// # Panics
    /// When there is none of this name.
    pub fn tensor(&mut self, name: &str) -> &mut Stored {
        let found = self.tensors.iter_mut().find(|t| t.name == name);
        found.unwrap_or_else(|| panic!("a tensor `{name}`"))
    }

    /// Takes a tensor away.
    ///
    /// # Panics
    /// When there is none of this name.
    pub fn remove(&mut self, name: &str) -> Stored {
        let at = self.tensors.iter().position(|t| t.name == name);
        self.tensors.remove(at.unwrap_or_else(|| panic!("a tensor `{name}`")))
    }

    /// Writes everything, with all tensors in one file.
    ///
    /// # Panics
    /// When a file cannot be written.
    pub fn write(&self, dir: &Path) {
        fs::create_dir_all(dir).expect("a writable place");
        let write = |name: &str, bytes: &[u8]| fs::write(dir.join(name), bytes).expect("a writable place");
        write("config.json", format!("{:#}\n", self.config).as_bytes());
        self.files.iter().for_each(|(name, bytes)| write(name, bytes));
        write("model.safetensors", &shard(&self.tensors));
    }
}

/// A safetensors file of `tensors`, one after the other.
#[must_use]
pub fn shard(tensors: &[Stored]) -> Vec<u8> {
    let (mut header, mut at) = (Map::new(), 0);
    for t in tensors {
        let entry = json!({ "dtype": t.dtype, "shape": t.shape, "data_offsets": [at, at + t.bytes.len()] });
        header.insert(t.name.clone(), entry);
        at += t.bytes.len();
    }
    let header = Value::Object(header).to_string();
    let mut out = (header.len() as u64).to_le_bytes().to_vec();
    out.extend_from_slice(header.as_bytes());
    tensors.iter().for_each(|t| out.extend_from_slice(&t.bytes));
    out
}

/// Reads a quantized directory with nothing but `docs/formats.md`, `fracbit-format` and a
/// safetensors reader: every matrix decoded to f32. The names are spelled out here on purpose.
///
/// # Panics
/// When the directory is not good.
#[must_use]
pub fn dense_model(dir: &Path) -> Model {
    let config = ModelConfig::from_dir(dir).expect("a good configuration");
    let checkpoint = Checkpoint::open(dir).expect("a good directory");
    let block = config.quantization_config.clone().expect("a quantized model");
    let mode: RotationMode = serde_json::from_value(block["rotation"].clone()).expect("a rotation");
    let rotations = OnlineRotations::new(&config, mode, block["seed"].as_u64().expect("a seed"))
        .expect("widths that rotate");
    let bytes = |name: &str| checkpoint.tensor(name).expect("a stored tensor").bytes;
    let f32s = |name: &str| -> Vec<f32> {
        bytes(name).as_chunks::<4>().0.iter().map(|b| f32::from_le_bytes(*b)).collect()
    };
    let f16s = |name: &str| -> Vec<f16> {
        bytes(name).as_chunks::<2>().0.iter().map(|b| f16::from_le_bytes(*b)).collect()
    };
    let divided = block["embedding_divisors"] == true;
    let divisors = divided.then(|| f32s("fracbit.embedding_divisors"));
    let rotations = rotations.with_embedding_divisors(divisors).expect("one for each channel");
    let mut builder = ModelBuilder::new(config.clone(), rotations).expect("a model");
    for id in LinearId::all(&config) {
        let shape = id.shape(&config);
        let weights = match block["modules"][id.to_string()]["scheme"].as_str().expect("a scheme") {
            "f16" => f16s(&format!("{id}.weight")).into_iter().map(f16::to_f32).collect(),
            name => {
                let scheme: Scheme = name.parse().expect("the name of a scheme");
                let layout = Layout::new(scheme, shape);
                let books: Vec<Codebook> = layout
                    .segments()
                    .iter()
                    .map(|segment| {
                        let stem = format!("fracbit.codebook.{}", segment.scheme);
                        let entries = bytes(&format!("{stem}.entries")).as_chunks::<2>().0;
                        let entries = entries.iter().map(|b| i16::from_le_bytes(*b)).collect();
                        Codebook::new(segment.scheme, entries, f32s(&format!("{stem}.step"))[0])
                            .expect("a codebook")
                    })
                    .collect();
                let scales = f16s(&format!("{id}.weight.scales"));
                let group = match block["modules"][id.to_string()]["group"].as_u64().unwrap_or(0) {
                    0 => shape.cols.next_multiple_of(16),
                    group => usize::try_from(group).expect("a group"),
                };
                let second = SchemeSpec::of(scheme).second_level;
                let gains = f32s(&format!("{id}.weight.gain"));
                let planes = Planes {
                    codes: bytes(&format!("{id}.weight.codes")),
                    second_level: second.map_or(&[], |_| bytes(&format!("{id}.weight.level2"))),
                    scales: &scales,
                    gains: &gains,
                };
                PackedView::new(scheme, shape, &books.iter().collect::<Vec<_>>(), planes, group)
                    .expect("parts that fit")
                    .dequantize()
            }
        };
        let bias = id.has_bias(&config).then(|| f32s(&format!("{id}.bias")));
        builder
            .set(id, Linear::dense(shape, weights, bias).expect("a matrix"))
            .expect("a matrix of the model");
    }
    for id in FloatId::all(&config) {
        let name = format!("{id}.weight");
        let gain = if checkpoint.contains(&name) { f32s(&name) } else { vec![1.0; id.width(&config)] };
        builder.set_floats(id, gain).expect("a norm of the model");
    }
    builder.build().expect("all parts were set")
}
