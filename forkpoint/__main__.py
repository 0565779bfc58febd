"""`python -m forkpoint` and the `forkpoint` command."""

from proxy.cli.main import main

if __name__ == "__main__":
    main()
