"""`make demo`'s program: a real model, served and asked; the answer is the one of transformers on the same checkpoint."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from pegainfer_llama.smollm2 import ensure_checkpoint

ROOT = Path(__file__).resolve().parent.parent
QUESTION = "What is the capital of Italy, and what is it known for?"


def greedy_answer(checkpoint: Path, question: str) -> str:
    """What transformers answers, in float32 as the server on CPU."""
    import torch
    from transformers import AutoTokenizer, LlamaForCausalLM

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    model = LlamaForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    messages = [{"role": "user", "content": question}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(str(text), return_tensors="pt", add_special_tokens=False)
    output = model.generate(input_ids=inputs["input_ids"], max_new_tokens=200, do_sample=False)
    return str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_demo_shows_the_answer_of_transformers() -> None:
    command = [sys.executable, str(ROOT / "examples" / "demo.py"), "--prompt", QUESTION]
    result = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    answer = greedy_answer(ensure_checkpoint(), QUESTION)
    assert len(answer) > 20
    assert f"SmolLM2-135M-Instruct: {answer}" in result.stdout
    assert "make demo KEEP=1" in result.stdout
