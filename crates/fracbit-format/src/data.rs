//! One packed matrix: its planes with the tables that decode them.

use crate::{
    Codebook, Element, Grouping, Layout, PackedError, PackedView, PlaneName, PlaneSpec, Planes, SchemeSpec,
    TILE_ROWS,
};
use fracbit_base::{Scheme, Shape, ShapeError};
use half::f16;
use std::{borrow::Cow, sync::Arc};

/// The elements of one plane. Codes may stay where a file is mapped.
#[derive(Clone, Debug, PartialEq)]
pub enum Plane<'a> {
    /// Bytes.
    U8(Cow<'a, [u8]>),
    /// Half precision.
    F16(Vec<f16>),
    /// Single precision.
    F32(Vec<f32>),
}

impl<'a> Plane<'a> {
    /// A plane from the little-endian bytes of a file; a last incomplete element is left out, which
    /// shows in the length.
    #[must_use]
    pub fn from_bytes(element: Element, bytes: &'a [u8]) -> Self {
        match element {
            Element::U8 => Self::U8(Cow::Borrowed(bytes)),
            Element::F16 => Self::F16(bytes.as_chunks().0.iter().map(|&b| f16::from_le_bytes(b)).collect()),
            Element::F32 => Self::F32(bytes.as_chunks().0.iter().map(|&b| f32::from_le_bytes(b)).collect()),
        }
    }

    /// The bytes that a file holds.
    #[must_use]
    pub fn to_bytes(&self) -> Cow<'_, [u8]> {
        match self {
            Self::U8(bytes) => Cow::Borrowed(bytes),
            Self::F16(values) => values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into(),
            Self::F32(values) => values.iter().flat_map(|v| v.to_le_bytes()).collect::<Vec<u8>>().into(),
        }
    }

    /// Type of its elements.
    #[must_use]
    pub const fn element(&self) -> Element {
        match self {
            Self::U8(_) => Element::U8,
            Self::F16(_) => Element::F16,
            Self::F32(_) => Element::F32,
        }
    }
}

/// A packed matrix: what quantizers make, files hold, and kernels and devices are made from.
///
/// Weight `(r, c)` is the sum over planes of `gain * scales[r * groups + c / group] * step *
/// integer`, with the gain, scales and integers of each; all schemes but the nested have one. The
/// integer of a progressive scheme is the weight of its first level
/// ([`SecondLevel`](crate::SecondLevel)).
#[derive(Clone, Debug, PartialEq)]
pub struct PackedMatrixData<'a> {
    spec: SchemeSpec,
    layout: Layout,
    grouping: Grouping,
    codes: Cow<'a, [u8]>,
    second_level: Cow<'a, [u8]>, // (rows, groups of the second level)
    scales: Vec<f16>,            // (planes, rows, groups)
    gains: Vec<f32>,
    codebooks: Vec<Arc<Codebook>>, // one for each segment of the layout
}

impl<'a> PackedMatrixData<'a> {
    /// Checks that the parts fit: `planes` are those of the scheme's [`SchemeSpec`] in its order,
    /// `codebooks` those of the segments of the [`Layout`].
    ///
    /// # Errors
    /// When a type, length, codebook or number does not fit.
    pub fn new(
        scheme: Scheme,
        shape: Shape,
        grouping: Grouping,
        codebooks: Vec<Arc<Codebook>>,
        planes: impl IntoIterator<Item = Plane<'a>>,
    ) -> Result<Self, PackedError> {
        const OP: &str = "packed matrix";
        let spec = SchemeSpec::of(scheme);
        let (mut codes, mut second_level) = (Cow::Borrowed(&[][..]), Cow::Borrowed(&[][..]));
        let (mut scales, mut gains) = (Vec::new(), Vec::new());
        let mut given = planes.into_iter();
        for plane in &spec.planes {
            match (plane.name, given.next()) {
                (PlaneName::Codes, Some(Plane::U8(bytes))) => codes = bytes,
                (PlaneName::SecondLevel, Some(Plane::U8(bytes))) => second_level = bytes,
                (PlaneName::Scales, Some(Plane::F16(values))) => scales = values,
                (PlaneName::Gain, Some(Plane::F32(values))) => gains = values,
                (name, got) => {
                    let got = got.map_or("nothing".to_owned(), |got| format!("{:?}", got.element()));
                    let want = format_args!("of {:?}", plane.element);
                    return Err(ShapeError::new(OP, name.suffix(), want, got).into());
                }
            }
        }
        if given.next().is_some() {
            return Err(ShapeError::new(OP, "planes", spec.planes.len(), "more").into());
        }
        let group = grouping.columns(shape.cols);
        let books: Vec<&Codebook> = codebooks.iter().map(AsRef::as_ref).collect();
        let planes = Planes { codes: &codes, second_level: &second_level, scales: &scales, gains: &gains };
        let layout = PackedView::new(scheme, shape, &books, planes, group)?.layout().clone();
        Ok(Self { spec, layout, grouping, codes, second_level, scales, gains, codebooks })
    }

    /// The scheme's description.
    #[must_use]
    pub const fn spec(&self) -> &SchemeSpec {
        &self.spec
    }

    /// The scheme.
    #[must_use]
    pub const fn scheme(&self) -> Scheme {
        self.spec.scheme
    }

    /// Rows and columns without padding.
    #[must_use]
    pub const fn shape(&self) -> Shape {
        self.layout.shape()
    }

    /// Which weights share a scale.
    #[must_use]
    pub const fn grouping(&self) -> Grouping {
        self.grouping
    }

    /// Codes in the canonical layout.
    #[must_use]
    pub fn codes(&self) -> &[u8] {
        &self.codes
    }

    /// Codes, to be changed: any bytes are codes.
    pub fn codes_mut(&mut self) -> &mut [u8] {
        self.codes.to_mut()
    }

    /// Integer scales and zeros, (rows, groups of the second level); empty for a scheme of one
    /// level.
    #[must_use]
    pub fn second_level(&self) -> &[u8] {
        &self.second_level
    }

    /// Scales, (planes, rows, groups).
    #[must_use]
    pub fn scales(&self) -> &[f16] {
        &self.scales
    }

    /// Scales, to be changed; they should stay finite.
    pub fn scales_mut(&mut self) -> &mut [f16] {
        &mut self.scales
    }

    /// Factor common to all scales of the first plane.
    #[must_use]
    pub fn gain(&self) -> f32 {
        self.gains[0]
    }

    /// Factor common to all scales, for each plane.
    #[must_use]
    pub fn gains(&self) -> &[f32] {
        &self.gains
    }

    /// A codebook for each segment of the layout.
    #[must_use]
    pub fn codebooks(&self) -> &[Arc<Codebook>] {
        &self.codebooks
    }

    /// The planes with their descriptions, in the order of files.
    pub fn planes(&self) -> impl Iterator<Item = (PlaneSpec, Plane<'_>)> {
        self.spec.planes.iter().map(|&spec| {
            let plane = match spec.name {
                PlaneName::Codes => Plane::U8(Cow::Borrowed(&self.codes)),
                PlaneName::SecondLevel => Plane::U8(Cow::Borrowed(&self.second_level)),
                PlaneName::Scales => Plane::F16(self.scales.clone()),
                PlaneName::Gain => Plane::F32(self.gains.clone()),
            };
            (spec, plane)
        })
    }

    /// The matrix as kernels and the reference decoder see it.
    #[must_use]
    pub fn view(&self) -> PackedView<'_> {
        let books = self.codebooks.iter().map(AsRef::as_ref).collect();
        let group = self.grouping.columns(self.shape().cols);
        let Self { codes, second_level, scales, gains, .. } = self;
        PackedView::checked(self.layout.clone(), books, Planes { codes, second_level, scales, gains }, group)
    }

    /// The same without borrowed codes.
    #[must_use]
    pub fn into_owned(self) -> PackedMatrixData<'static> {
        let Self { spec, layout, grouping, codes, second_level, scales, gains, codebooks } = self;
        let [codes, second_level] = [codes, second_level].map(|bytes| Cow::Owned(bytes.into_owned()));
        PackedMatrixData { spec, layout, grouping, codes, second_level, scales, gains, codebooks }
    }

    /// The matrix that has the rows of all `members` in order: the weights are the same, bit for
    /// bit.
    ///
    /// Gains are powers of two, so scales move to the smallest of them exactly unless they
    /// overflow.
    ///
    /// # Errors
    /// [`PackedError::Kinds`] when they have not one scheme, width, grouping and set of tables, or
    /// one but the last has no whole tiles; [`PackedError::Gains`] when their gains are too far
    /// apart for half-precision scales.
    pub fn stack(members: &[Self]) -> Result<PackedMatrixData<'static>, PackedError> {
        let Some((first, last)) = members.first().zip(members.last()) else { return Err(PackedError::Kinds) };
        let fits = |m: &Self| {
            m.scheme() == first.scheme()
                && m.shape().cols == first.shape().cols
                && m.grouping == first.grouping
                && m.codebooks == first.codebooks
        };
        let whole = |m: &Self| m.shape().rows.is_multiple_of(TILE_ROWS);
        if !members.iter().all(fits) || !members[..members.len() - 1].iter().all(whole) {
            return Err(PackedError::Kinds);
        }
        let shape = Shape::new(members.iter().map(|m| m.shape().rows).sum(), last.shape().cols);
        let bytes = |of: fn(&Self) -> &[u8]| members.iter().flat_map(of).copied().collect::<Vec<u8>>();
        let [codes, second_level] = [bytes(Self::codes), bytes(Self::second_level)];
        let (mut scales, mut gains) = (Vec::new(), Vec::new());
        for plane in 0..first.scheme().planes() {
            let gain = members.iter().map(|m| m.gains[plane]).fold(f32::INFINITY, f32::min);
            let books =
                || first.layout.segments().iter().zip(&first.codebooks).filter(|(s, _)| s.plane == plane);
            for member in members {
                let own = member.gains[plane];
                let each = member.scales.len() / member.gains.len();
                for &scale in &member.scales[plane * each..][..each] {
                    let moved = f16::from_f32(scale.to_f32() * (own / gain));
                    // Equal to the last bit, or not at all; an overflow is not equal. A scale that
                    // becomes a normal number keeps its value, but not the lowest bits, where some
                    // schemes have the number of a codebook.
                    let same_book = books().all(|(_, b)| b.book_of(moved) == b.book_of(scale));
                    if moved.to_f32() * gain != scale.to_f32() * own || !same_book {
                        return Err(PackedError::Gains);
                    }
                    scales.push(moved);
                }
            }
            gains.push(gain);
        }
        let second_level = first.spec.second_level.map(|_| Plane::U8(second_level.into()));
        let codes = std::iter::once(Plane::U8(codes.into())).chain(second_level);
        let planes = codes.chain([Plane::F16(scales), Plane::F32(gains)]);
        PackedMatrixData::new(first.scheme(), shape, first.grouping, first.codebooks.clone(), planes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn data(
        scheme: &str,
        entries: usize,
        shape: Shape,
        gain: f32,
        scales: &[f32],
    ) -> PackedMatrixData<'static> {
        let scheme: Scheme = scheme.parse().unwrap();
        let book = Codebook::new(scheme, (0..entries).map(|e| e as i16 - 7).collect(), 0.5).unwrap();
        let codes: Vec<u8> = (0..Layout::new(scheme, shape).len()).map(|i| (i * 89 + 7) as u8).collect();
        let scales = scales.iter().map(|&s| f16::from_f32(s)).collect();
        let planes = [Plane::U8(codes.into()), Plane::F16(scales), Plane::F32(vec![gain])];
        let grouping = Grouping::Columns(16);
        PackedMatrixData::new(scheme, shape, grouping, vec![Arc::new(book)], planes).unwrap()
    }

    #[test]
    fn planes_go_to_bytes_and_back() {
        let one = data("nuq-4", 16, Shape::new(2, 20), 0.5, &[1.0, 2.0, 3.0, 0.25]);
        let bytes: Vec<_> =
            one.planes().map(|(spec, plane)| (spec.element, plane.to_bytes().into_owned())).collect();
        let planes = bytes.iter().map(|(element, bytes)| Plane::from_bytes(*element, bytes));
        let books = one.codebooks().to_vec();
        let again = PackedMatrixData::new(one.scheme(), one.shape(), one.grouping(), books, planes).unwrap();
        assert_eq!(again, one);
        assert_eq!(again.into_owned(), one);
        let sum: usize = bytes.iter().map(|(_, bytes)| bytes.len()).sum();
        assert_eq!(sum as u64, one.spec().bytes(one.shape(), one.grouping()).0);
    }

    #[test]
    fn planes_of_other_kinds_are_refused() {
        let one = data("nuq-4", 16, Shape::new(1, 16), 0.5, &[1.0]);
        let make = |planes: Vec<Plane<'static>>| {
            let books = one.codebooks().to_vec();
            let made = PackedMatrixData::new(one.scheme(), one.shape(), one.grouping(), books, planes);
            made.map_err(|e| e.to_string())
        };
        let (codes, scales) = (|| Plane::U8(vec![0; 128].into()), || Plane::F16(vec![f16::ONE]));
        let gain = || Plane::F32(vec![1.0]);
        assert!(make(vec![codes(), scales(), gain()]).is_ok());
        for (planes, word) in [
            (vec![codes(), scales()], "`gain`"),
            (vec![codes(), gain(), scales()], "`scales`"),
            (vec![scales(), scales(), gain()], "`codes`"),
            (vec![codes(), scales(), gain(), gain()], "`planes`"),
            (vec![codes(), scales(), Plane::F32(vec![])], "`gain`"),
            (vec![codes(), scales(), Plane::F32(vec![f32::NAN])], "gain should be finite"),
            (vec![codes(), Plane::F16(vec![]), gain()], "`scales`"),
            (vec![Plane::U8(vec![0; 127].into()), scales(), gain()], "`codes`"),
        ] {
            let error = make(planes).unwrap_err();
            assert!(error.contains(word), "{word}: {error}");
        }
    }

    #[test]
    fn stacked_weights_are_those_of_the_members() {
        let ones = |rows, gain, scale| data("nuq-4", 16, Shape::new(rows, 16), gain, &vec![scale; rows]);
        let members = [ones(16, 2.0, 0.25), ones(5, 0.5, 0.75)];
        let whole = PackedMatrixData::stack(&members).unwrap();
        assert_eq!((whole.gains(), whole.shape()), (&[0.5][..], Shape::new(21, 16)));
        let apart: Vec<f32> = members.iter().flat_map(|m| m.view().dequantize()).collect();
        assert_eq!(whole.view().dequantize(), apart);
        let stack = PackedMatrixData::stack;
        assert_eq!(stack(&[ones(16, 1e6, 1.0), ones(16, 1.0, 1.0)]), Err(PackedError::Gains), "overflow");
        assert_eq!(stack(&[ones(15, 1.0, 1.0), ones(16, 1.0, 1.0)]), Err(PackedError::Kinds), "cut tiles");
        let other = data("nuq-3", 8, Shape::new(16, 16), 1.0, &[1.0; 16]);
        assert_eq!(stack(&[ones(16, 1.0, 1.0), other]), Err(PackedError::Kinds), "two schemes");
        assert_eq!(stack(&[]), Err(PackedError::Kinds));
    }

    #[test]
    fn a_stacked_scale_keeps_the_number_of_its_codebook() {
        // A scale of 2^-24 has bit 0 set: the second codebook. As a normal number of the same value
        // it would have the first.
        let group = |gain, scale: f32| data("gnuq-2", 8, Shape::new(16, 16), gain, &[scale; 16]);
        let tiny = 2f32.powi(-24);
        let moved = PackedMatrixData::stack(&[group(4096.0, tiny), group(1.0, 1.0)]);
        assert_eq!(moved, Err(PackedError::Gains));
        assert!(PackedMatrixData::stack(&[group(4096.0, 0.5), group(1.0, 1.0)]).is_ok());
    }
}
