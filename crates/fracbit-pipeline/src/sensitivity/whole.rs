//! What a model loses when all its matrices have noise, beside the sum of what each loses: the
//! points that forecasts are fitted to ([`fracbit_plan::forecast`]).

use super::Probe;
use fracbit_io::ModelConfig;
use fracbit_load::{Error, Progress};
use fracbit_model::{LayerLinear, Linear, LinearId, Model, RotationMode, WeightSource};
use fracbit_plan::{
    PlanOptions, Target,
    forecast::JointPoint,
    inventory::Inventory,
    plan::{PlannedLayer, plan},
    sensitivities::Sensitivities,
};
use fracbit_quant::sensitivity::{add_noise, deviations};
use rand::{SeedableRng, seq::SliceRandom};
use rand_chacha::ChaCha8Rng;

/// Stored bits per weight of the plans whose errors are put into all matrices at once.
const BUDGETS: [f64; 8] = [1.75, 2.0, 2.25, 2.5, 3.0, 3.5, 4.0, 5.0];

/// Most bytes that the noisy matrices may take in f32: they are in memory at once. Of a larger
/// model only some of them get noise, drawn at random; the line is then fitted to their sums.
const MOST_BYTES: u64 = 1 << 30;

/// Bytes that [`measure`] takes for its matrices.
pub(super) fn memory(inventory: &Inventory) -> u64 {
    let all: u64 = inventory.matrices.iter().map(|m| 4 * m.shape.len() as u64).sum();
    all.min(MOST_BYTES)
}

/// Measures the divergence with noise in many matrices of `plain`, the model of `source` without
/// rotation, at once.
pub(super) fn measure(
    source: &WeightSource,
    plain: &WeightSource,
    probe: &Probe,
    clean: &Model,
    sensitivities: &Sensitivities,
    seed: u64,
    progress: &dyn Progress,
) -> Result<Vec<JointPoint>, Error> {
    let (config, rotation) = (plain.config(), sensitivities.rotation);
    let inventory = Inventory::of(plain.checkpoint(), config, rotation);
    let mut points = Vec::new();
    progress.stage("measuring all matrices at once", BUDGETS.len() as u64);
    for (draw, bits) in BUDGETS.into_iter().enumerate() {
        progress.advance(1);
        let options = PlanOptions { rotation, ..PlanOptions::new(Target::Bits(bits)) };
        // A model whose norms and codebooks are large beside its matrices does not reach every
        // budget.
        let Ok(plan) = plan(&inventory, sensitivities, &options) else { continue };
        let mut model = clean.clone();
        // A matrix is one layer of the plan, or one for each band of its rows.
        let mut parts: Vec<&[PlannedLayer]> = plan.layers.chunk_by(|a, b| a.id() == b.id()).collect();
        parts.shuffle(&mut ChaCha8Rng::seed_from_u64(seed ^ draw as u64));
        let (mut room, mut sum) = (MOST_BYTES, 0.0);
        for parts in parts {
            let Some(at) = inventory.matrices.iter().position(|m| Some(m.id) == parts[0].id()) else {
                continue;
            };
            let whole = &inventory.matrices[at];
            let Some(left) = room.checked_sub(4 * whole.shape.len() as u64) else { continue };
            room = left;
            let id = whole.id;
            let mut matrix = plain.linear(id)?;
            let columns = source.columns(id)?;
            let noise = seed ^ (((at as u64) << 32) | (0x8000_0000 + draw as u64));
            let mut rows = deviations(
                &matrix.data,
                matrix.shape.cols,
                columns.as_deref(),
                rows_turn(plain.config(), id, rotation),
            );
            for layer in parts {
                sum += layer.predicted_loss;
                #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
                let size = layer.scheme.error()?.sqrt() as f32;
                match (layer.band(), plan.bands.get(&whole.name)) {
                    (Some(band), Some(bands)) => bands.rows(band).for_each(|row| rows[row] *= size),
                    _ => rows.iter_mut().for_each(|row| *row *= size),
                }
            }
            add_noise(&mut matrix.data, &rows, columns.as_deref(), 1.0, noise);
            let noisy = Linear::dense(matrix.shape, matrix.data, plain.bias(id)?);
            model.replace(id, noisy.map_err(fracbit_model::Error::from)?)?;
        }
        points.push(JointPoint { sum, measured: probe.divergence(&model)? });
    }
    Ok(points)
}

/// Whether `mode` rotates the outputs of a matrix: its rows are then mixed.
pub(super) fn rows_turn(config: &ModelConfig, id: LinearId, mode: RotationMode) -> bool {
    let writes = match id {
        LinearId::Layer(_, LayerLinear::V) => true,
        LinearId::Layer(_, LayerLinear::O | LayerLinear::Down) => !config.post_norms,
        _ => false,
    };
    mode == RotationMode::Fold && writes
}
