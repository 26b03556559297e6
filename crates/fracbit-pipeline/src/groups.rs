//! Group-wise codebooks of a model, trained on its own weights.
//!
//! One table serves all layers that use a scheme. It is trained on an even sample of their rows,
//! each layer's weights scaled so that its squared errors count by its sensitivity, as in the plan;
//! with a calibration, every column counts by the diagonal of its input's moments too. See
//! `fracbit_codebook::train::group_codebooks` for the training itself.

use crate::{Calibration, matrices::planned_matrix};
use fracbit_base::Scheme;
use fracbit_codebook::train::{GroupTraining, group_codebooks};
use fracbit_format::{Codebook, SchemeSpec};
use fracbit_load::{Error, Progress};
use fracbit_model::WeightSource;
use fracbit_plan::{Plan, storage::Storage};
use std::collections::BTreeMap;

/// Weights to train on.
const SAMPLE: usize = 1 << 18;

/// The budgets of a table, in bytes: one, two and four registers of 128 bits.
pub(crate) const BUDGETS: [usize; 3] = [16, 32, 64];

/// Trains the codebooks of all group-wise schemes of `plan` that are not given; `budget` is the
/// bytes that the codebooks of a scheme take together.
///
/// Reads every matrix of such a scheme once. A fixed function of its arguments.
pub(crate) fn train(
    source: &WeightSource,
    plan: &Plan,
    given: &BTreeMap<Scheme, Codebook>,
    calibration: Option<&Calibration>,
    budget: usize,
    progress: &dyn Progress,
) -> Result<BTreeMap<Scheme, Codebook>, Error> {
    if !BUDGETS.contains(&budget) {
        let rule = format!("should be 16, 32 or 64, got {budget}");
        return Err(Error::Option { option: "--codebook-bytes", rule });
    }
    let of = |scheme: Scheme| {
        let layers = plan.layers.iter().filter_map(|layer| Some((layer.id()?, layer)));
        layers.filter(move |(_, layer)| layer.scheme == Storage::Packed(scheme))
    };
    let trained = |s: Scheme| SchemeSpec::of(s).table.is_some_and(|table| table.trained);
    let wanted = |s: &Scheme| trained(*s) && !given.contains_key(s);
    let schemes: Vec<Scheme> = plan.codebooks().into_iter().filter(wanted).collect();
    let weights = |scheme| of(scheme).map(|(_, layer)| layer.rows * layer.cols).sum::<usize>();
    if !schemes.is_empty() {
        progress.stage("codebooks", schemes.iter().map(|&s| weights(s) as u64).sum());
    }
    let mut books = BTreeMap::new();
    for scheme in schemes {
        // Rows of several lengths, each with one scale, are cut into pieces of what divides them
        // all.
        let groups = of(scheme).map(|(_, layer)| (layer.grouping().columns(layer.cols), layer.cols));
        let group =
            groups.filter(|(group, cols)| group <= cols).map(|(group, _)| group).reduce(gcd).unwrap_or(0);

        let every = weights(scheme).div_ceil(SAMPLE);
        let sensitive = of(scheme).any(|(_, layer)| layer.sensitivity > 0.0);
        let (mut sample, mut importance) = (Vec::new(), Vec::new());
        for (id, layer) in of(scheme) {
            let matrix = planned_matrix(source, plan, id, layer)?;
            let cols = matrix.shape.cols;
            let diagonal: Option<Vec<f32>> = match calibration {
                None => None,
                Some(calibration) => calibration
                    .moments(source, id)?
                    .map(|m| m.entries().iter().step_by(cols + 1).map(|h| h.max(0.0)).collect()),
            };
            let energy: f64 = matrix
                .data
                .chunks(cols)
                .flat_map(|row| row.iter().enumerate())
                .map(|(c, &w)| f64::from(diagonal.as_ref().map_or(1.0, |d| d[c])) * f64::from(w).powi(2))
                .sum();
            let share = if sensitive { layer.sensitivity } else { 1.0 };
            if energy > 0.0 && share > 0.0 {
                #[expect(clippy::cast_possible_truncation, reason = "a scale of f32 weights")]
                let scale = (share / energy * matrix.data.len() as f64).sqrt() as f32;
                let own = layer.grouping().columns(cols);
                for row in matrix.data.chunks(cols).step_by(every) {
                    let whole = cols / own * own;
                    sample.extend(row[..whole].iter().map(|w| w * scale));
                    importance.extend((0..whole).map(|c| diagonal.as_ref().map_or(1.0, |d| d[c])));
                }
            }
            progress.advance(matrix.data.len() as u64);
        }
        if sample.is_empty() {
            continue; // zeros, or rows shorter than a group: the built-in codebooks will do
        }
        let options = GroupTraining { group, budget, ..GroupTraining::default() };
        let importance = calibration.map(|_| &*importance);
        books.insert(scheme, group_codebooks(scheme, &sample, importance, options));
    }
    Ok(books)
}

fn gcd(a: usize, b: usize) -> usize {
    if b == 0 { a } else { gcd(b, a % b) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{SynthOptions, synthesize};
    use fracbit_load::{Opened, Quiet};
    use fracbit_model::RotationMode;
    use fracbit_plan::{PlanOptions, Preset, Sensitivities, Target, plan};

    #[test]
    fn one_table_serves_rows_of_two_lengths() {
        let dir = tempfile::tempdir().unwrap();
        let preset = Preset::named("tiny").unwrap();
        let options = SynthOptions { preset, vocab: None, layers: None, seed: 1, force: false };
        let opened = Opened::new(&synthesize(&dir.path().join("m"), options, &Quiet).unwrap()).unwrap();
        let source = opened.source(RotationMode::Fold, 0).unwrap();
        let inventory =
            fracbit_plan::inventory::Inventory::of(&opened.checkpoint, &opened.config, RotationMode::Fold);
        let sensitivities = Sensitivities::prior(&inventory, RotationMode::Fold);
        // A scale for every row: 64 and 192 columns.
        let pins = ["*.q_proj=gnuq-2", "*.down_proj=gnuq-2"].map(|p| p.parse().unwrap()).to_vec();
        let options = PlanOptions { pins, ..PlanOptions::new(Target::Bits(4.0)) };
        let plan = plan(&inventory, &sensitivities, &options).unwrap();
        let books = train(&source, &plan, &BTreeMap::new(), None, 16, &Quiet).unwrap();
        assert_eq!(books.len(), 1);
    }
}
