"""Refusals as rows: a call that cannot work, and the setting, the file or the model that its error names."""

import inspect

import pytest

from explainers.errors import InputError


def check_refused(request, told, call):
    """A call with the fixtures that its parameters name raises one line for users, which names what is wrong."""
    parameters = inspect.signature(call).parameters.values()
    fixtures = {each.name: request.getfixturevalue(each.name) for each in parameters if each.default is each.empty}
    with pytest.raises(InputError) as caught:
        call(**fixtures)
    message = str(caught.value)
    assert (told in caught.value.settings or told in message) and "\n" not in message
