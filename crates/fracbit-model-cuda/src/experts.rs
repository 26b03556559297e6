//! Mixtures of experts: the router's logits are read by the host, which groups the tokens by their
//! experts and launches a product for each expert that has some.

use fracbit_io::{Experts, ModelConfig};
use fracbit_kernels_cuda::{Buffer, Device, DeviceError};
use fracbit_model::{Choice, choose};

/// What a token's experts work in, for as many tokens as go together. A *pair* is a token and one
/// of its experts; pairs lie in the order of their experts.
#[derive(Debug)]
pub(crate) struct ExpertWork<'d, D: Device> {
    /// Tokens that go together.
    pub(crate) rows: usize,
    pub(crate) logits: Buffer<'d, D>,  // (rows, experts)
    pub(crate) row_of: Buffer<'d, D>,  // (pairs)
    pub(crate) pair_of: Buffer<'d, D>, // (rows, active)
    pub(crate) weights: Buffer<'d, D>, // (rows, active)
    pub(crate) input: Buffer<'d, D>,   // (pairs, hidden)
    pub(crate) gate_up: Buffer<'d, D>, // (pairs, 2 inner)
    pub(crate) acts: Buffer<'d, D>,    // (pairs, inner)
    pub(crate) output: Buffer<'d, D>,  // (pairs, hidden)
}

impl<'d, D: Device> ExpertWork<'d, D> {
    /// For at most `rows` tokens at a time.
    pub(crate) fn new(
        device: &'d D,
        experts: Experts,
        config: &ModelConfig,
        rows: usize,
    ) -> Result<Self, DeviceError> {
        let (pairs, hidden, inner) = (rows * experts.active, config.hidden_size, config.intermediate_size);
        let room = |words: usize| Buffer::zeroed(device, 4 * words, "experts of tokens");
        Ok(Self {
            rows,
            logits: room(rows * experts.count)?,
            row_of: room(pairs)?,
            pair_of: room(pairs)?,
            weights: room(pairs)?,
            input: room(pairs * hidden)?,
            gate_up: room(2 * pairs * inner)?,
            acts: room(pairs * inner)?,
            output: room(pairs * hidden)?,
        })
    }
}

/// The tokens of the experts, as the host found them.
pub(crate) struct Routed {
    /// An expert, the first of its pairs and how many there are.
    pub(crate) groups: Vec<(usize, usize, usize)>,
    pub(crate) row_of: Vec<u32>,
    pub(crate) pair_of: Vec<u32>,
    pub(crate) weights: Vec<f32>,
}

impl Routed {
    /// Of logits (rows, experts).
    pub(crate) fn new(experts: Experts, logits: &[f32]) -> Self {
        let mut choices = Vec::new();
        for logits in logits.chunks_exact(experts.count) {
            let mut of_row = vec![Choice::default(); experts.active];
            choose(logits, experts.renormalized, &mut of_row);
            choices.extend(of_row);
        }
        let mut order: Vec<usize> = (0..choices.len()).collect();
        order.sort_by_key(|&i| choices[i].expert); // of one expert in the order of tokens
        let number = |n: usize| u32::try_from(n).expect("a step has fewer pairs");
        let mut pair_of = vec![0; choices.len()];
        order.iter().enumerate().for_each(|(pair, &i)| pair_of[i] = number(pair));
        let mut groups: Vec<(usize, usize, usize)> = Vec::new();
        for (pair, &i) in order.iter().enumerate() {
            let expert = choices[i].expert as usize;
            match groups.last_mut().filter(|(last, ..)| *last == expert) {
                Some((.., count)) => *count += 1,
                None => groups.push((expert, pair, 1)),
            }
        }
        Self {
            groups,
            row_of: order.iter().map(|&i| number(i / experts.active)).collect(),
            pair_of,
            weights: choices.iter().map(|choice| choice.weight).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Routed;
    use fracbit_io::Experts;

    #[test]
    fn pairs_lie_in_the_order_of_their_experts() {
        let experts = Experts { count: 4, active: 2, renormalized: true };
        // Of three tokens: experts 0 and 3, 2 and 3, 0 and 2.
        let logits = [2.0, -1.0, 0.0, 1.0, -1.0, -2.0, 1.0, 2.0, 1.0, 0.0, 3.0, 0.0];
        let routed = Routed::new(experts, &logits);
        assert_eq!(routed.groups, [(0, 0, 2), (2, 2, 2), (3, 4, 2)]);
        assert_eq!(routed.row_of, [0, 2, 1, 2, 0, 1]);
        assert_eq!(routed.pair_of, [0, 4, 2, 5, 1, 3]);
        let sums = routed.weights.chunks(2).map(|of| of.iter().sum::<f32>());
        assert!(sums.into_iter().all(|sum| (sum - 1.0).abs() < 1e-6));
    }
}
