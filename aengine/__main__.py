"""`python -m aengine`."""

from aengine.cli import main

if __name__ == "__main__":  # not when a child process imports it
    raise SystemExit(main())
