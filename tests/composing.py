"""Its import makes Hydra faster, in this process and its forks: what it reads and merges is kept.

Overrides of values (`trainer.max_epochs=1`) change neither which files a config is made of nor what their merge gives:
Hydra applies them to the merged config. So both are computed once for all configs with the same chosen groups, and
each file and each override is parsed once. What is kept is pickled: that copies a DictConfig several times faster.
OmegaConf parses an interpolation (`${trainer.devices}`) whenever it is read; here, once. A setting may follow from a
model that is built without storage: it draws no weights, for which PyTorch would run hundreds of functions of Python.
"""

import pickle
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from functools import cache

from hydra._internal import config_loader_impl, defaults_list
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import _utils, base
from timm.layers import weight_init

ConfigLoader = config_loader_impl.ConfigLoaderImpl
load_file, embed_file = ConfigRepository.load_config, ConfigLoader._load_single_config
compose_files = ConfigLoader._compose_config_from_defaults_list
parse_rule, map_choices = OverridesParser.parse_rule, defaults_list._create_interpolation_map
draw_weights = weight_init._trunc_normal_
lists, kept = {}, {}
base.parse = _utils.parse = cache(base.parse)  # what resolves a tree does not change it


@cache
def parsed(text, rule):
    """What Hydra reads in an override."""
    return parse_rule(OverridesParser.create(), text, rule)


def share_files(caching, repo):
    """`CachingConfigRepository.__init__`, without a deep copy of all sources; a search path replaces their list."""
    caching.delegate, caching.cache = copy(repo), {}


def choices_to_interpolate(overrides, defaults, self_added):
    """What the files that a list of defaults interpolates are chosen by; most lists interpolate none."""
    if any(default.is_interpolation() for default in defaults):
        return map_choices(overrides, defaults, self_added)
    return None


def list_files(repo, config_name, overrides_list, **options):
    """Hydra's list of the files of a config, which depends on the overrides of groups alone."""
    values = defaults_list.Overrides(repo=repo, overrides_list=overrides_list).config_overrides
    groups = [override.input_line for override in overrides_list if override not in values]
    key = str((folders(repo), config_name, groups, options))
    if key not in lists:
        lists[key] = defaults_list.create_defaults_list(repo, config_name, overrides_list, **options)
    return replace(lists[key], config_overrides=values)


def merge_files(loader, defaults, repo):
    """What Hydra merges of these files."""
    return keep(compose_files, (folders(repo), [vars(default) for default in defaults]), loader, defaults, repo)


def place_file(loader, default, repo):
    """A file's values at their place in a config."""
    return keep(embed_file, (folders(repo), vars(default)), loader, default, repo)


def read_file(repo, config_path):
    """A file with its list of defaults."""
    return keep(load_file, (folders(repo), config_path), repo, config_path)


def keep(work, about, *args):
    """What `work` gives for these arguments, of which `about` says what matters."""
    key = f"{work.__name__} {about}"
    if key not in kept:
        result = work(*args)
        try:
            kept[key] = pickle.dumps(result)
        except pickle.PicklingError:  # submitit has loaded a plugin of Hydra, whose schema it is, a second time
            return result
    return pickle.loads(kept[key])


def folders(repo):
    return [source.path for source in repo.get_sources()]


def draw_where_stored(weight, *options):
    """timm's `_trunc_normal_`, but for weights without storage."""
    return weight if weight.is_meta else draw_weights(weight, *options)


FASTER = (
    (OverridesParser, "parse_rule", lambda _, text, rule: parsed(text, rule)),
    (CachingConfigRepository, "__init__", share_files),
    (ConfigRepository, "load_config", read_file),
    (ConfigLoader, "_load_single_config", place_file),
    (ConfigLoader, "_compose_config_from_defaults_list", merge_files),
    (config_loader_impl, "create_defaults_list", list_files),
    (defaults_list, "_create_interpolation_map", choices_to_interpolate),
    (weight_init, "_trunc_normal_", draw_where_stored),
)
OWN = [(place, name, getattr(place, name)) for place, name, _ in FASTER]


def patch(attributes):
    for place, name, value in attributes:
        setattr(place, name, value)


@contextmanager
def forgetting():
    """Inside, Hydra composes as it does for users."""
    patch(OWN)
    yield
    patch(FASTER)


patch(FASTER)
