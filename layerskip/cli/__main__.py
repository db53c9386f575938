"""`python -m layerskip.cli`, the same as `layerskip`."""

from __future__ import annotations

import sys

from layerskip.cli import main

if __name__ == "__main__":
    sys.exit(main())
