//! GGUF files of any content, right or wrong, byte by byte.

use std::fs;
use std::path::{Path, PathBuf};

/// What a file says.
#[derive(Clone)]
pub(crate) struct Raw {
    pub(crate) version: u32,
    /// Key, type, value.
    pub(crate) metadata: Vec<(String, u32, Vec<u8>)>,
    pub(crate) tensors: Vec<Tensor>,
    pub(crate) alignment: usize,
}

#[derive(Clone)]
pub(crate) struct Tensor {
    pub(crate) name: String,
    /// Innermost first.
    pub(crate) dims: Vec<u64>,
    pub(crate) kind: u32,
    pub(crate) data: Vec<u8>,
    /// In place of the right offset.
    pub(crate) offset: Option<u64>,
}

pub(crate) fn bytes_of(text: &[u8]) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes(), text].concat()
}

/// A string.
pub(crate) fn text(t: &str) -> (u32, Vec<u8>) {
    (8, bytes_of(t.as_bytes()))
}

/// A 32-bit whole number.
pub(crate) fn number(n: u32) -> (u32, Vec<u8>) {
    (4, n.to_le_bytes().to_vec())
}

pub(crate) fn float(n: f32) -> (u32, Vec<u8>) {
    (6, n.to_le_bytes().to_vec())
}

/// An array of elements that are bytes already.
pub(crate) fn array(kind: u32, elements: &[Vec<u8>]) -> (u32, Vec<u8>) {
    let mut bytes = kind.to_le_bytes().to_vec();
    bytes.extend((elements.len() as u64).to_le_bytes());
    bytes.extend(elements.concat());
    (9, bytes)
}

pub(crate) fn texts(list: &[&str]) -> (u32, Vec<u8>) {
    array(8, &list.iter().map(|t| bytes_of(t.as_bytes())).collect::<Vec<_>>())
}

pub(crate) fn numbers(list: &[i32]) -> (u32, Vec<u8>) {
    array(5, &list.iter().map(|n| n.to_le_bytes().to_vec()).collect::<Vec<_>>())
}

pub(crate) fn floats(list: &[f32]) -> (u32, Vec<u8>) {
    array(6, &list.iter().map(|n| n.to_le_bytes().to_vec()).collect::<Vec<_>>())
}

impl Raw {
    pub(crate) fn set(&mut self, key: &str, (kind, value): (u32, Vec<u8>)) -> &mut Self {
        self.metadata.retain(|(k, ..)| k != key);
        self.metadata.push((key.to_owned(), kind, value));
        self
    }

    pub(crate) fn remove(&mut self, key: &str) -> &mut Self {
        self.metadata.retain(|(k, ..)| k != key);
        self
    }

    /// A tensor in single precision, shape outermost first.
    pub(crate) fn f32s(&mut self, name: &str, shape: &[usize], data: &[f32]) -> &mut Self {
        assert_eq!(shape.iter().product::<usize>(), data.len());
        self.tensors.retain(|t| t.name != name);
        self.tensors.push(Tensor {
            name: name.to_owned(),
            dims: shape.iter().rev().map(|&d| d as u64).collect(),
            kind: 0,
            data: data.iter().flat_map(|v| v.to_le_bytes()).collect(),
            offset: None,
        });
        self
    }

    pub(crate) fn bytes(&self) -> Vec<u8> {
        let mut out = b"GGUF".to_vec();
        out.extend(self.version.to_le_bytes());
        out.extend((self.tensors.len() as u64).to_le_bytes());
        out.extend((self.metadata.len() as u64).to_le_bytes());
        for (key, kind, value) in &self.metadata {
            out.extend(bytes_of(key.as_bytes()));
            out.extend(kind.to_le_bytes());
            out.extend(value);
        }
        let mut offset = 0;
        for t in &self.tensors {
            out.extend(bytes_of(t.name.as_bytes()));
            out.extend((t.dims.len() as u32).to_le_bytes());
            t.dims.iter().for_each(|d| out.extend(d.to_le_bytes()));
            out.extend(t.kind.to_le_bytes());
            out.extend(t.offset.unwrap_or(offset).to_le_bytes());
            offset += (t.data.len() as u64).next_multiple_of(self.alignment as u64);
        }
        for t in &self.tensors {
            out.resize(out.len().next_multiple_of(self.alignment), 0);
            out.extend(&t.data);
        }
        out
    }

    pub(crate) fn write(&self, path: &Path) -> PathBuf {
        fs::write(path, self.bytes()).expect("the directory is there");
        path.to_owned()
    }
}

/// Numbers that differ from each other.
pub(crate) fn counted(n: usize, seed: usize) -> Vec<f32> {
    (0..n).map(|i| ((i * 7919 + seed * 104_729) % 2003) as f32 / 1024.0 - 0.9).collect()
}

/// A Llama of two layers without a vocabulary: width 8, two heads, one for keys, of 4 channels
/// each.
pub(crate) fn llama() -> Raw {
    let mut raw = Raw { version: 3, metadata: Vec::new(), tensors: Vec::new(), alignment: 32 };
    raw.set("general.architecture", text("llama"));
    for (key, n) in [
        ("block_count", 2),
        ("context_length", 64),
        ("embedding_length", 8),
        ("feed_forward_length", 12),
        ("attention.head_count", 2),
        ("attention.head_count_kv", 1),
    ] {
        raw.set(&format!("llama.{key}"), number(n));
    }
    raw.set("llama.attention.layer_norm_rms_epsilon", float(1e-5));
    raw.f32s("token_embd.weight", &[10, 8], &counted(80, 1)).f32s("output_norm.weight", &[8], &counted(8, 2));
    for i in 0..2 {
        for (name, shape) in [
            ("attn_norm", &[8][..]),
            ("attn_q", &[8, 8]),
            ("attn_k", &[4, 8]),
            ("attn_v", &[4, 8]),
            ("attn_output", &[8, 8]),
            ("ffn_norm", &[8]),
            ("ffn_gate", &[12, 8]),
            ("ffn_up", &[12, 8]),
            ("ffn_down", &[8, 12]),
        ] {
            let data = counted(shape.iter().product(), 3 + i);
            raw.f32s(&format!("blk.{i}.{name}.weight"), shape, &data);
        }
    }
    raw
}
