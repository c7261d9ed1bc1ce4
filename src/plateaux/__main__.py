"""`python -m plateaux` is the command line."""

from plateaux.cli import main

if __name__ == "__main__":
    main()
