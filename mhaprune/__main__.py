"""`python -m mhaprune` is `mhaprune`."""

from mhaprune.cli import main

if __name__ == "__main__":
    main()
