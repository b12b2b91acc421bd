"""The command line: ``mxcompile …``, same as ``python -m mxcompile …``. Each command is a module."""

from mxcompile.cli.main import main as main
