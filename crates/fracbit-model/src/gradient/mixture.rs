//! The experts of a block, forwards and backwards: every expert is an MLP of its own tokens.
//!
//! With the weights w of a token's experts, `out = sum over e of w_e y_e`, so that `dy_e = w_e
//! dout` and `dw_e = y_e . dout`. Where w is the softmax over the chosen ones, `dl_e = w_e (dw_e -
//! sum over chosen c of w_c dw_c)` for the chosen and 0 for the others; where it is over all, the
//! same with all experts on the left and dw = 0 for those that were not chosen. Which ones are
//! chosen is taken as constant.

use fracbit_io::Experts;
use fracbit_kernels::Gate;
use fracbit_kernels::vectors::plain::exp;
use fracbit_rotation::Rotation;

use super::{Dense, Seen, activate, activate_back, add, product, rotate};
use crate::Error;
use crate::experts::{Choice, choose, route};
use crate::linear::{Linear, LinearScratch};

/// What lies inside the experts of a block.
pub(super) struct Mixture {
    /// Of those that have tokens.
    experts: Vec<Expert>,
    /// The weight of every expert for every token, 0 for those that it does not get; (tokens,
    /// experts)
    weights: Vec<f32>,
    /// Softmax over all experts; (tokens, experts)
    shares: Vec<f32>,
    how: Experts,
}

/// What lies inside one expert, all (its tokens, width).
struct Expert {
    index: usize,
    tokens: Vec<usize>,
    x: Vec<f32>,
    gate: Vec<f32>,
    up: Vec<f32>,
    act: Vec<f32>,
    down: Vec<f32>,
}

/// Rows of some tokens.
fn gather(x: &[f32], width: usize, tokens: &[usize]) -> Vec<f32> {
    tokens.iter().flat_map(|t| &x[t * width..(t + 1) * width]).copied().collect()
}

/// The router, and gate, up and down of all experts.
pub(super) struct Matrices<'s, 'a> {
    pub(super) router: &'s Linear,
    pub(super) mlp: [&'s Dense<'a>; 3],
    pub(super) down_in: Option<&'s Rotation>,
    pub(super) kind: Gate,
}

impl Matrices<'_, '_> {
    /// What the experts give for normalized tokens `n`, (tokens, width), and all that lies between.
    pub(super) fn forward(
        &self,
        how: Experts,
        n: &[f32],
        width: usize,
    ) -> Result<(Vec<f32>, Mixture), Error> {
        let [gate, up, down] = self.mlp;
        let count = n.len() / width;
        let mut shares = vec![0.0; count * how.count];
        fracbit_kernels::with_team(|team| {
            route(self.router, team, n, &mut LinearScratch::new(), &mut shares)
        })?;
        let mut weights = vec![0.0; shares.len()];
        let mut choices = vec![Choice::default(); how.active];
        let mut tokens = vec![Vec::new(); how.count];
        let rows = shares.chunks_exact_mut(how.count).zip(weights.chunks_exact_mut(how.count));
        for (token, (logits, weights)) in rows.enumerate() {
            choose(logits, how.renormalized, &mut choices);
            for choice in &choices {
                weights[choice.expert as usize] = choice.weight;
                tokens[choice.expert as usize].push(token);
            }
            let top = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
            logits.iter_mut().for_each(|l| *l = exp(*l - top));
            let sum: f32 = logits.iter().sum();
            logits.iter_mut().for_each(|l| *l /= sum);
        }
        let mut out = vec![0.0; n.len()];
        let mut experts = Vec::new();
        for (index, tokens) in tokens.into_iter().enumerate().filter(|(_, tokens)| !tokens.is_empty()) {
            let x = gather(n, width, &tokens);
            let [gate, up] = [gate, up].map(|m| m.piece(index, how.count).forward(&x));
            let mut act = activate(self.kind, &gate, &up);
            rotate(self.down_in, &mut act, false);
            let down = down.piece(index, how.count).forward(&act);
            for (&token, y) in tokens.iter().zip(down.chunks_exact(width)) {
                let weight = weights[token * how.count + index];
                let out = &mut out[token * width..(token + 1) * width];
                out.iter_mut().zip(y).for_each(|(out, y)| *out += weight * y);
            }
            experts.push(Expert { index, tokens, x, gate, up, act, down });
        }
        Ok((out, Mixture { experts, weights, shares, how }))
    }

    /// Derivatives with respect to the normalized tokens from those with respect to what the
    /// experts give.
    pub(super) fn back(
        &self,
        inside: &Mixture,
        width: usize,
        dout: &[f32],
        see: &mut dyn FnMut(&Seen<'_, '_>),
    ) -> Vec<f32> {
        let Mixture { experts, weights, shares, how } = inside;
        let [gate, up, down] = self.mlp;
        let mut dn = vec![0.0; dout.len()];
        let mut dweights = vec![0.0; weights.len()];
        for Expert { index, tokens, x, gate: g, up: u, act, down: y } in experts {
            let [gate, up, down] = [gate, up, down].map(|m| m.piece(*index, how.count));
            let mut dy = gather(dout, width, tokens);
            for ((&token, dy), y) in tokens.iter().zip(dy.chunks_exact_mut(width)).zip(y.chunks_exact(width))
            {
                let at = token * how.count + index;
                dweights[at] = dy.iter().zip(y).map(|(d, y)| d * y).sum::<f32>();
                dy.iter_mut().for_each(|d| *d *= weights[at]);
            }
            let mut see = |matrix, x: &[f32], y: &[f32], dy: &[f32]| see(&Seen { matrix, tokens, x, y, dy });
            see(&down, act, y, &dy);
            let mut dgate = down.back(&dy);
            rotate(self.down_in, &mut dgate, true);
            let dup = activate_back(self.kind, g, u, &mut dgate);
            see(&gate, x, g, &dgate);
            see(&up, x, u, &dup);
            let mut dx = gate.back(&dgate);
            add(&mut dx, &up.back(&dup));
            for (&token, dx) in tokens.iter().zip(dx.chunks_exact(width)) {
                add(&mut dn[token * width..(token + 1) * width], dx);
            }
        }
        // dw becomes dl.
        let rows = weights.chunks_exact(how.count).zip(shares.chunks_exact(how.count));
        for (d, (weights, shares)) in dweights.chunks_exact_mut(how.count).zip(rows) {
            let mean: f32 = d.iter().zip(weights).map(|(d, w)| d * w).sum();
            let by = if how.renormalized { weights } else { shares };
            d.iter_mut().zip(by).for_each(|(d, by)| *d = by * (*d - mean));
        }
        let router = self.router.to_dense().expect("a dense layer");
        add(&mut dn, &product(&gate.vectors, &dweights, &router, width, false));
        dn
    }
}
