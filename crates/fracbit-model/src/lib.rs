//! Decoder graph of the Llama, Mistral, Qwen and SmolLM families on the CPU: KV cache, attention, sampling
