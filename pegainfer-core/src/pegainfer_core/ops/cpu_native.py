"""C kernels for a CPU: compiled once per machine by the C compiler that is there, and called with the tensors' memory.

Owns compiling, keeping and loading `cpu_kernels.c`, and what it may be given. Where there is no compiler, or what it makes does not
load, `kernels` is None and operations take their torch ways.

Shape suffixes: T tokens, R rows, E hidden size, F intermediate size, N all heads, H query heads, K key/value heads, D head dim,
P pages, S page size.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import os
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from pegainfer_core.kernel_cache import c_compiler, triton_folder

log = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("cpu_kernels.c")
# not -ffast-math: NaN and infinity must come out as what they are
REORDER = ("-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fassociative-math", "-fno-signed-zeros")
FLAGS = ("-O3", "-march=native", *REORDER, "-shared", "-fPIC")
TYPES: dict[torch.dtype, tuple[str, ...]] = {torch.float32: (), torch.bfloat16: ("-DBFLOAT16",)}
MOST_ROWS = 64
"""With more, torch's threads are worth their waking."""
MOST_CONTEXT = 1024
"""Tokens of all rows' contexts together; likewise, for attention."""

ARGUMENTS: dict[str, type[ctypes._SimpleCData[Any]]] = {"p": ctypes.c_void_p, "i": ctypes.c_int64, "f": ctypes.c_float}


class Kernels:
    """The library for one type. Callers check shapes; see `kernels`."""

    def __init__(self, library: ctypes.PyDLL) -> None:
        self._rms_norm = _typed(library, "rms_norm", "ppp iii f")
        self._silu_mul = _typed(library, "silu_mul", "pp ii")
        self._rotate_and_store = _typed(library, "rotate_and_store", "ppp f ppppp iiii")
        self._draw = _typed(library, "draw", "ppp ii")
        self._attend = _typed(library, "attend", "p i ppp i ppp iiiii f")

    def rms_norm(self, x_TE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
        """See ops/norm.py."""
        tokens, size = x_TE.shape
        out_TE = torch.empty_like(x_TE, memory_format=torch.contiguous_format)
        self._rms_norm(x_TE.data_ptr(), weight_E.data_ptr(), out_TE.data_ptr(), tokens, size, x_TE.stride(0), eps)
        return out_TE

    def silu_mul(self, gate_up_T2F: Tensor) -> Tensor:
        """See ops/activation.py."""
        tokens, size = gate_up_T2F.shape[0], gate_up_T2F.shape[1] // 2
        out_TF = gate_up_T2F.new_empty(tokens, size)
        self._silu_mul(gate_up_T2F.data_ptr(), out_TF.data_ptr(), tokens, size)
        return out_TF

    def rotate_and_store(
        self,
        qkv_TND: Tensor,
        norms: tuple[Tensor, Tensor, float] | None,
        cos_sin_T1D: tuple[Tensor, Tensor],
        caches_PSKD: tuple[Tensor, Tensor],
        write_index_T: Tensor,
    ) -> Tensor:
        """See ops/heads.py; rotates in place."""
        tokens, all_heads, size = qkv_TND.shape
        kv_heads = caches_PSKD[0].shape[2]
        heads = all_heads - 2 * kv_heads
        weights = (None, None, 0.0) if norms is None else (norms[0].data_ptr(), norms[1].data_ptr(), norms[2])
        cos_T1D, sin_T1D = cos_sin_T1D
        tables = (cos_T1D.data_ptr(), sin_T1D.data_ptr())
        pools = (caches_PSKD[0].data_ptr(), caches_PSKD[1].data_ptr(), write_index_T.data_ptr())
        self._rotate_and_store(qkv_TND.data_ptr(), *weights, *tables, *pools, tokens, heads, kv_heads, size)
        return qkv_TND.narrow(1, 0, heads)

    def draw(self, scaled_RV: Tensor, key_R: Tensor) -> Tensor:
        """See sampling.sample; logits float32 and dense."""
        ids_R = torch.empty_like(key_R)
        self._draw(scaled_RV.data_ptr(), key_R.data_ptr(), ids_R.data_ptr(), *scaled_RV.shape)
        return ids_R

    def attend(
        self,
        q_RHD: Tensor,
        caches_PSKD: tuple[Tensor, Tensor],
        page_table_RP: Tensor,
        context_lens_R: Tensor,
        longest: int,
        scale: float,
    ) -> Tensor:
        """One query a row. Returns [R, H, D]."""
        rows, heads, size = q_RHD.shape
        keys, values = caches_PSKD
        _, page_size, kv_heads, _ = keys.shape
        out_RHD = q_RHD.new_empty(rows, heads, size)
        scratch = torch.empty(heads // kv_heads * (longest + size), dtype=torch.float32)
        self._attend(
            *(q_RHD.data_ptr(), q_RHD.stride(0), keys.data_ptr(), values.data_ptr()),
            *(page_table_RP.data_ptr(), page_table_RP.stride(0), context_lens_R.data_ptr()),
            *(scratch.data_ptr(), out_RHD.data_ptr(), rows, heads, kv_heads, size, page_size, scale),
        )
        return out_RHD


def _typed(library: ctypes.PyDLL, name: str, arguments: str) -> Callable[..., None]:
    """A function without result; `arguments` has a letter of ARGUMENTS for each."""
    function = library[name]
    function.argtypes = [ARGUMENTS[letter] for letter in arguments.replace(" ", "")]
    function.restype = None
    return function


@functools.cache
def kernels(dtype: torch.dtype) -> Kernels | None:
    """The kernels for a type, compiled now if need be (a fraction of a second); None where there are none."""
    compiler = c_compiler()
    if dtype not in TYPES or compiler is None:
        return None
    try:
        return Kernels(ctypes.PyDLL(str(_library(compiler, (*FLAGS, *TYPES[dtype])))))
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("no C kernels for this CPU, torch does it all: %s", error)
        return None


def _library(compiler: str, flags: tuple[str, ...]) -> Path:
    """The shared library, from the cache or made. One folder may serve several machines."""
    key = hashlib.blake2b(repr((SOURCE.read_bytes(), compiler, flags, _cpu())).encode(), digest_size=16).hexdigest()
    path = triton_folder().parent / "cpu" / f"{key}.so"
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *flags, str(SOURCE), "-o", str(made), "-lm"]
            subprocess.run(command, check=True, capture_output=True, timeout=60)
            os.replace(made, path)
    return path


def _cpu() -> str:
    """What -march=native means here."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))
