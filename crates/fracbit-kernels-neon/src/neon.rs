//! The intrinsics that touch registers only, made safe: NEON is part of every aarch64 target, so
//! that no proof is needed.
//!
//! Loads and stores stay unsafe, and come from `std::arch` as they are.

use std::arch::aarch64::{self, float64x2_t, int8x8_t, int16x4_t, int64x2_t, uint8x8_t, uint16x4_t};
pub(crate) use std::arch::aarch64::{
    float32x4_t, float32x4x2_t, int8x16_t, int16x8_t, int16x8x2_t, int32x4_t, uint8x16_t, uint8x16x2_t,
    uint8x16x4_t, uint16x8_t, uint32x4_t, vld1_u8, vld1q_dup_f64, vld1q_f32, vld1q_s8, vld1q_s16, vld1q_s32,
    vld1q_u8, vld1q_u16, vld2q_f32, vld2q_s8, vld2q_s16, vst1q_f32, vst1q_s8, vst1q_s16, vst1q_s32, vst1q_u8,
    vst1q_u16, vst2q_f32,
};

macro_rules! safe {
    ($($name:ident $([const $n:ident: i32])? ($($arg:ident: $type:ty),*) -> $ret:ty;)*) => { $(
        #[inline(always)]
        pub(crate) fn $name $(<const $n: i32>)? ($($arg: $type),*) -> $ret {
            // SAFETY: NEON is part of the target, and the instruction touches registers only.
            unsafe { aarch64::$name $(::<$n>)? ($($arg),*) }
        }
    )* };
}

safe! {
    vaddq_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vaddq_u16(a: uint16x8_t, b: uint16x8_t) -> uint16x8_t;
    vbslq_u8(a: uint8x16_t, b: uint8x16_t, c: uint8x16_t) -> uint8x16_t;
    vcvtq_n_f32_s32[const N: i32](a: int32x4_t) -> float32x4_t;
    vshlq_n_s8[const N: i32](a: int8x16_t) -> int8x16_t;
    vshlq_n_u8[const N: i32](a: uint8x16_t) -> uint8x16_t;
    vshlq_n_u16[const N: i32](a: uint16x8_t) -> uint16x8_t;
    vfmaq_n_f32(a: float32x4_t, b: float32x4_t, c: f32) -> float32x4_t;
    vqtbl1q_s8(a: int8x16_t, b: uint8x16_t) -> int8x16_t;
    vuzp1q_s8(a: int8x16_t, b: int8x16_t) -> int8x16_t;
    vuzp2q_s8(a: int8x16_t, b: int8x16_t) -> int8x16_t;
    vuzp1q_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vzip1q_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vzip2q_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vandq_u16(a: uint16x8_t, b: uint16x8_t) -> uint16x8_t;
    vandq_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vcvtq_f32_s32(a: int32x4_t) -> float32x4_t;
    vdupq_laneq_s32[const N: i32](a: int32x4_t) -> int32x4_t;
    vdupq_n_f32(a: f32) -> float32x4_t;
    vdupq_n_s16(a: i16) -> int16x8_t;
    vdupq_n_s32(a: i32) -> int32x4_t;
    vdupq_n_s8(a: i8) -> int8x16_t;
    vdupq_n_u16(a: u16) -> uint16x8_t;
    vdupq_n_u32(a: u32) -> uint32x4_t;
    vdupq_n_u8(a: u8) -> uint8x16_t;
    veorq_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vextq_u16[const N: i32](a: uint16x8_t, b: uint16x8_t) -> uint16x8_t;
    vget_low_s16(a: int16x8_t) -> int16x4_t;
    vget_low_s8(a: int8x16_t) -> int8x8_t;
    vmlal_high_laneq_s16[const N: i32](a: int32x4_t, b: int16x8_t, c: int16x8_t) -> int32x4_t;
    vmlal_high_n_s16(a: int32x4_t, b: int16x8_t, c: i16) -> int32x4_t;
    vmlal_laneq_s16[const N: i32](a: int32x4_t, b: int16x4_t, c: int16x8_t) -> int32x4_t;
    vmlal_n_s16(a: int32x4_t, b: int16x4_t, c: i16) -> int32x4_t;
    vmovl_high_s8(a: int8x16_t) -> int16x8_t;
    vmovl_s8(a: int8x8_t) -> int16x8_t;
    vmovl_u8(a: uint8x8_t) -> uint16x8_t;
    vmlaq_u16(a: uint16x8_t, b: uint16x8_t, c: uint16x8_t) -> uint16x8_t;
    vmull_high_s8(a: int8x16_t, b: int8x16_t) -> int16x8_t;
    vmull_s8(a: int8x8_t, b: int8x8_t) -> int16x8_t;
    vmulq_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vmulq_n_f32(a: float32x4_t, b: f32) -> float32x4_t;
    vmulq_u16(a: uint16x8_t, b: uint16x8_t) -> uint16x8_t;
    vmulq_u32(a: uint32x4_t, b: uint32x4_t) -> uint32x4_t;
    vorrq_u16(a: uint16x8_t, b: uint16x8_t) -> uint16x8_t;
    vpadalq_s16(a: int32x4_t, b: int16x8_t) -> int32x4_t;
    vpaddq_s16(a: int16x8_t, b: int16x8_t) -> int16x8_t;
    vqtbl1q_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vqtbl2q_u8(a: uint8x16x2_t, b: uint8x16_t) -> uint8x16_t;
    vqtbl4q_u8(a: uint8x16x4_t, b: uint8x16_t) -> uint8x16_t;
    vqtbx4q_u8(a: uint8x16_t, b: uint8x16x4_t, c: uint8x16_t) -> uint8x16_t;
    vreinterpretq_f32_f64(a: float64x2_t) -> float32x4_t;
    vreinterpretq_s16_s8(a: int8x16_t) -> int16x8_t;
    vreinterpretq_s16_u16(a: uint16x8_t) -> int16x8_t;
    vreinterpretq_s32_s8(a: int8x16_t) -> int32x4_t;
    vreinterpretq_s64_s8(a: int8x16_t) -> int64x2_t;
    vreinterpretq_s8_s32(a: int32x4_t) -> int8x16_t;
    vreinterpretq_s8_s64(a: int64x2_t) -> int8x16_t;
    vreinterpretq_s8_u16(a: uint16x8_t) -> int8x16_t;
    vreinterpretq_s8_u8(a: uint8x16_t) -> int8x16_t;
    vreinterpretq_u16_s16(a: int16x8_t) -> uint16x8_t;
    vreinterpretq_u16_u32(a: uint32x4_t) -> uint16x8_t;
    vreinterpretq_u16_u8(a: uint8x16_t) -> uint16x8_t;
    vreinterpretq_u32_u16(a: uint16x8_t) -> uint32x4_t;
    vreinterpretq_u8_s8(a: int8x16_t) -> uint8x16_t;
    vreinterpretq_u8_u16(a: uint16x8_t) -> uint8x16_t;
    vshlq_u16(a: uint16x8_t, b: int16x8_t) -> uint16x8_t;
    vshrq_n_s8[const N: i32](a: int8x16_t) -> int8x16_t;
    vshrq_n_u16[const N: i32](a: uint16x8_t) -> uint16x8_t;
    vshrq_n_u8[const N: i32](a: uint8x16_t) -> uint8x16_t;
    vsliq_n_u16[const N: i32](a: uint16x8_t, b: uint16x8_t) -> uint16x8_t;
    vsliq_n_u8[const N: i32](a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vsraq_n_s16[const N: i32](a: int16x8_t, b: int16x8_t) -> int16x8_t;
    vsraq_n_u32[const N: i32](a: uint32x4_t, b: uint32x4_t) -> uint32x4_t;
    vsubq_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vtrn1q_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vtrn2q_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vuzp1q_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vuzp2q_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vzip1q_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vzip2q_f32(a: float32x4_t, b: float32x4_t) -> float32x4_t;
    vzip1q_s32(a: int32x4_t, b: int32x4_t) -> int32x4_t;
    vzip2q_s32(a: int32x4_t, b: int32x4_t) -> int32x4_t;
    vzip1q_s64(a: int64x2_t, b: int64x2_t) -> int64x2_t;
    vzip2q_s64(a: int64x2_t, b: int64x2_t) -> int64x2_t;
    vzip1q_u16(a: uint16x8_t, b: uint16x8_t) -> uint16x8_t;
    vzip2q_u16(a: uint16x8_t, b: uint16x8_t) -> uint16x8_t;
    vaddq_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
    vget_low_u16(a: uint16x8_t) -> uint16x4_t;
    vmlal_high_n_u16(a: uint32x4_t, b: uint16x8_t, c: u16) -> uint32x4_t;
    vmlal_n_u16(a: uint32x4_t, b: uint16x4_t, c: u16) -> uint32x4_t;
    vmlaq_n_s16(a: int16x8_t, b: int16x8_t, c: i16) -> int16x8_t;
    vmovl_high_u16(a: uint16x8_t) -> uint32x4_t;
    vmovl_u16(a: uint16x4_t) -> uint32x4_t;
    vreinterpretq_s32_u32(a: uint32x4_t) -> int32x4_t;
    vreinterpretq_u8_s16(a: int16x8_t) -> uint8x16_t;
    vsraq_n_u16[const N: i32](a: uint16x8_t, b: uint16x8_t) -> uint16x8_t;
    vsubq_s32(a: int32x4_t, b: int32x4_t) -> int32x4_t;
    vaddq_s32(a: int32x4_t, b: int32x4_t) -> int32x4_t;
    vsubq_u16(a: uint16x8_t, b: uint16x8_t) -> uint16x8_t;
    vuzp2q_u8(a: uint8x16_t, b: uint8x16_t) -> uint8x16_t;
}
