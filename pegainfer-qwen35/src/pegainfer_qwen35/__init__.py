"""The Qwen3.5 family of pegainfer: dense models whose layers are gated DeltaNet, three of four, or attention."""
