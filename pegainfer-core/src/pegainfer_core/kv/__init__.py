"""Who holds which page of the KV cache. Torch-free, except `storage`, which owns the tensors behind the pages."""
