//! Least-significant-bit-first bit streams.

/// Reads `count` (at most 16) bits at bit position `at` of `bytes`, bit 0 being the lowest bit of
/// byte 0. Positions past the end wrap around to the start, which is what a tail-biting tape needs.
///
/// # Panics
/// When `bytes` is empty.
#[must_use]
pub fn read_bits(bytes: &[u8], at: usize, count: u32) -> u16 {
    debug_assert!(count <= 16, "at most one state at a time");
    let byte = |i: usize| u32::from(bytes[i % bytes.len()]);
    let first = at / 8;
    let window = byte(first) | byte(first + 1) << 8 | byte(first + 2) << 16;
    let mask = (1u32 << count) - 1;
    #[expect(clippy::cast_possible_truncation, reason = "masked to at most 16 bits")]
    {
        ((window >> (at % 8)) & mask) as u16
    }
}

/// Writes bits in order into a zeroed byte slice.
#[derive(Debug)]
pub struct BitWriter<'a> {
    bytes: &'a mut [u8],
    at: usize,
}

impl<'a> BitWriter<'a> {
    /// Starts at bit 0 of `bytes`, which are cleared.
    pub fn new(bytes: &'a mut [u8]) -> Self {
        bytes.fill(0);
        Self { bytes, at: 0 }
    }

    /// Appends the low `count` (at most 16) bits of `value`.
    ///
    /// # Panics
    /// When the slice is full.
    pub fn push(&mut self, value: u16, count: u32) {
        debug_assert!(count <= 16 && (count == 16 || value >> count == 0), "value fits its width");
        let shifted = u32::from(value) << (self.at % 8);
        let first = self.at / 8;
        for (i, byte) in shifted.to_le_bytes().into_iter().enumerate() {
            if byte != 0 {
                self.bytes[first + i] |= byte;
            }
        }
        self.at += count as usize;
        assert!(self.at <= self.bytes.len() * 8, "bit writer: wrote past the end");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_back_what_was_written_at_every_width_and_wraps() {
        for width in 1..=16u32 {
            let count = 64usize;
            let mut bytes = vec![0; (count * width as usize).div_ceil(8)];
            let value = |i: usize| (i.wrapping_mul(40_503) as u32 & ((1 << width) - 1)) as u16;
            let mut writer = BitWriter::new(&mut bytes);
            (0..count).for_each(|i| writer.push(value(i), width));
            for i in 0..count {
                assert_eq!(
                    read_bits(&bytes, i * width as usize, width),
                    value(i),
                    "width {width}, index {i}"
                );
            }
            assert_eq!(read_bits(&bytes, count * width as usize, width), value(0), "wraps at width {width}");
        }
    }
}
