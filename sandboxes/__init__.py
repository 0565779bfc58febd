"""Sandboxes run tool calls: the driver contract, its values, and one package for each driver.

Process: the proxy.
May import: nothing.
"""

import os.path

IMPORT_ROOT = os.path.abspath(__file__).rsplit(os.sep, __name__.count(".") + 2)[0]  # noqa: PTH100 - pid 1 loads no pathlib
"""The directory that a child process needs on `sys.path` to import this package by its present name. In a checkout the
package is `sandboxes`; in an installed wheel it is `forkpoint.sandboxes`."""
