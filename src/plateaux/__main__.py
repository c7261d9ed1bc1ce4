"""`python -m plateaux` is the command line."""

import os
import signal
import sys

if not sys.flags.safe_path and sys.path[:1] in ([""], [os.getcwd()]):
    # `python -m` puts the working folder on the path; an untrusted recipe in that folder must not find code there.
    del sys.path[0]

_INTERRUPT = signal.getsignal(signal.SIGINT)
if _INTERRUPT is signal.default_int_handler:  # Ctrl-C during the imports below ends the process without a traceback
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from plateaux.cli.main import main  # noqa: E402

signal.signal(signal.SIGINT, _INTERRUPT)

if __name__ == "__main__":
    main()
