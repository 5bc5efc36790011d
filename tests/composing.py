"""Makes Hydra faster if many configs are composed in one process: what it reads and merges is kept.

Overrides of values (`trainer.max_epochs=1`) change neither which files a config is made of nor what their merge gives:
Hydra applies them to the merged config. So both are computed once for all configs with the same chosen groups.
OmegaConf parses an interpolation (`${trainer.devices}`) whenever it is read; here, once.
"""

import pickle
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from unittest.mock import patch

from hydra._internal import config_loader_impl
from hydra._internal.defaults_list import Overrides, create_defaults_list
from omegaconf import OmegaConf, _utils, base

ConfigLoader = config_loader_impl.ConfigLoaderImpl
compose_files = ConfigLoader._compose_config_from_defaults_list
lists, merged = {}, {}
base.parse = _utils.parse = cache(base.parse)  # what resolves a tree does not change it


@contextmanager
def remembering():
    """Inside, `hydra.compose` keeps what it reads and merges for the next call."""
    with ExitStack() as stack:
        stack.enter_context(patch.object(OmegaConf, "load", load))
        stack.enter_context(patch.object(config_loader_impl, "create_defaults_list", list_files))
        stack.enter_context(patch.object(ConfigLoader, "_compose_config_from_defaults_list", merge_files))
        yield


def load(file):
    """`OmegaConf.load`, for files that were read before: every config begins with the same ones."""
    return pickle.loads(parsed(file.read()))


@cache
def parsed(text):
    return pickle.dumps(OmegaConf.create(text))  # several times faster to copy than a DictConfig


def list_files(repo, config_name, overrides_list, **options):
    """Hydra's list of the files of a config, which depends on the overrides of groups alone."""
    values = Overrides(repo=repo, overrides_list=overrides_list).config_overrides
    groups = [override.input_line for override in overrides_list if override not in values]
    key = str((folders(repo), config_name, groups, options))
    if key not in lists:
        lists[key] = create_defaults_list(repo, config_name, overrides_list, **options)
    return replace(lists[key], config_overrides=values)


def merge_files(loader, defaults, repo):
    """What Hydra merges of these files."""
    key = str((folders(repo), [vars(default) for default in defaults]))
    if key not in merged:
        merged[key] = pickle.dumps(compose_files(loader, defaults, repo))
    return pickle.loads(merged[key])


def folders(repo):
    return [source.path for source in repo.get_sources()]
