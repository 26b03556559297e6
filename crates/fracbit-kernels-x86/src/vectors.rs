//! The operations beside the matrices: the reference's source compiled for each instruction set, and attention.

/// A module with the bodies that need no intrinsics, compiled with `$features`, conversion by the `LANES` and `Element` of the module, and the table
/// of all.
macro_rules! table {
    ($isa:expr, $features:literal, $proof:ty, $store:path, $bf16_tile:expr) => {
        use fracbit_kernels::{
            Isa, Vectors,
            vectors::{Rounded, Slots, plain},
        };

        /// # Safety
        /// The features, and as many outputs as inputs.
        #[target_feature(enable = $features)]
        unsafe fn widen(x: &[f16], out: &mut [f32]) {
            let (x, x_rest) = x.as_chunks::<LANES>();
            let (out, out_rest) = out.as_chunks_mut::<LANES>();
            for (x, out) in x.iter().zip(out) {
                // SAFETY: as many inputs and outputs as lanes.
                unsafe { $store(out.as_mut_ptr(), f16::load(x.as_ptr())) };
            }
            plain::widen(x_rest, out_rest);
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
        unsafe fn silu_mul(gate: &mut [f32], up: &[f32]) {
            plain::silu_mul(gate, up);
        }

        #[target_feature(enable = $features)]
        unsafe fn rotate(heads: &mut [f32], cos: &[f32], sin: &[f32]) {
            plain::rotate(heads, cos, sin);
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

        /// The operations of this instruction set.
        pub(crate) fn vectors(_proof: $proof) -> Vectors {
            let slots = Slots {
                scores,
                weigh,
                widen,
                products,
                softmax,
                rms_norm,
                silu_mul,
                rotate,
                add,
                narrow,
                narrow_pair,
                wide,
                bf16_tile: $bf16_tile,
            };
            // SAFETY: the proof shows the instruction set; lengths are checked by the methods of `Vectors`.
            unsafe { Vectors::new($isa, slots) }
        }
    };
}

pub(crate) use table;
