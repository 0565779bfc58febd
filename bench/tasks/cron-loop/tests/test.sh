#!/bin/bash
# Harbor reads the reward from a file.
trap 'code=$?; [ ! -d /logs/verifier ] || echo $((code == 0)) > /logs/verifier/reward.txt' EXIT
[ "$(wc -l < /work/ticks)" = 5 ] && [ -e /work/finished ] || { echo "did not run"; exit 1; }
echo "1 passed"
