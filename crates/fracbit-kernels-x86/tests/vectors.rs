//! The operations beside the matrices give the bits of the scalar reference.

#![expect(clippy::print_stderr, reason = "tests report what was skipped")]

use fracbit_kernels::{Isa, Kernels, cases};

#[test]
fn operations_beside_the_matrices_give_the_bits_of_the_reference() {
    for isa in [Isa::Avx2, Isa::Avx512] {
        let mut kernels = Kernels::scalar();
        if fracbit_kernels_x86::install_up_to(&mut kernels, isa) != isa {
            eprintln!("SKIPPED: the processor lacks {isa}");
            continue;
        }
        assert_eq!(kernels.vectors().isa(), isa);
        cases::vectors::check(&kernels.vectors());
    }
}
