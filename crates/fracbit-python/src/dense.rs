//! Weights for other programs: a model's tensors as transformers names and shapes them.

use crate::{
    errors::{Refused, argument, raise, refuse},
    work,
};
use numpy::{
    IntoPyArray, PyArray2, PyArrayDyn, PyReadonlyArray1, PyReadonlyArray2,
    ndarray::{Array2, ArrayD},
};
use pyo3::{prelude::*, types::PyDict};
use std::path::PathBuf;

/// A model's weights as a checkpoint of transformers has them: its names, its shapes, not rotated.
///
/// `path` is a model directory, quantized or not, or a GGUF file; with `verify` the checksum of
/// every tensor is checked on the way. The tensors make the model that `fracbit.load` runs, in any
/// program that reads such a checkpoint. Any number of threads may use it at once. Raises
/// InputError for what `fracbit.load` refuses.
///
/// >>> dense = fracbit.Dense(demo)
/// >>> dense.shapes["model.norm.weight"], dense.tensor("model.norm.weight").dtype
/// ((192,), dtype('float32'))
#[pyclass(frozen, module = "fracbit")]
pub(crate) struct Dense(fracbit::Dense);

impl Dense {
    /// Numbers in the shape of the tensor `name`.
    fn shaped(&self, name: &str) -> Refused<ArrayD<f32>> {
        let values = self.0.tensor(name).map_err(refuse)?;
        let shape = self.0.tensors().find(|(own, _)| *own == name).map(|(_, shape)| shape.to_vec());
        let shape = shape.expect("it was found");
        Ok(ArrayD::from_shape_vec(shape, values).expect("a number for each place"))
    }
}

/// Rows of the width that the numbers have.
fn rows(values: Vec<f32>, count: usize) -> Array2<f32> {
    let width = values.len() / count.max(1);
    Array2::from_shape_vec((count, width), values).expect("whole rows")
}

#[pymethods]
impl Dense {
    #[new]
    #[pyo3(signature = (path, *, verify=true))]
    fn new(py: Python<'_>, path: PathBuf, verify: bool) -> PyResult<Self> {
        let dense = work::run(py, None, |listener| {
            let opened = fracbit_cli::open(&path, listener)?;
            Ok(fracbit::Dense::new(&opened, &fracbit::kernels()?, verify)?)
        })?;
        Ok(Self(dense))
    }

    /// The shape of every tensor, by its name. A matrix is (outputs, inputs).
    #[getter]
    fn shapes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let shapes = PyDict::new(py);
        for (name, shape) in self.0.tensors() {
            shapes.set_item(name, pyo3::types::PyTuple::new(py, shape)?)?;
        }
        Ok(shapes)
    }

    /// Bytes of the packed matrices in memory.
    #[getter]
    fn nbytes(&self) -> u64 {
        self.0.bytes().0
    }

    /// One tensor, decoded: float32. Raises InputError for a name that is not there.
    fn tensor<'py>(&self, py: Python<'py>, name: &str) -> PyResult<Bound<'py, PyArrayDyn<f32>>> {
        let found = py.detach(|| self.shaped(name));
        Ok(found.map_err(|refusal| raise(py, &refusal))?.into_pyarray(py))
    }

    /// `x @ W.T`, and the bias added where there is one, for the packed matrix `name` (with
    /// `.weight`): float32 of (tokens, inputs) in, (tokens, outputs) out. It is multiplied as it is
    /// stored, without decoding it; inputs are rounded to integers as in `fracbit.load`. Raises
    /// InputError for experts, which a router chooses from.
    fn product<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        x: PyReadonlyArray2<'py, f32>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let x = x.as_array();
        let standard = x.as_standard_layout();
        let values = standard.as_slice().expect("in standard layout");
        let tokens = x.nrows();
        let found = py.detach(|| Ok(rows(self.0.product(name, values).map_err(refuse)?, tokens)));
        Ok(found.map_err(|refusal| raise(py, &refusal))?.into_pyarray(py))
    }

    /// Rows of the packed embedding `name`, decoded: int64 of (tokens) in, float32 of (tokens,
    /// width) out. Raises ArgumentError for a token that is not there.
    fn rows<'py>(
        &self,
        py: Python<'py>,
        name: &str,
        tokens: PyReadonlyArray1<'py, i64>,
    ) -> PyResult<Bound<'py, PyArray2<f32>>> {
        let tokens = tokens.as_array();
        let found = py.detach(|| {
            let at = |&token: &i64| {
                usize::try_from(token).map_err(|_| argument("tokens", format_args!("{token} is below 0")))
            };
            let at = tokens.iter().map(at).collect::<Refused<Vec<_>>>()?;
            Ok(rows(self.0.rows(name, &at).map_err(refuse)?, at.len()))
        });
        Ok(found.map_err(|refusal| raise(py, &refusal))?.into_pyarray(py))
    }

    fn __repr__(&self) -> String {
        format!("Dense(tensors={}, nbytes={})", self.0.tensors().count(), self.nbytes())
    }
}
