//! Tensor-level quantization: regularize, round, pack; sensitivity fitting
