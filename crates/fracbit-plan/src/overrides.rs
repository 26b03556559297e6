//! Wishes of the user about single layers: schemes that some must have, schemes that some must not.
//!
//! Layers are named by patterns in which `*` stands for any text: `layers.0.*`, `*.down_proj`,
//! `lm_head`. The leading `model.` of a name may be left out.

use crate::{Error, storage::Storage};
use fracbit_base::Scheme;
use std::{fmt, str::FromStr};

/// Text with `*` for anything.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pattern(String);

impl Pattern {
    /// `*` in `text` stands for any text.
    #[must_use]
    pub fn new(text: &str) -> Self {
        Self(text.to_owned())
    }

    /// Whether all of `text` is matched.
    #[must_use]
    pub fn matches(&self, text: &str) -> bool {
        // Greedy from the left: between two stars, the first place where a piece fits leaves the
        // most room behind it.
        let mut pieces = self.0.split('*');
        let first = pieces.next().unwrap_or("");
        let Some(mut rest) = text.strip_prefix(first) else { return false };
        let mut pieces: Vec<&str> = pieces.collect();
        let Some(last) = pieces.pop() else { return rest.is_empty() };
        for piece in pieces {
            let Some(at) = rest.find(piece) else { return false };
            rest = &rest[at + piece.len()..];
        }
        rest.ends_with(last)
    }

    /// Whether it is the name of a layer, with or without `model.`.
    #[must_use]
    pub fn matches_layer(&self, name: &str) -> bool {
        self.matches(name) || name.strip_prefix("model.").is_some_and(|short| self.matches(short))
    }
}

impl fmt::Display for Pattern {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// `LAYERS=SCHEME`: these layers get this scheme (or `f16`).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pin {
    /// Which layers.
    pub layers: Pattern,
    /// What they get.
    pub storage: Storage,
}

impl FromStr for Pin {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (layers, storage) = text
            .rsplit_once('=')
            .filter(|(layers, _)| !layers.is_empty())
            .ok_or_else(|| format!("should be LAYERS=SCHEME such as layers.0.*=tcq-4, got `{text}`"))?;
        let storage = storage.parse().map_err(|e: fracbit_base::SchemeError| e.to_string())?;
        Ok(Self { layers: Pattern(layers.to_owned()), storage })
    }
}

impl fmt::Display for Pin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}={}", self.layers, self.storage)
    }
}

/// `LAYERS=SCHEMES`: these layers get none of these schemes. `LAYERS` alone: they are not
/// quantized, as if pinned to `f16`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Exclude {
    /// Which layers.
    pub layers: Pattern,
    /// Names of schemes; none: all.
    pub schemes: Option<Pattern>,
}

impl FromStr for Exclude {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (layers, schemes) = match text.rsplit_once('=') {
            Some((layers, schemes)) => (layers, Some(Pattern(schemes.to_owned()))),
            None => (text, None),
        };
        if layers.is_empty() || schemes.as_ref().is_some_and(|s| s.0.is_empty()) {
            return Err(format!("should be LAYERS or LAYERS=SCHEMES such as *.q_proj=vq-*, got `{text}`"));
        }
        Ok(Self { layers: Pattern(layers.to_owned()), schemes })
    }
}

impl fmt::Display for Exclude {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.schemes {
            Some(schemes) => write!(f, "{}={schemes}", self.layers),
            None => self.layers.fmt(f),
        }
    }
}

/// What a layer may be stored in, of `palette`: the last pin that names it wins, then exclusions
/// are taken away.
///
/// # Errors
/// When nothing is left.
pub(crate) fn allowed(
    name: &str,
    palette: &[Storage],
    pins: &[Pin],
    excludes: &[Exclude],
) -> Result<Vec<Storage>, Error> {
    let whole = excludes.iter().any(|e| e.schemes.is_none() && e.layers.matches_layer(name));
    let pinned = pins.iter().rev().find(|p| p.layers.matches_layer(name)).map(|p| p.storage);
    let mut menu = match (pinned, whole) {
        (Some(storage), _) => vec![storage],
        (None, true) => return Ok(vec![Storage::F16]),
        (None, false) => palette.to_vec(),
    };
    menu.retain(|storage| {
        let scheme = storage.to_string();
        let hit = |e: &&Exclude| {
            e.layers.matches_layer(name) && e.schemes.as_ref().is_some_and(|s| s.matches(&scheme))
        };
        !excludes.iter().any(|e| hit(&e))
    });
    if menu.is_empty() {
        let rule = match pinned {
            Some(storage) => format!("`{name}` is pinned to {storage}, which is excluded"),
            None => format!("leaves no scheme for `{name}`"),
        };
        return Err(Error::Option { option: "--exclude", rule });
    }
    Ok(menu)
}

/// Refuses patterns that name no layer or no scheme: they are spelling mistakes.
///
/// # Errors
/// With the first such pattern.
pub(crate) fn require_matches<'a>(
    names: impl Iterator<Item = &'a str> + Clone,
    pins: &[Pin],
    excludes: &[Exclude],
) -> Result<(), Error> {
    let patterns = pins.iter().map(|p| ("--pin", &p.layers));
    let patterns = patterns.chain(excludes.iter().map(|e| ("--exclude", &e.layers)));
    for (option, pattern) in patterns {
        if !names.clone().any(|name| pattern.matches_layer(name)) {
            let rule = format!("`{pattern}` should name a layer of the model, it names none");
            return Err(Error::Option { option, rule });
        }
    }
    let schemes: Vec<String> = Scheme::all().map(|s| s.to_string()).chain(["f16".to_owned()]).collect();
    for pattern in excludes.iter().filter_map(|e| e.schemes.as_ref()) {
        if !schemes.iter().any(|scheme| pattern.matches(scheme)) {
            let rule = format!("`{pattern}` should name a scheme, it names none");
            return Err(Error::Option { option: "--exclude", rule });
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stars() {
        let name = "model.layers.10.self_attn.q_proj";
        for (pattern, want) in [
            ("*", true),
            ("layers.10.*", true),
            ("layers.1.*", false),
            ("layers.1*", true),
            ("*q_proj", true),
            ("*.self_attn.*", true),
            ("*self*self*", false),
            ("model.layers.10.self_attn.q_proj", true),
            ("model.layers.10.self_attn.q_pro", false),
            ("layers.10.self_attn.q_proj", true),
            ("*10*10*", false),
            ("**proj", true),
            ("", false),
        ] {
            assert_eq!(Pattern(pattern.to_owned()).matches_layer(name), want, "{pattern}");
        }
        assert!(!Pattern("ab*ba".to_owned()).matches("aba"), "pieces do not overlap");
    }

    #[test]
    fn menus() {
        let palette: Vec<Storage> = ["tcq-2", "tcq-3", "vq-2"].map(|s| s.parse().unwrap()).to_vec();
        let pins: Vec<Pin> = ["layers.0.*=tcq-4", "*.down_proj=nuq-8"].map(|p| p.parse().unwrap()).to_vec();
        let excludes: Vec<Exclude> = ["*=vq-*", "lm_head"].map(|e| e.parse().unwrap()).to_vec();
        let menu = |name: &str| {
            let menu = allowed(name, &palette, &pins, &excludes).unwrap();
            menu.iter().map(ToString::to_string).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(menu("model.layers.0.self_attn.q_proj"), "tcq-4");
        assert_eq!(menu("model.layers.0.mlp.down_proj"), "nuq-8", "the last pin wins");
        assert_eq!(menu("model.layers.1.self_attn.q_proj"), "tcq-2 tcq-3");
        assert_eq!(menu("lm_head"), "f16");
        let none: Vec<Exclude> = vec!["*=*".parse().unwrap()];
        assert!(allowed("lm_head", &palette, &[], &none).unwrap_err().to_string().contains("no scheme"));
        assert!(allowed("lm_head", &palette, &pins[..1], &none).is_err());
        let clash = allowed("model.layers.0.x", &palette, &pins, &none).unwrap_err().to_string();
        assert!(clash.contains("pinned to tcq-4"), "{clash}");
        let names = ["lm_head"];
        let spelled = require_matches(names.into_iter(), &pins, &[]).unwrap_err().to_string();
        assert!(spelled.contains("layers.0.*"), "{spelled}");
        let spelled = |exclude: &str| require_matches(names.into_iter(), &[], &[exclude.parse().unwrap()]);
        assert!(spelled("*=tqc-*").unwrap_err().to_string().contains("`tqc-*` should name a scheme"));
        for good in ["*=tcq-*", "*=half-*", "*=nuq-4", "*=f16"] {
            spelled(good).unwrap();
        }
    }

    #[test]
    fn spelling() {
        for good in ["layers.0.*=tcq-4", "lm_head=f16", "*=half-tcq-3.25"] {
            assert_eq!(good.parse::<Pin>().unwrap().to_string(), good);
        }
        for bad in ["layers.0.*", "=tcq-4", "a=tcq-9", "a="] {
            assert!(bad.parse::<Pin>().is_err(), "{bad}");
        }
        for good in ["lm_head", "*=vq-*"] {
            assert_eq!(good.parse::<Exclude>().unwrap().to_string(), good);
        }
        for bad in ["", "=vq-2", "a="] {
            assert!(bad.parse::<Exclude>().is_err(), "{bad}");
        }
    }
}
