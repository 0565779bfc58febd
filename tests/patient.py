"""A proxy whose rollouts may be slow: `python -m tests.patient serve ...`.

For tests that expect hits beside live processes, on a machine that may be busy for seconds between two calls.
"""

from proxy.tree import polling

if __name__ == "__main__":
    from proxy.cli.main import main

    polling.AGE_TOLERANCE_S = 600.0
    main()
