"""Everything ckz raises on purpose, with the exit code of each.

``CkzError`` is the root; each subclass carries the exit code the command line ends with.
A message is one line: file, tensor, chunk, what is wrong, what to do about it.
"""


class CkzError(Exception):
    """Failed: input not supported, target exists, or the system refused."""

    exit_code = 1


class UsageError(CkzError):
    """Wrong usage: options that contradict each other or do not exist."""

    exit_code = 2


class UnsupportedError(CkzError):
    """Not a checkpoint, or a format version or codec this ckz does not know."""


class ExistsError(CkzError):
    """The target exists and ``--force`` was not given."""


class ChangedError(CkzError):
    """The source changed while it was read."""


class IncompleteError(CkzError):
    """The checkpoint lacks files or tensors that it names."""


class CorruptError(CkzError):
    """Damaged data: a checksum, length, offset or count does not hold."""

    exit_code = 4


class BoundError(CkzError):
    """An error bound did not hold."""

    exit_code = 4


class BaseError(CkzError):
    """The base snapshot is missing or is not the one recorded."""

    exit_code = 5


class LockedError(CkzError):
    """Another process holds the store."""

    exit_code = 11
