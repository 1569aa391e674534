"""`python -m tests.reliability.few_descriptors 128 ...`: `aengine serve` with no more descriptors than that."""

from __future__ import annotations

import resource
import sys

from aengine.cli import main

if __name__ == "__main__":
    most = int(sys.argv[1])
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    sys.exit(main(["serve", *sys.argv[2:]]))
