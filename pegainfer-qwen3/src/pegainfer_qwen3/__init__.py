"""The Qwen3 family of pegainfer: dense models, 0.6B to 32B."""
