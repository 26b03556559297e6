//! The static schedule that reads least within a loss (PMPD, arXiv 2410.13461, section 4.3,
//! equations 1 to 3).

use crate::{Schedule, Switch};
use fracbit_base::Rate;

/// What a search found.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// The schedule.
    pub schedule: Schedule,
    /// Its loss.
    pub loss: f64,
    /// Schedules whose loss was asked for.
    pub asked: usize,
}

/// Of all schedules that go down `rates` at some of `points`, the one with the fewest mean bits
/// over `steps` decode steps whose loss is at most `most`; of equals the first that reads more
/// early. `None` when not even the highest rate throughout is within it.
///
/// `rates` descend; a schedule may leave any of them out. `points` ascend from 0; a switch at one
/// that is `steps` or more never happens. Losses are taken to be monotone: a schedule that reads no
/// more than another at any step loses no less. Schedules are asked for from the fewest bits up, so
/// that the first within the bound is the best; those that read no more anywhere than one that was
/// refused are left out unasked.
pub fn cheapest(
    rates: &[Rate],
    prefill: Rate,
    points: &[usize],
    steps: usize,
    most: f64,
    mut loss: impl FnMut(&Schedule) -> f64,
) -> Option<Found> {
    let mut all = schedules(rates, prefill, points, steps);
    all.sort_by(|(_, a), (_, b)| a.total_cmp(b));
    let mut refused: Vec<Schedule> = Vec::new();
    let mut asked = 0;
    for (schedule, _) in all {
        if refused.iter().any(|worse| never_above(&schedule, worse)) {
            continue;
        }
        asked += 1;
        let loss = loss(&schedule);
        if loss <= most {
            return Some(Found { schedule, loss, asked });
        }
        refused.push(schedule);
    }
    None
}

/// Every schedule once, with its mean bits.
fn schedules(rates: &[Rate], prefill: Rate, points: &[usize], steps: usize) -> Vec<(Schedule, f64)> {
    let points: Vec<usize> = points.iter().copied().filter(|&p| p < steps.max(1)).collect();
    let mut out = Vec::new();
    let mut open = vec![Vec::new()];
    while let Some(switches) = open.pop() {
        let last: Option<&Switch> = switches.last();
        let next = rates.iter().filter(|&&rate| last.is_none_or(|last| rate < last.precision));
        for &precision in next {
            let from = points.iter().filter(|&&p| last.map_or(p == 0, |last| p > last.from));
            for &from in from {
                let mut longer = switches.clone();
                longer.push(Switch { from, precision });
                let schedule = Schedule::new(prefill, longer.clone()).expect("rates fall in order");
                let bits = schedule.mean_bits(steps);
                out.push((schedule, bits));
                open.push(longer);
            }
        }
    }
    out
}

/// Whether `a` reads no more than `b` at any step.
fn never_above(a: &Schedule, b: &Schedule) -> bool {
    let starts = a.switches().iter().chain(b.switches()).map(|s| crate::Phase::Decode(s.from));
    starts.into_iter().all(|phase| a.precision(phase) <= b.precision(phase))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Phase;
    use proptest::prelude::*;

    const POINTS: [usize; 4] = [0, 3, 5, 8];
    const STEPS: usize = 10;

    fn rates() -> [Rate; 3] {
        [16, 12, 8].map(Rate::quarter_bits)
    }

    proptest! {
        #[test]
        fn finds_what_an_exhaustive_search_finds(
            weights in prop::collection::vec(0.0f64..1.0, STEPS),
            bend in 0.5f64..3.0,
            most in 0.0f64..8.0,
        ) {
            let loss = |s: &Schedule| -> f64 {
                let at = |i: usize| (4.0 - s.precision(Phase::Decode(i)).bits()).powf(bend);
                weights.iter().enumerate().map(|(i, w)| w * at(i)).sum()
            };
            // Every assignment of a rate to each stretch between points that never rises.
            let mut best: Option<f64> = None;
            for pick in 0..81usize {
                let of = |stretch: u32| pick / 3usize.pow(stretch) % 3;
                let picks: Vec<usize> = (0..4).map(of).collect();
                if !picks.is_sorted() {
                    continue;
                }
                let switches = POINTS.iter().zip(&picks).map(|(&from, &r)| Switch { from, precision: rates()[r] });
                let mut switches: Vec<Switch> = switches.collect();
                switches.dedup_by_key(|s| s.precision);
                let schedule = Schedule::new(rates()[0], switches).unwrap();
                if loss(&schedule) <= most {
                    let bits = schedule.mean_bits(STEPS);
                    best = Some(best.map_or(bits, |b: f64| b.min(bits)));
                }
            }
            let found = cheapest(&rates(), rates()[0], &POINTS, STEPS, most, loss);
            prop_assert_eq!(found.as_ref().map(|f| f.schedule.mean_bits(STEPS)), best);
            if let Some(found) = found {
                prop_assert!(found.loss <= most);
            }
        }
    }

    #[test]
    fn leaves_out_what_cannot_be() {
        let count = |most: f64| {
            let loss = |s: &Schedule| f64::from(u8::from(s.precision(Phase::Decode(0)) < rates()[0]));
            cheapest(&rates(), rates()[0], &POINTS, STEPS, most, loss)
        };
        let found = count(0.5).unwrap();
        // Three bits throughout and two throughout fail; those between them are not asked for.
        assert_eq!(found.schedule.to_string(), "prefill=4,decode=4..2@3");
        let all = schedules(&rates(), rates()[0], &POINTS, STEPS).len();
        assert!(found.asked < all, "{} of {all}", found.asked);
        assert_eq!(count(-1.0), None);
        assert_eq!(cheapest(&[], rates()[0], &POINTS, STEPS, 1.0, |_| 0.0), None);
    }
}
