//! Tail-biting bitshift trellis codes for weight quantization: Viterbi search, codes, training
