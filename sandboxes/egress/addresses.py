"""Which addresses the egress proxy connects to (pure): the lists of IANA's special-purpose registries (RFC 6890).

Two are added: what tunnels to an IPv4 address in an IPv6 address, and the address at which Azure serves its machines.
"""

from ipaddress import IPv6Address, ip_address, ip_network

_NOT_PUBLIC = tuple(map(ip_network, (
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "168.63.129.16/32", "169.254.0.0/16", "172.16.0.0/12",
    "192.0.0.0/24", "192.0.2.0/24", "192.31.196.0/24", "192.52.193.0/24", "192.88.99.0/24", "192.168.0.0/16",
    "192.175.48.0/24", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24", "224.0.0.0/3",
    "2001::/23", "2001:db8::/32", "2002::/16", "2620:4f:8000::/48", "3fff::/20",
)))  # fmt: skip
_PUBLIC_IPV6 = ip_network("2000::/3")
"""The only part of IPv6 that is assigned for global unicast. Mapped IPv4, NAT64, ULA and link-local are outside of it.
"""


def is_public(text: str) -> bool:
    """Return whether a text is the address of a public host: not of this machine, its networks or its provider."""
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if isinstance(address, IPv6Address) and (address.scope_id is not None or address not in _PUBLIC_IPV6):
        return False
    return not any(address.version == network.version and address in network for network in _NOT_PUBLIC)
