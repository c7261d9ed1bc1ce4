"""`python -m plateaux` is the command line."""

import os
import sys

if not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()]):
    # `python -m` puts the working folder on the path; an untrusted recipe in that folder must not find code there.
    del sys.path[0]

from plateaux.cli.main import main

if __name__ == "__main__":
    main()
