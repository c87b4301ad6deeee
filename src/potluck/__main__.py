"""Entry point of `python -m potluck`."""

from potluck.cli.app import main

if __name__ == "__main__":
    main()
