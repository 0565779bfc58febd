"""A member that takes nobody for dead because the machine is busy: `python -m tests.proxy.cluster.patient serve ...`.

For tests in which no link has to be found silent, and no lease has to end unless `TESTS_LEASE_S` says when. Calls wait
for the end of a lease.
"""

import os

from proxy.cluster.postgres import connection as database
from proxy.cluster.postgres import joining

# Before the modules that import these values.
joining.LEASE_S = float(os.environ.get("TESTS_LEASE_S", "60"))
database.PATIENCE_S = 30.0

if __name__ == "__main__":
    from proxy.cli.main import main
    from proxy.cluster import forwarding
    from proxy.cluster.link import passing
    from proxy.tree import polling

    forwarding.PATIENCE_S = 60.0
    passing.SILENT_S = 60.0
    # Answers beside live processes hold, however long the machine takes from one call to the next.
    polling.AGE_TOLERANCE_S = 600.0
    main()
