"""`python -m anybit` is the command line."""

from anybit.cli import main

if __name__ == "__main__":
    main()
