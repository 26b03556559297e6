//! The embedded model as other tools would quantize it is a source like others: what it computes
//! is, bit by bit, what the dense model with the same numbers computes. That the layouts are those
//! tools' own is shown in `fracbit-io` (`tests/packed.rs`).
#![cfg(unix)]

mod common;

use common::{BAD_INPUT, copy, demo, fracbit, stories, text};
use serde_json::{Map, Value, json};
use std::{fs, path::Path};

type Tensor = (String, &'static str, Vec<usize>, Vec<u8>);

/// A matrix rounded to a grid: a code for each weight, a scale and a zero for each group of
/// [`GROUP`] columns of a row.
struct Rounded {
    name: String,
    rows: usize,
    cols: usize,
    codes: Vec<u32>,
    /// As f16 holds them.
    scales: Vec<f32>,
    zeros: Vec<u32>,
}

const GROUP: usize = 64;

impl Rounded {
    fn new(name: &str, rows: usize, cols: usize, weights: &[f32], bits: u32, group: usize) -> Self {
        let top = ((1u32 << bits) - 1) as f32;
        let (mut codes, mut scales, mut zeros) = (Vec::new(), Vec::new(), Vec::new());
        for part in weights.chunks(group) {
            let low = part.iter().copied().fold(0.0, f32::min);
            let high = part.iter().copied().fold(0.0, f32::max);
            // Few bits of mantissa, which every type of scales has.
            let scale = f32::from_bits(((high - low) / top).max(1e-4).to_bits() & 0xffff_0000);
            let zero = (-low / scale).round().clamp(1.0, top);
            codes.extend(part.iter().map(|w| (w / scale + zero).round().clamp(0.0, top) as u32));
            scales.push(scale);
            zeros.push(zero as u32);
        }
        Self { name: name.to_owned(), rows, cols, codes, scales, zeros }
    }

    fn dense(&self) -> Vec<f32> {
        let group = self.codes.len() / self.scales.len();
        let weight = |(at, code): (usize, &u32)| {
            (*code as f32 - self.zeros[at / group] as f32) * self.scales[at / group]
        };
        self.codes.iter().enumerate().map(weight).collect()
    }

    /// Columns first.
    fn turned<T: Copy>(&self, of: &[T]) -> Vec<T> {
        let cols = of.len() / self.rows;
        (0..of.len()).map(|at| of[at % self.rows * cols + at / self.rows]).collect()
    }
}

/// Codes of some bits one behind the other.
fn stream(codes: impl Iterator<Item = u32>, bits: u32) -> Vec<u8> {
    let (mut held, mut count, mut out) = (0u64, 0, Vec::new());
    for code in codes {
        held |= u64::from(code) << count;
        count += bits;
        while count >= 8 {
            out.push(held as u8);
            (held, count) = (held >> 8, count - 8);
        }
    }
    assert_eq!(count, 0, "whole bytes");
    out
}

fn bytes<T, const N: usize>(values: &[T], of: impl Fn(&T) -> [u8; N]) -> Vec<u8> {
    values.iter().flat_map(of).collect()
}

fn floats(values: &[f32]) -> Vec<u8> {
    bytes(values, |v| v.to_le_bytes())
}

/// Rows of words, turned so that what was a row of words is a column.
fn words_down(packed: &[u8], rows: usize) -> Vec<u8> {
    let words = packed.as_chunks::<4>().0;
    let wide = words.len() / rows;
    (0..words.len()).flat_map(|at| words[at % rows * wide + at / rows]).collect()
}

fn gptq(m: &Rounded, bits: u32) -> Vec<Tensor> {
    let codes = stream(m.codes.iter().copied(), bits);
    // Stored less one.
    let zeros = stream(m.turned(&m.zeros).into_iter().map(|zero| zero - 1), bits);
    let groups = m.scales.len() / m.rows;
    let of = |shape: [usize; 2]| shape.to_vec();
    let wide = |n: usize| n * bits as usize / 32;
    vec![
        (format!("{}.qweight", m.name), "I32", of([wide(m.cols), m.rows]), words_down(&codes, m.rows)),
        (format!("{}.qzeros", m.name), "I32", of([groups, wide(m.rows)]), zeros),
        (format!("{}.scales", m.name), "F32", of([groups, m.rows]), floats(&m.turned(&m.scales))),
        // What AutoGPTQ adds to every matrix.
        (format!("{}.bias", m.name), "F16", vec![m.rows], vec![0; 2 * m.rows]),
    ]
}

fn awq(m: &Rounded) -> Vec<Tensor> {
    let order = |of: Vec<u32>| {
        let eights: Vec<u32> = of.chunks(8).flat_map(|e| [0, 2, 4, 6, 1, 3, 5, 7].map(|at| e[at])).collect();
        stream(eights.into_iter(), 4)
    };
    let groups = m.scales.len() / m.rows;
    vec![
        (format!("{}.qweight", m.name), "I32", vec![m.cols, m.rows / 8], order(m.turned(&m.codes))),
        (format!("{}.qzeros", m.name), "I32", vec![groups, m.rows / 8], order(m.turned(&m.zeros))),
        (format!("{}.scales", m.name), "F32", vec![groups, m.rows], floats(&m.turned(&m.scales))),
    ]
}

fn packed(m: &Rounded, bits: u32) -> Vec<Tensor> {
    let wide = |n: usize| n * bits as usize / 32;
    let groups = m.scales.len() / m.rows;
    let zeros = words_down(&stream(m.turned(&m.zeros).into_iter(), bits), groups);
    let shape = [m.rows as i64, m.cols as i64];
    vec![
        (
            format!("{}.weight_packed", m.name),
            "I32",
            vec![m.rows, wide(m.cols)],
            stream(m.codes.iter().copied(), bits),
        ),
        (format!("{}.weight_scale", m.name), "F32", vec![m.rows, groups], floats(&m.scales)),
        (format!("{}.weight_zero_point", m.name), "I32", vec![wide(m.rows), groups], zeros),
        (format!("{}.weight_shape", m.name), "I64", vec![2], bytes(&shape, |v| v.to_le_bytes())),
    ]
}

fn in_bytes(m: &Rounded) -> Vec<Tensor> {
    let number = |code: &u32| [(*code as i32 - 128) as u8];
    vec![
        (format!("{}.weight", m.name), "I8", vec![m.rows, m.cols], bytes(&m.codes, number)),
        (format!("{}.weight_scale", m.name), "F32", vec![m.rows, 1], floats(&m.scales)),
        (format!("{}.weight_zero_point", m.name), "I8", vec![m.rows, 1], bytes(&m.zeros, number)),
    ]
}

/// Both of blocks of [`GROUP`] codes, each one with a table.
fn table(m: &Rounded) -> (Vec<Tensor>, Vec<f32>) {
    let map: Vec<f32> = (0..16).map(|code| (code as f32 - 8.0) / 8.0).collect();
    let name = format!("{}.weight", m.name);
    let pairs = m.codes.as_chunks::<2>().0;
    let packed: Vec<u8> = pairs.iter().map(|[a, b]| (a << 4 | b) as u8).collect();
    let state =
        json!({ "quant_type": "nf4", "blocksize": GROUP, "dtype": "bfloat16", "shape": [m.rows, m.cols] });
    let state = state.to_string().into_bytes();
    let dense = m.codes.iter().enumerate().map(|(at, &code)| map[code as usize] * m.scales[at / GROUP]);
    let tensors = vec![
        (name.clone(), "U8", vec![packed.len(), 1], packed),
        (format!("{name}.absmax"), "F32", vec![m.scales.len()], floats(&m.scales)),
        (format!("{name}.quant_map"), "F32", vec![16], floats(&map)),
        (format!("{name}.quant_state.bitsandbytes__nf4"), "U8", vec![state.len()], state),
    ];
    (tensors, dense.collect())
}

fn int8(m: &Rounded) -> (Vec<Tensor>, Vec<f32>) {
    let number = |code: &u32| *code as i32 - 128;
    let dense = m.codes.iter().enumerate();
    let dense = dense.map(|(at, code)| number(code) as f32 * m.scales[at / m.cols] * (1.0 / 127.0));
    let tensors = vec![
        (
            format!("{}.weight", m.name),
            "I8",
            vec![m.rows, m.cols],
            bytes(&m.codes, |code| [number(code) as u8]),
        ),
        (format!("{}.SCB", m.name), "F32", vec![m.rows], floats(&m.scales)),
        (format!("{}.weight_format", m.name), "U8", vec![], vec![0]),
    ];
    (tensors, dense.collect())
}

fn mxfp4(m: &Rounded) -> (Vec<Tensor>, Vec<f32>) {
    let numbers = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let number = |code: u32| numbers[code as usize & 7] * if code > 7 { -1.0f32 } else { 1.0 };
    let pairs = m.codes.as_chunks::<2>().0;
    let packed: Vec<u8> = pairs.iter().map(|[a, b]| (a | b << 4) as u8).collect();
    let powers: Vec<u8> = (0..m.codes.len() / 32).map(|at| 118 + (at % 3) as u8).collect();
    let dense = m.codes.iter().enumerate();
    let dense = dense.map(|(at, &code)| number(code) * 2f32.powi(i32::from(powers[at / 32]) - 127));
    let dense = dense.collect();
    let tensors = vec![
        (format!("{}.weight_packed", m.name), "U8", vec![m.rows, m.cols / 2], packed),
        (format!("{}.weight_scale", m.name), "U8", vec![m.rows, m.cols / 32], powers),
    ];
    (tensors, dense)
}

/// The embedded model with other tensors in the place of the matrices of its blocks, and a block of
/// `config.json`.
fn with(change: impl Fn(&str, usize, usize, &[f32]) -> Vec<Tensor>, block: &Value) -> tempfile::TempDir {
    let place = copy(&demo());
    let path = place.path().join("model.safetensors");
    let all = fs::read(&path).expect("a shard");
    let (length, rest) = all.split_first_chunk::<8>().expect("a length");
    let (header, data) = rest.split_at(usize::try_from(u64::from_le_bytes(*length)).expect("a small header"));
    let header: Map<String, Value> = serde_json::from_slice(header).expect("a header");
    let mut tensors: Vec<Tensor> = Vec::new();
    for (name, entry) in header.iter().filter(|(name, _)| *name != "__metadata__") {
        let number = |value: &Value| value.as_u64().expect("a number") as usize;
        let shape: Vec<usize> = entry["shape"].as_array().expect("dimensions").iter().map(number).collect();
        let range = number(&entry["data_offsets"][0])..number(&entry["data_offsets"][1]);
        let stored = &data[range];
        match (name.strip_suffix("_proj.weight"), &shape[..]) {
            (Some(_), &[rows, cols]) => {
                let halves = stored.as_chunks::<2>().0;
                let weights: Vec<f32> =
                    halves.iter().map(|h| f32::from_bits(u32::from(u16::from_le_bytes(*h)) << 16)).collect();
                tensors.extend(change(name.strip_suffix(".weight").expect("it is"), rows, cols, &weights));
            }
            _ => tensors.push((name.clone(), "BF16", shape, stored.to_vec())),
        }
    }
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let range = [data.len(), data.len() + bytes.len()];
        header.insert(name, json!({ "dtype": dtype, "shape": shape, "data_offsets": range }));
        data.extend(bytes);
    }
    let header = Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(&path, [&length[..], header.as_bytes(), &data].concat()).expect("a writable place");
    let path = place.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
    if !block.is_null() {
        config["quantization_config"] = block.clone();
    }
    fs::write(&path, config.to_string()).expect("a writable place");
    place
}

/// How a matrix is stored, and the numbers that it has then.
type Stored = fn(&str, usize, usize, &[f32]) -> (Vec<Tensor>, Vec<f32>);

fn on_grid(m: &Rounded, tensors: Vec<Tensor>) -> (Vec<Tensor>, Vec<f32>) {
    (tensors, m.dense())
}

fn compressed(format: &str, bits: u32, kind: &str, group: Option<usize>, symmetric: bool) -> Value {
    let weights = json!({ "num_bits": bits, "type": kind, "symmetric": symmetric, "group_size": group,
        "strategy": if group.is_some() { "group" } else { "channel" } });
    json!({ "quant_method": "compressed-tensors", "format": format, "ignore": ["lm_head"],
        "config_groups": { "group_0": { "targets": ["Linear"], "weights": weights } } })
}

/// Name in inspections, block, and how matrices are stored.
fn formats() -> Vec<(&'static str, Value, Stored)> {
    let gptq_of =
        |bits: u32| json!({ "quant_method": "gptq", "bits": bits, "group_size": GROUP, "desc_act": false });
    let bnb = json!({ "quant_method": "bitsandbytes", "load_in_4bit": true });
    vec![
        ("gptq-4", gptq_of(4), |n, r, c, w| {
            let m = Rounded::new(n, r, c, w, 4, GROUP);
            on_grid(&m, gptq(&m, 4))
        }),
        ("gptq-3", gptq_of(3), |n, r, c, w| {
            let m = Rounded::new(n, r, c, w, 3, GROUP);
            on_grid(&m, gptq(&m, 3))
        }),
        ("awq-4", json!({ "quant_method": "awq", "bits": 4, "version": "gemm" }), |n, r, c, w| {
            let m = Rounded::new(n, r, c, w, 4, GROUP);
            on_grid(&m, awq(&m))
        }),
        ("compressed-tensors-4", compressed("pack-quantized", 4, "int", Some(GROUP), false), |n, r, c, w| {
            let m = Rounded::new(n, r, c, w, 4, GROUP);
            on_grid(&m, packed(&m, 4))
        }),
        ("compressed-tensors-8", compressed("pack-quantized", 8, "int", None, false), |n, r, c, w| {
            let m = Rounded::new(n, r, c, w, 8, c);
            on_grid(&m, packed(&m, 8))
        }),
        ("compressed-tensors-8", compressed("int-quantized", 8, "int", None, false), |n, r, c, w| {
            let m = Rounded::new(n, r, c, w, 8, c);
            on_grid(&m, in_bytes(&m))
        }),
        ("mxfp4", compressed("mxfp4-pack-quantized", 4, "float", Some(32), true), |n, r, c, w| {
            mxfp4(&Rounded::new(n, r, c, w, 4, 32))
        }),
        ("bitsandbytes-nf4", bnb, |n, r, c, w| table(&Rounded::new(n, r, c, w, 4, GROUP))),
        ("llm.int8", json!({ "quant_method": "bitsandbytes", "load_in_8bit": true }), |n, r, c, w| {
            int8(&Rounded::new(n, r, c, w, 8, c))
        }),
    ]
}

/// The quantized model and the dense one with the same numbers.
fn both(block: &Value, stored: Stored) -> [tempfile::TempDir; 2] {
    let dense = |name: &str, rows: usize, cols: usize, weights: &[f32]| -> Vec<Tensor> {
        let numbers = stored(name, rows, cols, weights).1;
        vec![(format!("{name}.weight"), "F32", vec![rows, cols], floats(&numbers))]
    };
    [with(|name, rows, cols, weights| stored(name, rows, cols, weights).0, block), with(dense, &Value::Null)]
}

#[test]
fn models_of_other_tools_are_what_their_numbers_are() {
    let stories = stories();
    for (kind, block, stored) in formats() {
        let [packed, dense] = both(&block, stored);
        let eval = |model: &Path| {
            let args =
                ["eval", text(model), "--text", text(&stories), "--ctx", "64", "--windows", "2", "--json"];
            let ran = fracbit(&args).done();
            (ran.json()["nats_per_token"].as_f64().expect("a number"), ran.err)
        };
        let (got, told) = eval(packed.path());
        let (want, _) = eval(dense.path());
        assert_eq!(got.to_bits(), want.to_bits(), "{kind}: {got} and {want}");
        assert_eq!(told.matches("quantized before").count(), 1, "{kind}: {told}");
        assert!(told.contains("42 tensors") && !told.contains("left out"), "{kind}: {told}");
        let found = fracbit(&["inspect", text(packed.path()), "--json"]).done().json();
        assert_eq!(found["storage"][kind]["matrices"], 42, "{kind}: {found}");
        let bits = found["bits_per_weight"].as_f64().expect("a number");
        assert!((4.0..12.0).contains(&bits), "{kind}: {bits}");
    }
}

#[test]
fn what_is_quantized_again_is_what_the_numbers_are() {
    let (_, block, stored) = formats().swap_remove(0);
    let written = both(&block, stored).map(|place| {
        let model = place.path();
        let out = model.join("out");
        let args = ["quantize", text(model), "-o", text(&out), "--scheme", "nuq-2", "--data-free"];
        let ran = fracbit(&args).done();
        (fs::read(out.join("model.safetensors")).expect("a model"), ran.err)
    });
    assert!(written[0].0 == written[1].0, "the same numbers give the same bytes");
    assert!(written[0].1.contains("quantized before (GPTQ-4, 42 tensors)"), "{}", written[0].1);
}

#[test]
fn contradictions_are_refused_by_name() {
    let (_, block, stored) = formats().swap_remove(0);
    let change = |name: &str, rows: usize, cols: usize, weights: &[f32]| stored(name, rows, cols, weights).0;
    for (field, value, words) in [
        ("bits", json!(8), ["config.json", "quantization_config.bits"]),
        ("group_size", json!(128), ["model.layers.0.mlp.down_proj.scales", "group_size 128"]),
        ("quant_method", json!("awq"), ["quantization_config.quant_method", "\"gptq\""]),
        ("checkpoint_format", json!("marlin"), ["checkpoint_format", "marlin"]),
    ] {
        let mut block = block.clone();
        block[field] = value;
        let place = with(change, &block);
        let model = text(place.path());
        for args in [&["inspect", model][..], &["run", model, "-p", "x"], &["plan", model, "--bits", "4"]] {
            fracbit(args).failed(BAD_INPUT, &words);
        }
    }
    let none = with(change, &Value::Null);
    fracbit(&["inspect", text(none.path())]).failed(BAD_INPUT, &["quantization_config", "no such block"]);
}
