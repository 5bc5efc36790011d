"""What `explainers` offers is imported at first use."""

import pytest

import explainers
from explainers import evaluation


def test_every_public_name_is_there_and_listed_and_others_are_refused():
    assert set(explainers.__all__) <= set(dir(explainers))
    for package in (explainers, evaluation):
        assert all(getattr(package, name) is not None for name in package.__all__)
    with pytest.raises(AttributeError, match="explian"):
        explainers.explian  # noqa: B018
