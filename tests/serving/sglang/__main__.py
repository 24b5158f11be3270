"""One real engine. The argument is the number of a socket: see `tests.serving.sglang.engines`."""

import sys

from tests.serving.sglang.host import main

if __name__ == "__main__":  # SGLang's own processes import this, too
    main(int(sys.argv[1]))
