"""Which addresses are public."""

import pytest

from sandboxes.egress.addresses import is_public


@pytest.mark.parametrize("address", ["1.1.1.1", "151.101.0.223", "2606:4700:4700::1111", "2a04:4e42::223"])
def test_public_addresses_are_public(address: str) -> None:
    assert is_public(address)


@pytest.mark.parametrize(
    "address",
    [
        "", "example.org", "1.1.1.1:80", "2130706433", "0x7f.1", "127.1", "10.1.2.3", "100.64.0.1", "127.255.0.1",
        "168.63.129.16", "169.254.169.254", "172.31.0.1", "192.0.0.192", "192.88.99.1", "192.168.0.1", "198.19.0.1",
        "224.0.0.1", "239.1.1.1", "240.0.0.1", "255.255.255.255",
        "::", "::1", "::1.1.1.1", "::ffff:1.1.1.1", "64:ff9b::101:101", "64:ff9b:1::1", "100::1", "2001::1",
        "2001:db8::1", "2002:101:101::", "3fff::1", "fc00::1", "fd00:ec2::254", "fe80::1", "fec0::1", "ff02::1",
        "2606:4700::1%eth0",
    ],
)  # fmt: skip
def test_special_addresses_are_not(address: str) -> None:
    assert not is_public(address)
