//! Codebooks in registers, and bytes looked up in them: `vpshufb` knows 16.

use super::*;
use fracbit_format::PiecewiseLinear;

/// `v >> count` in 32-bit lanes; with a constant count one instruction or none.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn right(v: __m256i, count: usize) -> __m256i {
    _mm256_srl_epi32(v, _mm_cvtsi32_si128(count as i32))
}

/// `16 N` bytes, each 16 twice.
#[inline]
#[target_feature(enable = "avx2,f16c")]
fn sixteens<const N: usize>(table: &[Line]) -> [__m256i; N] {
    let mut out = [_mm256_setzero_si256(); N];
    for (i, out) in out.iter_mut().enumerate() {
        let bytes = &table[i / 4].0[16 * (i % 4)..][..16];
        // SAFETY: the slice is 16 bytes.
        *out = _mm256_broadcastsi128_si256(unsafe { _mm_loadu_si128(bytes.as_ptr().cast()) });
    }
    out
}

/// `16 N` entries in banks of 16, each twice, as [`lookup`] wants them: every bank but the first
/// and the ninth as its difference, bit by bit, from the one before.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn banks<const N: usize>(table: &[Line], bias: u8) -> [__m256i; N] {
    let mut out = sixteens(table);
    for bank in (1..N).rev().filter(|bank| bank % 8 != 0) {
        out[bank] = _mm256_xor_si256(out[bank], out[bank - 1]);
    }
    for bank in out.iter_mut().step_by(8) {
        *bank = _mm256_xor_si256(*bank, _mm256_set1_epi8(bias.cast_signed()));
    }
    out
}

/// Looks up bytes among `16 N` entries by indices below `16 N`.
///
/// `vpshufb` gives zero where bit 7 of its index is set: with 16 subtracted `k` times, the
/// differences of the banks up to that of the index remain, and their sum without carries is its
/// entry. A blend of two banks is three operations on Intel's processors.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn lookup<const N: usize>(t: &[__m256i; N], index: __m256i) -> __m256i {
    let [entries] = lookups([t], index);
    entries
}

/// [`lookup`] in several tables.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn lookups<const N: usize, const T: usize>(
    tables: [&[__m256i; N]; T],
    index: __m256i,
) -> [__m256i; T] {
    let eight = |first: usize, mut index: __m256i| {
        let mut sums = tables.map(|t| _mm256_shuffle_epi8(t[first], index));
        for bank in first + 1..N.min(first + 8) {
            index = _mm256_sub_epi8(index, _mm256_set1_epi8(16));
            for (sum, t) in sums.iter_mut().zip(tables) {
                *sum = _mm256_xor_si256(*sum, _mm256_shuffle_epi8(t[bank], index));
            }
        }
        sums
    };
    if N <= 8 {
        return eight(0, index);
    }
    let low = low_bits(index, 7);
    let (low, high) = (eight(0, low), eight(N / 2, low));
    std::array::from_fn(|t| _mm256_blendv_epi8(low[t], high[t], index))
}

/// A table in registers.
pub(super) trait Table: Copy {
    /// Bits of an index.
    const BITS: u32;
    /// No entry is negative.
    const MAGNITUDES: bool;
    /// The entry of index 0 is zero, bias and all; of 256 entries that of index 1 as well.
    const FIRST_IS_ZERO: bool = false;

    /// Loads the lines that `tables` laid out; entries will come with `bias` (0, or 128 as their
    /// sign bit) added.
    ///
    /// # Safety
    /// The features of [`Avx2`].
    unsafe fn new(table: &[Line], bias: u8) -> Self;

    /// Entries by indices of [`BITS`](Self::BITS) bits.
    ///
    /// # Safety
    /// The features of [`Avx2`].
    unsafe fn look(&self, index: __m256i) -> __m256i;

    /// Entries by the low [`BITS`](Self::BITS) bits of bytes.
    ///
    /// # Safety
    /// The features of [`Avx2`].
    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn look_low(&self, bytes: __m256i) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe { self.look(low_bits(bytes, Self::BITS)) }
    }
}

/// Any `16 N` entries, none of them negative where `M` says so: see [`lookup`].
#[derive(Clone, Copy)]
pub(super) struct Banks<const N: usize, const M: bool>([__m256i; N]);

impl<const N: usize, const M: bool> Table for Banks<N, M> {
    const BITS: u32 = (16 * N).ilog2();
    const MAGNITUDES: bool = M;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        Self(banks(table, bias))
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn look(&self, index: __m256i) -> __m256i {
        lookup(&self.0, index)
    }
}

/// A table of fewer entries than its indices have: their lowest bits count.
#[derive(Clone, Copy)]
pub(super) struct Low<T>(T);

impl<T: Table> Table for Low<T> {
    const BITS: u32 = 8;
    const MAGNITUDES: bool = T::MAGNITUDES;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        // SAFETY: promised by the caller.
        Self(unsafe { T::new(table, bias) })
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn look(&self, index: __m256i) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe { self.0.look(low_bits(index, T::BITS)) }
    }
}

/// Plain integers of eight bits, which need no table: -127 for the unused -128.
#[derive(Clone, Copy)]
pub(super) struct Integers {
    bias: __m256i,
}

impl Table for Integers {
    const BITS: u32 = 8;
    const MAGNITUDES: bool = false;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(_table: &[Line], bias: u8) -> Self {
        Self { bias: _mm256_set1_epi8(bias.cast_signed()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn look(&self, index: __m256i) -> __m256i {
        _mm256_xor_si256(_mm256_max_epi8(index, _mm256_set1_epi8(-127)), self.bias)
    }
}

/// `64 Q` entries (`Q` is 1, 2 or 4) that are sums, the last quarter but one by one (see
/// [`TwoLevel`](fracbit_format::TwoLevel)): `2 + Q` shuffles instead of `4 Q`. `ZERO`: see
/// [`Table::FIRST_IS_ZERO`].
#[derive(Clone, Copy)]
pub(super) struct Layered<const Q: usize, const ZERO: bool> {
    coarse: __m256i,
    fine: __m256i,
    /// What the entries of the last quarter have above the sum and the ends before, 16 by 16.
    ends: [__m256i; Q],
}

impl<const Q: usize, const ZERO: bool> Table for Layered<Q, ZERO> {
    const BITS: u32 = (64 * Q).ilog2();
    const MAGNITUDES: bool = true;
    const FIRST_IS_ZERO: bool = ZERO;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        let [coarse, fine] = sixteens(table);
        Self {
            coarse: _mm256_xor_si256(coarse, _mm256_set1_epi8(bias.cast_signed())),
            fine,
            ends: sixteens(&table[1..]),
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn look(&self, index: __m256i) -> __m256i {
        let narrow = Self::BITS < 8;
        let high = low_bits(right(index, Self::BITS as usize - 4), 4);
        let low = if narrow { index } else { low_bits(index, 4) };
        let mut sum =
            _mm256_add_epi8(_mm256_shuffle_epi8(self.coarse, high), _mm256_shuffle_epi8(self.fine, low));
        // An index below that of an end has bit 7 set when that is taken away, and `vpshufb` gives
        // zero. Where indices have eight bits themselves, those more than 128 below the last end
        // are brought there, still below the first one.
        let first = fracbit_format::TwoLevel::free(64 * Q);
        let least = _mm256_set1_epi8((first + 16 * (Q - 1)).wrapping_sub(128) as i8);
        let index = if narrow { index } else { _mm256_max_epu8(index, least) };
        for (i, &end) in self.ends.iter().enumerate() {
            let from = _mm256_set1_epi8(((first + 16 * i) as u8).cast_signed());
            sum = _mm256_add_epi8(sum, _mm256_shuffle_epi8(end, _mm256_sub_epi8(index, from)));
        }
        sum
    }
}

/// 64 entries of which the first three quarters are a [`PiecewiseLinear`]: one shuffle. `BIASED`:
/// 128 is added to all.
#[derive(Clone, Copy)]
pub(super) struct Ramped<const BIASED: bool> {
    /// What the entries of the last quarter have above the ramp.
    ends: __m256i,
    mask: __m256i,
}

impl<const BIASED: bool> Table for Ramped<BIASED> {
    const BITS: u32 = PiecewiseLinear::LEN.ilog2();
    const MAGNITUDES: bool = !BIASED;
    const FIRST_IS_ZERO: bool = !BIASED;

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn new(table: &[Line], bias: u8) -> Self {
        debug_assert_eq!(bias, if BIASED { 128 } else { 0 }, "the microkernel of this instruction set");
        let [ends] = sixteens(table);
        Self { ends, mask: _mm256_set1_epi8(table[0].0[16].cast_signed()) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn look(&self, index: __m256i) -> __m256i {
        // SAFETY: promised by the caller.
        unsafe { self.look_low(index) }
    }

    #[inline]
    #[target_feature(enable = "avx2,f16c")]
    unsafe fn look_low(&self, bytes: __m256i) -> __m256i {
        let x = _mm256_and_si256(bytes, self.mask);
        // An index below the last quarter has bit 7 set when that is taken away, and `vpshufb`
        // gives zero.
        let end =
            _mm256_shuffle_epi8(self.ends, _mm256_sub_epi8(x, _mm256_set1_epi8(PiecewiseLinear::FREE as i8)));
        let ramp = _mm256_add_epi8(x, _mm256_subs_epu8(x, _mm256_set1_epi8(PiecewiseLinear::BEND as i8)));
        let sum = _mm256_add_epi8(ramp, end);
        if BIASED { _mm256_xor_si256(sum, _mm256_set1_epi8(-128)) } else { sum }
    }
}

/// The low bits of every byte.
#[inline]
#[target_feature(enable = "avx2,f16c")]
pub(super) fn low_bits(v: __m256i, bits: u32) -> __m256i {
    _mm256_and_si256(v, _mm256_set1_epi8(((1u32 << bits) - 1) as i8))
}

#[cfg(test)]
#[expect(clippy::print_stderr, reason = "a skipped test must say so")]
mod tests {
    use super::*;
    use fracbit_kernels::cases;

    /// With AVX-VNNI, too, which few machines have.
    #[test]
    fn ramps_are_their_tables_with_and_without_a_bias() {
        if Avx2::detect().is_none() {
            eprintln!("SKIPPED ramps_are_their_tables_with_and_without_a_bias: no AVX2");
            return;
        }
        for mask in [63, 62] {
            let book = cases::ramped("tcq-fast-2".parse().expect("a scheme"), mask);
            let table =
                super::super::tables::piecewise_linear_table(&book, book.piecewise_linear().expect("a ramp"));
            for first in (0..=u8::MAX).step_by(32) {
                let bytes: [u8; 32] = std::array::from_fn(|i| first + u8::try_from(i).expect("below 32"));
                let want =
                    bytes.map(|b| book.entries()[usize::from(b) % PiecewiseLinear::LEN].to_le_bytes()[0]);
                let mut got = [[0u8; 32]; 2];
                // SAFETY: AVX2 is here; loads and stores are of 32 bytes.
                unsafe {
                    let v = _mm256_loadu_si256(bytes.as_ptr().cast());
                    let [plain, biased] = [
                        Ramped::<false>::new(&table, 0).look_low(v),
                        Ramped::<true>::new(&table, 128).look_low(v),
                    ];
                    _mm256_storeu_si256(got[0].as_mut_ptr().cast(), plain);
                    _mm256_storeu_si256(got[1].as_mut_ptr().cast(), biased);
                }
                assert_eq!(got, [want, want.map(|b| b ^ 128)], "mask {mask}, from {first}");
            }
        }
    }
    #[test]
    fn layers_are_their_tables_with_and_without_a_bias() {
        if Avx2::detect().is_none() {
            eprintln!("SKIPPED layers_are_their_tables_with_and_without_a_bias: no AVX2");
            return;
        }
        check_layers::<1>("tcq-fast-3");
        check_layers::<2>("tcq-3");
        check_layers::<4>("tcq-5");
    }

    fn check_layers<const Q: usize>(scheme: &str) {
        let book = cases::magnitudes(scheme.parse().expect("a scheme"), 64 * Q, Some([0, 5]));
        let table = super::super::tables::two_level_table(&book, &book.two_level().expect("layers"));
        for first in (0..=u8::MAX).step_by(32) {
            let bytes: [u8; 32] = std::array::from_fn(|i| first + u8::try_from(i).expect("below 32"));
            let want = bytes.map(|b| book.entries()[usize::from(b) % (64 * Q)].to_le_bytes()[0]);
            for bias in [0, 128] {
                let mut got = [0u8; 32];
                // SAFETY: AVX2 is here; loads and stores are of 32 bytes.
                unsafe {
                    let v = _mm256_loadu_si256(bytes.as_ptr().cast());
                    let entries = Layered::<Q, false>::new(&table, bias).look_low(v);
                    _mm256_storeu_si256(got.as_mut_ptr().cast(), entries);
                }
                assert_eq!(got, want.map(|b| b ^ bias), "{scheme}, bias {bias}, from {first}");
            }
        }
    }
}
