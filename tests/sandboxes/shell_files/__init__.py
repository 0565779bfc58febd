"""Tests of the copies of a bash."""
