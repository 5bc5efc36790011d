"""The exception class for errors that the user can fix."""


class InputError(ValueError):
    """Bad input. The message is one line that says what was expected, what came, and what to do.

    The entry points print the message without a traceback. Every other exception is a bug of this project or of a
    library, and is printed with its traceback.
    """
