//! AVX2 and AVX-512 bodies of the fracbit kernel families
