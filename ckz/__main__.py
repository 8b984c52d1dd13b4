"""``python -m ckz`` is the ``ckz`` command."""

from ckz.cli import main

if __name__ == "__main__":
    main()
