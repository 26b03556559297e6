//! Which expander runs a codebook, and the constants it reads.

use crate::{
    expand::{Expand, Fast, Fields, Fine, Gather, Scalar, Turned, Vector, kind},
    groups::{Books2, Books4, BooksAny, Int4, Int8},
    halves::Halves,
    microkernel::{Dot, strips},
    pack,
};
use fracbit_base::{Books, Code, Family};
use fracbit_format::{Codebook, Grid, trellis::Steps};
use fracbit_kernels::{Line, Packing, StripFn};

/// A microkernel for a codebook.
pub(crate) struct Choice {
    pub(crate) table: Vec<Line>,
    /// `None`: canonical tiles.
    pub(crate) packing: Option<Packing>,
    pub(crate) run: StripFn,
}

const WORDS: Option<Packing> = Some(Packing { pack: pack::to_words, unpack: pack::from_words });
const FIELDS: Option<Packing> = Some(Packing { pack: pack::to_fields, unpack: pack::from_fields });

/// The constants and the function for `codebook`, if there are.
pub(crate) fn choose<D: Dot, const PAIRS: bool>(codebook: &Codebook) -> Option<Choice> {
    let scheme = codebook.scheme();
    let narrow = codebook.grid() == Grid::I8;
    match scheme.family() {
        Family::Int => return Some(integers::<D, PAIRS>(codebook)),
        Family::Gnuq => return Some(group_wise::<D, PAIRS>(codebook)),
        Family::Additive(books) => return additive::<D, PAIRS>(codebook, books),
        _ => {}
    }
    let (table, run) = match (scheme.family(), scheme.code()) {
        (Family::Nuq, _) if narrow => return Some(scalar::<D, PAIRS>(codebook)),
        (Family::Vq, _) if narrow && scheme.quarters() <= 12 => pairs::<D, PAIRS>(codebook),
        (Family::Nuq | Family::Vq, _) | (Family::Tcq(Code::Hyb), _) => match codebook.quarter() {
            Some(quarter) => turned::<D, PAIRS>(quarter),
            None => gather::<D, PAIRS>(codebook),
        },
        (Family::Tcq(Code::Fine), _) if narrow => fine::<D, PAIRS>(codebook),
        (Family::Tcq(Code::Fast), _) if narrow => fast::<D, PAIRS>(codebook),
        _ => return None,
    };
    Some(Choice { table, packing: WORDS, run })
}

fn run<E: Expand, D: Dot, const PAIRS: bool>() -> StripFn {
    strips::<E, D, PAIRS>
}

/// Half bits of a weight.
fn half_bits(codebook: &Codebook) -> usize {
    usize::from(codebook.scheme().quarters()) / 2
}

fn fine<D: Dot, const PAIRS: bool>(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let entries = codebook.entries();
    let table = if entries.len() == 64 {
        bytes(128, |i| if i < 64 { entries[i] } else { -entries[i - 64] })
    } else {
        bytes(entries.len(), |i| entries[i])
    };
    macro_rules! choose {
        ($($q:literal)*) => { match (codebook.scheme().quarters(), entries.len()) {
            $(($q, 64) => run::<Fine<$q, 6>, D, PAIRS>(),
              ($q, 128) => run::<Fine<$q, 7>, D, PAIRS>(),
              ($q, _) => run::<Fine<$q, 8>, D, PAIRS>(),)*
            _ => unreachable!("a rate of the trellis"),
        } };
    }
    (table, choose!(4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20))
}

fn fast<D: Dot, const PAIRS: bool>(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let entries = codebook.entries();
    let table = if entries.len() == 64 {
        bytes(128, |i| if i < 64 { entries[i] } else { -entries[i - 64] })
    } else {
        bytes(128, |i| entries[i])
    };
    let weights = Steps::of(codebook.scheme()).expect("a trellis scheme").weights;
    macro_rules! choose {
        ($($q:literal $v:literal)*) => { match (codebook.scheme().quarters(), weights, entries.len()) {
            $(($q, $v, 64) => run::<Fast<$q, $v, 6>, D, PAIRS>(),
              ($q, $v, _) => run::<Fast<$q, $v, 7>, D, PAIRS>(),)*
            _ => unreachable!("a rate of the trellis"),
        } };
    }
    (table, choose!(4 4 5 4 6 4 7 4 8 4 10 2 12 2 14 2 16 2 18 2 20 2))
}

fn scalar<D: Dot, const PAIRS: bool>(codebook: &Codebook) -> Choice {
    let entries = codebook.entries();
    let bits = half_bits(codebook) / 2;
    let mut table = bytes(128.max(entries.len()), |i| entries[i % entries.len()]);
    if bits == 2 {
        // The second register reads the upper two bits of a nibble.
        table = bytes(64, |i| entries[if i < 16 { i % 4 } else { i / 4 % 4 }]);
    }
    let (packing, run) = match bits {
        2 => (FIELDS, run::<Fields<2>, D, PAIRS>()),
        3 => (WORDS, run::<Scalar<3>, D, PAIRS>()),
        4 => (FIELDS, run::<Fields<4>, D, PAIRS>()),
        5 => (WORDS, run::<Scalar<5>, D, PAIRS>()),
        6 => (WORDS, run::<Scalar<6>, D, PAIRS>()),
        7 => (WORDS, run::<Scalar<7>, D, PAIRS>()),
        _ => (FIELDS, run::<Fields<8>, D, PAIRS>()),
    };
    Choice { table, packing, run }
}

/// Of codebooks of 16 centroids.
fn additive<D: Dot, const PAIRS: bool>(codebook: &Codebook, books: Books) -> Option<Choice> {
    let run = match (books.count(), books.weights(), books.bits()) {
        (2, 8, 4) => run::<Halves<1>, D, PAIRS>(),
        (4, 8, 4) => run::<Halves<2>, D, PAIRS>(),
        (6, 8, 4) => run::<Halves<3>, D, PAIRS>(),
        _ => return None,
    };
    let entries = codebook.entries();
    // Of each codebook all first weights, then all second ones, and so on.
    let table = bytes(entries.len(), |i| entries[i / 128 * 128 + i % 16 * 8 + i / 16 % 8]);
    Some(Choice { table, packing: None, run })
}

fn integers<D: Dot, const PAIRS: bool>(codebook: &Codebook) -> Choice {
    if half_bits(codebook) == 8 {
        return Choice { table: Vec::new(), packing: FIELDS, run: run::<Int4, D, PAIRS>() };
    }
    // The code -128, which nothing writes, means -127.
    let pack = |book: &Codebook, tile: &[u8], out: &mut [u8]| {
        pack::to_fields(book, tile, out);
        out.iter_mut().filter(|code| **code == 0x80).for_each(|code| *code = 0x81);
    };
    let packing = Some(Packing { pack, unpack: pack::from_fields });
    Choice { table: Vec::new(), packing, run: run::<Int8, D, PAIRS>() }
}

fn group_wise<D: Dot, const PAIRS: bool>(codebook: &Codebook) -> Choice {
    let (bits, books, entries) = (half_bits(codebook) / 2, codebook.books(), codebook.entries());
    let any = |run| {
        let last = i16::try_from(books - 1).expect("at most 16 codebooks");
        let table = bytes(128, |i| if i < 64 { entries[i % entries.len()] } else { last });
        Choice { table, packing: WORDS, run }
    };
    match (bits, books) {
        (2, 1..=4) => {
            // An index is the number of the codebook and two codes, of which the two tables read
            // one each.
            let entry = |i: usize, code: usize| entries[(i / 16 * 4 + code) % entries.len()];
            let table = bytes(128, |i| if i < 64 { entry(i, i % 4) } else { entry(i - 64, i / 4 % 4) });
            let run = match books {
                1 => run::<Books2<1>, D, PAIRS>(),
                2 => run::<Books2<2>, D, PAIRS>(),
                _ => run::<Books2<4>, D, PAIRS>(),
            };
            Choice { table, packing: FIELDS, run }
        }
        (2, _) => any(run::<BooksAny<2>, D, PAIRS>()),
        (3, _) => any(run::<BooksAny<3>, D, PAIRS>()),
        (_, 1) => Choice {
            table: bytes(128, |i| entries[i % entries.len()]),
            packing: FIELDS,
            run: run::<Fields<4>, D, PAIRS>(),
        },
        _ => {
            let run = if books == 2 { run::<Books4<2>, D, PAIRS>() } else { run::<Books4<4>, D, PAIRS>() };
            Choice { table: bytes(64, |i| entries[i % entries.len()]), packing: FIELDS, run }
        }
    }
}

fn pairs<D: Dot, const PAIRS: bool>(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let entries = codebook.entries();
    let table = bytes(128, |i| entries[i % entries.len()]);
    let run = match half_bits(codebook) {
        3 => run::<Vector<3>, D, PAIRS>(),
        4 => run::<Vector<4>, D, PAIRS>(),
        5 => run::<Vector<5>, D, PAIRS>(),
        _ => run::<Vector<6>, D, PAIRS>(),
    };
    (table, run)
}

fn turned<D: Dot, const PAIRS: bool>(quarter: &[i16]) -> (Vec<Line>, StripFn) {
    // Of 32 pairs each is there twice: the lowest bit of an index means nothing.
    let of_32 = usize::from(quarter.len() == 64);
    let table = bytes(128, |i| quarter[2 * (i % 64 >> of_32) + i / 64]);
    (table, if of_32 == 1 { run::<Turned<7>, D, PAIRS>() } else { run::<Turned<8>, D, PAIRS>() })
}

fn gather<D: Dot, const PAIRS: bool>(codebook: &Codebook) -> (Vec<Line>, StripFn) {
    let entries = codebook.entries();
    let family = codebook.scheme().family();
    let half = half_bits(codebook);
    // A hash index has the sign of the first weight on top of the pair's index.
    let bits = match family {
        Family::Nuq => half / 2,
        Family::Vq => half,
        _ => entries.len().trailing_zeros() as usize,
    };
    let narrow = codebook.grid() == Grid::I8;
    let mut first = Line::ZERO;
    first.0[..2].copy_from_slice(&[bits, half].map(|n| u8::try_from(n).expect("at most 16")));
    let mut table = vec![first; 1 + (1usize << bits).div_ceil(16)];
    for i in 0..1usize << bits {
        let entry = if family == Family::Nuq {
            u32::from(entries[i].cast_unsigned())
        } else {
            let pairs = entries.len() / 2;
            let (a, b) = (entries[2 * (i % pairs)], entries[2 * (i % pairs) + 1]);
            let a = if i >= pairs { -a } else { a };
            if narrow {
                u32::from(a.to_le_bytes()[0]) | u32::from(b.to_le_bytes()[0]) << 8
            } else {
                u32::from(a.cast_unsigned()) | u32::from(b.cast_unsigned()) << 16
            }
        };
        table[1 + i / 16].0[i % 16 * 4..][..4].copy_from_slice(&entry.to_le_bytes());
    }
    let run = match (family, narrow) {
        (Family::Nuq, _) => run::<Gather<{ kind::WIDE_ONE }>, D, PAIRS>(),
        (Family::Vq, true) => run::<Gather<{ kind::PAIRS }>, D, PAIRS>(),
        (Family::Vq, false) => run::<Gather<{ kind::WIDE_PAIRS }>, D, PAIRS>(),
        (_, true) => run::<Gather<{ kind::HASHED }>, D, PAIRS>(),
        (_, false) => run::<Gather<{ kind::WIDE_HASHED }>, D, PAIRS>(),
    };
    (table, run)
}

/// `len` entries (a multiple of 64) as bytes.
fn bytes(len: usize, entry: impl Fn(usize) -> i16) -> Vec<Line> {
    (0..len / 64).map(|l| Line(std::array::from_fn(|i| entry(64 * l + i).to_le_bytes()[0]))).collect()
}
