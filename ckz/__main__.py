"""The ``ckz`` command, and ``python -m ckz``: ends quietly on ^C, even while it is being loaded."""

import signal


def main() -> None:
    """Load the command line and run it."""
    # Until the command catches signals itself, this one just ends the process. Who ignores it, as
    # nohup does, is left alone.
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    from ckz.cli import main as run

    run()


if __name__ == "__main__":
    main()
