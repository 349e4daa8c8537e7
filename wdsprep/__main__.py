"""What the console script and `python -m wdsprep` run: Ctrl-C is one line, even this early."""

import sys


def main() -> int:
    try:
        from wdsprep.cli import main as command
    except KeyboardInterrupt:  # nothing has begun
        sys.stderr.write("\rwdsprep: interrupted: run the same command to go on from here\n")
        return 130
    return command()


if __name__ == "__main__":
    sys.exit(main())
