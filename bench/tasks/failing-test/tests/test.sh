#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
cd /work/ledger && git diff --quiet HEAD -- test_ledger.py || { echo "the test was changed"; exit 1; }
/usr/bin/python3 -B -m unittest -q 2>&1 | tail -n 1 | grep -q OK || { echo "tests fail"; exit 1; }
echo "3 passed"
