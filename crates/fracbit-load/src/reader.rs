//! Tensors of a quantized directory, checked as they are read.

use crate::{
    Error,
    directory::{self, BANDS, QuantizationConfig, codebook_names, plane_name},
};
use fracbit_base::{Scheme, Shape};
use fracbit_format::{
    Codebook, Element, Layout, PackedError, PackedMatrixData, Plane, PlaneName, SchemeSpec,
};
use fracbit_io::{Checkpoint, Dtype, TensorView};
use fracbit_kernels::{Kernels, PackedMatrix};
use fracbit_model::LinearId;
use fracbit_plan::{
    bands::Bands,
    storage::{Module, Storage},
};
use std::{
    collections::{BTreeMap, btree_map::Entry},
    sync::Arc,
};

/// The codebooks of a directory, as far as they were read.
pub(crate) type Books = BTreeMap<Scheme, Arc<Codebook>>;

/// Reads tensors of a quantized directory.
pub struct Reader<'a> {
    /// The directory.
    pub checkpoint: &'a Checkpoint,
    /// Whether the hash of every tensor that is read is compared with the manifest.
    pub verify: bool,
}

impl<'a> Reader<'a> {
    /// What a tensor breaks, with the directory.
    #[must_use]
    pub fn bad(&self, tensor: &str, rule: String) -> Error {
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
    pub(crate) fn codebooks(&self, scheme: Scheme, books: &mut Books) -> Result<(), Error> {
        for table in scheme.tables() {
            if let Entry::Vacant(book) = books.entry(table) {
                book.insert(Arc::new(self.codebook(table)?));
            }
        }
        Ok(())
    }

    /// Which of `count` bands each of the `rows` rows of a matrix is in.
    ///
    /// # Errors
    /// When the tensor is missing, damaged or of another length, or has another number of bands.
    pub fn bands(&self, id: LinearId, rows: usize, count: usize) -> Result<Bands, Error> {
        let own = directory::bands_name(id);
        let name = if id.is_layer() || self.checkpoint.info(&own).is_ok() { own } else { BANDS.to_owned() };
        let bytes = self.tensor(&name, Dtype::U8)?.bytes;
        let bands = Bands::from_bytes(bytes, rows).map_err(|rule| self.bad(&name, rule))?;
        if bands.count() != count {
            return Err(self.bad(&name, format!("should have {count} bands, got {}", bands.count())));
        }
        Ok(bands)
    }

    /// The bands of a matrix and what `make` makes of each; `None` where it is stored as a whole.
    pub(crate) fn banded<T>(
        &self,
        block: &QuantizationConfig,
        id: LinearId,
        shape: Shape,
        books: &mut Books,
        make: impl Fn(&PackedMatrixData<'_>) -> T,
    ) -> Result<Option<(Bands, Vec<T>)>, Error> {
        let Some(modules) = block.bands(id, self.checkpoint.dir())? else { return Ok(None) };
        let bands = self.bands(id, shape.rows, modules.len())?;
        let mut made = Vec::with_capacity(modules.len());
        for (band, module) in modules.into_iter().enumerate() {
            let shape = Shape::new(bands.rows(band).count(), shape.cols);
            made.push(make(&self.matrix((id, Some(band)), shape, module, books)?));
        }
        Ok(Some((bands, made)))
    }

    /// A packed matrix, or a band of its rows, as stored.
    ///
    /// # Panics
    /// When `module` has no scheme.
    pub(crate) fn matrix(
        &self,
        (id, band): (LinearId, Option<usize>),
        shape: Shape,
        module: Module,
        books: &mut Books,
    ) -> Result<PackedMatrixData<'a>, Error> {
        let Storage::Packed(scheme) = module.scheme else { panic!("{id} is stored at 16 bits") };
        self.codebooks(scheme, books)?;
        let name = |plane| plane_name(id, band, plane);
        let planes = SchemeSpec::of(scheme).planes.into_iter().map(|plane| {
            Ok(match plane.element {
                Element::F32 => Plane::F32(self.f32s(&name(plane.name), scheme.planes())?),
                element => {
                    let view = self.tensor(&name(plane.name), directory::dtype(element))?;
                    Plane::from_bytes(element, view.bytes)
                }
            })
        });
        let planes = planes.collect::<Result<Vec<_>, Error>>()?;
        let layout = Layout::new(scheme, shape);
        let used = layout.segments().iter().map(|s| Arc::clone(&books[&s.scheme])).collect();
        PackedMatrixData::new(scheme, shape, module.grouping(), used, planes).map_err(|e| {
            let of = |plane: &PlaneName| matches!(&e, PackedError::Shape(e) if e.arg == plane.suffix());
            let plane = [PlaneName::Scales, PlaneName::SecondLevel].into_iter().find(of);
            self.bad(&name(plane.unwrap_or(PlaneName::Codes)), e.to_string())
        })
    }

    /// One matrix, or the fused one of several that were checked to fit together.
    pub(crate) fn stacked(
        &self,
        ids: &[LinearId],
        members: &[PackedMatrixData<'_>],
        kernels: &Kernels,
    ) -> Result<PackedMatrix, Error> {
        if let [data] = members {
            return Ok(PackedMatrix::new(kernels, &data.view()));
        }
        let whole = PackedMatrixData::stack(members)
            .map_err(|e| self.bad(&plane_name(ids[0], None, PlaneName::Gain), e.to_string()))?;
        Ok(PackedMatrix::new(kernels, &whole.view()))
    }
}
