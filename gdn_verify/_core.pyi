"""The compiled module of csrc/pybind_core.cpp, for type checkers."""

from typing import Any

def __getattr__(name: str) -> Any: ...
