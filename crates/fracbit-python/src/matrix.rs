//! Single matrices, numpy in and out.

use crate::{
    errors::{Refused, argument, raise, refuse},
    work,
};
use fracbit::{Effort, Rounders, plan::grouping};
use fracbit_base::{Scheme, Shape};
use fracbit_model::RotationMode;
use fracbit_quant::{Hessian, Quantized, Rounding, quantize_with};
use fracbit_rotation::Rotation;
use numpy::{
    IntoPyArray, PyArray2, PyArrayMethods, PyReadonlyArray2,
    ndarray::{Array2, ArrayView2},
};
use pyo3::{
    prelude::*,
    types::{IntoPyDict, PyAny},
};
use rayon::prelude::*;
use std::fmt::Display;

/// A matrix in a scheme of the palette; `quantize_matrix` makes one and `dequantize` reads it.
#[pyclass(frozen, module = "fracbit")]
pub(crate) struct PackedMatrix {
    quantized: Quantized,
    scheme: Scheme,
    shape: Shape,
    /// What its columns were rotated by.
    rotation: Option<Rotation>,
}

/// What to make of a matrix.
struct Recipe {
    scheme: Scheme,
    effort: Effort,
    /// The seed of the rotation, if there is one.
    rotated: Option<u64>,
}

impl Recipe {
    fn new(scheme: &str, effort: &str, rotate: bool, seed: u64) -> Refused<Self> {
        let scheme = scheme.parse().map_err(|error: fracbit_base::SchemeError| argument("scheme", error))?;
        let effort =
            effort.parse().map_err(|error: <Effort as std::str::FromStr>::Err| argument("effort", error))?;
        Ok(Self { scheme, effort, rotated: rotate.then_some(seed) })
    }

    fn pack(
        &self,
        weights: ArrayView2<'_, f32>,
        moments: Option<ArrayView2<'_, f32>>,
        progress: &dyn fracbit::Progress,
    ) -> Refused<PackedMatrix> {
        let (rows, cols) = weights.dim();
        let (scheme, shape) = (self.scheme, Shape::new(rows, cols));
        let named =
            |source| refuse(fracbit::Error::Tensor { tensor: "weights".to_owned(), shape, scheme, source });
        let rotation = self.rotated.map(|seed| Rotation::new(cols, seed, 0)).transpose();
        let rotation = rotation.map_err(fracbit_model::Error::from).map_err(refuse)?;
        // Row by row, whatever the strides are.
        let mut values: Vec<f32> = weights.iter().copied().collect();
        let mut inputs = moments.map(|moments| {
            if moments.dim() == (cols, cols) {
                return Ok(moments.iter().copied().collect::<Vec<f32>>());
            }
            let (rows, got) = moments.dim();
            Err(argument("moments", format_args!("should be ({cols}, {cols}), got ({rows}, {got})")))
        });
        let inputs = inputs.take().transpose()?;
        let inputs = match (&rotation, inputs) {
            (Some(rotation), inputs) => {
                values.par_chunks_mut(cols).for_each(|row| rotation.apply(row));
                inputs.map(|mut inputs| {
                    rotation.apply_rows(&mut inputs);
                    rotation.rotate_output(&mut inputs, cols);
                    inputs
                })
            }
            (None, inputs) => inputs,
        };
        let moments = inputs.map(|inputs| Hessian::new(cols, inputs)).transpose();
        let moments: Vec<Hessian> =
            moments.map_err(|error| argument("moments", error))?.into_iter().collect();
        let rounders = Rounders::new(self.effort);
        let rounding = Rounding { moments: &moments, ..Rounding::new(&rounders) };
        let mode = if rotation.is_some() { RotationMode::Online } else { RotationMode::None };
        progress.stage("quantizing", shape.len() as u64);
        let advance = |weights: usize| progress.advance(weights as u64);
        let quantized = quantize_with(&values, shape, scheme, grouping(mode, scheme), rounding, &advance);
        Ok(PackedMatrix { quantized: quantized.map_err(named)?, scheme, shape, rotation })
    }
}

/// A matrix of floats as numpy has it, in single precision; `name` is that of the argument.
fn floats<'py>(name: &str, value: &Bound<'py, PyAny>) -> PyResult<PyReadonlyArray2<'py, f32>> {
    let py = value.py();
    let refuse = |rule: &dyn Display| Err(raise(py, &argument(name, rule)));
    let numpy = py.import("numpy")?;
    let array = numpy.call_method1("asarray", (value,))?;
    let dtype = array.getattr("dtype")?;
    let kind: String = dtype.getattr("kind")?.extract()?;
    // Not what numpy can also cast: complex numbers, text, objects.
    if !["f", "i", "u", "V"].contains(&kind.as_str()) {
        return refuse(&format_args!("should be floats, got {dtype}"));
    }
    let shape: Vec<usize> = array.getattr("shape")?.extract()?;
    if shape.len() != 2 {
        return refuse(&format_args!("should be a matrix (rows, cols), got shape {shape:?}"));
    }
    let single = [("dtype", numpy.getattr("float32")?)].into_py_dict(py)?;
    let array = numpy.call_method("asarray", (array,), Some(&single))?;
    Ok(array.cast_into::<PyArray2<f32>>()?.readonly())
}

/// Quantize one matrix, (rows, cols): outputs by inputs, as `torch.nn.Linear.weight` has them.
///
/// `weights` is an array of floats with any strides; it is rounded in single precision. `scheme`
/// is a name such as "tcq-3", "vq-2.5", "nuq-4" or "int-4". With `rotate` the inputs are rotated
/// first, by a random orthogonal transform of `seed`, so that the weights look Gaussian; the codes
/// are made for such weights, and `dequantize` rotates back. `moments` are the second moments of
/// the inputs, the mean of `x x^T`, (cols, cols): with them the error of the output is least, by
/// error feedback, in place of that of the weights. `effort` is how thoroughly trellis codes are
/// searched: "fast", "balanced" or "exact". The result does not depend on the number of threads.
///
/// >>> weights = np.random.default_rng(0).standard_normal((64, 128))
/// >>> packed = fracbit.quantize_matrix(weights, "tcq-3")
/// >>> packed
/// PackedMatrix(scheme='tcq-3', shape=(64, 128), bits_per_weight=3.1289)
/// >>> packed.relative_error < 0.02
/// True
#[pyfunction]
#[pyo3(signature = (weights, scheme, *, rotate=true, seed=0, moments=None, effort="balanced", progress=None))]
#[expect(clippy::too_many_arguments, reason = "keyword arguments")]
pub(crate) fn quantize_matrix(
    py: Python<'_>,
    weights: &Bound<'_, PyAny>,
    scheme: &str,
    rotate: bool,
    seed: u64,
    moments: Option<&Bound<'_, PyAny>>,
    effort: &str,
    progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<PackedMatrix> {
    let recipe = Recipe::new(scheme, effort, rotate, seed).map_err(|refusal| raise(py, &refusal))?;
    let weights = floats("weights", weights)?;
    let moments = moments.map(|moments| floats("moments", moments)).transpose()?;
    let (weights, moments) = (weights.as_array(), moments.as_ref().map(|moments| moments.as_array()));
    work::run(py, progress, |listener| recipe.pack(weights, moments, &*listener))
}

/// The weights of a packed matrix: float32, (rows, cols), rotated back.
///
/// >>> weights = np.eye(32, 48)
/// >>> packed = fracbit.quantize_matrix(weights, "nuq-8", rotate=False)
/// >>> bool(np.abs(fracbit.dequantize(packed) - weights).max() < 0.1)
/// True
#[pyfunction]
pub(crate) fn dequantize<'py>(py: Python<'py>, matrix: &PackedMatrix) -> Bound<'py, PyArray2<f32>> {
    let values = py.detach(|| {
        let PackedMatrix { quantized, shape, rotation, .. } = matrix;
        let (view, mut values) = (quantized.view(), vec![0.0; shape.len()]);
        values.par_chunks_mut(shape.cols).enumerate().for_each(|(row, values)| {
            view.dequantize_row(row, values);
            if let Some(rotation) = rotation {
                rotation.apply_inverse(values);
            }
        });
        Array2::from_shape_vec((shape.rows, shape.cols), values).expect("a value for each weight")
    });
    values.into_pyarray(py)
}

#[pymethods]
impl PackedMatrix {
    /// The name of the scheme.
    #[getter]
    fn scheme(&self) -> String {
        self.scheme.to_string()
    }

    /// Rows (outputs) and columns (inputs).
    #[getter]
    fn shape(&self) -> (usize, usize) {
        (self.shape.rows, self.shape.cols)
    }

    /// Bytes of codes and scales.
    #[getter]
    fn nbytes(&self) -> usize {
        self.quantized.data.planes().map(|(_, plane)| plane.to_bytes().len()).sum()
    }

    /// Bits of codes and scales per weight.
    #[getter]
    #[expect(clippy::cast_precision_loss, reason = "a ratio")]
    fn bits_per_weight(&self) -> f64 {
        8.0 * self.nbytes() as f64 / self.shape.len() as f64
    }

    /// Squared error over the squared weights.
    #[getter]
    fn relative_error(&self) -> f64 {
        self.quantized.relative_error
    }

    fn __repr__(&self) -> String {
        let Self { scheme, shape, .. } = self;
        let bits = self.bits_per_weight();
        format!(
            "PackedMatrix(scheme='{scheme}', shape=({}, {}), bits_per_weight={bits:.4})",
            shape.rows, shape.cols
        )
    }
}
