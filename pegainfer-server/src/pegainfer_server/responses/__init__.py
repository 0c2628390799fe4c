"""POST /v1/responses: the subset of the Responses API that agents use, worded over the same path as chat completions."""
