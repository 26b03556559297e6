//! Checkpoints in, model directories out: safetensors, config, tokenizer, chat template, checksums, durable writes
