"""The exceptions that a user may see: one tree, one line each.

Every message says what was given, what was wanted and what to do. The command line prints the message on stderr and exits
with 2; a Python caller catches `LongstrawError`, or the built-in class that fits.
"""


class LongstrawError(Exception):
    """Root of every error this package raises on purpose."""


class InputError(LongstrawError, ValueError):
    """The input is invalid: a value, a file or a combination that no version of this package could accept."""


class UnsupportedError(LongstrawError, NotImplementedError):
    """The input is valid, but this version does not support it."""
