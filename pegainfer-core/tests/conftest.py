"""Triton's interpreter runs our kernels on CPU; it has to be chosen before anything imports triton (transformers does)."""

import os

import pytest


def pytest_configure(config: pytest.Config) -> None:
    """`pytest -m gpu` wants compiled kernels, every other run the interpreter."""
    if config.getoption("markexpr") != "gpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
