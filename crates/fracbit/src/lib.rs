//! Make large language models small and fast at any fractional bit-width: quantize, plan, evaluate, generate
