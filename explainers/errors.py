"""The exception class for errors that the user can fix."""


class InputError(ValueError):
    """Bad input. The message is one line that says what was expected, what came, and what to do.

    The entry points print the message without a traceback. Every other exception is a bug of this project or of a
    library, and is printed with its traceback.
    """


def check_positive(**numbers: float) -> None:
    """Raise an InputError that names the first of these settings that is not above 0.

    >>> check_positive(masks=4000, cells=7)
    """
    for name, number in numbers.items():
        if not number > 0:
            raise InputError(f"expected {name} above 0, got {name}={number}")
