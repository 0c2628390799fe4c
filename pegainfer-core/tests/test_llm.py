"""The Python API on a tiny checkpoint, and every decision of the start that can be refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pegainfer_core import LLM, CheckpointError, ConfigError, RequestError, SamplingParams, UnsupportedModelError
from pegainfer_core.messages import AddRequest, LoadProgress
from pegainfer_core.testing.corrupt import edit_config, remove_file_of
from pegainfer_qwen3.testing import write_tiny_qwen3

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
EMBEDDING = "model.embed_tokens.weight"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_qwen3(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def llm(checkpoint: Path) -> Iterator[LLM]:
    with LLM(str(checkpoint)) as made:
        yield made


def test_prompts_may_be_text_or_ids_one_or_many(llm: LLM) -> None:
    text = "def main(argument): return"
    ids = llm.tokenizer.encode(text)
    prompts: list[str | list[int]] = [text, ids]
    many = llm.generate(prompts, GREEDY)
    (one,) = llm.generate(text, GREEDY)
    (from_ids,) = llm.generate(ids, GREEDY)
    assert {tuple(each.token_ids) for each in (*many, one, from_ids)} == {tuple(one.token_ids)}
    assert one.prompt_ids == ids and one.finish_reason == "length" and len(one.token_ids) == 12
    assert one.text == llm.tokenizer.decode(one.token_ids, skip_special_tokens=True)
    assert one.num_cached_tokens == (len(ids) - 1) // 16 * 16


def test_each_prompt_may_have_its_own_params_and_is_reported_when_done(llm: LLM) -> None:
    done: list[int] = []
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=n, logprobs=n) for n in (1, 2, 3)]
    completions = llm.generate([[5, 6]] * 3, params, on_finished=done.append)
    assert [len(each.token_ids) for each in completions] == [1, 2, 3] and sorted(done) == [0, 1, 2]
    for each, asked in zip(completions, params, strict=True):
        assert each.logprobs is not None
        assert [entry.token_id for entry in each.logprobs] == each.token_ids
        assert all(len(entry.top) == asked.logprobs for entry in each.logprobs)
    with pytest.raises(RequestError, match="3 prompts but 2"):
        llm.generate([[5]] * 3, params[:2])


def test_a_stream_joins_to_the_completion(llm: LLM) -> None:
    (whole,) = llm.generate([9, 10, 11], GREEDY)
    deltas = list(llm.stream([9, 10, 11], GREEDY))
    assert [token_id for delta in deltas for token_id in delta.token_ids] == whole.token_ids
    assert "".join(delta.text for delta in deltas) == whole.text
    assert [delta.finish_reason for delta in deltas] == [None] * 11 + ["length"]
    early = llm.stream([9, 10, 11], SamplingParams(ignore_eos=True))
    next(early)
    early.close()  # type: ignore[attr-defined]
    assert llm.generate([9, 10, 11], GREEDY)[0].token_ids == whole.token_ids


def test_chat_renders_the_template(llm: LLM) -> None:
    messages = [{"role": "user", "content": "hello"}]
    answer = llm.chat(messages, GREEDY)
    assert answer.prompt_ids == llm.chat_format.encode(llm.chat_format.render(messages))
    assert len(answer.token_ids) == 12


def test_without_params_a_prompt_gets_16_tokens_and_a_chat_all_it_takes(
    llm: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[SamplingParams] = []
    generate = llm._client.generate

    def spy(request: AddRequest) -> Any:
        asked.append(request.params)
        return generate(AddRequest(request.request_id, request.prompt_ids, GREEDY))

    monkeypatch.setattr(llm._client, "generate", spy)
    llm.generate("Hello")
    list(llm.stream("Hello"))
    llm.chat([{"role": "user", "content": "Hello"}])
    assert asked == [SamplingParams(max_tokens=16), SamplingParams(max_tokens=16), SamplingParams()]


def test_a_text_that_cannot_fit_is_refused_without_being_tokenized(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llm.tokenizer, "encode", None)
    with pytest.raises(RequestError, match="1000000 characters does not fit this model's context of 4096") as caught:
        llm.generate("a" * 1_000_000)
    assert caught.value.code == "context_length_exceeded"


def test_refusals_are_request_errors_and_harm_nobody(llm: LLM) -> None:
    (alone,) = llm.generate([5, 6, 7], GREEDY)
    with pytest.raises(RequestError, match="outside the vocabulary"):
        llm.generate([[5, 6, 7], [10**6]], GREEDY)
    with pytest.raises(RequestError) as caught:
        llm.generate([5] * 5000, GREEDY)
    assert caught.value.code == "context_length_exceeded"
    assert llm.generate([5, 6, 7], GREEDY)[0].token_ids == alone.token_ids


def test_the_start_reports_progress_and_what_was_decided(checkpoint: Path) -> None:
    seen: list[LoadProgress] = []
    with LLM(str(checkpoint), on_progress=seen.append, max_model_len=100, kv_cache_memory=1 << 20) as llm:
        llm.generate([5], GREEDY)
        info = llm.info
    last = [report for report in seen if report.phase == "weights"][-1]
    assert last.done == last.total == info.weight_bytes
    assert seen[-1].phase == "kernels"
    assert (info.device, info.dtype, info.attention_backend) == ("cpu", "float32", "torch-batched")
    assert (info.max_model_len, info.vocab_size, info.eos_token_ids) == (100, 512, [2])
    # 4 layers, keys and values, 2 heads of 32, float32, pages of 16; one page is padding.
    assert info.num_pages == (1 << 20) // (4 * 2 * 2 * 32 * 4 * 16) - 1
    assert [phase for phase, _ in info.timeline] == ["import", "weights", "kernels", "KV cache", "graphs"]


def test_a_small_pool_shortens_the_context_unless_it_was_asked_for(checkpoint: Path) -> None:
    page = 4 * 2 * 2 * 32 * 4 * 16
    with LLM(str(checkpoint), kv_cache_memory=5 * page) as llm:
        assert llm.info.max_model_len == 4 * 16
        assert len(llm.generate([5] * 40, SamplingParams(ignore_eos=True))[0].token_ids) == 24
    with pytest.raises(ConfigError, match=r"--max-model-len 100 .* 64 tokens"):
        LLM(str(checkpoint), kv_cache_memory=5 * page, max_model_len=100)
    with pytest.raises(ConfigError, match="--kv-cache-memory"):
        LLM(str(checkpoint), kv_cache_memory=page)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"device": "tpu"}, "--device tpu"),
        ({"device": "meta"}, "--device meta"),
        ({"device": "cuda:99"}, "CUDA devices"),
        ({"attention_backend": "triton", "device": "cpu"}, "--attention-backend triton"),
        ({"cuda_graphs": True}, "--cuda-graphs"),
        ({"max_model_len": 4097}, "4096 positions"),
        ({"max_model_len": 0}, "--max-model-len"),
        ({"page_size": 24}, "--page-size"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization"),
        ({"options": {"nonsense": "1"}}, "nonsense"),
        ({"ignore_config_keys": ("nonsense",)}, "nonsense"),
        ({"revision": "main"}, "--revision"),
    ],
)
def test_settings_that_cannot_be_honoured_name_the_flag(checkpoint: Path, settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(str(checkpoint), **settings)


def test_checkpoints_that_cannot_be_served_say_why(tmp_path: Path) -> None:
    foreign = write_tiny_qwen3(tmp_path / "foreign")
    edit_config(foreign, model_type="qwen9", architectures=["Qwen9ForCausalLM"])
    with pytest.raises(UnsupportedModelError, match=r"qwen9[\s\S]*qwen3:"):
        LLM(str(foreign))
    broken = write_tiny_qwen3(tmp_path / "broken", shard_bytes=200_000)
    missing = remove_file_of(broken, EMBEDDING)
    with pytest.raises(CheckpointError, match=missing.name):
        LLM(str(broken))
    with pytest.raises(CheckpointError, match="no such directory"):
        LLM(str(tmp_path / "nowhere"))
