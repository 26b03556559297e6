//! Hadamard matrices of orders that are not powers of two; specified at [`HadamardMatrix`].

use crate::field::{Field, is_odd_prime_power};

/// The largest order built: a table of K²/2 bytes and K/4 additions per entry are already much.
pub(crate) const MAX_ORDER: usize = 1024;

/// First rows of Williamson's circulants A, B, C, D, by t: '+' is 1, '-' is −1.
///
/// Only orders 4t that neither of Paley's constructions reaches are listed. Found by
/// `examples/williamson_search.rs`: t = 23 and 29 as the first hit over all symmetric sequences,
/// t = 43 as the first hit among sequences constant on the orbits of ⟨−1, 6⟩, t = 39 with A
/// constant on the orbits of ⟨−1, 16⟩ and C, D being B with its indices multiplied by 16 and 16².
/// For t = 35, 47, 53 and 59 no such quadruple exists (Holzmann, Kharaghani, Tayfeh-Rezaie 2008);
/// 4·47 and 4·59 need other constructions, which are not built.
const WILLIAMSON: [(usize, [&str; 4]); 4] = [
    (
        23,
        [
            "++-+-+++-++--++-+++-+-+",
            "+-----++-+-++-+-++-----",
            "+++++----+-++-+----++++",
            "++-+--+++--++--+++--+-+",
        ],
    ),
    (
        29,
        [
            "+++-++-++++---++---++++-++-++",
            "+--+-++---++++++++++---++-+--",
            "+-+-+----++-++--++-++----+-+-",
            "+-+-++---+--++++++--+---++-+-",
        ],
    ),
    (
        39,
        [
            "+---+---+-++-++----++----++-++-+---+---",
            "+-++------++--+-+-++++-+-+--++------++-",
            "++--+++-+--++-+----------+-++--+-+++--+",
            "+---+--++++----+-+-++-+-+----++++--+---",
        ],
    ),
    (
        43,
        [
            "++-++++++----+-+--++-++-++--+-+----++++++-+",
            "+---++--++++-+-+++-++--++-+++-+-++++--++---",
            "+++-+-++--+-+-++++-+----+-++++-+-+--++-+-++",
            "++---++++-+--+--++--------++--+--+-++++---+",
        ],
    ),
];

fn williamson_rows(t: usize) -> Option<&'static [&'static str; 4]> {
    WILLIAMSON.iter().find(|(order, _)| *order == t).map(|(_, rows)| rows)
}

/// Which theorem a [`HadamardMatrix`] comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Construction {
    /// Paley's first, from the field of this many elements.
    PaleyI(usize),
    /// Paley's second, from the field of this many elements.
    PaleyII(usize),
    /// Williamson's, from four circulants of this order.
    Williamson(usize),
}

/// A Hadamard matrix of order K ≥ 4: all entries ±1 and H Hᵀ = K·I exactly. **Part of the file
/// format.**
///
/// They exist, as far as anyone knows, for K = 1, 2 and every multiple of 4; a fast construction
/// covers only some. Three families are built here, tried in this order (the order is part of the
/// file format):
///
/// 1. **Paley I** (Paley 1933), K = q + 1 for a prime power q ≡ 3 (mod 4): with Q_ij = χ(aᵢ − aⱼ),
///    where χ is the quadratic character of GF(q), H = I + [[0, 1ᵀ], [−1, Q]].
/// 2. **Paley II**, K = 2(q + 1) for a prime power q ≡ 1 (mod 4): with the symmetric conference
///    matrix C = [[0, 1ᵀ], [1, Q]], H = C ⊗ [[1, 1], [1, −1]] + I ⊗ [[1, −1], [−1, −1]].
/// 3. **Williamson** (Williamson 1944), K = 4t: four symmetric circulants A, B, C, D of order t
///    with A² + B² + C² + D² = 4t·I, H = [[A, B, C, D], [−B, A, −D, C], [−C, D, A, −B], [−D, −C, B,
///    A]].
///
/// Rows and columns of Q follow the numbering of the field's elements: element e of GF(p^k) is the
/// polynomial Σ dᵢ xⁱ whose coefficients dᵢ are the base-p digits of e, least significant first,
/// modulo the monic irreducible polynomial of degree k whose lower coefficients, read as such a
/// number, are smallest. For k = 1 that is arithmetic modulo p.
///
/// Sylvester's doubling is not listed: the Walsh factor of a transform is exactly that. Kronecker
/// products of two orders are made by [`factorize`](crate::factorize) without forming the product.
///
/// Cost of a construction: O(K²) time and bytes.
#[derive(Clone, Debug)]
pub struct HadamardMatrix {
    order: usize,
    construction: Construction,
    entries: Vec<i8>, // (K, K)
}

impl HadamardMatrix {
    /// The matrix of this order by [`construction_of`](Self::construction_of) it; `None` where that
    /// is `None`.
    pub fn new(order: usize) -> Option<Self> {
        let construction = Self::construction_of(order)?;
        let mut h = Self { order, construction, entries: vec![0; order * order] };
        let field = |q| Field::new(q).expect("construction_of saw an odd prime power");
        match construction {
            Construction::PaleyI(q) => h.paley_one(&field(q)),
            Construction::PaleyII(q) => h.paley_two(&field(q)),
            Construction::Williamson(t) => {
                h.williamson(williamson_rows(t).expect("construction_of saw the rows"))
            }
        }
        Some(h)
    }

    /// The first construction of the list above that reaches this order; `None` if none does.
    ///
    /// Orders above 1024 are not built. Sylvester's doubling and products are deliberately not in
    /// the list.
    pub fn construction_of(order: usize) -> Option<Construction> {
        if order < 4 || !order.is_multiple_of(4) || order > MAX_ORDER {
            return None;
        }
        // order − 1 ≡ 3 (mod 4) already.
        let (one, two) = (order - 1, order / 2 - 1);
        if is_odd_prime_power(one) {
            Some(Construction::PaleyI(one))
        } else if two % 4 == 1 && is_odd_prime_power(two) {
            Some(Construction::PaleyII(two))
        } else {
            williamson_rows(order / 4).map(|_| Construction::Williamson(order / 4))
        }
    }

    /// K.
    pub fn order(&self) -> usize {
        self.order
    }

    /// The theorem this matrix comes from.
    pub fn construction(&self) -> Construction {
        self.construction
    }

    /// The entry of row `i` and column `j`: 1 or −1.
    ///
    /// # Panics
    /// If `i` or `j` is not below the order.
    pub fn entry(&self, i: usize, j: usize) -> i8 {
        assert!(j < self.order, "HadamardMatrix::entry: `j` should be below {}, got {j}", self.order);
        self.entries[i * self.order + j]
    }

    fn set(&mut self, i: usize, j: usize, value: i8) {
        self.entries[i * self.order + j] = value;
    }

    fn paley_one(&mut self, field: &Field) {
        for i in 0..self.order {
            for j in 0..self.order {
                let value = match (i, j) {
                    (0, _) => 1,
                    (i, j) if i == j => 1,
                    (_, 0) => -1,
                    _ => field.character_of_difference(i - 1, j - 1),
                };
                self.set(i, j, value);
            }
        }
    }

    fn paley_two(&mut self, field: &Field) {
        for i in 0..self.order / 2 {
            for j in 0..self.order / 2 {
                let block = match (i, j) {
                    (i, j) if i == j => [[1, -1], [-1, -1]],
                    (i, j) => {
                        let c =
                            if i == 0 || j == 0 { 1 } else { field.character_of_difference(i - 1, j - 1) };
                        [[c, c], [c, -c]]
                    }
                };
                for (r, row) in block.iter().enumerate() {
                    for (c, &value) in row.iter().enumerate() {
                        self.set(2 * i + r, 2 * j + c, value);
                    }
                }
            }
        }
    }

    fn williamson(&mut self, rows: &[&str; 4]) {
        const BLOCKS: [[(usize, i8); 4]; 4] = [
            [(0, 1), (1, 1), (2, 1), (3, 1)],
            [(1, -1), (0, 1), (3, -1), (2, 1)],
            [(2, -1), (3, 1), (0, 1), (1, -1)],
            [(3, -1), (2, -1), (1, 1), (0, 1)],
        ];
        let t = self.order / 4;
        for (block_row, blocks) in BLOCKS.iter().enumerate() {
            for (block_column, &(which, sign)) in blocks.iter().enumerate() {
                let first = rows[which].as_bytes();
                for i in 0..t {
                    for j in 0..t {
                        let value = if first[(j + t - i) % t] == b'+' { sign } else { -sign };
                        self.set(block_row * t + i, block_column * t + j, value);
                    }
                }
            }
        }
    }
}
