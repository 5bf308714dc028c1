"""The exception of this package, without torch."""


class GdnVerifyError(ValueError, RuntimeError):
    """A call that is refused: an argument is wrong, or this build or device cannot do it.

    Nothing was written, so that a caller may go another way. The message is one sentence that names
    the argument. It is a ValueError, and a RuntimeError as what `torch.ops.gdn.*` raise.
    """
