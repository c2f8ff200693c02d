"""``python -m loramux`` is the ``loramux`` command."""

from loramux.cli.main import main

if __name__ == "__main__":
    main()
