"""Sampling defaults of the checkpoint and the flag that leaves them aside, on a real server (D11, B5, B6)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from pegainfer_core.testing.served import served
from pegainfer_core.testing.tiny_tokenizer import EOS_ID
from pegainfer_qwen3.testing import write_tiny_qwen3

SECOND_EOS = 7


@pytest.mark.parametrize(("flags", "from_checkpoint"), [([], True), (["--generation-config", "none"], False)])
def test_defaults_of_the_checkpoint_can_be_left_aside_but_not_its_eos(
    tmp_path: Path, flags: list[str], from_checkpoint: bool
) -> None:
    path = write_tiny_qwen3(tmp_path)
    defaults = {"eos_token_id": [EOS_ID, SECOND_EOS], "max_new_tokens": 3, "top_k": 1}
    (path / "generation_config.json").write_text(json.dumps(defaults), encoding="utf-8")
    hello: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}]}
    with served(path, "--max-model-len", "64", *flags) as server, httpx.Client(base_url=server.url) as client:

        def chat(**fields: Any) -> Any:
            response = client.post("/v1/chat/completions", json=hello | fields, timeout=60)
            assert response.status_code == 200, response.text
            return response.json()

        room = 64 - chat(max_tokens=1)["usage"]["prompt_tokens"]
        open_end = chat(ignore_eos=True)["usage"]["completion_tokens"]
        assert open_end == (3 if from_checkpoint else room)
        texts = {chat(seed=seed, max_tokens=8, ignore_eos=True)["choices"][0]["message"]["content"] for seed in (1, 2)}
        assert len(texts) == (1 if from_checkpoint else 2)
        for eos in (EOS_ID, SECOND_EOS):
            (choice,) = chat(logit_bias={str(eos): 100}, max_tokens=8)["choices"]
            assert (choice["finish_reason"], choice["stop_reason"], choice["message"]["content"]) == ("stop", None, "")
