"""``python -m mxcompile``."""

import sys

from mxcompile.cli import main

sys.exit(main())
