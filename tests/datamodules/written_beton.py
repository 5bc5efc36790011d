"""Images of three classes and the .beton file of them, which tests of FFCV only read."""

import pytest


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    from test_ffcv import draw

    return draw(tmp_path_factory.mktemp("images"))


@pytest.fixture(scope="session")
def beton(folder):
    from test_ffcv import COUNT, SHOWN

    from datamodules.write_beton import write_beton

    path = folder.parent / "whole.beton"
    assert write_beton(folder, path, SHOWN, workers=2) == COUNT
    return path


@pytest.fixture
def interpreted():
    """The same code without Numba, which would compile each loader again, for longer than it loads these images."""
    from ffcv.pipeline.compiler import Compiler

    Compiler.set_enabled(False)
    yield
    Compiler.set_enabled(True)
