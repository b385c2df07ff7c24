"""Build in a temporary folder: from ``build/``, deleted modules of an earlier build would reach a later wheel."""

from tempfile import TemporaryDirectory

from setuptools import setup

with TemporaryDirectory() as folder:
    setup(options={"build": {"build_base": folder}})
