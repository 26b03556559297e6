//! The graph over the weights: what a step launches.

use crate::cache::DeviceMemory;
use crate::experts::{ExpertWork, Routed};
use crate::key_bias::Angles;
use crate::model::{DeviceModel, Group, HeadTables, Layer, Linear};
use fracbit_base::Rate;
use fracbit_format::SchemeSpec;
use fracbit_io::{Activation, Experts, QkNorm};
use fracbit_kernels_cuda::{
    Buffer, Device, DeviceError, Rows,
    ops::{
        self, AttentionShape, AttentionWork, Before, FEW, Gate, HeadOptions, PROMPT, PageTables,
        RotationTables, SEQUENCES, Step, StepRows,
    },
};
use fracbit_model::Precision;
use std::sync::OnceLock;

/// Tokens that the products of packed matrices take together.
pub const MAX_ROWS: usize = 8;
/// Tokens from which on weights are expanded and multiplied as dense matrices: expansion writes 16
/// bits for each weight, some ten times what the products read, and each product of eight tokens
/// reads the codes again.
pub const PROMPT_FROM: usize = 48;

const _: () = assert!(MAX_ROWS == FEW && MAX_ROWS == SEQUENCES, "rows of products are those of attention");

/// What long prompts take beside other work: inputs in half precision, and one expanded matrix.
#[derive(Debug)]
pub(crate) struct Dense<'d, D: Device> {
    halves: Buffer<'d, D>,
    weights: Buffer<'d, D>,
}

/// How the products of a step are made.
#[derive(Debug)]
pub(crate) struct Products<'m, 'd, D: Device> {
    /// As dense ones, of long prompts.
    pub(crate) many: Option<&'m Dense<'d, D>>,
    /// Most bits that are read of nested weights; all there are without a bound.
    pub(crate) bits: Option<Rate>,
}

impl<D: Device> Products<'_, '_, D> {
    /// Of at most [`MAX_ROWS`] rows at a precision.
    pub(crate) fn few(precision: Precision) -> Self {
        Self { many: None, bits: precision.rate() }
    }
}

/// Builders make experts where a model has them, and nowhere else.
fn not_built() -> ! {
    unreachable!("one matrix instead of experts, or experts instead of one")
}

impl<'d, D: Device> DeviceModel<'d, D> {
    /// One expert's product with at most [`MAX_ROWS`] rows, or as many as `many` has room for.
    fn expert(
        &self,
        (bits, many): (Option<Rate>, Option<&Dense<'d, D>>),
        group: &Group<'d, D>,
        x: Rows<'_>,
        (y, row): (&Buffer<'_, D>, usize),
        expert: usize,
        rows: usize,
    ) -> Result<(), DeviceError> {
        let place = |offset: &usize| (row * group.rows + offset, group.rows);
        if let Some(Dense { halves, weights }) = many {
            ops::halve(self.device, x, halves, (rows, group.cols()))?;
            return group.parts.iter().try_for_each(|(at, linear)| match linear {
                Linear::Packed(m) => {
                    let piece = m.at(bits).piece(expert);
                    piece.apply_many((x, halves), weights, y, place(at), rows, false)
                }
                Linear::Dense(_) => not_built(),
                Linear::Experts(all) => {
                    all[expert].apply_many(self.device, halves, y, place(at), rows, false)
                }
            });
        }
        group.parts.iter().try_for_each(|(at, linear)| match linear {
            Linear::Packed(m) => m.at(bits).piece(expert).apply_at(x, y, place(at), rows, false, &self.work),
            Linear::Dense(_) => not_built(),
            Linear::Experts(all) => all[expert].apply_at(self.device, x, y, place(at), rows, false),
        })
    }
}

impl<'d, D: Device> DeviceModel<'d, D> {
    /// `out = ` the sums over the experts of `rows` rows of `input`, or `+=`: both (rows, hidden).
    pub(crate) fn experts(
        &self,
        (s, products): (&DeviceWork<'d, D>, &Products<'_, 'd, D>),
        (layer, experts): (&Layer<'d, D>, Experts),
        input: &Buffer<'d, D>,
        out: &Buffer<'d, D>,
        rows: usize,
        (gate, accumulate): (Gate, bool),
    ) -> Result<(), DeviceError> {
        let (device, hidden, inner) = (self.device, self.config.hidden_size, self.config.intermediate_size);
        let router = layer.router.as_ref().expect("a layer of experts has a router");
        let on = s.experts.as_ref().expect("room for experts");
        for first in (0..rows).step_by(on.rows) {
            let rows = on.rows.min(rows - first);
            ops::route(device, input.rows_from(first), router, &on.logits, (rows, experts.count, hidden))?;
            let routed = Routed::new(experts, &on.logits.read::<f32>(rows * experts.count)?);
            on.row_of.write(&routed.row_of)?;
            on.pair_of.write(&routed.pair_of)?;
            on.weights.write(&routed.weights)?;
            let pairs = routed.row_of.len();
            ops::gather(device, input.rows_from(first), &on.row_of, &on.input, (pairs, hidden))?;
            // Experts of many tokens are expanded, as the matrices of long prompts are.
            let each = |group: &Group<'d, D>, from: &Buffer<'d, D>, to: &Buffer<'d, D>| {
                routed.groups.iter().try_for_each(|&(expert, start, count)| {
                    let many = s.dense.as_ref().filter(|_| count >= PROMPT_FROM);
                    let step = if many.is_some() { count } else { MAX_ROWS };
                    (start..start + count).step_by(step).try_for_each(|at| {
                        let (x, rows) = (from.rows_from(at), step.min(start + count - at));
                        self.expert((products.bits, many), group, x, (to, at), expert, rows)
                    })
                })
            };
            each(&layer.gate_up, &on.input, &on.gate_up)?;
            match &layer.down_in {
                Some(tables) => tables.rotate(device, &on.gate_up, &on.acts, pairs, false, Some(gate))?,
                None => ops::gate(device, gate, &on.gate_up, &on.acts, (pairs, inner))?,
            }
            each(&layer.down, &on.acts, &on.output)?;
            let how = (&on.pair_of, &on.weights);
            let shape = (rows, experts.active, hidden);
            ops::combine(device, &on.output, how, out.rows_from(first), shape, accumulate)?;
        }
        Ok(())
    }
}

impl<'d, D: Device> Group<'d, D> {
    /// Columns of its matrices.
    fn cols(&self) -> usize {
        match &self.parts[0].1 {
            Linear::Packed(m) => m.shape().cols,
            Linear::Dense(m) => m.cols(),
            Linear::Experts(all) => all[0].cols(),
        }
    }

    fn apply(
        &self,
        (model, s, of): (&DeviceModel<'d, D>, &DeviceWork<'d, D>, &Products<'_, 'd, D>),
        x: &Buffer<'_, D>,
        y: &Buffer<'_, D>,
        batch: usize,
        accumulate: bool,
    ) -> Result<(), DeviceError> {
        // Rows that belong elsewhere are made apart and then put in place.
        let moved = self.places.as_ref().map(|places| (places, s.apart.as_ref().expect("room for them")));
        let (to, add) = moved.map_or((y, accumulate), |(_, apart)| (apart, false));
        let place = |offset: &usize| (*offset, self.rows);
        if let Some(Dense { halves, weights }) = of.many {
            ops::halve(model.device, x, halves, (batch, self.cols()))?;
            self.parts.iter().try_for_each(|(at, linear)| match linear {
                Linear::Experts(_) => not_built(),
                Linear::Packed(m) => {
                    m.at(of.bits).apply_many((x, halves), weights, to, place(at), batch, add)
                }
                Linear::Dense(m) => m.apply_many(model.device, halves, to, place(at), batch, add),
            })?;
        } else {
            self.parts.iter().try_for_each(|(at, linear)| match linear {
                Linear::Experts(_) => not_built(),
                Linear::Packed(m) => m.at(of.bits).apply_at(x, to, place(at), batch, add, &model.work),
                Linear::Dense(m) => m.apply_at(model.device, x, to, place(at), batch, add),
            })?;
        }
        match moved {
            Some((places, apart)) => {
                ops::place(model.device, apart, places, y, (batch, self.rows), accumulate)
            }
            None => Ok(()),
        }
    }
}

/// What steps work in.
#[derive(Debug)]
pub struct DeviceWork<'d, D: Device> {
    pub(crate) step: Buffer<'d, D>,
    pub(crate) tables: PageTables<'d, D>,
    pub(crate) logits: Buffer<'d, D>, // (MAX_ROWS, vocabulary)
    pub(crate) x: Buffer<'d, D>,      // (rows, hidden)
    n: Buffer<'d, D>,                 // (rows, widest input)
    turned: Buffer<'d, D>,            // (rows, widest input)
    wide: Buffer<'d, D>,              // (rows, q + k + v or gate + up)
    /// Products whose rows are not where they belong yet, if there are such.
    apart: Option<Buffer<'d, D>>,
    /// Tokens that may run together.
    pub(crate) rows: usize,
    attention: AttentionWork<'d, D>,
    pub(crate) rope_table: Buffer<'d, D>,
    /// Of layers with a window, where these have angles of their own.
    pub(crate) local_rope_table: Option<Buffer<'d, D>>,
    /// Of constants of keys, once a step over a cache of codes read them.
    pub(crate) angles: OnceLock<Angles<'d, D>>,
    growth: Option<Buffer<'d, D>>,
    pub(crate) shape: AttentionShape,
    /// Of mixtures of experts.
    pub(crate) experts: Option<ExpertWork<'d, D>>,
    /// Tokens from which on they run together.
    pub(crate) from: usize,
    /// `None` where it is not worth it, or memory is short: then tokens run eight at a time.
    pub(crate) dense: Option<Dense<'d, D>>,
}

impl<'d, D: Device> DeviceModel<'d, D> {
    /// Whether a step is the same launches every time: the host reads which experts tokens get.
    pub(crate) fn recordable(&self) -> bool {
        self.config.experts.is_none()
    }

    /// The shape of attention over sequences of at most `capacity` tokens.
    pub(crate) fn attention_shape(&self, capacity: usize) -> AttentionShape {
        AttentionShape {
            heads: self.config.num_attention_heads,
            kv_heads: self.config.num_key_value_heads,
            d: self.config.head_dim,
            capacity,
        }
    }

    /// Tokens that run together in steps of sequences of `capacity` tokens.
    pub(crate) fn together(capacity: usize) -> usize {
        if capacity < PROMPT_FROM { MAX_ROWS } else { capacity.min(PROMPT) }
    }

    /// What steps of sequences of at most `capacity` tokens work in.
    pub(crate) fn work_for(&self, capacity: usize) -> Result<DeviceWork<'d, D>, DeviceError> {
        let (config, device) = (&self.config, self.device);
        let shape = self.attention_shape(capacity);
        let widest = config.hidden_size.max(config.q_dim()).max(config.intermediate_size);
        let together = Self::together(capacity);
        let rows = |width: usize| Buffer::zeroed(device, 4 * together * width, "activations");
        let growth: Vec<f32> = (0..capacity).map(|p| config.rope.query_factor(p) as f32).collect();
        Ok(DeviceWork {
            step: Buffer::of(device, &[Step::new(&[], &[])], "step")?,
            tables: PageTables::new(device, SEQUENCES, capacity)?,
            logits: Buffer::zeroed(device, 4 * MAX_ROWS * config.vocab_size, "logits")?,
            x: rows(config.hidden_size)?,
            n: rows(widest)?,
            turned: rows(widest)?,
            wide: rows(shape.row().max(2 * config.intermediate_size))?,
            apart: self.apart(together)?,
            rows: together,
            attention: AttentionWork::new(device, &shape)?,
            rope_table: Buffer::of(
                device,
                &fracbit_model::rope_table(&config.rope, config, capacity),
                "rotary table",
            )?,
            local_rope_table: config
                .local_rope
                .as_ref()
                .map(|rope| {
                    Buffer::of(device, &fracbit_model::rope_table(rope, config, capacity), "rotary table")
                })
                .transpose()?,
            angles: OnceLock::new(),
            growth: config
                .rope
                .growth
                .map(|_| Buffer::of(device, &growth, "growth of queries"))
                .transpose()?,
            shape,
            experts: config
                .experts
                .map(|experts| ExpertWork::new(device, experts, config, together))
                .transpose()?,
            from: self.prompt_from(),
            dense: self.dense(together),
        })
    }

    /// Tokens from which on a prompt runs together: progressive codes meet any number of them as
    /// they are.
    fn prompt_from(&self) -> usize {
        let groups = self.layers.iter().flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down]);
        let progressive = |linear: &Linear<'d, D>| match linear {
            Linear::Packed(matrix) => SchemeSpec::of(matrix.scheme()).second_level.is_some(),
            Linear::Dense(_) | Linear::Experts(_) => false,
        };
        let all = groups.flat_map(|g| &g.parts).all(|(_, linear)| progressive(linear));
        if all { MAX_ROWS + 1 } else { PROMPT_FROM }
    }

    /// Room for products of `rows` tokens whose rows come in another order.
    fn apart(&self, rows: usize) -> Result<Option<Buffer<'d, D>>, DeviceError> {
        let moved = |group: &&Group<'d, D>| group.places.is_some();
        let groups = self.layers.iter().flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down]);
        let of_blocks = groups.filter(moved).map(|g| rows * g.rows).max();
        let of_head = self.head.iter().filter(moved).map(|g| MAX_ROWS * g.rows).max();
        let most = of_blocks.max(of_head);
        most.map(|most| Buffer::zeroed(self.device, 4 * most, "products of bands")).transpose()
    }

    /// Room for products with `rows` tokens as dense ones; `None` where they are not worth it, or
    /// memory is short: then tokens run eight at a time.
    fn dense(&self, rows: usize) -> Option<Dense<'d, D>> {
        let groups = || self.layers.iter().flat_map(|l| [&l.qkv, &l.output, &l.gate_up, &l.down]);
        let inputs = [self.config.hidden_size, self.config.q_dim(), self.config.intermediate_size];
        if rows < PROMPT_FROM || inputs.iter().any(|cols| !cols.is_multiple_of(8)) {
            return None;
        }
        let widest = inputs.into_iter().max().unwrap_or_default();
        let largest = groups().flat_map(|g| &g.parts).filter_map(|(_, linear)| match linear {
            Linear::Packed(matrix) => Some(matrix.shape().len()),
            Linear::Dense(_) | Linear::Experts(_) => None,
        });
        let halves = Buffer::room(self.device, 2 * rows * widest, "inputs of a prompt").ok()?;
        let weights = Buffer::room(self.device, 2 * largest.max().unwrap_or_default(), "weights of a prompt");
        Some(Dense { halves, weights: weights.ok()? })
    }

    /// Launches embedding and blocks for the tokens of the step.
    pub(crate) fn blocks(
        &self,
        s: &DeviceWork<'d, D>,
        memory: &DeviceMemory<'d, D>,
        of: StepRows,
        products: &Products<'_, 'd, D>,
    ) -> Result<(), DeviceError> {
        let (device, config, width) = (self.device, &self.config, self.config.hidden_size);
        let rows = of.all();
        let on = (self, s, products);
        match &self.embed_out {
            None => ops::embed(device, &s.step, self.embed.weights(), &s.x, rows, width)?,
            Some(tables) => {
                ops::embed(device, &s.step, self.embed.weights(), &s.n, rows, width)?;
                tables.rotate(device, &s.n, &s.x, rows, true, None)?;
            }
        }
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
        let cap = config.score_cap.map_or(0.0, |cap| cap as f32);
        let gate = match config.activation {
            Activation::Silu => Gate::Silu,
            Activation::GeluTanh => Gate::GeluTanh,
        };
        for ((i, layer), cache) in self.layers.iter().enumerate().zip(memory.caches()) {
            let input = self.read(s, layer.attention_norm.as_ref(), layer.attention_in.as_ref(), rows)?;
            layer.qkv.apply(on, input, &s.wide, rows, false)?;
            if config.qk_norm == QkNorm::Whole {
                let (q, k, stride) = (config.q_dim(), config.kv_dim(), s.shape.row());
                for (norm, part) in [(&layer.query_norm, (0, q, stride)), (&layer.key_norm, (q, k, stride))] {
                    let Some(gain) = norm else { continue };
                    ops::norm_part(device, &s.wide, gain, rows, part, self.inner_eps)?;
                }
            }
            let of_heads = config.qk_norm == QkNorm::Heads;
            let local = s.local_rope_table.as_ref().filter(|_| config.has_local_rope(i));
            let rope_table = local.unwrap_or(&s.rope_table);
            let options = HeadOptions {
                query_norm: layer.query_norm.as_ref().filter(|_| of_heads),
                key_norm: layer.key_norm.as_ref().filter(|_| of_heads),
                turns: config.layers[i].rope.then_some(rope_table),
                growth: s.growth.as_ref(),
                cap,
                eps: self.inner_eps,
                window: config.layers[i].sliding_window.unwrap_or(0),
                head_turn: memory.kind().codes().then_some(&self.head_turn),
                constants: self.constants(s, memory.kind(), i),
                halved: memory.halved(),
            };
            if rows <= FEW && s.shape.d.is_multiple_of(8) {
                ops::attend_few(&s.step, &s.wide, (cache, &s.tables), &s.n, of, &options, &s.attention)?;
            } else {
                ops::attention(&s.step, &s.wide, (cache, &s.tables), &s.n, of, &s.shape, &options)?;
            }
            let mut input = &s.n;
            if let Some(tables) = &layer.output_in {
                tables.rotate(device, &s.n, &s.turned, rows, false, None)?;
                input = &s.turned;
            }
            let [after_attention, after_mlp] =
                layer.out_norms.as_ref().map_or([None; 2], |n| n.each_ref().map(Some));
            self.write(s, after_attention, rows, |to, add| layer.output.apply(on, input, to, rows, add))?;

            let input = self.read(s, layer.mlp_norm.as_ref(), layer.mlp_in.as_ref(), rows)?;
            if let Some(experts) = config.experts {
                let of = (layer, experts);
                self.write(s, after_mlp, rows, |to, add| {
                    self.experts((s, products), of, input, to, rows, (gate, add))
                })?;
                continue;
            }
            layer.gate_up.apply(on, input, &s.wide, rows, false)?;
            match &layer.down_in {
                Some(tables) => tables.rotate(device, &s.wide, &s.turned, rows, false, Some(gate))?,
                None => ops::gate(device, gate, &s.wide, &s.turned, (rows, config.intermediate_size))?,
            }
            self.write(s, after_mlp, rows, |to, add| layer.down.apply(on, &s.turned, to, rows, add))?;
        }
        Ok(())
    }

    /// The residual stream, behind norm and rotation where there are such; returns where.
    fn read<'s>(
        &self,
        s: &'s DeviceWork<'d, D>,
        norm: Option<&Buffer<'d, D>>,
        turn: Option<&RotationTables<'d, D>>,
        rows: usize,
    ) -> Result<&'s Buffer<'d, D>, DeviceError> {
        match (norm, turn) {
            (Some(_), _) => self.normed(s, &s.x, norm, turn, (0, rows), false),
            (None, None) => Ok(&s.x),
            (None, Some(tables)) => {
                tables.rotate(self.device, &s.x, &s.turned, rows, false, None)?;
                Ok(&s.turned)
            }
        }
    }

    /// What a product makes of its input, or the norm of that, is added to the residual stream.
    fn write<F: Fn(&Buffer<'d, D>, bool) -> Result<(), DeviceError>>(
        &self,
        s: &DeviceWork<'d, D>,
        norm: Option<&Buffer<'d, D>>,
        rows: usize,
        product: F,
    ) -> Result<(), DeviceError> {
        let (device, width) = (self.device, self.config.hidden_size);
        let Some(gain) = norm else { return product(&s.x, true) };
        product(&s.wide, false)?;
        ops::norm(device, &s.wide, Some(gain), &s.n, (0, rows, width), self.inner_eps)?;
        let mut out = &s.n;
        if let Some(tables) = &self.branch_out {
            tables.rotate(device, &s.n, &s.turned, rows, false, None)?;
            out = &s.turned;
        }
        ops::add(device, &s.x, out, rows * width)
    }

    /// Norm, and rotation where there is one, of `rows` rows of `x` from row `first` on; returns
    /// where they are.
    fn normed<'s>(
        &self,
        s: &'s DeviceWork<'d, D>,
        x: &Buffer<'d, D>,
        gain: Option<&Buffer<'d, D>>,
        turn: Option<&RotationTables<'d, D>>,
        (first, rows): (usize, usize),
        inverse: bool,
    ) -> Result<&'s Buffer<'d, D>, DeviceError> {
        let (device, width) = (self.device, self.config.hidden_size);
        if let Some(tables) = turn.filter(|t| t.takes_few(device, rows)) {
            let before = Before { norm: Some(self.eps), gain, gate: None };
            tables.rotate_few(device, x, &s.turned, (first, rows), inverse, &before)?;
            return Ok(&s.turned);
        }
        ops::norm(device, x, gain, &s.n, (first, rows, width), self.eps)?;
        let Some(tables) = turn else { return Ok(&s.n) };
        tables.rotate(device, &s.n, &s.turned, rows, inverse, None)?;
        Ok(&s.turned)
    }

    /// Launches final norm and head for `rows` (at most eight) rows of a residual stream from row
    /// `first` on.
    pub(crate) fn head(
        &self,
        s: &DeviceWork<'d, D>,
        x: &Buffer<'d, D>,
        (first, rows): (usize, usize),
        precision: Precision,
    ) -> Result<(), DeviceError> {
        let (device, these) = (self.device, (first, rows));
        let input = match &self.head_tables {
            HeadTables::Plain => self.normed(s, x, Some(&self.final_norm), None, these, false)?,
            HeadTables::Rotate(tables) => {
                self.normed(s, x, Some(&self.final_norm), Some(tables), these, false)?
            }
            HeadTables::Regain(tables) => {
                self.normed(s, x, None, Some(tables), these, true)?;
                if tables.takes_few(device, rows) {
                    let before = Before { gain: Some(&self.final_norm), ..Before::default() };
                    tables.rotate_few(device, &s.turned, &s.n, (0, rows), false, &before)?;
                } else {
                    ops::gain(device, &s.turned, &self.final_norm, (rows, self.config.hidden_size))?;
                    tables.rotate(device, &s.turned, &s.n, rows, false, None)?;
                }
                &s.n
            }
        };
        match &self.head {
            Some(group) => {
                group.apply((self, s, &Products::few(precision)), input, &s.logits, rows, false)?;
            }
            None => self.embed.apply_at(device, input, &s.logits, (0, self.embed.rows()), rows, false)?,
        }
        #[expect(clippy::cast_possible_truncation, reason = "rounding to f32 is meant")]
        match self.config.logit_cap {
            Some(cap) => ops::cap(device, &s.logits, rows * self.config.vocab_size, cap as f32),
            None => Ok(()),
        }
    }
}
