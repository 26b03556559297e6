//! Element types of a safetensors file, and of a GGUF file.

use std::fmt;
use std::str::FromStr;

use crate::gguf::BlockType;

/// Element type of a stored tensor. All are whole bytes, little-endian, but for the blocks of a
/// GGUF file, which hold some numbers each.
///
/// Of the 8-bit floats there is the one that checkpoints are published in, whose numbers want the
/// scales beside them, which [`crate::Checkpoint`] multiplies them by. Others and those of fewer
/// bits ([`crate::header::UNREAD`]) are deliberately absent: who asks for a tensor of such a type
/// is refused with the type's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[expect(missing_docs, reason = "the names are the format's own and say all there is")]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E4M3,
    U16,
    I16,
    F16,
    Bf16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
    /// Of a GGUF file.
    Blocks(BlockType),
    /// Of another tool that quantizes ([`crate::Checkpoint::unpacked`]).
    Packed(Packing),
}

/// How another tool stored a matrix that it quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Packing {
    /// GPTQ with so many bits.
    Gptq(u8),
    /// AWQ.
    Awq,
    /// `pack-quantized` of compressed-tensors with so many bits.
    PackQuantized(u8),
    /// `int-quantized` of compressed-tensors.
    IntQuantized,
    /// NF4 of bitsandbytes.
    Nf4,
    /// FP4 of bitsandbytes.
    Fp4,
    /// LLM.int8 of bitsandbytes.
    LlmInt8,
    /// MXFP4 of the Open Compute Project.
    Mxfp4,
}

impl Packing {
    /// The tool or format, and the bits of a code.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Gptq(2) => "GPTQ-2",
            Self::Gptq(3) => "GPTQ-3",
            Self::Gptq(4) => "GPTQ-4",
            Self::Gptq(_) => "GPTQ-8",
            Self::Awq => "AWQ-4",
            Self::PackQuantized(2) => "compressed-tensors-2",
            Self::PackQuantized(4) => "compressed-tensors-4",
            Self::PackQuantized(_) | Self::IntQuantized => "compressed-tensors-8",
            Self::Nf4 => "bitsandbytes-NF4",
            Self::Fp4 => "bitsandbytes-FP4",
            Self::LlmInt8 => "LLM.int8",
            Self::Mxfp4 => "MXFP4",
        }
    }

    /// Bits of a code.
    #[must_use]
    pub const fn bits(self) -> usize {
        match self {
            Self::Gptq(bits) | Self::PackQuantized(bits) => bits as usize,
            Self::Awq | Self::Nf4 | Self::Fp4 | Self::Mxfp4 => 4,
            Self::IntQuantized | Self::LlmInt8 => 8,
        }
    }
}

impl Dtype {
    /// Every type of a safetensors file.
    pub const ALL: [Self; 14] = [
        Self::Bool,
        Self::U8,
        Self::I8,
        Self::F8E4M3,
        Self::U16,
        Self::I16,
        Self::F16,
        Self::Bf16,
        Self::U32,
        Self::I32,
        Self::F32,
        Self::U64,
        Self::I64,
        Self::F64,
    ];

    /// Numbers in a block: 1 but for those of a GGUF file and packed ones.
    #[must_use]
    pub const fn block_len(self) -> usize {
        match self {
            Self::Blocks(block) => block.block_len(),
            Self::Packed(_) => 8,
            _ => 1,
        }
    }

    /// Bytes of a block, which is an element but for those of a GGUF file and packed ones, whose
    /// codes alone count.
    #[must_use]
    pub const fn block_bytes(self) -> usize {
        match self {
            Self::Bool | Self::U8 | Self::I8 | Self::F8E4M3 => 1,
            Self::U16 | Self::I16 | Self::F16 | Self::Bf16 => 2,
            Self::U32 | Self::I32 | Self::F32 => 4,
            Self::U64 | Self::I64 | Self::F64 => 8,
            Self::Blocks(block) => block.block_bytes(),
            Self::Packed(packing) => packing.bits(),
        }
    }

    /// Bytes of so many elements, a multiple of [`block_len`](Self::block_len).
    #[must_use]
    pub const fn bytes(self, elements: usize) -> usize {
        elements / self.block_len() * self.block_bytes()
    }

    /// The name used in a safetensors header, or `ggml`'s.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bool => "BOOL",
            Self::U8 => "U8",
            Self::I8 => "I8",
            Self::F8E4M3 => "F8_E4M3",
            Self::U16 => "U16",
            Self::I16 => "I16",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::U32 => "U32",
            Self::I32 => "I32",
            Self::F32 => "F32",
            Self::U64 => "U64",
            Self::I64 => "I64",
            Self::F64 => "F64",
            Self::Blocks(block) => block.name(),
            Self::Packed(packing) => packing.name(),
        }
    }

    /// True for the types [`crate::Checkpoint::to_f32`] converts.
    #[must_use]
    pub const fn is_float(self) -> bool {
        matches!(
            self,
            Self::F8E4M3 | Self::F16 | Self::Bf16 | Self::F32 | Self::F64 | Self::Blocks(_) | Self::Packed(_)
        )
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The text is no known type name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is not a known dtype")]
pub struct UnknownDtype(
    /// The text.
    pub String,
);

impl FromStr for Dtype {
    type Err = UnknownDtype;

    fn from_str(s: &str) -> Result<Self, UnknownDtype> {
        Self::ALL.into_iter().find(|d| d.name() == s).ok_or_else(|| UnknownDtype(s.to_owned()))
    }
}

impl serde::Serialize for Dtype {
    fn serialize<S: serde::Serializer>(&self, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(self.name())
    }
}

impl<'de> serde::Deserialize<'de> for Dtype {
    fn deserialize<D: serde::Deserializer<'de>>(d: D) -> Result<Self, D::Error> {
        let s = String::deserialize(d)?;
        s.parse().map_err(serde::de::Error::custom)
    }
}
