//! Which matrices may be fused: held as one packed matrix and multiplied in one call.
//!
//! Matrices that read the same input can be (queries, keys and values; gate and up). They share a
//! scheme, and every one but the last has a multiple of 16 rows, so that the tiles of the whole are
//! the tiles of its members in order. A directory stores them apart; who loads it joins them
//! (`PackedMatrixData::stack`). Codes, scales and with them all results are those of separate
//! matrices, bit for bit.

use crate::{bands::parse_name, inventory::Matrix, storage::Storage};
use fracbit_base::Shape;
use fracbit_format::{Grouping, TILE_ROWS};
use fracbit_model::LinearId;
use std::collections::BTreeSet;

/// Checks groups by name; `stored` tells how a matrix of the model is stored. Members come out in
/// the order of the model.
///
/// # Errors
/// The first rule that is broken, naming the group.
pub fn check(
    groups: &[Vec<String>],
    stored: impl Fn(LinearId) -> Option<(Storage, Grouping, Shape)>,
) -> Result<Vec<Vec<LinearId>>, String> {
    let mut seen = BTreeSet::new();
    groups.iter().map(|names| check_one(names, &stored, &mut seen)).collect()
}

fn check_one(
    names: &[String],
    stored: impl Fn(LinearId) -> Option<(Storage, Grouping, Shape)>,
    seen: &mut BTreeSet<LinearId>,
) -> Result<Vec<LinearId>, String> {
    let group = names.join(" + ");
    if names.len() < 2 {
        return Err(format!("fused group `{group}` should have two members or more"));
    }
    let mut members = Vec::with_capacity(names.len());
    for name in names {
        let known = name.parse::<LinearId>().ok().and_then(|id| Some((id, stored(id)?)));
        let Some((id, (storage, grouping, shape))) = known else {
            return Err(format!("fused group `{group}`: layer `{name}` is not in the model"));
        };
        if !seen.insert(id) {
            return Err(format!("fused group `{group}`: layer `{name}` is in a group already"));
        }
        members.push((id, storage, grouping, shape));
    }
    members.sort_by_key(|m| m.0);
    let (first, scheme, grouping, _) = members[0];
    if scheme == Storage::F16 {
        return Err(format!(
            "fused group `{group}`: `{first}` is kept at 16 bits, which has no fused kernel"
        ));
    }
    for &(id, storage, other, _) in &members[1..] {
        if !same_input(first, id) {
            return Err(format!("fused group `{group}`: `{first}` and `{id}` do not read the same input"));
        }
        if storage != scheme {
            return Err(format!(
                "fused group `{group}` should have one scheme, `{first}` has {scheme} and `{id}` has {storage}"
            ));
        }
        if other != grouping {
            let (want, got) = (grouping.number(), other.number());
            return Err(format!(
                "fused group `{group}` should have scales of one kind, `{first}` has group {want} and `{id}` has {got}"
            ));
        }
    }
    if let Some((id, _, _, shape)) = members[..members.len() - 1].iter().find(|m| !aligned(m.3)) {
        return Err(format!(
            "fused group `{group}`: `{id}` should have a multiple of {TILE_ROWS} rows, got {}",
            shape.rows
        ));
    }
    Ok(members.into_iter().map(|m| m.0).collect())
}

/// Every group of two or more of these matrices that may be fused, as indices in ascending order:
/// for each block the subsets of {q, k, v} and {gate, up}. Experts are not among them: gate and up
/// of these run in one loop as they are.
#[must_use]
pub fn candidates(matrices: &[Matrix]) -> Vec<Vec<usize>> {
    let mut all = Vec::new();
    for (i, matrix) in matrices.iter().enumerate() {
        let stream: Vec<usize> =
            (i..matrices.len()).filter(|&j| same_input(matrix.id, matrices[j].id)).collect();
        // Subsets that begin with this matrix: each is found once, from its first member.
        let subsets = fracbit_alloc::fusion::subsets(&stream[1.min(stream.len())..]);
        all.extend(subsets.into_iter().map(|rest| [&[i], rest.as_slice()].concat()));
    }
    all.retain(|group| group[..group.len() - 1].iter().all(|&m| aligned(matrices[m].shape)));
    // Whole ones alone: those in bands are several matrices already.
    all.retain(|group| {
        group
            .iter()
            .all(|&m| matrices[m].pieces == 1 && parse_name(&matrices[m].name).is_none_or(|n| n.1.is_none()))
    });
    all
}

/// Whether a matrix of this shape may have another one below it.
pub const fn aligned(shape: Shape) -> bool {
    shape.rows.is_multiple_of(TILE_ROWS)
}

/// Whether two matrices of one block read the same input.
pub fn same_input(a: LinearId, b: LinearId) -> bool {
    match (a, b) {
        (LinearId::Layer(i, a), LinearId::Layer(j, b)) => i == j && a.with_same_input().contains(&b),
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &str) -> Vec<String> {
        let full = |short: &str| match short.split_once('.') {
            Some((i, "q" | "k" | "v" | "o")) => {
                format!("model.layers.{i}.self_attn.{}_proj", &short[i.len() + 1..])
            }
            Some((i, rest)) if i.len() == 1 => format!("model.layers.{i}.mlp.{rest}_proj"),
            _ => short.to_owned(),
        };
        list.split(' ').map(full).collect()
    }

    #[test]
    fn rules() {
        let group = |text: &str| if text.contains("gate") { Grouping::Columns(32) } else { Grouping::Row };
        let stored = |id: LinearId| {
            let text = id.to_string();
            let scheme = if text.ends_with("k_proj") { "f16" } else { "tcq-3" };
            let rows = if text.contains("layers.1") { 40 } else { 32 };
            (text != "lm_head" && !text.contains("layers.2"))
                .then(|| (scheme.parse().unwrap(), group(&text), Shape::new(rows, 64)))
        };
        let try_one = |list: &str| check(&[names(list)], stored).map(|g| g[0].len());
        assert_eq!(try_one("0.v 0.q"), Ok(2));
        assert!(try_one("0.up 0.gate").unwrap_err().contains("group 32"));
        for (bad, word) in [
            ("0.q", "two members"),
            ("0.q 0.up", "same input"),
            ("0.q 1.v", "same input"),
            ("0.q 0.k", "one scheme"),
            ("0.k 0.q", "one scheme"),
            ("0.q 0.q", "already"),
            ("0.q 2.v", "not in the model"),
            ("lm_head 0.v", "not in the model"),
            ("nonsense 0.v", "not in the model"),
            ("1.q 1.v", "multiple of 16"),
            ("model.embed_tokens 0.q", "same input"),
        ] {
            let error = try_one(bad).unwrap_err();
            assert!(error.contains(word), "{bad}: {error}");
        }
        let twice = check(&[names("0.q 0.v"), names("0.v 0.q")], stored).unwrap_err();
        assert!(twice.contains("already"), "{twice}");
        let order = check(&[names("0.v 0.q")], stored).unwrap();
        assert!(order[0][0].to_string().ends_with("q_proj"), "{order:?}");
    }

    #[test]
    fn candidates_are_the_subsets_of_a_site() {
        let matrices: Vec<Matrix> = names("0.q 0.k 0.v 0.o 0.gate 0.up 0.down 1.q 1.k 1.v")
            .into_iter()
            .map(|name| {
                let rows = if name.contains("layers.1") { 40 } else { 32 };
                Matrix { id: name.parse().unwrap(), name, shape: Shape::new(rows, 64), pieces: 1 }
            })
            .collect();
        let mut found = candidates(&matrices);
        found.sort();
        assert_eq!(found, [vec![0, 1], vec![0, 1, 2], vec![0, 2], vec![1, 2], vec![4, 5]]);

        let experts: Vec<Matrix> = matrices.into_iter().map(|m| Matrix { pieces: 4, ..m }).collect();
        assert!(candidates(&experts).is_empty(), "their gates and ups run in one loop as they are");
    }
}
