"""`python -m speclight.train fit ...`: the commands of `speclight`."""

import sys

from ..infer.cli import main

if __name__ == "__main__":
    sys.exit(main())
