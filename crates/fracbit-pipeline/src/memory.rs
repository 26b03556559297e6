//! One budget of memory for the weights and for the cache of keys and values.
//!
//! A cache of few bits leaves more for the weights, and loses something itself. What it loses is
//! measured on the unquantized model, what the weights lose is what their plan predicts, and the
//! two are taken to add up, as errors of different places do while they are small.

use crate::calibrate;
use fracbit_base::Bytes;
use fracbit_engine::full_pages;
use fracbit_io::ModelConfig;
use fracbit_load::{
    Error, Opened, Progress,
    evaluate::{self, EvalOptions},
};
use fracbit_model::{KvPool, KvType, Model, StateOptions, WeightSource, eval};
use fracbit_plan::{
    Error as PlanError, Plan, PlanOptions, Sensitivities, Target, inventory::Inventory, plan::plan,
    planned::PlannedCache,
};
use std::path::Path;

/// Memory of weights and cache together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MemoryBudget {
    /// All of it.
    pub bytes: Bytes,
    /// Tokens of a sequence.
    pub context: usize,
    /// Sequences at a time.
    pub sequences: usize,
}

/// A way to divide the budget.
#[derive(Clone, Debug)]
pub struct Division {
    /// The cache.
    pub cache: PlannedCache,
    /// The plan of what it leaves, `None` where no weights fit into that.
    pub plan: Option<Plan>,
}

impl Division {
    /// Predicted loss of weights and cache together, nats per token; by the plan's forecast of the
    /// whole model where it has one.
    #[must_use]
    pub fn loss(&self) -> Option<f64> {
        let plan = self.plan.as_ref()?;
        Some(self.cache.loss + plan.forecast.as_ref().map_or(plan.predicted_loss, |forecast| forecast.kl))
    }
}

/// Caches to choose from.
const KINDS: [KvType; 4] = [KvType::I16, KvType::I8, KvType::I6, KvType::I4];
/// Tokens that losses of caches are measured on.
const TOKENS: usize = 256;

/// The caches of a budget, with what they lose: divergence from the model with a cache of 16 bits,
/// on the first tokens of the built-in text.
///
/// # Errors
/// When the model cannot be built or run, or it has no tokenizer.
pub fn caches(
    opened: &Opened,
    weights: &WeightSource,
    budget: MemoryBudget,
    progress: &dyn Progress,
) -> Result<Vec<PlannedCache>, Error> {
    let options = EvalOptions {
        ctx: Some(TOKENS.min(opened.config.max_position_embeddings)),
        windows: Some(1),
        ..EvalOptions::default()
    };
    let origin = Path::new("the built-in text");
    let windows = evaluate::windows(opened, calibrate::GENERAL, origin, &options)?;
    let model = Model::from_source(weights)?;
    progress.stage("measuring what caches of fewer bits lose", 3 * TOKENS as u64);
    let mut losses = [0.0; KINDS.len()];
    for (kv, loss) in KINDS.into_iter().zip(&mut losses).skip(1) {
        let state = StateOptions { kv, ..StateOptions::default() };
        let mut done = 0;
        let mut advance = |total: u64| {
            progress.advance(total - done);
            done = total;
        };
        let options = eval::EvalOptions { state, ..eval::EvalOptions::default() };
        *loss = eval::compare(&model, &model, &windows, &options, &mut advance)?.kl();
    }
    let config = &opened.config;
    let cache = |(kv, loss): (KvType, f64)| PlannedCache {
        kv,
        context: budget.context,
        sequences: budget.sequences,
        bytes: cache_bytes(config, budget, kv),
        loss,
    };
    Ok(KINDS.into_iter().zip(losses).map(cache).collect())
}

fn cache_bytes(config: &ModelConfig, budget: MemoryBudget, kv: KvType) -> u64 {
    let pages = full_pages(budget.context, budget.sequences) as u64;
    pages.saturating_mul(KvPool::page_bytes(config, kv) as u64)
}

/// Bytes of the smallest cache of a budget.
#[must_use]
pub fn least_cache(config: &ModelConfig, budget: MemoryBudget) -> Bytes {
    Bytes(KINDS.into_iter().map(|kv| cache_bytes(config, budget, kv)).min().unwrap_or(0))
}

/// Every way to divide the budget, the caches of most bits first. The target of `options` is
/// replaced; the rest holds.
///
/// # Errors
/// [`PlanError::Budget`] where no cache leaves enough for any weights, and what else plans refuse.
pub fn divide(
    inventory: &Inventory,
    sensitivities: &Sensitivities,
    options: &PlanOptions,
    budget: MemoryBudget,
    caches: &[PlannedCache],
) -> Result<Vec<Division>, Error> {
    let mut refused = None;
    let mut divisions = Vec::with_capacity(caches.len());
    for &cache in caches {
        let left = Bytes(budget.bytes.0.saturating_sub(cache.bytes));
        let target = Target::Size(left);
        let plan = match plan(inventory, sensitivities, &PlanOptions { target, ..options.clone() }) {
            Ok(plan) => Some(Plan { cache: Some(cache), ..plan }),
            Err(error @ PlanError::Budget { .. }) => {
                refused = Some(error);
                None
            }
            Err(error) => return Err(error.into()),
        };
        divisions.push(Division { cache, plan });
    }
    match refused {
        Some(error) if divisions.iter().all(|division| division.plan.is_none()) => Err(error.into()),
        _ => Ok(divisions),
    }
}

/// The division with the least loss; of equals the one with more bits in the cache.
#[must_use]
pub fn best(divisions: &[Division]) -> Option<&Division> {
    let by_loss = |a: &&Division, b: &&Division| {
        let [a, b] = [a, b].map(|d| d.loss().unwrap_or(f64::INFINITY));
        a.total_cmp(&b)
    };
    divisions.iter().filter(|division| division.plan.is_some()).min_by(by_loss)
}
