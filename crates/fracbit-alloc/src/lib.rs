//! Optimal bit allocation for mixed-scheme quantization: closed form, knapsack, ILP
