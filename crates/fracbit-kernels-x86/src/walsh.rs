//! The Walsh-Hadamard transform: the butterflies of [`fracbit_rotation::walsh`] in the same order,
//! more strides in a pass.
//!
//! The first pass takes as many neighbours as fill half of the registers through all strides below
//! their number, inside vectors and then between them; each further one takes as many vectors, a
//! stride apart, through the strides that come next.

macro_rules! walsh {
    ($features:literal, $vector:ty, $lanes:literal lanes, $most:literal vectors, $load:path, $store:path, $multiply:path, $add:path, $subtract:path) => {
        /// # Safety
        /// The features; `order` is a power of two that divides the length of `x`, and there are as
        /// many factors.
        #[target_feature(enable = $features)]
        unsafe fn walsh(order: usize, x: &mut [f32], factors: &[f32]) {
            if order < $lanes {
                return plain::walsh(order, x, factors);
            }
            let first = order.min($lanes * $most);
            for (piece, factors) in x.chunks_exact_mut(first).zip(factors.chunks_exact(first)) {
                let (piece, factors) = (piece.as_mut_ptr(), factors.as_ptr());
                // SAFETY: so many vectors have the length of a piece.
                unsafe {
                    match first / $lanes {
                        1 => neighbours::<1>(piece, factors),
                        2 => neighbours::<2>(piece, factors),
                        4 => neighbours::<4>(piece, factors),
                        8 => neighbours::<8>(piece, factors),
                        _ => neighbours::<$most>(piece, factors),
                    }
                }
            }
            for piece in x.chunks_exact_mut(order) {
                let mut stride = first;
                while stride < order {
                    let vectors = (order / stride).min($most);
                    for block in piece.chunks_exact_mut(vectors * stride) {
                        for at in (0..stride).step_by($lanes) {
                            let at = block[at..].as_mut_ptr();
                            // SAFETY: a block is so many strides of whole vectors.
                            unsafe {
                                match vectors {
                                    2 => apart::<2>(at, stride),
                                    4 => apart::<4>(at, stride),
                                    8 => apart::<8>(at, stride),
                                    _ => apart::<$most>(at, stride),
                                }
                            }
                        }
                    }
                    stride *= vectors;
                }
            }
        }

        /// # Safety
        /// The features; `V` vectors at both places.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn neighbours<const V: usize>(at: *mut f32, factors: *const f32) {
            // SAFETY: promised by the caller.
            unsafe {
                let mut v: [$vector; V] = std::array::from_fn(|i| {
                    within($multiply($load(at.add(i * $lanes)), $load(factors.add(i * $lanes))))
                });
                between(&mut v);
                (0..V).for_each(|i| $store(at.add(i * $lanes), v[i]));
            }
        }

        /// # Safety
        /// The features; `V` vectors, `stride` numbers from one to the next.
        #[inline]
        #[target_feature(enable = $features)]
        unsafe fn apart<const V: usize>(at: *mut f32, stride: usize) {
            // SAFETY: promised by the caller.
            unsafe {
                let mut v: [$vector; V] = std::array::from_fn(|i| $load(at.add(i * stride)));
                between(&mut v);
                (0..V).for_each(|i| $store(at.add(i * stride), v[i]));
            }
        }

        /// Butterflies between vectors.
        #[inline]
        #[target_feature(enable = $features)]
        fn between<const V: usize>(v: &mut [$vector; V]) {
            let mut h = 1;
            while h < V {
                for i in 0..V {
                    if i & h == 0 {
                        (v[i], v[i | h]) = ($add(v[i], v[i | h]), $subtract(v[i], v[i | h]));
                    }
                }
                h *= 2;
            }
        }
    };
}

pub(crate) use walsh;
