//! Group-wise codebooks of `B` bits, up to 64 entries in all: an index is the number of the group's
//! codebook, from the lowest bits of its scale, above the code. Joining the two is one logic
//! instruction for 64 weights; then one `vpermb` looks up.

use super::{
    expand::{Expand, flip, regrouped},
    spread::{Spread, spread_lines},
    *,
};
use fracbit_kernels::Args;

#[derive(Clone, Copy)]
pub(super) struct Books<const F: usize, const B: usize> {
    spread: Spread<F, 1>,
    cuts: [__m512i; 2],
    table: __m512i,
    /// Place of each row's scale among the sixteen, in bytes, for the two halves.
    rows: [__m512i; 2],
    /// Bits of a code, in every byte.
    codes: __m512i,
    /// Bits of a codebook's number, in every word.
    numbers: __m256i,
}

/// Lines behind the spread and the cuts: what [`Books`] loads.
pub(super) fn lines(codebook: &Codebook, bits: usize) -> Vec<Line> {
    let entries = codebook.entries();
    let biased =
        |i: usize| u8::try_from(entries[i % entries.len()] + 128).expect("an entry on the int8 grid");
    let lane = |row: usize| LANES.iter().position(|&r| usize::from(r) == row).expect("a row of a tile");
    let rows = |half: usize| {
        Line(std::array::from_fn(|b| u8::try_from(2 * lane(8 * half + b / 8)).expect("below 32")))
    };
    let count = u8::try_from(codebook.books() - 1).expect("at most 16 codebooks");
    let numbers = Line(std::array::from_fn(|b| if b % 2 == 0 { count } else { 0 }));
    vec![Line(std::array::from_fn(biased)), rows(0), rows(1), Line([(1 << bits) - 1; 64]), numbers]
}

impl<const F: usize, const B: usize> Expand for Books<F, B> {
    const WIDE: bool = false;
    const BOUND: bool = true;
    const IN_EIGHTS: usize = 8;
    /// Codes with bits of their neighbours above, `[half][piece]`.
    type Mid = [[__m512i; 2]; 2];

    #[inline]
    fn parts(mid: &mut Self::Mid) -> &mut [__m512i] {
        mid.as_flattened_mut()
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn new(&Args { table, tile_bytes, .. }: &Args<'_>) -> Self {
        let rest = &table[spread_lines(1)..];
        Self {
            spread: Spread::load(table, tile_bytes),
            cuts: [line(&rest[0]), line(&rest[1])],
            table: line(&rest[2]),
            rows: [line(&rest[3]), line(&rest[4])],
            codes: line(&rest[5]),
            numbers: _mm512_castsi512_si256(line(&rest[6])),
        }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn signed(self) -> Self {
        Self { table: flip(self.table), ..self }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn books(&self, scales: *const half::f16) -> [__m512i; 2] {
        // SAFETY: promised by the caller.
        let scales = unsafe { _mm256_loadu_si256(scales.cast()) };
        let numbers = _mm256_and_si256(scales, self.numbers);
        let numbers = match B {
            2 => _mm256_slli_epi16::<2>(numbers),
            3 => _mm256_slli_epi16::<3>(numbers),
            _ => _mm256_slli_epi16::<4>(numbers),
        };
        let numbers = _mm512_castsi256_si512(numbers);
        [_mm512_permutexvar_epi8(self.rows[0], numbers), _mm512_permutexvar_epi8(self.rows[1], numbers)]
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn begin(&self, code: *const u8) -> Self::Mid {
        // SAFETY: promised by the caller.
        let [spread] = unsafe { self.spread.spread::<false>(code) };
        let mut out = [[_mm512_setzero_si512(); 2]; 2];
        for (out, stretch) in out.iter_mut().zip(spread) {
            for (out, cut) in out.iter_mut().zip(self.cuts) {
                *out = _mm512_multishift_epi64_epi8(cut, stretch);
            }
        }
        out
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn end(&self, codes: Self::Mid) -> [[__m512i; 4]; 2] {
        // SAFETY: the features are here.
        unsafe { self.end_by(codes, [_mm512_setzero_si512(); 2]) }
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn end_by(&self, codes: Self::Mid, books: [__m512i; 2]) -> [[__m512i; 4]; 2] {
        let mut out = [[_mm512_setzero_si512(); 4]; 2];
        for ((out, codes), books) in out.iter_mut().zip(codes).zip(books) {
            for (out, code) in out.iter_mut().zip(codes) {
                // Bits of the code from the code, the others from the number: a ? b : c.
                let index = _mm512_ternarylogic_epi32::<0xCA>(self.codes, code, books);
                *out = _mm512_permutexvar_epi8(index, self.table);
            }
        }
        out
    }

    #[inline]
    #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512vnni,avx512vbmi,avx512vbmi2")]
    unsafe fn regroup_by(&self, codes: Self::Mid, books: [__m512i; 2]) -> [__m512i; 8] {
        // SAFETY: the features are here.
        regrouped(unsafe { self.end_by(codes, books) }, 2)
    }
}
