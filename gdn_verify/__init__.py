"""Convolution, SiLU and L2 norm of Gated DeltaNet layers for verifying speculative tokens.

Importing this package loads the operators `torch.ops.gdn.*`. Without torch, `gdn_verify._core`
(the C core on NumPy arrays) and `gdn_verify.reference` work all the same.
"""

from importlib import metadata
from importlib.util import find_spec
from typing import Any

from .errors import GdnVerifyError

__all__ = [
    "GdnVerifyError",
    "Supported",
    "__version__",
    "autotune",
    "call_shapes",
    "history_windows",
    "load_tuned",
    "supported",
    "tune",
    "verify_conv",
]

try:
    __version__ = metadata.version("gdn-verify")
except metadata.PackageNotFoundError:  # a checkout on the path that was never installed
    __version__ = "0+unknown"

try:
    from .ops import history_windows, verify_conv
    from .support import Supported, supported
    from .tuned import load_tuned

    from .autotune import autotune, call_shapes, tune  # isort: skip  (the function hides the module)
except ImportError as error:  # no torch, or no library for it: say so when it is asked for
    _reason = str(error)
    _missing = set(__all__)
    if find_spec("gdn_verify._core") is None:
        _missing.add("_core")
        _reason = (
            f"gdn_verify in {__path__[0]} is not built for this Python: where another one is"
            " installed, run from another folder; or run `pip install --no-build-isolation -e .`"
        )

    def __getattr__(name: str) -> Any:
        if name in _missing:
            raise ImportError(_reason)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
