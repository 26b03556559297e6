//! How texts are cut before BPE on bytes, by the names of `tokenizer.ggml.pre`.
//!
//! The expressions are those of the models' own `tokenizer.json` files, which llama.cpp writes in
//! its own way. A model is found by its name on the way in, and its name by its expressions on the
//! way out.

use serde_json::{Value, json};

/// One way of cutting.
#[derive(Debug)]
pub(super) struct Pretokenizer {
    /// The names that mean it; the first is written.
    names: &'static [&'static str],
    cuts: &'static [Cut],
    /// Cut by GPT-2's expression at last.
    gpt2: bool,
    /// A word that is a token stays whole, whatever the merges would make of it.
    pub(super) whole_words: bool,
    /// Texts begin with the BOS token where the file does not say.
    pub(super) begins: bool,
}

/// One step of cutting.
#[derive(Debug)]
enum Cut {
    /// Each match is a word, and what lies between them.
    At(&'static str),
    /// Every digit is a word.
    Digits,
}

const LLAMA3: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const QWEN2: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const SEED: &str = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1}| ?[^\s\p{L}\p{N}\r\n]+|\s*[\r\n]+|\s+(?!\S)|\s+";
const TEKKEN: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const GPT4O: &str = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+";
const DEEPSEEK3: &str = r##"[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"##;

static ALL: [Pretokenizer; 10] = [
    Pretokenizer {
        names: &["llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"],
        cuts: &[Cut::At(LLAMA3)],
        gpt2: false,
        whole_words: true,
        begins: true,
    },
    Pretokenizer {
        names: &["glm4", "chatglm-bpe", "dbrx", "smaug-bpe"],
        cuts: &[Cut::At(LLAMA3)],
        gpt2: false,
        whole_words: false,
        begins: false,
    },
    Pretokenizer {
        names: &[
            "qwen2",
            "stablelm2",
            "deepseek-r1-qwen",
            "hunyuan",
            "megrez",
            "grok-2",
            "kormo",
            "solar-open",
        ],
        cuts: &[Cut::At(QWEN2)],
        gpt2: false,
        whole_words: false,
        begins: false,
    },
    Pretokenizer {
        names: &["smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"],
        cuts: &[Cut::Digits],
        gpt2: true,
        whole_words: false,
        begins: false,
    },
    Pretokenizer {
        names: &[
            "gpt-2",
            "olmo",
            "phi-2",
            "mpt",
            "jais",
            "trillion",
            "exaone4",
            "gigachat",
            "a.x-4.0",
            "mellum",
            "granite-docling",
        ],
        cuts: &[],
        gpt2: true,
        whole_words: false,
        begins: false,
    },
    Pretokenizer {
        names: &["tekken"],
        cuts: &[Cut::At(TEKKEN)],
        gpt2: false,
        whole_words: true,
        begins: true,
    },
    Pretokenizer {
        names: &["gpt-4o", "llama4", "kanana2"],
        cuts: &[Cut::At(GPT4O)],
        gpt2: false,
        whole_words: false,
        begins: false,
    },
    Pretokenizer {
        names: &["seed-coder"],
        cuts: &[Cut::At(SEED)],
        gpt2: false,
        whole_words: false,
        begins: false,
    },
    Pretokenizer {
        names: &["deepseek-v3", "hunyuan-dense"],
        cuts: &[Cut::At(r"\p{N}{1,3}"), Cut::At("[一-龥぀-ゟ゠-ヿ]+"), Cut::At(DEEPSEEK3)],
        gpt2: false,
        whole_words: false,
        begins: false,
    },
    Pretokenizer {
        names: &["default"],
        cuts: &[
            Cut::At(r"[\p{P}\$\+<=>\^~\|]+"),
            Cut::At(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
            Cut::At(r"\p{N}+"),
            Cut::At(r"[0-9][0-9][0-9]"),
        ],
        gpt2: false,
        whole_words: false,
        begins: false,
    },
];

/// The one of a name.
pub(super) fn find(name: &str) -> Option<&'static Pretokenizer> {
    ALL.iter().find(|p| p.names.contains(&name))
}

/// All names, for messages.
pub(super) fn names() -> String {
    ALL.iter().flat_map(|p| p.names).copied().collect::<Vec<_>>().join(", ")
}

/// The name of a `pre_tokenizer`; where two are cut alike, `whole_words` tells them apart.
pub(super) fn of(json: &Value, whole_words: bool) -> Option<&'static str> {
    let steps = steps(json);
    let same = |p: &&Pretokenizer| self::steps(&p.json()) == steps;
    let found: Vec<_> = ALL.iter().filter(same).collect();
    found.iter().find(|p| p.whole_words == whole_words).or(found.first()).map(|p| p.names[0])
}

/// What decides of each step, in one form for all ways to write it.
fn steps(json: &Value) -> Vec<String> {
    let list = match json["pretokenizers"].as_array() {
        Some(list) => list.as_slice(),
        None => std::slice::from_ref(json),
    };
    let one = |step: &Value| match step["type"].as_str() {
        Some("Split") => {
            let by = step["pattern"]["Regex"].as_str().or(step["pattern"]["String"].as_str());
            format!("split {} {} {}", by.unwrap_or_default(), step["behavior"], step["invert"])
        }
        Some("Digits") => format!("digits {}", step["individual_digits"]),
        Some("ByteLevel") if step["add_prefix_space"] != true => {
            format!("bytes {}", step["use_regex"] != false)
        }
        _ => format!("other {step}"),
    };
    list.iter().map(one).collect()
}

impl Pretokenizer {
    /// The `pre_tokenizer` of a `tokenizer.json`.
    pub(super) fn json(&self) -> Value {
        let mut steps: Vec<Value> = self.cuts.iter().map(Cut::json).collect();
        steps.push(json!({
            "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": self.gpt2,
        }));
        json!({ "type": "Sequence", "pretokenizers": steps })
    }
}

impl Cut {
    fn json(&self) -> Value {
        match self {
            Self::At(regex) => {
                json!({ "type": "Split", "pattern": { "Regex": regex }, "behavior": "Isolated", "invert": false })
            }
            Self::Digits => json!({ "type": "Digits", "individual_digits": true }),
        }
    }
}
