//! Fast orthogonal rotations (Hadamard of any order K*2^p, random signs) for incoherence processing
