//! A model as a GGUF file, for llama.cpp and what is built on it.
//!
//! The weights are those of the checkpoint, not rotated, in one of the block types that llama.cpp
//! has, rounded for the least error weighted by importance ([`gguf::encode`]): the second moments
//! of each column's input where there is a calibration, else the weights' own size. A tensor that
//! is in the wanted type already, of another GGUF file, is copied block by block.
//!
//! As in llama.cpp, norms, biases and routers stay in single precision; the output head, or the
//! embedding that is one, gets `Q6_K` below 6 bits; and where rows are not whole blocks of 256,
//! `Q4_K` becomes `Q5_0` and `Q6_K` `Q8_0`.

use fracbit_base::Bytes;
use fracbit_io::{
    BlockType, Checkpoint, Dtype, Gguf, Tokenizer,
    gguf::{self, Description, GgufWriter, TensorOut},
};
use fracbit_load::{Error, Opened, Progress};
use fracbit_model::{LinearId, RotationMode, WeightSource};
use fracbit_pipeline::Calibration;
use half::f16;
use rayon::prelude::*;
use serde::Serialize;
use std::{
    collections::BTreeMap,
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    sync::Arc,
};

/// Rows that are rounded in one go.
const ROWS: usize = 256;

/// What most matrices become.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExportType(Dtype);

impl ExportType {
    /// All of them.
    pub const ALL: [Self; 5] = [
        Self(Dtype::Blocks(BlockType::Q4_0)),
        Self(Dtype::Blocks(BlockType::Q8_0)),
        Self(Dtype::Blocks(BlockType::Q4_K)),
        Self(Dtype::Blocks(BlockType::Q6_K)),
        Self(Dtype::F16),
    ];

    /// llama.cpp's number for a file of this type.
    const fn file_type(self) -> usize {
        match self.0 {
            Dtype::Blocks(BlockType::Q4_0) => 2,
            Dtype::Blocks(BlockType::Q8_0) => 7,
            Dtype::Blocks(BlockType::Q4_K) => 14,
            Dtype::Blocks(BlockType::Q6_K) => 18,
            _ => 1,
        }
    }

    /// The type of a matrix with rows of `cols` numbers; `output`: what the logits are made of.
    fn of(self, cols: usize, output: bool) -> Dtype {
        let wanted = match self.0 {
            Dtype::Blocks(BlockType::Q4_0 | BlockType::Q4_K) if output => Dtype::Blocks(BlockType::Q6_K),
            wanted => wanted,
        };
        let instead = match wanted {
            Dtype::Blocks(BlockType::Q4_K) => Dtype::Blocks(BlockType::Q5_0),
            Dtype::Blocks(BlockType::Q6_K) => Dtype::Blocks(BlockType::Q8_0),
            other => other,
        };
        let fits = |dtype: &Dtype| cols.is_multiple_of(dtype.block_len());
        [wanted, instead].into_iter().find(fits).unwrap_or(Dtype::F16)
    }
}

impl fmt::Display for ExportType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Dtype::Blocks(block) if block.name().ends_with("_K") => {
                write!(f, "q{}", block.name().trim_start_matches('Q'))
            }
            other => f.write_str(&other.name().to_ascii_lowercase()),
        }
    }
}

impl FromStr for ExportType {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let same = |t: &Self| t.to_string().eq_ignore_ascii_case(text);
        Self::ALL.into_iter().find(same).ok_or_else(|| {
            let list: Vec<_> = Self::ALL.iter().map(ToString::to_string).collect();
            format!("should be one of {}, got `{text}`", list.join(", "))
        })
    }
}

/// How to export.
#[derive(Clone, Debug)]
pub struct ExportOptions {
    /// What matrices become.
    pub kind: ExportType,
    /// Replace an existing file.
    pub force: bool,
    /// Round for the inputs that the layers get.
    pub calibration: Option<Arc<Calibration>>,
}

/// What was written.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ExportReport {
    /// The file.
    pub path: PathBuf,
    /// Its tensors.
    pub bytes: Bytes,
    /// Stored bits per parameter, everything counted.
    pub bits_per_weight: f64,
    /// Weights by type.
    pub weights: BTreeMap<String, u64>,
    /// Added tokens that are left out: the embedding has no rows for them, and no text may have
    /// them.
    pub left_out: Vec<String>,
}

/// Writes the model to `out`.
///
/// # Errors
/// For a quantized directory, a model that llama.cpp has no architecture for, a tokenizer that it
/// has no vocabulary for, weights beyond half precision, and what reading and writing refuse.
pub fn export(
    opened: &Opened,
    out: &Path,
    options: &ExportOptions,
    progress: &dyn Progress,
) -> Result<ExportReport, Error> {
    let source = opened.source(RotationMode::None, 0)?;
    let config = &opened.config;
    let path = opened.checkpoint.path();
    if let Some(calibration) = &options.calibration {
        calibration.require_source(&opened.checkpoint.content_hash())?;
    }
    let mut description = if gguf::is_gguf(path) {
        Gguf::open(path)?.description()?
    } else {
        let tokenizer = Tokenizer::from_dir(path, Some(config))?;
        let name = path.file_name().map_or_else(String::new, |n| n.to_string_lossy().into_owned());
        gguf::describe(config, Some(&tokenizer), path, &name)?
    };
    description.set_file_type(options.kind.file_type());
    let tensors = gguf::tensors(config);
    let matrix = |t: &TensorOut| t.shape.len() > 1 && !t.name.contains("ffn_gate_inp");
    let kind = |t: &TensorOut| {
        let output = t.name == "output.weight" || t.name == "token_embd.weight" && config.tie_word_embeddings;
        let cols = t.shape.last().copied().unwrap_or(1);
        if matrix(t) { options.kind.of(cols, output) } else { Dtype::F32 }
    };
    let Description { factors, .. } = &description;
    let small = factors.iter().map(|(name, numbers)| (name.clone(), Dtype::F32, vec![numbers.len()]));
    let listed: Vec<_> =
        small.chain(tensors.iter().map(|t| (t.name.clone(), kind(t), t.shape.clone()))).collect();
    let mut writer = GgufWriter::create(out, options.force, &description, &listed)?;
    for (name, numbers) in factors {
        let bytes: Vec<u8> = numbers.iter().flat_map(|n| n.to_le_bytes()).collect();
        writer.write(name, &bytes)?;
    }
    let weights = |t: &TensorOut| t.shape.iter().product::<usize>() as u64;
    progress.stage("exporting", tensors.iter().map(weights).sum());
    let mut report = ExportReport {
        path: out.to_path_buf(),
        bytes: Bytes(listed.iter().map(|(_, dtype, shape)| dtype.bytes(shape.iter().product()) as u64).sum()),
        bits_per_weight: 0.0,
        weights: BTreeMap::new(),
        left_out: description.left_out.clone(),
    };
    report.bits_per_weight = report.bytes.0 as f64 * 8.0 / opened.params().max(1) as f64;
    for t in &tensors {
        let importance = match &options.calibration {
            Some(calibration) if matrix(t) => moments(calibration, &source, t)?,
            _ => None,
        };
        let dtype = kind(t);
        Tensor { source: &source, t, dtype, importance }.write(&mut writer)?;
        *report.weights.entry(dtype.name().to_ascii_lowercase()).or_default() += weights(t);
        progress.advance(weights(t));
    }
    report.path = writer.finish()?;
    Ok(report)
}

/// The second moment of the input of each column.
fn moments(
    calibration: &Calibration,
    source: &WeightSource,
    t: &TensorOut,
) -> Result<Option<Vec<f32>>, Error> {
    let of =
        |id: &LinearId| source.weight_names(*id).contains(&t.sources[0]) || id.weight_name() == t.sources[0];
    let Some(id) = LinearId::all(source.config()).find(of) else { return Ok(None) };
    let Some(moments) = calibration.moments(source, id)? else { return Ok(None) };
    let n = moments.len();
    Ok(Some(moments.entries().iter().step_by(n + 1).copied().collect()))
}

/// A tensor on its way out.
struct Tensor<'a> {
    source: &'a WeightSource,
    t: &'a TensorOut,
    dtype: Dtype,
    importance: Option<Vec<f32>>,
}

impl Tensor<'_> {
    fn checkpoint(&self) -> &Checkpoint {
        self.source.checkpoint()
    }

    fn write(&self, writer: &mut GgufWriter) -> Result<(), Error> {
        let sources = self.stored_names();
        let cols = self.t.shape.last().copied().unwrap_or(1);
        let all: usize = self.t.shape.iter().product::<usize>() / cols.max(1);
        let each = all / sources.len();
        // Parts of a fused tensor may differ in rows; where heads are moved there is one.
        let mut rows = Vec::with_capacity(all);
        for name in &sources {
            let info = self.checkpoint().info(name)?;
            let own = if sources.len() == 1 { each } else { info.rows_cols().0 };
            rows.extend((0..own).map(|row| (name.as_str(), row)));
        }
        let row = |row: usize| {
            let (name, _) = rows[row];
            (name, if self.t.paired_head == 0 { rows[row].1 } else { self.t.source_row(row) })
        };
        if self.t.shape.len() == 1 {
            return self.write_vector(writer, &sources[0]);
        }
        for start in (0..rows.len()).step_by(ROWS) {
            let part = start..rows.len().min(start + ROWS);
            let encoded = part.into_par_iter().map(|at| {
                let (name, row) = row(at);
                self.row(name, row, cols)
            });
            for bytes in encoded.collect::<Result<Vec<_>, Error>>()? {
                writer.write(&self.t.name, &bytes)?;
            }
        }
        Ok(())
    }

    /// Names of the sources as they are stored: a tied embedding may be under the head's.
    fn stored_names(&self) -> Vec<String> {
        let own =
            |name: &String| match LinearId::all(self.source.config()).find(|id| id.weight_name() == *name) {
                Some(id @ (LinearId::Embed | LinearId::Head)) => self.source.weight_names(id).remove(0),
                _ => name.clone(),
            };
        self.t.sources.iter().map(own).collect()
    }

    fn write_vector(&self, writer: &mut GgufWriter, name: &str) -> Result<(), Error> {
        let numbers = self.checkpoint().to_f32(name)?;
        let ordered = (0..numbers.len()).map(|i| numbers[self.t.source_row(i)] + self.t.shift);
        writer.write(&self.t.name, &ordered.flat_map(f32::to_le_bytes).collect::<Vec<u8>>())?;
        Ok(())
    }

    fn row(&self, name: &str, row: usize, cols: usize) -> Result<Vec<u8>, Error> {
        let view = self.checkpoint().tensor(name)?;
        if view.dtype == self.dtype
            && self.t.shift == 0.0
            && let Some(bytes) = view.row_bytes(row)
        {
            return Ok(bytes.to_vec());
        }
        let mut numbers = vec![0.0; cols];
        self.checkpoint().rows_f32_into(name, row..row + 1, &mut numbers)?;
        // Scales are in half precision, too.
        let beyond = numbers.iter().position(|n| n.abs() > f16::MAX.to_f32() && self.dtype != Dtype::F32);
        if let Some(col) = beyond {
            let rule =
                format!("row {row}, column {col} should be within half precision, is {}", numbers[col]);
            let path = self.checkpoint().path().to_owned();
            return Err(fracbit_io::Error::Tensor { path, tensor: name.to_owned(), rule }.into());
        }
        let mut out = Vec::with_capacity(self.dtype.bytes(cols));
        match self.dtype {
            Dtype::Blocks(block) => gguf::encode(block, &numbers, self.importance.as_deref(), &mut out),
            Dtype::F16 => out.extend(numbers.iter().flat_map(|&n| f16::from_f32(n).to_le_bytes())),
            _ => out.extend(numbers.iter().flat_map(|n| n.to_le_bytes())),
        }
        Ok(out)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn types_are_named_as_llama_cpp_names_them() {
        let names: Vec<_> = ExportType::ALL.iter().map(ToString::to_string).collect();
        assert_eq!(names, ["q4_0", "q8_0", "q4_K", "q6_K", "f16"]);
        for kind in ExportType::ALL {
            assert_eq!(kind.to_string().parse(), Ok(kind));
            assert_eq!(kind.to_string().to_ascii_uppercase().parse(), Ok(kind));
        }
        assert!("q4_1".parse::<ExportType>().unwrap_err().contains("q4_0, q8_0, q4_K, q6_K, f16"));
    }

    #[test]
    fn rows_that_are_no_whole_blocks_get_a_type_that_they_are() {
        let of = |kind: &str, cols, output| {
            kind.parse::<ExportType>().map(|kind| kind.of(cols, output).name().to_owned())
        };
        for (kind, cols, output, want) in [
            ("q4_K", 512, false, "Q4_K"),
            ("q4_K", 576, false, "Q5_0"),
            ("q4_K", 512, true, "Q6_K"),
            ("q4_K", 576, true, "Q8_0"),
            ("q6_K", 96, false, "Q8_0"),
            ("q4_0", 96, false, "Q4_0"),
            ("q4_0", 40, false, "F16"),
            ("q8_0", 512, true, "Q8_0"),
            ("f16", 7, true, "F16"),
        ] {
            assert_eq!(of(kind, cols, output).as_deref(), Ok(want), "{kind}, {cols}");
        }
    }
}
