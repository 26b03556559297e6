#![doc = include_str!("../README.md")]

mod atomic;
pub mod chat;
pub mod checkpoint;
mod claim;
pub mod config;
mod convert;
pub mod dtype;
mod error;
pub mod gguf;
pub mod header;
mod jinja;
mod journal;
mod json;
pub mod manifest;
pub mod mmap;
pub mod output;
pub mod pooling;
pub mod tokenizer;
pub mod verify;
pub mod writer;

pub use atomic::{keep, kept, write_atomic};
pub use chat::{ChatTemplate, Message, RenderOptions};
pub use checkpoint::{Checkpoint, EmbeddingNames, OpenOptions, TensorView, Verified};
pub use claim::Claim;
pub use config::{
    Activation, Architecture, Experts, LayerConfig, ModelConfig, QkNorm, QueryGrowth, RopeConfig, RopeScaling,
};
pub use convert::to_f32_into;
pub use dtype::{Dtype, Packing};
pub use error::Error;
pub use gguf::{BlockType, Gguf};
pub use header::{Header, HeaderError, TensorInfo};
pub use manifest::Manifest;
pub use output::{Leftover, OutputDir, Overwrite, Resumable, leftovers};
pub use pooling::{Pool, Pooling, PoolingMode};
pub use tokenizer::{Bos, EncodeOptions, Ending, PrefixSpace, Rendered, TokenStream, Tokenizer};
pub use verify::{Report, verify};
pub use writer::{MAX_SHARD, ShardWriter, TensorSpec};
