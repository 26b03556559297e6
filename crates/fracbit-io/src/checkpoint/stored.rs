//! Tensors whose file has them otherwise than their name promises.

/// How the numbers of a tensor lie in the file, beside what its type and shape say: what
/// llama.cpp's converter does to some (`crate::gguf`).
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Stored {
    /// Rows of a head where row `half * size / 2 + k` of each lies at `2 k + half`; 0: none are
    /// moved.
    pub(crate) paired_head: usize,
    /// What was added to every number.
    pub(crate) shift: f32,
}

impl Stored {
    /// As type, shape and name say.
    pub(crate) const AS_NAMED: Self = Self { paired_head: 0, shift: 0.0 };

    /// Where a row lies.
    pub(crate) fn row(self, row: usize) -> usize {
        if self.paired_head == 0 {
            return row;
        }
        let (at, half) = (row % self.paired_head, self.paired_head / 2);
        row - at + 2 * (at % half) + at / half
    }
}
