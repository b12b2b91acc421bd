"""The command line: ``mxcompile …``, same as ``python -m mxcompile …``. One module a command."""

from mxcompile.cli.main import main

__all__ = ["main"]
