//! Scalar and 2-D vector codebooks for Gaussian weights, their rounding and their training
