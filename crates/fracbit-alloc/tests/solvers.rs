//! The own solvers against enumeration, at their limits, and on bad input.

#![expect(clippy::unwrap_used, reason = "a failed step is a failed test")]

mod common;

use fracbit_alloc::oracle::{brute_force, brute_force_fusion};
use fracbit_alloc::{
    AllocError, Budget, Choice, Effort, FusionProblem, Group, Layer, Problem, fusion, greedy, relax, solve,
    solve_with,
};
use rand::{Rng, SeedableRng};
use rand_chacha::ChaCha8Rng;

fn random_choices(rng: &mut ChaCha8Rng, n: usize, budgets: usize) -> Vec<Choice> {
    (0..n)
        .map(|_| Choice {
            // Few distinct values, so that ties and dominated choices are common.
            cost: (0..budgets).map(|_| rng.random_range(0..25)).collect(),
            loss: f64::from(rng.random_range(-4..40)) / 8.0,
        })
        .collect()
}

fn random_problem(rng: &mut ChaCha8Rng, layers: usize, choices: usize, budgets: usize) -> Problem {
    let layers: Vec<Layer> = (0..layers)
        .map(|l| Layer { name: format!("l{l}"), choices: random_choices(rng, choices, budgets) })
        .collect();
    let most = 12 * layers.len() as u64;
    let budgets = (0..budgets).map(|k| Budget::new(format!("r{k}"), rng.random_range(1..most))).collect();
    Problem::new(layers, budgets).unwrap()
}

#[test]
fn one_budget_equals_brute_force() {
    let mut rng = ChaCha8Rng::seed_from_u64(1);
    let (mut solved, mut refused) = (0, 0);
    for case in 0..800 {
        let choices = 1 + case % 4;
        let p = random_problem(&mut rng, 6, choices, 1);
        match (brute_force(&p), solve(&p)) {
            (Ok(best), Ok(s)) => {
                // Losses are multiples of 1/8: sums are exact.
                assert_eq!(s.loss, best.loss, "case {case}");
                assert!(s.gap() < 1e-12, "case {case}");
                assert!(
                    p.feasible(&s.cost) && p.evaluate(&s.choice) == (s.loss, s.cost.clone()),
                    "case {case}"
                );
                let (bound, quick) = (relax(&p).unwrap().bound, greedy(&p).unwrap().loss);
                assert!(bound <= best.loss + 1e-12 && best.loss <= quick, "case {case}: {bound} {quick}");
                solved += 1;
            }
            (Err(AllocError::NotTogether { .. }), Err(AllocError::Unreachable { min, asked, .. })) => {
                assert!(asked < min, "case {case}");
                refused += 1;
            }
            (a, b) => panic!("case {case}: {a:?} but {b:?}"),
        }
    }
    assert!(solved > 300 && refused > 50, "{solved} {refused}");
}

#[test]
fn two_budgets_keep_their_promises() {
    let mut rng = ChaCha8Rng::seed_from_u64(2);
    let (mut solved, mut optimal, mut refused) = (0, 0, 0);
    for case in 0..400 {
        let p = random_problem(&mut rng, 6, 4, 2);
        match (brute_force(&p), solve(&p)) {
            (Ok(best), Ok(s)) => {
                assert!(p.feasible(&s.cost), "case {case}");
                assert!(
                    s.loss >= best.loss && s.lower_bound <= best.loss + 1e-9,
                    "case {case}: {s:?} {best:?}"
                );
                let bound = relax(&p).unwrap().bound;
                assert!(bound <= best.loss + 1e-9, "case {case}: {bound} {}", best.loss);
                solved += 1;
                optimal += usize::from(s.loss == best.loss);
            }
            (Err(_), Err(AllocError::Unreachable { .. })) => refused += 1,
            (a, b) => panic!("case {case}: {a:?} but {b:?}"),
        }
    }
    assert!(solved > 100 && refused > 50 && optimal * 2 > solved, "{solved} {optimal} {refused}");
}

#[test]
fn fusion_equals_brute_force() {
    // Up to three blocks of {q, k, v} and two schemes or one block and four.
    let mut rng = ChaCha8Rng::seed_from_u64(3);
    let (mut solved, mut refused) = (0, 0);
    for case in 0..120 {
        let (blocks, schemes) = [(1, 4), (2, 2), (2, 3), (3, 2)][case % 4];
        let budgets = 1 + case / 4 % 2;
        let mut groups = Vec::new();
        for b in 0..blocks {
            for members in fusion::subsets(&[3 * b, 3 * b + 1, 3 * b + 2]) {
                groups.push(Group { members, choices: random_choices(&mut rng, schemes, budgets) });
            }
        }
        let limit = |rng: &mut ChaCha8Rng| rng.random_range(2..30 * blocks as u64);
        let budgets = (0..budgets).map(|k| Budget::new(format!("r{k}"), limit(&mut rng))).collect();
        let p =
            FusionProblem::new((0..3 * blocks).map(|l| format!("l{l}")).collect(), groups, budgets).unwrap();
        match (brute_force_fusion(&p), p.solve(Effort::default())) {
            (Ok(best), Ok(s)) => {
                assert!(p.feasible(&s.cost), "case {case}");
                if p.budgets().len() == 1 {
                    assert_eq!(s.loss, best.loss, "case {case}");
                    assert!(s.gap() < 1e-12, "case {case}");
                }
                assert!(s.lower_bound <= best.loss + 1e-9 && best.loss <= s.loss, "case {case}");
                // A partition: every layer exactly once.
                let mut seen: Vec<usize> =
                    s.active.iter().flat_map(|&(g, _)| p.groups()[g].members.clone()).collect();
                seen.sort_unstable();
                assert_eq!(seen, (0..3 * blocks).collect::<Vec<_>>(), "case {case}");
                solved += 1;
            }
            (Err(_), Err(_)) => refused += 1,
            (a, b) => panic!("case {case}: {a:?} but {b:?}"),
        }
    }
    assert!(solved > 60 && refused > 3, "{solved} {refused}");
}

#[test]
fn large_instances_are_solved_to_the_end() {
    for seed in 0..4 {
        for bits in [1.5, 2.5, 3.3, 5.0] {
            let p = common::noisy_problem(seed, bits);
            let s = solve(&p).unwrap();
            assert!(s.gap() < 1e-12, "seed {seed} at {bits}");
            let bound = relax(&p).unwrap().bound;
            assert!(bound <= s.loss && s.loss <= bound * 1.001, "seed {seed} at {bits}");
        }
    }
}

#[test]
fn little_effort_still_proves_its_bound() {
    let mut loose = 0;
    for seed in 0..4 {
        for bits in [1.5, 2.5, 5.0] {
            let p = common::noisy_problem(seed, bits);
            let best = solve(&p).unwrap();
            for effort in [
                Effort { gap: 0.0, labels: 1 },
                Effort { gap: 0.0, labels: 8 },
                Effort { gap: 1e-4, labels: 64 },
            ] {
                let s = solve_with(&p, effort).unwrap();
                assert!(p.feasible(&s.cost));
                assert!(
                    s.lower_bound <= best.loss + 1e-12 && best.loss <= s.loss,
                    "{effort:?} seed {seed} at {bits}"
                );
                assert!(s.gap() < 1e-3, "{effort:?} seed {seed} at {bits}: {}", s.gap());
                loose += usize::from(s.gap() > 1e-9);
            }
        }
    }
    assert!(loose > 0, "the limited searches were never limited");
}

#[test]
fn budgets_out_of_reach() {
    let layers = vec![
        Layer {
            name: "a".into(),
            choices: vec![Choice::new(10, 1.0), Choice::new(20, 0.5), Choice::new(40, 0.5)],
        },
        Layer { name: "b".into(), choices: vec![Choice::new(7, 1.0), Choice::new(5, 3.0)] },
    ];
    let mut p = Problem::new(layers, vec![Budget::new("bytes", 14)]).unwrap();
    for e in [
        solve(&p).unwrap_err(),
        greedy(&p).unwrap_err(),
        relax(&p).unwrap_err(),
        p.require_reachable().unwrap_err(),
    ] {
        assert_eq!(e.to_string(), "allocate: budget `bytes` should be in 15..=27, got 14");
    }
    #[cfg(feature = "highs")]
    assert!(matches!(
        fracbit_alloc::solve_highs(&p, fracbit_alloc::Limits::default()),
        Err(AllocError::Unreachable { min: 15, max: 27, .. })
    ));
    // Both ends of the range are reachable; beyond the upper one only the strict check objects.
    for (limit, cost, strict) in [(15, 15, true), (27, 27, true), (28, 27, false)] {
        p.set_limit(0, limit);
        assert_eq!(solve(&p).unwrap().cost, [cost]);
        assert_eq!(p.require_reachable().is_ok(), strict, "{limit}");
    }
}

#[test]
fn budgets_that_exclude_each_other() {
    let swap = |name: &str| Layer {
        name: name.into(),
        choices: vec![Choice { cost: vec![10, 0], loss: 1.0 }, Choice { cost: vec![0, 10], loss: 1.0 }],
    };
    let budgets = |a, b| vec![Budget::new("bytes", a), Budget::new("ns", b)];
    let p = Problem::new(vec![swap("a"), swap("b")], budgets(10, 9)).unwrap();
    assert_eq!(solve(&p).unwrap_err().to_string(), "allocate: budget `ns` should be in 10..=10, got 9");
    // The linear relaxation would mix the choices at 10 + 10, and is infeasible below.
    assert!(matches!(relax(&p), Err(AllocError::NotTogether { .. })));
    let p = Problem::new(vec![swap("a"), swap("b")], budgets(10, 10)).unwrap();
    assert_eq!(solve(&p).unwrap().cost, [10, 10]);
}

#[test]
fn bad_input() {
    let layer = |choices| vec![Layer { name: "x".into(), choices }];
    let one = || vec![Budget::new("bytes", 1)];
    for (layers, budgets, want) in [
        (vec![], one(), "allocate: layers should not be empty"),
        (layer(vec![Choice::new(1, 1.0)]), vec![], "allocate: budgets should not be empty"),
        (layer(vec![]), one(), "allocate: `x` should have at least one choice, got none"),
        (
            layer(vec![Choice { cost: vec![1, 2], loss: 1.0 }]),
            one(),
            "allocate: choice 0 of `x` should have one cost per budget (1), got 2",
        ),
        (
            layer(vec![Choice::new(1, f64::NAN)]),
            one(),
            "allocate: loss of choice 0 of `x` should be finite, got NaN",
        ),
        (
            [layer(vec![Choice::new(u64::MAX, 1.0)]), layer(vec![Choice::new(1, 1.0)])].concat(),
            one(),
            "allocate: the largest total of `bytes` should fit 64 bits; use a coarser unit",
        ),
    ] {
        assert_eq!(Problem::new(layers, budgets).unwrap_err().to_string(), want);
    }
    let group = |members: &[usize]| Group { members: members.to_vec(), choices: vec![Choice::new(1, 1.0)] };
    let names = || vec!["a".to_owned(), "b".to_owned()];
    for members in [&[][..], &[2], &[0, 0]] {
        assert!(matches!(
            FusionProblem::new(names(), vec![group(members)], one()),
            Err(AllocError::Members { group: 0, .. })
        ));
    }
    let p =
        FusionProblem::new(names(), vec![group(&[0, 1]), group(&[0])], vec![Budget::new("ns", 9)]).unwrap();
    assert_eq!(p.solve(Effort::default()).unwrap().active, [(0, 0)]);
    let p = FusionProblem::new(names(), vec![group(&[0])], one()).unwrap();
    assert!(matches!(p.solve(Effort::default()), Err(AllocError::Uncovered { layer }) if layer == "b"));
}

#[test]
fn oracle_refuses_the_large() {
    assert!(matches!(brute_force(&common::noisy_problem(0, 3.0)), Err(AllocError::TooLarge { .. })));
}
