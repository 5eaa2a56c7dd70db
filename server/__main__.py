"""`python -m server` is `sluice`."""

import sys

from server.cli import main

sys.exit(main())
