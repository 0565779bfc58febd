"""A member that takes nobody for dead because the machine is busy: `python -m tests.proxy.cluster.patient serve ...`.

For tests in which no lease has to end, and no link has to be found silent.
"""

from proxy.cluster.link import connection as link
from proxy.cluster.postgres import connection as database
from proxy.cluster.postgres import joining

# Before the modules that import these values.
joining.LEASE_S = 60.0
database.PATIENCE_S = 30.0
link.SILENT_S = 60.0

if __name__ == "__main__":
    from proxy.cli.main import main

    main()
