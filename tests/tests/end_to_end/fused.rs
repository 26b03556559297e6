//! Fused groups: other calls, the same numbers.

use fracbit::{Plan, fusion, inspect};
use fracbit_io::verify;
use fracbit_model::{LinearId, Model, RotationMode};
use fracbit_tests::{Source, load, logits, references};

/// A plan that fuses whatever may be, in groups as large as possible.
fn fuse(source: &Source, plan: &Plan) -> Plan {
    let mut groups = fusion::candidates(&source.inventory.matrices);
    groups.sort_by_key(|g| std::cmp::Reverse(g.len()));
    let mut taken = vec![false; source.inventory.matrices.len()];
    let mut fused = Vec::new();
    for group in groups {
        if group.iter().any(|&m| taken[m]) {
            continue;
        }
        group.iter().for_each(|&m| taken[m] = true);
        fused.push(group.iter().map(|&m| source.inventory.matrices[m].name.clone()).collect());
    }
    Plan { fused, ..plan.clone() }
}

/// Matrices that run inside a shared one.
fn shared(model: &Model) -> usize {
    let ids: Vec<LinearId> = LinearId::all(model.config()).collect();
    let linear = |id| model.linear(id).expect("a matrix of the model");
    let matrix = |id| linear(id).as_packed().map(std::ptr::from_ref);
    let fused =
        |&&a: &&LinearId| matrix(a).is_some() && ids.iter().any(|&b| a != b && matrix(a) == matrix(b));
    ids.iter().filter(fused).count()
}

#[test]
fn fused_directories_run_to_the_same_bits() {
    let mut members = 0;
    for (i, r) in references().iter().enumerate() {
        // Trellis codes take their time; two models have them.
        let folded = ["half-tcq-3.25", "nest-tcq-fast-2+1"].get(i).copied().unwrap_or("vq-2.5");
        for (rotation, scheme) in [(RotationMode::Fold, folded), (RotationMode::None, "nuq-4")] {
            let source = Source::open(&r.dir, rotation, 5).expect("a good checkpoint");
            let apart = source.uniform(scheme).expect("no budget to miss");
            let fused = fuse(&source, &apart);
            let place = tempfile::tempdir().expect("a temporary directory");
            let [a, b] = [("apart", &apart), ("fused", &fused)].map(|(name, plan)| {
                let out = place.path().join(name);
                source.quantize(plan, &out, false).expect("a good plan");
                assert!(verify(&out).expect("readable").is_ok());
                assert_eq!(inspect(&out).expect("a model").fused, plan.fused);
                load(&out).expect("it runs")
            });
            assert_eq!(shared(&a), 0);
            assert_eq!(shared(&b), fused.fused.iter().map(Vec::len).sum::<usize>(), "{}", r.name);
            members += shared(&b);
            let bits = |m: &Model| logits(m, &r.tokens).iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&a), bits(&b), "{} {rotation} {scheme}", r.name);
        }
    }
    assert!(members > 40, "too few shapes can be fused: {members}");
}
