"""A member whose sandboxes reach a host of the test: `python -m tests.proxy.cluster.outside serve ...`.

Its egress proxy leads all names to the port in the file `origin-port` of the driver's directory.
"""

from sandboxes.egress.gateway import EgressGateway

defaults = EgressGateway.__init__.__kwdefaults__
assert defaults is not None
defaults["module"] = "tests.sandboxes.egress.origin"

if __name__ == "__main__":
    from proxy.cli.main import main

    main()
