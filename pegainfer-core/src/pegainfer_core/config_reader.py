"""config.json, read strictly: every key is read by somebody, is known to have no effect, or is an error.

Owns `ConfigReader` and the lists of keys without effect. Knows no family's own keys and imports no torch.
Invariant: a value is never guessed from a wrong type, and nothing that could change results is skipped silently.
"""

from __future__ import annotations

import builtins
import enum
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from pegainfer_core.errors import ConfigError

# ConfigReader has methods of these names; annotations inside the class need others.
Int = builtins.int
Float = builtins.float
Bool = builtins.bool
Str = builtins.str

NO_EFFECT = frozenset(
    {
        # identity and provenance
        "_attn_implementation_autoset",
        "_commit_hash",
        "_name_or_path",
        "architectures",
        "auto_map",
        "is_decoder",
        "is_llama_config",
        "model_type",
        "tokenizer_class",
        "transformers.js_config",
        "transformers_version",
        "unsloth_fixed",
        "unsloth_version",
        # read elsewhere: read_dtype, read_eos, the tokenizer; the weights decide tying
        "bos_token_id",
        "dtype",
        "eos_token_id",
        "pad_token_id",
        "sep_token_id",
        "tie_word_embeddings",
        "torch_dtype",
        # training, other heads, and how transformers returns or caches things
        "chunk_size_feed_forward",
        "finetuning_task",
        "id2label",
        "initializer_range",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "problem_type",
        "return_dict",
        "torchscript",
        "use_bfloat16",
        "use_cache",
    }
)
"""Keys that cannot change the result of inference, whatever they hold."""

OFF_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_cross_attention": (False,),
    "attention_bias": (False,),
    "attention_dropout": (0,),
    "embd_pdrop": (0,),
    "hidden_dropout": (0,),
    "is_encoder_decoder": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1,),
    "resid_pdrop": (0,),
    "rope_interleaved": (False,),
    "tie_encoder_decoder": (False,),
    "use_mrope": (False,),
    "use_sliding_window": (False,),
}
"""Keys that could change results, with the values (and null) at which they do not. A family that has one reads it."""


MAXIMA: Mapping[str, int] = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 10_000_000,
    "num_attention_heads": 100_000,
    "num_key_value_heads": 100_000,
    "head_dim": 100_000,
    "vocab_size": 10_000_000,
    "max_position_embeddings": 100_000_000,
    "original_max_position_embeddings": 100_000_000,
}
"""Sizes far beyond every published model; a file that has more is broken, and would take the machine's memory to find out."""
MAXIMUM = 2**31 - 1
"""Of every other integer, unless the family says otherwise."""


class _Required(enum.Enum):
    REQUIRED = enum.auto()


REQUIRED = _Required.REQUIRED
"""Default of every reading method: the key must be there."""

_T = TypeVar("_T")
_D = TypeVar("_D")


class ConfigReader:
    """Strict typed reads of one JSON object, which remember what was read.

    A key that is absent or null takes the default; without one it is a ConfigError. A value of another type is a
    ConfigError too: a bool is no int, a float such as 4.0 is no int, an int is a float.
    """

    def __init__(
        self,
        config: Mapping[Str, Any],
        family: Str,
        ignore: Sequence[Str] = (),
        *,
        prefix: Str = "",
        file: Str = "config.json",
    ) -> None:
        """`ignore` are keys the user allows to be skipped (--ignore-config-keys), nested ones with dots.

        `prefix` is the dotted path of this section, with the last dot.
        """
        self.family = family
        self._config = config
        self._prefix = prefix
        self._file = file
        self._ignore = frozenset(ignore)
        self._read: set[Str] = set()
        self._checked: set[Str] = set()
        self._sections: dict[Str, ConfigReader] = {}

    # typed reads

    def int(
        self, key: Str, default: _D | _Required = REQUIRED, *, minimum: Int = 1, maximum: Int | None = None
    ) -> Int | _D:
        """An integer of at least `minimum` (1 unless said: most are sizes) and at most `maximum` (see `MAXIMA`)."""
        most = MAXIMA.get(key, MAXIMUM) if maximum is None else maximum

        def check(value: Any) -> Int | None:
            return value if isinstance(value, Int) and not isinstance(value, Bool) and value >= minimum else None

        found = self._value(key, default, f"an integer of at least {minimum}", check)
        if self.has(key) and isinstance(found, Int) and found > most:
            raise self.error(f"{self.path(key)} is {shown(found)}; {self.family} takes at most {most}")
        return found

    def float(self, key: Str, default: _D | _Required = REQUIRED, *, above: Float = -math.inf) -> Float | _D:
        """A finite number greater than `above`."""

        def check(value: Any) -> Float | None:
            if not isinstance(value, (Int, Float)) or isinstance(value, Bool):
                return None
            try:
                number = Float(value)
            except OverflowError:  # an integer beyond every float
                return None
            return number if math.isfinite(number) and number > above else None

        wanted = "a finite number" if above == -math.inf else f"a finite number above {above:g}"
        return self._value(key, default, wanted, check)

    def bool(self, key: Str, default: _D | _Required = REQUIRED) -> Bool | _D:
        """true or false."""
        return self._value(key, default, "true or false", lambda value: value if isinstance(value, Bool) else None)

    def str(self, key: Str, default: _D | _Required = REQUIRED) -> Str | _D:
        """A string."""
        return self._value(key, default, "a string", lambda value: value if isinstance(value, Str) else None)

    def int_list(self, key: Str, default: _D | _Required = REQUIRED) -> tuple[Int, ...] | _D:
        """A list of integers, of any length and sign."""
        return self._value(key, default, "a list of integers", lambda value: _list_of(value, Int))

    def str_list(self, key: Str, default: _D | _Required = REQUIRED) -> tuple[Str, ...] | _D:
        """A list of strings."""
        return self._value(key, default, "a list of strings", lambda value: _list_of(value, Str))

    def choice(self, key: Str, supported: Sequence[_T], default: _D | _Required = REQUIRED) -> _T | _D:
        """One of the supported values; the error names them all."""
        value = self._raw(key)
        if value is None:
            return self._default(key, default)
        for candidate in supported:
            if _same(value, candidate):
                return candidate
        raise self.unsupported(key, supported)

    def only(self, key: Str, *supported: Any) -> None:
        """Check a key whose feature the family lacks: absent, null, or one of `supported`. Can be ignored by flag."""
        self._checked.add(key)
        value = self._config.get(key)
        if value is None or self.path(key) in self._ignore or any(_same(value, candidate) for candidate in supported):
            return
        raise self.unsupported(key, supported)

    def section(self, key: Str) -> ConfigReader:
        """A nested object that must be there. Its unread keys are reported by this reader's `finish`."""
        section = self.optional_section(key)
        if section is None:
            raise self.error(f"{self.path(key)} is missing; {self.family} needs it")
        return section

    def optional_section(self, key: Str) -> ConfigReader | None:
        """A nested object, or None if it is absent, null or empty."""
        if key in self._sections:
            return self._sections[key]
        value = self._raw(key)
        if value is None or value == {}:
            return None
        if not isinstance(value, Mapping):
            raise self.error(f"{self.path(key)} is {value!r}; {self.family} needs an object")
        section = ConfigReader(value, self.family, tuple(self._ignore), prefix=self.path(key) + ".", file=self._file)
        self._sections[key] = section
        return section

    def no_effect(self, *keys: Str) -> None:
        """Say that these keys, if present, do not change what this family computes."""
        self._checked.update(keys)

    @property
    def mapping(self) -> Mapping[Str, Any]:
        """The object itself. Looking at it does not count as reading."""
        return self._config

    def has(self, key: Str) -> Bool:
        """Whether the key is there and not null. Does not count as reading it."""
        return self._config.get(key) is not None

    # errors

    def path(self, key: Str) -> Str:
        """The key as errors and --ignore-config-keys spell it."""
        return self._prefix + key

    def error(self, message: Str) -> ConfigError:
        """A ConfigError about this file; the caller raises it."""
        return ConfigError(f"{self._file}: {message}")

    def unsupported(self, key: Str, supported: Sequence[Any]) -> ConfigError:
        """The error of a value that the family lacks; the caller raises it."""
        names = ", ".join(shown(value) for value in supported) or "no value of it"
        return self.error(f"{self.path(key)} is {shown(self._config.get(key))}; {self.family} supports {names}")

    def finish(self) -> None:
        """Raise ConfigError naming every key that nobody read and that could matter. Call it last."""
        present, read = self._paths()
        for key in sorted(self._ignore):
            if key not in present:
                raise ConfigError(f"--ignore-config-keys {key}: {self._file} has no such key")
            if key in read:
                raise ConfigError(f"--ignore-config-keys {key}: {self.family} uses this key; it cannot be ignored")
        unknown = self._unknown()
        if unknown:
            flags = " ".join(f"--ignore-config-keys {key}" for key, _ in unknown)
            listed = ", ".join(f"{key} = {shown(value)}" for key, value in unknown)
            what = f"{self.family} does not know {listed}, which may change the results"
            raise self.error(f"{what}; to serve it as if absent, pass {flags}")

    # internals

    def _raw(self, key: Str) -> Any:
        self._read.add(key)
        return self._config.get(key)

    def _default(self, key: Str, default: _D | _Required) -> _D:
        if isinstance(default, _Required):
            raise self.error(f"{self.path(key)} is missing; {self.family} needs it")
        return default

    def _value(self, key: Str, default: _D | _Required, wanted: Str, check: Callable[[Any], _T | None]) -> _T | _D:
        value = self._raw(key)
        if value is None:
            return self._default(key, default)
        checked = check(value)
        if checked is None:
            raise self.error(f"{self.path(key)} is {shown(value)}; {self.family} needs {wanted}")
        return checked

    def _paths(self) -> tuple[set[Str], set[Str]]:
        """Keys that are there, and keys whose value was used; dotted, nested ones included."""
        present, read = {self.path(key) for key in self._config}, {self.path(key) for key in self._read}
        for section in self._sections.values():
            nested_present, nested_read = section._paths()
            present |= nested_present
            read |= nested_read
        return present, read

    def _unknown(self) -> list[tuple[Str, Any]]:
        found = [
            (self.path(key), value)
            for key, value in sorted(self._config.items())
            if key not in self._read | self._checked
            and self.path(key) not in self._ignore
            and not self._harmless(key, value)
        ]
        for section in self._sections.values():
            found.extend(section._unknown())
        return found

    def _harmless(self, key: Str, value: Any) -> Bool:
        if key in NO_EFFECT or value is None or value in ("", [], {}):
            return True
        if key == "layer_types":
            return isinstance(value, list) and all(kind == "full_attention" for kind in value)
        if key in ("sliding_window", "max_window_layers"):  # Qwen's way to write them down without using them
            return self._config.get("use_sliding_window") is False
        return any(_same(value, off) for off in OFF_VALUES.get(key, ()))


def _same(value: Any, other: Any) -> bool:
    """Equality for which true is not 1."""
    return isinstance(value, bool) is isinstance(other, bool) and bool(value == other)


def _list_of(value: Any, kind: type[_T]) -> tuple[_T, ...] | None:
    if not isinstance(value, list):
        return None
    if any(not isinstance(item, kind) or isinstance(item, bool) for item in value):
        return None
    return tuple(value)


def shown(value: Any) -> str:
    """A value as errors print it: JSON's names for null and booleans, long ones cut."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
