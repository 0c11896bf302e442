"""setuptools' build backend, plus the MPI and the libclang from PyPI where the machine has none."""

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

import toolchain


def get_requires_for_build_wheel(config_settings=None):
    return [*toolchain.requirements(), *build_meta.get_requires_for_build_wheel(config_settings)]


def get_requires_for_build_editable(config_settings=None):
    return [*toolchain.requirements(), *build_meta.get_requires_for_build_editable(config_settings)]
