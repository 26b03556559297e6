//! How a model's hidden states become one vector: what sentence-transformers says beside a
//! checkpoint.
//!
//! `modules.json` lists the steps behind the model (`Pooling`, perhaps `Normalize`) and where each
//! keeps its configuration, `1_Pooling/config.json` as a rule. A quantized directory, whose files
//! lie side by side, has both in one `pooling.json` of this program.

use std::path::{Component, Path};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::error::{Error, read_optional};
use crate::gguf::{Gguf, is_gguf};
use crate::json;

/// File name of the pooling in a quantized directory.
pub const POOLING: &str = "pooling.json";
/// File name of the steps behind a model, as sentence-transformers writes it.
pub const MODULES: &str = "modules.json";
/// Where it keeps the configuration of a pooling, unless `modules.json` says otherwise.
const USUAL: &str = "1_Pooling";
const MAX: u64 = 1 << 20;

/// Which hidden states the vector of a text is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PoolingMode {
    /// Of the first token.
    Cls,
    /// Their mean.
    #[default]
    Mean,
    /// Of the last token.
    LastToken,
    /// The largest number of each channel.
    Max,
}

impl PoolingMode {
    /// The name in sentence-transformers' `pooling_mode`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cls => "cls",
            Self::Mean => "mean",
            Self::LastToken => "lasttoken",
            Self::Max => "max",
        }
    }

    fn of(name: &str) -> Option<Self> {
        [Self::Cls, Self::Mean, Self::LastToken, Self::Max].into_iter().find(|mode| mode.name() == name)
    }
}

/// How the hidden states of a text become its vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Pooling {
    /// Which of them it is made of.
    pub mode: PoolingMode,
    /// Whether it is divided by its Euclidean norm.
    pub normalize: bool,
}

impl Default for Pooling {
    /// Of a model that says nothing: the normalized mean.
    fn default() -> Self {
        Self { mode: PoolingMode::Mean, normalize: true }
    }
}

fn bad(path: &Path, field: &str, rule: impl Into<String>) -> Error {
    Error::Config { path: path.to_owned(), field: field.to_owned(), rule: rule.into() }
}

impl Pooling {
    /// What a directory or a GGUF file of a model of `width` channels says; `None`: nothing.
    ///
    /// # Errors
    /// [`Error::Config`] naming file and field where it says what is not done here (another mode,
    /// several at once, a step of another kind), [`Error::Json`], [`Error::Io`].
    pub fn read(dir: &Path, width: usize) -> Result<Option<Self>, Error> {
        if is_gguf(dir) {
            return Gguf::open(dir)?.pooling();
        }
        let path = dir.join(POOLING);
        if let Some(bytes) = read_optional(&path, MAX)? {
            let read = serde_json::from_value(Value::Object(json::object(&bytes, &path)?));
            let what = "`{\"mode\": \"cls\", \"mean\", \"lasttoken\" or \"max\", \"normalize\": ...}`";
            return Ok(Some(read.map_err(|e| Error::Json { path, what, detail: e.to_string() })?));
        }
        let path = dir.join(MODULES);
        let Some(bytes) = read_optional(&path, MAX)? else {
            let path = dir.join(USUAL).join("config.json");
            let Some(bytes) = read_optional(&path, MAX)? else { return Ok(None) };
            return Ok(Some(Self { mode: mode(&bytes, &path, width)?, normalize: true }));
        };
        let steps = steps(&bytes, &path)?;
        let kinds: Vec<&str> = steps.iter().map(|(kind, _)| kind.as_str()).collect();
        let normalize = match kinds[..] {
            ["Transformer", "Pooling"] => false,
            ["Transformer", "Pooling", "Normalize"] => true,
            _ => {
                let rule = "should be `Transformer`, `Pooling` and perhaps `Normalize`, got `";
                return Err(bad(&path, "type", format!("{rule}{}`", kinds.join("`, `"))));
            }
        };
        let place = Path::new(&steps[1].1);
        if !place.components().all(|part| matches!(part, Component::Normal(_))) {
            let rule = format!("should be a directory beside the file, got `{}`", place.display());
            return Err(bad(&path, "path", rule));
        }
        let path = dir.join(place).join("config.json");
        let bytes = read_optional(&path, MAX)?;
        let bytes =
            bytes.ok_or_else(|| bad(&path, "pooling_mode", "should be there, as modules.json says"))?;
        Ok(Some(Self { mode: mode(&bytes, &path, width)?, normalize }))
    }

    /// The vector of a text whose hidden states are still to come.
    #[must_use]
    pub fn summary(self) -> Pool {
        Pool { pooling: self, tokens: 0, sums: Vec::new() }
    }
}

/// The vector of a text in the making: hidden states come in pieces.
#[derive(Clone, Debug)]
pub struct Pool {
    pooling: Pooling,
    tokens: usize,
    /// Sums, or what the mode keeps of the tokens so far.
    sums: Vec<f64>,
}

impl Pool {
    /// Takes the hidden states of further tokens, (tokens, `width`).
    ///
    /// # Panics
    /// When they are not whole rows of one width.
    pub fn push(&mut self, rows: &[f32], width: usize) {
        assert!(rows.len().is_multiple_of(width) && [0, width].contains(&self.sums.len()), "whole rows");
        for row in rows.chunks_exact(width) {
            let row = row.iter().map(|&x| f64::from(x));
            let first = self.tokens == 0;
            self.tokens += 1;
            match self.pooling.mode {
                _ if first => self.sums = row.collect(),
                PoolingMode::Cls => {}
                PoolingMode::LastToken => self.sums = row.collect(),
                PoolingMode::Mean => self.sums.iter_mut().zip(row).for_each(|(sum, x)| *sum += x),
                PoolingMode::Max => self.sums.iter_mut().zip(row).for_each(|(most, x)| *most = most.max(x)),
            }
        }
    }

    /// The vector, (channels); empty where no token came.
    #[must_use]
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "f32 is meant")]
    pub fn vector(self) -> Vec<f32> {
        let by = if self.pooling.mode == PoolingMode::Mean { self.tokens.max(1) as f64 } else { 1.0 };
        let vector: Vec<f64> = self.sums.iter().map(|x| x / by).collect();
        let norm = vector.iter().map(|x| x * x).sum::<f64>().sqrt();
        // As sentence-transformers does: a vector of nothing stays.
        let by = if self.pooling.normalize { norm.max(1e-12) } else { 1.0 };
        vector.iter().map(|x| (x / by) as f32).collect()
    }
}

/// Type and place of each step of a `modules.json`.
fn steps(bytes: &[u8], path: &Path) -> Result<Vec<(String, String)>, Error> {
    let what = "a list of steps, each with `type` and `path`";
    let error = |detail: String| Error::Json { path: path.to_owned(), what, detail };
    let text = json::plain(bytes).map_err(error)?;
    let list: Vec<Value> = serde_json::from_slice(&text).map_err(|e| error(e.to_string()))?;
    let step = |step: &Value| {
        let kind = step["type"].as_str()?.rsplit('.').next()?.to_owned();
        Some((kind, step["path"].as_str()?.to_owned()))
    };
    list.iter().map(|item| step(item).ok_or_else(|| error(format!("got {item}")))).collect()
}

/// The mode in the configuration of a pooling. Early versions have a flag for each mode.
fn mode(bytes: &[u8], path: &Path, width: usize) -> Result<PoolingMode, Error> {
    const FLAG: &str = "pooling_mode_";
    let config = json::object(bytes, path)?;
    for field in ["word_embedding_dimension", "embedding_dimension"] {
        if let Some(got) = config.get(field).filter(|got| got.as_u64() != Some(width as u64)) {
            return Err(bad(path, field, format!("should be {width}, the model's width, got {got}")));
        }
    }
    let mut names: Vec<&str> = Vec::new();
    for (field, value) in &config {
        let Some(name) = field.strip_prefix(FLAG) else { continue };
        let on = value.as_bool().ok_or_else(|| bad(path, field, "should be true or false"))?;
        if on {
            names.push(match name {
                "cls_token" => "cls",
                "max_tokens" => "max",
                "mean_tokens" => "mean",
                other => other,
            });
        }
    }
    if let Some(value) = config.get("pooling_mode") {
        let name = value.as_str().ok_or_else(|| bad(path, "pooling_mode", "should be a text"))?;
        names.push(name);
    }
    names.dedup();
    match names[..] {
        [name] => PoolingMode::of(name).ok_or_else(|| {
            bad(path, "pooling_mode", format!("should be cls, mean, lasttoken or max, got `{name}`"))
        }),
        [] => Err(bad(path, "pooling_mode", "should be there")),
        _ => Err(bad(path, "pooling_mode", format!("should be one, got `{}`", names.join("`, `")))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;

    fn read(files: &[(&str, &str)]) -> Result<Option<Pooling>, Error> {
        let place = tempfile::tempdir().expect("a temporary directory");
        for (name, text) in files {
            let path = place.path().join(name);
            fs::create_dir_all(path.parent().expect("in the directory")).expect("a writable place");
            fs::write(path, text).expect("a writable place");
        }
        Pooling::read(place.path(), 8)
    }

    const TWO: &str = r#"[{"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}]"#;
    const CONFIG: &str = "1_Pooling/config.json";

    #[test]
    fn directories_say_how_they_pool() {
        let three = TWO.replace("}]", r#"}, {"idx": 2, "name": "2", "path": "2", "type": "a.b.Normalize"}]"#);
        let last = r#"{"word_embedding_dimension": 8, "pooling_mode_mean_tokens": false, "pooling_mode_lasttoken": true}"#;
        let cls = r#"{"pooling_mode_cls_token": true, "include_prompt": true}"#;
        let of = |mode, normalize| Some(Pooling { mode, normalize });
        for (files, want) in [
            (vec![], None),
            (vec![(CONFIG, last)], of(PoolingMode::LastToken, true)),
            (vec![(CONFIG, cls)], of(PoolingMode::Cls, true)),
            (vec![(CONFIG, r#"{"pooling_mode": "max"}"#)], of(PoolingMode::Max, true)),
            (vec![(CONFIG, last), (MODULES, TWO)], of(PoolingMode::LastToken, false)),
            (vec![(CONFIG, last), (MODULES, &three)], of(PoolingMode::LastToken, true)),
            (vec![(POOLING, r#"{"mode": "cls", "normalize": false}"#)], of(PoolingMode::Cls, false)),
        ] {
            assert_eq!(read(&files).expect("good files"), want, "{files:?}");
        }
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        let dense = TWO.replace("}]", r#"}, {"idx": 2, "name": "2", "path": "2", "type": "a.Dense"}]"#);
        let mean = r#"{"pooling_mode_mean_tokens": true}"#;
        let both = r#"{"pooling_mode_mean_tokens": true, "pooling_mode_max_tokens": true}"#;
        let away = TWO.replace("1_Pooling", "../other");
        for (files, words) in [
            (vec![(CONFIG, "{}")], "`pooling_mode` should be there"),
            (vec![(CONFIG, both)], "should be one, got `mean`, `max`"),
            (vec![(CONFIG, r#"{"pooling_mode_weightedmean_tokens": true}"#)], "weightedmean"),
            (vec![(CONFIG, r#"{"pooling_mode_mean_tokens": 1}"#)], "true or false"),
            (vec![(CONFIG, r#"{"word_embedding_dimension": 9, "pooling_mode": "cls"}"#)], "should be 8"),
            (vec![(CONFIG, mean), (MODULES, &dense)], "`Dense`"),
            (vec![(CONFIG, mean), (MODULES, &away)], "../other"),
            (vec![(MODULES, TWO)], "as modules.json says"),
            (vec![(MODULES, "[1]")], "got 1"),
            (vec![(POOLING, r#"{"mode": "sum", "normalize": true}"#)], "sum"),
        ] {
            let said = read(&files).expect_err("a bad file").to_string();
            assert!(said.contains(words), "{files:?}: {said}");
        }
    }

    #[test]
    fn vectors_are_of_their_tokens() {
        let rows = [3.0, 0.0, 1.0, 4.0, -1.0, 2.0];
        for (mode, want) in [
            (PoolingMode::Cls, [3.0, 0.0]),
            (PoolingMode::LastToken, [-1.0, 2.0]),
            (PoolingMode::Mean, [1.0, 2.0]),
            (PoolingMode::Max, [3.0, 4.0]),
        ] {
            let of = |normalize, cut: usize| {
                let mut pool = Pooling { mode, normalize }.summary();
                pool.push(&rows[..cut], 2);
                pool.push(&rows[cut..], 2);
                pool.vector()
            };
            assert_eq!(of(false, 2), want, "{mode:?}");
            assert_eq!(of(false, 4), of(false, 0), "{mode:?}");
            let norm = want[0].hypot(want[1]);
            let unit = of(true, 2);
            assert!((unit[0] - want[0] / norm).abs() < 1e-6 && (unit[1] - want[1] / norm).abs() < 1e-6);
        }
        assert!(Pooling::default().summary().vector().is_empty());
    }
}
