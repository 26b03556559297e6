//! `manifest.json`: a checksum for every file and every tensor of a model directory, and where it
//! all came from.
//!
//! ```json
//! {
//!   "format_version": 1,
//!   "files": { "config.json": { "bytes": 421, "blake3": "…" },
//!              "model.safetensors": { "bytes": 1064, "blake3": "…", "header_blake3": "…" } },
//!   "tensors": { "w": { "file": "model.safetensors", "dtype": "F32", "shape": [2, 2], "bytes": 16, "blake3": "…" } },
//!   "provenance": { "anything": "the writer wants to keep" },
//!   "blake3": "…"
//! }
//! ```
//!
//! `header_blake3` covers the first 8 + n bytes of a safetensors file, so that opening can prove
//! the whole of the metadata without reading the data. The last field is the blake3 of the
//! canonical JSON (keys sorted, no white space) of the document without that field. The document
//! must be laid out exactly as [`Manifest::to_json`] prints it, so that *any* changed byte of the
//! file is seen, `1e5` for `1E5` included.
//!
//! The checksums find accidents (disk, transfer, half-finished edits). They do not prove who wrote
//! the files: whoever can change the weights can change the manifest with them.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::checkpoint::{Checkpoint, is_plain_file_name};
use crate::dtype::Dtype;
use crate::error::{Error, IoContext, read_limited};
use crate::mmap::FileBytes;

/// File name of the manifest.
pub const MANIFEST: &str = "manifest.json";
/// The version this crate writes and reads.
pub const FORMAT_VERSION: u32 = 1;
const MAX_MANIFEST: u64 = 256 << 20;

/// Checksum of one file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct FileRecord {
    /// Length of the file.
    pub bytes: u64,
    /// Digest of the file, 64 hex digits.
    pub blake3: String,
    /// For a safetensors file, digest of the length prefix and the header.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header_blake3: Option<String>,
}

/// Checksum of one tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorRecord {
    /// The file that holds it.
    pub file: String,
    /// Element type.
    pub dtype: Dtype,
    /// Dimensions.
    pub shape: Vec<usize>,
    /// Length of the data.
    pub bytes: u64,
    /// Digest of the data, 64 hex digits.
    pub blake3: String,
}

/// The document.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Manifest {
    /// [`FORMAT_VERSION`].
    pub format_version: u32,
    /// Every file of the directory but the manifest.
    pub files: BTreeMap<String, FileRecord>,
    /// Every tensor.
    pub tensors: BTreeMap<String, TensorRecord>,
    /// Free-form: source hash, seed, version, command.
    pub provenance: Value,
    /// Digest of the canonical JSON without this field.
    pub blake3: String,
}

impl Manifest {
    /// Assembles a manifest and computes its own digest.
    #[must_use]
    pub fn new(
        files: BTreeMap<String, FileRecord>,
        tensors: BTreeMap<String, TensorRecord>,
        provenance: Value,
    ) -> Self {
        let mut m =
            Self { format_version: FORMAT_VERSION, files, tensors, provenance, blake3: String::new() };
        m.blake3 = m.digest();
        m
    }

    /// The text of the file.
    #[must_use]
    pub fn to_json(&self) -> String {
        let mut s = serde_json::to_string_pretty(self).expect("maps with string keys always serialize");
        s.push('\n');
        s
    }

    /// Digest of the canonical JSON without the `blake3` field.
    #[must_use]
    pub fn digest(&self) -> String {
        hash(self.canonical().as_bytes())
    }

    /// The canonical JSON without the `blake3` field. Every loading needs it, so records are
    /// written from sorted copies of theirs and not by way of a tree of values.
    fn canonical(&self) -> String {
        #[derive(Serialize)]
        struct File<'a> {
            blake3: &'a str,
            bytes: u64,
            #[serde(skip_serializing_if = "Option::is_none")]
            header_blake3: Option<&'a str>,
        }
        #[derive(Serialize)]
        struct Tensor<'a> {
            blake3: &'a str,
            bytes: u64,
            dtype: Dtype,
            file: &'a str,
            shape: &'a [usize],
        }
        let files = self.files.iter().map(|(name, of)| {
            let header_blake3 = of.header_blake3.as_deref();
            (name.as_str(), File { blake3: &of.blake3, bytes: of.bytes, header_blake3 })
        });
        let tensors = self.tensors.iter().map(|(name, of)| {
            let TensorRecord { file, dtype, shape, bytes, blake3 } = of;
            (name.as_str(), Tensor { blake3, bytes: *bytes, dtype: *dtype, file, shape })
        });
        let text = |json: serde_json::Result<String>| json.expect("maps with string keys always serialize");
        let files = text(serde_json::to_string(&files.collect::<BTreeMap<_, _>>()));
        let tensors = text(serde_json::to_string(&tensors.collect::<BTreeMap<_, _>>()));
        let (version, mut provenance) = (self.format_version, String::new());
        canonical(&self.provenance, &mut provenance);
        format!(
            "{{\"files\":{files},\"format_version\":{version},\"provenance\":{provenance},\"tensors\":{tensors}}}"
        )
    }

    /// Reads and checks `manifest.json` of a directory.
    ///
    /// # Errors
    /// [`Error::Io`], [`Error::Json`], or [`Error::Manifest`] for another version, a bad name or a
    /// changed byte.
    pub fn read(dir: &Path) -> Result<Self, Error> {
        let path = dir.join(MANIFEST);
        let bytes = read_limited(&path, MAX_MANIFEST)?;
        Self::parse(&bytes, &path)
    }

    /// Reads and checks the text of a manifest; `path` is for messages.
    ///
    /// # Errors
    /// As for [`Manifest::read`].
    pub fn parse(bytes: &[u8], path: &Path) -> Result<Self, Error> {
        let json = |e: serde_json::Error| Error::Json {
            path: path.to_owned(),
            what: "a fracbit manifest",
            detail: e.to_string(),
        };
        let bad = |rule: String| Error::Manifest { path: path.to_owned(), rule };
        // The version first: a later format may have other fields.
        #[derive(Deserialize)]
        struct Version {
            format_version: Option<Value>,
        }
        let version: Version = serde_json::from_slice(bytes).map_err(json)?;
        let version = version.format_version.as_ref().and_then(Value::as_u64);
        if version != Some(u64::from(FORMAT_VERSION)) {
            let got = version.map_or_else(|| "none".to_owned(), |v| v.to_string());
            return Err(bad(format!("format_version should be {FORMAT_VERSION}, got {got}")));
        }
        let m: Self = serde_json::from_slice(bytes).map_err(json)?;
        let digest = m.digest();
        if digest != m.blake3 {
            return Err(Error::Checksum { path: path.to_owned(), tensor: None, want: m.blake3, got: digest });
        }
        if m.to_json().as_bytes() != bytes {
            return Err(bad("should be laid out as it was written; it was edited or reformatted".to_owned()));
        }
        if let Some(name) = m.files.keys().find(|n| !is_plain_file_name(n) || *n == MANIFEST) {
            return Err(bad(format!(
                "files should be plain names in the directory, got `{}`",
                name.escape_debug()
            )));
        }
        if let Some((name, t)) = m.tensors.iter().find(|(_, t)| !m.files.contains_key(&t.file)) {
            return Err(bad(format!(
                "tensor `{name}` should be in a listed file, is in `{}`",
                t.file.escape_debug()
            )));
        }
        Ok(m)
    }

    /// Checks everything that can be checked without reading tensor data: lengths and headers of
    /// the shards, the table of tensors, and the full checksum of every other file except `*.md` (a
    /// model card may be edited).
    pub(crate) fn check_opened(&self, ckpt: &Checkpoint) -> Result<(), Error> {
        let path = ckpt.dir().join(MANIFEST);
        let bad = |rule: String| Error::Manifest { path: path.clone(), rule };
        for shard in ckpt.shards() {
            let Some(want) = self.files.get(&shard.name) else {
                return Err(bad(format!("`{}` should be listed", shard.name)));
            };
            let (got, len) = (hash(&shard.bytes[..shard.data_start]), shard.bytes.len() as u64);
            if len != want.bytes {
                return Err(bad(format!("`{}` should have {} bytes, has {len}", shard.name, want.bytes)));
            }
            let want = want.header_blake3.as_deref().unwrap_or("a digest of the header");
            if got != want {
                return Err(Error::Checksum {
                    path: shard.path.clone(),
                    tensor: None,
                    want: want.to_owned(),
                    got,
                });
            }
        }
        for (name, t) in &self.tensors {
            let Ok(info) = ckpt.info(name) else {
                return Err(bad(format!("tensor `{name}` should be in `{}`, no shard holds it", t.file)));
            };
            let file = &ckpt.shard_of(name)?.name;
            if (info.dtype, &info.shape, file) != (t.dtype, &t.shape, &t.file) {
                return Err(bad(format!(
                    "tensor `{name}` should be {} {:?} in `{}`, is {} {:?} in `{file}`",
                    t.dtype, t.shape, t.file, info.dtype, info.shape
                )));
            }
        }
        if let Some(name) = ckpt.names().find(|n| !self.tensors.contains_key(*n)) {
            return Err(bad(format!("tensor `{name}` should be listed")));
        }
        for (name, want) in &self.files {
            if ckpt.shards().iter().any(|s| s.name == *name) || name.ends_with(".md") {
                continue;
            }
            let (bytes, got) = hash_file(&ckpt.dir().join(name))?;
            if (bytes, &got) != (want.bytes, &want.blake3) {
                let path = ckpt.dir().join(name);
                return Err(Error::Checksum { path, tensor: None, want: want.blake3.clone(), got });
            }
        }
        Ok(())
    }
}

/// blake3 as hex; in parallel for large inputs, the value does not depend on it.
pub(crate) fn hash(bytes: &[u8]) -> String {
    let mut h = blake3::Hasher::new();
    if bytes.len() < 1 << 17 {
        h.update(bytes);
    } else {
        h.update_rayon(bytes);
    }
    h.finalize().to_hex().to_string()
}

/// Length and digest of a file.
///
/// # Errors
/// [`Error::Io`] naming the path.
pub fn hash_file(path: &Path) -> Result<(u64, String), Error> {
    // Small files are read: mapping one costs more than copying it, and a reader is immune to
    // truncation meanwhile.
    let small = std::fs::metadata(path).io("reading the length of", path)?.len() < 1 << 20;
    let bytes = if small { FileBytes::read(path)? } else { FileBytes::map(path)? };
    Ok((bytes.len() as u64, hash(&bytes)))
}

/// Writes `v` with sorted keys and without white space.
fn canonical(v: &Value, out: &mut String) {
    match v {
        Value::Object(map) => {
            let mut keys: Vec<&String> = map.keys().collect();
            keys.sort();
            out.push('{');
            for (i, k) in keys.into_iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                out.push_str(&Value::from(k.as_str()).to_string());
                out.push(':');
                canonical(&map[k], out);
            }
            out.push('}');
        }
        Value::Array(items) => {
            out.push('[');
            for (i, item) in items.iter().enumerate() {
                if i > 0 {
                    out.push(',');
                }
                canonical(item, out);
            }
            out.push(']');
        }
        leaf => out.push_str(&leaf.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn canonical_is_sorted_and_compact() {
        let mut s = String::new();
        canonical(&json!({"b": [1, 2.5, null], "a": {"z": "é\"\n", "y": true}}), &mut s);
        assert_eq!(s, r#"{"a":{"y":true,"z":"é\"\n"},"b":[1,2.5,null]}"#);
    }

    #[test]
    fn the_digest_is_of_the_canonical_document() {
        let file = |header: Option<&str>| FileRecord {
            bytes: 3,
            blake3: hash(b"abc"),
            header_blake3: header.map(str::to_owned),
        };
        let tensor = |shape: Vec<usize>| TensorRecord {
            file: "a.safetensors".to_owned(),
            dtype: Dtype::Bf16,
            bytes: 1 << 40,
            blake3: hash(b"w"),
            shape,
        };
        let files = [("a.safetensors", file(Some("12"))), ("\"é\n\".json", file(None))];
        let tensors = [("b.w", tensor(vec![2, 3])), ("a\\", tensor(vec![]))];
        let m = Manifest::new(
            files.map(|(name, of)| (name.to_owned(), of)).into(),
            tensors.map(|(name, of)| (name.to_owned(), of)).into(),
            json!({"seed": 7, "list": [1, {"z": -2.5, "a": null}]}),
        );
        let mut tree = serde_json::to_value(&m).unwrap();
        tree.as_object_mut().unwrap().remove("blake3");
        let mut text = String::new();
        canonical(&tree, &mut text);
        assert_eq!(m.canonical(), text);
    }

    #[test]
    fn every_bit_of_the_text_counts() {
        let file = FileRecord { bytes: 3, blake3: hash(b"abc"), header_blake3: None };
        let m = Manifest::new(
            BTreeMap::from([("x.json".to_owned(), file)]),
            BTreeMap::new(),
            json!({"rate": 1e-6, "seed": 7, "bits": 3.25, "cmd": "a b", "big": 1e300, "list": [1, -2]}),
        );
        let text = m.to_json();
        let path = Path::new("manifest.json");
        assert_eq!(Manifest::parse(text.as_bytes(), path).unwrap(), m);
        for i in 0..text.len() * 8 {
            let mut bytes = text.clone().into_bytes();
            bytes[i / 8] ^= 1 << (i % 8);
            assert!(Manifest::parse(&bytes, path).is_err(), "flip of bit {i} went unseen");
        }
        for n in 0..text.len() {
            assert!(Manifest::parse(&text.as_bytes()[..n], path).is_err(), "truncation to {n} went unseen");
        }
    }
}
