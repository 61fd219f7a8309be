"""GGUF files: reading tensors, blocks of quantized values, and the tokenizer in a header."""
