#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
[ "$(ls /opt/parts | wc -l)" = 800 ] && [ "$(cat /opt/parts/400.out)" = "400 built" ] || { echo "not installed"; exit 1; }
echo "2 passed"
