"""The one class of errors that a user can mend."""


class InputError(ValueError):
    """Bad input: one line that says what was expected, what came, and what to do.

    The entry points print it without a traceback. All other exceptions are bugs, of this project or of a library, and
    keep theirs.
    """
