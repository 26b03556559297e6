//! The operations beside the matrices: the reference's source compiled for each instruction set,
//! and the sums of attention.

/// Sums of attention in vectors: lanes are positions for scores, dimensions for weighted values.
///
/// Keys and values come in pairs, of dimensions and of positions, which the instruction that
/// multiplies 16-bit integers adds up: no horizontal sum is needed. A vector of them is loaded once
/// for up to four rows on the left (queries, weights), whose pairs are spread over the lanes; sums
/// of different rows and vectors are independent and hide each other's latency. Numbers of 8 and 4
/// bits are widened as they are loaded.
macro_rules! attend {
    ($features:literal, $int:ty, $lanes:literal lanes, $most:literal vectors, $zero:path, $load:ident, $spread:path, $dot:path, $to_float:path,
     $multiply:path, $fused:path, $same:path, $load_floats:path, $store_floats:path, 4 bits: $scores_of_four:path, $weigh_of_four:path) => {
        use crate::reads::Ahead;
        use fracbit_kernels::vectors::{Ints, KEY_BLOCK, Scores, UNIT, WEIGHT_BLOCK, Weigh, attend};

        /// Lanes of a vector.
        const LANES: usize = $lanes;

        /// Rows of pairs.
        #[derive(Clone, Copy)]
        struct Left {
            at: *const i16,
            stride: usize,
        }

        /// Vectors of pairs of `BITS` bits each number.
        #[derive(Clone, Copy)]
        struct Panel<const BITS: usize> {
            at: *const u8,
            /// Bytes from one vector to its neighbour. Of 4 bits, two short vectors share theirs.
            gap: usize,
            /// Bytes from a row of pairs to the next.
            step: usize,
            pairs: usize,
            /// What comes behind them and may come from memory.
            ahead: Ahead,
        }

        /// # Safety
        /// The features; `Q` rows, and as many pairs of `V` vectors as said.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn sums<const Q: usize, const V: usize, const BITS: usize>(
            left: Left,
            panel: Panel<BITS>,
        ) -> [[$int; V]; Q] {
            let mut sums = [[$zero(); V]; Q];
            let (mut left_at, mut at) = (left.at, panel.at);
            for _ in 0..panel.pairs {
                // Two short vectors share a line.
                (0..V)
                    .step_by(64 / (4 * LANES))
                    .for_each(|v| panel.ahead.ask(at.wrapping_add(v * panel.gap)));
                // SAFETY: promised by the caller.
                let row: [$int; V] = std::array::from_fn(|v| unsafe { $load::<BITS>(at, panel.gap, v) });
                for (q, sums) in sums.iter_mut().enumerate() {
                    // SAFETY: promised by the caller.
                    let pair = unsafe { left_at.add(q * left.stride).cast::<i32>().read_unaligned() };
                    let pair = $spread(pair);
                    for (sum, &vector) in sums.iter_mut().zip(&row) {
                        *sum = $dot(*sum, vector, pair);
                    }
                }
                (left_at, at) = (left_at.wrapping_add(2), at.wrapping_add(panel.step));
            }
            sums
        }

        /// How many of `left` rows come next: the keys and values of a group of query heads should
        /// be loaded once.
        fn rows_of(left: usize) -> usize {
            left.min(4)
        }

        /// How many of `left` vectors come next.
        fn vectors_of(left: usize) -> usize {
            if left < $most { 1 } else { $most }
        }

        /// # Safety
        /// The features, and lengths as `Vectors::scores` checks them.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn scores(args: &Scores<'_>, out: &mut [f32]) {
            let out = out.as_mut_ptr();
            // SAFETY: promised by the caller; the keys are of as many bits as said.
            unsafe {
                match args.keys {
                    Ints::I16(keys) => scores_of::<16>(args, keys.as_ptr().cast(), out),
                    Ints::I8(keys) => scores_of::<8>(args, keys.as_ptr().cast(), out),
                    Ints::I4(keys) => $scores_of_four(args, keys.as_ptr(), out),
                }
            }
        }

        /// # Safety
        /// As [`scores`]; the keys, at `keys`, are of `BITS` bits.
        #[target_feature(enable = $features)]
        unsafe fn scores_of<const BITS: usize>(args: &Scores<'_>, keys: *const u8, out: *mut f32) {
            let count = args.query_scales.len();
            let mut ahead = Ahead::of(args.next, keys);
            let mut q = 0;
            while q < count {
                let rows = rows_of(count - q);
                let mut position = 0;
                while position < args.key_scales.len() {
                    let vectors = vectors_of((args.key_scales.len() - position) / LANES);
                    // SAFETY: rows and positions inside of all.
                    unsafe {
                        match (rows, vectors) {
                            (4, 1) => some_scores::<4, 1, BITS>(args, (keys, ahead), q, position, out),
                            (4, _) => some_scores::<4, $most, BITS>(args, (keys, ahead), q, position, out),
                            (3, 1) => some_scores::<3, 1, BITS>(args, (keys, ahead), q, position, out),
                            (3, _) => some_scores::<3, $most, BITS>(args, (keys, ahead), q, position, out),
                            (2, 1) => some_scores::<2, 1, BITS>(args, (keys, ahead), q, position, out),
                            (2, _) => some_scores::<2, $most, BITS>(args, (keys, ahead), q, position, out),
                            (_, 1) => some_scores::<1, 1, BITS>(args, (keys, ahead), q, position, out),
                            _ => some_scores::<1, $most, BITS>(args, (keys, ahead), q, position, out),
                        }
                    }
                    position += vectors * LANES;
                }
                (q, ahead) = (q + rows, Ahead::NONE);
            }
        }

        /// # Safety
        /// The features; `Q` queries from `q` on, `V` vectors of positions from `position` on, and
        /// their scores, inside of all.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn some_scores<const Q: usize, const V: usize, const BITS: usize>(
            args: &Scores<'_>,
            (keys, ahead): (*const u8, Ahead),
            q: usize,
            position: usize,
            out: *mut f32,
        ) {
            let bytes = |numbers: usize| numbers * BITS / 8;
            let block = bytes(args.dim * KEY_BLOCK);
            let (nth, lane) = (position / KEY_BLOCK, position % KEY_BLOCK);
            // SAFETY: promised by the caller; neighbouring vectors are halves of a block where they
            // are shorter than it.
            unsafe {
                let left = Left { at: args.queries.as_ptr().add(q * args.dim), stride: args.dim };
                let panel = Panel {
                    at: keys.add(nth * block + bytes(2 * lane)),
                    gap: if LANES < KEY_BLOCK { bytes(2 * LANES) } else { block },
                    step: bytes(2 * KEY_BLOCK),
                    pairs: args.dim / 2,
                    ahead,
                };
                let sums = sums::<Q, V, BITS>(left, panel);
                for (q, sums) in (q..).zip(sums) {
                    let query_scale = $same(*args.query_scales.get_unchecked(q));
                    for (v, sum) in sums.into_iter().enumerate() {
                        let at = position + v * LANES;
                        let scale = $multiply($load_floats(args.key_scales.as_ptr().add(at)), query_scale);
                        $store_floats(out.add(q * args.stride + at), $multiply($to_float(sum), scale));
                    }
                }
            }
        }

        /// # Safety
        /// The features, and lengths as `Vectors::weigh` checks them.
        #[target_feature(enable = $features)]
        pub(super) unsafe fn weigh(args: &Weigh<'_>, out: &mut [f32]) {
            // SAFETY: promised by the caller; the values are of as many bits as said.
            unsafe {
                match args.values {
                    Ints::I16(values) => weigh_of::<16>(args, values.as_ptr().cast(), out),
                    Ints::I8(values) => weigh_of::<8>(args, values.as_ptr().cast(), out),
                    Ints::I4(values) => $weigh_of_four(args, values.as_ptr(), out),
                }
            }
        }

        /// # Safety
        /// As [`weigh`]; the values, at `values`, are of `BITS` bits.
        #[target_feature(enable = $features)]
        unsafe fn weigh_of<const BITS: usize>(args: &Weigh<'_>, values: *const u8, out: &mut [f32]) {
            let (dim, positions) = (args.dim, args.positions());
            let (count, whole) = (out.len() / dim, dim / LANES * LANES);
            let to = out.as_mut_ptr();
            let first = Ahead::of(args.next, values);
            for block in 0..positions.div_ceil(WEIGHT_BLOCK) {
                let (mut q, mut ahead) = (0, first);
                while q < count {
                    let rows = rows_of(count - q);
                    let mut column = 0;
                    while column < whole {
                        let vectors = vectors_of((whole - column) / LANES);
                        // SAFETY: rows and columns inside of all.
                        unsafe {
                            match (rows, vectors) {
                                (4, 1) => {
                                    some_sums::<4, 1, BITS>(args, (values, ahead), q, block, column, to)
                                }
                                (4, _) => {
                                    some_sums::<4, $most, BITS>(args, (values, ahead), q, block, column, to)
                                }
                                (3, 1) => {
                                    some_sums::<3, 1, BITS>(args, (values, ahead), q, block, column, to)
                                }
                                (3, _) => {
                                    some_sums::<3, $most, BITS>(args, (values, ahead), q, block, column, to)
                                }
                                (2, 1) => {
                                    some_sums::<2, 1, BITS>(args, (values, ahead), q, block, column, to)
                                }
                                (2, _) => {
                                    some_sums::<2, $most, BITS>(args, (values, ahead), q, block, column, to)
                                }
                                (_, 1) => {
                                    some_sums::<1, 1, BITS>(args, (values, ahead), q, block, column, to)
                                }
                                _ => some_sums::<1, $most, BITS>(args, (values, ahead), q, block, column, to),
                            }
                        }
                        column += vectors * LANES;
                    }
                    (q, ahead) = (q + rows, Ahead::NONE);
                }
            }
            if whole < dim {
                attend::weigh_columns(args, whole..dim, out);
            }
        }

        /// # Safety
        /// The features; `Q` queries from `q` on and `V` vectors of dimensions from `column` on,
        /// inside of all.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn some_sums<const Q: usize, const V: usize, const BITS: usize>(
            args: &Weigh<'_>,
            (values, ahead): (*const u8, Ahead),
            q: usize,
            block: usize,
            column: usize,
            out: *mut f32,
        ) {
            let (dim, first) = (args.dim, block * WEIGHT_BLOCK);
            let bytes = |numbers: usize| numbers * BITS / 8;
            // Rows of 4 bits are whole units, with which columns begin.
            let row = if BITS == 4 { bytes(2 * dim).next_multiple_of(UNIT / 2) } else { bytes(2 * dim) };
            // SAFETY: promised by the caller.
            unsafe {
                let left =
                    Left { at: args.weights.as_ptr().add(q * args.stride + first), stride: args.stride };
                let panel = Panel {
                    at: values.add(first / 2 * row + bytes(2 * column)),
                    gap: bytes(2 * LANES),
                    step: row,
                    pairs: (args.positions() - first).min(WEIGHT_BLOCK) / 2,
                    ahead,
                };
                let sums = sums::<Q, V, BITS>(left, panel);
                for (q, sums) in (q..).zip(sums) {
                    let scale = $same(args.scale(q, block));
                    for (v, sum) in sums.into_iter().enumerate() {
                        let out = out.add(q * dim + column + v * LANES);
                        $store_floats(out, $fused($to_float(sum), scale, $load_floats(out)));
                    }
                }
            }
        }
    };
}

/// A module with the microkernels that need no intrinsics, compiled with `$features`, and the table
/// of all.
macro_rules! table {
    ($isa:expr, $features:literal, $proof:ty, $bf16_tile:expr) => {
        use fracbit_kernels::{
            Isa, Vectors,
            vectors::{FloatScores, FloatWeigh, Gate, Rounded, Slots, Unrounded, plain},
        };

        #[target_feature(enable = $features)]
        unsafe fn float_scores(args: &FloatScores<'_>, out: &mut [f32]) {
            plain::float_scores(args, out);
        }

        #[target_feature(enable = $features)]
        unsafe fn float_weigh(args: &FloatWeigh<'_>, out: &mut [f32]) {
            plain::float_weigh(args, out);
        }

        #[target_feature(enable = $features)]
        unsafe fn round(values: &[f32], most: i32, ints: &mut [i16]) -> f32 {
            attend::round(values, most, ints)
        }

        #[target_feature(enable = $features)]
        unsafe fn levels(ints: &mut [i16]) -> f32 {
            attend::levels(ints)
        }

        #[target_feature(enable = $features)]
        unsafe fn round_weights(args: &Unrounded<'_>, ints: &mut [i16], scales: &mut [f32]) {
            attend::round_weights(args, ints, scales);
        }

        #[target_feature(enable = $features)]
        unsafe fn softmax(scores: &mut [f32]) -> (f32, f32) {
            plain::softmax(scores)
        }

        #[target_feature(enable = $features)]
        unsafe fn rms_norm(x: &[f32], weight: Option<&[f32]>, eps: f32, out: &mut [f32]) {
            plain::rms_norm(x, weight, eps, out);
        }

        #[target_feature(enable = $features)]
        unsafe fn gate_mul(kind: Gate, gate: &mut [f32], up: &[f32]) {
            plain::gate_mul(kind, gate, up);
        }

        #[target_feature(enable = $features)]
        unsafe fn rotate(heads: &mut [f32], cos: &[f32], sin: &[f32]) {
            plain::rotate(heads, cos, sin);
        }

        #[target_feature(enable = $features)]
        unsafe fn cap(cap: f32, x: &mut [f32]) {
            plain::cap(cap, x);
        }

        #[target_feature(enable = $features)]
        unsafe fn exp_sums(logits: &[f32], top: f32, rate: f64, sums: &mut [f64]) {
            plain::exp_sums(logits, top, rate, sums);
        }

        #[target_feature(enable = $features)]
        unsafe fn add(x: &[f32], y: &mut [f32]) {
            plain::add(x, y);
        }

        #[target_feature(enable = $features)]
        unsafe fn narrow(values: &[f32], to: Rounded<'_, i8>) {
            plain::narrow(values, to);
        }

        #[target_feature(enable = $features)]
        unsafe fn narrow_pair(values: &[f32], to: Rounded<'_, i8>) {
            plain::narrow_pair(values, to);
        }

        #[target_feature(enable = $features)]
        unsafe fn wide(values: &[f32], to: Rounded<'_, i16>) {
            plain::wide(values, to);
        }

        /// The operations of this instruction set, for who has shown that it is there.
        pub(super) fn slots(_proof: $proof) -> Slots {
            Slots {
                scores,
                weigh,
                float_scores,
                float_weigh,
                round,
                levels,
                round_weights,
                products,
                softmax,
                rms_norm,
                gate_mul,
                rotate,
                walsh,
                cap,
                exp_sums,
                add,
                narrow,
                narrow_pair,
                wide,
                bf16_tile: $bf16_tile,
            }
        }

        /// The operations of this instruction set.
        pub(crate) fn vectors(proof: $proof) -> Vectors {
            // SAFETY: the proof shows the instruction set; lengths are checked by the methods of
            // `Vectors`.
            unsafe { Vectors::new($isa, slots(proof)) }
        }
    };
}

pub(crate) use {attend, table};
