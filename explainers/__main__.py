"""`python -m explainers` is the command `explainers`."""

import sys

from explainers.app.command import main

if __name__ == "__main__":
    sys.exit(main())
