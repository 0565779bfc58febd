"""Tests of `sandboxes.egress`."""
