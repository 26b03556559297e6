//! Matrices on their way from a checkpoint into the tensors of a directory.

use crate::calibrate::{Calibration, first_reader};
use fracbit_base::Scheme;
use fracbit_format::Codebook;
use fracbit_io::ShardWriter;
use fracbit_kernels::{Kernels, PackedMatrix};
use fracbit_load::{Error, Progress, directory::plane_name};
use fracbit_model::{Linear, LinearId, Matrix, WeightSource};
use fracbit_plan::{Plan, bands::Bands, planned::PlannedLayer, storage::Storage};
use fracbit_quant::{Grouping, Hessian, Rounders, Rounding};
use half::f16;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What one matrix became.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LayerReport {
    /// Module name.
    pub name: String,
    /// Scheme.
    pub scheme: Storage,
    /// Measured `|W - W'|^2 / |W|^2`.
    pub relative_error: f64,
    /// Sensitivity times measured error.
    pub loss: f64,
}

impl LayerReport {
    pub(crate) fn new(layer: &PlannedLayer, relative_error: f64) -> Self {
        let (name, loss) = (layer.name.clone(), layer.sensitivity * relative_error);
        Self { name, scheme: layer.scheme, relative_error, loss }
    }
}

/// A matrix of a model in a scheme; errors name its tensor.
pub(crate) fn rounded(
    id: LinearId,
    matrix: &Matrix,
    scheme: Scheme,
    grouping: Grouping,
    rounding: Rounding<'_>,
    progress: &(dyn Fn(usize) + Sync),
) -> Result<fracbit_quant::Quantized, Error> {
    let (data, shape) = (&matrix.data, matrix.shape);
    fracbit_quant::quantize_with(data, shape, scheme, grouping, rounding, progress)
        .map_err(|source| Error::Tensor { tensor: id.weight_name(), shape, scheme, source })
}

/// The weights of a planned matrix: all rows, or those of a band.
pub(crate) fn planned_matrix(
    source: &WeightSource,
    plan: &Plan,
    id: LinearId,
    layer: &PlannedLayer,
) -> Result<Matrix, Error> {
    let mut matrix = source.linear(id)?;
    if let Some((bands, band)) = band(plan, id, layer) {
        matrix.data = bands.take(band, &matrix.data, matrix.shape.cols);
        matrix.shape.rows = layer.rows;
    }
    Ok(matrix)
}

/// Where the rows of a planned matrix are, if it is a band of one.
fn band<'a>(plan: &'a Plan, id: LinearId, layer: &PlannedLayer) -> Option<(&'a Bands, usize)> {
    Some((plan.bands.get(&id.to_string())?, layer.band()?))
}

/// What rounding matrices takes.
pub(crate) struct Rounds<'a> {
    pub(crate) source: &'a WeightSource,
    pub(crate) plan: &'a Plan,
    pub(crate) progress: &'a dyn Progress,
    pub(crate) rounders: &'a Rounders,
    /// Tables that are not the built-in ones.
    pub(crate) codebooks: &'a BTreeMap<Scheme, Codebook>,
    /// Moments of the next matrix's input (of experts one set for each), and the first matrix that
    /// reads it.
    pub(crate) moments: Option<(LinearId, Vec<Hessian>)>,
}

/// What storing them takes, too.
pub(crate) struct Matrices<'a> {
    pub(crate) rounds: Rounds<'a>,
    pub(crate) writer: ShardWriter<'a>,
}

/// A stored matrix.
pub(crate) enum Stored {
    Half(Vec<f16>),
    Packed(Box<fracbit_quant::Quantized>),
}

/// A rounded matrix and its bias.
pub(crate) struct Made {
    pub(crate) report: LayerReport,
    bias: Option<Vec<f32>>,
    pub(crate) stored: Stored,
}

impl Made {
    /// Gives the tensors that it is stored in to `take`, in their order.
    pub(crate) fn tensors(
        &self,
        id: LinearId,
        layer: &PlannedLayer,
        mut take: impl FnMut(String, &[u8]) -> Result<(), Error>,
    ) -> Result<(), Error> {
        if let Some(bias) = &self.bias {
            take(id.bias_name(), &f32_bytes(bias))?;
        }
        match &self.stored {
            Stored::Half(rounded) => take(id.weight_name(), &f16_bytes(rounded)),
            Stored::Packed(packed) => packed.data.planes().try_for_each(|(plane, values)| {
                take(plane_name(id, layer.band(), plane.name), &values.to_bytes())
            }),
        }
    }
}

impl Rounds<'_> {
    /// Takes the moments for `id` from a calibration, unless its neighbour's serve it too.
    pub(crate) fn calibrated(&mut self, calibration: &Calibration, id: LinearId) -> Result<(), Error> {
        let reader = first_reader(id);
        if self.moments.as_ref().is_none_or(|(of, _)| *of != reader) {
            self.moments = None; // first, so that only one set is in memory
            self.moments = calibration.moments(self.source, id)?.map(|h| (reader, vec![h]));
        }
        Ok(())
    }

    /// Rounds one matrix, or a band of its rows, for the moments that were set for it if any;
    /// `shift` is added to the whole before.
    pub(crate) fn make(
        &self,
        id: LinearId,
        layer: &PlannedLayer,
        shift: Option<&[f32]>,
    ) -> Result<Made, Error> {
        // Of bands the first brings that of all rows.
        let bias = if layer.band().is_none_or(|band| band == 0) { self.source.bias(id)? } else { None };
        let mut matrix = planned_matrix(self.source, self.plan, id, layer)?;
        let own = band(self.plan, id, layer).zip(shift);
        let own = own.map(|((bands, band), shift)| bands.take(band, shift, matrix.shape.cols));
        if let Some(shift) = own.as_deref().or(shift) {
            matrix.data.iter_mut().zip(shift).for_each(|(w, s)| *w += s);
        }
        let (relative_error, stored) = match layer.scheme {
            Storage::F16 => {
                let (error, rounded) = halves(&matrix.data, self.source, id)?;
                self.progress.advance(matrix.data.len() as u64);
                (error, Stored::Half(rounded))
            }
            Storage::Packed(scheme) => {
                let advance = |weights: usize| self.progress.advance(weights as u64);
                let moments = self.moments.as_ref().filter(|(of, _)| *of == first_reader(id));
                let moments = moments.map_or(&[][..], |(_, moments)| moments);
                let rounding =
                    Rounding { moments, rounders: self.rounders, codebook: self.codebooks.get(&scheme) };
                let packed = rounded(id, &matrix, scheme, layer.grouping(), rounding, &advance)?;
                (packed.relative_error, Stored::Packed(Box::new(packed)))
            }
        };
        let report = LayerReport::new(layer, relative_error);
        Ok(Made { report, bias, stored })
    }
}

impl Matrices<'_> {
    /// Stores one matrix, as [`Rounds::make`] makes it.
    pub(crate) fn write(
        &mut self,
        id: LinearId,
        layer: &PlannedLayer,
        shift: Option<&[f32]>,
    ) -> Result<(LayerReport, Stored), Error> {
        let made = self.rounds.make(id, layer, shift)?;
        made.tensors(id, layer, |name, bytes| Ok(self.writer.write(&name, bytes)?))?;
        Ok((made.report, made.stored))
    }

    /// Stores the parts of one matrix, the whole or all bands, as [`Matrices::write`] does.
    pub(crate) fn write_parts(
        &mut self,
        parts: &[(LinearId, PlannedLayer)],
        shift: Option<&[f32]>,
    ) -> Result<(Vec<LayerReport>, Vec<Stored>), Error> {
        parts.iter().map(|(id, layer)| self.write(*id, layer, shift)).collect()
    }

    /// The layer that a stored matrix will be at run time.
    fn linear(&self, id: LinearId, stored: Stored, kernels: &Kernels) -> Result<Linear, Error> {
        let bias = self.rounds.source.bias(id)?;
        let linear = match stored {
            Stored::Half(values) => {
                let values = values.into_iter().map(f16::to_f32).collect();
                Linear::dense(id.shape(self.rounds.source.config()), values, bias)
            }
            Stored::Packed(packed) => Linear::packed(PackedMatrix::new(kernels, &packed.view()), bias),
        };
        Ok(linear.map_err(fracbit_model::Error::from)?)
    }

    /// The layer that the stored parts of a matrix will be at run time: the whole, or all bands.
    pub(crate) fn joined(
        &self,
        id: LinearId,
        mut parts: Vec<Stored>,
        kernels: &Kernels,
    ) -> Result<Linear, Error> {
        let Some(bands) = self.rounds.plan.bands.get(&id.to_string()) else {
            return self.linear(id, parts.remove(0), kernels);
        };
        let packed = |part: Stored| match part {
            Stored::Packed(packed) => Some(PackedMatrix::new(kernels, &packed.view())),
            Stored::Half(_) => None, // refused with the plan
        };
        let matrices = parts.into_iter().filter_map(packed).collect();
        let linear = Linear::banded(matrices, bands.each(), self.rounds.source.bias(id)?);
        Ok(linear.map_err(fracbit_model::Error::from)?)
    }
}

/// Rounds to half precision, and returns the relative squared error too.
fn halves(weights: &[f32], source: &WeightSource, id: LinearId) -> Result<(f64, Vec<f16>), Error> {
    let rounded: Vec<f16> = weights.iter().map(|&w| f16::from_f32(w)).collect();
    if let Some(at) = rounded.iter().position(|w| !w.is_finite()) {
        let rule = format!("weight {} is beyond half precision: quantize this matrix instead", weights[at]);
        return Err(Error::Packed {
            path: source.checkpoint().dir().to_path_buf(),
            tensor: id.weight_name(),
            rule,
        });
    }
    let square = |x: f32| f64::from(x).powi(2);
    let error: f64 = weights.iter().zip(&rounded).map(|(&w, r)| square(w - r.to_f32())).sum();
    let energy: f64 = weights.iter().map(|&w| square(w)).sum();
    Ok((if energy > 0.0 { error / energy } else { 0.0 }, rounded))
}

pub(crate) fn f32_bytes(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}

fn f16_bytes(values: &[f16]) -> Vec<u8> {
    values.iter().flat_map(|v| v.to_le_bytes()).collect()
}
